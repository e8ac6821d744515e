//! Primitives as tensors of known rank, and the dtype that references compute in.
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData, TensorMetadata, TensorPrimitive};

/// Float and integer primitives of a backend.
pub(crate) use burn::tensor::ops::{FloatTensor as Float, IntTensor as Ints};

/// A primitive as a tensor of known rank.
pub(crate) fn tensor<B: Backend, const D: usize>(primitive: Float<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

/// The backend primitive of a tensor.
pub(crate) fn primitive<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Float<B> {
    tensor.into_primitive().tensor()
}

/// The dtype a reference computes in: f64 stays, everything else becomes f32.
pub(crate) fn compute_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// A primitive as a tensor in the compute dtype, and the primitive's own dtype.
pub(crate) fn upcast<B: Backend, const D: usize>(primitive: Float<B>) -> (Tensor<B, D>, DType) {
    let dtype = primitive.dtype();
    (tensor::<B, D>(primitive).cast(compute_dtype(dtype)), dtype)
}

/// The tensor with its leading dimensions folded, `[rows, last]`, and its own shape.
pub(crate) fn flatten<B: Backend>(primitive: Float<B>) -> (Tensor<B, 2>, Vec<usize>) {
    let shape = primitive.shape().to_vec();
    let last = shape[shape.len() - 1];
    let count = shape.iter().product::<usize>() / last.max(1);
    (tensor(B::float_reshape(primitive, [count, last].into())), shape)
}

/// The inverse of [`flatten`]: `flat`, whose width may differ from the last of `shape`, with its other dimensions.
pub(crate) fn unflatten<B: Backend>(flat: Tensor<B, 2>, mut shape: Vec<usize>) -> Float<B> {
    *shape.last_mut().expect("flatten wants a dimension") = flat.dims()[1];
    B::float_reshape(primitive(flat), shape.into())
}

/// [`flatten`] in the compute dtype; also returns the tensor's own dtype.
pub(crate) fn rows<B: Backend>(primitive: Float<B>) -> (Tensor<B, 2>, DType, Vec<usize>) {
    let dtype = primitive.dtype();
    let (flat, shape) = flatten::<B>(primitive);
    (flat.cast(compute_dtype(dtype)), dtype, shape)
}

/// The inverse of [`rows`]: [`unflatten`] in `dtype`.
pub(crate) fn unrows<B: Backend>(flat: Tensor<B, 2>, dtype: DType, shape: Vec<usize>) -> Float<B> {
    unflatten(flat.cast(dtype), shape)
}

/// Integers of the host as a tensor.
pub(crate) fn ints<B: Backend, const D: usize>(
    values: Vec<i32>,
    dims: [usize; D],
    device: &B::Device,
) -> Tensor<B, D, Int> {
    Tensor::from_data(TensorData::new(values, dims), device)
}

/// `[q, k, v]` of a packed tensor, `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`.
pub fn split_heads<B: Backend>(qkv: Tensor<B, 4>, num_kv_heads: usize) -> [Tensor<B, 4>; 3] {
    let [_, _, heads, _] = qkv.dims();
    let num_heads = heads - 2 * num_kv_heads;
    [
        qkv.clone().narrow(2, 0, num_heads),
        qkv.clone().narrow(2, num_heads, num_kv_heads),
        qkv.narrow(2, num_heads + num_kv_heads, num_kv_heads),
    ]
}
