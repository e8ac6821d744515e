//! Products of eight-bit floats as a device computes them.
use crate::tensors::Float;
use burn::tensor::backend::Backend;

/// What a product leaves for its gradients: both operands, rounded.
#[derive(Clone, Debug)]
pub struct Fp8Kept<B: Backend> {
    /// With scales bytes, `[in, tokens]`; without, what the bytes stand for, as x was.
    pub(super) x: Float<B>,
    /// With scales bytes, `[in, out]`; without, what the bytes stand for, `[out, in]`.
    pub(super) weight: Float<B>,
    /// Those of x and of the weight, `[1]`; `None` where the reference ran.
    pub(super) scales: Option<[Float<B>; 2]>,
}

/// A tensor that is to be rounded, and parts of its largest magnitude, where the kernel that wrote it has found them.
#[derive(Clone, Debug)]
pub struct ToRound<B: Backend>(pub(crate) Float<B>, pub(super) Option<Float<B>>);

impl<B: Backend> ToRound<B> {
    /// A tensor whose magnitudes nobody has looked at.
    pub fn new(x: Float<B>) -> Self {
        Self(x, None)
    }
}

/// Products with a weight in eight-bit floats.
pub trait Fp8Gradients: Backend {
    /// `x wᵀ`, and the residual where there is one, of x and w rounded to e4m3; what the gradients need beside it.
    fn fp8_linear(x: ToRound<Self>, weight: Float<Self>, residual: Option<Float<Self>>)
    -> (Float<Self>, Fp8Kept<Self>);
    /// `[dx, dweight]` of dy rounded to e5m2 and the rounded operands; the rounding counts as the identity. dweight is
    /// added to `sum` where there is one, which may be changed in place.
    fn fp8_linear_backward(kept: Fp8Kept<Self>, dy: ToRound<Self>, sum: Option<Float<Self>>) -> [Float<Self>; 2];
    /// [`crate::swiglu`], to be rounded.
    fn fp8_swiglu(gate_up: Float<Self>) -> ToRound<Self>;
    /// Its gradient, to be rounded.
    fn fp8_swiglu_backward(gate_up: Float<Self>, dy: Float<Self>) -> ToRound<Self>;
}
