//! Attention of one new query on the CPU. The functions implement methods of `DeviceBackend`.
use super::reference::Logits;
use super::{DmaCache, DmaToken, KeyCache, TokenStep, TokensBefore, reference};
use crate::AttentionSpec;
use crate::device::{contiguous, floats, from_vec, ints, is_f32, last_dim, unless_f32};
use crate::dma::dma_bias;
use crate::tensors::{primitive, tensor};
use burn::tensor::{DType, Tensor, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use sieve_core::DmaBias;
use sieve_cpu::{DecodeBias, DecodeKeys, first_of_largest};

/// The CPU has no fused step: a call per layer has no launch overhead there.
pub(crate) fn token_step(_: TokenStep<'_, Flex>, (): &mut ()) -> Option<FlexTensor> {
    None
}

pub(crate) fn repeat_token_step((): &mut (), _: FlexTensor, _: TokensBefore<'_>) -> Option<FlexTensor> {
    None
}

pub(crate) fn draw(logits: FlexTensor, draws: FlexTensor, num_tokens: usize) -> FlexTensor {
    reference::draw::<Flex>(logits, draws, num_tokens)
}

/// The first of the largest logits among the first `num_tokens` of each row, i32 `[rows, 1]`; -1 where one of these is
/// NaN or infinite.
pub(crate) fn likeliest(logits: FlexTensor, num_tokens: usize) -> FlexTensor {
    unless_f32!(&logits, "likeliest": reference::likeliest::<Flex>(logits, num_tokens));
    let logits = contiguous(logits);
    let rows = floats(&logits).chunks(last_dim(&logits));
    let of_row = |row: &[f32]| first_of_largest(&row[..num_tokens]).map_or(-1, |token| token as i32);
    let ids: Vec<i32> = rows.map(of_row).collect();
    let shape = [ids.len(), 1];
    from_vec(ids, shape)
}

/// The loss in nats of each row of `logits`, `[rows, vocab_size]`; every label is a token of the vocabulary, none is
/// ignored.
pub(crate) fn losses_of_logits(logits: FlexTensor, labels: FlexTensor) -> FlexTensor {
    unless_f32!(&logits, "losses_of_logits": crate::loss::reference::losses_of_logits::<Flex>(logits, labels));
    let (logits, labels) = (contiguous(logits), contiguous(labels));
    let rows = floats(&logits).chunks(last_dim(&logits)).zip(ints(&labels));
    let losses: Vec<f32> = rows.map(|(row, &label)| crate::token_loss_on_host(row, label as u32)).collect();
    let count = losses.len();
    from_vec(losses, [count])
}

/// `q`, `[batch, num_heads, head_dim]`, over all keys of the cache; `delta` is added to the logits of each KV head's
/// keys, `[batch, num_kv_heads, keys]`. The empty scratch is CUDA's.
pub(crate) fn attention_decode(
    q: FlexTensor,
    keys: &KeyCache<Flex>,
    delta: Option<FlexTensor>,
    softmax_scale: f64,
    (): &mut (),
) -> FlexTensor {
    attend(q, keys, keys.len(), Logits { delta, sinks: None }, softmax_scale)
}

/// Adds the token's key and value to the cache, which has room for them, and attends over the last `spec.window_size`
/// keys and those of `spec.far`, or over all.
pub(crate) fn cached_attention(
    cache: &mut KeyCache<Flex>,
    qkv: FlexTensor,
    sinks: Option<FlexTensor>,
    spec: AttentionSpec,
    (): &mut (),
) -> FlexTensor {
    reference::append_and_attend(cache, qkv, sinks, spec, attend)
}

/// The CPU's own caches hold keys and values instead of latents, so this op has no kernel there.
pub(crate) fn mla_decode(
    q: FlexTensor,
    latents: FlexTensor,
    key_scale: Option<FlexTensor>,
    rank: usize,
    softmax_scale: f64,
) -> FlexTensor {
    reference::mla_decode::<Flex>(q, latents, key_scale, rank, softmax_scale)
}

/// Adds the token to the slots and attends over all of them, by rising position of their keys. Other dtypes than f32
/// take the reference, which is not counted as one here.
pub(crate) fn dma_decode(
    cache: &mut DmaCache<Flex>,
    token: DmaToken<Flex>,
    softmax_scale: f64,
    bias: DmaBias,
    scratch: &mut (),
) -> FlexTensor {
    if !(is_f32(&token.q) && is_f32(&token.k) && is_f32(&token.rank)) {
        return reference::dma_decode(cache, token, softmax_scale, bias, scratch);
    }
    let (q, is_i32) = (token.q.clone(), cache.positions.buffer().dtype() == DType::I32);
    // `replace_lowest_rank` takes full slots with i32 positions.
    if cache.is_full() && is_i32 {
        replace_lowest_rank(cache, &token)
    } else {
        cache.insert(token)
    }
    let delta = primitive(dma_bias(cache.rank.tokens(), bias));
    let logits = Logits { delta: Some(delta), sinks: None };
    let positions = cache.positions.tokens().cast(DType::I32).into_primitive();
    attend_at(Some(contiguous(positions)), q, &cache.keys, cache.len(), logits, softmax_scale)
}

/// Writes the token, in each head, to the slot of the smallest (rank, position) outside the local window. Without a
/// local window, a token whose own rank is the smallest is not stored.
fn replace_lowest_rank(cache: &mut DmaCache<Flex>, token: &DmaToken<Flex>) {
    cache.replaces();
    let (slots, local) = (cache.len(), cache.window.local_window_size);
    let [k, v, rank] = [&token.k, &token.v, &token.rank].map(|x| contiguous(x.clone()));
    let (held, positions) = (cache.rank.buffer().clone(), cache.positions.buffer().clone());
    let (held, positions) = (contiguous(primitive(held)), contiguous(positions.into_primitive()));
    let heads = floats(&held).chunks_exact(slots).zip(ints(&positions).chunks_exact(slots));
    let evicted = |((ranks, positions), rank): ((&[f32], &[i32]), &f32)| {
        let candidates = (0..slots).filter(|&slot| positions[slot] as usize + local <= token.position);
        // `+ 0.0` makes -0 equal to +0.
        let by_rank_and_position = |&a: &usize, &b: &usize| {
            let ranks = (ranks[a] + 0.0).total_cmp(&(ranks[b] + 0.0));
            ranks.then(positions[a].cmp(&positions[b]))
        };
        let smallest = candidates.min_by(by_rank_and_position);
        smallest.filter(|&slot| local > 0 || *rank >= ranks[slot])
    };
    let slot_of_head: Vec<Option<usize>> = heads.zip(floats(&rank)).map(evicted).collect();
    // These handles are dropped, so that the buffers have one owner and are written in place.
    drop((held, positions));
    let put = |x: FlexTensor, new: &FlexTensor| {
        let (mut x, width) = (contiguous(x), new.shape().num_elements() / slot_of_head.len());
        let values = x.storage_mut::<f32>();
        for (head, slot) in slot_of_head.iter().enumerate() {
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
        for (head, slot) in slot_of_head.iter().enumerate() {
            if let Some(slot) = slot {
                values[head * slots + slot] = token.position as i32;
            }
        }
        Tensor::from_primitive(x)
    });
}

/// One query per sequence, `[batch, num_heads, head_dim]`, over the last `seen` keys of the cache, which lie by rising
/// position.
fn attend(q: FlexTensor, keys: &KeyCache<Flex>, seen: usize, logits: Logits<Flex>, softmax_scale: f64) -> FlexTensor {
    unless_f32!(&q, "attention_decode": reference::attention_decode::<Flex>(q, keys, seen, logits, softmax_scale));
    let positions = None;
    attend_at(positions, q, keys, seen, logits, softmax_scale)
}

/// [`attend`] in f32, where keys may lie in any order with these positions, i32 `[batch, num_kv_heads, seen]`. Values
/// may be narrower than keys.
fn attend_at(
    positions: Option<FlexTensor>,
    q: FlexTensor,
    keys: &KeyCache<Flex>,
    seen: usize,
    logits: Logits<Flex>,
    softmax_scale: f64,
) -> FlexTensor {
    let [k, v] = [&keys.k, &keys.v].map(|x| contiguous(primitive(x.buffer().clone())));
    let (q_shape, q) = (q.shape(), contiguous(q));
    let [_, num_kv_heads, capacity, head_dim] = k.shape().dims();
    let head_dim_v = last_dim(&v);
    let shape = sieve_cpu::DecodeShape {
        group_size: q_shape[1] / num_kv_heads,
        head_dim,
        head_dim_v,
        capacity,
        kv_len: seen,
        softmax_scale: softmax_scale as f32,
    };
    let [delta, sinks] = [logits.delta, logits.sinks].map(|x| x.map(contiguous));
    let bias = DecodeBias { delta: delta.as_ref().map(floats), sinks: sinks.as_ref().map(floats) };
    // Each head's keys before the last `seen` are skipped; heads remain `capacity` keys apart.
    let skipped = keys.len() - seen;
    let keys = DecodeKeys {
        k: &floats(&k)[skipped * head_dim..],
        v: &floats(&v)[skipped * head_dim_v..],
        positions: positions.as_ref().map(ints),
    };
    let sizes = [q_shape[0], q_shape[1], head_dim_v];
    let mut o = sieve_cpu::zeros(sizes.iter().product());
    sieve_cpu::attention_decode(shape, floats(&q), keys, bias, &mut o);
    from_vec(o, sizes)
}
