//! Native sparse attention (arXiv:2502.11089): ops of the compressed and the selected branch, and the gated sum of the
//! branches. The window branch is [`attention`](crate::attention()).
//!
//! Blocks are counted from each document's first token. So that shapes do not depend on the documents, every row has
//! the same number of slots for compressed blocks, some of them empty; [`NsaBlocks::first_slot`] says where a
//! document's blocks begin.
mod call;
pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

pub use call::{NsaCall, NsaCompressed, NsaSelected};
pub use sieve_cpu::NsaBlocks;
pub use sieve_cpu::nsa::{choose_blocks, overlap_weight};

use crate::tensors::{primitive, tensor};
use crate::{DeviceBackend, SieveBackend, chosen_by_last};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

/// Input of the compression MLP (eq. 7): the concatenated keys, and values, of every compressed block, plus a learned
/// vector per position inside the block.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - k_positions, v_positions: `[compress_block_size, head_dim]`
/// - returns: `[2, batch * num_slots * num_kv_heads, compress_block_size * head_dim]`, keys then values
pub fn nsa_blocks<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    k_positions: Tensor<B, 2>,
    v_positions: Tensor<B, 2>,
    call: &NsaCall<B::Inner>,
) -> Tensor<B, 3> {
    let (dims, call) = (qkv.dims(), call.clone());
    let [qkv, k, v] = [primitive(qkv), primitive(k_positions), primitive(v_positions)];
    let positions = [B::value(k.clone()), B::value(v.clone())];
    let y = B::Inner::nsa_blocks(B::value(qkv.clone()), positions, &call);
    tensor(B::node([&qkv, &k, &v], y, move |dy| B::Inner::nsa_blocks_backward(dims, &call, dy)))
}

/// Means of the keys, and means of the values, of every compressed block.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - returns: `[2, batch * num_slots * num_kv_heads, head_dim]`, keys then values
pub fn nsa_mean_pool<B: SieveBackend>(qkv: Tensor<B, 4>, call: &NsaCall<B::Inner>) -> Tensor<B, 3> {
    let (dims, call) = (qkv.dims(), call.clone());
    let qkv = primitive(qkv);
    let y = B::Inner::nsa_mean_pool(B::value(qkv.clone()), &call);
    tensor(B::node([&qkv], y, move |dy| [B::Inner::nsa_mean_pool_backward(dims, &call, dy)]))
}

/// Output of the compressed branch.
#[derive(Clone, Debug)]
pub struct CompressedAttention<B: Backend> {
    /// `[batch, seq_len, num_heads, head_dim]`; 0 where a query sees no block yet.
    pub o: Tensor<B, 4>,
    /// Blocks of the selected branch, `[batch, seq_len, num_kv_heads, num_selected_blocks]`: counted from the
    /// document's first token, ascending, then -1.
    pub block_indices: Tensor<B, 4, Int>,
}

/// Attention over the compressed blocks, and the choice of selected blocks by its probabilities (eq. 8 to 11), which
/// has no gradient. The document's first block, the query's block and the block before it are always chosen. Of blocks
/// with equal scores, the later one is chosen. With [`NsaCall::of_last`] earlier tokens choose none.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`; only its queries are read
/// - compressed: `[2, batch * num_slots * num_kv_heads, head_dim]`, keys then values
pub fn nsa_compressed_attention<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    compressed: Tensor<B, 3>,
    call: &NsaCall<B::Inner>,
) -> CompressedAttention<B> {
    let (qkv, compressed, call, first) = (primitive(qkv), primitive(compressed), call.clone(), call.first);
    let (q, c) = (B::value(qkv.clone()), B::value(compressed.clone()));
    let NsaCompressed { output, block_indices } = B::Inner::nsa_compressed_attention(q.clone(), c.clone(), &call);
    let o = B::node([&qkv, &compressed], output.o.clone(), move |d_o| {
        B::Inner::nsa_compressed_attention_backward(q, c, &call, output, d_o)
    });
    let block_indices = chosen_by_last(Tensor::from_primitive(block_indices), first);
    CompressedAttention { o: tensor(o), block_indices }
}

/// Causal attention of each query over the tokens of its chosen blocks; the cost is proportional to their number.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - block_indices: `[batch, seq_len, num_kv_heads, num_selected_blocks]`, ascending, then -1
/// - returns: `[batch, seq_len, num_heads, head_dim]`
pub fn nsa_selected_attention<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    block_indices: Tensor<B, 4, Int>,
    call: &NsaCall<B::Inner>,
) -> Tensor<B, 4> {
    let (qkv, chosen, call) = (primitive(qkv), block_indices.into_primitive(), call.clone());
    let x = B::value(qkv.clone());
    let selected = B::Inner::nsa_selected_attention(x.clone(), chosen.clone(), &call);
    tensor(B::node([&qkv], selected.output.o.clone(), move |d_o| {
        [B::Inner::nsa_selected_attention_backward(x, chosen, &call, selected, d_o)]
    }))
}

/// `o = sum_c sigmoid(logits_c + bias_c) o_c` over the branches compressed, selected, window (eq. 5).
///
/// # Shapes
/// - branches: `[batch, seq_len, num_heads, head_dim]` each
/// - logits: `[batch, seq_len, num_heads * 3]`, bias: `[num_heads * 3]`; for each head the three branches
pub fn nsa_gates<B: SieveBackend>(
    branches: [Tensor<B, 4>; 3],
    logits: Tensor<B, 3>,
    bias: Tensor<B, 1>,
) -> Tensor<B, 4> {
    let (branches, logits, bias) = (branches.map(primitive), primitive(logits), primitive(bias));
    let outputs = branches.clone().map(B::value);
    let (logit_values, bias_values) = (B::value(logits.clone()), B::value(bias.clone()));
    let y = B::Inner::nsa_gates(outputs.clone(), logit_values.clone(), bias_values.clone());
    let [compressed, selected, window] = &branches;
    tensor(B::node([compressed, selected, window, &logits, &bias], y, |dy| {
        B::Inner::nsa_gates_backward(outputs, logit_values, bias_values, dy)
    }))
}
