//! The choice on the CPU is the definition.
use super::IndexGradientCall;
pub(crate) use super::reference::choose_key_blocks;
use burn_flex::{Flex, FlexTensor};

/// None: both terms of the gradient run on the attention kernels.
pub(crate) fn index_gradient(
    _packed: [FlexTensor; 2],
    _chosen: FlexTensor,
    _call: &IndexGradientCall<'_, Flex>,
) -> Option<FlexTensor> {
    None
}
