//! Which kernels and ops a kind takes.

use super::op::AttentionOp;
use super::sizes::{HeadWidths, KeyReads};
use crate::NsaBlocks;
use crate::model::ModelShape;

/// The kernels and ops of a layer of a kind.
pub trait Launched {
    /// How kernels find the keys that a query reads, one for each launch of attention.
    fn reads(&self) -> &'static [KeyReads];

    /// The ops of a layer that are not the model's common ones, in the order of the forward pass.
    fn ops(&self, layer: &ModelShape) -> &'static [AttentionOp];

    /// KV heads that attention is launched with, in a layer of `[num_heads, num_kv_heads]`: one for each choice of
    /// blocks.
    fn attended_kv_heads(&self, heads: [usize; 2]) -> usize {
        heads[1]
    }

    /// The chosen blocks as attention's kernels read them; `None` for kinds without blocks.
    fn attended_blocks(&self) -> Option<NsaBlocks> {
        None
    }

    /// Why no CUDA kernel takes the kind's blocks for heads of `head_dim` and `group_size` query heads a KV head: the
    /// size that does not fit, and the sizes that kernels take. `None` if kernels take them, or without blocks.
    fn block_gap(&self, _head_dim: usize, _group_size: usize) -> Option<(String, &'static str)> {
        None
    }

    /// Why the attention has no kernel on any GPU, so that its reference would run; `None` if there is a kernel.
    fn gpu_gap(&self, layer: &ModelShape, widths: HeadWidths) -> Option<String> {
        widths.gap(layer.head_dim)
    }
}
