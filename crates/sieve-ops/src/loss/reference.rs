//! Projection and cross-entropy with all logits at once.
use crate::tensors::{Float, Ints, primitive, rows, tensor, unrows, upcast};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Int, Tensor};

struct Logits<B: Backend> {
    h: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    logits: Tensor<B, 2>,
    lse: Tensor<B, 2>,
    ignored: Tensor<B, 2, Bool>,
    target: Tensor<B, 2, Int>,
}

fn logits<B: Backend>(h: Float<B>, weight: Float<B>, labels: Ints<B>) -> Logits<B> {
    let (h, _) = upcast::<B, 2>(h);
    let (weight, _) = upcast::<B, 2>(weight);
    let labels: Tensor<B, 1, Int> = Tensor::from_primitive(labels);
    let labels: Tensor<B, 2, Int> = labels.unsqueeze_dim(1);
    let logits = h.clone().matmul(weight.clone().transpose());
    let largest = logits.clone().max_dim(1);
    let lse = (logits.clone() - largest.clone()).exp().sum_dim(1).log() + largest;
    let ignored = labels.clone().lower_elem(0);
    let target = labels.mask_fill(ignored.clone(), 0);
    Logits {
        h,
        weight,
        logits,
        lse,
        ignored,
        target,
    }
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

/// The sum of all losses, `[1]`.
pub fn linear_cross_entropy<B: Backend>(h: Float<B>, weight: Float<B>, labels: Ints<B>) -> Float<B> {
    primitive(losses(&logits::<B>(h, weight, labels)).sum())
}

/// `dlogits = softmax - onehot`, then `dh = dlogits W`, `dW = dlogitsᵀ h`.
pub fn linear_cross_entropy_with_gradients<B: Backend>(
    h: Float<B>,
    weight: Float<B>,
    labels: Ints<B>,
) -> (Float<B>, Float<B>, Float<B>) {
    let dtypes = [&h, &weight].map(burn::tensor::TensorMetadata::dtype);
    let all = logits::<B>(h, weight, labels);
    let loss = losses(&all).sum();
    let [tokens, vocab] = all.logits.dims();
    let classes = Tensor::<B, 1, Int>::arange(0..vocab as i64, &all.logits.device());
    let onehot = all
        .target
        .clone()
        .expand([tokens, vocab])
        .equal(classes.reshape([1, vocab]).expand([tokens, vocab]));
    let d_logits = (all.logits.clone() - all.lse.clone()).exp();
    let at_the_label = d_logits.clone() - 1.0;
    let d_logits = d_logits
        .mask_where(onehot, at_the_label)
        .mask_fill(all.ignored.expand([tokens, vocab]), 0.0);
    let dh = d_logits.clone().matmul(all.weight);
    let dweight = d_logits.transpose().matmul(all.h);
    (
        primitive(loss),
        primitive(dh.cast(dtypes[0])),
        primitive(dweight.cast(dtypes[1])),
    )
}

/// `x * factor`, the factor a `[1]`; the product is rounded to the dtype of x.
pub fn scale<B: Backend>(x: Float<B>, factor: Float<B>) -> Float<B> {
    let (x, dtype, shape) = rows::<B>(x);
    let factor = tensor::<B, 1>(factor).cast(x.dtype());
    unrows(x * factor.unsqueeze(), dtype, shape)
}
