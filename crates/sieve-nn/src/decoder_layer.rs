//! One transformer block: attention and feed-forward, each after a norm and added to the residual stream.
use crate::{Attention, LayerCaches, LayerContext, LayerOutput, RmsNorm, SwigluMlp, WeightInit};
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use sieve_core::{DmaBias, ModelShape};
use sieve_ops::{DeviceBackend, Residual, SieveBackend};

/// Pre-norm block as in Qwen3; with residual scales as in Doge.
#[derive(Module, Debug)]
pub struct DecoderLayer<B: Backend> {
    /// RMSNorm before the attention layer.
    pub input_layernorm: RmsNorm<B>,
    /// The attention layer, of any kind.
    pub self_attn: Attention<B>,
    /// RMSNorm before the feed-forward layer.
    pub post_attention_layernorm: RmsNorm<B>,
    /// The SwiGLU feed-forward layer.
    pub mlp: SwigluMlp<B>,
    /// Scale of the residual around the attention, `[d_model]`; `None`: 1.
    pub input_residual: Option<Param<Tensor<B, 1>>>,
    /// Scale of the residual around the feed-forward layer, `[d_model]`; `None`: 1.
    pub post_attention_residual: Option<Param<Tensor<B, 1>>>,
}

impl<B: Backend> DecoderLayer<B> {
    /// Normal weights from `init`; norms and scales with weights of 1.
    pub fn new(shape: &ModelShape, init: &mut WeightInit, device: &B::Device) -> Self {
        let ModelShape { d_model, d_ff, rms_norm_eps, .. } = *shape;
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
    /// The block's output, shape of x, `[batch, seq_len, d_model]`.
    pub fn forward(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> LayerOutput<B> {
        let output = match &self.input_residual {
            None => self.attention(x, Residual::Stream, context),
            scale => {
                let output = self.attention(x.clone(), Residual::None, context);
                LayerOutput { x: scaled(x, scale) + output.x, ..output }
            }
        };
        LayerOutput { x: self.feed_forward(output.x, context), ..output }
    }

    /// Norm and attention, as one op where there is one; `residual` says whether x is added.
    pub(crate) fn attention(
        &self,
        x: Tensor<B, 3>,
        residual: Residual,
        context: &LayerContext<'_, B>,
    ) -> LayerOutput<B> {
        let norm = &self.input_layernorm;
        let Some((layer, spec)) = self.self_attn.layer_op(norm, context) else {
            let added = match residual {
                Residual::Stream => x.clone(),
                Residual::None => x.zeros_like(),
            };
            return self.self_attn.forward(norm.forward(x), added, context);
        };
        let clamps = layer.dma.as_ref().is_some_and(|dma| dma.spec.bias == DmaBias::Exp);
        let spec = context.under_policy(spec);
        let (x, chosen) = sieve_ops::attention_layer(x, layer, context.tokens(), spec, residual);
        let (expire, scores) = chosen.unzip();
        LayerOutput { x, expire, clamped_scores: scores.filter(|_| clamps), indexer: None }
    }

    /// As [`forward`](Self::forward) with one cache of all rows, or one cache per row.
    pub fn forward_cached(
        &self,
        x: Tensor<B, 3>,
        context: &LayerContext<'_, B>,
        caches: &mut LayerCaches<'_, B>,
    ) -> Tensor<B, 3>
    where
        B: DeviceBackend,
    {
        let normed = self.input_layernorm.forward(x.clone());
        let y = self.self_attn.forward_cached(normed, context, caches);
        self.feed_forward(scaled(x, &self.input_residual) + y, context)
    }

    /// Applies norm, feed-forward layer and residual.
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
