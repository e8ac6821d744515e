//! The CPU runs the references of the choice.
use super::IndexGradientCall;
use super::reference;
pub(crate) use super::reference::choose_key_blocks;
use crate::DocumentBounds;
use burn_flex::{Flex, FlexTensor};

/// `None`: the CPU has no fused kernel, and the caller uses the attention kernels.
pub(crate) fn index_gradient(
    _packed: [FlexTensor; 2],
    _chosen: FlexTensor,
    _call: &IndexGradientCall<'_, Flex>,
) -> Option<FlexTensor> {
    None
}

/// The reference, which is not counted as one: the CPU has no other way. `counts` `None`: all indices of a query count.
pub(crate) fn selected_blocks(
    indices: FlexTensor,
    counts: Option<FlexTensor>,
    documents: &DocumentBounds<Flex>,
    block: usize,
) -> FlexTensor {
    reference::selected_blocks::<Flex>(indices, counts, documents, block)
}
