//! Decoding on CUDA: one new token of each sequence against its cache. Calls that a kernel refuses run the reference.
use super::reference::Logits;
use super::{DmaCache, DmaToken, KeyCache, SelectorCache, TokenBuffer, reference};
use crate::attention::cuda::{packed, packed_heads};
use crate::device::{kernel_of, kernel_or, tensors};
use crate::tensors::{primitive, tensor};
use crate::{AttentionSpec, Cuda};
use burn::tensor::{Int, Tensor};
use sieve_core::{DmaBias, HeavyKeys, TokenKeys};
use sieve_kernels::{
    CudaPrimitive as Float, CudaTensor, DecodeStep, DmaSlots, Heads, KernelError, KvCache, LatentKeys, Qkv, ScoreBias,
    SelectorStep, ToBurn, device_of, kernel_tensor,
};

pub(crate) fn draw(logits: Float, draws: Float, num_tokens: usize) -> Float {
    let operands = [logits.clone(), draws.clone()].map(kernel_tensor);
    let attempt = sieve_kernels::step::draw(&operands[0], &operands[1], num_tokens);
    kernel_or("draw", attempt.map(ToBurn::burn), || reference::draw::<Cuda>(logits, draws, num_tokens))
}

pub(crate) fn likeliest(logits: Float, num_tokens: usize) -> Float {
    let attempt = sieve_kernels::step::likeliest(&kernel_tensor(logits.clone()), num_tokens);
    kernel_or("likeliest", attempt.map(ToBurn::burn), || reference::likeliest::<Cuda>(logits, num_tokens))
}

/// The loss in nats of each row of `logits`, `[rows, vocab_size]`; every label is a token of the vocabulary. Rows that
/// are not whole words of eight logits are copied to a padded tensor.
pub(crate) fn losses_of_logits(logits: Float, labels: Float) -> Float {
    let rows = tensor::<Cuda, 2>(logits.clone());
    let [count, vocab_size] = rows.dims();
    // The kernel reads whole words, and ignores what stands behind the vocabulary.
    let rest = vocab_size.next_multiple_of(8) - vocab_size;
    let padded = if rest == 0 {
        rows
    } else {
        let zeros = Tensor::zeros([count, rest], (&rows.device(), rows.dtype()));
        Tensor::cat(vec![rows, zeros], 1)
    };
    let operands = [primitive(padded), labels.clone()].map(kernel_tensor);
    let attempt = sieve_kernels::losses_of_logits(&operands[0], vocab_size, &operands[1]);
    kernel_or("losses_of_logits", attempt.map(ToBurn::burn), || {
        crate::loss::reference::losses_of_logits::<Cuda>(logits, labels)
    })
}

/// `q`, `[batch, num_heads, head_dim]`, over all keys of the cache. The kernel refuses a bias `delta`, so that the
/// reference adds it.
pub(crate) fn attention_decode(
    q: Float,
    keys: &KeyCache<Cuda>,
    delta: Option<Float>,
    softmax_scale: f64,
    scratch: &mut CudaDecodeScratch,
) -> Float {
    let attempt = attend(&q, keys, delta.as_ref(), softmax_scale, scratch);
    kernel_or("attention_decode", attempt, || {
        reference::attention_decode::<Cuda>(q, keys, keys.len(), Logits { delta, sinks: None }, softmax_scale)
    })
}

/// Writes the token's key and value into the cache's buffers in place, and attends over the last `spec.window_size`
/// keys and those of `spec.far`, or over all.
pub(crate) fn cached_attention(
    cache: &mut KeyCache<Cuda>,
    qkv: Float,
    sinks: Option<Float>,
    spec: AttentionSpec,
    scratch: &mut CudaDecodeScratch,
) -> Float {
    let attempt = append_and_attend(cache, &qkv, sinks.as_ref(), spec, scratch);
    kernel_or("attention_decode", attempt, || reference::cached_attention(cache, qkv, sinks, spec))
}

/// All latents are seen, those of the new tokens up to each token's own; `key_scale` is f32 `[batch, len, num_heads]`,
/// `None` where keys are not normed.
pub(crate) fn mla_decode(q: Float, latents: Float, key_scale: Option<Float>, rank: usize, softmax_scale: f64) -> Float {
    let [on_q, on_latents] = tensors([&q, &latents]);
    let on_key_scale = key_scale.clone().map(kernel_tensor);
    let keys = LatentKeys { latents: &on_latents, rank, key_scale: on_key_scale.as_ref(), length: None };
    let attempt = sieve_kernels::mla_decode(&on_q, keys, softmax_scale as f32);
    kernel_or("mla_decode", attempt.map(ToBurn::burn), || {
        reference::mla_decode::<Cuda>(q, latents, key_scale, rank, softmax_scale)
    })
}

/// Writes the token into its slot in place and attends over all slots. A cache whose number of keys does not follow
/// from the token's position takes the reference.
pub(crate) fn dma_decode(
    cache: &mut DmaCache<Cuda>,
    token: DmaToken<Cuda>,
    softmax_scale: f64,
    bias: DmaBias,
    scratch: &mut CudaDecodeScratch,
) -> Float {
    let attempt = dma_step(cache, &token, softmax_scale, bias, scratch);
    kernel_or("dma_decode", attempt, || reference::dma_decode(cache, token, softmax_scale, bias, scratch))
}

