//! One new token a sequence against its cache on CUDA.
use super::{DmaCache, DmaToken, KeyCache, reference};
use crate::attention::AttentionSpec;
use crate::attention::cuda::{packed, packed_heads};
use crate::device::cuda::{Cuda, tensors};
use crate::device::paths::kernel_or;
use burn::tensor::{DType, Int, Tensor, TensorData, TensorPrimitive};
use sieve_core::{DmaBias, DmaWindow, HeavyKeys};
use sieve_cuda::CudaDevice;
use sieve_kernels::{
    AttentionShape, CudaPrimitive as Float, CudaTensor, DecodeScratch, DecodeStep, DmaSlots, KernelError, KvCache,
    LatentKeys, Qkv, ScoreBias, ToBurn, contiguous_strides, device_of, kernel_tensor,
};
use std::sync::Mutex;
use std::thread::ThreadId;

pub(crate) fn attention_decode(q: Float, k: Float, v: Float, delta: Option<Float>, softmax_scale: f64) -> Float {
    let attempt = attend(&q, &k, &v, delta.as_ref(), softmax_scale);
    kernel_or("attention_decode", attempt, || {
        reference::attention_decode::<Cuda>(q, k, v, delta, softmax_scale)
    })
}

pub(crate) fn cached_attention(cache: KeyCache<Cuda>, qkv: Float, spec: AttentionSpec) -> (KeyCache<Cuda>, Float) {
    let attempt = append(&cache, &qkv, spec);
    kernel_or("attention_decode", attempt, || {
        reference::cached_attention(cache, qkv, spec)
    })
}

pub(crate) fn mla_decode(q: Float, latents: Float, key_scale: Option<Float>, rank: usize, softmax_scale: f64) -> Float {
    let [on_q, on_latents] = tensors([&q, &latents]);
    let on_key_scale = key_scale.clone().map(kernel_tensor);
    let keys = LatentKeys {
        latents: &on_latents,
        rank,
        key_scale: on_key_scale.as_ref(),
    };
    let attempt = sieve_kernels::mla_decode(&on_q, keys, softmax_scale as f32);
    kernel_or("mla_decode", attempt.map(ToBurn::burn), || {
        reference::mla_decode::<Cuda>(q, latents, key_scale, rank, softmax_scale)
    })
}

pub(crate) fn dma_decode(
    cache: DmaCache<Cuda>,
    token: DmaToken<Cuda>,
    softmax_scale: f64,
    bias: DmaBias,
) -> (DmaCache<Cuda>, Float) {
    let attempt = dma_step(&cache, &token, softmax_scale, bias);
    kernel_or("dma_decode", attempt, || {
        reference::dma_decode(cache, token, softmax_scale, bias)
    })
}

const NAME: &str = "decode";

/// Buffers are made anew whenever this many keys came.
const SCRATCH_KEYS: usize = 256;

/// Room for new keys that a full cache gets: one key for `ROOM_SHARE` that it has, which a plan does not count, and
/// `LEAST_ROOM` at least.
const LEAST_ROOM: usize = 256;
const ROOM_SHARE: usize = 16;

fn float<const D: usize>(primitive: &Float) -> Tensor<Cuda, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive.clone()))
}

fn primitive<const D: usize>(tensor: Tensor<Cuda, D>) -> CudaTensor {
    kernel_tensor(tensor.into_primitive().tensor())
}

/// `[batch, heads, head_dim]` as a sequence of one token.
fn one_token(x: &Float) -> Result<CudaTensor, KernelError> {
    let x = kernel_tensor(x.clone()).contiguous();
    let [batch, heads, head_dim] = x.dims(NAME, "token")?;
    x.reshaped(NAME, "token", &[batch, 1, heads, head_dim])
}

/// What the layers of a step share, made by the first of them. A thread has a stream of its own.
struct Shared<K, V>(Mutex<Option<(StepOf<K>, V)>>);

/// The thread and device of a step, and what its value was made for.
type StepOf<K> = (ThreadId, CudaDevice, K);

