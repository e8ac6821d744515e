//! Backward passes under Burn's autodiff: each op is one node of the graph.
use crate::attention_layer::{
    self, AttentionLayerState, RecentLayerGradient, SelectedLayerGradient,
};
use crate::dma::{self, DmaState};
use crate::feed_forward::{self, FeedForwardGradient, FeedForwardState};
use crate::snapshot::Snapshot;
use crate::{
    AdamWStep, AdamWTensors, AttentionLayerCall, AttentionLayerWeights, AttentionOutput,
    AttentionSpec, DmaForward, DmaSelection, DmaSpec, DocumentBounds, FeedForwardWeights, Residual,
    RopeTables, SieveBackend,
};
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::TensorMetadata;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::{FloatTensor, IntTensor};
use std::fmt::Debug;
use std::marker::PhantomData;

/// The gradient of an op with `N` differentiable inputs.
pub(crate) trait Gradient<B: Backend, const N: usize>: Debug + Send + 'static {
    /// What the forward pass keeps.
    type State: Clone + Debug + Send + 'static;

    /// Gradients of the inputs from the gradient of the output.
    fn gradients(state: Self::State, dy: FloatTensor<B>) -> [FloatTensor<B>; N];
}

/// A graph node for a [`Gradient`].
#[derive(Debug)]
struct Node<G>(PhantomData<G>);

impl<B: Backend, G: Gradient<B, N>, const N: usize> Backward<B, N> for Node<G> {
    type State = G::State;

    fn backward(
        self,
        ops: Ops<Self::State, N>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let dy = grads.consume::<B>(&ops.node);
        let gradients = G::gradients(ops.state, dy);
        for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, gradient);
            }
        }
    }
}

pub(crate) type Tracked<B, C> = FloatTensor<Autodiff<B, C>>;

/// Enters `output` into the graph as a function of `parents`; `state` is kept only when one of them needs a gradient.
pub(crate) fn enter<B: Backend, C: CheckpointStrategy, G: Gradient<B, N>, const N: usize>(
    parents: [&Tracked<B, C>; N],
    state: G::State,
    output: FloatTensor<B>,
) -> Tracked<B, C> {
    let nodes = parents.map(|parent| parent.node.clone());
    match Node::<G>(PhantomData)
        .prepare::<C>(nodes)
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => prep.finish(state, output),
        OpsKind::UnTracked(prep) => prep.finish(output),
    }
}

/// A value without gradient.
pub(crate) fn constant<B: Backend, C: CheckpointStrategy>(value: FloatTensor<B>) -> Tracked<B, C> {
    <Autodiff<B, C> as AutodiffBackend>::from_inner(value)
}

pub(crate) fn inner_tables<B: Backend, C: CheckpointStrategy>(
    rope: &RopeTables<Autodiff<B, C>>,
) -> RopeTables<B> {
    RopeTables {
        cos: rope.cos.primitive.clone(),
        sin: rope.sin.primitive.clone(),
    }
}

#[derive(Debug)]
struct LinearGradient;
impl<B: SieveBackend> Gradient<B, 2> for LinearGradient {
    type State = (FloatTensor<B>, FloatTensor<B>);
    fn gradients((x, weight): Self::State, dy: FloatTensor<B>) -> [FloatTensor<B>; 2] {
        B::linear_nt_backward(x, weight, dy).into()
    }
}

#[derive(Debug)]
struct LinearAddGradient;
impl<B: SieveBackend> Gradient<B, 3> for LinearAddGradient {
    type State = (FloatTensor<B>, FloatTensor<B>);
    fn gradients((x, weight): Self::State, dy: FloatTensor<B>) -> [FloatTensor<B>; 3] {
        let (dx, dweight) = B::linear_nt_backward(x, weight, dy.clone());
        [dx, dweight, dy]
    }
}

#[derive(Debug)]
struct EmbeddingGradient;
impl<B: SieveBackend> Gradient<B, 1> for EmbeddingGradient {
    type State = (IntTensor<B>, usize);
    fn gradients((ids, vocab_size): Self::State, dy: FloatTensor<B>) -> [FloatTensor<B>; 1] {
        [B::embedding_rows_backward(dy, ids, vocab_size)]
    }
}

#[derive(Debug)]
struct RmsNormGradient;
impl<B: SieveBackend> Gradient<B, 2> for RmsNormGradient {
    type State = (FloatTensor<B>, FloatTensor<B>, f64);
    fn gradients((x, weight, epsilon): Self::State, dy: FloatTensor<B>) -> [FloatTensor<B>; 2] {
        B::rms_norm_backward(x, weight, epsilon, dy).into()
    }
}

