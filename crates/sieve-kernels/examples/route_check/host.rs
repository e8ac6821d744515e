//! Attention and its gradients by definition, on the host, in f64.

/// Sizes of a call: batch, tokens, query heads, KV heads, head width.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) batch: usize,
    pub(crate) seq_len: usize,
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
}

impl Sizes {
    /// Heads of the packed tensor.
    pub(crate) fn packed_heads(&self) -> usize {
        self.num_heads + 2 * self.num_kv_heads
    }

    /// Place of a packed element.
    pub(crate) fn at(&self, batch: usize, token: usize, head: usize) -> usize {
        ((batch * self.seq_len + token) * self.packed_heads() + head) * self.head_dim
    }
}

/// Output, log-sum-exp and gradients.
pub(crate) struct Reference {
    pub(crate) o: Vec<f32>,
    pub(crate) lse: Vec<f32>,
    pub(crate) dqkv: Vec<f32>,
    pub(crate) ddelta: Vec<f32>,
}

/// `active(batch, kv_head, query, key)` is the whole mask; `delta` is `[batch, num_kv_heads, seq_len]`.
pub(crate) fn attention(
    sizes: Sizes,
    qkv: &[f32],
    delta: &[f32],
    d_o: &[f32],
    scale: f64,
    active: impl Fn(usize, usize, usize, usize) -> bool,
) -> Reference {
    let Sizes {
        batch,
        seq_len,
        num_heads,
        num_kv_heads,
        head_dim,
    } = sizes;
    let mut o = vec![0.0; batch * seq_len * num_heads * head_dim];
    let mut lse = vec![f32::NEG_INFINITY; batch * num_heads * seq_len];
    let mut dqkv = vec![0.0f64; qkv.len()];
    let mut ddelta = vec![0.0f64; batch * num_kv_heads * seq_len];
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter()
            .zip(b)
            .map(|(&x, &y)| f64::from(x) * f64::from(y))
            .sum()
    };
    for b in 0..batch {
        for head in 0..num_heads {
            let kv = head / (num_heads / num_kv_heads);
            for i in 0..seq_len {
                let row = |token, head| &qkv[sizes.at(b, token, head)..][..head_dim];
                let keys: Vec<usize> = (0..seq_len).filter(|&j| active(b, kv, i, j)).collect();
                if keys.is_empty() {
                    continue;
                }
                let bias = |j: usize| f64::from(delta[(b * num_kv_heads + kv) * seq_len + j]);
                let logit =
                    |&j: &usize| scale * dot(row(i, head), row(j, num_heads + kv)) + bias(j);
                let logits: Vec<f64> = keys.iter().map(logit).collect();
                let maximum = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = logits.iter().map(|s| (s - maximum).exp()).sum();
                lse[(b * num_heads + head) * seq_len + i] = (maximum + total.ln()) as f32;
                let out = ((b * seq_len + i) * num_heads + head) * head_dim;
                let mut exact = vec![0.0f64; head_dim];
                let p: Vec<f64> = logits.iter().map(|s| (s - maximum).exp() / total).collect();
                for (&j, &p) in keys.iter().zip(&p) {
                    let v = row(j, num_heads + num_kv_heads + kv);
                    exact
                        .iter_mut()
                        .zip(v)
                        .for_each(|(o, &v)| *o += p * f64::from(v));
                }
                let grad = &d_o[out..][..head_dim];
                let mean: f64 = exact.iter().zip(grad).map(|(o, &g)| o * f64::from(g)).sum();
                for (c, value) in exact.iter().enumerate() {
                    o[out + c] = *value as f32;
                }
                for (&j, &p) in keys.iter().zip(&p) {
                    let ds = p * (dot(grad, row(j, num_heads + num_kv_heads + kv)) - mean);
                    ddelta[(b * num_kv_heads + kv) * seq_len + j] += ds;
                    for c in 0..head_dim {
                        let (q, k) = (row(i, head)[c], row(j, num_heads + kv)[c]);
                        dqkv[sizes.at(b, i, head) + c] += scale * ds * f64::from(k);
                        dqkv[sizes.at(b, j, num_heads + kv) + c] += scale * ds * f64::from(q);
                        dqkv[sizes.at(b, j, num_heads + num_kv_heads + kv) + c] +=
                            p * f64::from(grad[c]);
                    }
                }
            }
        }
    }
    let narrow = |values: Vec<f64>| values.into_iter().map(|x| x as f32).collect();
    Reference {
        o,
        lse,
        dqkv: narrow(dqkv),
        ddelta: narrow(ddelta),
    }
}

/// Largest difference; an error for another length, or for a number that is not finite on one side alone.
pub(crate) fn largest_gap(got: &[f32], wanted: &[f32]) -> Result<f64, String> {
    if got.len() != wanted.len() {
        return Err(format!("{} elements, expected {}", got.len(), wanted.len()));
    }
    let mut worst = 0.0f64;
    for (index, (&g, &w)) in got.iter().zip(wanted).enumerate() {
        if g == w {
            continue;
        }
        let gap = f64::from((g - w).abs());
        if !gap.is_finite() {
            return Err(format!("element {index} is {g}, expected {w}"));
        }
        worst = worst.max(gap);
    }
    Ok(worst)
}

/// Largest difference as a share of the largest expected magnitude.
pub(crate) fn relative_gap(got: &[f32], wanted: &[f32]) -> Result<f64, String> {
    let size = wanted
        .iter()
        .filter(|x| x.is_finite())
        .fold(0.0f32, |m, x| m.max(x.abs()));
    Ok(largest_gap(got, wanted)? / f64::from(size.max(1e-6)))
}
