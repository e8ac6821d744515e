//! One transformer block: attention and feed-forward, each after a norm and added to the residual stream.
use crate::{Attention, LayerCaches, LayerContext, LayerOutput, PassState, RmsNorm, SwigluMlp, WeightInit};
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use sieve_core::ModelShape;
use sieve_ops::{AttentionLayerOutput, Residual, SieveBackend};

/// Pre-norm block as in Qwen3. Models like Doge also have learned scales, by which the residual stream is multiplied
/// where it passes a layer.
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
    /// Whether queries and keys are rotated; not in a layer without positions (NoPE).
    #[module(skip)]
    pub(crate) rotates: bool,
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
            // `shape` is one layer's, so its only layer has index 0.
            rotates: shape.has_rope(0),
        }
    }

    /// The layer with gradients for its indexer alone, if it has one. Autodiff keeps what a pass computed until its
    /// backward pass; without gradients a tensor leaves nothing behind.
    pub fn for_indexer_alone(&self) -> Self {
        let mut frozen = self.clone().no_grad();
        if let (Attention::Chosen(frozen), Attention::Chosen(own)) = (&mut frozen.self_attn, &self.self_attn) {
            frozen.indexer = own.indexer.clone();
        }
        frozen
    }
}

impl<B: SieveBackend> DecoderLayer<B> {
    /// The context for this layer's attention: with tables that rotate nothing in a layer without positions. Whoever
    /// calls the attention itself passes it; [`forward`](Self::forward) takes the model's context.
    pub fn attention_context<'a>(&self, context: &LayerContext<'a, B>) -> LayerContext<'a, B> {
        context.of_layer(self.rotates)
    }

    /// The block's output, shape of x, `[batch, seq_len, d_model]`. With `caches` the tokens of x follow the cached
    /// ones, see [`Forward::forward`](crate::Forward::forward). A block without residual scales has x added inside
    /// the op; with a scale, the scaled x is added here.
    pub fn forward(
        &self,
        x: Tensor<B, 3>,
        context: &LayerContext<'_, B>,
        state: &mut PassState<B>,
        caches: Option<&mut LayerCaches<'_, B::Inner>>,
    ) -> LayerOutput<B> {
        let context = &self.attention_context(context);
        let output = match (&self.input_residual, caches) {
            (None, None) => self.attention(x, Residual::Stream, context, state),
            (scale, None) => {
                let output = self.attention(x.clone(), Residual::None, context, state);
                LayerOutput { x: scaled(x, scale) + output.x, ..output }
            }
            (scale, caches) => {
                let normed = self.input_layernorm.forward(x.clone());
                self.self_attn.as_layer().forward(normed, scaled(x, scale), context, state, caches)
            }
        };
        LayerOutput { x: self.feed_forward(output.x, context, state), ..output }
    }

    /// Norm and attention, as one op where there is one; `residual` says whether x is added.
    pub(crate) fn attention(
        &self,
        x: Tensor<B, 3>,
        residual: Residual,
        context: &LayerContext<'_, B>,
        state: &mut PassState<B>,
    ) -> LayerOutput<B> {
        let (norm, attention) = (&self.input_layernorm, self.self_attn.as_layer());
        // With shared prompts attention reads rows in which the prompts are repeated, so it is an op of its own.
        let op = if context.shared.is_some() { None } else { attention.layer_op(norm, context, state) };
        let Some((layer, spec)) = op else {
            let added = match residual {
                Residual::Stream => x.clone(),
                Residual::None => x.zeros_like(),
            };
            return attention.forward(norm.forward(x), added, context, state, None);
        };
        let spec = context.under_policy(spec);
        let AttentionLayerOutput { y, chosen, kept } =
            sieve_ops::attention_layer(x, layer, context.tokens(), spec, residual);
        let (expire, scores) = chosen.unzip();
        let clamped_scores = scores.filter(|_| attention.clamps_scores());
        LayerOutput { expire, clamped_scores, attention: kept, ..LayerOutput::of(y) }
    }

    /// Applies norm, feed-forward layer and residual.
    pub(crate) fn feed_forward(
        &self,
        x: Tensor<B, 3>,
        context: &LayerContext<'_, B>,
        state: &mut PassState<B>,
    ) -> Tensor<B, 3> {
        let norm = &self.post_attention_layernorm;
        match &self.post_attention_residual {
            None => self.mlp.forward(x, norm, Residual::Stream, context, state),
            scale => scaled(x.clone(), scale) + self.mlp.forward(x, norm, Residual::None, context, state),
        }
    }
}

/// x times a scale per column; x itself without one.
pub(crate) fn scaled<B: Backend>(x: Tensor<B, 3>, scale: &Option<Param<Tensor<B, 1>>>) -> Tensor<B, 3> {
    match scale {
        Some(scale) => x * scale.val().unsqueeze(),
        None => x,
    }
}
