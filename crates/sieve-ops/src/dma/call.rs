//! Calls of dynamic mask attention, its layer and its selection.
use crate::tensors::{Float, Ints};
use crate::{AttentionCall, AttentionSpec};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use sieve_core::{DmaShape, KeyOrder};

/// Result of `dma_select`: the mask, and in which form the device's kernels read it.
#[derive(Clone, Debug)]
pub struct DmaSelection<B: Backend> {
    /// First query that no longer sees the key, i32 `[batch, num_kv_heads, seq_len]`: query i sees key j of its
    /// document if `j <= i < expire[j]`.
    pub expire: Ints<B>,
    /// The form of the mask that kernels read.
    pub keys: DmaKeys<B>,
}

/// The form in which a device's attention kernels read a selection, forward and backward.
#[derive(Clone, Debug)]
pub enum DmaKeys<B: Backend> {
    /// Only `expire`, as the references and the CPU read it.
    Expire,
    /// Queries see all earlier keys of their document: dense attention with a bias per key.
    All,
    /// Lists of the selected keys by [`KeyOrder::Leaving`].
    Lists(DmaKeyLists<B>),
    /// Lists of the selected keys by [`KeyOrder::Epochs`], for forward passes, and the most keys that a query sees.
    Ordered(DmaKeyLists<B>, usize),
    /// What a forward pass leaves of [`Ordered`](Self::Ordered), whose lists are several times as long as those by
    /// [`KeyOrder::Leaving`]. Backward passes list the keys again.
    Listed(usize),
}

/// The order in which a device's kernels go through the selected keys.
#[derive(Clone, Debug)]
pub enum DmaOrder<B: Backend> {
    /// The order of a pass's policy.
    Of(KeyOrder),
    /// [`KeyOrder::Epochs`] in a row of a cache's keys and new tokens, whose epochs are counted in the text.
    EpochsBehind {
        /// Positions of the row's keys in their text, rising, i32 `[batch, num_kv_heads, seq_len]`.
        positions: Ints<B>,
        /// The first new token of the row.
        first_query: usize,
        /// Its position, which differs from its place in the row by a multiple of [`KeyOrder::EPOCH`].
        first_position: usize,
    },
}

/// Lists of the selected keys for tiles of queries, built by `sieve_kernels::Selection::dma_lists` or
/// `dma_ordered_lists`.
#[derive(Clone, Debug)]
pub struct DmaKeyLists<B: Backend> {
    /// Keys of each tile.
    pub list: Ints<B>,
    /// Keys in each tile's list.
    pub list_len: Ints<B>,
    /// Range of the list that each tile of queries reads.
    pub tile_window: Ints<B>,
    /// Queries that share a list.
    pub queries: usize,
}

impl<B: Backend> DmaSelection<B> {
    /// A mask without lists for kernels.
    pub fn of_expire(expire: Ints<B>) -> Self {
        let keys = DmaKeys::Expire;
        Self { expire, keys }
    }

    /// What a backward pass reads of it.
    pub fn for_backward(self) -> Self {
        let keys = match self.keys {
            DmaKeys::Ordered(_, keep_window_size) => DmaKeys::Listed(keep_window_size),
            keys => keys,
        };
        Self { keys, ..self }
    }
}

/// Operands of DMA's scores.
#[derive(Clone, Debug)]
pub struct DmaScoresCall<B: Backend> {
    /// The packed tensor; only its values are read.
    pub qkv: Float<B>,
    /// Projection W_dt of the values, `[num_kv_heads, num_kv_heads * head_dim]`.
    pub w_dt: Float<B>,
    /// Factor A of each KV head, `[num_kv_heads]`.
    pub a: Float<B>,
    /// Numbers of heads, and their width.
    pub spec: AttentionSpec,
}

/// Operands of attention over selected keys.
#[derive(Clone, Debug)]
pub struct DmaCall<B: Backend> {
    /// The packed tensor.
    pub qkv: Float<B>,
    /// Bias of each key, `[batch, num_kv_heads, seq_len]`.
    pub delta: Float<B>,
    /// The selected keys. They are the whole mask: the window of `attention` is not read.
    pub selection: DmaSelection<B>,
    /// Documents, heads and scale.
    pub attention: AttentionCall<B>,
}

/// Parameters and settings of dynamic mask attention other than the projections.
#[derive(Clone, Debug)]
pub struct DmaLayer<B: Backend> {
    /// Weight from the values of all KV heads to the scores, `[num_kv_heads, num_kv_heads * head_dim]`, stored `[out,
    /// in]` as a linear layer's.
    pub w_dt: Tensor<B, 2>,
    /// Gate of each KV head's scores, `[num_kv_heads]`.
    pub a: Tensor<B, 1>,
    /// Number of selected keys, recency and form of the bias.
    pub spec: DmaShape,
}
