//! Differentiable ops of Sieve: for each a plain-Burn reference, the fast CPU path, the CUDA path, and the backward
//! pass under Burn's autodiff.
//!
//! Each family of ops has a folder or a file with the public functions, which add nodes to the autodiff graph, the call
//! structs, and the modules `reference`, `cpu` and `cuda`. `backend` has the table of all ops that a device computes.
//!
//! Queries, keys and values are packed as `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`. DMA's mask is one
//! integer per key, `expire`: query i sees key j of its document if `j <= i < expire[j]`.

mod backend;
mod documents;

mod attention;
mod block;
mod chosen;
mod context_parallel;
mod decode;
mod dma;
mod embedding;
mod fp8;
mod linear;
mod loss;
mod mla;
mod norm;
mod nsa;
mod optimizer;
mod rope;
mod sparse;
mod swiglu;

mod device;
mod operands;
mod tensors;

#[cfg(test)]
mod testing;

pub use attention::{
    AttentionCall, AttentionOutput, AttentionSpec, attention, attention_of_last, attention_with_sinks, bounds_of_last,
};
pub use backend::{BackwardPass, DeviceBackend, SieveBackend, TrainBackend};
pub use block::{
    AttentionLayer, AttentionLayerOutput, FeedForward, KeptAttention, LayerTokens, MaskAndRanks, PassFor, Residual,
    WeightSums, attention_layer, feed_forward, seed_gradient,
};
pub use chosen::{
    ChoiceCall, IndexGradientCall, IndexedCall, SelectedBlocks, attended_blocks, block_positions, choose_key_blocks,
    choose_key_blocks_of_last, choose_scored_blocks, choose_token_blocks, chosen_attention, chosen_attention_of_last,
    chosen_by_last, index_statistics, indexed_attention, indexer_spec, selected_attention,
};
pub use context_parallel::{ContextParallel, Heads, RankGroup, SendRecv, ThreadGroup, TracedPart};
pub use decode::{
    DmaCache, DmaToken, KeyCache, RowsOf, SelectorCache, TokenAttention, TokenBranches, TokenBuffer, TokenCache,
    TokenExtra, TokenLayer, TokenStep, TokensBefore, attention_decode, both_ends, cached_attention, dma_cache,
    dma_decode, draw, draw_on_host, first_of_largest, kept_ends, losses_of_logits, mla_decode, repeat_token_step,
    token_loss_on_host, token_step,
};
#[cfg(feature = "cuda")]
pub use device::cuda::Cuda;
pub use device::paths::{OpPath, Place, op_paths};
pub use dma::{
    DMA_SCORE_CLAMP, DmaAttention, DmaCall, DmaKeyLists, DmaKeys, DmaLayer, DmaOrder, DmaScoresCall, DmaSelection,
    PositionOrigin, Recency, dma_attention, dma_attention_by_rank, dma_bias, dma_rank, dma_ranks, dma_select,
    dynamic_mask_attention,
};
pub use documents::{DocumentBounds, Documents};
pub use embedding::embedding;
pub use fp8::{Fp8Kept, GemmPrecision, ToQuantise};
pub use linear::{add_bias, linear, linear_add, linear_in_order};
pub use loss::{IGNORE_LABEL, linear_cross_entropy, token_losses};
pub use mla::{MlaCall, MlaNorm, MlaPackCall, MlaSpec, mla_attention, mla_attention_of_last, mla_pack};
pub use norm::{RmsNormCall, rms_norm};
pub use nsa::{
    CompressedAttention, NsaBlocks, NsaCall, NsaCompressed, NsaSelected, choose_blocks, nsa_blocks,
    nsa_compressed_attention, nsa_gates, nsa_mean_pool, nsa_selected_attention, overlap_weight,
};
pub use operands::OperandError;
pub use optimizer::{
    AdamWStep, AdamWTensors, Snapshot, SnapshotError, SnapshotReader, adamw, join_master, orthogonalised, split_master,
    sum_of_squares,
};
pub use rope::{QkNorm, QkNormRopeCall, RopeCall, RopeTables, RotaryEmbedding, qk_norm_rope, rope};
pub use sparse::{
    SparseOutput, attention_with_lse, correct_by_probes, has_sparse_attention, heavy_decode, keep_heavy_keys,
    select_blocks, selector_decode, sparse_attention, upload_mask,
};
pub use swiglu::swiglu;
pub use tensors::split_heads;

pub use sieve_core::{DmaBias, DmaForm, DmaRecency, DmaShape, DmaWindow};
pub use sieve_core::{KernelFamilies, KernelPolicy, KeyOrder, SumOrder};
#[cfg(feature = "cuda")]
pub use sieve_kernels::{GpuState, MemoryPeak};

pub mod reference {
    //! Every op in plain Burn operations: the definition that fast paths are compared with.
    //!
    //! Intermediate values are f32, or f64 for f64 inputs, whatever the dtype of the input; outputs have the input's
    //! dtype. No fast library is called and nothing is skipped: attention builds its full score matrix.

    pub use crate::attention::reference::{attention, attention_backward, join_sinks, sinks_backward};
    pub use crate::chosen::reference::{choose_key_blocks, selected_blocks};
    pub use crate::decode::reference::{Logits, attention_decode, mla_decode};
    pub use crate::dma::reference::{
        dma_attention, dma_attention_backward, dma_ranks, dma_scores, dma_scores_backward, dma_select,
    };
    pub use crate::embedding::reference::{embedding, embedding_backward};
    pub use crate::fp8::reference::{fp8_linear, fp8_linear_backward, fp8_quantise};
    pub use crate::linear::reference::{gemm, linear, linear_input_gradient, linear_weight_gradient};
    pub use crate::loss::reference::{linear_cross_entropy, linear_cross_entropy_with_gradients, scale, token_losses};
    pub use crate::mla::reference::{mla_attention, mla_attention_backward, mla_pack, mla_pack_backward};
    pub use crate::norm::reference::{rms_norm, rms_norm_backward};
    pub use crate::nsa::reference::{
        nsa_blocks, nsa_blocks_backward, nsa_compressed_attention, nsa_compressed_attention_backward, nsa_gates,
        nsa_gates_backward, nsa_mean_pool, nsa_mean_pool_backward, nsa_selected_attention,
        nsa_selected_attention_backward,
    };
    pub use crate::optimizer::reference::{adamw, global_norm, sum_of_squares};
    pub use crate::rope::reference::{qk_norm_rope, qk_norm_rope_backward, rope};
    pub use crate::swiglu::reference::{swiglu, swiglu_backward};
}
