//! Attention of one new query in plain Burn operations.
use super::{DmaCache, DmaToken, KeyCache};
use crate::dma::dma_bias;
use crate::tensors::{Float, Ints, primitive, split_heads, tensor, upcast};
use crate::{AttentionSpec, DeviceBackend};
use burn::tensor::activation::softmax;
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, DType, Int, Tensor, TensorData};
use sieve_core::{DmaBias, Draw};
use std::ops::Range;

/// Reference of [`crate::draw`], on the host, in whole numbers; ids `[rows, 1]`, -1 for none.
pub(crate) fn draw<B: Backend>(logits: Float<B>, draws: Ints<B>, num_tokens: usize) -> Ints<B> {
    let (logits, draws) = (tensor::<B, 2>(logits), Tensor::<B, 2, Int>::from_primitive(draws));
    let ([rows, width], device) = (logits.dims(), logits.device());
    let logits: Vec<f32> = logits.cast(DType::F32).into_data().into_vec().expect("they were converted");
    let words: Vec<i32> = draws.into_data().iter::<i32>().collect();
    let draws: Vec<Draw> = words.as_chunks().0.iter().map(|words| Draw::of_words(*words)).collect();
    let drawn = sieve_cpu::draw_rows(&logits, width, num_tokens, &draws);
    let ids: Vec<i32> = drawn.into_iter().map(|token| token.map_or(-1, |token| token as i32)).collect();
    Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [rows, 1]), &device).into_primitive()
}

/// Reference of the largest of the first logits, of equal ones the first; ids `[rows, 1]`, -1 for none.
pub(crate) fn likeliest<B: Backend>(logits: Float<B>, num_tokens: usize) -> Ints<B> {
    let logits = tensor::<B, 2>(logits).narrow(1, 0, num_tokens);
    // x - x is 0 for a finite x, else NaN.
    let is_finite = (logits.clone() - logits.clone()).sum_dim(1).equal_elem(0.0);
    let ids = logits.argmax(1).mask_fill(is_finite.bool_not(), -1);
    ids.into_primitive()
}

/// What is added to the logits of one query per sequence, or joins them.
#[derive(Clone, Debug)]
pub struct Logits<B: Backend> {
    /// Bias of each key, `[batch, num_kv_heads, keys]`; `None`: no biases.
    pub delta: Option<Float<B>>,
    /// Attention sinks, `[num_heads]`: one more logit per query head in the softmax, with a value of zero. `None`:
    /// none.
    pub sinks: Option<Float<B>>,
}

/// One query per sequence over the last `seen` keys of the cache; see [`crate::attention_decode`].
pub fn attention_decode<B: Backend>(
    q: Float<B>,
    keys: &KeyCache<B>,
    seen: usize,
    Logits { delta, sinks }: Logits<B>,
    softmax_scale: f64,
) -> Float<B> {
    let (q, dtype) = upcast::<B, 3>(q);
    let last = |x: Tensor<B, 4>| x.narrow(2, keys.len() - seen, seen);
    let [k, v] = [&keys.k, &keys.v].map(|x| last(x.tokens()).cast(q.dtype()));
    let [batch, num_heads, head_dim] = q.dims();
    let num_kv_heads = k.dims()[1];
    let group_size = num_heads / num_kv_heads;
    let q = q.reshape([batch, num_kv_heads, group_size, head_dim]);
    let mut logits = q.matmul(k.swap_dims(2, 3)) * softmax_scale;
    if let Some(delta) = delta {
        let delta = tensor::<B, 3>(delta).cast(logits.dtype());
        let delta = delta.unsqueeze_dim::<4>(2);
        // The largest bias is subtracted: next to a large bias q . k would lose its digits.
        logits = logits + (delta.clone() - delta.max_dim(3));
    }
    if let Some(sinks) = sinks {
        let sinks = tensor::<B, 1>(sinks).cast(logits.dtype()).reshape([1, num_kv_heads, group_size, 1]);
        logits = Tensor::cat(vec![logits, sinks.expand([batch, num_kv_heads, group_size, 1])], 3);
    }
    let p = softmax(logits, 3).narrow(3, 0, seen);
    // Values may be narrower than keys.
    let width = v.dims()[3];
    let o = p.matmul(v);
    primitive(o.reshape([batch, num_heads, width]).cast(dtype))
}

