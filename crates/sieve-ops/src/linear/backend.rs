//! Products with a weight as a backend computes them.
use crate::tensors::Float;
use burn::tensor::backend::Backend;

/// Products with a weight.
///
/// Burn's own backend trait has a `linear` of another layout: write `<B as LinearBackend>::linear`.
pub trait LinearBackend: Backend {
    /// See [`crate::linear`].
    fn linear(x: Float<Self>, weight: Float<Self>) -> Float<Self>;
    /// See [`crate::linear_add`]; its gradients are those of [`crate::linear`] and, for the residual, dy itself.
    fn linear_add(x: Float<Self>, weight: Float<Self>, residual: Float<Self>) -> Float<Self>;
}

/// Their gradients, as a device computes them.
pub trait LinearGradients: LinearBackend {
    /// `dx` of [`crate::linear`].
    fn linear_input_gradient(weight: Float<Self>, dy: Float<Self>) -> Float<Self>;
    /// `dweight` of [`crate::linear`], added to `sum` where there is one, which may be changed in place.
    fn linear_weight_gradient(x: Float<Self>, dy: Float<Self>, sum: Option<Float<Self>>) -> Float<Self>;
}
