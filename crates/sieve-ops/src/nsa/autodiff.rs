//! NSA's ops as nodes of the autodiff graph.
use super::backend::{NsaBackend, NsaCall, NsaCompressed, NsaGradients, NsaSelected};
use crate::attention::AttentionOutput;
use crate::device::autodiff::{constant, enter, inner};
use crate::tensors::{Float, Ints};
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::TensorMetadata;

impl<B: NsaGradients, C: CheckpointStrategy> NsaBackend for Autodiff<B, C> {
    fn nsa_blocks(qkv: Float<Self>, [k, v]: [Float<Self>; 2], call: &NsaCall<Self>) -> Float<Self> {
        let (dims, call) = (qkv.primitive.shape().dims(), call.on::<B>());
        let y = B::nsa_blocks(qkv.primitive.clone(), [&k, &v].map(inner::<B, C>), &call);
        enter::<B, C, _, _>([&qkv, &k, &v], y, move |dy| B::nsa_blocks_backward(dims, &call, dy))
    }

    fn nsa_mean_pool(qkv: Float<Self>, call: &NsaCall<Self>) -> Float<Self> {
        let (dims, call) = (qkv.primitive.shape().dims(), call.on::<B>());
        let y = B::nsa_mean_pool(qkv.primitive.clone(), &call);
        enter::<B, C, _, _>([&qkv], y, move |dy| [B::nsa_mean_pool_backward(dims, &call, dy)])
    }

    fn nsa_compressed_attention(
        qkv: Float<Self>,
        compressed: Float<Self>,
        call: &NsaCall<Self>,
    ) -> NsaCompressed<Self> {
        let call = call.on::<B>();
        let [q, c] = [&qkv, &compressed].map(inner::<B, C>);
        let NsaCompressed { output, block_indices } = B::nsa_compressed_attention(q.clone(), c.clone(), &call);
        let (o, lse) = (output.o.clone(), constant::<B, C>(output.lse.clone()));
        let o = enter::<B, C, _, _>([&qkv, &compressed], o, move |d_o| {
            B::nsa_compressed_attention_backward(q, c, &call, output, d_o)
        });
        NsaCompressed {
            output: AttentionOutput::new(o, lse),
            block_indices,
        }
    }

    fn nsa_selected_attention(qkv: Float<Self>, block_indices: Ints<Self>, call: &NsaCall<Self>) -> NsaSelected<Self> {
        let (x, call) = (inner::<B, C>(&qkv), call.on::<B>());
        let selected = B::nsa_selected_attention(x.clone(), block_indices.clone(), &call);
        let AttentionOutput { o, lse, .. } = selected.output.clone();
        let o = enter::<B, C, _, _>([&qkv], o, move |d_o| {
            [B::nsa_selected_attention_backward(
                x,
                block_indices,
                &call,
                selected,
                d_o,
            )]
        });
        NsaSelected::without_lists(AttentionOutput::new(o, constant::<B, C>(lse)))
    }

    fn nsa_gates(branches: [Float<Self>; 3], logits: Float<Self>, bias: Float<Self>) -> Float<Self> {
        let below = branches.each_ref().map(inner::<B, C>);
        let [l, b] = [&logits, &bias].map(inner::<B, C>);
        let y = B::nsa_gates(below.clone(), l.clone(), b.clone());
        let [c, s, w] = &branches;
        enter::<B, C, _, _>([c, s, w, &logits, &bias], y, move |dy| {
            B::nsa_gates_backward(below, l, b, dy)
        })
    }
}