impl<K: PartialEq, V: Clone> Shared<K, V> {
    const fn new() -> Self {
        Self(Mutex::new(None))
    }

    fn get<E>(&self, like: &CudaTensor, key: K, new: impl FnOnce() -> Result<V, E>) -> Result<V, E> {
        let key = (std::thread::current().id(), device_of(like).clone(), key);
        let mut last = self.0.lock().unwrap_or_else(|broken| broken.into_inner());
        if let Some((of, value)) = &*last
            && *of == key
        {
            return Ok(value.clone());
        }
        let value = new()?;
        *last = Some((key, value.clone()));
        Ok(value)
    }
}

/// The same length for every row, on the device.
fn lengths(like: &CudaTensor, batch: usize, length: usize) -> CudaTensor {
    static LENGTHS: Shared<[usize; 2], CudaTensor> = Shared::new();
    let new = || {
        let data = TensorData::new(vec![length as i32; batch], [batch]);
        let lengths = Tensor::<Cuda, 1, Int>::from_data(data, device_of(like));
        Ok::<_, std::convert::Infallible>(kernel_tensor(lengths.into_primitive()))
    };
    let Ok(lengths) = LENGTHS.get(like, [batch, length], new);
    lengths
}

/// Buffers of the decode kernels for at most `keys` keys. Launches leave them as they found them.
fn scratch(like: &CudaTensor, shape: AttentionShape, keys: usize) -> Result<DecodeScratch, KernelError> {
    static SCRATCH: Shared<(AttentionShape, usize), DecodeScratch> = Shared::new();
    let keys = keys.next_multiple_of(SCRATCH_KEYS);
    SCRATCH.get(like, (shape, keys), || DecodeScratch::new(like, shape, keys))
}

fn without_token_dimension(o: CudaTensor) -> Result<Float, KernelError> {
    let [batch, _, heads, head_dim] = o.dims(NAME, "o")?;
    Ok(o.reshaped(NAME, "o", &[batch, heads, head_dim])?.burn())
}

/// `q [batch, num_heads, head_dim]` over `k, v [batch, kv_len, num_kv_heads, head_dim]`, without a bias.
fn attend(q: &Float, k: &Float, v: &Float, delta: Option<&Float>, softmax_scale: f64) -> Result<Float, KernelError> {
    if delta.is_some() {
        let supported = "none; dma_decode adds the bias of its own slots";
        let what = "bias per key";
        return Err(KernelError::unsupported("attention_decode", what, "one", supported));
    }
    let [_, kv_len, _, _] = kernel_tensor(k.clone()).dims(NAME, "k")?;
    // The kernel's cache has the heads outside, so that a head's keys are one stretch of memory.
    let heads_outside = |x: &Float| primitive(float::<4>(x).swap_dims(1, 2)).contiguous();
    let cache = KvCache {
        k: heads_outside(k),
        v: heads_outside(v),
    };
    let query = one_token(q)?;
    // Keys and values of the token are in the cache already; these two are not read.
    let first_key = primitive(float::<4>(k).narrow(1, 0, 1)).contiguous();
    let first_value = primitive(float::<4>(v).narrow(1, 0, 1)).contiguous();
    let token = Qkv::separate(&query, &first_key, &first_value);
    let shape = token.shape(NAME)?;
    let scratch = scratch(&query, shape, kv_len)?;
    let step = DecodeStep {
        window: None,
        softmax_scale: softmax_scale as f32,
        max_length: kv_len,
    };
    let length = lengths(&query, shape.batch, kv_len);
    let o = cache.attention_decode_cached(&token, &length, step, &scratch)?;
    without_token_dimension(o)
}

