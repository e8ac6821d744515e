//! Plans without a GPU: what they launch, on three kinds of GPUs, and that no request makes one panic.
use proptest::prelude::*;
use serde_json::{Value, json};
use sieve_capi::Plan;
use std::fs;
use std::panic::catch_unwind;
use std::path::Path;

const GPUS: [(&str, [u32; 2], usize, usize); 3] = [
    ("sm_80", [8, 0], 108, 163 << 10),
    ("sm_89", [8, 9], 128, 99 << 10),
    ("sm_90a", [9, 0], 132, 227 << 10),
];

fn tensor(name: &str, shape: &[usize], dtype: &str) -> Value {
    json!({ "name": name, "shape": shape, "dtype": dtype })
}

/// Each op as a call, behind it the names of its tensors in order; `@` says of which size a tensor is where a name has
/// several.
const REQUESTS: &str = r#"
    {"attention_forward": {"scale": 0.1}} q k v doc_start
    {"attention_forward": {"scale": 0.1, "window": 99, "only_o": true}} q@80 k@80 v@80 doc_start
    {"attention_backward": {"scale": 0.1}} q k v doc_start doc_end o lse d_o
    {"attention_backward": {"scale": 0.1, "fixed_order": true}} q@64 k@64 v@64 doc_start doc_end o@64 lse d_o@64
    {"dma_scores": {"slopes": [0.5, 0.25]}} v w_dt a doc_start
    {"dma_scores_backward": {}} v w_dt a x dz
    {"dma_select": {"keep": 500, "local": 60}} rank doc_start doc_end
    {"dma_select": {"keep": 5000}} rank doc_start doc_end
    {"dma_attention_forward": {"scale": 0.1}} q k v bias list list_len tile_window
    {"dma_attention_backward": {"scale": 0.1}} q k v bias list list_len tile_window o lse d_o
    {"nsa_mean_pool": {"blocks": [32, 16, 64, 16]}} k v doc_start doc_end
    {"nsa_mean_pool_backward": {"blocks": [32, 16, 64, 16]}} k doc_start doc_end d_compressed
    {"nsa_compressed_forward": {"scale": 0.1, "blocks": [32, 16, 64, 16]}} q compressed doc_start doc_end
    {"nsa_compressed_backward": {"scale": 0.1, "blocks": [32, 16, 64, 16]}} q compressed doc_start doc_end o lse d_o
    {"nsa_selected_forward": {"scale": 0.1, "blocks": [32, 16, 64, 16]}} q k v block_indices doc_start doc_end
    {"nsa_selected_backward": {"scale": 0.1, "blocks": [32, 16, 64, 16]}} q k v block_indices doc_start
        doc_end o lse d_o
    {"nsa_gates_backward": {}} compressed@branch selected window logits gate_bias d_o
    {"choose_blocks": {"scale": 0.1, "blocks": [32, 16, 64, 16], "rule": "largest_probability", "first": true,
        "local": 1}} q k doc_start doc_end
    {"choose_blocks": {"scale": 0.1, "blocks": [64, 64, 64, 4], "rule": "mean_key", "local": 1}} q k doc_start doc_end
    {"choose_blocks": {"scale": 0.1, "blocks": [1, 1, 64, 4], "rule": "largest_score", "local": 1}}
        q@index k@index doc_start doc_end
    {"chosen_forward": {"scale": 0.1, "blocks": [32, 16, 64, 16], "rule": "largest_probability", "first": true,
        "local": 1}} q k v doc_start doc_end
    {"chosen_forward": {"scale": 0.1, "blocks": [1, 1, 64, 4], "rule": "largest_score", "local": 1, "only_o": true}}
        q k v index_q index_k doc_start doc_end
    {"nsa_forward": {"scale": 0.1, "blocks": [32, 16, 64, 16], "window": 512, "only_o": true}}
        q k v compressed logits gate_bias doc_start doc_end
    {"nsa_forward": {"scale": 0.1, "blocks": [32, 16, 64, 16], "window": 512}}
        q k v compressed logits gate_bias doc_start doc_end
    {"dma_forward": {"scale": 0.1, "keep": 500, "local": 60, "only_o": true}} q k v rank bias doc_start doc_end
    {"dma_forward": {"scale": 0.1, "keep": 500, "local": 60}} q k v rank bias doc_start doc_end
    {"dma_forward": {"scale": 0.1, "keep": 5000}} q k v rank bias doc_start doc_end
    {"block_sparse": {"scale": 0.1, "block": [128, 128]}} q k v words
    {"attention_decode": {"scale": 0.1}} q@token k@token v@token k_cache v_cache length
    {"cached_decode": {"scale": 0.1, "window": 99}} q@token k_cache v_cache length
    {"cached_decode": {"scale": 0.1, "block": 64}} q@token k_cache v_cache length chosen
    {"dma_decode": {"scale": 0.1, "local": 8}} q@token k@token v@token z k_cache v_cache z_cache positions length
    {"mla_decode": {"scale": 0.1, "rank": 512}} q@latent latents
    {"mla_decode": {"scale": 0.1, "rank": 512}} q@latent latents length
