//! Attention of one new query on the CPU.
use super::{DmaCache, DmaToken, KeyCache, TokenStep, reference};
use crate::AttentionSpec;
use crate::device::{contiguous, floats, from_vec, ints, is_f32, last_dim, unless_f32, zeros_like};
use crate::dma::dma_bias;
use crate::tensors::{primitive, split_heads, tensor};
use burn::tensor::{DType, Tensor, TensorData, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use sieve_core::DmaBias;
use sieve_cpu::first_of_largest;

/// The CPU takes a model's layers one by one: a call costs nothing there beside its work.
pub(crate) fn token_step(_: TokenStep<'_, Flex>, (): &mut ()) -> Option<FlexTensor> {
    None
}

pub(crate) fn repeat_token_step((): &mut (), _: FlexTensor, _: usize) -> Option<FlexTensor> {
    None
}

pub(crate) fn likeliest(logits: FlexTensor, num_tokens: usize) -> FlexTensor {
    unless_f32!(&logits, "likeliest": reference::likeliest::<Flex>(logits, num_tokens));
    let logits = contiguous(logits);
    let rows = floats(&logits).chunks(last_dim(&logits));
    let of_row = |row: &[f32]| first_of_largest(&row[..num_tokens]).map_or(-1, |token| token as i32);
    let ids: Vec<i32> = rows.map(of_row).collect();
    let shape = [ids.len(), 1];
    FlexTensor::from_data(TensorData::new(ids, shape))
}

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
    unless_f32!(&q, "mla_decode": reference::mla_decode::<Flex>(q, latents, key_scale, rank, softmax_scale));
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

pub(crate) fn dma_decode(
    cache: &mut DmaCache<Flex>,
    token: DmaToken<Flex>,
    softmax_scale: f64,
    bias: DmaBias,
    scratch: &mut (),
) -> FlexTensor {
    let is_i32 = cache.positions.buffer().dtype() == DType::I32;
    if !(cache.is_full() && is_i32 && is_f32(&token.k) && is_f32(&token.rank)) {
        return reference::dma_decode(cache, token, softmax_scale, bias, scratch);
    }
    replace_lightest(cache, &token);
    let delta = primitive(dma_bias(cache.rank.tokens(), bias));
    attend(token.q, &cache.keys, cache.len(), Some(delta), softmax_scale)
}

/// Overwrites, in each head, the slot of the smallest (rank, position) outside the local window with the token. Without
/// a local window a token of the smallest rank is not stored.
fn replace_lightest(cache: &mut DmaCache<Flex>, token: &DmaToken<Flex>) {
    let (slots, local) = (cache.len(), cache.window.local_window_size);
    let [k, v, rank] = [&token.k, &token.v, &token.rank].map(|x| contiguous(x.clone()));
    let (held, positions) = (cache.rank.buffer().clone(), cache.positions.buffer().clone());
    let (held, positions) = (contiguous(primitive(held)), contiguous(positions.into_primitive()));
    let heads = floats(&held)
        .chunks_exact(slots)
        .zip(ints(&positions).chunks_exact(slots));
    let lightest = |((ranks, positions), rank): ((&[f32], &[i32]), &f32)| {
        let outside = (0..slots).filter(|&slot| positions[slot] as usize + local <= token.position);
        // `+ 0.0` makes -0 equal to +0.
        let order = |&a: &usize, &b: &usize| {
            let ranks = (ranks[a] + 0.0).total_cmp(&(ranks[b] + 0.0));
            ranks.then(positions[a].cmp(&positions[b]))
        };
        outside.min_by(order).filter(|&slot| local > 0 || *rank >= ranks[slot])
    };
    let places: Vec<Option<usize>> = heads.zip(floats(&rank)).map(lightest).collect();
    // Given back, so that the buffers have one owner and are written in place.
    drop((held, positions));
    let put = |x: FlexTensor, new: &FlexTensor| {
        let (mut x, width) = (contiguous(x), new.shape().num_elements() / places.len());
        let values = x.storage_mut::<f32>();
        for (head, slot) in places.iter().enumerate() {
            if let Some(slot) = slot {
                let new = &floats(new)[head * width..][..width];
                values[(head * slots + slot) * width..][..width].copy_from_slice(new);
            }
        }
        x
    };
    cache.keys.k.write(|x| tensor(put(primitive(x), &k)));
    cache.keys.v.write(|x| tensor(put(primitive(x), &v)));
    cache.rank.write(|x| tensor(put(primitive(x), &rank)));
    cache.positions.write(|x| {
        let mut x = contiguous(x.into_primitive());
        let values = x.storage_mut::<i32>();
        let taken = places
            .iter()
            .enumerate()
            .filter_map(|(head, slot)| Some(head * slots + (*slot)?));
        taken.for_each(|at| values[at] = token.position as i32);
        Tensor::from_primitive(x)
    });
}

/// One query per sequence, `[batch, num_heads, head_dim]`, over the last `seen` keys of the cache.
fn attend(
    q: FlexTensor,
    keys: &KeyCache<Flex>,
    seen: usize,
    delta: Option<FlexTensor>,
    softmax_scale: f64,
) -> FlexTensor {
    unless_f32!(&q, "attention_decode": reference::attention_decode::<Flex>(q, keys, seen, delta, softmax_scale));
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
