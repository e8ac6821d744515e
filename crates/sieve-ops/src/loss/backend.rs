//! Projection and cross-entropy as a backend computes them.
use crate::tensors::{Float, Ints};
use burn::tensor::backend::Backend;

/// Projection and cross-entropy.
pub trait LossBackend: Backend {
    /// Per-token cross-entropy in nats, f32 `[tokens]`, zero where the label is [`crate::IGNORE_LABEL`]; without
    /// gradient.
    fn token_losses(h: Float<Self>, weight: Float<Self>, labels: Ints<Self>) -> Float<Self>;
    /// See [`crate::linear_cross_entropy`].
    fn linear_cross_entropy(h: Float<Self>, weight: Float<Self>, labels: Ints<Self>) -> Float<Self>;
}

/// Their gradients, as a device computes them.
pub trait LossGradients: LossBackend {
    /// Summed cross-entropy and its gradients in one pass: `(loss [1], dh, dweight)`.
    fn linear_cross_entropy_with_gradients(
        h: Float<Self>,
        weight: Float<Self>,
        labels: Ints<Self>,
    ) -> (Float<Self>, Float<Self>, Float<Self>);
    /// `x` times a `[1]` that lies on the device; x may be changed in place where nobody else holds it.
    fn scale(x: Float<Self>, factor: Float<Self>) -> Float<Self>;
}
