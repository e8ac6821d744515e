//! Products with weights, through cuBLASLt.
use burn::tensor::DType;
use sieve_kernels::{CudaPrimitive, CudaTensor, KernelError, MatmulOutput, Product, matmul};

pub(super) fn forward(
    x: &CudaPrimitive,
    weight: &CudaPrimitive,
) -> Result<CudaPrimitive, KernelError> {
    let (x, weight) = (
        CudaTensor::from(x.clone()),
        CudaTensor::from(weight.clone()),
    );
    let y = matmul(Product::Nt, &x, &weight, MatmulOutput::New(DType::BF16))?;
    Ok(y.into())
}

/// The residual is added before the product is rounded.
pub(super) fn forward_add(
    x: &CudaPrimitive,
    weight: &CudaPrimitive,
    residual: &CudaPrimitive,
) -> Result<CudaPrimitive, KernelError> {
    let [x, weight, residual] =
        [x, weight, residual].map(|tensor| CudaTensor::from(tensor.clone()));
    let y = matmul(Product::Nt, &x, &weight, MatmulOutput::Plus(&residual))?;
    Ok(y.into())
}

/// `(dx, dweight)`; dweight is f32, as the optimizer's masters are.
pub(super) fn backward(
    x: &CudaPrimitive,
    weight: &CudaPrimitive,
    dy: &CudaPrimitive,
) -> Result<(CudaPrimitive, CudaPrimitive), KernelError> {
    let [x, weight, dy] = [x, weight, dy].map(|tensor| CudaTensor::from(tensor.clone()));
    let dx = matmul(Product::Nn, &dy, &weight, MatmulOutput::New(DType::BF16))?;
    let dweight = matmul(Product::Tn, &dy, &x, MatmulOutput::New(DType::F32))?;
    Ok((dx.into(), dweight.into()))
}
