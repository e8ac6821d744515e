//! SwiGLU (arXiv:2002.05202) and its gradient on every device. Calls that the kernels refuse run `reference`.
use crate::device::{contiguous, floats, from_vec, last_dim, unless_f32, with_columns, zeros_like};
use crate::tensors::{Float, primitive, rows, tensor, unrows};
use crate::{DeviceBackend, SieveBackend};
use burn::tensor::activation::sigmoid;
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorMetadata};
use burn_flex::{Flex, FlexTensor};

/// `silu(gate) * up` of a packed tensor, gate first.
///
/// # Shapes
/// - gate_up: `[.., 2 * d_ff]`
/// - returns: `[.., d_ff]`
pub fn swiglu<B: SieveBackend, const D: usize>(gate_up: Tensor<B, D>) -> Tensor<B, D> {
    let gate_up = primitive(gate_up);
    let x = B::value(gate_up.clone());
    let y = B::Inner::swiglu(x.clone());
    tensor(B::node([&gate_up], y, |dy| [B::Inner::swiglu_backward(x, dy)]))
}

/// `silu(gate) * up` and its gradient in plain Burn operations.
pub(crate) mod reference {
    use super::*;

    /// `gate_up [.., 2 * d_ff]`, gate first; returns `[.., d_ff]`.
    pub fn swiglu<B: Backend>(gate_up: Float<B>) -> Float<B> {
        let (gate_up, dtype, shape) = rows::<B>(gate_up);
        let [gate, up] = halves(gate_up);
        unrows(gate.clone() * sigmoid(gate) * up, dtype, shape)
    }

    /// With `s = sigmoid(gate)`: `dgate = dy * up * s * (1 + gate * (1 - s))`, `dup = dy * gate * s`.
    pub fn swiglu_backward<B: Backend>(gate_up: Float<B>, dy: Float<B>) -> Float<B> {
        let (gate_up, dtype, shape) = rows::<B>(gate_up);
        let (dy, _, _) = rows::<B>(dy);
        let [gate, up] = halves(gate_up);
        let s = sigmoid(gate.clone());
        let slope = s.clone() * (gate.clone() * (-s.clone() + 1.0) + 1.0);
        let d_gate = dy.clone() * up * slope;
        let d_up = dy * gate * s;
        unrows(Tensor::cat(vec![d_gate, d_up], 1), dtype, shape)
    }

    /// The columns of gate and of up.
    fn halves<B: Backend>(gate_up: Tensor<B, 2>) -> [Tensor<B, 2>; 2] {
        let [rows, width] = gate_up.dims();
        let d_ff = width / 2;
        [gate_up.clone().slice([0..rows, 0..d_ff]), gate_up.slice([0..rows, d_ff..width])]
    }
}

pub(crate) mod cpu {
    //! SwiGLU on the CPU: methods of `DeviceBackend`.
    use super::*;

    /// `gate_up` is `[.., 2 * d_ff]`, gate first; returns `[.., d_ff]`.
    pub(crate) fn swiglu(gate_up: FlexTensor) -> FlexTensor {
        unless_f32!(&gate_up, "swiglu": reference::swiglu::<Flex>(gate_up));
        let gate_up = contiguous(gate_up);
        let d_ff = last_dim(&gate_up) / 2;
        let mut y = sieve_cpu::zeros(gate_up.shape().num_elements() / 2);
        sieve_cpu::activation::swiglu_forward(floats(&gate_up), d_ff, &mut y);
        with_columns(&gate_up, d_ff, y)
    }

    /// The gradient of `gate_up`, in its layout, from that of the output, `[.., d_ff]`.
    pub(crate) fn swiglu_backward(gate_up: FlexTensor, dy: FlexTensor) -> FlexTensor {
        unless_f32!(&gate_up, "swiglu_backward": reference::swiglu_backward::<Flex>(gate_up, dy));
        let (gate_up, dy) = (contiguous(gate_up), contiguous(dy));
        let mut d_gate_up = zeros_like(&gate_up);
        let d_ff = last_dim(&gate_up) / 2;
        sieve_cpu::activation::swiglu_backward(floats(&gate_up), d_ff, floats(&dy), &mut d_gate_up);
        from_vec(d_gate_up, gate_up.shape())
    }

