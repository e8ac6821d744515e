//! The feed-forward layer with its norm and the residual stream.
use super::{linear, rms_norm, swiglu};
use crate::{FeedForwardWeights, Residual};
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;

/// `[x +] down(swiglu(gate_up(rms_norm(x))))`.
pub fn feed_forward<B: Backend>(
    x: FloatTensor<B>,
    weights: FeedForwardWeights<B>,
    residual: Residual,
) -> FloatTensor<B> {
    let normed = rms_norm::<B>(x.clone(), weights.norm, weights.epsilon);
    let hidden = swiglu::<B>(linear::<B>(normed, weights.gate_up));
    let y = linear::<B>(hidden, weights.down);
    match residual {
        Residual::Stream => B::float_add(x, y),
        Residual::None => y,
    }
}
