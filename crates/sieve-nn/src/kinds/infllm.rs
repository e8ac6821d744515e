//! InfLLM-V2 (arXiv:2509.24663): queries choose blocks by pooled keys (means of overlapping runs of keys), without
//! parameters of their own.
use super::{Attention, BuildLayer, ChosenBlocksAttention};
use crate::WeightInit;
use burn::tensor::backend::Backend;
use sieve_core::{InfllmV2Shape, ModelShape};

impl BuildLayer for InfllmV2Shape {
    fn build<B: Backend>(&self, shape: &ModelShape, init: &mut WeightInit, device: &B::Device) -> Attention<B> {
        Attention::Chosen(ChosenBlocksAttention::new(shape, self.choice(), init, device))
    }
}
