//! Speed of the CPU kernels on this machine, compared with a GEMM of 2048 x 2048 x 2048:
//! `cargo run --release -p sieve-cpu --example bench_cpu`; `-- chosen` for chosen blocks alone.
//!
//! Rows of attention count the FLOPs of visible pairs only (4 d a pair forward, 10 d backward). So masked pairs that
//! tiles compute, gathering and softmax show as a lower rate.
#![allow(clippy::print_stdout, reason = "a program for people")]

use sieve_core::model::test_shapes::kind_that_chooses_by;
use sieve_core::{AdamWStep, ChoiceRule};
use sieve_cpu::activation::{swiglu_backward, swiglu_forward};
use sieve_cpu::nsa::choose_key_blocks;
use sieve_cpu::{
    ChosenBlocks, Documents, Mask, Matrix, MatrixMut, QkNormRope, ScaledShape, Threads, Weight, adamw,
    attention_backward, attention_forward, dma_select, embedding_backward, linear_cross_entropy,
    linear_cross_entropy_with_gradients, matmul, qk_norm_rope_backward, qk_norm_rope_forward, rms_norm_backward,
    rms_norm_forward, sum_of_squares,
};
use sieve_testing::{Random, Time, measure, wide};

/// Tokens of a batch, whatever the length of its rows.
const TOKENS: usize = 16384;
/// Keys that a query sees with a window or with DMA.
const WINDOW: usize = 256;

/// Rates of the 2048^3 GEMM, in FLOP per second of wall clock and of CPU time.
#[derive(Clone, Copy)]
struct Reference {
    wall: f64,
    cpu: f64,
}

impl Reference {
    /// Prints a kernel's line of the table: its rate, and this rate in percent of the GEMM's.
    fn print(&self, kernel: &str, shape: &str, flops: f64, time: Time) {
        let (ms, rate) = (time.wall * 1e3, flops / time.wall / 1e9);
        let (share, cpu_share) = (100.0 * flops / time.wall / self.wall, 100.0 * flops / time.cpu / self.cpu);
        println!("{kernel} | {shape} | {ms:.1} | {rate:.0} GFLOP/s | {share:.0} | {cpu_share:.0}");
    }
}

/// Normally distributed values.
fn values(len: usize, seed: u64) -> Vec<f32> {
    Random(seed).vector(len)
}

/// Prints all tables; with the argument `chosen` only that of attention over chosen blocks.
fn main() {
    println!("{} threads", rayon::current_num_threads());
    if std::env::args().nth(1).as_deref() == Some("chosen") {
        return chosen_blocks();
    }
    println!("kernel | shape | median ms | rate | % of the 2048^3 GEMM, by wall clock | by CPU time");
    let reference = gemm_rate(2048);
    attention(reference);
    cross_entropy(reference);
    pointwise();
    chosen_blocks();
}

/// Measures and prints the GEMM that other kernels are compared with.
fn gemm_rate(n: usize) -> Reference {
    let (a, b) = (values(n * n, 1), values(n * n, 2));
    let mut c = vec![0.0; n * n];
    let time = measure(|| {
        let c = MatrixMut::new(&mut c, n, n);
        matmul(Threads::All, 1.0, Matrix::new(&a, n, n), Matrix::new(&b, n, n), 0.0, c);
    });
    let flops = 2.0 * (n as f64).powi(3);
    let reference = Reference { wall: flops / time.wall, cpu: flops / time.cpu };
    reference.print("gemm", "2048^3", flops, time);
    let (threads, rate) = (rayon::current_num_threads() as f64, reference.cpu / 1e9);
    println!("its rate by CPU time, times {threads} threads: {:.0} GFLOP/s", rate * threads);
    reference
}

