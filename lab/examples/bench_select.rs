//! Times selection and sparse prefill attention against dense attention, and how selection scales with the prompt.
//!
//! `cargo run --release -p sieve-select --example bench_select -- [tokens] [heads] [kv heads] [head_dim]
//! [selector…]`; 32768 tokens, 2 heads on 1 KV head of 128 by default. The queries and keys are synthetic: a sink, keys
//! that many queries attend to, and topics that last for 300 tokens and return. A trained model's may behave
//! differently.

#![allow(clippy::print_stdout, reason = "an example")]

use sieve_cpu::{Documents, Mask, ScaledShape, attention_forward};
use sieve_select::{Call, CallShape, Selector, dense_attention, density, recall};
use sieve_testing::{Random, Time, timed};

/// Selectors timed when the command names none.
const DEFAULT: [&str; 4] = ["bfla", "xattention", "pbs", "meanpool"];

/// Prompts of the growth measurement, in tokens.
const GROWTH: [usize; 6] = [1024, 2048, 4096, 8192, 16_384, 32_768];

/// One set of operands, as long as the longest measurement, serves all: a shorter call takes its first tokens.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: usize| -> Result<usize, std::num::ParseIntError> {
        arguments.get(at).map_or(Ok(default), |text| text.parse())
    };
    let (tokens, num_heads) = (number(0, 32_768)?, number(1, 2)?);
    let (num_kv_heads, head_dim) = (number(2, 1)?, number(3, 128)?);
    let named: Vec<&str> = arguments.iter().skip(4).map(String::as_str).collect();
    let selectors = if named.is_empty() { DEFAULT.to_vec() } else { named };
    let operands = Operands::new(tokens.max(GROWTH[GROWTH.len() - 1]), num_heads, num_kv_heads, head_dim);

    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    println!("{tokens} tokens, {num_heads} query heads on {num_kv_heads}, head_dim {head_dim}, {threads} threads");
    let packed = operands.packed_dense(tokens)?;
    let call = operands.call(tokens)?;
    let (dense, listed) = timed(|| dense_attention(&call));
    let dense = dense?;
    let flops = 4.0 * call.shape.causal_pairs() as f64 * (num_heads * head_dim) as f64;
    println!("seconds are on the clock; CPU seconds are of all threads, which a busy machine changes less");
    for (name, time) in [("dense, packed", packed), ("dense, all tiles", listed)] {
        println!("{name:18} {:8.3} s {:8.3} CPU s {:7.1} GFLOP per CPU s", time.wall, time.cpu, flops / time.cpu / 1e9);
    }
    println!(
        "{:18} {:>8} {:>8} {:>9} {:>9} {:>8} {:>8} {:>8} {:>9} {:>9}",
        "selector", "s", "CPU s", "select s", "permute s", "tokens", "tiles", "recall", "x packed", "x tiles"
    );
    for text in &selectors {
        let selector = Selector::parse(text)?;
        let (done, time) = timed(|| selector.prefill(&call));
        let done = done?;
        let shares = density(&done.selected);
        println!(
            "{:18} {:8.3} {:8.3} {:9.4} {:9.4} {:8.4} {:8.4} {:8.4} {:9.2} {:9.2}",
            selector.name(),
            time.wall,
            time.cpu,
            done.selected.stats.select_seconds,
            done.selected.stats.permute_seconds,
            shares.token,
            shares.tile,
            recall(&done.output.lse, &dense.lse),
            packed.cpu / time.cpu,
            listed.cpu / time.cpu,
        );
    }
    println!("\nselection, best CPU seconds of 5; the exponent over all lengths, and over the last {FITTED}");
    for text in &selectors {
        growth(&operands, &Selector::parse(text)?)?;
    }
    Ok(())
}

/// The second exponent is fitted to this many of the longest prompts: overheads distort the times of shorter ones.
const FITTED: usize = 4;

