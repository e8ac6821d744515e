//! Backward passes of NSA's ops.
use super::{NsaBackend, NsaCompressed};
use crate::autodiff::{Gradient, constant, enter};
use crate::{AttentionOutput, AttentionSpec, DocumentBounds, NsaBlocks};
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::TensorMetadata;
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};

/// What every op of NSA keeps of its call.
#[derive(Clone, Debug)]
struct Call<B: Backend> {
    documents: DocumentBounds<B>,
    spec: AttentionSpec,
    blocks: NsaBlocks,
}

fn dims_of<B: Backend>(x: &FloatTensor<B>) -> [usize; 4] {
    x.shape().dims()
}

#[derive(Debug)]
struct BlocksGradient;
impl<B: NsaBackend> Gradient<B, 3> for BlocksGradient {
    type State = (Call<B>, [usize; 4]);
    fn gradients((call, dims): Self::State, dy: FloatTensor<B>) -> [FloatTensor<B>; 3] {
        B::nsa_blocks_backward(dims, &call.documents, call.spec, call.blocks, dy)
    }
}

#[derive(Debug)]
struct MeanPoolGradient;
impl<B: NsaBackend> Gradient<B, 1> for MeanPoolGradient {
    type State = (Call<B>, [usize; 4]);
    fn gradients((call, dims): Self::State, dy: FloatTensor<B>) -> [FloatTensor<B>; 1] {
        let Call {
            documents,
            spec,
            blocks,
        } = call;
        [B::nsa_mean_pool_backward(
            dims, &documents, spec, blocks, dy,
        )]
    }
}

#[derive(Clone, Debug)]
struct CompressedState<B: Backend> {
    call: Call<B>,
    qkv: FloatTensor<B>,
    compressed: FloatTensor<B>,
    output: AttentionOutput<B>,
}

#[derive(Debug)]
struct CompressedGradient;
impl<B: NsaBackend> Gradient<B, 2> for CompressedGradient {
    type State = CompressedState<B>;
    fn gradients(state: Self::State, dy: FloatTensor<B>) -> [FloatTensor<B>; 2] {
        let CompressedState {
            call,
            qkv,
            compressed,
            output,
        } = state;
        B::nsa_compressed_attention_backward(
            qkv,
            compressed,
            &call.documents,
            call.spec,
            call.blocks,
            output,
            dy,
        )
    }
}

#[derive(Clone, Debug)]
struct SelectedState<B: Backend> {
    call: Call<B>,
    qkv: FloatTensor<B>,
    block_indices: IntTensor<B>,
    output: AttentionOutput<B>,
}

#[derive(Debug)]
struct SelectedGradient;
impl<B: NsaBackend> Gradient<B, 1> for SelectedGradient {
    type State = SelectedState<B>;
    fn gradients(state: Self::State, dy: FloatTensor<B>) -> [FloatTensor<B>; 1] {
        let SelectedState {
            call,
            qkv,
            block_indices,
            output,
        } = state;
        [B::nsa_selected_attention_backward(
            qkv,
            block_indices,
            &call.documents,
            call.spec,
            call.blocks,
            output,
            dy,
        )]
    }
}

#[derive(Debug)]
struct GatesGradient;
impl<B: NsaBackend> Gradient<B, 5> for GatesGradient {
    type State = ([FloatTensor<B>; 3], FloatTensor<B>, FloatTensor<B>);
    fn gradients((branches, logits, bias): Self::State, dy: FloatTensor<B>) -> [FloatTensor<B>; 5] {
        B::nsa_gates_backward(branches, logits, bias, dy)
    }
}

impl<B: NsaBackend, C: CheckpointStrategy> NsaBackend for Autodiff<B, C> {
    fn nsa_blocks(
        qkv: FloatTensor<Self>,
        positions: [FloatTensor<Self>; 2],
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
    ) -> FloatTensor<Self> {
        let call = Call {
            documents: documents.clone(),
            spec,
            blocks,
        };
        let dims = dims_of::<B>(&qkv.primitive);
        let inner = positions.each_ref().map(|x| x.primitive.clone());
        let y = B::nsa_blocks(qkv.primitive.clone(), inner, documents, spec, blocks);
        let [k, v] = &positions;
        enter::<B, C, BlocksGradient, 3>([&qkv, k, v], (call, dims), y)
    }

    fn nsa_mean_pool(
        qkv: FloatTensor<Self>,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
    ) -> FloatTensor<Self> {
        let call = Call {
            documents: documents.clone(),
            spec,
            blocks,
        };
        let dims = dims_of::<B>(&qkv.primitive);
        let y = B::nsa_mean_pool(qkv.primitive.clone(), documents, spec, blocks);
        enter::<B, C, MeanPoolGradient, 1>([&qkv], (call, dims), y)
    }

    fn nsa_compressed_attention(
        qkv: FloatTensor<Self>,
        compressed: FloatTensor<Self>,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
    ) -> NsaCompressed<Self> {
        let (q, c) = (qkv.primitive.clone(), compressed.primitive.clone());
        let result = B::nsa_compressed_attention(q, c, documents, spec, blocks);
        let state = CompressedState {
            call: Call {
                documents: documents.clone(),
                spec,
                blocks,
            },
            qkv: qkv.primitive.clone(),
            compressed: compressed.primitive.clone(),
            output: result.output.clone(),
        };
        let o = enter::<B, C, CompressedGradient, 2>([&qkv, &compressed], state, result.output.o);
        NsaCompressed {
            output: AttentionOutput {
                o,
                lse: constant::<B, C>(result.output.lse),
                o_rest: None,
            },
            block_indices: result.block_indices,
        }
    }

    fn nsa_selected_attention(
        qkv: FloatTensor<Self>,
        block_indices: IntTensor<Self>,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        blocks: NsaBlocks,
    ) -> AttentionOutput<Self> {
        let output = B::nsa_selected_attention(
            qkv.primitive.clone(),
            block_indices.clone(),
            documents,
            spec,
            blocks,
        );
        let state = SelectedState {
            call: Call {
                documents: documents.clone(),
                spec,
                blocks,
            },
            qkv: qkv.primitive.clone(),
            block_indices,
            output: output.clone(),
        };
        AttentionOutput {
            o: enter::<B, C, SelectedGradient, 1>([&qkv], state, output.o),
            lse: constant::<B, C>(output.lse),
            o_rest: None,
        }
    }

    fn nsa_gates(
        branches: [FloatTensor<Self>; 3],
        logits: FloatTensor<Self>,
        bias: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let inner = branches.each_ref().map(|x| x.primitive.clone());
        let state = (inner, logits.primitive.clone(), bias.primitive.clone());
        let (inner, l, b) = state.clone();
        let y = B::nsa_gates(inner, l, b);
        let [c, s, w] = &branches;
        enter::<B, C, GatesGradient, 5>([c, s, w, &logits, &bias], state, y)
    }
}
