//! Attention of one new query on the CPU.
use super::{DmaCache, DmaToken, KeyCache, reference};
use crate::attention::AttentionSpec;
use crate::device::flex::{contiguous, floats, from_vec, is_f32, plain, zeros_like};
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};
use sieve_core::DmaBias;

pub(crate) fn attention_decode(
    q: FlexTensor,
    k: FlexTensor,
    v: FlexTensor,
    delta: Option<FlexTensor>,
    softmax_scale: f64,
) -> FlexTensor {
    if !is_f32(&q) {
        return plain("attention_decode", || {
            reference::attention_decode::<Flex>(q, k, v, delta, softmax_scale)
        });
    }
    let [q, k, v] = [q, k, v].map(contiguous);
    let delta = delta.map(contiguous);
    let (q_shape, k_shape) = (q.shape(), k.shape());
    let kv_len = vec![k_shape[1]; k_shape[0]];
    let shape = sieve_cpu::DecodeShape {
        num_heads: q_shape[1],
        num_kv_heads: k_shape[2],
        head_dim: k_shape[3],
        capacity: k_shape[1],
        slot_stride: k_shape[2] * k_shape[3],
        kv_len: &kv_len,
        softmax_scale: softmax_scale as f32,
    };
    let mut o = zeros_like(&q);
    let delta = delta.as_ref().map(floats);
    sieve_cpu::attention_decode(&shape, floats(&q), floats(&k), floats(&v), delta, &mut o);
    from_vec(o, q_shape)
}

pub(crate) fn cached_attention(
    cache: KeyCache<Flex>,
    qkv: FlexTensor,
    spec: AttentionSpec,
) -> (KeyCache<Flex>, FlexTensor) {
    reference::cached_attention(cache, qkv, spec)
}

pub(crate) fn mla_decode(
    q: FlexTensor,
    latents: FlexTensor,
    key_scale: Option<FlexTensor>,
    rank: usize,
    softmax_scale: f64,
) -> FlexTensor {
    if !is_f32(&q) {
        return plain("mla_decode", || {
            reference::mla_decode::<Flex>(q, latents, key_scale, rank, softmax_scale)
        });
    }
    let [q, latents] = [q, latents].map(contiguous);
    let key_scale = key_scale.map(contiguous);
    let (q_shape, len) = (q.shape(), latents.shape()[1]);
    let shape = sieve_cpu::MlaDecode {
        batch: q_shape[0],
        num_queries: q_shape[1],
        num_heads: q_shape[2],
        len,
        rank,
        rope_dim: q_shape[3] - rank,
        softmax_scale: softmax_scale as f32,
    };
    let sizes = [q_shape[0], q_shape[1], q_shape[2], rank];
    let mut o = vec![0.0; sizes.iter().product()];
    let key_scale = key_scale.as_ref().map(floats);
    sieve_cpu::mla_decode(&shape, floats(&q), floats(&latents), key_scale, &mut o);
    from_vec(o, sizes)
}

/// The slots are moved by Burn's operations; the attention over them is a kernel.
pub(crate) fn dma_decode(
    cache: DmaCache<Flex>,
    token: DmaToken<Flex>,
    softmax_scale: f64,
    bias: DmaBias,
) -> (DmaCache<Flex>, FlexTensor) {
    reference::dma_decode(cache, token, softmax_scale, bias)
}
