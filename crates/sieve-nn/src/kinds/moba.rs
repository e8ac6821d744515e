//! MoBA (arXiv:2502.13189): queries choose blocks by the mean of each block's keys, without parameters of their own.
use super::{Attention, BuildLayer, ChosenBlocksAttention};
use crate::WeightInit;
use burn::tensor::backend::Backend;
use sieve_core::{MobaShape, ModelShape};

impl BuildLayer for MobaShape {
    fn build<B: Backend>(&self, shape: &ModelShape, init: &mut WeightInit, device: &B::Device) -> Attention<B> {
        Attention::Chosen(ChosenBlocksAttention::new(shape, self.choice(), init, device))
    }
}
