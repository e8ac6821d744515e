//! Sliding window attention: the layer and the cache of dense attention, with a window.
use super::{Attention, BuildLayer, MultiHeadAttention};
use crate::{AttentionConfig, WeightInit};
use burn::tensor::backend::Backend;
use sieve_core::ModelShape;
use sieve_core::kinds::SwaShape;

impl BuildLayer for SwaShape {
    fn build<B: Backend>(&self, shape: &ModelShape, init: &mut WeightInit, device: &B::Device) -> Attention<B> {
        Attention::Grouped(MultiHeadAttention::new(shape, Some(self.sliding_window), init, device))
    }
}

impl AttentionConfig {
    /// Attention over the last `window_size` tokens. Panics when [`validate`](Self::validate) fails or the window is 0.
    pub fn sliding_window<B: Backend>(&self, window_size: usize, device: &B::Device) -> MultiHeadAttention<B> {
        assert!(window_size > 0, "a window holds at least the token itself");
        let shape = self.shape(sieve_core::Attention::swa(window_size));
        MultiHeadAttention::new(&shape, Some(window_size), &mut self.weights(), device)
    }
}
