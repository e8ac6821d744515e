//! The residual stream around a layer.
use crate::tensors::Float;
use crate::{DeviceBackend, RmsNormCall};

/// Whether a layer adds its output to the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residual {
    /// The output is `x + layer(x)`.
    Stream,
    /// The output is `layer(x)`, without x.
    None,
}

/// `[dx, dweight, y]` of the norm that begins a layer, where y is the norm's output. With a residual stream, `dy`, the
/// gradient of the layer's output, is added to dx.
pub(super) fn norm_gradient<B: DeviceBackend>(
    norm: RmsNormCall<B>,
    d_normed: Float<B>,
    (residual, dy): (Residual, Float<B>),
) -> [Float<B>; 3] {
    match residual {
        Residual::Stream => B::rms_norm_backward_with_output(norm, d_normed, dy),
        Residual::None => {
            let y = B::rms_norm(norm.clone());
            let d_residual = None;
            let [dx, dweight] = B::rms_norm_backward(norm, d_normed, d_residual);
            [dx, dweight, y]
        }
    }
}
