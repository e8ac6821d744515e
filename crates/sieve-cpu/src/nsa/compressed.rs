//! Attention over the compressed blocks: an ordinary masked attention in which each block's key and value stand at its
//! last token and nothing else is ever seen.

use rayon::prelude::*;
use sieve_core::BlockChoice;

use super::select::choose_key_blocks;
use super::{NsaBlocks, documents_of, slot_starts};
use crate::attention::{AttentionShape, Documents, Mask, attention_backward, attention_forward};

/// The packed tensor of the branch, and its mask.
struct Placed {
    qkv: Vec<f32>,
    /// `[batch, num_kv_heads, seq_len]`.
    expire: Vec<i32>,
    delta: Vec<f32>,
}

/// Calls `visit(row, last token, slot of the batch)` for every compressed block.
fn for_each_block(
    shape: AttentionShape,
    blocks: NsaBlocks,
    documents: Documents<'_>,
    mut visit: impl FnMut(usize, usize, usize),
) {
    let num_slots = blocks.num_slots(shape.seq_len);
    let starts = slot_starts(blocks, shape.batch, shape.seq_len, documents);
    for (slot, &start) in starts.iter().enumerate() {
        if let Ok(start) = usize::try_from(start) {
            let last = start + blocks.compress_block_size - 1;
            visit(slot / num_slots, last, slot);
        }
    }
}

fn check(shape: AttentionShape, blocks: NsaBlocks, documents: Documents<'_>, compressed: &[f32]) {
    blocks.check();
    documents.check(shape.batch, shape.seq_len);
    let rows = shape.batch * blocks.num_slots(shape.seq_len) * shape.num_kv_heads;
    assert_eq!(
        compressed.len(),
        2 * rows * shape.head_dim,
        "nsa_compressed: compressed is not [2, batch * num_slots * num_kv_heads, head_dim]"
    );
}

fn place(
    shape: AttentionShape,
    blocks: NsaBlocks,
    qkv: &[f32],
    documents: Documents<'_>,
    compressed: &[f32],
) -> Placed {
    let (n, d, kv_heads) = (shape.seq_len, shape.head_dim, shape.num_kv_heads);
    let (token_len, q_len) = (shape.token_len(), shape.num_heads * d);
    let mut placed = vec![0.0; qkv.len()];
    placed
        .par_chunks_exact_mut(token_len)
        .zip(qkv.par_chunks_exact(token_len))
        .for_each(|(placed, qkv)| placed[..q_len].copy_from_slice(&qkv[..q_len]));
    // A key whose expiry is its own position is never seen.
    let mut expire: Vec<i32> = (0..shape.batch * kv_heads).flat_map(|_| 0..n as i32).collect();
    let (k, v) = compressed.split_at(compressed.len() / 2);
    for_each_block(shape, blocks, documents, |row, last, slot| {
        let token = &mut placed[(row * n + last) * token_len..][..token_len];
        let (place_k, place_v) = token[q_len..].split_at_mut(kv_heads * d);
        let from = slot * kv_heads * d..(slot + 1) * kv_heads * d;
        place_k.copy_from_slice(&k[from.clone()]);
        place_v.copy_from_slice(&v[from]);
        for kv_head in 0..kv_heads {
            expire[(row * kv_heads + kv_head) * n + last] = documents.end[row * n + last];
        }
    });
    Placed {
        qkv: placed,
        delta: vec![0.0; expire.len()],
        expire,
    }
}

