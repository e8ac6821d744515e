//! Rows of selectors from end to end: selection, attention under its mask, both; beside dense attention of the same
//! operands.
use super::Bench;
use super::rows::{forward_flops, shape};
use crate::device::Device;
use crate::error::Result;
use crate::shape::sizes;
use burn::tensor::{DType, Distribution, Tensor, TensorData};
use burn_cuda::CudaDevice;
use sieve_core::BlockSelection;
use sieve_kernels::{
    AttentionResult, AttentionShape, CudaTensor, KernelError, Qkv, SelectedBlocks,
    attention_forward, correct_by_probes, select_blocks, sparse_attention_forward,
};
use sieve_ops::Cuda;
use sieve_select::{CallShape, Selector};
use sieve_testing::Random;
use std::time::Instant;

/// Tokens of a prompt.
const LENGTHS: [usize; 4] = [8_192, 32_768, 131_072, 524_288];

/// Up to this many tokens dense attention is timed as often as all else, and attention beside the whole.
const ALL_ROWS_UP_TO: usize = 131_072;

/// Settings are the papers' but for XAttention's stride, which grows with the length.
const SELECTORS: [&str; 11] = [
    "meanpool",
    "block_sparse",
    "bfla",
    "xattention:stride=16",
    "flexprefill",
    "minference",
    "pbs",
    "ba_att",
    "ba_att:sparsity=0.9",
    "momo:first_dense_layers=0",
    "delta:base=xattention,base.stride=16",
];

/// Operands with the structure of attention: neighbouring tokens share a topic, a query looks for its own and for
/// earlier ones, and for the first tokens.
mod generator {
    /// Tokens of a topic.
    pub(super) const TOPIC: usize = 256;
    /// Earlier topics that a query looks for, drawn among all before it; each weighs `DECAY` of the last.
    pub(super) const EARLIER: usize = 24;
    pub(super) const OWN_WEIGHT: f32 = 0.5;
    pub(super) const EARLIER_WEIGHT: f32 = 0.5;
    pub(super) const DECAY: f32 = 0.95;
    /// Of normal numbers in every query and key.
    pub(super) const NOISE: f32 = 0.7;
    /// First tokens that every query looks for, and how much.
    pub(super) const SINKS: usize = 4;
    pub(super) const SINK_WEIGHT: f32 = 0.5;
}

/// 32 query heads over 8 KV heads of width 128.
pub(crate) fn rows(bench: &mut Bench<'_>) -> Result<()> {
    for seq_len in LENGTHS {
        let shape = shape(1, seq_len, [32, 8], 128);
        // Operands are drawn in f32; scores and lists take no more.
        let bytes = 12.0 * (seq_len * 48 * 128) as f64 + 6e9;
        if !bench.fits("selectors", shape, bytes)? {
            continue;
        }
        let operands = Operands::draw(shape, &bench.device);
        let scale = 1.0 / (shape.head_dim as f32).sqrt();
        let flops = forward_flops(shape, seq_len);
        let dense = || attention_forward(&operands.qkv, &operands.doc_start, None, scale, None);
        let is_short = seq_len <= ALL_ROWS_UP_TO;
        if is_short {
            bench.flops("dense", shape, flops, &mut || dense().map(drop));
        }
        let started = Instant::now();
        let dense_lse = bench.device.floats(&dense()?.lse)?;
        if !is_short {
            let seconds = started.elapsed().as_secs_f64();
            bench.skip(
                "dense",
                shape,
                &format!("{seconds:.2} s, once, on the host's clock"),
            );
        }
        for name in SELECTORS {
            let selector = Selector::parse(name).expect("the names above are right");
            let call = CallShape {
                num_queries: seq_len,
                num_keys: seq_len,
                num_heads: shape.num_heads,
                num_kv_heads: shape.num_kv_heads,
                head_dim: shape.head_dim,
            };
            let Some(selection) = selector.block_selection(call, 0, 0) else {
                bench.skip(name, shape, "dense at this length");
                continue;
            };
            let select = || select_blocks(&operands.qkv, &selection);
            let correction = selector.correction(call, 0);
            let attend = |made: &SelectedBlocks| -> Result<AttentionResult, KernelError> {
                let done =
                    sparse_attention_forward(&operands.qkv, &made.layout, &made.data, scale)?;
                if let Some(correction) = correction {
                    let dense = selection.dense_rows.first().cloned().unwrap_or(0..0);
                    correct_by_probes(&operands.qkv, &done.o, correction, dense, scale)?;
                }
                Ok(done)
            };
            let made = match select() {
                Ok(made) => made,
                Err(error) => {
                    bench.skip(name, shape, &error.to_string());
                    continue;
                }
            };
            let kept = Kept::of(bench, &selection, &made, &attend(&made)?.lse, &dense_lse)?;
            bench.skip(name, shape, &kept.to_string());
            let flops = 4.0 * shape.head_dim as f64 * kept.pairs;
            let row = |part: &str| format!("{name}: {part}");
            if !is_short {
                let mut once = |part: &str, attends: bool| -> Result<()> {
                    let started = Instant::now();
                    let made = select()?;
                    let done = attends.then(|| attend(&made)).transpose()?;
                    // The clock waits for the device.
                    bench.device.ints(&made.nan_rows)?;
                    drop(done);
                    let seconds = started.elapsed().as_secs_f64();
                    let text = format!("{:.1} ms, once, on the host's clock", 1e3 * seconds);
                    bench.skip(&row(part), shape, &text);
                    Ok(())
                };
                once("selection", false)?;
                once("whole", true)?;
                continue;
            }
            bench.time(&row("selection"), shape, &mut || select().map(drop));
            let attention = &mut || attend(&made).map(drop);
            match correction {
                // Its dense rows are not among the mask's pairs.
                Some(_) => bench.time(&row("attention"), shape, attention),
                None => drop(bench.flops(&row("attention"), shape, flops, attention)),
            }
            bench.time(&row("whole"), shape, &mut || attend(&select()?).map(drop));
        }
    }
    Ok(())
}

