//! Decoding with latent attention: new tokens attend to the cached latents.

use pulp::Simd;
use rayon::prelude::*;

use crate::attention::decode::weigh;
use crate::simd::{dot, on_arch};

/// Sizes of a decoding step. The cache holds a latent and a rotated key for each token, `rank + rope_dim` numbers.
#[derive(Clone, Copy, Debug)]
pub struct MlaDecode {
    /// Sequences in the batch.
    pub batch: usize,
    /// New tokens of each row, the last ones of its `len` tokens.
    pub num_queries: usize,
    /// Number of query heads.
    pub num_heads: usize,
    /// Tokens of each row, including the new ones.
    pub len: usize,
    /// Columns of a latent.
    pub rank: usize,
    /// Columns of the rotated key.
    pub rope_dim: usize,
    /// Factor of `q . k` in the logits.
    pub softmax_scale: f32,
}

/// `o = softmax(scale key_scale q . k) c` for each new token and head, over the latents c of the tokens up to it. The
/// key k is a token's latent and rotated key. The caller has multiplied W_UK into q and multiplies o by W_UV.
///
/// # Shapes
/// - q: `[batch, num_queries, num_heads, rank + rope_dim]`
/// - latents: `[batch, len, rank + rope_dim]`
/// - key_scale: `[batch, len, num_heads]`; `None`: all 1
/// - o: `[batch, num_queries, num_heads, rank]`, written whole
///
/// # Panics
/// When lengths do not fit.
pub fn mla_decode(shape: &MlaDecode, q: &[f32], latents: &[f32], key_scale: Option<&[f32]>, o: &mut [f32]) {
    let MlaDecode { batch, num_queries, num_heads, len, rank, rope_dim, .. } = *shape;
    let (width, rows) = (rank + rope_dim, batch * num_queries * num_heads);
    assert!(rank > 0 && num_heads > 0 && num_queries > 0 && num_queries <= len, "mla_decode: impossible sizes");
    assert_eq!(
        (q.len(), latents.len(), o.len()),
        (rows * width, batch * len * width, rows * rank),
        "mla_decode: q, latents or o has the wrong size"
    );
    if let Some(scale) = key_scale {
        assert_eq!(scale.len(), batch * len * num_heads, "mla_decode: key_scale has the wrong size");
    }
    let heads = o.par_chunks_exact_mut(rank).zip(q.par_chunks_exact(width)).enumerate();
    heads.for_each(|(at, (o, q))| {
        let (token, head) = (at / num_heads, at % num_heads);
        let (row, query) = (token / num_queries, token % num_queries);
        let seen = len - num_queries + query + 1;
        let latents = &latents[row * len * width..(row * len + seen) * width];
        // This head's scales are every `num_heads`-th element from here on.
        let scale = key_scale.map(|scale| &scale[row * len * num_heads + head..]);
        attend(shape, q, latents, scale, o);
    });
}

on_arch! {
    fn attend<'a>(
        shape: &'a MlaDecode, q: &'a [f32], latents: &'a [f32], key_scale: Option<&'a [f32]>, o: &'a mut [f32],
    ) -> () = attend_simd;
}

/// Attention of one head of one new token.
#[inline(always)]
fn attend_simd<S: Simd>(
    simd: S,
    shape: &MlaDecode,
    q: &[f32],
    latents: &[f32],
    key_scale: Option<&[f32]>,
    o: &mut [f32],
) {
    let width = q.len();
    let mut logits = vec![0.0; latents.len() / width];
    let mut max = f32::NEG_INFINITY;
    for (at, (logit, key)) in logits.iter_mut().zip(latents.chunks_exact(width)).enumerate() {
        *logit = shape.softmax_scale * dot(simd, q, key);
        if let Some(scale) = key_scale {
            *logit *= scale[at * shape.num_heads];
        }
        max = if *logit > max { *logit } else { max };
    }
    weigh(simd, &mut logits, [max, 0.0], |at| &latents[at * width..(at + 1) * width], o);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::tests::on_every_arch;
    use sieve_testing::{Random, assert_close_relative};

    /// In f64, with each head's keys written out.
    fn definition(shape: &MlaDecode, q: &[f32], latents: &[f32], key_scale: Option<&[f32]>) -> Vec<f64> {
        let MlaDecode { num_queries, num_heads, len, rank, rope_dim, .. } = *shape;
        let width = rank + rope_dim;
        let mut o = Vec::new();
        for (at, q) in q.chunks(width).enumerate() {
            let (token, head) = (at / num_heads, at % num_heads);
            let (row, query) = (token / num_queries, token % num_queries);
            let keys = (0..len - num_queries + query + 1).map(|key| row * len + key);
            let weights: Vec<(f64, &[f32])> = keys
                .map(|key| {
                    let latent = &latents[key * width..(key + 1) * width];
                    let scale = key_scale.map_or(1.0, |scale| f64::from(scale[key * num_heads + head]));
                    let products = q.iter().zip(latent).map(|(&q, &k)| f64::from(q) * f64::from(k));
                    ((f64::from(shape.softmax_scale) * scale * products.sum::<f64>()).exp(), latent)
                })
                .collect();
            let sum: f64 = weights.iter().map(|(weight, _)| weight).sum();
            o.extend((0..rank).map(|column| {
                let parts = weights.iter().map(|(weight, latent)| weight * f64::from(latent[column]));
                parts.sum::<f64>() / sum
            }));
        }
        o
    }

    #[test]
    fn new_tokens_see_the_latents_up_to_their_own_each_key_with_its_factor() {
        on_every_arch(|| {
            for (num_queries, len, rank, rope_dim) in [(1, 1, 5, 2), (1, 37, 24, 8), (3, 3, 16, 4), (4, 30, 33, 16)] {
                let shape = MlaDecode { batch: 2, num_queries, num_heads: 3, len, rank, rope_dim, softmax_scale: 0.2 };
                let mut random = Random(len as u64);
                let q = random.vector(2 * num_queries * 3 * (rank + rope_dim));
                let latents = random.vector(2 * len * (rank + rope_dim));
                let factors = random.vector(2 * len * 3);
                for key_scale in [None, Some(factors.as_slice())] {
                    let mut o = vec![f32::NAN; 2 * num_queries * 3 * rank];
                    mla_decode(&shape, &q, &latents, key_scale, &mut o);
                    assert_close_relative("o", &o, &definition(&shape, &q, &latents, key_scale), 2e-6);
                }
            }
        });
    }
}
