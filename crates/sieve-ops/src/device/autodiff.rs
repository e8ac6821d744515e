//! One node of Burn's autodiff graph for each op.
use crate::tensors::Float;
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::backend::{AutodiffBackend, Backend};
use std::fmt::Debug;
use std::marker::PhantomData;

/// What the forward pass of an op with `N` differentiable inputs keeps, and its backward pass.
pub(crate) trait Gradient<B: Backend, const N: usize>: Clone + Debug + Send + 'static {
    /// Gradients of the inputs from the gradient of the output.
    fn gradients(self, dy: Float<B>) -> [Float<B>; N];
}

/// A graph node for a [`Gradient`].
#[derive(Debug)]
struct Node<G>(PhantomData<G>);

impl<B: Backend, G: Gradient<B, N>, const N: usize> Backward<B, N> for Node<G> {
    type State = G;

    fn backward(self, ops: Ops<G, N>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let gradients = ops.state.gradients(dy);
        for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, gradient);
            }
        }
    }
}

pub(crate) type Tracked<B, C> = Float<Autodiff<B, C>>;

/// Enters `output` into the graph as a function of `parents`; `kept` stays only when one of them needs a gradient.
pub(crate) fn enter<B: Backend, C: CheckpointStrategy, G: Gradient<B, N>, const N: usize>(
    parents: [&Tracked<B, C>; N],
    kept: G,
    output: Float<B>,
) -> Tracked<B, C> {
    let nodes = parents.map(|parent| parent.node.clone());
    match Node::<G>(PhantomData).prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(kept, output),
        OpsKind::UnTracked(prep) => prep.finish(output),
    }
}

/// A value without gradient.
pub(crate) fn constant<B: Backend, C: CheckpointStrategy>(value: Float<B>) -> Tracked<B, C> {
    <Autodiff<B, C> as AutodiffBackend>::from_inner(value)
}

/// The tensor below the graph.
pub(crate) fn inner<B: Backend, C: CheckpointStrategy>(x: &Tracked<B, C>) -> Float<B> {
    x.primitive.clone()
}
