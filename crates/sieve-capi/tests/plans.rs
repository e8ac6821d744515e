//! Plans without a GPU: what they launch, on three kinds of GPUs, and that no request makes one panic.
#![allow(clippy::disallowed_methods, reason = "paths of tests")]
use proptest::prelude::*;
use serde_json::{Value, json};
use sieve_capi::Plan;
use std::fs;
use std::panic::catch_unwind;
use std::path::Path;

/// Architecture, compute capability, multiprocessors, and bytes of shared memory of a thread block.
const GPUS: [(&str, [u32; 2], usize, usize); 3] =
    [("sm_80", [8, 0], 108, 163 << 10), ("sm_89", [8, 9], 128, 99 << 10), ("sm_90a", [9, 0], 132, 227 << 10)];

fn tensor(name: &str, shape: &[usize], dtype: &str) -> Value {
    json!({ "name": name, "shape": shape, "dtype": dtype })
}

/// Tensors, and each op as a call with the names of its tensors.
const REQUESTS: &str = include_str!("requests.txt");

/// The tensor `name` of a call, from the lines of all tensors. `q@64` is `q` with heads of 64 columns instead of 128;
/// `q@token` has a line of its own.
fn named(name: &str, rows: &[Vec<&str>]) -> Value {
    let (plain, width) = name.split_once('@').unwrap_or((name, "128"));
    let find = |name: &str| rows.iter().find(|row| row.first() == Some(&name));
    let row = find(name).or_else(|| find(plain)).unwrap_or_else(|| panic!("no tensor {name}"));
    let size = |word: &&str| match *word {
        "n" => 2500,
        "d" => width.parse().unwrap_or(128),
        number => number.parse().expect("a size"),
    };
    tensor(plain, &row[2..].iter().map(size).collect::<Vec<_>>(), row[1])
}