/// Times of dense, sliding-window and DMA attention. In "dma tied" all scores are equal, in "dma random" they are
/// normally distributed.
fn attention(reference: Reference) {
    for kind in ["causal", "window", "dma tied", "dma random"] {
        for seq_len in [512, 1024, 2048, 4096, 8192, 16384] {
            let (num_heads, num_kv_heads, head_dim) = (8, 4, 64);
            let batch = TOKENS / seq_len;
            let shape = ScaledShape::new([batch, seq_len], [num_heads, num_kv_heads], head_dim);
            let (start, end) = (vec![0; TOKENS], vec![seq_len as i32; TOKENS]);
            let documents = Documents::new(&start, &end);
            let keys = TOKENS * num_kv_heads;
            let z = if kind == "dma random" { values(keys, 3) } else { vec![0.0; keys] };
            let mut expire = vec![0; keys];
            let mut select_time = Time { wall: 0.0, cpu: 0.0 };
            let mask = match kind {
                "causal" => {
                    expire.fill(seq_len as i32);
                    Mask::Causal
                }
                _ => {
                    // DMA keeps the latest of equal scores, so with tied scores `expire` equals a sliding window's.
                    select_time = measure(|| {
                        dma_select(&z, documents, batch, num_kv_heads, seq_len, WINDOW, &mut expire);
                    });
                    if kind == "window" { Mask::Window(WINDOW) } else { Mask::Expire { expire: &expire, delta: &z } }
                }
            };
            // The queries j..expire[j] see key j, in every query head of its KV head.
            let keys_of_heads = expire.chunks(seq_len).flat_map(|head| (0..).zip(head));
            let visible: f64 = keys_of_heads.map(|(j, end)| f64::from((end - j).max(0))).sum();
            let pairs = visible * (num_heads / num_kv_heads) as f64;
            let qkv = values(TOKENS * shape.token_len(), 4);
            let d_o = values(TOKENS * num_heads * head_dim, 5);
            let (mut o, mut lse) = (vec![0.0; d_o.len()], vec![0.0; TOKENS * num_heads]);
            let (mut d_qkv, mut d_delta) = (vec![0.0; qkv.len()], vec![0.0; keys]);
            let forward = measure(|| attention_forward(shape, &qkv, documents, mask, &mut o, &mut lse));
            let backward = measure(|| {
                let d_delta = Some(d_delta.as_mut_slice());
                attention_backward(shape, &qkv, documents, mask, &o, &lse, &d_o, &mut d_qkv, d_delta);
            });
            for (pass, time, flops) in [("forward", forward, 4.0), ("backward", backward, 10.0)] {
                let shape = format!("batch {batch} seq_len {seq_len}");
                reference.print(&format!("{kind} {pass}"), &shape, flops * head_dim as f64 * pairs, time);
            }
            if kind.starts_with("dma") {
                println!("dma_select | batch {batch} seq_len {seq_len} | {:.1} | - | - | -", select_time.wall * 1e3);
            }
        }
    }
}

