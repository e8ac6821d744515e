//! Backward passes of MLA's ops.
use super::{MlaBackend, MlaSpec};
use crate::autodiff::{Gradient, constant, enter, inner_tables};
use crate::{AttentionOutput, DocumentBounds, RopeTables};
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};

#[derive(Clone, Debug)]
struct PackState<B: Backend> {
    positions: IntTensor<B>,
    rope: RopeTables<B>,
    spec: MlaSpec,
}

#[derive(Debug)]
struct PackGradient;
impl<B: MlaBackend> Gradient<B, 3> for PackGradient {
    type State = PackState<B>;
    fn gradients(state: Self::State, dy: FloatTensor<B>) -> [FloatTensor<B>; 3] {
        B::mla_pack_backward(state.positions, &state.rope, state.spec, dy)
    }
}

#[derive(Clone, Debug)]
struct AttentionState<B: Backend> {
    packed: FloatTensor<B>,
    documents: DocumentBounds<B>,
    spec: MlaSpec,
    output: AttentionOutput<B>,
}

#[derive(Debug)]
struct AttentionGradient;
impl<B: MlaBackend> Gradient<B, 1> for AttentionGradient {
    type State = AttentionState<B>;
    fn gradients(state: Self::State, dy: FloatTensor<B>) -> [FloatTensor<B>; 1] {
        let AttentionState {
            packed,
            documents,
            spec,
            output,
        } = state;
        [B::mla_attention_backward(
            packed, &documents, spec, output, dy,
        )]
    }
}

impl<B: MlaBackend, C: CheckpointStrategy> MlaBackend for Autodiff<B, C> {
    fn mla_pack(
        inputs: [FloatTensor<Self>; 3],
        positions: IntTensor<Self>,
        rope: &RopeTables<Self>,
        spec: MlaSpec,
    ) -> FloatTensor<Self> {
        let state = PackState {
            positions,
            rope: inner_tables(rope),
            spec,
        };
        let inner = inputs.each_ref().map(|x| x.primitive.clone());
        let y = B::mla_pack(inner, state.positions.clone(), &state.rope, spec);
        let [q, kv, k_rope] = &inputs;
        enter::<B, C, PackGradient, 3>([q, kv, k_rope], state, y)
    }

    fn mla_attention(
        packed: FloatTensor<Self>,
        documents: &DocumentBounds<Self>,
        spec: MlaSpec,
    ) -> AttentionOutput<Self> {
        let output = B::mla_attention(packed.primitive.clone(), documents, spec);
        let state = AttentionState {
            packed: packed.primitive.clone(),
            documents: documents.clone(),
            spec,
            output: output.clone(),
        };
        AttentionOutput {
            o: enter::<B, C, AttentionGradient, 1>([&packed], state, output.o),
            lse: constant::<B, C>(output.lse),
            o_rest: None,
        }
    }
}
