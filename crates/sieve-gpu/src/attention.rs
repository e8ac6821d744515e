//! Attention over consecutive keys (dense, windows, additive biases) and under a selector's mask, with the tilings
//! that DMA's and NSA's kernels share.
pub(crate) mod backward;
mod backward_tiling;
mod bias_base;
mod by_key;
pub(crate) mod decode;
pub(crate) mod decode_scratch;
pub(crate) mod far;
pub(crate) mod forward;
pub(crate) mod heads;
pub(crate) mod hopper_tiling;
mod launch;
pub(crate) mod query_shares;
mod sinks;
mod sparse_backward;
pub(crate) mod sparse_forward;
pub(crate) mod tiling;
mod token;

pub(crate) use backward::{
    AttentionGradients, convert_added_dq, convert_dq, convert_sums, dq_sum_shape, require_gradients, row_stats,
};
pub(crate) use backward_tiling::{BackwardTiling, GradientSet};
pub(crate) use bias_base::{Bias, SeenKeys};
pub use by_key::TileLists;
pub(crate) use by_key::{DqSums, GradientWords, KeyPass, KeySteps, gradient_params};
pub(crate) use decode::{DecodeStep, KvCache, one_token};
pub(crate) use decode_scratch::{DecodeScratch, DecodeTiling, WARP_KEYS};
pub(crate) use far::{FarWords, SinkChunks};
pub(crate) use forward::{AttentionResult, launch_forward, require_scale};
pub(crate) use heads::{Heads, Qkv, ROW_ALIGNMENT, padded_len, token_params};
pub(crate) use hopper_tiling::{
    BACKWARD_BLOCK_Q, BLOCK_KV, HopperTiling, KernelFamily, arriving, backward_maps, head_map,
    hopper_attention_backward_prepare_kernel, hopper_backward_kernel,
};
pub(crate) use launch::PassInputs;
pub(crate) use query_shares::{KeyTiles, QueryShares};
pub(crate) use sieve_core::AttentionShape;
pub(crate) use sparse_forward::{BlockLse, LaunchRows, launch_rows_params, tiling_beside_entries};
pub(crate) use tiling::{
    KeySource, QueryPass, QueryTiling, define_bias, define_head_dims, define_list_queries, list_entries_in_flight,
    query_kernel_names,
};