/// Times of the kinds that choose blocks by pooled keys (choice, forward, backward), compared with dense attention
/// (forward and backward). The first size is the quickstart recipe's.
fn chosen_blocks() {
    println!("chosen blocks: ms of choice, forward, backward; their sum as a multiple of dense attention's");
    for (seq_len, num_heads, size) in [(256, 4, 16), (2048, 8, 64), (8192, 8, 64)] {
        let shape = ScaledShape::new([TOKENS / seq_len, seq_len], [num_heads, num_heads / 2], 64);
        let (start, end) = (vec![0; TOKENS], vec![seq_len as i32; TOKENS]);
        let documents = Documents::new(&start, &end);
        let (mut o, mut lse) = (vec![0.0; TOKENS * num_heads * 64], vec![0.0; TOKENS * num_heads]);
        let (qkv, d_o) = (values(TOKENS * shape.token_len(), 4), values(o.len(), 5));
        let mut d_qkv = vec![0.0; qkv.len()];
        let mask = Mask::Causal;
        let dense = [
            measure(|| attention_forward(shape, &qkv, documents, mask, &mut o, &mut lse)),
            measure(|| attention_backward(shape, &qkv, documents, mask, &o, &lse, &d_o, &mut d_qkv, None)),
        ];
        let dense: f64 = dense.iter().map(|time| time.wall).sum();
        let num_selected_blocks = (seq_len / 4 / size).clamp(4, 16);
        let sizes = [
            ("compress_block_size", size / 2),
            ("compress_stride", size / 4),
            ("select_block_size", size),
            ("num_selected_blocks", num_selected_blocks),
            ("num_local_blocks", num_selected_blocks / 2),
        ];
        for rule in [ChoiceRule::LargestProbability, ChoiceRule::MeanKey] {
            let kind = kind_that_chooses_by(rule, &sizes);
            let (name, choice) = (kind.kind().name(), kind.as_kind().block_choice().expect("it chooses blocks"));
            let blocks = choice.blocks;
            let num_choosers = choice.num_choosers(num_heads, shape.num_kv_heads);
            let num_pooled = shape.batch * blocks.num_slots(seq_len) * shape.num_kv_heads;
            let [q, keys] = [TOKENS * num_heads, num_pooled].map(|vectors| wide(&values(vectors * 64, 6)));
            let mut chosen = vec![0; TOKENS * num_choosers * num_selected_blocks];
            let choose = measure(|| choose_key_blocks(shape, choice, &q, documents, &keys, &mut chosen));
            // Where each query head chooses, it has keys and values of its own.
            let read = ScaledShape::new([shape.batch, seq_len], [num_heads, num_choosers], shape.head_dim);
            let (qkv, mut d_qkv) = (values(TOKENS * read.token_len(), 6), vec![0.0; TOKENS * read.token_len()]);
            let mask = Mask::Chosen(ChosenBlocks { indices: &chosen, count: num_selected_blocks, block_size: size });
            let forward = measure(|| attention_forward(read, &qkv, documents, mask, &mut o, &mut lse));
            let backward =
                measure(|| attention_backward(read, &qkv, documents, mask, &o, &lse, &d_o, &mut d_qkv, None));
            let times = [choose, forward, backward].map(|time| time.wall);
            println!(
                "{name} | seq_len {seq_len} | {:.1} {:.1} {:.1} | dense {:.1} | {:.2} times",
                times[0] * 1e3,
                times[1] * 1e3,
                times[2] * 1e3,
                dense * 1e3,
                times.iter().sum::<f64>() / dense
            );
        }
    }
}

/// Times of the loss alone, and of the loss with its gradients.
fn cross_entropy(reference: Reference) {
    for (n, d_model, vocab_size) in [(2048, 256, 4096), (2048, 512, 8192), (1024, 512, 50304)] {
        let (h, weight) = (values(n * d_model, 6), values(vocab_size * d_model, 7));
        let labels: Vec<i32> = (0..n).map(|i| (i * 31 % vocab_size) as i32).collect();
        let (mut dh, mut dweight) = (vec![0.0; h.len()], vec![0.0; weight.len()]);
        let forward = measure(|| {
            linear_cross_entropy(&h, Weight::F32(&weight), &labels, d_model);
        });
        let both = measure(|| {
            linear_cross_entropy_with_gradients(&h, &weight, &labels, d_model, &mut dh, &mut dweight);
        });
        let gemm_flops = 2.0 * (n * d_model * vocab_size) as f64;
        for (pass, time, num_gemms) in [("loss", forward, 1.0), ("loss and gradients", both, 3.0)] {
            let shape = format!("{n} x {d_model} x {vocab_size}");
            reference.print(&format!("cross entropy, {pass}"), &shape, num_gemms * gemm_flops, time);
        }
    }
}

