//! Native sparse attention (arXiv:2502.11089): the ops of its compressed and selected branches, and the gated sum. The
//! window branch is [`attention`](crate::attention).
//!
//! Blocks are counted from each document's first token.
mod autodiff;
mod backend;
mod cuda;
mod flex;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

pub use backend::{NsaBackend, NsaCall, NsaCompressed, NsaGradients, NsaSelected};
pub use sieve_cpu::NsaBlocks;
pub use sieve_cpu::nsa::{choose_blocks, overlap_weight};

use crate::tensors::{primitive, tensor};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

/// Keys, and values, of every compressed block side by side, plus a learned vector per position inside the block: the
/// input of the compression MLP (eq. 7).
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - k_positions, v_positions: `[compress_block_size, head_dim]`
/// - returns: `[2, batch * num_slots * num_kv_heads, compress_block_size * head_dim]`, keys then values
pub fn nsa_blocks<B: NsaBackend>(
    qkv: Tensor<B, 4>,
    k_positions: Tensor<B, 2>,
    v_positions: Tensor<B, 2>,
    call: &NsaCall<B>,
) -> Tensor<B, 3> {
    let positions = [primitive(k_positions), primitive(v_positions)];
    tensor(B::nsa_blocks(primitive(qkv), positions, call))
}

/// Means of the keys, and of the values, of every compressed block.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - returns: `[2, batch * num_slots * num_kv_heads, head_dim]`, keys then values
pub fn nsa_mean_pool<B: NsaBackend>(qkv: Tensor<B, 4>, call: &NsaCall<B>) -> Tensor<B, 3> {
    tensor(B::nsa_mean_pool(primitive(qkv), call))
}

/// What the compressed branch hands on.
#[derive(Clone, Debug)]
pub struct CompressedAttention<B: Backend> {
    /// `[batch, seq_len, num_heads, head_dim]`; 0 where a query sees no block yet.
    pub o: Tensor<B, 4>,
    /// Blocks of the selected branch, `[batch, seq_len, num_kv_heads, num_selected_blocks]`: counted from the
    /// document's first token, ascending, then -1.
    pub block_indices: Tensor<B, 4, Int>,
}

/// Attention over the compressed blocks, and the choice of blocks by its probabilities (eq. 8 to 11), which has no
/// gradient. Forced are the document's first block, the query's own and the one before; ties go to the later block.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`; only its queries are read
/// - compressed: `[2, batch * num_slots * num_kv_heads, head_dim]`, keys then values
pub fn nsa_compressed_attention<B: NsaBackend>(
    qkv: Tensor<B, 4>,
    compressed: Tensor<B, 3>,
    call: &NsaCall<B>,
) -> CompressedAttention<B> {
    let result = B::nsa_compressed_attention(primitive(qkv), primitive(compressed), call);
    CompressedAttention {
        o: tensor(result.output.o),
        block_indices: Tensor::from_primitive(result.block_indices),
    }
}

/// Causal attention of each query over the tokens of its blocks; work goes with the number of blocks chosen.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - block_indices: as [`CompressedAttention::block_indices`]
/// - returns: `[batch, seq_len, num_heads, head_dim]`
pub fn nsa_selected_attention<B: NsaBackend>(
    qkv: Tensor<B, 4>,
    block_indices: Tensor<B, 4, Int>,
    call: &NsaCall<B>,
) -> Tensor<B, 4> {
    let selected = B::nsa_selected_attention(primitive(qkv), block_indices.into_primitive(), call);
    tensor(selected.output.o)
}

/// `o = sum_c sigmoid(logits_c + bias_c) o_c` over the branches compressed, selected, window (eq. 5).
///
/// # Shapes
/// - branches: `[batch, seq_len, num_heads, head_dim]` each
/// - logits: `[batch, seq_len, num_heads * 3]`, bias: `[num_heads * 3]`, the branch varying fastest
pub fn nsa_gates<B: NsaBackend>(branches: [Tensor<B, 4>; 3], logits: Tensor<B, 3>, bias: Tensor<B, 1>) -> Tensor<B, 4> {
    tensor(B::nsa_gates(
        branches.map(primitive),
        primitive(logits),
        primitive(bias),
    ))
}
