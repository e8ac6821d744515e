//! The definition, row by row in f64: what the fast path is tested against.

use super::{AttentionShape, Documents, Mask};
use crate::reference::{attend, dot};

/// Output and log-sum-exp.
pub(crate) struct Forward {
    pub(crate) o: Vec<f64>,
    pub(crate) lse: Vec<f64>,
}

/// Gradients.
pub(crate) struct Backward {
    pub(crate) d_qkv: Vec<f64>,
    pub(crate) d_delta: Vec<f64>,
}

/// Whether query i sees key j of KV head `kv_head`, and the bias on that logit.
pub(crate) fn visible(
    shape: AttentionShape,
    documents: Documents<'_>,
    mask: Mask<'_>,
    row: usize,
    kv_head: usize,
    i: usize,
    j: usize,
) -> Option<f64> {
    let inside = j <= i && j as i32 >= documents.start[row * shape.seq_len + i];
    let at = (row * shape.num_kv_heads + kv_head) * shape.seq_len + j;
    match mask {
        Mask::Causal => inside.then_some(0.0),
        Mask::Window(window_size) => (inside && j + window_size > i).then_some(0.0),
        Mask::Expire { expire, delta } => (inside && (i as i32) < expire[at]).then(|| f64::from(delta[at])),
    }
}

fn vector(qkv: &[f32], shape: AttentionShape, row: usize, token: usize, head: usize) -> &[f32] {
    let at = (row * shape.seq_len + token) * shape.token_len() + head * shape.head_dim;
    &qkv[at..at + shape.head_dim]
}

/// The visible keys of one query with their logits, less the largest bias among them.
fn logits(
    shape: AttentionShape,
    qkv: &[f32],
    documents: Documents<'_>,
    mask: Mask<'_>,
    [row, head, i]: [usize; 3],
) -> Vec<(usize, f64)> {
    let kv_head = head / shape.group_size();
    let q = vector(qkv, shape, row, i, head);
    let mut logits: Vec<(usize, f64)> = (0..=i)
        .filter_map(|j| Some((j, visible(shape, documents, mask, row, kv_head, i, j)?)))
        .collect();
    let base = logits.iter().map(|x| x.1).fold(f64::NEG_INFINITY, f64::max);
    for (j, x) in &mut logits {
        let k = vector(qkv, shape, row, *j, shape.num_heads + kv_head);
        *x = f64::from(shape.softmax_scale) * dot(q, k) + (*x - base);
    }
    logits
}

pub(crate) fn forward(shape: AttentionShape, qkv: &[f32], documents: Documents<'_>, mask: Mask<'_>) -> Forward {
    let d = shape.head_dim;
    let mut o = vec![0.0; shape.batch * shape.seq_len * shape.num_heads * d];
    let mut lse = vec![f64::NEG_INFINITY; shape.batch * shape.num_heads * shape.seq_len];
    for row in 0..shape.batch {
        for head in 0..shape.num_heads {
            for i in 0..shape.seq_len {
                let logits = logits(shape, qkv, documents, mask, [row, head, i]);
                let v_head = shape.num_heads + shape.num_kv_heads + head / shape.group_size();
                let value = |j| vector(qkv, shape, row, j, v_head);
                let keys: Vec<_> = logits.iter().map(|&(j, x)| (x, value(j))).collect();
                let attended = attend(&keys, d);
                lse[(row * shape.num_heads + head) * shape.seq_len + i] = attended.lse;
                let at = ((row * shape.seq_len + i) * shape.num_heads + head) * d;
                o[at..at + d].copy_from_slice(&attended.o);
            }
        }
    }
    Forward { o, lse }
}

pub(crate) fn backward(
    shape: AttentionShape,
    qkv: &[f32],
    documents: Documents<'_>,
    mask: Mask<'_>,
    d_o: &[f32],
) -> Backward {
    let Forward { o, lse } = forward(shape, qkv, documents, mask);
    let (d, scale) = (shape.head_dim, f64::from(shape.softmax_scale));
    let mut d_qkv = vec![0.0; qkv.len()];
    let mut d_delta = vec![0.0; shape.batch * shape.num_kv_heads * shape.seq_len];
    for row in 0..shape.batch {
        for head in 0..shape.num_heads {
            let kv_head = head / shape.group_size();
            let (k_head, v_head) = (
                shape.num_heads + kv_head,
                shape.num_heads + shape.num_kv_heads + kv_head,
            );
            for i in 0..shape.seq_len {
                let at = ((row * shape.seq_len + i) * shape.num_heads + head) * d;
                let (o, d_o) = (&o[at..at + d], &d_o[at..at + d]);
                let correction: f64 = o.iter().zip(d_o).map(|(&o, &g)| o * f64::from(g)).sum();
                let lse = lse[(row * shape.num_heads + head) * shape.seq_len + i];
                let q_at = (row * shape.seq_len + i) * shape.token_len() + head * d;
                for (j, x) in logits(shape, qkv, documents, mask, [row, head, i]) {
                    let p = (x - lse).exp();
                    let ds = p * (dot(d_o, vector(qkv, shape, row, j, v_head)) - correction);
                    let token = (row * shape.seq_len + j) * shape.token_len();
                    let (k_at, v_at) = (token + k_head * d, token + v_head * d);
                    for c in 0..d {
                        d_qkv[q_at + c] += scale * ds * f64::from(qkv[k_at + c]);
                        d_qkv[k_at + c] += scale * ds * f64::from(qkv[q_at + c]);
                        d_qkv[v_at + c] += p * f64::from(d_o[c]);
                    }
                    d_delta[(row * shape.num_kv_heads + kv_head) * shape.seq_len + j] += ds;
                }
            }
        }
    }
    Backward { d_qkv, d_delta }
}
