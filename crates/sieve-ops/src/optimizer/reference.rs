//! AdamW and norms in plain Burn operations.
use super::backend::{AdamWTensors, OptimizerBackend};
use crate::tensors::{Float, primitive, rows, tensor};
use burn::tensor::backend::Backend;
use burn::tensor::{Shape, Tensor, TensorMetadata};
use sieve_core::AdamWStep;

/// `p -= lr wd p; m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g²; p -= lr / c1 * m / (sqrt(v / c2) + eps)`, unless
/// `grad_scale` is zero or no finite number; the leaf is p rounded to its type.
pub fn adamw<B: Backend>(
    tensors: AdamWTensors<B>,
    grad: Float<B>,
    grad_scale: Float<B>,
    step: AdamWStep,
) -> AdamWTensors<B> {
    let shape: Vec<usize> = tensors.param.shape().to_vec();
    let flat = |x: Float<B>| {
        let count = x.shape().num_elements();
        tensor::<B, 1>(B::float_reshape(x, Shape::new([count])))
    };
    let old = [tensors.param, tensors.exp_avg, tensors.exp_avg_sq].map(flat);
    let [param, exp_avg, exp_avg_sq] = old.clone();
    let compute = param.dtype();
    let scale = tensor::<B, 1>(grad_scale).cast(compute);
    let grad = flat(grad).cast(compute) * scale.clone();
    let exp_avg = exp_avg * step.beta1 + grad.clone() * (1.0 - step.beta1);
    let exp_avg_sq = exp_avg_sq * step.beta2 + grad.clone() * grad * (1.0 - step.beta2);
    let denominator = (exp_avg_sq.clone() / step.bias_correction2).sqrt() + step.eps;
    let update = exp_avg.clone() / denominator * (step.lr / step.bias_correction1);
    let param = param * (1.0 - step.lr * step.weight_decay) - update;

    let spoilt = scale.clone().equal_elem(0.0).bool_or(scale.is_finite().bool_not());
    let [old_param, old_avg, old_avg_sq] = old;
    let gated = |next: Tensor<B, 1>, old: Tensor<B, 1>| {
        let spoilt = spoilt.clone().expand(old.dims());
        next.mask_where(spoilt, old)
    };
    let back = |x: Tensor<B, 1>| B::float_reshape(primitive(x), shape.clone().into());
    let param = gated(param, old_param);
    let leaf = tensors.leaf.map(|leaf| back(param.clone().cast(leaf.dtype())));
    AdamWTensors {
        param: back(param),
        leaf,
        exp_avg: back(gated(exp_avg, old_avg)),
        exp_avg_sq: back(gated(exp_avg_sq, old_avg_sq)),
    }
}

/// `sum(x²)`, `[1]`.
pub fn sum_of_squares<B: Backend>(x: Float<B>) -> Float<B> {
    let (x, _, _) = rows::<B>(x);
    primitive(x.powi_scalar(2).sum())
}

/// `sqrt(sum over tensors of sum(x²))`, `[1]`.
pub fn global_norm<B: OptimizerBackend>(tensors: Vec<Float<B>>) -> Float<B> {
    let squares = tensors.into_iter().map(|x| tensor::<B, 1>(B::sum_of_squares(x)));
    let sum = squares.reduce(|sum, square| sum + square);
    primitive(sum.expect("at least one tensor").sqrt())
}
