//! The feed-forward layer: `down(silu(gate x) * up x)` (arXiv:2002.05202).
use crate::{LayerContext, Linear, PassState, RmsNorm, WeightInit};
use burn::module::Module;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use sieve_ops::{FeedForward, Residual, SieveBackend};

/// SwiGLU layer whose gate and up projections are one packed GEMM, gate first.
#[derive(Module, Debug)]
pub struct SwigluMlp<B: Backend> {
    /// Gate and up projections, `[2 * d_ff, d_model]`.
    pub gate_up_proj: Linear<B>,
    /// Down projection, `[d_model, d_ff]`.
    pub down_proj: Linear<B>,
}

impl<B: Backend> SwigluMlp<B> {
    /// A layer with normal random weights from `init`.
    pub fn new(d_model: usize, d_ff: usize, init: &mut WeightInit, device: &B::Device) -> Self {
        Self {
            gate_up_proj: Linear::new(d_model, 2 * d_ff, init, device),
            down_proj: Linear::new(d_ff, d_model, init, device),
        }
    }
}

impl<B: SieveBackend> SwigluMlp<B> {
    /// Norm and feed-forward layer as one op, shape of x, `[batch, seq_len, d_model]`. `residual` says whether x is
    /// added.
    pub fn forward(
        &self,
        x: Tensor<B, 3>,
        norm: &RmsNorm<B>,
        residual: Residual,
        context: &LayerContext<'_, B>,
        state: &mut PassState<B>,
    ) -> Tensor<B, 3> {
        let layer = FeedForward {
            norm: norm.weight.val(),
            gate_up: self.gate_up_proj.weight.val(),
            down: self.down_proj.weight.val(),
            epsilon: norm.epsilon,
            precision: context.settings.precision,
            keeping: context.settings.keeping,
            pass: context.settings.pass,
            sums: state.take_sums([&self.gate_up_proj, &self.down_proj]),
        };
        sieve_ops::feed_forward(x, layer, residual)
    }
}
