//! Compares files of `sieve kernels run`, for ops of more than one attention call, with the op's definition.
use crate::kernels_cli::Written;
use crate::python;
use crate::tiny_run::TinyRun;
use sieve_cpu::{ChosenBlocks, Documents, Mask, dma_select, extend_expire};
use sieve_testing::cases;

fn run(tiny: &TinyRun, words: &str) -> Written {
    let words = format!("kernels run {words} --seed 5 --out file.safetensors --device cpu");
    tiny.prints(&words);
    Written::read(&tiny.path("file.safetensors"))
}

#[test]
fn nsa_s_file_agrees_with_its_definition() {
    let tiny = TinyRun::dma();
    for [words, sizes, pool] in cases(
        "
        --shape seq_len=1100,SIZES => 32 16 64 16 => mean
        --shape seq_len=150,SIZES --blocks 8,4,16,3 => 8 4 16 3 => mean
        --shape seq_len=150,SIZES --blocks 8,4,16,3 --pool mlp => 8 4 16 3 => mlp
    ",
    ) {
        let words = words.replace("SIZES", "heads=4,kv_heads=2,head_dim=16");
        let written = run(&tiny, &format!("nsa {words} --window 40"));
        assert_eq!([&written.metadata["blocks"], &written.metadata["pool"]], [sizes, pool]);
        let [block_size, count] = [2, 3].map(|at| sizes.split(' ').nth(at).expect("four").parse().expect("a number"));
        let indices = written.ints("block_indices");
        let chosen = ChosenBlocks { indices: &indices, count, block_size };
        let selected = written.defined(Mask::Chosen(chosen)).o;
        let window = written.defined(Mask::Window(40)).o;
        assert!(written.gap("selected_o", &selected) < 2e-5, "{words}");
        assert!(written.gap("window_o", &window) < 2e-5, "{words}");
        // Each query head of a token has one gate for each of the three branches.
        let (logits, bias) = (written.values("gate_logits"), written.values("gate_bias"));
        let gated = |of: [&[f64]; 3]| -> Vec<f64> {
            let gate = |at: usize, branch: usize| {
                let at = at / 16 * 3 + branch;
                1.0 / (1.0 + (-logits[at] - bias[at % bias.len()]).exp())
            };
            let sum = |at: usize| (0..3).map(|branch| of[branch].get(at).map_or(0.0, |x| gate(at, branch) * x)).sum();
            (0..selected.len()).map(sum).collect()
        };
        let o = gated([written.values("compressed_o"), &selected, &window]);
        assert!(written.gap("o", &o) < 2e-5, "{words}");
        let d_o = written.values("do");
        for (name, of) in
            [("compressed_do", [d_o, &[], &[]]), ("selected_do", [&[], d_o, &[]]), ("window_do", [&[], &[], d_o])]
        {
            assert!(written.gap(name, &gated(of)) < 2e-5, "{words}: {name}");
        }
        let d_logits = written.values("dgate_logits").chunks_exact(bias.len());
        let mut sums = vec![0.0; bias.len()];
        d_logits.for_each(|token| sums.iter_mut().zip(token).for_each(|(sum, x)| *sum += x));
        assert!(written.gap("dgate_bias", &sums) < 1e-3, "{words}");
        for (gradient, of) in [("dq", "q"), ("dk", "k"), ("dv", "v")] {
            assert_eq!(written.shape(gradient), written.shape(of));
        }
        for part in ["k_up", "k_down", "v_positions"] {
            let gradient = written.tensors.get(&format!("d{part}"));
            assert_eq!(gradient.map(|x| &x.0), written.tensors.get(part).map(|x| &x.0));
            assert_eq!(gradient.is_some(), pool == "mlp", "{words}: {part}");
        }
    }
}

