//! Converts host values to tensors of the two backends, and back.
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{DType, Int, Tensor, TensorData, TensorPrimitive};
use burn_flex::Flex;
use sieve_ops::{Cuda, DeviceBackend};

/// A backend with the dtype in which its kernels compute.
pub(crate) trait Computes: DeviceBackend {
    /// The dtype of q, k, v and o.
    const DTYPE: DType;
}

impl Computes for Flex {
    const DTYPE: DType = DType::F32;
}

impl Computes for Cuda {
    const DTYPE: DType = DType::BF16;
}

/// A contiguous tensor of the element type [`Computes::DTYPE`].
pub(crate) fn typed<B: Computes, const D: usize>(
    values: &[f32],
    shape: [usize; D],
    device: &B::Device,
) -> FloatTensor<B> {
    cast::<B, D>(values, shape, B::DTYPE, device)
}

/// A contiguous tensor of the element type `dtype`.
pub(crate) fn cast<B: DeviceBackend, const D: usize>(
    values: &[f32],
    shape: [usize; D],
    dtype: DType,
    device: &B::Device,
) -> FloatTensor<B> {
    let data = TensorData::new(values.to_vec(), shape);
    let x = Tensor::<B, D>::from_data(data, device).cast(dtype);
    x.into_primitive().tensor()
}

/// The tensor of a backend's primitive.
pub(crate) fn wrapped<B: DeviceBackend, const D: usize>(x: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(x))
}

/// The type of what stays f32 beside bf16 tensors: tables, scales. In an f64 reference it is f64.
pub(crate) fn table_type(dtype: DType) -> DType {
    if dtype == DType::F64 { dtype } else { DType::F32 }
}

/// A tensor's values in f32.
pub(crate) fn floats<B: DeviceBackend, const D: usize>(x: FloatTensor<B>) -> Vec<f32> {
    let data = wrapped::<B, D>(x).into_data();
    let values = data.convert::<f32>().to_vec();
    values.expect("data converted to f32 is read as f32")
}

/// The values of an integer tensor.
pub(crate) fn indices<B: DeviceBackend, const D: usize>(x: IntTensor<B>) -> Vec<i32> {
    let data = Tensor::<B, D, Int>::from_primitive(x).into_data();
    let values = data.convert::<i32>().to_vec();
    values.expect("data converted to i32 is read as i32")
}
