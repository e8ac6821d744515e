//! An attention layer with the norm before it and the residual stream around it, as one node of the graph.
//!
//! One node instead of four keeps less for the backward pass: only the residual stream, the packed QKV projection
//! before q/k-norm and rotation, and the attention's output. One memory-bound kernel recomputes the rotated packed
//! tensor; the norm's backward kernel recomputes the norm's output and adds the gradient of the residual stream.
mod backward;
mod forward;

pub use forward::{AttentionLayer, KeptAttention};

use super::{Residual, kept_by};
use crate::backend::value;
use crate::dma::checks;
use crate::operands::Operands;
use crate::tensors::{primitive, tensor};
use crate::{
    AttentionCall, AttentionSpec, ContextParallel, DmaLayer, Documents, GemmPrecision, QkNorm, RotaryEmbedding,
    SieveBackend,
};
use backward::backward;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use forward::{AttentionLayerCall, forward};

/// DMA's mask (`expire`: the first query that no longer sees a key) and the rank of each key, both
/// `[batch, num_kv_heads, seq_len]`.
pub type MaskAndRanks<B> = (Tensor<B, 3, Int>, Tensor<B, 3>);

/// Positions and documents of a layer's tokens.
#[derive(Clone, Debug)]
pub struct LayerTokens<'a, B: Backend> {
    /// Position of each token, for RoPE, `[batch, seq_len]`.
    pub positions: Tensor<B, 2, Int>,
    /// Cosine and sine tables of RoPE.
    pub rope: &'a RotaryEmbedding<B>,
    /// Document bounds and positions of the tokens.
    pub documents: &'a Documents<B>,
    /// With context parallelism: the whole rows; these tokens are one rank's part of them.
    pub parts: Option<&'a ContextParallel>,
}

/// What [`attention_layer`] returns.
#[derive(Clone, Debug)]
pub struct AttentionLayerOutput<B: Backend> {
    /// The layer's output, shape of x.
    pub y: Tensor<B, 3>,
    /// DMA's mask and ranks; `None` for other kinds.
    pub chosen: Option<MaskAndRanks<B>>,
    /// Without a graph and with [`Keeping::attention`](sieve_core::Keeping): what the pass that recomputes the layer
    /// need not compute again, in bf16 GEMMs of dense or windowed attention.
    pub kept: Option<KeptAttention<B>>,
}

/// `[x +] o(attention(qk_norm_rope(qkv(rms_norm(x)))))`; with DMA also the mask and ranks that
/// [`dynamic_mask_attention`](crate::dynamic_mask_attention) returns.
///
/// # Shapes
/// - x: `[batch, seq_len, d_model]`
/// - returns: y has the shape of x; mask and ranks `[batch, num_kv_heads, seq_len]`
///
/// # Panics
/// When DMA's parameters have other shapes than [`DmaLayer`](crate::DmaLayer) says.
pub fn attention_layer<B: SieveBackend>(
    x: Tensor<B, 3>,
    layer: AttentionLayer<B>,
    tokens: LayerTokens<'_, B>,
    spec: AttentionSpec,
    residual: Residual,
) -> AttentionLayerOutput<B> {
    if let Some(dma) = &layer.dma {
        let head_dim = layer.qkv.dims()[0] / spec.packed_heads();
        checks::layer(Operands("attention_layer"), dma, spec, head_dim).unwrap_or_else(|error| panic!("{error}"));
    }
    let x = primitive(x);
    let parents = [
        primitive(layer.norm.clone()),
        primitive(layer.qkv.clone()),
        primitive(layer.qk_norm.q_weight.clone()),
        primitive(layer.qk_norm.k_weight.clone()),
        primitive(layer.o.clone()),
    ];
    let of_dma = layer.dma.as_ref().map(DmaLayer::weights);
    // In fp8 the second GEMM rounds operands that the backward pass reads.
    let hands_on = !B::HAS_GRAPH && layer.keeping.attention && layer.precision == GemmPrecision::Tensors;
    let layer = layer.values();
    let call = AttentionLayerCall {
        positions: tokens.positions.into_primitive(),
        rope: tokens.rope.tables().values(),
        attention: AttentionCall::new(tokens.documents.bounds(), spec),
        parts: tokens.parts.cloned(),
        residual,
    };
    let (y, kept) = forward::<B::Inner>(B::value(x.clone()), layer, call);
    let chosen = kept.attended.chosen();
    let handed = if hands_on { kept.attended.kept(y.clone()) } else { None };
    let [norm, qkv, q_norm, k_norm, o] = &parents;
    let y = match &of_dma {
        None => {
            let parents = [&x, norm, qkv, q_norm, k_norm, o];
            B::node(parents, y, |dy| backward(kept, dy).0)
        }
        Some([w_dt, a]) => {
            let parents = [&x, norm, qkv, q_norm, k_norm, o, w_dt, a];
            B::node(parents, y, |dy| {
                let ([dx, norm, qkv, q_norm, k_norm, o], dma) = backward(kept, dy);
                let [w_dt, a] = dma.expect("the layer has DMA");
                [dx, norm, qkv, q_norm, k_norm, o, w_dt, a]
            })
        }
    };
    let chosen = chosen.map(|(expire, rank)| (Tensor::from_primitive(expire), tensor(B::constant(rank))));
    let handed = handed.map(KeptAttention::from_inner);
    AttentionLayerOutput { y: tensor(y), chosen, kept: handed }
}

impl<B: SieveBackend> AttentionLayer<B> {
    /// The layer without the tensors' places in the graph.
    fn values(self) -> AttentionLayer<B::Inner> {
        AttentionLayer {
            norm: value::<B, 1>(self.norm),
            epsilon: self.epsilon,
            qkv: value::<B, 2>(self.qkv),
            qk_norm: QkNorm {
                q_weight: value::<B, 1>(self.qk_norm.q_weight),
                k_weight: value::<B, 1>(self.qk_norm.k_weight),
                epsilon: self.qk_norm.epsilon,
            },
            o: value::<B, 2>(self.o),
            dma: self.dma.map(DmaLayer::values),
            precision: self.precision,
            keeping: kept_by::<B>(self.keeping),
            sums: self.sums.map(|sum| sum.map(value::<B, 2>)),
            kept: self.kept.map(KeptAttention::values),
        }
    }
}

#[cfg(test)]
mod tests;
