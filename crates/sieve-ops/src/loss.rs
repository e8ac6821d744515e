//! Output projection and cross-entropy in one op, which never holds the logits of all tokens at once, and its
//! gradients, on every device. Calls that the kernels of `cpu` or `cuda` refuse run `reference`.
use crate::device::{contiguous, flex, floats, from_vec, ints, is_f32, last_dim, plain, unless_f32, zeros_like};
use crate::tensors::{Float, Ints, primitive, rows, tensor, unrows, upcast};
use crate::{DeviceBackend, SieveBackend};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Int, Tensor, TensorMetadata};
use burn_flex::{Flex, FlexTensor};

/// Label of a token that the loss leaves out.
pub const IGNORE_LABEL: i32 = -100;

/// Summed cross-entropy in nats, `[1]`: `sum over labelled tokens of lse(h Wᵀ) - (h Wᵀ)[label]`.
///
/// # Shapes
/// - h: `[tokens, d_model]`
/// - weight: `[vocab_size, d_model]`
/// - labels: `[tokens]`, ids or [`IGNORE_LABEL`]
pub fn linear_cross_entropy<B: SieveBackend>(
    h: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    labels: Tensor<B, 1, Int>,
) -> Tensor<B, 1> {
    let (h, weight, labels) = (primitive(h), primitive(weight), labels.into_primitive());
    let (states, table) = (B::value(h.clone()), B::value(weight.clone()));
    if !B::is_tracked(&h) && !B::is_tracked(&weight) {
        return tensor(B::constant(B::Inner::linear_cross_entropy(states, table, labels)));
    }
    let [loss, dh, dweight] = B::Inner::linear_cross_entropy_with_gradients(states, table, labels);
    // The forward pass has computed the gradients; the backward pass multiplies them by the loss's gradient.
    tensor(B::node([&h, &weight], loss, move |dy| [dh, dweight].map(|gradient| B::Inner::scale(gradient, dy.clone()))))
}

/// Cross-entropy of every token in nats, `[tokens]`; 0 where the label is [`IGNORE_LABEL`]. Without gradient. The
/// inputs have the shapes of [`linear_cross_entropy`]'s.
pub fn token_losses<B: SieveBackend>(h: Tensor<B, 2>, weight: Tensor<B, 2>, labels: Tensor<B, 1, Int>) -> Tensor<B, 1> {
    let (h, weight) = (B::value(primitive(h)), B::value(primitive(weight)));
    let losses = B::Inner::token_losses(h, weight, labels.into_primitive());
    tensor(B::constant(losses))
}

pub(crate) mod reference {
    //! Projection and cross-entropy in plain Burn operations, with all logits at once.
    use super::*;

    /// The loss of a label of each row of logits, `[rows]`.
    pub(crate) fn losses_of_logits<B: Backend>(logits: Float<B>, labels: Ints<B>) -> Float<B> {
        let (logits, _) = upcast::<B, 2>(logits);
        let labels: Tensor<B, 1, Int> = Tensor::from_primitive(labels);
        let picked = logits.clone().gather(1, labels.unsqueeze_dim(1));
        primitive((lse(&logits) - picked).squeeze_dim::<1>(1))
    }

    /// The log-sum-exp of each row, `[rows, 1]`.
    fn lse<B: Backend>(logits: &Tensor<B, 2>) -> Tensor<B, 2> {
        let largest = logits.clone().max_dim(1);
        (logits.clone() - largest.clone()).exp().sum_dim(1).log() + largest
    }

    struct Logits<B: Backend> {
        h: Tensor<B, 2>,
        weight: Tensor<B, 2>,
        /// Logits, `[tokens, vocab_size]`.
        logits: Tensor<B, 2>,
        /// Log-sum-exp of each token's logits, `[tokens, 1]`.
        lse: Tensor<B, 2>,
        /// Whether a token has no label, `[tokens, 1]`.
        ignored: Tensor<B, 2, Bool>,
        /// Labels, 0 where ignored, `[tokens, 1]`.
        target: Tensor<B, 2, Int>,
    }

