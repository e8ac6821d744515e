//! The call of RMSNorm.
use crate::tensors::Float;
use burn::tensor::backend::Backend;

/// Operands of [`crate::rms_norm`].
#[derive(Clone, Debug)]
pub struct RmsNormCall<B: Backend> {
    /// Input of the norm, `[.., d_model]`.
    pub x: Float<B>,
    /// Weight of the norm, one factor a column, `[d_model]`.
    pub weight: Float<B>,
    /// Epsilon that the norm adds to the mean square.
    pub epsilon: f64,
}
