//! Attention over neighbouring keys (dense, windows, additive biases) and under a selector's mask, with the tilings
//! that DMA's and NSA's kernels share.
pub(crate) mod backward;
pub(crate) mod backward_tiling;
pub(crate) mod bias_base;
pub(crate) mod decode;
pub(crate) mod decode_scratch;
pub(crate) mod forward;
pub(crate) mod heads;
pub(crate) mod hopper_tiling;
pub(crate) mod launch;
pub(crate) mod query_shares;
pub(crate) mod sparse_forward;
pub(crate) mod tiling;