"#;

/// The tensor of a name in [`REQUESTS`]: of four query and two KV heads.
fn named(name: &str) -> Value {
    let (n, kept) = (2500, 1536);
    let (name, size) = name.split_once('@').unwrap_or((name, "128"));
    let (tokens, d) = (if size == "token" { 1 } else { n }, size.parse().unwrap_or(128));
    let (shape, dtype): (&[usize], &str) = match (name, size) {
        ("q", "index") => (&[1, n, 2, d], "bf16"),
        ("k", "index") => (&[1, n, 1, d], "bf16"),
        ("index_q", _) => (&[1, n, 2, d], "bf16"),
        ("index_k", _) => (&[1, n, 1, d], "bf16"),
        ("chosen", _) => (&[1, 2, 4], "i32"),
        ("q", "latent") => (&[1, 1, 16, 576], "bf16"),
        ("latents", _) => (&[1, 5000, 576], "bf16"),
        ("q", _) => (&[1, tokens, 4, d], "bf16"),
        ("k" | "v", _) => (&[1, tokens, 2, d], "bf16"),
        ("compressed", "branch") | ("selected" | "window" | "o" | "d_o", _) => (&[1, n, 4, d], "bf16"),
        ("compressed" | "d_compressed", _) => (&[2, 157 * 2, d], "bf16"),
        ("doc_start" | "doc_end", _) => (&[1, n], "i32"),
        ("lse", _) => (&[1, 4, n], "f32"),
        ("bias" | "rank" | "x" | "dz", _) => (&[1, 2, n], "f32"),
        ("list", _) => (&[1, 2, 3, kept, 2], "i32"),
        ("list_len", _) => (&[1, 2, 3], "i32"),
        ("tile_window", _) => (&[1, 2, 40, 2], "i32"),
        ("w_dt", _) => (&[2 * d, 2], "f32"),
        ("a", _) => (&[2], "f32"),
        ("block_indices", _) => (&[1, n, 2, 16], "i32"),
        ("logits", _) => (&[1, n, 12], "bf16"),
        ("gate_bias", _) => (&[12], "f32"),
        ("words", _) => (&[300], "i32"),
        ("k_cache" | "v_cache", _) => (&[1, 2, 512, d], "bf16"),
        ("z_cache", _) => (&[1, 2, 512], "f32"),
        ("positions", _) => (&[1, 2, 512], "i32"),
        ("z", _) => (&[1, 2], "f32"),
        ("length", _) => (&[1], "i32"),
        _ => panic!("no tensor {name}"),
    };
    tensor(name, shape, dtype)
}

/// Each op as a call with its tensors.
fn requests() -> Vec<(Value, Vec<Value>)> {
    let calls = REQUESTS.trim().split("\n    {").enumerate().map(|(index, text)| {
        let (call, names) = text.rsplit_once('}').expect("a call, then names");
        let call = format!("{}{call}}}", if index > 0 { "{" } else { "" });
        let call = serde_json::from_str(&call).expect("JSON");
        (call, names.split_whitespace().map(named).collect())
    });
    calls.collect()
}

fn request(
    call: &Value,
    tensors: &[Value],
    (_, capability, multiprocessors, shared_bytes): (&str, [u32; 2], usize, usize),
) -> Value {
    let gpu = json!({ "capability": capability, "multiprocessors": multiprocessors, "shared_bytes": shared_bytes });
    json!({ "call": call, "gpu": gpu, "tensors": tensors })
}

