//! The tensors of an AdamW update.
use crate::tensors::Float;
use burn::tensor::backend::Backend;

/// One parameter's tensors in an AdamW update. All have the parameter's shape. They are f32 (f64 in tests), except
/// `leaf` and the low bits in `param`.
#[derive(Clone, Debug)]
pub struct AdamWTensors<B: Backend> {
    /// The f32 master weights. With a `leaf`: the rest, i.e. the low bits that
    /// [`split_master`](crate::split_master) returned.
    pub param: Float<B>,
    /// The bf16 weights that the model computes with; `None` where it computes with `param`.
    pub leaf: Option<Float<B>>,
    /// First moment.
    pub exp_avg: Float<B>,
    /// Second moment.
    pub exp_avg_sq: Float<B>,
}
