//! Attention of one new query on the CPU.
use super::{DmaCache, DmaToken, KeyCache, reference};
use crate::attention::AttentionSpec;
use crate::device::flex::{contiguous, floats, from_vec, is_f32, plain, zeros_like};
use crate::tensors::{primitive, split_heads, tensor};
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};
use sieve_core::DmaBias;

pub(crate) fn attention_decode(
    q: FlexTensor,
    keys: &KeyCache<Flex>,
    delta: Option<FlexTensor>,
    softmax_scale: f64,
    (): &mut (),
) -> FlexTensor {
    attend(q, keys, keys.len(), delta, softmax_scale)
}

pub(crate) fn cached_attention(
    cache: &mut KeyCache<Flex>,
    qkv: FlexTensor,
    spec: AttentionSpec,
    (): &mut (),
) -> FlexTensor {
    let [q, k, v] = split_heads(tensor::<Flex, 4>(qkv), spec.num_kv_heads);
    let shape = q.dims();
    cache.append(k, v);
    let seen = spec.window_size.unwrap_or(cache.len()).min(cache.len());
    let o = attend(primitive(q.squeeze_dim::<3>(1)), cache, seen, None, spec.softmax_scale);
    primitive(tensor::<Flex, 3>(o).reshape(shape))
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
    cache: &mut DmaCache<Flex>,
    token: DmaToken<Flex>,
    softmax_scale: f64,
    bias: DmaBias,
    scratch: &mut (),
) -> FlexTensor {
    reference::dma_decode(cache, token, softmax_scale, bias, scratch)
}

/// One query per sequence, `[batch, num_heads, head_dim]`, over the last `seen` keys of the cache.
fn attend(
    q: FlexTensor,
    keys: &KeyCache<Flex>,
    seen: usize,
    delta: Option<FlexTensor>,
    softmax_scale: f64,
) -> FlexTensor {
    if !is_f32(&q) {
        return plain("attention_decode", || {
            reference::attention_decode::<Flex>(q, keys, seen, delta, softmax_scale)
        });
    }
    let [k, v] = [&keys.k, &keys.v].map(|x| contiguous(primitive(x.buffer().clone())));
    let (q_shape, q) = (q.shape(), contiguous(q));
    let [batch, num_kv_heads, room, head_dim] = k.shape().dims();
    // A head's keys lie together, as a row's would with one KV head.
    let kv_len = vec![seen; batch * num_kv_heads];
    let shape = sieve_cpu::DecodeShape {
        num_heads: q_shape[1] / num_kv_heads,
        num_kv_heads: 1,
        head_dim,
        capacity: room,
        slot_stride: head_dim,
        kv_len: &kv_len,
        softmax_scale: softmax_scale as f32,
    };
    let delta = delta.map(|delta| {
        let delta = contiguous(delta);
        let rows = floats(&delta).chunks_exact(seen);
        let mut wide = Vec::with_capacity(kv_len.len() * room);
        for row in rows {
            wide.extend_from_slice(row);
            wide.resize(wide.len() + room - seen, 0.0);
        }
        wide
    });
    let first = (keys.len() - seen) * head_dim;
    let mut o = zeros_like(&q);
    let [k, v] = [&k, &v].map(|x| &floats(x)[first..]);
    sieve_cpu::attention_decode(&shape, floats(&q), k, v, delta.as_deref(), &mut o);
    from_vec(o, q_shape)
}
