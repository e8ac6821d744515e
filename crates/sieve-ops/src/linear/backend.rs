//! Products with a weight as a backend computes them.
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;

/// Products with a weight.
///
/// Burn's own backend trait has a `linear` of another layout: write `<B as LinearBackend>::linear`.
pub trait LinearBackend: Backend {
    /// See [`crate::linear`].
    fn linear(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self>;
    /// See [`crate::linear_add`]; its gradients are those of [`crate::linear`] and, for the residual, dy itself.
    fn linear_add(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        residual: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}

/// Their gradients, as a device computes them.
pub trait LinearGradients: LinearBackend {
    /// `dx` of [`crate::linear`].
    fn linear_input_gradient(weight: FloatTensor<Self>, dy: FloatTensor<Self>)
    -> FloatTensor<Self>;
    /// `dweight` of [`crate::linear`].
    fn linear_weight_gradient(x: FloatTensor<Self>, dy: FloatTensor<Self>) -> FloatTensor<Self>;
}
