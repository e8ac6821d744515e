//! RMSNorm on CUDA. The gradient of the weight is f32.
use super::backend::{NormBackend, NormGradients, RmsNormCall};
use super::reference::{self, plus};
use crate::device::cuda::{Cuda, tensors};
use crate::device::paths::kernel_or;
use burn::tensor::ops::FloatTensorOps;
use sieve_kernels::{CudaPrimitive as Float, ToBurn, kernel_tensor};

impl NormBackend for Cuda {
    fn rms_norm(call: RmsNormCall<Self>) -> Float {
        let [x, weight] = tensors([&call.x, &call.weight]);
        let attempt = sieve_kernels::step::rms_norm_forward(&x, &weight, call.epsilon as f32);
        kernel_or("rms_norm", attempt.map(ToBurn::burn), || reference::rms_norm(call))
    }
}

impl NormGradients for Cuda {
    fn rms_norm_backward(call: RmsNormCall<Self>, dy: Float, d_residual: Option<Float>) -> (Float, Float) {
        let [x, weight, d] = tensors([&call.x, &call.weight, &dy]);
        let epsilon = call.epsilon as f32;
        let beside = d_residual.clone().map(kernel_tensor);
        let attempt = sieve_kernels::step::rms_norm_backward(&x, &weight, epsilon, &d, beside.as_ref());
        let attempt = attempt.map(|(dx, dweight)| (dx.burn(), dweight.burn()));
        kernel_or("rms_norm_backward", attempt, || {
            let (dx, dweight) = reference::rms_norm_backward(call, dy);
            (plus::<Self>(dx, d_residual), dweight)
        })
    }

    fn rms_norm_backward_with_output(call: RmsNormCall<Self>, dy: Float, d_residual: Float) -> (Float, Float, Float) {
        let [x, weight, d, residual] = tensors([&call.x, &call.weight, &dy, &d_residual]);
        let epsilon = call.epsilon as f32;
        let attempt = sieve_kernels::step::rms_norm_backward_with_output(&x, &weight, epsilon, &d, &residual);
        let attempt = attempt.map(|(dx, dweight, y)| (dx.burn(), dweight.burn(), y.burn()));
        kernel_or("rms_norm_backward", attempt, || {
            let y = reference::rms_norm(call.clone());
            let (dx, dweight) = reference::rms_norm_backward(call, dy);
            (Self::float_add(dx, d_residual), dweight, y)
        })
    }
}