/// Reference of [`crate::cached_attention`].
#[cfg(feature = "cuda")]
pub(crate) fn cached_attention<B: Backend>(
    cache: &mut KeyCache<B>,
    qkv: Float<B>,
    sinks: Option<Float<B>>,
    spec: AttentionSpec,
) -> Float<B> {
    append_and_attend(cache, qkv, sinks, spec, attention_decode)
}

/// Appends a token to the cache and calls `attend(q, keys, seen, logits, softmax_scale)`, which takes and returns
/// `[batch, num_heads, head_dim]`.
pub(crate) fn append_and_attend<B: Backend>(
    cache: &mut KeyCache<B>,
    qkv: Float<B>,
    sinks: Option<Float<B>>,
    spec: AttentionSpec,
    attend: impl Fn(Float<B>, &KeyCache<B>, usize, Logits<B>, f64) -> Float<B>,
) -> Float<B> {
    let [q, k, v] = split_heads(tensor::<B, 4>(qkv), spec.num_kv_heads);
    let [batch, _, num_heads, head_dim] = q.dims();
    cache.append(k, v);
    if let Some((window, far)) = spec.far_window() {
        let (q, len, group) = (q.reshape([batch, num_heads, head_dim]), cache.len(), spec.group_size());
        let ranges: Vec<_> = (0..spec.num_kv_heads).map(|head| far.ranges(head, window, len)).collect();
        let num_seen = |ranges: &[Range<usize>; 3]| ranges.iter().map(ExactSizeIterator::len).sum::<usize>();
        // Neighbouring heads that read equally many keys attend together, over copies of these.
        let (mut first, mut outputs) = (0, Vec::new());
        for run in ranges.chunk_by(|one, next| num_seen(one) == num_seen(next)) {
            let [k, v] = [&cache.k, &cache.v].map(|x| {
                let heads = run.iter().zip(first..).map(|(ranges, head)| of_ranges(x.tokens(), head, ranges));
                Tensor::cat(heads.collect(), 1)
            });
            let seen = num_seen(&run[0]);
            let keys = KeyCache::with_capacity(k, v, Some(seen));
            let queries = [first * group, run.len() * group];
            let sinks = sinks.clone().map(|x| primitive(tensor::<B, 1>(x).narrow(0, queries[0], queries[1])));
            let q = primitive(q.clone().narrow(1, queries[0], queries[1]));
            outputs.push(tensor::<B, 3>(attend(q, &keys, seen, Logits { delta: None, sinks }, spec.softmax_scale)));
            first += run.len();
        }
        return primitive(Tensor::cat(outputs, 1).reshape([batch, 1, num_heads, head_dim]));
    }
    let seen = spec.window_size.unwrap_or(cache.len()).min(cache.len());
    let q = primitive(q.reshape([batch, num_heads, head_dim]));
    let logits = Logits { delta: None, sinks };
    let o = attend(q, cache, seen, logits, spec.softmax_scale);
    primitive(tensor::<B, 3>(o).reshape([batch, 1, num_heads, head_dim]))
}

/// The tokens of one KV head in these ranges, of `[batch, num_kv_heads, tokens, head_dim]`.
fn of_ranges<B: Backend>(x: Tensor<B, 4>, head: usize, ranges: &[Range<usize>; 3]) -> Tensor<B, 4> {
    let of_head = x.narrow(1, head, 1);
    let parts = ranges.iter().filter(|range| !range.is_empty());
    Tensor::cat(parts.map(|range| of_head.clone().narrow(2, range.start, range.len())).collect(), 2)
}