pub(crate) use super::cuda_step::{repeat_token_step, token_step};
pub(crate) use super::scratch::{CudaDecodeScratch, CudaStepGraph};

const NAME: &str = "decode";

/// `[batch, heads, head_dim]` as one token, `[batch, 1, heads, head_dim]`.
fn one_token(x: &Float) -> Result<CudaTensor, KernelError> {
    let x = kernel_tensor(x.clone()).contiguous();
    let [batch, heads, head_dim] = x.dims(NAME, "token")?;
    x.reshaped(NAME, "token", &[batch, 1, heads, head_dim])
}

fn without_token_dimension(o: CudaTensor) -> Result<Float, KernelError> {
    let [batch, _, heads, head_dim] = o.dims(NAME, "o")?;
    Ok(o.reshaped(NAME, "o", &[batch, heads, head_dim])?.burn())
}

fn buffers(cache: &KeyCache<Cuda>) -> KvCache {
    KvCache { k: kernel_of(cache.k.buffer()), v: kernel_of(cache.v.buffer()) }
}

/// The cache's buffers, contiguous, for kernels that write to them in place. Burn may have replaced a buffer by a copy
/// with padded rows; the cache then gets a contiguous copy of it.
pub(super) fn writable(cache: &mut KeyCache<Cuda>) -> KvCache {
    let found = buffers(cache);
    if found.k.is_contiguous() && found.v.is_contiguous() {
        return found;
    }
    *cache = cache.clone();
    buffers(cache)
}

/// Attention of `q`, `[batch, num_heads, head_dim]`, over all keys of a cache; refuses a bias.
fn attend(
    q: &Float,
    keys: &KeyCache<Cuda>,
    delta: Option<&Float>,
    softmax_scale: f64,
    scratch: &mut CudaDecodeScratch,
) -> Result<Float, KernelError> {
    if delta.is_some() {
        // The kernel of `dma_decode` computes the bias from the ranks of its slots.
        let supported = "none; dma_decode adds the bias of its own slots";
        let what = "bias per key";
        return Err(KernelError::unsupported("attention_decode", what, "one", supported));
    }
    let query = one_token(q)?;
    let heads = Heads::all(&query);
    let [k, v] = [&keys.k, &keys.v].map(|x| kernel_of(x.buffer()).contiguous());
    let cache = KvCache { k, v };
    let shape = cache.query_shape(NAME, &heads)?;
    let step = DecodeStep::new(keys.len(), softmax_scale as f32);
    let (length, buffers) = scratch.for_call(&query, shape, keys.len(), keys.len())?;
    let o = cache.attention_decode_cached(&heads, length, step, buffers)?;
    without_token_dimension(o)
}

/// Writes the token's key and value after the others and attends.
fn append_and_attend(
    cache: &mut KeyCache<Cuda>,
    qkv: &Float,
    sinks: Option<&Float>,
    spec: AttentionSpec,
    scratch: &mut CudaDecodeScratch,
) -> Result<Float, KernelError> {
    let token = packed(qkv, spec);
    let shape = token.shape(NAME)?;
    let (len, kv) = (cache.len(), writable(cache));
    let sinks = sinks.map(|sinks| kernel_tensor(sinks.clone()));
    let all = DecodeStep::new(len, spec.softmax_scale as f32);
    let step = DecodeStep { window: spec.window_size, far: spec.far_keys(), sinks: sinks.as_ref(), ..all };
    let seen = step.most_keys(len + 1);
    let (length, buffers) = scratch.for_call(&kv.k, shape, len, seen)?;
    let o = kv.attention_decode(&token, length, step, buffers)?;
    cache.count_token();
    Ok(o.burn())
}

/// The cache's slots as operands of kernels, which write them in place.
pub(super) fn slots_of(cache: &mut DmaCache<Cuda>) -> DmaSlots {
    DmaSlots {
        kv: writable(&mut cache.keys),
        z: kernel_of(cache.rank.buffer()),
        positions: kernel_tensor(cache.positions.buffer().clone().into_primitive()),
        local_window_size: cache.window.local_window_size,
    }
}

/// Adds the token to the slots, in place, and attends.
fn dma_step(
    cache: &mut DmaCache<Cuda>,
    token: &DmaToken<Cuda>,
    softmax_scale: f64,
    bias: DmaBias,
    scratch: &mut CudaDecodeScratch,
) -> Result<Float, KernelError> {
    let (q, k, v) = (one_token(&token.q)?, one_token(&token.k)?, one_token(&token.v)?);
    let qkv = Qkv::separate(&q, &k, &v).under(token.policy);
    let shape = qkv.shape(NAME)?;
    let (window, position) = (cache.window.keep_window_size, token.position);
    let expected = position.min(window);
    if cache.len() != expected {
        let supported = format!("the {expected} that position {position} implies");
        let what = "number of cached keys";
        return Err(KernelError::unsupported("dma_decode", what, cache.len(), supported));
    }
    let rank = kernel_tensor(token.rank.clone());
    let (length, buffers) = scratch.for_call(&q, shape, position, window)?;
    let bias = ScoreBias::from(bias);
    let (slots, scale) = (slots_of(cache), softmax_scale as f32);
    let o = if slots.has_one_order(&qkv) {
        slots.dma_decode_in_order(&qkv, &rank, length, scale, bias)?
    } else {
        slots.dma_decode(&qkv, &rank, length, scale, bias, buffers)?
    };
    cache.count_token();
    without_token_dimension(o)
}

