//! An attention layer with its norm and the residual stream.
use super::{
    QkNormRope, attention, dma_attention, dma_scores, dma_select, linear, primitive, qk_norm_rope,
    rms_norm, tensor,
};
use crate::{AttentionLayerCall, AttentionLayerWeights, Residual, dma_bias};
use burn::tensor::TensorMetadata;
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;

/// `[x +] o(attention(qk_norm_rope(qkv(rms_norm(x)))))`.
pub fn attention_layer<B: Backend>(
    x: FloatTensor<B>,
    weights: AttentionLayerWeights<B>,
    call: AttentionLayerCall<B>,
) -> FloatTensor<B> {
    let AttentionLayerCall {
        positions,
        rope,
        documents,
        spec,
        residual,
    } = call;
    let normed = rms_norm::<B>(x.clone(), weights.norm, weights.epsilon);
    let packed = linear::<B>(normed, weights.qkv);
    let shape = packed.shape();
    let (tokens, heads) = ([shape[0], shape[1]], spec.packed_heads());
    let packed = B::float_reshape(
        packed,
        [tokens[0], tokens[1], heads, shape[2] / heads].into(),
    );
    let args = QkNormRope {
        q_weight: weights.q_norm,
        k_weight: weights.k_norm,
        positions,
        num_kv_heads: spec.num_kv_heads,
        epsilon: weights.qk_epsilon,
    };
    let qkv = qk_norm_rope::<B>(packed, args, &rope);
    let output = match weights.dma {
        None => attention::<B>(qkv, &documents, spec),
        Some((w_dt, a, dma)) => {
            let z = dma_scores::<B>(qkv.clone(), w_dt, a, spec);
            let selection = dma_select::<B>(z.clone(), &documents, dma.keep_window_size);
            let delta = primitive(dma_bias(tensor::<B, 3>(z), dma.bias));
            dma_attention::<B>(qkv, delta, &documents, &selection, spec)
        }
    };
    let width = shape[2] / heads * spec.num_heads;
    let o = B::float_reshape(output.o, [tokens[0], tokens[1], width].into());
    let y = linear::<B>(o, weights.o);
    match residual {
        Residual::Stream => B::float_add(x, y),
        Residual::None => y,
    }
}