/// Reference of [`crate::mla_decode`]; computes the new tokens one by one.
pub fn mla_decode<B: Backend>(
    q: Float<B>,
    latents: Float<B>,
    key_scale: Option<Float<B>>,
    rank: usize,
    softmax_scale: f64,
) -> Float<B> {
    let (q, dtype) = upcast::<B, 4>(q);
    let (latents, _) = upcast::<B, 3>(latents);
    let key_scale = key_scale.map(|scale| tensor::<B, 3>(scale).cast(q.dtype()));
    let [batch, new, num_heads, width] = q.dims();
    let len = latents.dims()[1];
    let rows = (0..new).map(|at| {
        let seen = len - new + at + 1;
        let q = q.clone().narrow(1, at, 1).reshape([batch, num_heads, width]);
        let keys = latents.clone().narrow(1, 0, seen);
        let mut logits = q.matmul(keys.clone().swap_dims(1, 2)) * softmax_scale;
        if let Some(scale) = &key_scale {
            logits = logits * scale.clone().narrow(1, 0, seen).swap_dims(1, 2);
        }
        let p = softmax(logits, 2);
        let o = p.matmul(keys.narrow(2, 0, rank));
        o.reshape([batch, 1, num_heads, rank])
    });
    primitive(Tensor::cat(rows.collect(), 1).cast(dtype))
}

/// Reference of [`crate::dma_decode`]: updates the slots, then calls [`DeviceBackend::attention_decode`].
pub(crate) fn dma_decode<B: DeviceBackend>(
    cache: &mut DmaCache<B>,
    token: DmaToken<B>,
    softmax_scale: f64,
    bias: DmaBias,
    scratch: &mut B::DecodeScratch,
) -> Float<B> {
    let q = token.q.clone();
    cache.insert(token);
    let delta = primitive(dma_bias(cache.rank.tokens(), bias));
    B::attention_decode(q, &cache.keys, Some(delta), softmax_scale, scratch)
}

impl<B: Backend> DmaCache<B> {
    /// Adds the token's key to a free slot, or overwrites the slot that [`replaced_slot`](Self::replaced_slot) returns.
    pub(super) fn insert(&mut self, token: DmaToken<B>) {
        let [k, v] = [token.k, token.v].map(|x| tensor::<B, 3>(x).unsqueeze_dim::<4>(2));
        let rank = tensor::<B, 2>(token.rank).unsqueeze_dim::<3>(2);
        let [batch, kv_heads, _] = rank.dims();
        let here = |len| Tensor::<B, 3, Int>::full([batch, kv_heads, len], token.position as i64, &rank.device());
        if !self.is_full() {
            self.positions.append(here(1));
            self.keys.k.append(k);
            self.keys.v.append(v);
            self.rank.append(rank);
            return;
        }
        self.replaces();
        let replaced = self.replaced_slot(rank.clone(), token.position);
        let all = replaced.dims();
        let here = here(all[2]);
        self.keys.replace(replaced.clone(), k, v);
        self.rank.write(|ranks| ranks.mask_where(replaced.clone(), rank.expand(all)));
        self.positions.write(|positions| positions.mask_where(replaced, here));
    }

    /// True at the slot that the key at `position` overwrites, `[batch, num_kv_heads, len]`; false everywhere if it is
    /// not stored.
    fn replaced_slot(&self, rank: Tensor<B, 3>, position: usize) -> Tensor<B, 3, Bool> {
        let local = self.window.local_window_size;
        let (ranks, positions) = (self.rank.buffer(), self.positions.buffer());
        let all = ranks.dims();
        // The last `local` keys, the new one included, are those after this position.
        let last_candidate = position as i64 - local as i64;
        let in_local_window = positions.clone().greater_elem(last_candidate);
        let ranks = ranks.clone().mask_fill(in_local_window.clone(), f64::INFINITY);
        let smallest = ranks.clone().min_dim(2).expand(all);
        // Of keys with equal ranks the one with the lowest position is replaced.
        let no_candidate = (ranks.equal(smallest.clone()).bool_not()).bool_or(in_local_window);
        let later = positions.clone().mask_fill(no_candidate.clone(), i32::MAX);
        let first = later.min_dim(2).expand(all);
        let slot = (positions.clone().equal(first)).bool_and(no_candidate.bool_not());
        if local > 0 {
            return slot;
        }
        // The new key is the most recent, so a tie keeps it.
        slot.bool_and(rank.expand(all).greater_equal(smallest))
    }
}