#[derive(Clone, Debug)]
struct QkNormRopeState<B: Backend> {
    qkv: FloatTensor<B>,
    q_weight: FloatTensor<B>,
    k_weight: FloatTensor<B>,
    positions: IntTensor<B>,
    rope: RopeTables<B>,
    num_kv_heads: usize,
    epsilon: f64,
}

#[derive(Debug)]
struct QkNormRopeGradient;
impl<B: SieveBackend> Gradient<B, 3> for QkNormRopeGradient {
    type State = QkNormRopeState<B>;
    fn gradients(state: Self::State, dy: FloatTensor<B>) -> [FloatTensor<B>; 3] {
        B::qk_norm_rope_backward(
            state.qkv,
            state.q_weight,
            state.k_weight,
            state.positions,
            &state.rope,
            state.num_kv_heads,
            state.epsilon,
            dy,
        )
        .into()
    }
}

#[derive(Debug)]
struct SwigluGradient;
impl<B: SieveBackend> Gradient<B, 1> for SwigluGradient {
    type State = FloatTensor<B>;
    fn gradients(gate_up: Self::State, dy: FloatTensor<B>) -> [FloatTensor<B>; 1] {
        [B::swiglu_backward(gate_up, dy)]
    }
}

#[derive(Clone, Debug)]
struct AttentionState<B: Backend> {
    qkv: FloatTensor<B>,
    documents: DocumentBounds<B>,
    spec: AttentionSpec,
    output: AttentionOutput<B>,
}

#[derive(Debug)]
struct AttentionGradient;
impl<B: SieveBackend> Gradient<B, 1> for AttentionGradient {
    type State = AttentionState<B>;
    fn gradients(state: Self::State, dy: FloatTensor<B>) -> [FloatTensor<B>; 1] {
        let AttentionState {
            qkv,
            documents,
            spec,
            output,
        } = state;
        [B::packed_attention_backward(
            qkv, &documents, spec, output, dy,
        )]
    }
}

#[derive(Debug)]
struct DynamicMaskAttentionGradient;
impl<B: SieveBackend> Gradient<B, 3> for DynamicMaskAttentionGradient {
    type State = DmaState<B>;
    fn gradients(state: Self::State, dy: FloatTensor<B>) -> [FloatTensor<B>; 3] {
        dma::backward::<B>(state, dy).into()
    }
}

/// The forward pass has the gradients already; the backward pass scales them.
#[derive(Debug)]
struct LinearCrossEntropyGradient;
impl<B: SieveBackend> Gradient<B, 2> for LinearCrossEntropyGradient {
    type State = (FloatTensor<B>, FloatTensor<B>);
    fn gradients((dh, dweight): Self::State, dy: FloatTensor<B>) -> [FloatTensor<B>; 2] {
        [dh, dweight].map(|gradient| B::scaled(gradient, dy.clone()))
    }
}

#[derive(Debug)]
struct SeedGradient;
impl<B: Backend> Gradient<B, 1> for SeedGradient {
    type State = FloatTensor<B>;
    fn gradients(dy: Self::State, _ignored: FloatTensor<B>) -> [FloatTensor<B>; 1] {
        [dy]
    }
}

impl<B: SieveBackend, C: CheckpointStrategy> SieveBackend for Autodiff<B, C> {
    fn linear_nt(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        let y = B::linear_nt(x.primitive.clone(), weight.primitive.clone());
        let state = (x.primitive.clone(), weight.primitive.clone());
        enter::<B, C, LinearGradient, 2>([&x, &weight], state, y)
    }

    fn linear_nt_add(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        residual: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let state = (x.primitive.clone(), weight.primitive.clone());
        let y = B::linear_nt_add(
            x.primitive.clone(),
            weight.primitive.clone(),
            residual.primitive.clone(),
        );
        enter::<B, C, LinearAddGradient, 3>([&x, &weight, &residual], state, y)
    }

    fn embedding_rows(weight: FloatTensor<Self>, ids: IntTensor<Self>) -> FloatTensor<Self> {
        let vocab_size = weight.primitive.shape()[0];
        let y = B::embedding_rows(weight.primitive.clone(), ids.clone());
        enter::<B, C, EmbeddingGradient, 1>([&weight], (ids, vocab_size), y)
    }