#[test]
fn plans_of_three_gpus_are_as_stored() {
    let mut text = String::new();
    for gpu in GPUS {
        for (call, tensors) in requests() {
            let plan = Plan::new(&request(&call, &tensors, gpu).to_string()).unwrap_or_else(|e| panic!("{call}: {e}"));
            let described: Value = serde_json::from_str(plan.description()).expect("JSON");
            text.push_str(&format!(
                "{} {call}\n  workspace {}\n",
                gpu.0, described["workspace_bytes"]
            ));
            for output in described["outputs"].as_array().expect("a list") {
                text.push_str(&format!(
                    "  -> {} {} {}\n",
                    output["name"], output["dtype"], output["shape"]
                ));
            }
            for launch in described["launches"].as_array().expect("a list") {
                let (grid, threads, shared) = (&launch["grid"], &launch["threads"], &launch["shared_bytes"]);
                text.push_str(&format!("  {} {grid} x {threads}, {shared}\n", launch["kernel"]));
            }
        }
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/plans.txt");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&path, &text).expect("the folder can be written");
    }
    let stored = fs::read_to_string(&path).unwrap_or_default();
    let differs = stored.lines().zip(text.lines()).find(|(stored, now)| stored != now);
    assert!(
        stored == text,
        "{}: first difference (stored, now): {differs:?}",
        path.display()
    );
}

#[test]
fn buffers_that_live_together_do_not_share_memory() {
    for gpu in GPUS {
        for (call, tensors) in requests() {
            let plan = Plan::new(&request(&call, &tensors, gpu).to_string()).expect("a plan");
            let scratch = plan.buffers.len() - 1;
            for step in &plan.steps {
                let sieve_gpu::Step::Launch(launch) = step else {
                    continue;
                };
                let mut starts: Vec<usize> = Vec::new();
                // A single output of column_sums stands in the place of the second too.
                let count = launch.tensors.len() - usize::from(launch.kernel.name() == "column_sums");
                for at in launch.tensors[..count].iter().filter(|at| at.buffer == scratch) {
                    assert!(at.offset_bytes < plan.buffers[scratch], "{call}: behind the end");
                    starts.push(at.offset_bytes);
                }
                let distinct: std::collections::HashSet<_> = starts.iter().collect();
                assert_eq!(
                    distinct.len(),
                    starts.len(),
                    "{call}: {} reads one place twice",
                    launch.kernel.name()
                );
            }
        }
    }
}

#[test]
fn a_plan_serves_caches_of_fewer_keys() {
    let words = |call: &Value, tensors: &[Value], gpu, planned: usize, keys: usize| {
        let mut request = request(call, tensors, gpu);
        for tensor in request["tensors"].as_array_mut().expect("a list") {
            if tensor["name"].as_str().is_some_and(|name| name.ends_with("_cache")) {
                tensor["shape"][2] = json!(planned);
            }
        }
        let plan = Plan::new(&request.to_string()).expect("a plan");
        let plan = plan.at_capacity(keys).expect("a number of keys up to the planned one");
        let launches = plan.steps.iter().filter_map(|step| match step {
            sieve_gpu::Step::Launch(launch) => Some((launch.grid, launch.words.clone())),
            _ => None,
        });
        (plan.buffers, launches.collect::<Vec<_>>())
    };
    let mut seen = 0;
    for gpu in GPUS {
        for (call, tensors) in requests()
            .iter()
            .filter(|(call, _)| call.get("cached_decode").is_some())
        {
            let whole = words(call, tensors, gpu, 256, 256);
            assert_eq!(words(call, tensors, gpu, 512, 256), whole, "{}: {call}", gpu.0);
            assert_eq!(
                words(call, tensors, gpu, 200, 200),
                words(call, tensors, gpu, 500, 200),
                "{}: {call}",
                gpu.0
            );
            assert_ne!(words(call, tensors, gpu, 200, 200), whole, "{}: {call}", gpu.0);
            seen += 1;
        }
    }
    assert_eq!(seen, 6, "two requests on three GPUs");
    let (call, tensors) = requests().swap_remove(0);
    let plan = Plan::new(&request(&call, &tensors, GPUS[0]).to_string()).expect("a plan");
    assert!(plan.capacity.is_none() && plan.at_capacity(3).is_ok());
    let cached = requests()
        .into_iter()
        .find(|(call, _)| call.get("cached_decode").is_some());
    let (call, tensors) = cached.expect("a request");
    for (keys, fits) in [(0, false), (1, true), (512, true), (513, false)] {
        let plan = Plan::new(&request(&call, &tensors, GPUS[0]).to_string()).expect("a plan");
        assert_eq!(plan.at_capacity(keys).is_ok(), fits, "{keys} keys");
    }
}