/// Writes the token's key and value behind the others and attends.
///
/// As with DMA's slots the cache's tensors are views of the used part of larger buffers. A cache that is full, or held
/// by somebody else too, is copied to a larger one; of a window its last keys alone.
fn append(cache: &KeyCache<Cuda>, qkv: &Float, spec: AttentionSpec) -> Result<(KeyCache<Cuda>, Float), KernelError> {
    let token = packed(qkv, spec);
    let shape = token.shape(NAME)?;
    let [_, len, _, _] = kernel_tensor(cache.k.clone()).dims::<4>(NAME, "cache.k")?;
    let (kv, len) = match room_of(cache, &shape, len) {
        Some(kv) => (kv, len),
        None => larger(cache, &shape, len, spec.window_size),
    };
    let [_, _, capacity, _] = kv.k.dims::<4>(NAME, "k_cache")?;
    let step = DecodeStep {
        window: spec.window_size,
        softmax_scale: spec.softmax_scale as f32,
        max_length: len,
    };
    let length = lengths(&kv.k, shape.batch, len);
    let scratch = scratch(&kv.k, shape, spec.window_size.unwrap_or(len + 1).min(len + 1))?;
    let o = kv.attention_decode(&token, &length, step, &scratch)?;
    let (sizes, strides) = (
        [shape.batch, len + 1, shape.num_kv_heads, shape.head_dim],
        view_strides(&shape, capacity, shape.head_dim).0,
    );
    let view = |x: &CudaTensor| x.view(NAME, "cache", &sizes, &strides).map(ToBurn::burn);
    let (k, v) = (view(&kv.k)?, view(&kv.v)?);
    Ok((KeyCache { k, v }, o.burn()))
}

/// The buffers behind a cache, with room for one key more; `None` when its tensors are others, or somebody else holds
/// them too.
fn room_of(cache: &KeyCache<Cuda>, shape: &AttentionShape, len: usize) -> Option<KvCache> {
    let whole = |x: &Float| {
        let capacity = x.meta.strides()[2] / shape.head_dim;
        let (wide, _) = view_strides(shape, capacity, shape.head_dim);
        if capacity <= len || x.meta.strides()[..] != wide || x.dtype != DType::BF16 || !x.can_mut() {
            return None;
        }
        let sizes = [shape.batch, shape.num_kv_heads, capacity, shape.head_dim];
        kernel_tensor(x.clone())
            .view(NAME, "cache", &sizes, &contiguous_strides(&sizes))
            .ok()
    };
    let (k, v) = (whole(&cache.k)?, whole(&cache.v)?);
    (k.shape() == v.shape()).then_some(KvCache { k, v })
}

/// New buffers with the keys and values that the next query sees, and how many those are.
fn larger(cache: &KeyCache<Cuda>, shape: &AttentionShape, len: usize, window: Option<usize>) -> (KvCache, usize) {
    let kept = window.map_or(len, |window| len.min(window - 1));
    let capacity = (kept + LEAST_ROOM.max(kept / ROOM_SHARE)).next_multiple_of(64);
    let sizes = [shape.batch, shape.num_kv_heads, capacity, shape.head_dim];
    let larger = |x: &Float| {
        let x = float::<4>(x).narrow(1, len - kept, kept).swap_dims(1, 2);
        let room = Tensor::<Cuda, 4>::empty(sizes, (&x.device(), DType::BF16));
        let [batch, heads, _, width] = sizes;
        let used = [0..batch, 0..heads, 0..kept, 0..width];
        let filled = match kept {
            0 => room,
            _ => room.slice_assign(used, x.cast(DType::BF16)),
        };
        primitive(filled)
    };
    let (k, v) = (larger(&cache.k), larger(&cache.v));
    (KvCache { k, v }, kept)
}

