//! Projection and cross-entropy as a backend computes them.
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};

/// Projection and cross-entropy.
pub trait LossBackend: Backend {
    /// Per-token cross-entropy in nats, f32 `[tokens]`, zero where the label is [`crate::IGNORE_LABEL`]; without gradient.
    fn token_losses(
        h: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        labels: IntTensor<Self>,
    ) -> FloatTensor<Self>;
    /// See [`crate::linear_cross_entropy`].
    fn linear_cross_entropy(
        h: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        labels: IntTensor<Self>,
        z_loss: f64,
    ) -> FloatTensor<Self>;
}

/// Their gradients, as a device computes them.
pub trait LossGradients: LossBackend {
    /// Summed cross-entropy and its gradients in one pass: `(loss [1], dh, dweight)`.
    fn linear_cross_entropy_with_gradients(
        h: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        labels: IntTensor<Self>,
        z_loss: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
    /// `x` times a `[1]` that lies on the device; x may be changed in place where nobody else holds it.
    fn scaled(x: FloatTensor<Self>, factor: FloatTensor<Self>) -> FloatTensor<Self>;
}