    fn rms_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let y = B::rms_norm(x.primitive.clone(), weight.primitive.clone(), epsilon);
        let state = (x.primitive.clone(), weight.primitive.clone(), epsilon);
        enter::<B, C, RmsNormGradient, 2>([&x, &weight], state, y)
    }

    fn qk_norm_rope(
        qkv: FloatTensor<Self>,
        q_weight: FloatTensor<Self>,
        k_weight: FloatTensor<Self>,
        positions: IntTensor<Self>,
        rope: &RopeTables<Self>,
        num_kv_heads: usize,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        let state = QkNormRopeState {
            qkv: qkv.primitive.clone(),
            q_weight: q_weight.primitive.clone(),
            k_weight: k_weight.primitive.clone(),
            positions,
            rope: inner_tables(rope),
            num_kv_heads,
            epsilon,
        };
        let kept = state.clone();
        let y = B::qk_norm_rope(
            state.qkv,
            state.q_weight,
            state.k_weight,
            state.positions,
            &state.rope,
            num_kv_heads,
            epsilon,
        );
        enter::<B, C, QkNormRopeGradient, 3>([&qkv, &q_weight, &k_weight], kept, y)
    }

    fn swiglu(gate_up: FloatTensor<Self>) -> FloatTensor<Self> {
        let y = B::swiglu(gate_up.primitive.clone());
        enter::<B, C, SwigluGradient, 1>([&gate_up], gate_up.primitive.clone(), y)
    }

    fn feed_forward(
        x: FloatTensor<Self>,
        weights: FeedForwardWeights<Self>,
        residual: Residual,
    ) -> FloatTensor<Self> {
        let inner = FeedForwardWeights {
            norm: weights.norm.primitive.clone(),
            gate_up: weights.gate_up.primitive.clone(),
            down: weights.down.primitive.clone(),
            epsilon: weights.epsilon,
        };
        let (gate_up, y) = feed_forward::forward::<B>(x.primitive.clone(), inner.clone(), residual);
        let state = FeedForwardState {
            x: x.primitive.clone(),
            gate_up,
            weights: inner,
            residual,
        };
        let parents = [&x, &weights.norm, &weights.gate_up, &weights.down];
        enter::<B, C, FeedForwardGradient, 4>(parents, state, y)
    }

    fn attention_layer(
        x: FloatTensor<Self>,
        weights: AttentionLayerWeights<Self>,
        call: AttentionLayerCall<Self>,
    ) -> (FloatTensor<Self>, Option<IntTensor<Self>>) {
        let inner = AttentionLayerWeights {
            norm: weights.norm.primitive.clone(),
            qkv: weights.qkv.primitive.clone(),
            q_norm: weights.q_norm.primitive.clone(),
            k_norm: weights.k_norm.primitive.clone(),
            o: weights.o.primitive.clone(),
            dma: (weights.dma.as_ref())
                .map(|(w_dt, a, spec)| (w_dt.primitive.clone(), a.primitive.clone(), *spec)),
            epsilon: weights.epsilon,
            qk_epsilon: weights.qk_epsilon,
        };
        let call = AttentionLayerCall {
            positions: call.positions,
            rope: inner_tables(&call.rope),
            documents: call.documents,
            spec: call.spec,
            residual: call.residual,
        };
        let forward = attention_layer::forward::<B>(x.primitive.clone(), inner.clone(), &call);
        let expire = forward.attended.expire();
        let state = AttentionLayerState {
            x: x.primitive.clone(),
            qkv: forward.qkv,
            attended: forward.attended,
            weights: inner,
            call,
        };
        let AttentionLayerWeights {
            norm,
            qkv,
            q_norm,
            k_norm,
            o,
            dma,
            ..
        } = &weights;
        let y = match dma {
            None => {
                let parents = [&x, norm, qkv, q_norm, k_norm, o];
                enter::<B, C, RecentLayerGradient, 6>(parents, state, forward.y)
            }
            Some((w_dt, a, _)) => {
                let parents = [&x, norm, qkv, q_norm, k_norm, o, w_dt, a];
                enter::<B, C, SelectedLayerGradient, 8>(parents, state, forward.y)
            }
        };
        (y, expire)
    }

    fn packed_attention(
        qkv: FloatTensor<Self>,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
    ) -> AttentionOutput<Self> {
        let output = B::packed_attention(qkv.primitive.clone(), documents, spec);
        let state = AttentionState {
            qkv: qkv.primitive.clone(),
            documents: documents.clone(),
            spec,
            output: output.clone(),
        };
        let o = enter::<B, C, AttentionGradient, 1>([&qkv], state, output.o);
        AttentionOutput {
            o,
            lse: constant::<B, C>(output.lse),
            o_rest: None,
        }
    }

    fn dynamic_mask_attention(
        qkv: FloatTensor<Self>,
        w_dt: FloatTensor<Self>,
        a: FloatTensor<Self>,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        dma: DmaSpec,
    ) -> DmaForward<Self> {
        let forward = B::dynamic_mask_attention(
            qkv.primitive.clone(),
            w_dt.primitive.clone(),
            a.primitive.clone(),
            documents,
            spec,
            dma,
        );
        let state = DmaState {
            qkv: qkv.primitive.clone(),
            w_dt: w_dt.primitive.clone(),
            a: a.primitive.clone(),
            documents: documents.clone(),
            spec,
            dma,
            forward: forward.clone(),
        };
        let DmaForward {
            output,
            selection,
            z,
        } = forward;
        let o = enter::<B, C, DynamicMaskAttentionGradient, 3>([&qkv, &w_dt, &a], state, output.o);
        DmaForward {
            output: AttentionOutput {
                o,
                lse: constant::<B, C>(output.lse),
                o_rest: None,
            },
            selection: DmaSelection {
                expire: selection.expire,
                lists: selection.lists,
            },
            z: constant::<B, C>(z),
        }
    }

    fn dma_select(
        z: FloatTensor<Self>,
        documents: &DocumentBounds<Self>,
        keep_window_size: usize,
    ) -> DmaSelection<Self> {
        let selection = B::dma_select(z.primitive, documents, keep_window_size);
        DmaSelection {
            expire: selection.expire,
            lists: selection.lists,
        }
    }

    fn token_losses(
        h: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        labels: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        constant::<B, C>(B::token_losses(h.primitive, weight.primitive, labels))
    }

    fn linear_cross_entropy(
        h: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        labels: IntTensor<Self>,
        z_loss: f64,
    ) -> FloatTensor<Self> {
        if !h.is_tracked() && !weight.is_tracked() {
            let loss = B::linear_cross_entropy(h.primitive, weight.primitive, labels, z_loss);
            return constant::<B, C>(loss);
        }
        let (loss, dh, dweight) = B::linear_cross_entropy_with_gradients(
            h.primitive.clone(),
            weight.primitive.clone(),
            labels,
            z_loss,
        );
        enter::<B, C, LinearCrossEntropyGradient, 2>([&h, &weight], (dh, dweight), loss)
    }

    fn seed_gradient(y: FloatTensor<Self>, dy: FloatTensor<Self>) -> FloatTensor<Self> {
        let zero = B::seed_gradient(y.primitive.clone(), dy.primitive.clone());
        enter::<B, C, SeedGradient, 1>([&y], dy.primitive, zero)
    }

    fn sum_of_squares(x: FloatTensor<Self>) -> FloatTensor<Self> {
        constant::<B, C>(B::sum_of_squares(x.primitive))
    }

    fn global_norm(tensors: Vec<FloatTensor<Self>>) -> FloatTensor<Self> {
        let tensors = tensors.into_iter().map(|x| x.primitive).collect();
        constant::<B, C>(B::global_norm(tensors))
    }

    fn split_master(master: FloatTensor<Self>) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (leaf, rest) = B::split_master(master.primitive);
        (constant::<B, C>(leaf), constant::<B, C>(rest))
    }

    fn snapshot(tensor: FloatTensor<Self>) -> Snapshot {
        B::snapshot(tensor.primitive)
    }

    fn snapshot_room(device: &Self::Device) -> u64 {
        B::snapshot_room(device)
    }

    fn join_master(leaf: FloatTensor<Self>, rest: FloatTensor<Self>) -> FloatTensor<Self> {
        constant::<B, C>(B::join_master(leaf.primitive, rest.primitive))
    }

    fn adamw_step(
        tensors: AdamWTensors<Self>,
        grad: FloatTensor<Self>,
        grad_scale: FloatTensor<Self>,
        step: AdamWStep,
    ) -> AdamWTensors<Self> {
        let inner = AdamWTensors {
            param: tensors.param.primitive,
            leaf: tensors.leaf.map(|leaf| leaf.primitive),
            exp_avg: tensors.exp_avg.primitive,
            exp_avg_sq: tensors.exp_avg_sq.primitive,
        };
        let next = B::adamw_step(inner, grad.primitive, grad_scale.primitive, step);
        AdamWTensors {
            param: constant::<B, C>(next.param),
            leaf: next.leaf.map(constant::<B, C>),
            exp_avg: constant::<B, C>(next.exp_avg),
            exp_avg_sq: constant::<B, C>(next.exp_avg_sq),
        }
    }
}
