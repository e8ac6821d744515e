//! The tokens of each compressed block side by side, or their mean; and the backward passes of both.

use rayon::prelude::*;

use super::{NsaBlocks, slot_starts};
use crate::attention::{AttentionShape, Documents};
use crate::rms_norm::add_partials;

/// Where the pieces of one op lie.
struct Places {
    shape: AttentionShape,
    blocks: NsaBlocks,
    num_slots: usize,
    /// `[batch, num_slots]`.
    starts: Vec<i32>,
}

impl Places {
    fn new(shape: AttentionShape, blocks: NsaBlocks, documents: Documents<'_>) -> Self {
        blocks.check();
        documents.check(shape.batch, shape.seq_len);
        Self {
            shape,
            blocks,
            num_slots: blocks.num_slots(shape.seq_len),
            starts: slot_starts(blocks, shape.batch, shape.seq_len, documents),
        }
    }

    /// Compressed keys (as many are values): `batch * num_slots * num_kv_heads`.
    fn rows(&self) -> usize {
        self.shape.batch * self.num_slots * self.shape.num_kv_heads
    }

    /// Token (of the batch) at which the block of `slot` (of the batch) starts.
    fn start(&self, slot: usize) -> Option<usize> {
        let start = usize::try_from(self.starts[slot]).ok()?;
        Some(slot / self.num_slots * self.shape.seq_len + start)
    }

    /// Element of the packed tensor at which the key (`which` 0) or value (1) of a token begins.
    fn at(&self, token: usize, which: usize, kv_head: usize) -> usize {
        let head = self.shape.num_heads + which * self.shape.num_kv_heads + kv_head;
        token * self.shape.token_len() + head * self.shape.head_dim
    }
}

/// Keys and values of every compressed block, flattened, plus one learned vector per position inside the block.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - k_positions, v_positions: `[l, head_dim]`
/// - out: `[2, batch * num_slots * num_kv_heads, l * head_dim]`, keys then values; written whole, empty slots as zeros
///
/// # Panics
/// When lengths do not fit.
pub fn nsa_blocks_forward(
    shape: AttentionShape,
    blocks: NsaBlocks,
    qkv: &[f32],
    documents: Documents<'_>,
    [k_positions, v_positions]: [&[f32]; 2],
    out: &mut [f32],
) {
    let places = Places::new(shape, blocks, documents);
    let (d, l) = (shape.head_dim, blocks.compress_block_size);
    let rows = places.rows();
    assert_eq!(out.len(), 2 * rows * l * d, "nsa_blocks_forward: out has another size");
    for (which, (out, positions)) in out
        .chunks_exact_mut((rows * l * d).max(1))
        .zip([k_positions, v_positions])
        .enumerate()
    {
        assert_eq!(
            positions.len(),
            l * d,
            "nsa_blocks_forward: positions are not [l, head_dim]"
        );
        out.par_chunks_mut(shape.num_kv_heads * l * d)
            .enumerate()
            .for_each(|(slot, out)| {
                let Some(start) = places.start(slot) else {
                    return out.fill(0.0);
                };
                for (kv_head, out) in out.chunks_exact_mut(l * d).enumerate() {
                    let rows = out.chunks_exact_mut(d).zip(positions.chunks_exact(d));
                    for (token, (out, position)) in rows.enumerate() {
                        let at = places.at(start + token, which, kv_head);
                        for ((out, x), p) in out.iter_mut().zip(&qkv[at..at + d]).zip(position) {
                            *out = x + p;
                        }
                    }
                }
            });
    }
}

/// Gradients of [`nsa_blocks_forward`].
///
/// # Shapes
/// - d_out: as its out; d_qkv: as its qkv (zeros for the queries), d_k_positions, d_v_positions: `[l, head_dim]`; all
///   gradients are written whole
///
/// # Panics
/// When lengths do not fit.
pub fn nsa_blocks_backward(
    shape: AttentionShape,
    blocks: NsaBlocks,
    documents: Documents<'_>,
    d_out: &[f32],
    d_qkv: &mut [f32],
    d_positions: [&mut [f32]; 2],
) {
    let places = Places::new(shape, blocks, documents);
    let (d, l) = (shape.head_dim, blocks.compress_block_size);
    let rows = places.rows();
    assert_eq!(
        d_out.len(),
        2 * rows * l * d,
        "nsa_blocks_backward: d_out has another size"
    );
    scatter(&places, d_qkv, |which, row, token| {
        let at = ((which * rows + row) * l + token) * d;
        (&d_out[at..at + d], 1.0)
    });
    for (d_out, d_positions) in d_out.chunks_exact((rows * l * d).max(1)).zip(d_positions) {
        // One partial sum per batch row, whatever the number of threads.
        let of_row = places.num_slots * shape.num_kv_heads * l * d;
        let partial: Vec<Vec<f32>> = d_out
            .par_chunks(of_row.max(1))
            .enumerate()
            .map(|(row, d_out)| {
                let mut sum = vec![0.0; l * d];
                let of_slot = d_out.chunks_exact(shape.num_kv_heads * l * d);
                for (slot, d_out) in of_slot.enumerate() {
                    if places.start(row * places.num_slots + slot).is_some() {
                        for block in d_out.chunks_exact(l * d) {
                            for (sum, x) in sum.iter_mut().zip(block) {
                                *sum += x;
                            }
                        }
                    }
                }
                sum
            })
            .collect();
        add_partials(&partial, d_positions);
    }
}

