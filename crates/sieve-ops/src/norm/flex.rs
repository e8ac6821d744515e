//! RMSNorm on the CPU.
use super::backend::{NormBackend, NormGradients, RmsNormCall};
use super::reference::{self, plus};
use crate::device::flex::{contiguous, floats, from_vec, is_f32, plain, zeros_like};
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};

impl NormBackend for Flex {
    fn rms_norm(call: RmsNormCall<Self>) -> FlexTensor {
        if !is_f32(&call.x) {
            return plain("rms_norm", || reference::rms_norm(call));
        }
        let [x, weight] = [call.x, call.weight].map(contiguous);
        let mut y = zeros_like(&x);
        sieve_cpu::rms_norm_forward(floats(&x), floats(&weight), call.epsilon as f32, &mut y);
        from_vec(y, x.shape())
    }
}

impl NormGradients for Flex {
    fn rms_norm_backward(
        call: RmsNormCall<Self>,
        dy: FlexTensor,
        d_residual: Option<FlexTensor>,
    ) -> (FlexTensor, FlexTensor) {
        if !is_f32(&call.x) {
            let (dx, dweight) = plain("rms_norm_backward", || reference::rms_norm_backward(call, dy));
            return (plus::<Self>(dx, d_residual), dweight);
        }
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
        let dx = plus::<Self>(from_vec(dx, x.shape()), d_residual);
        (dx, from_vec(dweight, weight.shape()))
    }

    fn rms_norm_backward_with_output(
        call: RmsNormCall<Self>,
        dy: FlexTensor,
        d_residual: FlexTensor,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        let y = Self::rms_norm(call.clone());
        let (dx, dweight) = Self::rms_norm_backward(call, dy, Some(d_residual));
        (dx, dweight, y)
    }
}
