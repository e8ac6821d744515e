//! Gradients of indexers between blocks: layers that read a choice add theirs to the indexer that made it.
use crate::GradientBuffer;
use burn::tensor::Tensor;
use sieve_nn::{HandedIndex, IndexTensors, Qwen3};
use sieve_ops::{TrainBackend, seed_gradient};

/// The ends of a block's graph at indexers: at an earlier one's tensors, which are given, and at its own, which it
/// made.
pub(super) struct IndexGraph<B: TrainBackend>(pub(super) HandedIndex<B>);

impl<B: TrainBackend> IndexGraph<B> {
    /// The seed of the block's backward pass with the gradients that later layers have for its own indexer, which are
    /// taken out of `of_index`.
    pub(super) fn seeded(
        &self,
        seed: Tensor<B, 1>,
        of_index: &mut Option<IndexTensors<B::InnerBackend>>,
    ) -> Tensor<B, 1> {
        let Some((made, gradient)) = self.0.made.as_ref().zip(of_index.as_ref()) else {
            return seed;
        };
        let mut seed = seed + seed_gradient(made.packed.clone(), Tensor::from_inner(gradient.packed.clone()));
        if let Some((keys, gradient)) = made.block_keys.as_ref().zip(gradient.block_keys.as_ref()) {
            seed = seed + seed_gradient(keys.clone(), Tensor::from_inner(gradient.clone()));
        }
        *of_index = None;
        seed
    }

    /// Adds what the block's backward pass computed for the earlier indexer to `of_index`.
    pub(super) fn collect(&self, computed: &mut B::Gradients, of_index: &mut Option<IndexTensors<B::InnerBackend>>) {
        let Some(given) = &self.0.given else {
            return;
        };
        // None in a layer that does not read the choice.
        let Some(packed) = given.packed.grad_remove(computed) else {
            return;
        };
        let block_keys = given.block_keys.as_ref().and_then(|keys| keys.grad_remove(computed));
        *of_index = Some(match of_index.take() {
            None => IndexTensors { packed, block_keys },
            Some(sum) => IndexTensors {
                packed: sum.packed + packed,
                block_keys: sum.block_keys.zip(block_keys).map(|(sum, keys)| sum + keys),
            },
        });
    }
}

/// The backward pass of an indexer that is trained alone: `outputs` are of attention in the layers that read its
/// choice, its own, `layer_idx`, the first.
pub(super) fn learn<B: TrainBackend>(
    model: &Qwen3<B>,
    (layer_idx, outputs): (usize, Vec<Tensor<B, 4>>),
    gradients: &mut GradientBuffer<B>,
) {
    let seeds = outputs.into_iter().map(|o| seed_gradient(o.clone(), o.zeros_like()));
    if let Some(seed) = seeds.reduce(|sum, seed| sum + seed) {
        gradients.collect(&model.layers[layer_idx], &mut seed.backward());
    }
}
