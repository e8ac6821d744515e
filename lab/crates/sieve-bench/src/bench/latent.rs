//! Rows of latent attention (MLA): attention, packing of q, k and v, decoding over latents.
use super::rows::dense;
use crate::device::Device;
use crate::error::Result;
use crate::timed::{Bench, NO_WINDOW, Work};
use sieve_kernels::{AttentionShape, CudaTensor, DType, LatentKeys, MlaNorm, MlaPack, mla_decode};

const HEADS: usize = 16;
const HEAD_DIM: usize = 128;
const ROPE_DIM: usize = 64;

/// Times all rows of latent attention, or attention alone at the sizes that the user asked for.
pub(super) fn rows(bench: &mut Bench<'_>) -> Result<()> {
    if bench.settings.has_sizes() {
        for AttentionShape { seq_len, num_heads, .. } in bench.settings.shapes(&[[HEADS; 2]], &[8192], HEAD_DIM) {
            let widths = [HEAD_DIM + ROPE_DIM, HEAD_DIM];
            let shape = AttentionShape::new(1, seq_len, [num_heads; 2], widths);
            dense(bench, shape, NO_WINDOW)?;
        }
        return Ok(());
    }
    for (batch, seq_len) in [(2, 8192), (8, 2048), (1, 32768)] {
        dense(bench, shape(batch, seq_len), NO_WINDOW)?;
    }
    pack(bench, shape(2, 8192))?;
    for (batch, len) in [(1, 8192), (1, 131_072), (16, 8192)] {
        decoding(bench, batch, len);
    }
    Ok(())
}

pub(super) fn shape(batch: usize, seq_len: usize) -> AttentionShape {
    AttentionShape::new(batch, seq_len, [HEADS, HEADS], [HEAD_DIM + ROPE_DIM, HEAD_DIM])
}

/// Times the packing of q, k and v with rotation, and its backward pass, without and with norms.
fn pack(bench: &mut Bench<'_>, shape: AttentionShape) -> Result<()> {
    let AttentionShape { batch, seq_len, .. } = shape;
    let device = bench.device.clone();
    let inputs = [HEADS * (HEAD_DIM + ROPE_DIM), HEADS * 2 * HEAD_DIM, ROPE_DIM]
        .map(|width| bench.bf16([batch, seq_len, width]));
    let position_list: Vec<i32> = (0..batch * seq_len).map(|at| (at % seq_len) as i32).collect();
    let half = ROPE_DIM / 2;
    let table = || device.float(&vec![0.5; seq_len * half], &[seq_len, half], DType::F32);
    let (positions, cos, sin) = (device.int(&position_list, &[batch, seq_len]), table(), table());
    let [q_weight, k_weight] = [(); 2].map(|()| bench.bf16([HEAD_DIM + ROPE_DIM]));
    let norm = MlaNorm { q_weight: &q_weight, k_weight: &k_weight, epsilon: 1e-6 };
    for (norm, names) in [
        (None, ["latent pack forward", "latent pack backward"]),
        (Some(norm), ["latent pack forward, normed", "latent pack backward, normed"]),
    ] {
        let args = MlaPack {
            num_heads: HEADS,
            head_dim: HEAD_DIM,
            rope_dim: ROPE_DIM,
            positions: &positions,
            cos: &cos,
            sin: &sin,
            norm,
        };
        let (packed, _) = args.mla_pack_forward(inputs.each_ref())?;
        let read = inputs.iter().map(CudaTensor::num_elements).sum::<usize>();
        let bytes = 2.0 * (packed.num_elements() + read) as f64;
        bench.row(names[0], shape, Work::Bytes(bytes), || args.mla_pack_forward(inputs.each_ref()));
        // The backward pass of a norm reads the inputs too.
        let again = if norm.is_some() { 2.0 * read as f64 } else { 0.0 };
        bench.row(names[1], shape, Work::Bytes(bytes + again), || {
            args.mla_pack_backward(Some(inputs.each_ref()), &packed)
        });
    }
    Ok(())
}

/// Times one new token a row over `len` cached latents of 512 columns with a rotated key of 64.
fn decoding(bench: &mut Bench<'_>, batch: usize, len: usize) {
    const RANK: usize = 512;
    let width = RANK + ROPE_DIM;
    let shape = AttentionShape::new(batch, len, [HEADS, 1], [width, RANK]);
    let q = bench.bf16([batch, 1, HEADS, width]);
    let latents = bench.bf16([batch, len, width]);
    let factors = bench.device.float(&vec![0.5; batch * len * HEADS], &[batch, len, HEADS], DType::F32);
    for (name, key_scale) in [("latent decode", None), ("latent decode, normed", Some(&factors))] {
        let factor_bytes = key_scale.map_or(0, |scale| 4 * scale.num_elements());
        let work = Work::Bytes((2 * latents.num_elements() + factor_bytes) as f64);
        let keys = LatentKeys {
            latents: &latents,
            rank: RANK,
            key_scale,
            length: None, // every row has all `len` tokens
        };
        let softmax_scale = 0.07;
        bench.row(name, shape, work, || mla_decode(&q, keys, softmax_scale));
    }
}