/// Compares each part's tensors with attention over whole rows. The halo must hold every earlier key that the part's
/// queries see, with its score; outputs and gradients must equal the whole rows'.
#[test]
fn a_file_of_two_ranks_agrees_with_its_definition() {
    let tiny = TinyRun::dma();
    let (n, kv_heads, d) = (96usize, 2, 16);
    let shape = format!("--shape seq_len={n},heads=4,kv_heads={kv_heads},head_dim={d} --documents 3");
    for (words, num_parts) in [("dma --window 11 --local-window 3 --parts 2", 2), ("swa --window 11 --parts 3", 3)] {
        let (written, len) = (run(&tiny, &format!("{words} {shape}")), n / num_parts);
        let [start, end] = written.bounds(n);
        let documents = Documents::new(&start, &end);
        // z = a softplus(w_dt v) is the score by which DMA chooses keys.
        let is_dma = words.starts_with("dma");
        let mut z = vec![0.0; kv_heads * n];
        if is_dma {
            let (w_dt, a) = (written.values("w_dt"), written.values("a"));
            for (token, values) in written.values("v").chunks_exact(kv_heads * d).enumerate() {
                for head in 0..kv_heads {
                    let terms = values.iter().enumerate();
                    let x: f64 = terms.map(|(at, v)| v * w_dt[head * kv_heads * d + at]).sum();
                    z[head * n + token] = (a[head] * x.exp().ln_1p()) as f32;
                }
            }
        }
        // Without DMA all scores are equal. Of equal scores `dma_select` keeps the later key, so that it keeps a
        // window.
        let (kept, local) = if is_dma { (8, 3) } else { (11, 0) };
        let mut expire = vec![0; z.len()];
        dma_select(&z, documents, 1, kv_heads, n, kept, &mut expire);
        extend_expire(&mut expire, documents, kv_heads, n, local);
        let bias = |z: &f32| if is_dma { z.min(60.0).exp() } else { 0.0 };
        let delta: Vec<f32> = z.iter().map(bias).collect();
        let all = written.defined(Mask::Expire { expire: &expire, delta: &delta });
        for part in 0..num_parts {
            let (first, of) = (part * len, |name: &str| format!("part{part}.{name}"));
            for (name, whole) in [("o", &all.o), ("dq", &all.dq)] {
                let gap = written.gap(&of(name), &whole[first * 4 * d..(first + len) * 4 * d]);
                assert!(gap < 1e-4, "{words}: {name} of part {part}: {gap}");
            }
            if part == 0 {
                assert!(!written.tensors.contains_key("part0.halo"));
                continue;
            }
            let (halo, slots) = (written.values(&of("halo")), written.shape(&of("halo"))[1]);
            let row = |values: &[f64], token: usize, heads: usize, head: usize| -> Vec<f64> {
                values[(token * heads + head) * d..][..d].to_vec()
            };
            for (head, key) in (0..kv_heads).flat_map(|head| (0..first).map(move |key| (head, key))) {
                let at = head * n + key;
                if expire[at] as usize <= first || end[key] as usize <= first {
                    continue;
                }
                let of_key = |name: &str| row(written.values(name), key, kv_heads, head);
                let slot = (0..slots).find(|&slot| row(halo, slot, 2 * kv_heads, head) == of_key("k"));
                let slot = slot.unwrap_or_else(|| panic!("{words}: part {part} lacks key {key}"));
                assert_eq!(row(halo, slot, 2 * kv_heads, kv_heads + head), of_key("v"));
                if is_dma {
                    let ranks = written.values(&of("halo_ranks"));
                    assert!((ranks[head * slots + slot] - f64::from(z[at])).abs() < 1e-5);
                }
            }
        }
    }
}

#[test]
fn an_fp8_gemm_s_file_agrees_with_its_definition() {
    let tiny = TinyRun::dma();
    let (rows, inner, outer) = (48, 64, 32);
    let written = run(&tiny, "fp8 --shape batch=2,seq_len=24,heads=4,kv_heads=2,head_dim=16");
    let operand = |name: &str| -> Vec<f64> {
        let (scale, largest) =
            (written.values(&format!("{name}_scale"))[0], if name == "dy" { 57344.0 } else { 448.0 });
        let numbers = written.values(&format!("{name}_rounded"));
        assert!(numbers.iter().any(|x| x.abs() == largest), "{name}");
        numbers.iter().map(|x| x * scale).collect()
    };
    let [x, weight, dy] = ["x", "weight", "dy"].map(operand);
    // The matrix `sum_c a[i, c] b[j, c]`, `[m, n]`. Each operand is given with its strides.
    let gemm = |[m, n, k]: [usize; 3], a: (&[f64], [usize; 2]), b: (&[f64], [usize; 2])| -> Vec<f64> {
        let at = |(values, [row, column]): (&[f64], [usize; 2]), i: usize, c: usize| values[i * row + c * column];
        let entry = |i: usize, j: usize| (0..k).map(|c| at(a, i, c) * at(b, j, c)).sum();
        (0..m * n).map(|ij| entry(ij / n, ij % n)).collect()
    };
    for (name, expected) in [
        ("y", gemm([rows, outer, inner], (&x, [inner, 1]), (&weight, [inner, 1]))),
        ("dx", gemm([rows, inner, outer], (&dy, [outer, 1]), (&weight, [1, inner]))),
        ("dweight", gemm([outer, inner, rows], (&dy, [1, outer]), (&x, [1, inner]))),
    ] {
        let gap = written.gap(name, &expected);
        assert!(gap < 1e-4, "{name}: {gap}");
    }
}

