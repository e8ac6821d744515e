//! RMSNorm (arXiv:1910.07467, eq. 4) and its gradient on every device. Calls that the kernels refuse run `reference`.
mod call;

pub use call::RmsNormCall;

use crate::device::{contiguous, floats, from_vec, unless_f32, zeros_like};
use crate::linear::added;
use crate::tensors::{Float, primitive, rows, tensor, unrows};
use crate::{DeviceBackend, SieveBackend};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorMetadata};
use burn_flex::{Flex, FlexTensor};

/// `y = x / sqrt(mean(x²) + epsilon) * weight`, with the mean over the last dimension, in f32.
///
/// # Shapes
/// - x: `[.., d_model]`
/// - weight: `[d_model]`
/// - returns: shape of x
pub fn rms_norm<B: SieveBackend, const D: usize>(x: Tensor<B, D>, weight: Tensor<B, 1>, epsilon: f64) -> Tensor<B, D> {
    let (x, weight) = (primitive(x), primitive(weight));
    let call = RmsNormCall { x: B::value(x.clone()), weight: B::value(weight.clone()), epsilon };
    let y = B::Inner::rms_norm(call.clone());
    tensor(B::node([&x, &weight], y, |dy| {
        let d_residual = None;
        B::Inner::rms_norm_backward(call, dy, d_residual)
    }))
}

pub(crate) mod reference {
    //! RMSNorm in plain Burn operations.
    use super::*;

    /// `x / sqrt(mean(x²) + epsilon) * weight` over the last dimension.
    pub fn rms_norm<B: Backend>(call: RmsNormCall<B>) -> Float<B> {
        let (x, dtype, shape) = rows::<B>(call.x);
        let weight = tensor::<B, 1>(call.weight).cast(x.dtype());
        unrows(normalise(x, call.epsilon).0 * weight.unsqueeze(), dtype, shape)
    }

    /// `[dx, dweight]`. With `r = 1/sqrt(mean(x²) + epsilon)`, `n = x r`, `g = dy * weight`:
    /// `dx = r (g - n mean(g n))`, `dweight = sum(dy n)`.
    pub fn rms_norm_backward<B: Backend>(call: RmsNormCall<B>, dy: Float<B>) -> [Float<B>; 2] {
        let (x, dtype, shape) = rows::<B>(call.x);
        let (dy, _, _) = rows::<B>(dy);
        let weight_dtype = call.weight.dtype();
        let weight = tensor::<B, 1>(call.weight).cast(x.dtype());
        let (dx, dweight) = normalise_backward(x, weight, call.epsilon, dy);
        [unrows(dx, dtype, shape), primitive(dweight.cast(weight_dtype))]
    }

    /// The norm of each head of `x [batch, seq_len, heads, head_dim]`; and `1/sqrt(mean(x²) + epsilon)`,
    /// `[batch * seq_len * heads, 1]`.
    pub(crate) fn norm_heads<B: Backend>(
        x: Tensor<B, 4>,
        weight: Float<B>,
        epsilon: f64,
    ) -> (Tensor<B, 4>, Tensor<B, 2>) {
        let shape @ [batch, seq_len, heads, head_dim] = x.dims();
        let weight = tensor::<B, 1>(weight).cast(x.dtype());
        let (n, r) = normalise(x.reshape([batch * seq_len * heads, head_dim]), epsilon);
        ((n * weight.unsqueeze()).reshape(shape), r)
    }

    /// Gradients `(dx, dweight)` of [`norm_heads`].
    pub(crate) fn norm_heads_backward<B: Backend>(
        x: Tensor<B, 4>,
        weight: Float<B>,
        epsilon: f64,
        dy: Tensor<B, 4>,
    ) -> (Tensor<B, 4>, Float<B>) {
        let shape @ [batch, seq_len, heads, head_dim] = x.dims();
        let rows = [batch * seq_len * heads, head_dim];
        let weight_dtype = weight.dtype();
        let weight = tensor::<B, 1>(weight).cast(x.dtype());
        let (dx, dweight) = normalise_backward(x.reshape(rows), weight, epsilon, dy.reshape(rows));
        (dx.reshape(shape), primitive(dweight.cast(weight_dtype)))
    }

    /// `(x r, r)` of rows x, with `r = 1/sqrt(mean(x²) + epsilon)`.
    fn normalise<B: Backend>(x: Tensor<B, 2>, epsilon: f64) -> (Tensor<B, 2>, Tensor<B, 2>) {
        let r = (x.clone().powi_scalar(2).mean_dim(1) + epsilon).sqrt().recip();
        (x * r.clone(), r)
    }

    /// Gradients `(dx, dweight)` of the norm of rows x.
    fn normalise_backward<B: Backend>(
        x: Tensor<B, 2>,
        weight: Tensor<B, 1>,
        epsilon: f64,
        dy: Tensor<B, 2>,
    ) -> (Tensor<B, 2>, Tensor<B, 1>) {
        let (n, r) = normalise(x, epsilon);
        let g = dy.clone() * weight.unsqueeze();
        let dx = r * (g.clone() - n.clone() * (g * n.clone()).mean_dim(1));
        (dx, (dy * n).sum_dim(0).squeeze_dim(0))
    }
}

