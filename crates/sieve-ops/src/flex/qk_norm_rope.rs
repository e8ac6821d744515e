//! The arguments of q/k-norm with RoPE.
use super::{contiguous, floats, ints};
use crate::RopeTables;
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};

/// The arguments of q/k-norm with RoPE, contiguous and owned.
pub(super) struct QkNormRope {
    pub(super) q_weight: FlexTensor,
    pub(super) k_weight: FlexTensor,
    cos: FlexTensor,
    sin: FlexTensor,
    start: Vec<i32>,
    num_kv_heads: usize,
    epsilon: f64,
}

impl QkNormRope {
    pub(super) fn new(
        [q_weight, k_weight, positions]: [FlexTensor; 3],
        rope: &RopeTables<Flex>,
        num_kv_heads: usize,
        epsilon: f64,
    ) -> Self {
        let seq_len = positions.shape()[1];
        // The kernel counts positions from a document's start; any position is a start for some column.
        let start = ints(&contiguous(positions))
            .iter()
            .enumerate()
            .map(|(token, &position)| (token % seq_len) as i32 - position)
            .collect();
        Self {
            q_weight: contiguous(q_weight),
            k_weight: contiguous(k_weight),
            cos: contiguous(rope.cos.clone()),
            sin: contiguous(rope.sin.clone()),
            start,
            num_kv_heads,
            epsilon,
        }
    }

    pub(super) fn op(&self, qkv: &FlexTensor) -> sieve_cpu::QkNormRope<'_> {
        let shape = qkv.shape();
        sieve_cpu::QkNormRope {
            batch: shape[0],
            seq_len: shape[1],
            num_heads: shape[2] - 2 * self.num_kv_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim: shape[3],
            q_weight: floats(&self.q_weight),
            k_weight: floats(&self.k_weight),
            eps: self.epsilon as f32,
            cos: floats(&self.cos),
            sin: floats(&self.sin),
            position_offset: 0,
        }
    }

    /// Only the starts are read by the kernel.
    pub(super) fn documents(&self) -> sieve_cpu::Documents<'_> {
        sieve_cpu::Documents {
            start: &self.start,
            end: &self.start,
        }
    }
}
