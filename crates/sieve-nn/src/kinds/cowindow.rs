//! CoWindow attention (arXiv:2609.32704): every KV head reads a window, the first tokens and its own band of distances;
//! the layer and the cache of dense attention.
use super::{Attention, BuildLayer, MultiHeadAttention};
use crate::WeightInit;
use burn::tensor::backend::Backend;
use sieve_core::{CowaShape, ModelShape};

impl BuildLayer for CowaShape {
    fn build<B: Backend>(&self, shape: &ModelShape, init: &mut WeightInit, device: &B::Device) -> Attention<B> {
        // A model's learned sinks belong to its other layers: bands have first keys in their place.
        let without_sinks = ModelShape { attention_sinks: false, ..shape.clone() };
        let layer = MultiHeadAttention::new(&without_sinks, Some(self.near_window), init, device);
        Attention::Grouped(layer.with_far(self.far_keys()))
    }
}