/// Mean of the keys, and of the values, of every compressed block.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - out: `[2, batch * num_slots * num_kv_heads, head_dim]`; written whole, empty slots as zeros
///
/// # Panics
/// When lengths do not fit.
pub fn nsa_mean_pool_forward(
    shape: AttentionShape,
    blocks: NsaBlocks,
    qkv: &[f32],
    documents: Documents<'_>,
    out: &mut [f32],
) {
    let places = Places::new(shape, blocks, documents);
    let (d, l) = (shape.head_dim, blocks.compress_block_size);
    let rows = places.rows();
    assert_eq!(out.len(), 2 * rows * d, "nsa_mean_pool_forward: out has another size");
    let slots = out.par_chunks_mut((shape.num_kv_heads * d).max(1));
    let num_slots = shape.batch * places.num_slots;
    slots.enumerate().for_each(|(slot, out)| {
        out.fill(0.0);
        let (which, slot) = (slot / num_slots, slot % num_slots);
        let Some(start) = places.start(slot) else {
            return;
        };
        for (kv_head, out) in out.chunks_exact_mut(d).enumerate() {
            for token in start..start + l {
                let at = places.at(token, which, kv_head);
                for (out, x) in out.iter_mut().zip(&qkv[at..at + d]) {
                    *out += x;
                }
            }
            for out in out {
                *out /= l as f32;
            }
        }
    });
}

/// Gradient of [`nsa_mean_pool_forward`].
///
/// # Shapes
/// - d_out: as its out; d_qkv: as its qkv (zeros for the queries), written whole
///
/// # Panics
/// When lengths do not fit.
pub fn nsa_mean_pool_backward(
    shape: AttentionShape,
    blocks: NsaBlocks,
    documents: Documents<'_>,
    d_out: &[f32],
    d_qkv: &mut [f32],
) {
    let places = Places::new(shape, blocks, documents);
    let d = shape.head_dim;
    let rows = places.rows();
    assert_eq!(
        d_out.len(),
        2 * rows * d,
        "nsa_mean_pool_backward: d_out has another size"
    );
    let factor = 1.0 / blocks.compress_block_size as f32;
    scatter(&places, d_qkv, |which, row, _| {
        let at = (which * rows + row) * d;
        (&d_out[at..at + d], factor)
    });
}

/// Writes d_qkv: for each key and value the sum of `gradient(which, compressed row, token in block)` over the blocks
/// that hold it, in order of the blocks; zeros for queries.
fn scatter<'g>(places: &Places, d_qkv: &mut [f32], gradient: impl Fn(usize, usize, usize) -> (&'g [f32], f32) + Sync) {
    let Places {
        shape,
        blocks,
        num_slots,
        ..
    } = places;
    let (n, d, kv_heads) = (shape.seq_len, shape.head_dim, shape.num_kv_heads);
    let (l, s) = (blocks.compress_block_size, blocks.compress_stride);
    assert_eq!(
        d_qkv.len(),
        shape.batch * n * shape.token_len(),
        "nsa: d_qkv has another size"
    );
    d_qkv
        .par_chunks_mut((n * shape.token_len()).max(1))
        .enumerate()
        .for_each(|(row, d_qkv)| {
            d_qkv.fill(0.0);
            for slot in row * num_slots..(row + 1) * num_slots {
                let Some(start) = places.start(slot) else {
                    continue;
                };
                let start = start - row * n;
                debug_assert!(start + l <= n && l >= s);
                for token in 0..l {
                    for which in 0..2 {
                        for kv_head in 0..kv_heads {
                            let at = places.at(start + token, which, kv_head);
                            let (x, factor) = gradient(which, slot * kv_heads + kv_head, token);
                            for (sum, x) in d_qkv[at..at + d].iter_mut().zip(x) {
                                *sum += factor * x;
                            }
                        }
                    }
                }
            }
        });
}