/// A cache of the keys that `heavy` keeps of a prompt, one in each slot; as many slots as keys if `heavy` sets no
/// number.
pub(crate) fn kept_cache(qkv: &Qkv, lse: &CudaTensor, heavy: &HeavyKeys) -> Result<DmaCache<Cuda>, KernelError> {
    let kept = qkv.keep_heavy_keys(heavy, lse)?;
    let [_, _, len] = kept.positions.dims(NAME, "positions")?;
    let window = heavy.slots.unwrap_or(len.into());
    let keys = [kept.k, kept.v].map(|x| tensor(x.burn()));
    let positions = Tensor::from_primitive(kept.positions.burn());
    Ok(DmaCache::new(keys, tensor(kept.received.burn()), positions, window))
}

/// Adds one token to the slots, in place of the key that received the least attention, and attends.
pub(crate) fn heavy_step(
    cache: &mut DmaCache<Cuda>,
    qkv: &Float,
    position: usize,
    softmax_scale: f32,
    scratch: &mut CudaDecodeScratch,
) -> Result<Float, KernelError> {
    let [_, num_kv_heads, window, _] = cache.keys.k.buffer().dims();
    let [_, _, heads, _] = kernel_tensor(qkv.clone()).dims::<4>(NAME, "qkv")?;
    let token = packed_heads(qkv, [heads - 2 * num_kv_heads, num_kv_heads]);
    let shape = token.shape(NAME)?;
    let (length, buffers) = scratch.for_call(token.q.tensor(), shape, position, window)?;
    let o = slots_of(cache).heavy_decode(&token, length, position, softmax_scale, buffers)?;
    cache.count_token();
    Ok(o.burn())
}

/// A buffer that kernels write in place; if it is not contiguous, it is replaced by a contiguous copy.
pub(super) fn writable_buffer<const D: usize>(tokens: &mut TokenBuffer<Cuda, D>) -> CudaTensor {
    if !kernel_of(tokens.buffer()).is_contiguous() {
        *tokens = tokens.clone();
    }
    kernel_of(tokens.buffer())
}

/// Adds tokens to a selector's cache one by one, and attends with each over the keys that it reads. Returns
/// `[1, 1, num_heads, head_dim]` for each token.
pub(crate) fn selector_steps(
    cache: &mut SelectorCache<Cuda>,
    qkv: &Float,
    reads: &[TokenKeys],
    softmax_scale: f32,
    scratch: &mut CudaDecodeScratch,
) -> Result<Vec<Float>, KernelError> {
    let packed = kernel_tensor(qkv.clone()).contiguous();
    let [_, new, heads, head_dim] = packed.dims(NAME, "qkv")?;
    let [_, num_kv_heads, _, _] = cache.keys.k.buffer().dims();
    let (first, row) = (cache.keys.len(), heads * head_dim);
    // The number of tokens before each new token, then minus each: where the document begins, relative to that token.
    let run = scratch.runs.get([first, new], || {
        let lengths = (first..first + new).map(|length| length as i32);
        let words: Vec<i32> = lengths.clone().chain(lengths.map(|length| -length)).collect();
        let words = Tensor::<Cuda, 1, Int>::from_data(words.as_slice(), device_of(&packed));
        Ok(kernel_tensor(words.into_primitive()))
    })?;
    let mut outputs = Vec::with_capacity(new);
    for (at, &keys) in reads.iter().enumerate() {
        cache.reads = keys;
        cache.reserve_token();
        let token = packed.view_at(NAME, "token", at * row, &[1, 1, heads, head_dim], &[row, row, head_dim, 1])?;
        let token = Qkv::packed(&token, heads - 2 * num_kv_heads, num_kv_heads);
        let (shape, most) = SelectorStep::scratch(keys, token.shape(NAME)?, cache.keys.len() + 1);
        let buffers = scratch.buffers.for_call(&packed, shape, most)?;
        let bounds = cache.bounds.as_mut().map(writable_buffer);
        let choice = SelectorStep {
            length: &run.view_at(NAME, "length", at, &[1], &[1])?,
            start: &run.view_at(NAME, "start", new + at, &[1, 1], &[1, 1])?,
            keys,
            bounds: bounds.as_ref(),
        };
        let step = DecodeStep::new(cache.keys.len(), softmax_scale);
        let o = writable(&mut cache.keys).selector_decode(&token, step, choice, buffers)?;
        cache.count_token();
        outputs.push(o.burn());
    }
    Ok(outputs)
}
