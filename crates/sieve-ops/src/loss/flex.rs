//! Projection and cross-entropy on the CPU.
use super::backend::{LossBackend, LossGradients};
use super::reference;
use crate::device::flex::{contiguous, floats, from_vec, ints, is_f32, last_dim, plain, zeros_like};
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};

impl LossBackend for Flex {
    fn token_losses(h: FlexTensor, weight: FlexTensor, labels: FlexTensor) -> FlexTensor {
        if !is_f32(&h) {
            return plain("token_losses", || reference::token_losses::<Self>(h, weight, labels));
        }
        let [h, weight, labels] = [h, weight, labels].map(contiguous);
        let mut losses = vec![0.0; labels.shape().num_elements()];
        let d_model = last_dim(&h);
        sieve_cpu::token_losses(floats(&h), floats(&weight), ints(&labels), d_model, &mut losses);
        let count = losses.len();
        from_vec(losses, [count])
    }

    fn linear_cross_entropy(h: FlexTensor, weight: FlexTensor, labels: FlexTensor) -> FlexTensor {
        if !is_f32(&h) {
            return plain("linear_cross_entropy", || {
                reference::linear_cross_entropy::<Self>(h, weight, labels)
            });
        }
        let [h, weight, labels] = [h, weight, labels].map(contiguous);
        let d_model = last_dim(&h);
        let loss = sieve_cpu::linear_cross_entropy(floats(&h), floats(&weight), ints(&labels), d_model);
        from_vec(vec![loss.loss_sum as f32], [1])
    }
}

impl LossGradients for Flex {
    fn linear_cross_entropy_with_gradients(
        h: FlexTensor,
        weight: FlexTensor,
        labels: FlexTensor,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        if !is_f32(&h) {
            return plain("linear_cross_entropy_with_gradients", || {
                reference::linear_cross_entropy_with_gradients::<Self>(h, weight, labels)
            });
        }
        let [h, weight, labels] = [h, weight, labels].map(contiguous);
        let d_model = last_dim(&h);
        let (mut dh, mut dweight) = (zeros_like(&h), zeros_like(&weight));
        let loss = sieve_cpu::linear_cross_entropy_with_gradients(
            floats(&h),
            floats(&weight),
            ints(&labels),
            d_model,
            &mut dh,
            &mut dweight,
        );
        (
            from_vec(vec![loss.loss_sum as f32], [1]),
            from_vec(dh, h.shape()),
            from_vec(dweight, weight.shape()),
        )
    }

    fn scale(x: FlexTensor, factor: FlexTensor) -> FlexTensor {
        if !is_f32(&x) || !is_f32(&factor) {
            return plain("scale", || reference::scale::<Self>(x, factor));
        }
        let factor = floats(&contiguous(factor))[0];
        let mut x = contiguous(x);
        if factor != 1.0 {
            x.storage_mut::<f32>().iter_mut().for_each(|x| *x *= factor);
        }
        x
    }
}
