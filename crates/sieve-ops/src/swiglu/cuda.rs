//! SwiGLU on CUDA.
use super::backend::{SwigluBackend, SwigluGradients};
use super::reference;
use crate::device::cuda::{Cuda, tensors};
use crate::device::paths::kernel_or;
use sieve_kernels::{CudaPrimitive as Float, CudaTensor, Reuse};

impl SwigluBackend for Cuda {
    fn swiglu(gate_up: Float) -> Float {
        let attempt = sieve_kernels::swiglu_forward(&CudaTensor::from(gate_up.clone()));
        kernel_or("swiglu", attempt.map(Into::into), || {
            reference::swiglu::<Self>(gate_up)
        })
    }
}

impl SwigluGradients for Cuda {
    fn swiglu_backward(gate_up: Float, dy: Float) -> Float {
        let [x, d] = tensors([&gate_up, &dy]);
        let attempt = sieve_kernels::swiglu_backward(&x, &d);
        kernel_or("swiglu_backward", attempt.map(Into::into), || {
            reference::swiglu_backward::<Self>(gate_up, dy)
        })
    }

    fn swiglu_backward_with_output(gate_up: Float, dy: Float) -> (Float, Float) {
        let is_free = gate_up.can_mut() && dy.can_mut();
        let [x, d] = tensors([&gate_up, &dy]);
        let reuse = if is_free && x.is_contiguous() && d.is_contiguous() {
            Reuse::InPlace
        } else {
            Reuse::Copy
        };
        let attempt = sieve_kernels::swiglu_backward_with_output(&x, &d, reuse);
        let attempt = attempt.map(|(dx, y)| (dx.into(), y.into()));
        kernel_or("swiglu_backward", attempt, || {
            let y = reference::swiglu::<Self>(gate_up.clone());
            (reference::swiglu_backward::<Self>(gate_up, dy), y)
        })
    }
}