/// Attention over the compressed blocks, and the blocks of the selected branch: a query's forced blocks (its document's
/// first, its own and the one before) and those with the largest importance, which is the compressed branch's
/// probability summed over the overlapping compressed blocks and the heads of the group; ties go to the later block.
///
/// A query that sees no compressed block has `o = 0` and `lse = -inf`.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`; only its queries are read
/// - compressed: `[2, batch * num_slots * num_kv_heads, head_dim]`, keys then values
/// - o: `[batch, seq_len, num_heads, head_dim]`, lse: `[batch, num_heads, seq_len]`; written whole
/// - block_indices: `[batch, seq_len, num_kv_heads, num_selected_blocks]`: blocks counted from the document's first
///   token, ascending, then -1 where fewer exist; written whole
///
/// # Panics
/// When lengths do not fit.
#[allow(clippy::too_many_arguments, reason = "the operands of one op, all slices")]
pub fn nsa_compressed_attention_forward(
    shape: AttentionShape,
    blocks: NsaBlocks,
    qkv: &[f32],
    documents: Documents<'_>,
    compressed: &[f32],
    o: &mut [f32],
    lse: &mut [f32],
    block_indices: &mut [i32],
) {
    check(shape, blocks, documents, compressed);
    let placed = place(shape, blocks, qkv, documents, compressed);
    let mask = Mask::Expire {
        expire: &placed.expire,
        delta: &placed.delta,
    };
    attention_forward(shape, &placed.qkv, documents, mask, o, lse);
    let keys = &compressed[..compressed.len() / 2];
    let choice = BlockChoice::nsa(blocks);
    choose_key_blocks(shape, choice, qkv, documents, keys, Some(lse), block_indices);
}

/// Gradients of [`nsa_compressed_attention_forward`]'s o; the choice of blocks has none.
///
/// # Shapes
/// - d_qkv: as qkv, zeros for keys and values; d_compressed: as compressed; both written whole
///
/// # Panics
/// When lengths do not fit.
#[allow(clippy::too_many_arguments, reason = "the operands of one op, all slices")]
pub fn nsa_compressed_attention_backward(
    shape: AttentionShape,
    blocks: NsaBlocks,
    qkv: &[f32],
    documents: Documents<'_>,
    compressed: &[f32],
    o: &[f32],
    lse: &[f32],
    d_o: &[f32],
    d_qkv: &mut [f32],
    d_compressed: &mut [f32],
) {
    check(shape, blocks, documents, compressed);
    assert_eq!(
        d_compressed.len(),
        compressed.len(),
        "nsa_compressed_attention_backward: d_compressed is not as long as compressed"
    );
    let placed = place(shape, blocks, qkv, documents, compressed);
    let mask = Mask::Expire {
        expire: &placed.expire,
        delta: &placed.delta,
    };
    attention_backward(shape, &placed.qkv, documents, mask, o, lse, d_o, d_qkv, None);
    let (n, d, kv_heads) = (shape.seq_len, shape.head_dim, shape.num_kv_heads);
    let (token_len, q_len) = (shape.token_len(), shape.num_heads * d);
    d_compressed.fill(0.0);
    let (d_k, d_v) = d_compressed.split_at_mut(compressed.len() / 2);
    for_each_block(shape, blocks, documents, |row, last, slot| {
        let token = &d_qkv[(row * n + last) * token_len..][..token_len];
        let (from_k, from_v) = token[q_len..].split_at(kv_heads * d);
        let to = slot * kv_heads * d..(slot + 1) * kv_heads * d;
        d_k[to.clone()].copy_from_slice(from_k);
        d_v[to].copy_from_slice(from_v);
    });
    d_qkv
        .par_chunks_exact_mut(token_len)
        .for_each(|token| token[q_len..].fill(0.0));
}

/// Tiles of at most `tokens` tokens that cross no document: row, document, tokens.
pub(super) fn document_tiles(
    shape: AttentionShape,
    documents: Documents<'_>,
    tokens: impl Fn(usize) -> usize,
) -> Vec<(usize, std::ops::Range<usize>, std::ops::Range<usize>)> {
    let mut tiles = Vec::new();
    for row in 0..shape.batch {
        for document in documents_of(documents, row, shape.seq_len) {
            let step = tokens(document.len());
            for first in document.clone().step_by(step) {
                let last = (first + step).min(document.end);
                tiles.push((row, document.clone(), first..last));
            }
        }
    }
    tiles
}