    /// The logits, and what the loss and its gradients need besides.
    fn logits<B: Backend>(h: Float<B>, weight: Float<B>, labels: Ints<B>) -> Logits<B> {
        let (h, _) = upcast::<B, 2>(h);
        let (weight, _) = upcast::<B, 2>(weight);
        let labels: Tensor<B, 1, Int> = Tensor::from_primitive(labels);
        let labels: Tensor<B, 2, Int> = labels.unsqueeze_dim(1);
        let logits = h.clone().matmul(weight.clone().transpose());
        let lse = lse(&logits);
        let ignored = labels.clone().lower_elem(0);
        let target = labels.mask_fill(ignored.clone(), 0);
        Logits { h, weight, logits, lse, ignored, target }
    }

    fn losses<B: Backend>(all: &Logits<B>) -> Tensor<B, 2> {
        let picked = all.logits.clone().gather(1, all.target.clone());
        let losses = all.lse.clone() - picked;
        losses.mask_fill(all.ignored.clone(), 0.0)
    }

    /// `lse - logit[label]` of each token; zero where ignored.
    pub fn token_losses<B: Backend>(h: Float<B>, weight: Float<B>, labels: Ints<B>) -> Float<B> {
        primitive(losses(&logits::<B>(h, weight, labels)).squeeze_dim::<1>(1))
    }

    /// The sum of all tokens' cross-entropies, `[1]`.
    pub fn linear_cross_entropy<B: Backend>(h: Float<B>, weight: Float<B>, labels: Ints<B>) -> Float<B> {
        primitive(losses(&logits::<B>(h, weight, labels)).sum())
    }

    /// `dlogits = softmax - onehot`, then `dh = dlogits W`, `dW = dlogitsᵀ h`.
    pub fn linear_cross_entropy_with_gradients<B: Backend>(
        h: Float<B>,
        weight: Float<B>,
        labels: Ints<B>,
    ) -> [Float<B>; 3] {
        let dtypes = [&h, &weight].map(TensorMetadata::dtype);
        let all = logits::<B>(h, weight, labels);
        let loss = losses(&all).sum();
        let [tokens, vocab] = all.logits.dims();
        let classes = Tensor::<B, 1, Int>::arange(0..vocab as i64, &all.logits.device());
        let onehot =
            all.target.clone().expand([tokens, vocab]).equal(classes.reshape([1, vocab]).expand([tokens, vocab]));
        let d_logits = (all.logits.clone() - all.lse.clone()).exp();
        let at_the_label = d_logits.clone() - 1.0;
        let d_logits = d_logits.mask_where(onehot, at_the_label).mask_fill(all.ignored.expand([tokens, vocab]), 0.0);
        let dh = d_logits.clone().matmul(all.weight);
        let dweight = d_logits.transpose().matmul(all.h);
        [primitive(loss), primitive(dh.cast(dtypes[0])), primitive(dweight.cast(dtypes[1]))]
    }

    /// `x * factor` in the dtype of x; `factor` is `[1]`.
    pub fn scale<B: Backend>(x: Float<B>, factor: Float<B>) -> Float<B> {
        let (x, dtype, shape) = rows::<B>(x);
        let factor = tensor::<B, 1>(factor).cast(x.dtype());
        unrows(x * factor.unsqueeze(), dtype, shape)
    }
}

pub(crate) mod cpu {
    //! Projection and cross-entropy on the CPU: methods of `DeviceBackend`.
    use super::*;

    /// Losses in nats, f32 `[tokens]`, 0 where a label is negative; the weight may be f32 or bf16.
    pub(crate) fn token_losses(h: FlexTensor, weight: FlexTensor, labels: FlexTensor) -> FlexTensor {
        unless_f32!(&h, "token_losses": reference::token_losses::<Flex>(h, weight, labels));
        let [h, weight, labels] = [h, weight, labels].map(contiguous);
        let mut losses = vec![0.0; labels.shape().num_elements()];
        let d_model = last_dim(&h);
        sieve_cpu::token_losses(floats(&h), flex::weight(&weight), ints(&labels), d_model, &mut losses);
        let count = losses.len();
        from_vec(losses, [count])
    }

    pub(crate) fn linear_cross_entropy(h: FlexTensor, weight: FlexTensor, labels: FlexTensor) -> FlexTensor {
        unless_f32!(&h, "linear_cross_entropy": reference::linear_cross_entropy::<Flex>(h, weight, labels));
        let [h, weight, labels] = [h, weight, labels].map(contiguous);
        let d_model = last_dim(&h);
        let loss = sieve_cpu::linear_cross_entropy(floats(&h), flex::weight(&weight), ints(&labels), d_model);
        from_vec(vec![loss.loss_sum as f32], [1])
    }