/// Times of the ops that memory bandwidth bounds. `bytes` counts every element that an op reads or writes, 4 bytes
/// each: AdamW reads 4 tensors and writes 3.
fn pointwise() {
    let report = |name: &str, shape: &str, time: Time, bytes: usize| {
        println!("{name} | {shape} | {:.2} | {:.1} GB/s | - | -", time.wall * 1e3, bytes as f64 / time.wall / 1e9);
    };
    let len = 1 << 24;
    let (mut param, grad) = (values(len, 8), values(len, 9));
    let (mut m, mut v) = (vec![0.0; len], vec![0.0; len]);
    let step = AdamWStep::usual(1e-3, 1);
    let time = measure(|| adamw(&mut param, &grad, &mut m, &mut v, 1.0, &step));
    report("adamw", "2^24", time, 28 * len);
    let mut norm = 0.0;
    let time = measure(|| norm = sum_of_squares(&grad));
    report("sum of squares", "2^24", time, 4 * len);

    let (rows, d) = (4096, 512);
    let (x, weight, dy) = (values(rows * d, 10), values(d, 11), values(rows * d, 12));
    let (mut y, mut dx, mut dweight) = (vec![0.0; rows * d], vec![0.0; rows * d], vec![0.0; d]);
    let time = measure(|| rms_norm_forward(&x, &weight, 1e-6, &mut y));
    report("rms_norm forward", "4096 x 512", time, 8 * rows * d);
    let time = measure(|| rms_norm_backward(&x, &weight, 1e-6, &dy, &mut dx, &mut dweight));
    report("rms_norm backward", "4096 x 512", time, 12 * rows * d);

    let d_ff = 1536;
    let (gate_up, dy) = (values(rows * 2 * d_ff, 13), values(rows * d_ff, 14));
    let (mut y, mut d_gate_up) = (vec![0.0; rows * d_ff], vec![0.0; rows * 2 * d_ff]);
    let time = measure(|| swiglu_forward(&gate_up, d_ff, &mut y));
    report("swiglu forward", "4096 x 1536", time, 12 * rows * d_ff);
    let time = measure(|| swiglu_backward(&gate_up, d_ff, &dy, &mut d_gate_up));
    report("swiglu backward", "4096 x 1536", time, 20 * rows * d_ff);

    let (q_weight, k_weight) = (values(64, 15), values(64, 16));
    let (cos, sin) = (values(rows * 32, 17), values(rows * 32, 18));
    let (start, end) = (vec![0; rows], vec![rows as i32; rows]);
    let documents = Documents::new(&start, &end);
    let op = QkNormRope {
        batch: 1,
        seq_len: rows,
        num_heads: 8,
        num_kv_heads: 4,
        head_dim: 64,
        q_weight: &q_weight,
        k_weight: &k_weight,
        eps: 1e-6,
        cos: &cos,
        sin: &sin,
        position_offset: 0,
    };
    let (qkv, d_out) = (values(rows * 1024, 19), values(rows * 1024, 20));
    let (mut out, mut d_qkv) = (vec![0.0; rows * 1024], vec![0.0; rows * 1024]);
    let (mut d_q_weight, mut d_k_weight) = (vec![0.0; 64], vec![0.0; 64]);
    let time = measure(|| qk_norm_rope_forward(&op, &qkv, documents, &mut out));
    report("qk_norm_rope forward", "4096 x 16 x 64", time, 8 * rows * 1024);
    let time = measure(|| {
        qk_norm_rope_backward(&op, &qkv, documents, &d_out, &mut d_qkv, &mut d_q_weight, &mut d_k_weight);
    });
    report("qk_norm_rope backward", "4096 x 16 x 64", time, 12 * rows * 1024);

    let ids: Vec<i32> = (0..rows).map(|i| (i * 7919 % 8192) as i32).collect();
    let mut dweight = vec![0.0; 8192 * d];
    let time = measure(|| embedding_backward(&x, &ids, d, &mut dweight));
    report("embedding backward", "4096 x 512, 8192 ids", time, 4 * (rows + 8192) * d);
}
