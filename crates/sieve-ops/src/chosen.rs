//! Attention over blocks that each query chooses by its pooled keys: InfLLM-V2 (arXiv:2509.24663) and MoBA
//! (arXiv:2502.13189). One exact softmax, no gates, no parameters; the attention itself is NSA's selected branch.
//!
//! Blocks are counted from each document's first token.
pub(crate) mod cpu;
pub(crate) mod cuda;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use crate::SieveBackend;
use crate::attention::AttentionSpec;
use crate::backend::DeviceBackend;
use crate::documents::{DocumentBounds, Documents};
use crate::nsa::NsaCall;
use crate::tensors::{Float, primitive, split_heads, tensor};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor};
use sieve_core::BlockChoice;

/// Where documents lie in the rows of a call, its heads, and how these choose.
#[derive(Clone, Debug)]
pub struct ChoiceCall<B: Backend> {
    /// Bounds of the documents.
    pub documents: DocumentBounds<B>,
    /// Heads and scale; the window is not read.
    pub spec: AttentionSpec,
    /// Pooled keys, blocks and the rule of the choice.
    pub choice: BlockChoice,
}

/// The blocks whose tokens each query reads, by the means of its keys; without gradient. A block of more than 64 tokens
/// appears as its pieces of 64 ([`BlockChoice::attended`]).
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`; its values are not read
/// - returns: `[batch, seq_len, choosers, attended blocks]`, choosers of [`BlockChoice::num_choosers`]: ascending,
///   then -1
pub fn choose_key_blocks<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    documents: &Documents<B>,
    spec: AttentionSpec,
    choice: BlockChoice,
) -> Tensor<B, 4, Int> {
    let x = B::value(primitive(qkv));
    let pooling = NsaCall {
        documents: documents.bounds(),
        spec,
        blocks: choice.blocks,
    };
    let pooled = B::Inner::nsa_mean_pool(x.clone(), &pooling);
    let call = ChoiceCall {
        documents: documents.bounds(),
        spec,
        choice,
    };
    let chosen = Tensor::from_primitive(B::Inner::choose_key_blocks(x, pooled, &call));
    in_pieces(chosen, documents, choice)
}

/// Causal attention of each query over the tokens of its blocks, as [`choose_key_blocks`] gives them.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - block_indices: as [`choose_key_blocks`] returns them
/// - returns: `[batch, seq_len, num_heads, head_dim]`
pub fn chosen_attention<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    block_indices: Tensor<B, 4, Int>,
    documents: &Documents<B>,
    spec: AttentionSpec,
    choice: BlockChoice,
) -> Tensor<B, 4> {
    let heads = Heads {
        num_kv_heads: spec.num_kv_heads,
        group: choice.num_choosers(spec.num_heads, spec.num_kv_heads) / spec.num_kv_heads,
    };
    let call = NsaCall {
        documents: documents.bounds(),
        spec: AttentionSpec {
            num_kv_heads: spec.num_kv_heads * heads.group,
            ..spec
        },
        blocks: choice.attended(),
    };
    let (qkv, chosen) = (primitive(qkv), block_indices.into_primitive());
    let x = B::value(qkv.clone());
    let selected = B::Inner::nsa_selected_attention(heads.repeat::<B::Inner>(x.clone()), chosen.clone(), &call);
    tensor(B::node([&qkv], selected.output.o.clone(), move |d_o| {
        // Keys and values of each head are recomputed here, so that one copy is kept.
        let x = heads.repeat::<B::Inner>(x);
        let gradient = B::Inner::nsa_selected_attention_backward(x, chosen, &call, selected, d_o);
        [heads.sum::<B::Inner>(gradient)]
    }))
}

/// KV heads, each once for every head of its group that chooses for itself.
#[derive(Clone, Copy)]
struct Heads {
    num_kv_heads: usize,
    group: usize,
}

impl Heads {
    /// A packed tensor with the keys and values of each KV head `group` times.
    fn repeat<B: Backend>(self, qkv: Float<B>) -> Float<B> {
        if self.group == 1 {
            return qkv;
        }
        let [q, k, v] = split_heads::<B>(tensor(qkv), self.num_kv_heads);
        let [batch, seq_len, _, width] = k.dims();
        let repeated = [k, v].map(|x| {
            let x = x.unsqueeze_dim::<5>(3).repeat_dim(3, self.group);
            x.reshape([batch, seq_len, self.num_kv_heads * self.group, width])
        });
        let [k, v] = repeated;
        primitive(Tensor::cat(vec![q, k, v], 2))
    }

    /// The way back for gradients: sums over each group, in f32 and a fixed order.
    fn sum<B: Backend>(self, gradient: Float<B>) -> Float<B> {
        if self.group == 1 {
            return gradient;
        }
        let [q, k, v] = split_heads::<B>(tensor(gradient), self.num_kv_heads * self.group);
        let [batch, seq_len, _, width] = k.dims();
        let dtype = k.dtype();
        let summed = [k, v].map(|x| {
            let x = x.reshape([batch, seq_len, self.num_kv_heads, self.group, width]);
            let x = if dtype == DType::BF16 { x.cast(DType::F32) } else { x };
            let x = x.sum_dim(3).reshape([batch, seq_len, self.num_kv_heads, width]);
            x.cast(dtype)
        });
        let [k, v] = summed;
        primitive(Tensor::cat(vec![q, k, v], 2))
    }
}

/// Chosen blocks as the pieces that attention reads; those behind the query's own are left out.
fn in_pieces<B: Backend>(
    chosen: Tensor<B, 4, Int>,
    documents: &Documents<B>,
    choice: BlockChoice,
) -> Tensor<B, 4, Int> {
    let pieces = choice.pieces();
    if pieces == 1 {
        return chosen;
    }
    let [batch, seq_len, choosers, count] = chosen.dims();
    let all = [batch, seq_len, choosers, count, pieces];
    let piece = Tensor::<B, 1, Int>::arange(0..pieces as i64, &chosen.device());
    let first = chosen.mul_scalar(pieces as i64).unsqueeze_dim::<5>(4).expand(all);
    let block = first + piece.reshape([1, 1, 1, 1, pieces]).expand(all);
    let size = choice.attended().select_block_size as i64;
    let own = documents.positions.clone().div_scalar(size);
    let own = own.reshape([batch, seq_len, 1, 1, 1]).expand(all);
    let none = block.clone().greater(own).bool_or(block.clone().lower_elem(0));
    block
        .mask_fill(none, -1)
        .reshape([batch, seq_len, choosers, count * pieces])
}