    pub(crate) fn swiglu_backward_with_output(gate_up: FlexTensor, dy: FlexTensor) -> [FlexTensor; 2] {
        let y = swiglu(gate_up.clone());
        [swiglu_backward(gate_up, dy), y]
    }
}

#[cfg(feature = "cuda")]
pub(crate) mod cuda {
    //! SwiGLU on CUDA: methods of `DeviceBackend`.
    use super::*;
    use crate::Cuda;
    use crate::device::{CudaPrimitive, kernel_or, tensors};
    use sieve_kernels::step::Reuse;
    use sieve_kernels::{ToBurn, kernel_tensor};

    pub(crate) fn swiglu(gate_up: CudaPrimitive) -> CudaPrimitive {
        let attempt = sieve_kernels::step::swiglu_forward(&kernel_tensor(gate_up.clone()));
        kernel_or("swiglu", attempt.map(ToBurn::burn), || reference::swiglu::<Cuda>(gate_up))
    }

    pub(crate) fn swiglu_backward(gate_up: CudaPrimitive, dy: CudaPrimitive) -> CudaPrimitive {
        let is_free = gate_up.can_mut();
        let [x, d] = tensors([&gate_up, &dy]);
        let attempt = sieve_kernels::step::swiglu_backward(&x, &d, reuse(is_free && x.is_contiguous()));
        kernel_or("swiglu_backward", attempt.map(ToBurn::burn), || reference::swiglu_backward::<Cuda>(gate_up, dy))
    }

    /// `[dgate_up, y]` by one kernel, which overwrites both inputs if nothing else reads them.
    pub(crate) fn swiglu_backward_with_output(gate_up: CudaPrimitive, dy: CudaPrimitive) -> [CudaPrimitive; 2] {
        let is_free = gate_up.can_mut() && dy.can_mut();
        let [x, d] = tensors([&gate_up, &dy]);
        let reuse = reuse(is_free && x.is_contiguous() && d.is_contiguous());
        let attempt = sieve_kernels::step::swiglu_backward_with_output(&x, &d, reuse);
        let attempt = attempt.map(|(dx, y)| [dx, y].map(ToBurn::burn));
        kernel_or("swiglu_backward", attempt, || {
            let y = reference::swiglu::<Cuda>(gate_up.clone());
            [reference::swiglu_backward::<Cuda>(gate_up, dy), y]
        })
    }

    /// Whether a kernel may overwrite its inputs: only if nothing else reads them.
    pub(crate) fn reuse(is_free: bool) -> Reuse {
        if is_free { Reuse::InPlace } else { Reuse::Copy }
    }
}

#[cfg(test)]
mod tests {
    use super::swiglu;
    use crate::reference;
    use crate::testing::{Ad, Float, Random, RandomInput, check_op, check_parity, float, primitive};

    fn op(inputs: &[Float]) -> Float {
        primitive(swiglu(float::<3>(&inputs[0])))
    }

    fn reference_op(inputs: &[Float]) -> Float {
        reference::swiglu::<Ad>(inputs[0].clone())
    }

    #[test]
    fn equals_the_reference_and_finite_differences_for_any_sizes() {
        let inputs = |[batch, seq_len, d_ff]: [usize; 3]| [Random(1).input(&[batch, seq_len, 2 * d_ff])];
        let all = [[2, 63, 20], [1, 1, 1], [3, 2, 33]].map(inputs);
        check_op("swiglu", all, &inputs([2, 3, 3]), &op, &reference_op);
    }

    #[test]
    fn large_gates_saturate() {
        let inputs = [Random(2).input(&[2, 3, 8]).affine(60.0, 0.0)];
        check_parity("swiglu", &inputs, &op, &reference_op);
    }
}