/// Offers the token to the slots and attends.
///
/// The slots live in buffers of `keep_window_size` places a head; the cache's tensors are views of their used part, so
/// that a step writes one place and copies nothing.
fn dma_step(
    cache: &DmaCache<Cuda>,
    token: &DmaToken<Cuda>,
    softmax_scale: f64,
    bias: DmaBias,
) -> Result<(DmaCache<Cuda>, Float), KernelError> {
    let (q, k, v) = (one_token(&token.q)?, one_token(&token.k)?, one_token(&token.v)?);
    let qkv = Qkv::separate(&q, &k, &v);
    let shape = qkv.shape(NAME)?;
    let window = cache.window.keep_window_size;
    let [_, len, _, _] = kernel_tensor(cache.k.clone()).dims::<4>(NAME, "cache.k")?;
    if len != token.position.min(window) {
        return Err(KernelError::unsupported(
            "dma_decode",
            "number of cached keys",
            len,
            format!(
                "the {} that position {} implies",
                token.position.min(window),
                token.position
            ),
        ));
    }
    let slots = match slots_of(cache, &shape) {
        Some(slots) => slots,
        None => filled_slots(cache, &shape, &q),
    };
    let rank = kernel_tensor(token.rank.clone());
    let length = lengths(&q, shape.batch, token.position);
    let scratch = scratch(&q, shape, window)?;
    let bias = match bias {
        DmaBias::Exp => ScoreBias::Exp,
        DmaBias::Linear => ScoreBias::Linear,
    };
    let scale = softmax_scale as f32;
    let o = slots.dma_decode(&qkv, &rank, &length, scale, bias, &scratch)?;
    let cache = view_of(&slots, &shape, (len + 1).min(window), cache.window)?;
    Ok((cache, without_token_dimension(o)?))
}

/// What stays of a prompt, as slots that are all in use.
pub(crate) fn kept_cache(qkv: &Qkv, heavy: &HeavyKeys) -> Result<DmaCache<Cuda>, KernelError> {
    let kept = qkv.keep_heavy_keys(heavy)?;
    let shape = qkv.shape(NAME)?;
    let [_, _, len] = kept.positions.dims(NAME, "positions")?;
    let window = heavy.slots.unwrap_or(DmaWindow {
        keep_window_size: len,
        local_window_size: 0,
    });
    let slots = DmaSlots {
        kv: KvCache { k: kept.k, v: kept.v },
        z: kept.received,
        positions: kept.positions,
        local_window_size: window.local_window_size,
    };
    let all = DmaWindow {
        keep_window_size: len,
        ..window
    };
    let cache = view_of(&slots, &shape, len, all)?;
    Ok(DmaCache { window, ..cache })
}

/// Adds one token to slots that lose their lightest key, and attends.
pub(crate) fn heavy_step(
    cache: &DmaCache<Cuda>,
    qkv: &Float,
    position: usize,
    softmax_scale: f32,
) -> Result<(DmaCache<Cuda>, Float), KernelError> {
    let [_, len, num_kv_heads, _] = kernel_tensor(cache.k.clone()).dims::<4>(NAME, "cache.k")?;
    let [_, _, heads, _] = kernel_tensor(qkv.clone()).dims::<4>(NAME, "qkv")?;
    let token = packed_heads(qkv, [heads - 2 * num_kv_heads, num_kv_heads]);
    let shape = token.shape(NAME)?;
    let like = token.q.tensor();
    let slots = match slots_of(cache, &shape) {
        Some(slots) => slots,
        None => filled_slots(cache, &shape, like),
    };
    let window = cache.window.keep_window_size;
    let length = lengths(like, shape.batch, position);
    let scratch = scratch(like, shape, window)?;
    let o = slots.heavy_decode(&token, &length, position, softmax_scale, &scratch)?;
    let cache = view_of(&slots, &shape, (len + 1).min(window), cache.window)?;
    Ok((cache, o.burn()))
}

/// Strides of a view `[batch, len, num_kv_heads, width]` of slots, and of `[batch, num_kv_heads, len]`.
fn view_strides(shape: &AttentionShape, window: usize, width: usize) -> ([usize; 4], [usize; 3]) {
    let heads = shape.num_kv_heads;
    let wide = [heads * window * width, width, window * width, 1];
    (wide, [heads * window, window, 1])
}