    /// `[loss, dh, dweight]` of the summed loss, all f32; here the weight must be f32 as h is.
    pub(crate) fn linear_cross_entropy_with_gradients(
        h: FlexTensor,
        weight: FlexTensor,
        labels: FlexTensor,
    ) -> [FlexTensor; 3] {
        unless_f32!(&h, "linear_cross_entropy_with_gradients":
            reference::linear_cross_entropy_with_gradients::<Flex>(h, weight, labels));
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
        let loss = from_vec(vec![loss.loss_sum as f32], [1]);
        [loss, from_vec(dh, h.shape()), from_vec(dweight, weight.shape())]
    }

    /// `x` times the one number of `factor`, in place if nothing else holds x.
    pub(crate) fn scale(x: FlexTensor, factor: FlexTensor) -> FlexTensor {
        if !is_f32(&x) || !is_f32(&factor) {
            return plain("scale", || reference::scale::<Flex>(x, factor));
        }
        let factor = floats(&contiguous(factor))[0];
        let mut x = contiguous(x);
        // The factor is the loss's gradient, most often 1.
        if factor != 1.0 {
            x.storage_mut::<f32>().iter_mut().for_each(|x| *x *= factor);
        }
        x
    }
}

#[cfg(feature = "cuda")]
pub(crate) mod cuda {
    //! Projection and cross-entropy on CUDA. The kernels compute the logits of a block of tokens at a time.
    use super::*;
    use crate::Cuda;
    use crate::device::{CudaPrimitive, cast, kernel_on, kernel_or, tensors, writable};
    use burn::tensor::DType;
    use sieve_kernels::step::{FixedSum, Term};
    use sieve_kernels::{KernelError, ToBurn};

    pub(crate) fn token_losses(h: CudaPrimitive, weight: CudaPrimitive, labels: CudaPrimitive) -> CudaPrimitive {
        let [states, table, ids] = tensors([&h, &weight, &labels]);
        let attempt = sieve_kernels::token_losses(&states, &table, &ids);
        kernel_or("token_losses", attempt.map(ToBurn::burn), || reference::token_losses::<Cuda>(h, weight, labels))
    }

    /// The loss in nats, summed over all tokens in a fixed order, f32 `[1]`.
    pub(crate) fn linear_cross_entropy(
        h: CudaPrimitive,
        weight: CudaPrimitive,
        labels: CudaPrimitive,
    ) -> CudaPrimitive {
        let attempt = summed([&h, &weight, &labels]);
        kernel_or("linear_cross_entropy", attempt, || reference::linear_cross_entropy::<Cuda>(h, weight, labels))
    }

    /// The loss, dh and dweight; dweight is f32.
    pub(crate) fn linear_cross_entropy_with_gradients(
        h: CudaPrimitive,
        weight: CudaPrimitive,
        labels: CudaPrimitive,
    ) -> [CudaPrimitive; 3] {
        let [states, table, ids] = tensors([&h, &weight, &labels]);
        let attempt = sieve_kernels::linear_cross_entropy_with_gradients(&states, &table, &ids);
        let attempt = attempt.map(|all| [all.loss, all.dh, all.dweight].map(ToBurn::burn));
        kernel_or("linear_cross_entropy_with_gradients", attempt, || {
            reference::linear_cross_entropy_with_gradients::<Cuda>(h, weight, labels)
        })
    }

    /// `x * factor`, in place if x has no other owner.
    pub(crate) fn scale(x: CudaPrimitive, factor: CudaPrimitive) -> CudaPrimitive {
        let x = writable(x);
        let outcome = sieve_kernels::step::scale(&x, &cast(&factor, DType::F32));
        kernel_on("scale", x.burn(), outcome, |x| reference::scale::<Cuda>(x, factor))
    }

    /// The cross-entropy summed over all tokens, `[1]`.
    fn summed(operands: [&CudaPrimitive; 3]) -> Result<CudaPrimitive, KernelError> {
        let [h, weight, labels] = tensors(operands);
        let losses = sieve_kernels::token_losses(&h, &weight, &labels)?;
        FixedSum::of(&losses, Term::Value).map(ToBurn::burn)
    }
}

#[cfg(test)]
mod tests;
