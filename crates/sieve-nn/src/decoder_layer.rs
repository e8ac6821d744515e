//! One transformer block: attention and feed-forward, each after a norm and added to the residual stream.
use crate::{Attention, AttentionResult, LayerCaches, LayerContext, RmsNorm, SwigluMlp, WeightInit};
use burn::module::{Module, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use sieve_core::ModelShape;
use sieve_ops::{Residual, SieveBackend};

/// Pre-norm block of Qwen3; with residual scales, of Doge.
#[derive(Module, Debug)]
pub struct DecoderLayer<B: Backend> {
    /// Before the attention.
    pub input_layernorm: RmsNorm<B>,
    /// The attention.
    pub self_attn: Attention<B>,
    /// Before the feed-forward layer.
    pub post_attention_layernorm: RmsNorm<B>,
    /// The feed-forward layer.
    pub mlp: SwigluMlp<B>,
    /// Scale of the residual around the attention, `[d_model]`; one where absent.
    pub input_residual: Option<Param<Tensor<B, 1>>>,
    /// Scale of the residual around the feed-forward layer, `[d_model]`; one where absent.
    pub post_attention_residual: Option<Param<Tensor<B, 1>>>,
}

/// Output of a block.
#[derive(Clone, Debug)]
pub struct LayerOutput<B: Backend> {
    /// Residual stream, `[batch, seq_len, d_model]`.
    pub x: Tensor<B, 3>,
    /// DMA's mask, as in [`AttentionResult`](crate::AttentionResult).
    pub expire: Option<Tensor<B, 3, Int>>,
    /// DMA's scores where its bias clamps large ones, as in [`AttentionResult`](crate::AttentionResult).
    pub clamped_scores: Option<Tensor<B, 3>>,
}

impl<B: Backend> DecoderLayer<B> {
    /// Normal weights from `init`, norms and scales of one.
    pub fn new(shape: &ModelShape, init: &mut WeightInit, device: &B::Device) -> Self {
        let ModelShape {
            d_model,
            d_ff,
            rms_norm_eps,
            ..
        } = *shape;
        let input_layernorm = RmsNorm::new(d_model, rms_norm_eps, init, device);
        let self_attn = Attention::new(shape, init, device);
        let post_attention_layernorm = RmsNorm::new(d_model, rms_norm_eps, init, device);
        let mlp = SwigluMlp::new(d_model, d_ff, init, device);
        let mut scale = || shape.residual_scale.then(|| init.constant(1.0, [d_model], device));
        Self {
            input_layernorm,
            self_attn,
            post_attention_layernorm,
            mlp,
            input_residual: scale(),
            post_attention_residual: scale(),
        }
    }
}

impl<B: SieveBackend> DecoderLayer<B> {
    /// `[batch, seq_len, d_model]`, shape kept.
    pub fn forward(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> LayerOutput<B> {
        let norm = &self.input_layernorm;
        let attend = |x, residual| self.self_attn.forward_stream(x, norm, residual, context);
        let result = match &self.input_residual {
            None => attend(x, Residual::Stream),
            scale => {
                let result = attend(x.clone(), Residual::None);
                AttentionResult {
                    x: scaled(x, scale) + result.x,
                    ..result
                }
            }
        };
        LayerOutput {
            x: self.feed_forward(result.x, context),
            expire: result.expire,
            clamped_scores: result.clamped_scores,
        }
    }

    /// As [`forward`](Self::forward) with one cache of all rows, or one of each row.
    pub fn forward_cached(
        &self,
        x: Tensor<B, 3>,
        context: &LayerContext<'_, B>,
        caches: &mut LayerCaches<'_, B>,
    ) -> Tensor<B, 3> {
        let normed = self.input_layernorm.forward(x.clone());
        let y = self.self_attn.forward_cached(normed, context, caches);
        self.feed_forward(scaled(x, &self.input_residual) + y, context)
    }

    pub(crate) fn feed_forward(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Tensor<B, 3> {
        let norm = &self.post_attention_layernorm;
        let layer = |x, residual| self.mlp.forward(x, norm, residual, context);
        match &self.post_attention_residual {
            None => layer(x, Residual::Stream),
            scale => scaled(x.clone(), scale) + layer(x, Residual::None),
        }
    }
}

pub(crate) fn scaled<B: Backend>(x: Tensor<B, 3>, scale: &Option<Param<Tensor<B, 1>>>) -> Tensor<B, 3> {
    match scale {
        Some(scale) => x * scale.val().unsqueeze(),
        None => x,
    }
}