/// The slots behind a cache of an earlier step; `None` when its tensors are others, or somebody else holds them too.
fn slots_of(cache: &DmaCache<Cuda>, shape: &AttentionShape) -> Option<DmaSlots> {
    let window = cache.window.keep_window_size;
    let whole = |x: &Float, strides: &[usize], width: usize, dtype: DType| {
        if x.meta.strides()[..] != *strides || x.dtype != dtype || !x.can_mut() {
            return None;
        }
        let mut sizes = vec![shape.batch, shape.num_kv_heads, window];
        sizes.extend((strides.len() == 4).then_some(width));
        let whole = kernel_tensor(x.clone());
        whole.view(NAME, "slots", &sizes, &contiguous_strides(&sizes)).ok()
    };
    let (key, per_key) = view_strides(shape, window, shape.head_dim);
    let (value, _) = view_strides(shape, window, shape.head_dim_v);
    let kv = KvCache {
        k: whole(&cache.k, &key, shape.head_dim, DType::BF16)?,
        v: whole(&cache.v, &value, shape.head_dim_v, DType::BF16)?,
    };
    let z = whole(&cache.rank, &per_key, 1, DType::F32)?;
    let positions = whole(&cache.positions, &per_key, 1, DType::I32)?;
    Some(DmaSlots {
        kv,
        z,
        positions,
        local_window_size: cache.window.local_window_size,
    })
}

/// New slots with the contents of a cache.
fn filled_slots(cache: &DmaCache<Cuda>, shape: &AttentionShape, like: &CudaTensor) -> DmaSlots {
    let device = device_of(like);
    let (batch, heads) = (shape.batch, shape.num_kv_heads);
    let window = cache.window.keep_window_size;
    let wide = |x: &Float, width: usize| {
        let x = float::<4>(x).swap_dims(1, 2);
        let len = x.dims()[2];
        let zeros = Tensor::<Cuda, 4>::zeros([batch, heads, window, width], (device, DType::BF16));
        let filled = zeros.slice_assign([0..batch, 0..heads, 0..len, 0..width], x.cast(DType::BF16));
        primitive(filled).contiguous()
    };
    let z = float::<3>(&cache.rank).cast(DType::F32);
    let used = [0..batch, 0..heads, 0..z.dims()[2]];
    let slots_z = Tensor::<Cuda, 3>::zeros([batch, heads, window], (device, DType::F32));
    let positions = Tensor::<Cuda, 3, Int>::from_primitive(cache.positions.clone());
    let slots_positions = Tensor::<Cuda, 3, Int>::zeros([batch, heads, window], device);
    let positions = slots_positions.slice_assign(used.clone(), positions).into_primitive();
    DmaSlots {
        kv: KvCache {
            k: wide(&cache.k, shape.head_dim),
            v: wide(&cache.v, shape.head_dim_v),
        },
        z: primitive(slots_z.slice_assign(used, z)).contiguous(),
        positions: kernel_tensor(positions).contiguous(),
        local_window_size: cache.window.local_window_size,
    }
}

/// A cache whose tensors are views of the first `len` places.
fn view_of(
    slots: &DmaSlots,
    shape: &AttentionShape,
    len: usize,
    window: DmaWindow,
) -> Result<DmaCache<Cuda>, KernelError> {
    let (batch, heads) = (shape.batch, shape.num_kv_heads);
    let (key, per_key) = view_strides(shape, window.keep_window_size, shape.head_dim);
    let (value, _) = view_strides(shape, window.keep_window_size, shape.head_dim_v);
    let view =
        |x: &CudaTensor, sizes: &[usize], strides: &[usize]| x.view(NAME, "slots", sizes, strides).map(ToBurn::burn);
    Ok(DmaCache {
        k: view(&slots.kv.k, &[batch, len, heads, shape.head_dim], &key)?,
        v: view(&slots.kv.v, &[batch, len, heads, shape.head_dim_v], &value)?,
        rank: view(&slots.z, &[batch, heads, len], &per_key)?,
        positions: view(&slots.positions, &[batch, heads, len], &per_key)?,
        window,
    })
}
