//! The composed ops in plain Burn operations.
use super::attention_layer::{AttentionLayer, AttentionLayerCall};
use super::feed_forward::FeedForward;
use super::residual::Residual;
use crate::attention::reference::attention;
use crate::dma::dma_bias;
use crate::dma::reference::{dma_attention, dma_ranks, dma_select};
use crate::linear::reference::linear;
use crate::norm::reference::rms_norm;
use crate::rope::reference::qk_norm_rope;
use crate::swiglu::reference::swiglu;
use crate::tensors::{Float, primitive, tensor};
use crate::{DmaCall, PositionOrigin, QkNormRopeCall, Recency, RmsNormCall};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorMetadata};

/// `[x +] o(attention(qk_norm_rope(qkv(rms_norm(x)))))`.
pub fn attention_layer<B: Backend>(x: Float<B>, layer: AttentionLayer<B>, call: AttentionLayerCall<B>) -> Float<B> {
    let AttentionLayerCall {
        positions,
        rope,
        attention: place,
        residual,
        parts: _,
    } = call;
    let spec = place.spec;
    let normed = normed(x.clone(), layer.norm, layer.epsilon);
    let packed = linear::<B>(normed, primitive(layer.qkv));
    let shape = packed.shape();
    let (tokens, heads) = ([shape[0], shape[1]], spec.packed_heads());
    let packed = B::float_reshape(packed, [tokens[0], tokens[1], heads, shape[2] / heads].into());
    let rotation = QkNormRopeCall {
        q_weight: primitive(layer.qk_norm.q_weight),
        k_weight: primitive(layer.qk_norm.k_weight),
        positions,
        rope,
        num_kv_heads: spec.num_kv_heads,
        epsilon: layer.qk_norm.epsilon,
    };
    let qkv = qk_norm_rope(packed, rotation);
    let output = match layer.dma {
        None => attention::<B>(qkv, &place),
        Some(dma) => {
            let scores = dma.scores(qkv.clone(), spec);
            let dma = dma.spec;
            let recency = dma.slopes(spec.num_kv_heads).map(|slopes| Recency {
                slopes,
                origin: PositionOrigin::DocumentStart(place.documents[0].clone()),
            });
            let rank = tensor::<B, 3>(dma_ranks(&scores, recency));
            let selection = dma_select::<B>(primitive(rank.clone()), &place.documents, dma.window());
            dma_attention(&DmaCall {
                qkv,
                delta: primitive(dma_bias(rank, dma.bias)),
                selection,
                attention: place,
            })
        }
    };
    let width = shape[2] / heads * spec.num_heads;
    let o = B::float_reshape(output.o, [tokens[0], tokens[1], width].into());
    let y = linear::<B>(o, primitive(layer.o));
    match residual {
        Residual::Stream => B::float_add(x, y),
        Residual::None => y,
    }
}
/// `[x +] down(swiglu(gate_up(rms_norm(x))))`.
pub fn feed_forward<B: Backend>(x: Float<B>, layer: FeedForward<B>, residual: Residual) -> Float<B> {
    let normed = normed(x.clone(), layer.norm, layer.epsilon);
    let hidden = swiglu::<B>(linear::<B>(normed, primitive(layer.gate_up)));
    let y = linear::<B>(hidden, primitive(layer.down));
    match residual {
        Residual::Stream => B::float_add(x, y),
        Residual::None => y,
    }
}

fn normed<B: Backend>(x: Float<B>, weight: Tensor<B, 1>, epsilon: f64) -> Float<B> {
    rms_norm(RmsNormCall::<B> {
        x,
        weight: primitive(weight),
        epsilon,
    })
}
