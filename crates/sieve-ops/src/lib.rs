//! Differentiable ops of Sieve: a plain-Burn reference for each, the fast CPU path, the CUDA path, and their backward
//! passes under Burn's autodiff.
//!
//! One folder for each family of ops: the public functions, `backend` (the calls and the traits), `reference`, `flex`
//! (the CPU), `cuda` and `autodiff`.
//!
//! Tensors are packed as `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`: queries, keys, values. Every mask
//! is `active(i, j) <=> j <= i < expire[j]`.

mod backend;
mod device_backend;
mod documents;

mod attention;
mod block;
mod decode;
mod dma;
mod embedding;
mod linear;
mod loss;
mod mla;
mod norm;
mod nsa;
mod optimizer;
mod rope;
mod row_parts;
mod sparse;
mod swiglu;

mod device;
pub mod reference;
mod tensors;

#[cfg(test)]
mod testing;

pub use attention::{
    AttentionBackend, AttentionGradients, AttentionOutput, AttentionSpec, attention,
};
pub use backend::{SieveBackend, TrainBackend};
pub use block::{
    AttentionLayer, AttentionLayerBackend, AttentionLayerCall, DmaLayer, FeedForward,
    FeedForwardBackend, Residual, SeedBackend, attention_layer, feed_forward, seed_gradient,
};
pub use decode::{DecodeBackend, DmaCache, DmaToken, attention_decode, dma_decode, mla_decode};
pub use device::cuda::Cuda;
pub use device::paths::{OpPath, Place, op_paths, set_sum_order};
pub use device_backend::DeviceBackend;
pub use dma::{
    DMA_SCORE_CLAMP, DmaAttention, DmaBackend, DmaForward, DmaGradients, DmaKeyLists, DmaKeys,
    DmaSelection, DynamicMaskBackend, dma_attention, dma_bias, dma_rank, dma_select,
    dynamic_mask_attention,
};
pub use documents::{DocumentBounds, Documents};
pub use embedding::{EmbeddingBackend, EmbeddingGradients, embedding};
pub use linear::{LinearBackend, LinearGradients, linear, linear_add};
pub use loss::{IGNORE_LABEL, LossBackend, LossGradients, linear_cross_entropy, token_losses};
pub use mla::{MlaBackend, MlaGradients, MlaPackCall, MlaSpec, mla_attention, mla_pack};
pub use norm::{NormBackend, NormGradients, RmsNormCall, rms_norm};
pub use nsa::{
    CompressedAttention, NsaBackend, NsaBlocks, NsaCall, NsaCompressed, NsaGradients,
    choose_blocks, nsa_blocks, nsa_compressed_attention, nsa_gates, nsa_mean_pool,
    nsa_selected_attention, overlap_weight,
};
pub use optimizer::{
    AdamWStep, AdamWTensors, OptimizerBackend, Snapshot, SnapshotReader, adamw, join_master,
    split_master, sum_of_squares,
};
pub use rope::{
    QkNorm, QkNormRopeCall, RopeBackend, RopeGradients, RopeTables, RotaryEmbedding, qk_norm_rope,
};
pub use row_parts::{RowLinks, RowParts};
pub use sparse::{
    ChosenBlocks, DeviceMask, DeviceSelection, SparseBackend, SparseOutput, correct_by_probes,
    has_sparse_attention, select_blocks, select_blocks_by_bounds, sparse_attention,
};
pub use swiglu::{SwigluBackend, SwigluGradients, swiglu};

pub use sieve_core::DmaBias;
pub use sieve_kernels::SumOrder;