#[test]
fn mla_s_file_has_a_gradient_of_each_input() {
    let tiny = TinyRun::dma();
    let written = run(&tiny, "mla --shape seq_len=90,heads=3,head_dim=24,head_dim_v=16");
    for (input, gradient) in [("q", "dq"), ("kv", "dkv"), ("k_rope", "dk_rope"), ("o", "do")] {
        assert_eq!(written.shape(input), written.shape(gradient));
        assert!(written.values(gradient).iter().any(|&x| x != 0.0), "{gradient}");
    }
    // The first query sees only its own key, so its output is that key's value: the second half of its part of `kv`.
    for head in 0..3 {
        let (o, v) = (&written.values("o")[head * 16..][..16], &written.values("kv")[head * 32 + 16..][..16]);
        assert!(o.iter().zip(v).all(|(o, v)| (o - v).abs() < 1e-6), "head {head}");
    }
    assert!(written.metadata["rope_theta"].parse::<f64>().is_ok_and(|theta| theta > 1.0));
}

/// A row for each method: the selector, the arrays that its file must hold, and the least and the largest share of
/// pairs that it may keep. Together the masks have every kind of array. Corrections are not part of a mask. The prompt
/// is too short for the method of the last row, so that it keeps all keys.
const MASKS: &str = "
    meanpool:block=16,tau=0.5,min_prefill_tokens=0 => row_ptr => 0.2 => 0.9
    bfla:block=32,tile=16,group=16,keep_mass=0.5,local_tokens=0,last_dense_rows=9,min_prefill_tokens=0 => row_ptr \
        => 0.2 => 0.9
    vertical_slash:vertical=30,slash=40,min_prefill_tokens=0 => col_ptr => 0.2 => 0.99
    pbs:block=16,segment=64,tau=0.4,min_prefill_tokens=0 => key_order => 0.2 => 0.95
    ba_att:block=16,segment=64,sparsity=0.6,min_prefill_tokens=0 => key_order query_order => 0.2 => 0.95
    streamingllm:n_init=4,n_local=40,min_prefill_tokens=0 => windows => 0.2 => 0.6
    delta:gamma=8,dense_tail=false,base.n_local=20,base.min_prefill_tokens=0,min_prefill_tokens=0 => windows \
        => 0.05 => 0.9
    momo:gamma=8,beta=16,chi=32,k=4,k_exact=2,first_dense_layers=0,min_prefill_tokens=0 => row_ptr => 0.1 => 0.99
    xattention =>  => 1.0 => 1.0
";

#[test]
fn a_masked_file_agrees_with_its_mask_in_python() {
    let test = "a_masked_file_agrees_with_its_mask_in_python";
    let Some(interpreter) = python::interpreter(test, "import array, json, struct") else {
        return;
    };
    let tiny = TinyRun::dma();
    let (masks, mut files) = (cases::<4>(MASKS), Vec::new());
    for (at, [selector, arrays, ..]) in masks.iter().enumerate() {
        let file = format!("{at}.safetensors");
        let shape = "seq_len=150,heads=4,kv_heads=2,head_dim=16";
        let words = format!("kernels run block_sparse --shape {shape} --selector {selector}");
        tiny.prints(&format!("{words} --out {file} --device cpu"));
        let written = Written::read(&tiny.path(&file));
        for array in arrays.split_whitespace() {
            assert!(written.tensors.contains_key(array), "{selector}: {array}");
        }
        let name = selector.split(':').next().expect("a name");
        assert!(written.metadata["selector"].starts_with(name));
        assert_eq!(written.metadata["chosen_on"], "CPU");
        files.push(tiny.path(&file).display().to_string());
    }
    let printed = python::run(&interpreter, "masked_attention.py", &files);
    assert_eq!(printed.lines().count(), masks.len(), "{printed}");
    for (line, [selector, _, least, most]) in printed.lines().zip(masks) {
        let numbers: Vec<f64> = line.split(' ').skip(1).map(|x| x.parse().expect("a number")).collect();
        let [o, lse, density] = *numbers else { panic!("{line}") };
        assert!(o < 2e-5 && lse < 2e-5, "{selector}: {line}");
        let [least, most] = [least, most].map(|share| share.parse::<f64>().expect("a share"));
        assert!(density >= least && density <= most, "{selector}: {line}");
    }
}
