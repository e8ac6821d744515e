//! Differentiable ops of Sieve: a plain-Burn reference for each, the fast CPU path, the CUDA path, and their backward
//! passes under Burn's autodiff.
//!
//! Tensors are packed as `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`: queries, keys, values. Every mask is
//! `active(i, j) <=> j <= i < expire[j]`.

mod backend;
mod documents;

mod adamw;
mod attention;
mod attention_layer;
mod decode;
mod dma;
mod embedding;
mod feed_forward;
mod linear;
mod linear_cross_entropy;
mod mla;
mod nsa;
mod qk_norm_rope;
mod rms_norm;
mod seed_gradient;
mod snapshot;
mod swiglu;

mod autodiff;
mod cuda;
mod device;
mod flex;
pub mod reference;

#[cfg(test)]
mod testing;

pub use adamw::{adamw_step, join_master, split_master, sum_of_squares};
pub use attention::attention;
pub use attention_layer::{
    AttentionLayer, AttentionLayerCall, AttentionLayerWeights, DmaLayer, attention_layer,
};
pub use backend::{
    AdamWStep, AdamWTensors, AttentionOutput, AttentionSpec, DMA_SCORE_CLAMP, DmaSelection,
    DocumentBounds, RopeTables, SieveBackend, TrainBackend,
};
pub use cuda::Cuda;
pub use decode::{DmaCache, DmaToken, decode_attention, dma_decode};
pub use device::paths::{OpPath, Place, op_paths, set_sum_order};
pub use dma::{DmaAttention, DmaForward, DmaSpec, dma_bias, dma_select, dynamic_mask_attention};
pub use documents::Documents;
pub use embedding::embedding;
pub use feed_forward::{FeedForward, FeedForwardWeights, Residual, feed_forward};
pub use linear::{linear, linear_add};
pub use linear_cross_entropy::{IGNORE_LABEL, linear_cross_entropy, token_losses};
pub use mla::{MlaBackend, MlaSpec, mla_attention, mla_pack};
pub use nsa::{
    CompressedAttention, NsaBackend, NsaBlocks, NsaCompressed, choose_blocks, nsa_blocks,
    nsa_compressed_attention, nsa_gates, nsa_mean_pool, nsa_selected_attention, overlap_weight,
};
pub use qk_norm_rope::{QkNorm, RotaryEmbedding, qk_norm_rope};
pub use rms_norm::rms_norm;
pub use seed_gradient::seed_gradient;
pub use snapshot::{Snapshot, SnapshotReader};
pub use swiglu::swiglu;

pub use sieve_core::DmaBias;
pub use sieve_kernels::SumOrder;
