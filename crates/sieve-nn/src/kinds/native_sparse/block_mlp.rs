//! The compression MLP of NSA: computes one key, or one value, from the keys or values of a block.
use crate::{Linear, WeightInit};
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn::tensor::activation::relu;
use burn::tensor::backend::Backend;
use sieve_ops::SieveBackend;

/// `phi(block) = W_2 relu(W_1 flatten(block + positions))` (arXiv:2502.11089, eq. 7), shared by all heads.
#[derive(Module, Debug)]
pub struct BlockMlp<B: Backend> {
    /// Learned vector per position inside a block, `[compress_block_size, head_dim]`.
    pub positions: Param<Tensor<B, 2>>,
    /// First matrix W_1, `[hidden, compress_block_size * head_dim]`.
    pub up_proj: Linear<B>,
    /// Second matrix W_2, `[head_dim, hidden]`.
    pub down_proj: Linear<B>,
}

impl<B: Backend> BlockMlp<B> {
    /// An MLP with normal random weights from `init`.
    pub fn new(block_size: usize, head_dim: usize, hidden: usize, init: &mut WeightInit, device: &B::Device) -> Self {
        Self {
            positions: init.normal([block_size, head_dim], device),
            up_proj: Linear::new(block_size * head_dim, hidden, init, device),
            down_proj: Linear::new(hidden, head_dim, init, device),
        }
    }
}

impl<B: SieveBackend> BlockMlp<B> {
    /// From `[rows, block_size * head_dim]`, to which the positions are already added, to `[rows, head_dim]`.
    pub fn forward(&self, blocks: Tensor<B, 2>) -> Tensor<B, 2> {
        self.down_proj.forward(relu(self.up_proj.forward(blocks)))
    }

    /// As [`forward`](Self::forward), in the order of sums in which a decoding step compresses a block.
    pub fn forward_in_order(&self, blocks: Tensor<B, 2>) -> Tensor<B, 2> {
        self.down_proj.forward_in_order(relu(self.up_proj.forward_in_order(blocks)))
    }
}
