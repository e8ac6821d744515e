//! The definition in f64, token by token, as the paper writes it: what the fast path is tested against.

use super::{NsaBlocks, documents_of};
use crate::attention::{AttentionShape, Documents};
use crate::reference::{Attended, Key, Rounding, attend};

/// A packed tensor in f64 with its sizes.
#[derive(Clone, Copy)]
pub(crate) struct Packed<'a> {
    pub(crate) shape: AttentionShape,
    pub(crate) qkv: &'a [f64],
}

impl<'a> Packed<'a> {
    pub(crate) fn head(&self, row: usize, token: usize, head: usize) -> &'a [f64] {
        let (n, d) = (self.shape.seq_len, self.shape.head_dim);
        let at = (row * n + token) * self.shape.token_len() + head * d;
        &self.qkv[at..at + d]
    }

    pub(crate) fn k(&self, row: usize, token: usize, kv_head: usize) -> &'a [f64] {
        self.head(row, token, self.shape.num_heads + kv_head)
    }

    pub(crate) fn v(&self, row: usize, token: usize, kv_head: usize) -> &'a [f64] {
        self.k(row, token, self.shape.num_kv_heads + kv_head)
    }
}

/// What a branch computes.
pub(crate) struct Output {
    pub(crate) o: Vec<f64>,
    pub(crate) lse: Vec<f64>,
    /// Importance of the blocks `0..=own` of each (row, token, KV head).
    pub(crate) importance: Vec<Vec<f64>>,
}

impl Output {
    fn zeros(shape: AttentionShape) -> Self {
        let rows = shape.batch * shape.seq_len * shape.num_heads;
        Self {
            o: vec![0.0; rows * shape.head_dim],
            lse: vec![0.0; rows],
            importance: Vec::new(),
        }
    }

    /// Attention of one query, written where it belongs; its probabilities.
    fn attend<'a>(
        &mut self,
        shape: AttentionShape,
        q: &[f64],
        keys: impl Iterator<Item = (&'a [f64], &'a [f64])>,
        [row, token, head]: [usize; 3],
    ) -> Vec<f64> {
        let keys: Vec<_> = keys.map(|(k, v)| Key { k, v, bias: 0.0 }).collect();
        let at = (row * shape.seq_len + token) * shape.num_heads + head;
        let o = &mut self.o[at * shape.head_dim..][..shape.head_dim];
        let scale = f64::from(shape.softmax_scale);
        let Attended { lse, p } = attend(q, &keys, scale, Rounding::None, o);
        self.lse[(row * shape.num_heads + head) * shape.seq_len + token] = lse;
        p
    }
}

/// Calls `visit(row, document, token)` for every token.
pub(crate) fn for_each_token(
    shape: AttentionShape,
    documents: Documents<'_>,
    mut visit: impl FnMut(usize, std::ops::Range<usize>, usize),
) {
    for row in 0..shape.batch {
        for document in documents_of(documents, row, shape.seq_len) {
            for token in document.clone() {
                visit(row, document.clone(), token);
            }
        }
    }
}

/// Attention over compressed keys and values, `[2, batch * num_slots * num_kv_heads, head_dim]`, and the importances.
pub(crate) fn compressed(
    packed: Packed<'_>,
    blocks: NsaBlocks,
    documents: Documents<'_>,
    compressed: &[f64],
) -> Output {
    let shape = packed.shape;
    let (n, d, m) = (shape.seq_len, shape.head_dim, shape.group_size());
    let (l, s) = (blocks.compress_block_size, blocks.compress_stride);
    let slots = n.div_ceil(s);
    let (k, v) = compressed.split_at(compressed.len() / 2);
    let mut out = Output::zeros(shape);
    for_each_token(shape, documents, |row, document, token| {
        let t = token - document.start;
        let seen = (0..).take_while(|c| c * s + l - 1 <= t).count();
        let own = t / blocks.select_block_size;
        for kv_head in 0..shape.num_kv_heads {
            let mut p_sum = vec![0.0; seen];
            for head in kv_head * m..(kv_head + 1) * m {
                let q = packed.head(row, token, head);
                let keys = (0..seen).map(|c| {
                    let slot = row * slots + document.start.div_ceil(s) + c;
                    let at = (slot * shape.num_kv_heads + kv_head) * d;
                    (&k[at..at + d], &v[at..at + d])
                });
                let p = out.attend(shape, q, keys, [row, token, head]);
                for (sum, p) in p_sum.iter_mut().zip(p) {
                    *sum += p;
                }
            }
            // The paper's double sum, from 0; terms out of range are 0.
            let of_block = |block: usize| {
                let (mut sum, per) = (0.0, blocks.select_block_size / s);
                for a in 0..per {
                    for b in 0..l / s {
                        if let Some(c) = (block * per + a).checked_sub(b) {
                            sum += p_sum.get(c).copied().unwrap_or(0.0);
                        }
                    }
                }
                sum
            };
            out.importance.push((0..=own).map(of_block).collect());
        }
    });
    out
}

/// Attention over the tokens of the chosen blocks.
pub(crate) fn selected(
    packed: Packed<'_>,
    blocks: NsaBlocks,
    documents: Documents<'_>,
    block_indices: &[i32],
) -> Output {
    let shape = packed.shape;
    let (n, m, k) = (shape.seq_len, shape.group_size(), blocks.num_selected_blocks);
    let mut out = Output::zeros(shape);
    for_each_token(shape, documents, |row, document, token| {
        for head in 0..shape.num_heads {
            let kv_head = head / m;
            let at = ((row * n + token) * shape.num_kv_heads + kv_head) * k;
            let chosen = &block_indices[at..at + k];
            let q = packed.head(row, token, head);
            let is_chosen = |j: &usize| {
                let block = (j - document.start) / blocks.select_block_size;
                chosen.contains(&(block as i32))
            };
            let keys = (document.start..=token)
                .filter(is_chosen)
                .map(|j| (packed.k(row, j, kv_head), packed.v(row, j, kv_head)));
            out.attend(shape, q, keys, [row, token, head]);
        }
    });
    out
}

/// Compressed inputs of every block: keys and values plus positions, flattened; `[2, rows, l * head_dim]`.
pub(crate) fn blocks_of(
    packed: Packed<'_>,
    blocks: NsaBlocks,
    documents: Documents<'_>,
    positions: [&[f64]; 2],
) -> Vec<f64> {
    let shape = packed.shape;
    let (n, d) = (shape.seq_len, shape.head_dim);
    let (l, s) = (blocks.compress_block_size, blocks.compress_stride);
    let (slots, kv_heads) = (n.div_ceil(s), shape.num_kv_heads);
    let rows = shape.batch * slots * kv_heads;
    let mut out = vec![0.0; 2 * rows * l * d];
    for_each_token(shape, documents, |row, document, token| {
        let t = token - document.start;
        if t % s != 0 || token + l > document.end {
            return;
        }
        let slot = row * slots + document.start.div_ceil(s) + t / s;
        for (which, positions) in positions.into_iter().enumerate() {
            for kv_head in 0..kv_heads {
                for inside in 0..l {
                    let x = match which {
                        0 => packed.k(row, token + inside, kv_head),
                        _ => packed.v(row, token + inside, kv_head),
                    };
                    let at = ((which * rows + slot * kv_heads + kv_head) * l + inside) * d;
                    for c in 0..d {
                        out[at + c] = x[c] + positions[inside * d + c];
                    }
                }
            }
        }
    });
    out
}
