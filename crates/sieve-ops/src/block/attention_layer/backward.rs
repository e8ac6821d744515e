//! The backward pass of an attention layer.
use super::forward::{Attended, Kept, merge_heads, rotation};
use crate::block::gemm::{Operands, Weight, begin_gradients, gemm_gradients};
use crate::dma::composed;
use crate::tensors::{Float, primitive};
use crate::{DeviceBackend, Residual, RmsNormCall, ToQuantise, context_parallel};
use burn::tensor::TensorMetadata;

/// Gradients of x, norm, qkv, q_norm, k_norm and o and, with DMA, of w_dt and a.
pub(super) fn backward<B: DeviceBackend>(kept: Kept<B>, dy: Float<B>) -> ([Float<B>; 6], Option<[Float<B>; 2]>) {
    let Kept { x, qkv, rotated, attended, operands: [first, second], layer, call } = kept;
    let o = attended.o();
    let o_shape = o.shape();
    // The second GEMM, the output projection, reads the attention's output, which is always kept.
    let second = match second {
        Operands::Fp8(kept) => Operands::Fp8(kept),
        _ => Operands::X(merge_heads::<B>(o)),
    };
    let [qkv_sum, o_sum] = layer.sums;
    let d_output = ToQuantise::new(dy.clone());
    let gradients = gemm_gradients(second, &Weight::new(layer.o, o_sum), d_output);
    let [d_o, d_o_weight] = gradients.expect("x or the rounded operands are there");
    let d_o = B::float_reshape(d_o, o_shape);

    let rotated = rotated.unwrap_or_else(|| B::qk_norm_rope(qkv.clone(), rotation(layer.qk_norm.clone(), &call)));
    let (d_rotated, d_dma) = match (attended, layer.dma) {
        (Attended::Selected(forward), Some(dma)) => {
            let inputs = dma.inputs(rotated, &call.attention);
            let [dqkv, dw_dt, da] = composed::backward::<B>(&inputs, forward, d_o);
            (dqkv, Some([dw_dt, da]))
        }
        (Attended::Recent(output), _) => (B::attention_backward(rotated, &call.attention, output, d_o), None),
        (Attended::Parted(parted), dma) => {
            let dma = dma.map(|dma| (dma, call.positions.clone()));
            let parts = call.parts.as_ref().expect("the forward pass had parts of rows");
            context_parallel::backward(parted, rotated, dma, (parts, &call.attention), d_o)
        }
        (Attended::Selected(_), None) => unreachable!("the forward pass had DMA's weights"),
    };
    let rotation = rotation(layer.qk_norm, &call);
    let [dqkv, d_q_norm, d_k_norm] = B::qk_norm_rope_backward(qkv, rotation, d_rotated);
    let dqkv = ToQuantise::new(merge_heads::<B>(dqkv));
    let norm = RmsNormCall { x, weight: primitive(layer.norm), epsilon: layer.epsilon };
    let first = (first, Weight::new(layer.qkv, qkv_sum));
    let d_residual = (call.residual == Residual::Stream).then_some(dy);
    let [dx, d_norm, d_qkv_weight] = begin_gradients::<B>(norm, first, dqkv, d_residual);
    ([dx, d_norm, d_qkv_weight, d_q_norm, d_k_norm, d_o_weight], d_dma)
}
