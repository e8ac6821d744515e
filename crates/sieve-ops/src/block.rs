//! Ops composed of others, each one node of the autodiff graph.
mod attention_layer;
mod feed_forward;
mod product;
pub(crate) mod reference;
mod residual;
mod seed_gradient;

pub use attention_layer::{AttentionLayer, AttentionLayerBackend, AttentionLayerCall, DmaLayer, attention_layer};
pub use feed_forward::{FeedForward, FeedForwardBackend, feed_forward};
pub use residual::Residual;
pub use seed_gradient::{SeedBackend, seed_gradient};

use burn::tensor::Tensor;
use std::sync::atomic::{AtomicBool, Ordering};

/// Gradients of a layer's two weights from earlier micro-batches, f32: the backward pass adds to them, in place where
/// it can, and returns the sums. `None`: it returns new gradients.
pub type WeightSums<B> = [Option<Tensor<B, 2>>; 2];

// Process-wide: a mode, as what attention keeps of its output.
static KEEPS_MADE_AGAIN: AtomicBool = AtomicBool::new(false);

/// Says whether blocks keep, from now on, what their backward pass would make again: normed streams, rotated heads and
/// gated activations. It takes half as much memory again as all else that a block keeps, saves 1 to 2 % of a step on a
/// GPU, and changes no number.
pub fn keep_made_again(keep: bool) {
    KEEPS_MADE_AGAIN.store(keep, Ordering::Relaxed);
}

/// `x`, where blocks keep what could be made again.
fn kept<T>(x: T) -> Option<T> {
    KEEPS_MADE_AGAIN.load(Ordering::Relaxed).then_some(x)
}

/// Runs a test's call while all is kept. One at a time: the mode is the whole process's.
#[cfg(test)]
fn while_all_is_kept<T>(call: impl FnOnce() -> T) -> T {
    static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _one = ONE.lock();
    keep_made_again(true);
    let result = call();
    keep_made_again(false);
    result
}
