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

fn qkv(batch: usize, tokens: usize, width: usize) -> Vec<Value> {
    let heads = [("q", 4), ("k", 2), ("v", 2)];
    heads
        .map(|(name, heads)| tensor(name, &[batch, tokens, heads, width], "bf16"))
        .to_vec()
}

fn bounds(tokens: usize) -> Vec<Value> {
    ["doc_start", "doc_end"]
        .map(|name| tensor(name, &[1, tokens], "i32"))
        .to_vec()
}

fn kept(tokens: usize, width: usize) -> Vec<Value> {
    let o = [1, tokens, 4, width];
    vec![
        tensor("o", &o, "bf16"),
        tensor("lse", &[1, 4, tokens], "f32"),
        tensor("d_o", &o, "bf16"),
    ]
}

fn lists(tokens: usize, keep: usize) -> Vec<Value> {
    let capacity = (keep + 1024).min(tokens).next_multiple_of(128);
    let blocks = tokens.div_ceil(1024);
    vec![
        tensor("bias", &[1, 2, tokens], "f32"),
        tensor("list", &[1, 2, blocks, capacity, 2], "i32"),
        tensor("list_len", &[1, 2, blocks], "i32"),
        tensor("tile_window", &[1, 2, tokens.div_ceil(64), 2], "i32"),
    ]
}

