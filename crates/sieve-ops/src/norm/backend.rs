//! RMSNorm as a backend computes it.
use crate::tensors::Float;
use burn::tensor::backend::Backend;

/// A call of [`crate::rms_norm`].
#[derive(Clone, Debug)]
pub struct RmsNormCall<B: Backend> {
    /// `[.., d_model]`.
    pub x: Float<B>,
    /// `[d_model]`.
    pub weight: Float<B>,
    /// Added to the mean square.
    pub epsilon: f64,
}

/// RMSNorm.
pub trait NormBackend: Backend {
    /// See [`crate::rms_norm`].
    fn rms_norm(call: RmsNormCall<Self>) -> Float<Self>;
}

/// Its gradients, as a device computes them.
pub trait NormGradients: NormBackend {
    /// `(dx, dweight)` of [`crate::rms_norm`]; `d_residual`, the gradient that reaches x beside the norm, is added to
    /// dx.
    fn rms_norm_backward(
        call: RmsNormCall<Self>,
        dy: Float<Self>,
        d_residual: Option<Float<Self>>,
    ) -> (Float<Self>, Float<Self>);
    /// `(dx, dweight, y)`: as [`rms_norm_backward`](Self::rms_norm_backward), and the norm's output once more.
    fn rms_norm_backward_with_output(
        call: RmsNormCall<Self>,
        dy: Float<Self>,
        d_residual: Float<Self>,
    ) -> (Float<Self>, Float<Self>, Float<Self>);
}
