//! Products with a weight on CUDA, through cuBLASLt.
use super::backend::{LinearBackend, LinearGradients};
use super::reference;
use crate::device::cuda::{Cuda, tensors};
use crate::device::paths::kernel_or;
use burn::tensor::ops::FloatTensorOps;
use sieve_kernels::DType::{BF16, F32};
use sieve_kernels::step::residual_add;
use sieve_kernels::{
    CudaPrimitive as Float, CudaTensor, KernelError, MatmulOutput, Product, ToBurn, kernel_tensor, matmul,
};

impl LinearBackend for Cuda {
    fn linear(x: Float, weight: Float) -> Float {
        let [a, b] = tensors([&x, &weight]);
        let attempt = matmul(Product::Nt, &a, &b, MatmulOutput::New(BF16));
        kernel_or("linear", attempt.map(ToBurn::burn), || {
            reference::linear::<Self>(x, weight)
        })
    }

    fn linear_add(x: Float, weight: Float, residual: Float) -> Float {
        let attempt = product_and_sum(tensors([&x, &weight, &residual]));
        kernel_or("linear_add", attempt.map(ToBurn::burn), || {
            Self::float_add(residual, reference::linear::<Self>(x, weight))
        })
    }
}

impl LinearGradients for Cuda {
    fn linear_input_gradient(weight: Float, dy: Float) -> Float {
        let [a, b] = tensors([&dy, &weight]);
        let attempt = matmul(Product::Nn, &a, &b, MatmulOutput::New(BF16));
        kernel_or("linear_input_gradient", attempt.map(ToBurn::burn), || {
            reference::linear_input_gradient::<Self>(weight, dy)
        })
    }

    /// In f32, as the optimizer's masters are.
    fn linear_weight_gradient(x: Float, dy: Float, sum: Option<Float>) -> Float {
        let [a, b] = tensors([&dy, &x]);
        let total = sum.clone().map(kernel_tensor);
        let output = total.as_ref().map_or(MatmulOutput::New(F32), MatmulOutput::AddTo);
        let attempt = matmul(Product::Tn, &a, &b, output);
        kernel_or("linear_weight_gradient", attempt.map(ToBurn::burn), || {
            reference::added::<Self>(sum, reference::linear_weight_gradient::<Self>(x, dy))
        })
    }
}

/// The residual is added inside the product where that is free.
fn product_and_sum([x, weight, residual]: [CudaTensor; 3]) -> Result<CudaTensor, KernelError> {
    let [out, inner] = weight.dims("linear_add", "weight")?;
    // Measured on an H200 at 16384 x 2048 x 6144: a product that also reads a residual takes 0.1 ms longer, which is
    // twice what the addition costs; where the product is square it costs nothing.
    if inner > out {
        let y = matmul(Product::Nt, &x, &weight, MatmulOutput::New(BF16))?;
        return residual_add(&residual, &y);
    }
    matmul(Product::Nt, &x, &weight, MatmulOutput::Plus(&residual))
}
