//! SwiGLU as a backend computes it.
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;

/// SwiGLU.
pub trait SwigluBackend: Backend {
    /// See [`crate::swiglu`].
    fn swiglu(gate_up: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// Its gradient, as a device computes it.
pub trait SwigluGradients: SwigluBackend {
    /// Gradient of [`crate::swiglu`].
    fn swiglu_backward(gate_up: FloatTensor<Self>, dy: FloatTensor<Self>) -> FloatTensor<Self>;
    /// `(dgate_up, y)`: gradient of [`crate::swiglu`], and its output once more.
    fn swiglu_backward_with_output(
        gate_up: FloatTensor<Self>,
        dy: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}