#[test]
fn wrong_requests_say_what_is_wrong() {
    let [(call, tensors), ..] = &requests()[..] else {
        panic!("requests")
    };
    let error = |change: &dyn Fn(&mut Value)| {
        let mut changed = request(call, tensors, GPUS[2]);
        change(&mut changed);
        Plan::new(&changed.to_string()).expect_err("wrong").to_string()
    };
    for (expected, change) in [
        (
            "q is f16; the kernels take bf16",
            &(|r: &mut Value| r["tensors"][0]["dtype"] = json!("f16")) as &dyn Fn(&mut Value),
        ),
        ("q is f32, expected bf16", &|r| r["tensors"][0]["dtype"] = json!("f32")),
        ("k has shape [1, 7, 2, 128], expected [1, 2500, 2, 128]", &|r| {
            r["tensors"][1]["shape"][1] = json!(7)
        }),
        ("call .contiguous()", &|r| {
            r["tensors"][0]["strides"] = json!([1_280_000, 1, 2500, 10_000])
        }),
        ("head_dim 127 is not supported", &|r| {
            (0..3).for_each(|n| r["tensors"][n]["shape"][3] = json!(127))
        }),
        ("doc_start is missing", &|r| r["tensors"][3]["name"] = json!("start")),
        ("is not an input of this op", &|r| {
            let extra = tensor("delta", &[1], "f32");
            r["tensors"].as_array_mut().expect("a list").push(extra);
        }),
        ("softmax_scale -1 is not supported", &|r| {
            r["call"]["attention_forward"]["scale"] = json!(-1)
        }),
        ("unknown field `scales`", &|r| {
            r["call"]["attention_forward"]["scales"] = json!(1)
        }),
        ("compute capability 7.5; the kernels need 8.0", &|r| {
            r["gpu"]["capability"] = json!([7, 5])
        }),
        ("more than 2^40 elements", &|r| {
            r["tensors"][0]["shape"][0] = json!(1u64 << 50)
        }),
    ] {
        let text = error(change);
        assert!(text.contains(expected), "expected {expected:?} in {text:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, ..ProptestConfig::default() })]

    #[test]
    fn mutated_requests_do_not_panic(
        which in 0..requests().len(),
        gpu in 0..3usize,
        cuts in proptest::collection::vec((any::<proptest::sample::Index>(), 0..7usize, any::<u32>()), 1..4),
    ) {
        let (call, tensors) = requests().swap_remove(which);
        let mut text = request(&call, &tensors, GPUS[gpu]).to_string();
        for (place, kind, random) in cuts {
            text = mutated(&text, place, kind, random);
        }
        let outcome = catch_unwind(|| Plan::new(&text).map(|plan| plan.steps.len()));
        prop_assert!(outcome.is_ok(), "{text}");
    }
}

/// One number or one byte changed.
fn mutated(text: &str, place: proptest::sample::Index, kind: usize, random: u32) -> String {
    let numbers: Vec<(usize, &str)> = text
        .split(|c: char| !c.is_ascii_digit())
        .filter(|word| !word.is_empty())
        .map(|word| (word.as_ptr() as usize - text.as_ptr() as usize, word))
        .collect();
    let (at, word) = numbers[place.index(numbers.len())];
    let number: u64 = word.parse().unwrap_or(1);
    let new = match kind {
        0 => "0".to_owned(),
        1 => (number + 1).to_string(),
        2 => (number * 2).to_string(),
        3 => u64::from(random).to_string(),
        4 => (u64::from(random) << 30).to_string(),
        5 => format!("-{number}"),
        _ => {
            let mut bytes = text.as_bytes().to_vec();
            bytes[random as usize % text.len()] = b'x';
            return String::from_utf8(bytes).expect("the text is ASCII");
        }
    };
    format!("{}{new}{}", &text[..at], &text[at + word.len()..])
}
