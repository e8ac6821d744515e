//! SwiGLU as a backend computes it.
use crate::tensors::Float;
use burn::tensor::backend::Backend;

/// SwiGLU.
pub trait SwigluBackend: Backend {
    /// See [`crate::swiglu`].
    fn swiglu(gate_up: Float<Self>) -> Float<Self>;
}

/// Its gradient, as a device computes it.
pub trait SwigluGradients: SwigluBackend {
    /// Gradient of [`crate::swiglu`].
    fn swiglu_backward(gate_up: Float<Self>, dy: Float<Self>) -> Float<Self>;
    /// `(dgate_up, y)`: gradient of [`crate::swiglu`], and its output once more.
    fn swiglu_backward_with_output(
        gate_up: Float<Self>,
        dy: Float<Self>,
    ) -> (Float<Self>, Float<Self>);
}