/// What a mask keeps of dense attention.
struct Kept {
    pairs: f64,
    density: f64,
    mass: f64,
}

impl Kept {
    fn of(
        bench: &Bench<'_>,
        selection: &BlockSelection,
        made: &SelectedBlocks,
        lse: &CudaTensor,
        dense_lse: &[f32],
    ) -> Result<Self> {
        let pairs = bench.device.ints(&made.pairs)?;
        let pairs: f64 = pairs.iter().map(|&pairs| f64::from(pairs)).sum();
        let pairs = pairs * selection.heads_per_list as f64;
        let tokens = selection.num_keys as f64;
        let lse = bench.device.floats(lse)?;
        let mass = lse.iter().zip(dense_lse);
        let mass: f64 = mass.map(|(x, dense)| f64::from(x - dense).exp()).sum();
        Ok(Self {
            pairs,
            density: pairs / (tokens * (tokens + 1.0) / 2.0 * selection.num_heads as f64),
            mass: mass / lse.len() as f64,
        })
    }
}

impl std::fmt::Display for Kept {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            out,
            "keeps {:.4} of the pairs, {:.4} of the mass",
            self.density, self.mass
        )
    }
}

/// Drawn operands.
struct Operands {
    qkv: Qkv,
    doc_start: CudaTensor,
}

impl Operands {
    fn draw(shape: AttentionShape, device: &CudaDevice) -> Self {
        let [_, seq_len, num_heads, num_kv_heads, head_dim, _] = sizes(shape);
        use generator as g;
        let topics = seq_len / g::TOPIC;
        let normal = |shape: [usize; 3]| {
            Tensor::<Cuda, 3>::random(shape, Distribution::Normal(0.0, 1.0), device)
        };
        let group = num_heads / num_kv_heads;
        let of_keys = normal([num_kv_heads, topics, head_dim]);
        // Each token of a topic has its vector.
        let spread = |x: Tensor<Cuda, 3>| {
            let [heads, topics, width] = x.dims();
            let x = x.reshape([heads, topics, 1, width]);
            let x = x.expand([heads, topics, g::TOPIC, width]);
            x.reshape([heads, seq_len, width])
        };
        let noisy = |x: Tensor<Cuda, 3>| {
            let noise = normal(x.dims()).mul_scalar(g::NOISE);
            x + noise
        };
        let sink = normal([num_kv_heads, 1, head_dim]);
        let mut keys = noisy(spread(of_keys.clone()));
        let first = sink.clone().expand([num_kv_heads, g::SINKS, head_dim]);
        keys = keys.slice_assign([0..num_kv_heads, 0..g::SINKS, 0..head_dim], first);
        // Query heads of a group look for topics of their own.
        let wanted = wanted_topics(num_heads, topics);
        let wanted = TensorData::new(wanted, [num_heads, topics, topics]);
        let wanted = Tensor::<Cuda, 3>::from_data(wanted, device);
        let per_head = |x: Tensor<Cuda, 3>| {
            let [heads, rows, width] = x.dims();
            let x = x.reshape([heads, 1, rows, width]);
            let x = x.expand([heads, group, rows, width]);
            x.reshape([num_heads, rows, width])
        };
        let queries = wanted.matmul(per_head(of_keys));
        let queries = noisy(spread(queries)) + per_head(sink).mul_scalar(g::SINK_WEIGHT);
        let values = normal([num_kv_heads, seq_len, head_dim]);
        let stored = |x: Tensor<Cuda, 3>| {
            let [heads, rows, width] = x.dims();
            let x = x.cast(DType::BF16).swap_dims(0, 1);
            let x = x.reshape([1, rows, heads, width]);
            CudaTensor::from(x.into_primitive().tensor()).contiguous()
        };
        Self {
            qkv: Qkv::separate(&stored(queries), &stored(keys), &stored(values)),
            doc_start: device.int(&vec![0; seq_len], &[1, seq_len]),
        }
    }
}

/// The weight of each topic for the queries of each topic, `[heads, topics, topics]`.
fn wanted_topics(heads: usize, topics: usize) -> Vec<f32> {
    use generator as g;
    let mut random = Random(11);
    let mut wanted = vec![0.0; heads * topics * topics];
    for (at, row) in wanted.chunks_exact_mut(topics).enumerate() {
        let own = at % topics;
        row[own] += g::OWN_WEIGHT;
        let mut weight = g::EARLIER_WEIGHT;
        for _ in 0..g::EARLIER {
            row[random.below(own + 1)] += weight;
            weight *= g::DECAY;
        }
    }
    wanted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_look_for_topics_before_them() {
        let wanted = wanted_topics(2, 40);
        for (at, row) in wanted.chunks_exact(40).enumerate() {
            let own = at % 40;
            assert!(row[own] >= generator::OWN_WEIGHT);
            assert!(row[own + 1..].iter().all(|&weight| weight == 0.0), "{at}");
        }
    }
}