pub(crate) mod cpu {
    //! RMSNorm on the CPU: methods of `DeviceBackend`.
    use super::*;

    pub(crate) fn rms_norm(call: RmsNormCall<Flex>) -> FlexTensor {
        unless_f32!(&call.x, "rms_norm": reference::rms_norm(call));
        let [x, weight] = [call.x, call.weight].map(contiguous);
        let mut y = zeros_like(&x);
        sieve_cpu::rms_norm_forward(floats(&x), floats(&weight), call.epsilon as f32, &mut y);
        from_vec(y, x.shape())
    }

    /// `[dx, dweight]`, dx plus the gradient `d_residual` of the residual connection around the norm, if there is one.
    pub(crate) fn rms_norm_backward(
        call: RmsNormCall<Flex>,
        dy: FlexTensor,
        d_residual: Option<FlexTensor>,
    ) -> [FlexTensor; 2] {
        unless_f32!(&call.x, "rms_norm_backward": {
            let [dx, dweight] = reference::rms_norm_backward(call, dy);
            [added::<Flex>(d_residual, dx), dweight]
        });
        let [x, weight, dy] = [call.x, call.weight, dy].map(contiguous);
        let (mut dx, mut dweight) = (zeros_like(&x), zeros_like(&weight));
        sieve_cpu::rms_norm_backward(
            floats(&x),
            floats(&weight),
            call.epsilon as f32,
            floats(&dy),
            &mut dx,
            &mut dweight,
        );
        let dx = added::<Flex>(d_residual, from_vec(dx, x.shape()));
        [dx, from_vec(dweight, weight.shape())]
    }

    /// `[dx, dweight, y]`, by two passes: y is what [`rms_norm`] returns.
    pub(crate) fn rms_norm_backward_with_output(
        call: RmsNormCall<Flex>,
        dy: FlexTensor,
        d_residual: FlexTensor,
    ) -> [FlexTensor; 3] {
        let y = rms_norm(call.clone());
        let [dx, dweight] = rms_norm_backward(call, dy, Some(d_residual));
        [dx, dweight, y]
    }
}

#[cfg(feature = "cuda")]
pub(crate) mod cuda {
    //! RMSNorm on CUDA. The gradient of the weight is f32.
    use super::*;
    use crate::Cuda;
    use crate::device::{CudaPrimitive, kernel_or, tensors};
    use sieve_kernels::{ToBurn, kernel_tensor};

    pub(crate) fn rms_norm(call: RmsNormCall<Cuda>) -> CudaPrimitive {
        let [x, weight] = tensors([&call.x, &call.weight]);
        let attempt = sieve_kernels::step::rms_norm_forward(&x, &weight, call.epsilon as f32);
        kernel_or("rms_norm", attempt.map(ToBurn::burn), || reference::rms_norm(call))
    }

    /// `[dx, dweight]`; the kernel itself adds `d_residual`, the gradient of the residual connection around the norm,
    /// to dx.
    pub(crate) fn rms_norm_backward(
        call: RmsNormCall<Cuda>,
        dy: CudaPrimitive,
        d_residual: Option<CudaPrimitive>,
    ) -> [CudaPrimitive; 2] {
        let [x, weight, d] = tensors([&call.x, &call.weight, &dy]);
        let epsilon = call.epsilon as f32;
        let residual = d_residual.clone().map(kernel_tensor);
        let attempt = sieve_kernels::step::rms_norm_backward(&x, &weight, epsilon, &d, residual.as_ref());
        let attempt = attempt.map(|(dx, dweight)| [dx, dweight].map(ToBurn::burn));
        kernel_or("rms_norm_backward", attempt, || {
            let [dx, dweight] = reference::rms_norm_backward(call, dy);
            [added::<Cuda>(d_residual, dx), dweight]
        })
    }

    /// `[dx, dweight, y]` in one pass of a kernel, y being the norm's output.
    pub(crate) fn rms_norm_backward_with_output(
        call: RmsNormCall<Cuda>,
        dy: CudaPrimitive,
        d_residual: CudaPrimitive,
    ) -> [CudaPrimitive; 3] {
        let [x, weight, d, residual] = tensors([&call.x, &call.weight, &dy, &d_residual]);
        let epsilon = call.epsilon as f32;
        let attempt = sieve_kernels::step::rms_norm_backward_with_output(&x, &weight, epsilon, &d, &residual);
        let attempt = attempt.map(|(dx, dweight, y)| [dx, dweight, y].map(ToBurn::burn));
        kernel_or("rms_norm_backward", attempt, || {
            let y = reference::rms_norm(call.clone());
            let [dx, dweight] = reference::rms_norm_backward(call, dy);
            [added::<Cuda>(Some(d_residual), dx), dweight, y]
        })
    }
}

#[cfg(test)]
mod tests;
