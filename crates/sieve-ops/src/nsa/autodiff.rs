//! NSA's ops as nodes of the autodiff graph.
use super::backend::{NsaBackend, NsaCall, NsaCompressed, NsaGradients, NsaSelected};
use crate::attention::AttentionOutput;
use crate::device::autodiff::{Gradient, constant, enter, inner};
use crate::tensors::{Float, Ints};
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::TensorMetadata;
use burn::tensor::backend::Backend;

#[derive(Clone, Debug)]
struct Blocks<B: Backend> {
    dims: [usize; 4],
    call: NsaCall<B>,
}

impl<B: NsaGradients> Gradient<B, 3> for Blocks<B> {
    fn gradients(self, dy: Float<B>) -> [Float<B>; 3] {
        B::nsa_blocks_backward(self.dims, &self.call, dy)
    }
}

#[derive(Clone, Debug)]
struct MeanPool<B: Backend> {
    dims: [usize; 4],
    call: NsaCall<B>,
}

impl<B: NsaGradients> Gradient<B, 1> for MeanPool<B> {
    fn gradients(self, dy: Float<B>) -> [Float<B>; 1] {
        [B::nsa_mean_pool_backward(self.dims, &self.call, dy)]
    }
}

#[derive(Clone, Debug)]
struct Compressed<B: Backend> {
    call: NsaCall<B>,
    qkv: Float<B>,
    compressed: Float<B>,
    output: AttentionOutput<B>,
}

impl<B: NsaGradients> Gradient<B, 2> for Compressed<B> {
    fn gradients(self, dy: Float<B>) -> [Float<B>; 2] {
        let (qkv, compressed) = (self.qkv, self.compressed);
        B::nsa_compressed_attention_backward(qkv, compressed, &self.call, self.output, dy)
    }
}

#[derive(Clone, Debug)]
struct Selected<B: Backend> {
    call: NsaCall<B>,
    qkv: Float<B>,
    block_indices: Ints<B>,
    selected: NsaSelected<B>,
}

impl<B: NsaGradients> Gradient<B, 1> for Selected<B> {
    fn gradients(self, dy: Float<B>) -> [Float<B>; 1] {
        let (qkv, indices) = (self.qkv, self.block_indices);
        [B::nsa_selected_attention_backward(
            qkv,
            indices,
            &self.call,
            self.selected,
            dy,
        )]
    }
}

#[derive(Clone, Debug)]
struct Gates<B: Backend> {
    branches: [Float<B>; 3],
    logits: Float<B>,
    bias: Float<B>,
}

impl<B: NsaGradients> Gradient<B, 5> for Gates<B> {
    fn gradients(self, dy: Float<B>) -> [Float<B>; 5] {
        B::nsa_gates_backward(self.branches, self.logits, self.bias, dy)
    }
}

impl<B: NsaGradients, C: CheckpointStrategy> NsaBackend for Autodiff<B, C> {
    fn nsa_blocks(qkv: Float<Self>, [k, v]: [Float<Self>; 2], call: &NsaCall<Self>) -> Float<Self> {
        let (dims, call) = (qkv.primitive.shape().dims(), call.on::<B>());
        let y = B::nsa_blocks(qkv.primitive.clone(), [&k, &v].map(inner::<B, C>), &call);
        enter::<B, C, _, 3>([&qkv, &k, &v], Blocks { dims, call }, y)
    }

    fn nsa_mean_pool(qkv: Float<Self>, call: &NsaCall<Self>) -> Float<Self> {
        let (dims, call) = (qkv.primitive.shape().dims(), call.on::<B>());
        let y = B::nsa_mean_pool(qkv.primitive.clone(), &call);
        enter::<B, C, _, 1>([&qkv], MeanPool { dims, call }, y)
    }

    fn nsa_compressed_attention(
        qkv: Float<Self>,
        compressed: Float<Self>,
        call: &NsaCall<Self>,
    ) -> NsaCompressed<Self> {
        let call = call.on::<B>();
        let [q, c] = [&qkv, &compressed].map(inner::<B, C>);
        let NsaCompressed { output, block_indices } = B::nsa_compressed_attention(q.clone(), c.clone(), &call);
        let kept = Compressed {
            call,
            qkv: q,
            compressed: c,
            output: output.clone(),
        };
        NsaCompressed {
            output: AttentionOutput {
                o: enter::<B, C, _, 2>([&qkv, &compressed], kept, output.o),
                lse: constant::<B, C>(output.lse),
                o_rest: None,
                base: None,
            },
            block_indices,
        }
    }

    fn nsa_selected_attention(qkv: Float<Self>, block_indices: Ints<Self>, call: &NsaCall<Self>) -> NsaSelected<Self> {
        let call = call.on::<B>();
        let selected = B::nsa_selected_attention(qkv.primitive.clone(), block_indices.clone(), &call);
        let output = selected.output.clone();
        let kept = Selected {
            call,
            qkv: qkv.primitive.clone(),
            block_indices,
            selected,
        };
        NsaSelected::without_lists(AttentionOutput {
            o: enter::<B, C, _, 1>([&qkv], kept, output.o),
            lse: constant::<B, C>(output.lse),
            o_rest: None,
            base: None,
        })
    }

    fn nsa_gates(branches: [Float<Self>; 3], logits: Float<Self>, bias: Float<Self>) -> Float<Self> {
        let kept = Gates {
            branches: branches.each_ref().map(inner::<B, C>),
            logits: logits.primitive.clone(),
            bias: bias.primitive.clone(),
        };
        let Gates {
            branches: inner,
            logits: l,
            bias: b,
        } = kept.clone();
        let y = B::nsa_gates(inner, l, b);
        let [c, s, w] = &branches;
        enter::<B, C, _, 5>([c, s, w, &logits, &bias], kept, y)
    }
}
