//! SwiGLU on the CPU.
use super::backend::{SwigluBackend, SwigluGradients};
use super::reference;
use crate::device::flex::{contiguous, floats, from_vec, is_f32, last_dim, plain, zeros_like};
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};

impl SwigluBackend for Flex {
    fn swiglu(gate_up: FlexTensor) -> FlexTensor {
        if !is_f32(&gate_up) {
            return plain("swiglu", || reference::swiglu::<Self>(gate_up));
        }
        let gate_up = contiguous(gate_up);
        let mut shape = gate_up.shape().to_vec();
        let d_ff = last_dim(&gate_up) / 2;
        let last = shape.len() - 1;
        shape[last] = d_ff;
        let mut y = vec![0.0; shape.iter().product()];
        sieve_cpu::swiglu_forward(floats(&gate_up), d_ff, &mut y);
        from_vec(y, shape)
    }
}

impl SwigluGradients for Flex {
    fn swiglu_backward(gate_up: FlexTensor, dy: FlexTensor) -> FlexTensor {
        if !is_f32(&gate_up) {
            return plain("swiglu_backward", || {
                reference::swiglu_backward::<Self>(gate_up, dy)
            });
        }
        let (gate_up, dy) = (contiguous(gate_up), contiguous(dy));
        let mut d_gate_up = zeros_like(&gate_up);
        let d_ff = last_dim(&gate_up) / 2;
        sieve_cpu::swiglu_backward(floats(&gate_up), d_ff, floats(&dy), &mut d_gate_up);
        from_vec(d_gate_up, gate_up.shape())
    }

    fn swiglu_backward_with_output(
        gate_up: FlexTensor,
        dy: FlexTensor,
    ) -> (FlexTensor, FlexTensor) {
        let y = Self::swiglu(gate_up.clone());
        (Self::swiglu_backward(gate_up, dy), y)
    }
}
