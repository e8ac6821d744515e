//! Burn's `Flex` tensors as the slices that the kernels of `sieve-cpu` take.
//!
//! Calls in f32 run the kernels, with weights in f32 or bf16. Calls in any other dtype (f64 in gradient checks) run the
//! reference, which is counted.
use super::paths::{self, Memory, Place};
use burn::tensor::{DType, Element, Shape, TensorData, TensorMetadata, bf16};
use burn_flex::FlexTensor;
use sieve_core::ScoreMatrix;
use sieve_cpu::{CachedRow, Weight, row_behind_cache};
use std::sync::Arc;

/// Entries in one piece from which [`contiguous`] copies by pieces.
const LEAST_PIECE: usize = 8;

/// The tensor, contiguous and at the beginning of its storage.
///
/// Burn copies a tensor of more than two strides entry by entry on one thread: heads before tokens took a twentieth of
/// a prompt's time.
pub(crate) fn contiguous(x: FlexTensor) -> FlexTensor {
    let in_pieces = !x.is_contiguous() && x.layout().strided_blocks().block_len() >= LEAST_PIECE;
    match x.dtype() {
        DType::F32 if in_pieces => by_pieces(&x, floats(&x)),
        DType::BF16 if in_pieces => by_pieces(&x, x.storage::<bf16>()),
        _ => x.to_contiguous(),
    }
}

/// A contiguous copy of a tensor whose last dimensions lie in one piece.
fn by_pieces<T: Element>(x: &FlexTensor, storage: &[T]) -> FlexTensor {
    let pieces = x.layout().strided_blocks();
    let mut values = Vec::with_capacity(x.shape().num_elements());
    pieces.block_starts().for_each(|first| values.extend_from_slice(&storage[first..][..pieces.block_len()]));
    from_vec(values, x.shape())
}

pub(crate) fn is_f32(x: &FlexTensor) -> bool {
    x.dtype() == DType::F32
}

const NOT_F32: &str = "the kernels of the CPU take f32";

/// Runs and counts the reference of an op, for a dtype without kernels.
pub(crate) fn plain<T>(op: &'static str, run: impl FnOnce() -> T) -> T {
    paths::reference((Place::Cpu, op), NOT_F32, Memory::Linear, run)
}

/// Like [`plain`], for an op whose reference holds a score matrix of this size.
pub(crate) fn plain_scores<T>(op: &'static str, scores: ScoreMatrix, run: impl FnOnce() -> T) -> T {
    paths::reference((Place::Cpu, op), NOT_F32, Memory::Quadratic(scores), run)
}

/// `unless_f32!(&x, "swiglu": reference)` returns the reference's result from the calling function, and counts the
/// call, where x is not f32. `unless_f32!(&qkv, num_heads, "attention": reference)` is for a reference that holds a
/// score for every head and pair of tokens.
macro_rules! unless_f32 {
    ($x:expr, $op:literal: $reference:expr) => {
        if !$crate::device::is_f32($x) {
            return $crate::device::plain($op, || $reference);
        }
    };
    ($x:expr, $num_heads:expr, $op:literal: $reference:expr) => {
        if !$crate::device::is_f32($x) {
            let scores = $crate::device::scores($x, $num_heads);
            return $crate::device::plain_scores($op, scores, || $reference);
        }
    };
}
pub(crate) use unless_f32;

pub(crate) fn floats(x: &FlexTensor) -> &[f32] {
    x.storage::<f32>()
}

/// A tensor as a weight, in f32 or bf16.
pub(crate) fn weight(x: &FlexTensor) -> Weight<'_> {
    match x.dtype() {
        DType::BF16 => Weight::Bf16(x.storage::<bf16>()),
        _ => Weight::F32(floats(x)),
    }
}

pub(crate) fn ints(x: &FlexTensor) -> &[i32] {
    x.storage::<i32>()
}

pub(crate) fn from_vec<T: Element>(values: Vec<T>, shape: impl Into<Shape>) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values, shape.into()))
}

/// `values` in the shape of `x` with `columns` as the last dimension.
pub(crate) fn with_columns(x: &FlexTensor, columns: usize, values: Vec<f32>) -> FlexTensor {
    let mut shape = x.shape().to_vec();
    let last = shape.len() - 1;
    shape[last] = columns;
    from_vec(values, shape)
}

pub(crate) fn zeros_like(x: &FlexTensor) -> Vec<f32> {
    sieve_cpu::zeros(x.shape().num_elements())
}

/// Writes `values` into `x` from entry `first` of each dimension on: in place where no other handle shares a contiguous
/// `x`. Burn's `slice_assign` holds a second handle itself, so that it copies all of `x`.
pub(crate) fn write_block<const D: usize>(x: FlexTensor, first: [usize; D], values: FlexTensor) -> FlexTensor {
    let (x, values) = (contiguous(x), contiguous(values));
    let (dims, new): ([usize; D], [usize; D]) = (x.shape().dims(), values.shape().dims());
    let (layout, dtype) = (x.layout().clone(), x.dtype());
    assert_eq!(dtype, values.dtype(), "bytes are copied as they are");
    let mut storage = x.data_arc();
    drop(x);
    let bytes = Arc::make_mut(&mut storage);
    let width = new[D - 1] * dtype.size();
    for (row, values) in values.bytes().chunks_exact(width.max(1)).enumerate() {
        let (mut place, mut stride, mut rest) = (first[D - 1], dims[D - 1], row);
        for dim in (0..D - 1).rev() {
            place += (first[dim] + rest % new[dim]) * stride;
            stride *= dims[dim];
            rest /= new[dim];
        }
        bytes[place * dtype.size()..][..width].copy_from_slice(values);
    }
    FlexTensor::from_arc(storage, layout, dtype)
}

/// The row of [`KeyCache::before`](crate::KeyCache::before): the first and the last of the `len` tokens in buffers of
/// keys and values, `[batch, num_kv_heads, room, head_dim]`, as many as `ends` says, with queries of zero, then `qkv`.
/// All are f32.
pub(crate) fn row_behind(keys: [FlexTensor; 2], len: usize, ends: [usize; 2], qkv: FlexTensor) -> FlexTensor {
    let (keys, qkv) = (keys.map(contiguous), contiguous(qkv));
    let [batch, new, num_heads, head_dim] = qkv.shape().dims();
    let [_, num_kv_heads, room, _] = keys[0].shape().dims();
    let sizes = CachedRow { batch, num_heads, num_kv_heads, head_dim, room, len, ends };
    let row = row_behind_cache(sizes, keys.each_ref().map(floats), floats(&qkv));
    from_vec(row, [batch, ends[0] + ends[1] + new, num_heads, head_dim])
}

/// Size of a tensor's last dimension.
pub(crate) fn last_dim(x: &FlexTensor) -> usize {
    let shape = x.shape();
    shape[shape.num_dims() - 1]
}