/// Each op as a call with its tensors.
fn requests() -> Vec<(Value, Vec<Value>)> {
    let (n, d) = (2500, 128);
    let blocks = json!([32, 16, 64, 16]);
    let compressed = |name| tensor(name, &[2, 157 * 2, d], "bf16");
    let cache = |name, width| tensor(name, &[1, 2, 512, width], "bf16");
    let one = || qkv(1, 1, d);
    let length = || tensor("length", &[1], "i32");
    let indices = || tensor("block_indices", &[1, n, 2, 16], "i32");
    let start = || bounds(n)[..1].to_vec();
    let q = || qkv(1, n, d)[..1].to_vec();
    let v = || qkv(1, n, d)[2..].to_vec();
    let scores = || vec![tensor("w_dt", &[2 * d, 2], "f32"), tensor("a", &[2], "f32")];
    let branches = ["compressed", "selected", "window"].map(|name| tensor(name, &[1, n, 4, d], "bf16"));
    let gates = [tensor("logits", &[1, n, 12], "bf16"), tensor("gate_bias", &[12], "f32")];
    let per_key = |name| tensor(name, &[1, 2, n], "f32");
    let calls = vec![
        (
            json!({"attention_forward": {"scale": 0.1}}),
            vec![qkv(1, n, d), start()],
        ),
        (
            json!({"attention_forward": {"scale": 0.1, "window": 99, "only_o": true}}),
            vec![qkv(1, n, 80), start()],
        ),
        (
            json!({"attention_backward": {"scale": 0.1}}),
            vec![qkv(1, n, d), bounds(n), kept(n, d)],
        ),
        (
            json!({"attention_backward": {"scale": 0.1, "fixed_order": true}}),
            vec![qkv(1, n, 64), bounds(n), kept(n, 64)],
        ),
        (
            json!({"dma_scores": {"slopes": [0.5, 0.25]}}),
            vec![v(), scores(), start()],
        ),
        (
            json!({"dma_scores_backward": {}}),
            vec![v(), scores(), vec![per_key("x"), per_key("dz")]],
        ),
        (
            json!({"dma_select": {"keep": 500, "local": 60}}),
            vec![vec![per_key("rank")], bounds(n)],
        ),
        (
            json!({"dma_select": {"keep": 5000}}),
            vec![vec![per_key("rank")], bounds(n)],
        ),
        (
            json!({"dma_attention_forward": {"scale": 0.1}}),
            vec![qkv(1, n, d), lists(n, 500)],
        ),
        (
            json!({"dma_attention_backward": {"scale": 0.1}}),
            vec![qkv(1, n, d), lists(n, 500), kept(n, d)],
        ),
        (
            json!({"nsa_mean_pool": {"blocks": blocks}}),
            vec![qkv(1, n, d)[1..].to_vec(), bounds(n)],
        ),
        (
            json!({"nsa_mean_pool_backward": {"blocks": blocks}}),
            vec![qkv(1, n, d)[1..2].to_vec(), bounds(n), vec![compressed("d_compressed")]],
        ),
        (
            json!({"nsa_compressed_forward": {"scale": 0.1, "blocks": blocks}}),
            vec![q(), vec![compressed("compressed")], bounds(n)],
        ),
        (
            json!({"nsa_compressed_backward": {"scale": 0.1, "blocks": blocks}}),
            vec![q(), vec![compressed("compressed")], bounds(n), kept(n, d)],
        ),
        (
            json!({"nsa_selected_forward": {"scale": 0.1, "blocks": blocks}}),
            vec![qkv(1, n, d), vec![indices()], bounds(n)],
        ),
        (
            json!({"nsa_selected_backward": {"scale": 0.1, "blocks": blocks}}),
            vec![qkv(1, n, d), vec![indices()], bounds(n), kept(n, d)],
        ),
        (
            json!({"nsa_gates_backward": {}}),
            vec![
                branches.to_vec(),
                gates.to_vec(),
                vec![tensor("d_o", &[1, n, 4, d], "bf16")],
            ],
        ),
        (
            json!({"choose_blocks": {
                "scale": 0.1, "blocks": blocks, "rule": "largest_probability", "first": true, "local": 1,
            }}),
            vec![qkv(1, n, d)[..2].to_vec(), bounds(n)],
        ),
        (
            json!({"choose_blocks": {"scale": 0.1, "blocks": [64, 64, 64, 4], "rule": "mean_key", "local": 1}}),
            vec![qkv(1, n, d)[..2].to_vec(), bounds(n)],
        ),
        (
            json!({"choose_blocks": {"scale": 0.1, "blocks": [1, 1, 64, 4], "rule": "largest_score", "local": 1}}),
            vec![
                vec![tensor("q", &[1, n, 2, d], "bf16"), tensor("k", &[1, n, 1, d], "bf16")],
                bounds(n),
            ],
        ),
        (
            json!({"chosen_forward": {
                "scale": 0.1, "blocks": blocks, "rule": "largest_probability", "first": true, "local": 1,
            }}),
            vec![qkv(1, n, d), bounds(n)],
        ),
        (
            json!({"nsa_forward": {"scale": 0.1, "blocks": blocks, "window": 512, "only_o": true}}),
            vec![qkv(1, n, d), vec![compressed("compressed")], gates.to_vec(), bounds(n)],
        ),
        (
            json!({"nsa_forward": {"scale": 0.1, "blocks": blocks, "window": 512}}),
            vec![qkv(1, n, d), vec![compressed("compressed")], gates.to_vec(), bounds(n)],
        ),
        (
            json!({"dma_forward": {"scale": 0.1, "keep": 500, "local": 60, "only_o": true}}),
            vec![qkv(1, n, d), vec![per_key("rank"), per_key("bias")], bounds(n)],
        ),
        (
            json!({"dma_forward": {"scale": 0.1, "keep": 500, "local": 60}}),
            vec![qkv(1, n, d), vec![per_key("rank"), per_key("bias")], bounds(n)],
        ),
        (
            json!({"dma_forward": {"scale": 0.1, "keep": 5000}}),
            vec![qkv(1, n, d), vec![per_key("rank"), per_key("bias")], bounds(n)],
        ),
        (
            json!({"block_sparse": {"scale": 0.1, "block": [128, 128]}}),
            vec![qkv(1, n, d), vec![tensor("words", &[300], "i32")]],
        ),
        (
            json!({"attention_decode": {"scale": 0.1}}),
            vec![one(), vec![cache("k_cache", d), cache("v_cache", d), length()]],
        ),
        (
            json!({"dma_decode": {"scale": 0.1, "local": 8}}),
            vec![
                one(),
                vec![tensor("z", &[1, 2], "f32"), cache("k_cache", d), cache("v_cache", d)],
                vec![
                    tensor("z_cache", &[1, 2, 512], "f32"),
                    tensor("positions", &[1, 2, 512], "i32"),
                    length(),
                ],
            ],
        ),
        (
            json!({"mla_decode": {"scale": 0.1, "rank": 512}}),
            vec![vec![
                tensor("q", &[1, 1, 16, 576], "bf16"),
                tensor("latents", &[1, 5000, 576], "bf16"),
            ]],
        ),
    ];
    calls
        .into_iter()
        .map(|(call, tensors)| (call, tensors.concat()))
        .collect()
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
