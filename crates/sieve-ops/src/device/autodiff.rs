//! One node of Burn's autodiff graph for each op.
use crate::backend::{BackwardPass, DeviceBackend, SieveBackend};
use crate::tensors::Float;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use std::fmt::{self, Debug};
use std::marker::PhantomData;

/// State of a graph node: the op's backward pass, a closure that owns what the forward pass kept.
#[derive(Clone)]
struct Kept<F>(F);

/// A graph node whose backward pass is the closure in its state.
struct Node<F>(PhantomData<F>);

impl<F> Debug for Kept<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Kept")
    }
}

impl<F> Debug for Node<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Node")
    }
}

impl<B: Backend, F: BackwardPass<B, N>, const N: usize> Backward<B, N> for Node<F> {
    type State = Kept<F>;

    fn backward(self, ops: Ops<Kept<F>, N>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let gradients = (ops.state.0)(dy);
        for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
            if let Some(parent) = parent {
                grads.register::<B>(parent.id, gradient);
            }
        }
    }
}

impl<D: DeviceBackend, C: CheckpointStrategy> SieveBackend for Autodiff<D, C> {
    type Inner = D;
    const HAS_GRAPH: bool = true;

    fn value(x: Float<Self>) -> Float<D> {
        x.primitive
    }

    fn constant(value: Float<D>) -> Float<Self> {
        <Self as AutodiffBackend>::from_inner(value)
    }

    fn is_tracked(x: &Float<Self>) -> bool {
        x.is_tracked()
    }

    /// Adds the node only if a parent needs a gradient.
    fn node<F: BackwardPass<D, N>, const N: usize>(
        parents: [&Float<Self>; N],
        output: Float<D>,
        backward: F,
    ) -> Float<Self> {
        let nodes = parents.map(|parent| parent.node.clone());
        match Node::<F>(PhantomData).prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(Kept(backward), output),
            OpsKind::UnTracked(prep) => prep.finish(output),
        }
    }
}
