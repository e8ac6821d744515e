//! The CPU runs the reference of the choice.
use super::IndexGradientCall;
pub(crate) use super::reference::choose_key_blocks;
use burn_flex::{Flex, FlexTensor};

/// `None`: the CPU has no fused kernel, and the caller uses the attention kernels.
pub(crate) fn index_gradient(
    _packed: [FlexTensor; 2],
    _chosen: FlexTensor,
    _call: &IndexGradientCall<'_, Flex>,
) -> Option<FlexTensor> {
    None
}