/// Prints selection times over prompt lengths, and the slope of their logarithms over all lengths and over the last
/// `FITTED`.
fn growth(operands: &Operands, selector: &Selector) -> Result<(), Box<dyn std::error::Error>> {
    let mut points = Vec::new();
    for tokens in GROWTH {
        let call = operands.call(tokens)?;
        let mut best = f64::INFINITY;
        for _ in 0..5 {
            let (mask, time) = timed(|| selector.select(&call));
            mask?;
            best = best.min(time.cpu);
        }
        points.push((tokens as f64, best));
    }
    let text: Vec<String> = points.iter().map(|(n, s)| format!("{n}: {s:.5}")).collect();
    println!(
        "{:18} exponent {:.2} {:.2}   {}",
        selector.name(),
        slope(&points),
        slope(&points[points.len() - FITTED..]),
        text.join("  ")
    );
    Ok(())
}

/// Least-squares slope of log seconds over log tokens.
fn slope(points: &[(f64, f64)]) -> f64 {
    let n = points.len() as f64;
    let logs = points.iter().map(|(x, y)| (x.ln(), y.ln()));
    let (x, y) = logs.clone().fold((0.0, 0.0), |sum, (x, y)| (sum.0 + x / n, sum.1 + y / n));
    let (xy, xx) = logs.fold((0.0, 0.0), |sum, (a, b)| (sum.0 + (a - x) * (b - y), sum.1 + (a - x).powi(2)));
    xy / xx
}

/// q, k and v of the longest prompt; a shorter prompt takes their first tokens.
struct Operands {
    shape: CallShape,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Operands {
    /// Made-up operands with the sink, the columns and the topics that this file's head describes.
    fn new(tokens: usize, num_heads: usize, num_kv_heads: usize, head_dim: usize) -> Self {
        let mut random = Random(7);
        let topics: Vec<Vec<f32>> = (0..12).map(|_| random.vector(head_dim)).collect();
        let mut fill = |heads: usize, is_key: bool| {
            let mut x = random.vector(tokens * heads * head_dim);
            for (t, token) in x.chunks_exact_mut(heads * head_dim).enumerate() {
                // Topics change every few hundred tokens and return.
                let topic = &topics[(t / 300 * 7) % topics.len()];
                for head in token.chunks_exact_mut(head_dim) {
                    head.iter_mut().zip(topic).for_each(|(x, topic)| *x = 0.7 * *x + 0.8 * topic);
                    // One channel for columns: a sink, and one key in 499 that many queries attend to.
                    head[0] = match (is_key, t) {
                        (false, _) => 6.0,
                        (true, 0) => 22.0,
                        (true, _) if t % 499 == 17 => 16.0,
                        (true, _) => 0.0,
                    };
                }
            }
            x
        };
        let is_key = true;
        let (q, k, v) = (fill(num_heads, !is_key), fill(num_kv_heads, is_key), fill(num_kv_heads, is_key));
        let shape = CallShape::new([tokens; 2], [num_heads, num_kv_heads], head_dim);
        Self { shape, q, k, v }
    }

    /// A selector's call with the first `tokens` tokens alone.
    fn call(&self, tokens: usize) -> Result<Call<'_>, sieve_select::SelectError> {
        let whole = Call::new(self.shape, &self.q, &self.k, &self.v)?;
        // Layer 8 of 16: some methods are dense in the first layers.
        Ok(whole.in_layer(8, 16).chunk(0..tokens))
    }

    /// Time of dense attention on packed operands: q, k and v of each token side by side.
    fn packed_dense(&self, tokens: usize) -> Result<Time, sieve_select::SelectError> {
        let call = self.call(tokens)?;
        let heads = [call.shape.num_heads, call.shape.num_kv_heads];
        let shape = ScaledShape::new([1, tokens], heads, call.shape.head_dim);
        let (q_len, k_len) = (shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim);
        let mut qkv = Vec::with_capacity(tokens * shape.token_len());
        for t in 0..tokens {
            qkv.extend_from_slice(&call.q[t * q_len..(t + 1) * q_len]);
            qkv.extend_from_slice(&call.k[t * k_len..(t + 1) * k_len]);
            qkv.extend_from_slice(&call.v[t * k_len..(t + 1) * k_len]);
        }
        let (start, end) = (vec![0; tokens], vec![tokens as i32; tokens]);
        let documents = Documents::new(&start, &end);
        let (mut o, mut lse) = (vec![0.0; tokens * q_len], vec![0.0; tokens * shape.num_heads]);
        let mut run = || attention_forward(shape, &qkv, documents, Mask::Causal, &mut o, &mut lse);
        Ok(timed(&mut run).1)
    }
}
