//! Dynamic mask attention (arXiv:2508.02124): scores, the selection, lists of kept keys, attention over them, decoding.
mod attention_backward;
mod attention_forward;
mod backward_lists;
pub(crate) mod border_keys;
pub(crate) mod decode;
pub(crate) mod lists;
pub mod oracle;
pub(crate) mod scores;
pub(crate) mod scores_backward;
pub(crate) mod select;

pub(crate) use attention_backward::{
    ConvertedSums, SumRows, convert_rows, dma_attention_backward_convert_kernel, listed_key_sums,
};
pub(crate) use attention_forward::{listed_attention_forward, listed_bias, listed_source, require_lists};
pub(crate) use backward_lists::{BackwardLists, dma_backward_lists_kernel, with_whole_keys};
pub(crate) use border_keys::{DMA_LAST_KEPT, dma_border_keys_kernels};
pub(crate) use decode::{DmaSlots, dma_decode_kernel, slots_decode};
pub(crate) use lists::{KeyLists, LIST_ALIGNMENT, dma_lists_kernel, dma_lists_prefix_kernel};
pub(crate) use scores::{ScoreBias, dma_scores_kernel, require_kv_heads};
pub(crate) use scores_backward::dma_scores_backward_kernel;
pub(crate) use select::{
    PREFIX_BLOCK, Selection, dma_select_kernels, require_local_window, require_sequence, survivors_shape,
};
