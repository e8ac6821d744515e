//! Latent attention: packing with and without norms, and decoding over latents. Its attention is dense.
use super::{Calls, EPSILON, ROW, SCALE};
use crate::{LatentKeys, LatentToken, MlaNorm, MlaPack, mla_decode};

/// Any number of heads.
const HEADS: usize = 2;

/// Packing of heads of `head_dim` columns and `rope_dim` rotated columns, and its gradient.
pub(in crate::specialisations) fn packing(calls: &mut Calls, [head_dim, rope_dim]: [usize; 2], has_norm: bool) {
    let key_dim = head_dim + rope_dim;
    let (positions, table) = (calls.i32(&[1, ROW]), calls.f32(&[ROW, rope_dim / 2]));
    let weight = calls.bf16(&[key_dim]);
    let norm = has_norm.then_some(MlaNorm { q_weight: &weight, k_weight: &weight, epsilon: EPSILON });
    let pack = MlaPack { num_heads: HEADS, head_dim, rope_dim, positions: &positions, cos: &table, sin: &table, norm };
    let of = |width| calls.bf16(&[1, ROW, width]);
    let inputs = [of(HEADS * key_dim), of(HEADS * 2 * head_dim), of(rope_dim)];
    let inputs = inputs.each_ref();
    if let Some((packed, _)) = calls.note(pack.mla_pack_forward(inputs)) {
        calls.note(pack.mla_pack_backward(Some(inputs), &packed));
    }
}

/// Decoding over latents of `rank` columns: of a prompt that is read in chunks, and of one new token, whose heads have
/// `head_dim` columns and `rope_dim` rotated ones.
pub(in crate::specialisations) fn decoding(
    calls: &mut Calls,
    rank: usize,
    [head_dim, rope_dim]: [usize; 2],
    has_norm: bool,
) {
    let (width, key_dim) = (rank + rope_dim, head_dim + rope_dim);
    let latents = calls.bf16(&[1, ROW, width]);
    let scales = has_norm.then(|| calls.f32(&[1, ROW, HEADS]));
    let length = calls.i32(&[1]);
    let q = calls.bf16(&[1, 1, HEADS, width]);
    for length in [None, Some(&length)] {
        let keys = LatentKeys { latents: &latents, rank, key_scale: scales.as_ref(), length };
        calls.note(mla_decode(&q, keys, SCALE));
    }
    let packed = calls.bf16(&[1, 1, HEADS * (2 * key_dim + head_dim)]);
    let (up, latent) = (calls.bf16(&[HEADS * 2 * head_dim, rank]), calls.bf16(&[1, 1, rank]));
    let (norm, rotated) = (calls.bf16(&[key_dim]), calls.bf16(&[1, 1, rope_dim]));
    let key_scale = calls.f32(&[1, 1, HEADS]);
    let token = LatentToken {
        packed: &packed,
        up: &up,
        latent: &latent,
        norm: has_norm.then_some([&norm, &rotated, &key_scale]),
        length: &length,
        heads: [HEADS, head_dim, rope_dim],
    };
    calls.note(token.decode(&latents, scales.as_ref(), SCALE));
}
