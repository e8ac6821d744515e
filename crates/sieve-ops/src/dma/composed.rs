//! DMA as a whole: scores, selection and attention, forward and backward.
use super::bias::{dma_bias, dma_bias_backward};
use super::call::{DmaCall, DmaLayer, DmaOrder, DmaScoresCall, DmaSelection};
use super::rank::{PositionOrigin, Recency};
use crate::backend::value;
use crate::tensors::{Float, primitive, tensor};
use crate::{AttentionCall, AttentionOutput, AttentionSpec, DeviceBackend, SieveBackend};
use burn::tensor::backend::Backend;
use sieve_core::{DmaShape, KeepOLow};

/// Operands of the composed DMA layer, [`forward`] and [`backward`].
#[derive(Clone, Debug)]
pub(crate) struct DmaInputs<B: Backend> {
    /// The packed tensor, and the parameters of the scores.
    pub(crate) scores: DmaScoresCall<B>,
    /// Documents, numbers of heads and softmax scale.
    pub(crate) attention: AttentionCall<B>,
    /// Number of selected keys, recency and form of the bias.
    pub(crate) dma: DmaShape,
}

/// Results of DMA's forward pass, which the backward pass needs.
#[derive(Clone, Debug)]
pub(crate) struct DmaForward<B: Backend> {
    /// Attention output and log-sum-exp.
    pub(crate) output: AttentionOutput<B>,
    /// Which queries see each key.
    pub(crate) selection: DmaSelection<B>,
    /// Ranks of the keys: scores plus the recency term, f32 `[batch, num_kv_heads, seq_len]`.
    pub(crate) rank: Float<B>,
}

impl<B: SieveBackend> DmaLayer<B> {
    /// The parameters' values, without their place in the graph.
    pub(crate) fn values(self) -> DmaLayer<B::Inner> {
        DmaLayer { w_dt: value::<B, 2>(self.w_dt), a: value::<B, 1>(self.a), spec: self.spec }
    }
}

impl<B: Backend> DmaLayer<B> {
    /// The parameters that score keys: w_dt and a.
    pub(crate) fn weights(&self) -> [Float<B>; 2] {
        [primitive(self.w_dt.clone()), primitive(self.a.clone())]
    }

    /// The call of the scores of a packed tensor's keys.
    pub(crate) fn scores(&self, qkv: Float<B>, spec: AttentionSpec) -> DmaScoresCall<B> {
        let [w_dt, a] = self.weights();
        DmaScoresCall { qkv, w_dt, a, spec }
    }

    /// The operands of scores, selection and attention.
    pub(crate) fn inputs(self, qkv: Float<B>, call: &AttentionCall<B>) -> DmaInputs<B> {
        DmaInputs { scores: self.scores(qkv, call.spec), attention: call.clone(), dma: self.spec }
    }
}

/// Ranks the keys, selects keys by rank, and attends over them.
pub(crate) fn forward<B: DeviceBackend>(inputs: &DmaInputs<B>, o_low: KeepOLow) -> DmaForward<B> {
    let dma = inputs.dma;
    let recency = dma
        .slopes(inputs.scores.spec.num_kv_heads)
        .map(|slopes| Recency { slopes, origin: PositionOrigin::DocumentStart(inputs.attention.documents[0].clone()) });
    let rank = B::dma_ranks(&inputs.scores, recency);
    let order = DmaOrder::Of(inputs.attention.spec.policy.keys);
    by_rank((inputs.scores.qkv.clone(), rank), inputs.attention.clone(), dma, o_low, order)
}

/// Selects the keys of a packed tensor by their ranks, and attends over the selected keys.
pub(crate) fn by_rank<B: DeviceBackend>(
    (qkv, rank): (Float<B>, Float<B>),
    attention: AttentionCall<B>,
    dma: DmaShape,
    o_low: KeepOLow,
    order: DmaOrder<B>,
) -> DmaForward<B> {
    let call = DmaCall {
        qkv,
        delta: primitive(dma_bias(tensor::<B, 3>(rank.clone()), dma.bias)),
        selection: B::dma_select(rank.clone(), &attention.documents, dma.window(), order),
        attention,
    };
    let output = B::dma_attention(&call, o_low);
    DmaForward { output, selection: call.selection.for_backward(), rank }
}

/// Gradients `[dqkv, dw_dt, da]` of the DMA layer.
pub(crate) fn backward<B: DeviceBackend>(
    inputs: &DmaInputs<B>,
    forward: DmaForward<B>,
    d_o: Float<B>,
) -> [Float<B>; 3] {
    let rank = tensor::<B, 3>(forward.rank);
    let delta = dma_bias(rank.clone(), inputs.dma.bias);
    let call = DmaCall {
        qkv: inputs.scores.qkv.clone(),
        delta: primitive(delta.clone()),
        selection: forward.selection,
        attention: inputs.attention.clone(),
    };
    let [dqkv, d_delta] = B::dma_attention_backward(&call, forward.output, d_o);
    // The recency term is constant, so the gradient of the rank is the gradient of the score.
    let dz = dma_bias_backward(rank, delta, tensor(d_delta), inputs.dma.bias);
    B::dma_scores_backward(&inputs.scores, primitive(dz), dqkv)
}