/// Each op as a call with its tensors.
fn requests() -> Vec<(Value, Vec<Value>)> {
    let (tensors, calls) = REQUESTS.split_once("\n== calls\n{").expect("tensors, then calls");
    let rows: Vec<Vec<&str>> = tensors.lines().map(|line| line.split_whitespace().collect()).collect();
    let calls = calls.split("\n{").map(|text| {
        let (call, names) = text.rsplit_once('}').expect("a call, then names");
        let call = serde_json::from_str(&format!("{{{call}}}")).expect("JSON");
        (call, names.split_whitespace().map(|name| named(name, &rows)).collect())
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
            text.push_str(&format!("{} {call}\n  workspace {}\n", gpu.0, described["workspace_bytes"]));
            for output in described["outputs"].as_array().expect("a list") {
                text.push_str(&format!("  -> {} {} {}\n", output["name"], output["dtype"], output["shape"]));
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
    assert!(stored == text, "{}: first difference (stored, now): {differs:?}", path.display());
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
                assert_eq!(distinct.len(), starts.len(), "{call}: {} reads one place twice", launch.kernel.name());
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
    let grows = |call: &Value| ["cached_decode", "attention_decode"].iter().any(|op| call.get(op).is_some());
    for gpu in GPUS {
        for (call, tensors) in requests().iter().filter(|(call, _)| grows(call)) {
            let whole = words(call, tensors, gpu, 256, 256);
            // Without a window or blocks more keys are divided among more thread blocks.
            let is_bounded =
                ["/cached_decode/window", "/cached_decode/block"].iter().any(|at| call.pointer(at).is_some());
            let planned = if is_bounded { 512 } else { 256 };
            assert_eq!(words(call, tensors, gpu, planned, 256), whole, "{}: {call}", gpu.0);
            let fewer = words(call, tensors, gpu, planned - 12, 200);
            assert_eq!(words(call, tensors, gpu, 200, 200), fewer, "{}: {call}", gpu.0);
            assert_ne!(words(call, tensors, gpu, 200, 200), whole, "{}: {call}", gpu.0);
            seen += 1;
        }
    }
    assert_eq!(seen, 15, "five requests on three GPUs");
    let (call, tensors) = requests().swap_remove(0);
    let plan = Plan::new(&request(&call, &tensors, GPUS[0]).to_string()).expect("a plan");
    assert!(plan.capacity.is_none() && plan.at_capacity(3).is_ok());
    let cached = requests().into_iter().find(|(call, _)| call.get("cached_decode").is_some());
    let (call, tensors) = cached.expect("a request");
    for (keys, fits) in [(0, false), (1, true), (512, true), (513, false)] {
        let plan = Plan::new(&request(&call, &tensors, GPUS[0]).to_string()).expect("a plan");
        assert_eq!(plan.at_capacity(keys).is_ok(), fits, "{keys} keys");
    }
}

/// The kernels address all caches of a call by one capacity.
#[test]
fn caches_of_different_capacity_are_refused() {
    let mut seen = 0;
    for (call, tensors) in requests() {
        let is_cache = |tensor: &Value| tensor["name"].as_str().is_some_and(|name| name.ends_with("_cache"));
        let caches: Vec<usize> = (0..tensors.len()).filter(|at| is_cache(&tensors[*at])).collect();
        for at in caches.iter().filter(|_| caches.len() > 1) {
            let keys = tensors[*at]["shape"][2].as_u64().expect("a size");
            // A plan that serves several capacities rounds the second size up to `keys`: the caches would look alike.
            for other in [keys / 2, keys - 12, 2 * keys] {
                let mut changed = tensors.clone();
                changed[*at]["shape"][2] = json!(other);
                let plan = Plan::new(&request(&call, &changed, GPUS[2]).to_string());
                let error = plan.err().unwrap_or_else(|| panic!("{other} of {keys} places: {call}"));
                assert!(error.to_string().contains(" has shape ["), "{error}: {call}");
                seen += 1;
            }
        }
    }
    assert!(seen > 30, "{seen} requests");
}

#[test]
fn wrong_requests_say_what_is_wrong() {
    let [(call, tensors), ..] = &requests()[..] else { panic!("requests") };
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
        ("k has shape [1, 7, 2, 128], expected [1, 2500, 2, 128]", &|r| r["tensors"][1]["shape"][1] = json!(7)),
        ("call .contiguous()", &|r| r["tensors"][0]["strides"] = json!([1_280_000, 1, 2500, 10_000])),
        ("head_dim 127 is not supported", &|r| (0..3).for_each(|n| r["tensors"][n]["shape"][3] = json!(127))),
        ("doc_start is missing", &|r| r["tensors"][3]["name"] = json!("start")),
        ("is not an input of this op", &|r| {
            let extra = tensor("delta", &[1], "f32");
            r["tensors"].as_array_mut().expect("a list").push(extra);
        }),
        ("softmax_scale -1 is not supported", &|r| r["call"]["attention_forward"]["scale"] = json!(-1)),
        ("unknown field `scales`", &|r| r["call"]["attention_forward"]["scales"] = json!(1)),
        ("compute capability 7.5; the kernels need 8.0", &|r| r["gpu"]["capability"] = json!([7, 5])),
        ("more than 2^40 elements", &|r| r["tensors"][0]["shape"][0] = json!(1u64 << 50)),
    ] {
        let text = error(change);
        assert!(text.contains(expected), "expected {expected:?} in {text:?}");
    }
}

#[test]
fn one_rows_bits_are_for_hopper_and_take_the_kernels_in_order() {
    let mut seen = 0;
    for (mut call, tensors) in requests() {
        let (op, settings) = call.as_object_mut().and_then(|call| call.iter_mut().next()).expect("an op");
        let kernel = match op.as_str() {
            "attention_decode" => "hopper_attention_token",
            "dma_decode" => "hopper_dma_attention_token",
            "dma_forward" => "attention_forward",
            _ => continue,
        };
        settings["same_bits"] = json!(true);
        if settings.get("keep").is_some_and(|keep| keep == 5000) {
            let error = Plan::new(&request(&call, &tensors, GPUS[2]).to_string()).expect_err("too many keys");
            assert!(error.to_string().contains("keep of at most 2048, and it is 5000\n  hint: "), "{error}");
            continue;
        }
        let plan = Plan::new(&request(&call, &tensors, GPUS[2]).to_string()).expect("a plan");
        assert!(plan.description().contains(kernel), "{call}: {}", plan.description());
        assert_eq!(plan.description().contains("dma_ordered_lists"), kernel == "attention_forward", "{call}");
        for (gpu, version) in [(GPUS[0], "8.0"), (GPUS[1], "8.9")] {
            let error = Plan::new(&request(&call, &tensors, gpu).to_string()).expect_err("another GPU").to_string();
            assert!(error.contains(&format!("compute capability 9.0, and this GPU has {version}")), "{error}");
        }
        seen += 1;
    }
    assert_eq!(seen, 6, "requests of three ops");
}

#[test]
fn any_number_of_a_request_may_be_wrong() {
    let mut tried = 0;
    for (call, tensors) in requests() {
        let text = request(&call, &tensors, GPUS[2]).to_string();
        for at in 0..numbers(&text).len() {
            for number in ["0", "1", "-1", "1099511627776", "18446744073709551615"] {
                let changed = with_number(&text, at, number);
                let outcome = catch_unwind(|| Plan::new(&changed).map(|plan| plan.steps.len()));
                assert!(outcome.is_ok(), "{changed}");
                tried += 1;
            }
        }
    }
    assert!(tried > 5000, "{tried} requests");
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

/// The places and digits of the numbers in a text.
fn numbers(text: &str) -> Vec<(usize, &str)> {
    let words = text.split(|c: char| !c.is_ascii_digit()).filter(|word| !word.is_empty());
    words.map(|word| (word.as_ptr() as usize - text.as_ptr() as usize, word)).collect()
}

/// The text with another number in place of number `which`.
fn with_number(text: &str, which: usize, new: &str) -> String {
    let (at, word) = numbers(text)[which];
    format!("{}{new}{}", &text[..at], &text[at + word.len()..])
}

/// One number or one byte changed.
fn mutated(text: &str, place: proptest::sample::Index, kind: usize, random: u32) -> String {
    let numbers = numbers(text);
    let which = place.index(numbers.len());
    let number: u64 = numbers[which].1.parse().unwrap_or(1);
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
    with_number(text, which, &new)
}
