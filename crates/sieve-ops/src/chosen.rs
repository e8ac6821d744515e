//! Attention over blocks that each query chooses, by pooled keys, each the mean of several tokens' keys (InfLLM-V2,
//! arXiv:2509.24663, arXiv:2502.13189), or by an indexer (MSA, arXiv:2606.13392), a projection of its own. One
//! exact softmax, no gates; the attention itself is NSA's selected branch.
//!
//! Blocks are counted from each document's first token.
mod call;
pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod indexed;
mod pooled;
#[cfg(test)]
mod pooled_tests;
pub(crate) mod reference;
mod selected;
#[cfg(test)]
mod tests;

pub use call::{ChoiceCall, IndexGradientCall};
pub use indexed::{IndexedCall, index_statistics, indexed_attention, indexer_spec};
pub use pooled::block_positions;
pub use selected::{SelectedBlocks, selected_attention};

use crate::attention::cpu::shape_of;
use crate::tensors::{Float, Ints, primitive, split_heads, tensor};
use crate::{
    AttentionCall, AttentionOutput, AttentionSpec, DeviceBackend, DocumentBounds, Documents, NsaCall, NsaSelected,
    SieveBackend,
};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData, TensorMetadata};
use sieve_core::{BlockChoice, LocalBlocks, NsaBlocks};

/// The blocks whose tokens each query reads, chosen by means of keys; without gradient. A block of more than 64 tokens
/// is listed as its pieces of 64 tokens, the attended blocks ([`BlockChoice::attended`]).
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`; its values are not read
/// - returns: attended blocks, `[batch, seq_len, choosers, count]` with [`BlockChoice::num_choosers`] choosers;
///   ascending, then -1
pub fn choose_key_blocks<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    documents: &Documents<B>,
    spec: AttentionSpec,
    choice: BlockChoice,
) -> Tensor<B, 4, Int> {
    let first = 0;
    choose_key_blocks_of_last(qkv, documents, spec, choice, first)
}

/// As [`choose_key_blocks`] for the tokens from `first` on in each row; those before them choose none.
pub fn choose_key_blocks_of_last<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    documents: &Documents<B>,
    spec: AttentionSpec,
    choice: BlockChoice,
    first: usize,
) -> Tensor<B, 4, Int> {
    let x = B::value(primitive(qkv));
    let pooling = NsaCall::new(documents.bounds(), spec, choice.blocks);
    let pooled = B::Inner::nsa_mean_pool(x.clone(), &pooling);
    let call = ChoiceCall { documents: documents.bounds(), spec, choice, first };
    let chosen = Tensor::from_primitive(B::Inner::choose_key_blocks(x, pooled, &call));
    attended_blocks(chosen_by_last(chosen, first), documents, choice)
}

/// `chosen`, `[batch, seq_len, choosers, count]`, without the blocks of the tokens before `first`, so that attention
/// over chosen blocks computes nothing for them.
pub fn chosen_by_last<B: Backend>(chosen: Tensor<B, 4, Int>, first: usize) -> Tensor<B, 4, Int> {
    let [batch, seq_len, choosers, count] = chosen.dims();
    if first == 0 {
        return chosen;
    }
    let none = Tensor::full([batch, first, choosers, count], -1, &chosen.device());
    Tensor::cat(vec![none, chosen.narrow(1, first, seq_len - first)], 1)
}

/// The blocks whose tokens each query of the attention `spec` reads, chosen by an indexer that has one key per block
/// ([`ChoiceRule::SumOfHeads`](sieve_core::ChoiceRule::SumOfHeads)); without gradient.
///
/// # Shapes
/// - index: the indexer's packed tensor, `[batch, seq_len, num_kv_heads + 2, head_dim]`; only its queries are read
/// - block_keys: `[batch, num_slots, head_dim]`, slots of [`NsaBlocks::num_slots`]
/// - returns: `[batch, seq_len, num_kv_heads, num_selected_blocks]`, equal for all KV heads
pub fn choose_scored_blocks<B: SieveBackend>(
    index: Tensor<B, 4>,
    block_keys: Tensor<B, 3>,
    documents: &Documents<B>,
    spec: AttentionSpec,
    choice: BlockChoice,
) -> Tensor<B, 4, Int> {
    let call = ChoiceCall { documents: documents.bounds(), spec: indexer_spec(spec), choice, first: 0 };
    let [batch, num_slots, d] = block_keys.dims();
    let keys = B::value(primitive(block_keys.reshape([1, batch * num_slots, d])));
    let chosen = B::Inner::choose_key_blocks(B::value(primitive(index)), keys, &call);
    Tensor::from_primitive(chosen).repeat_dim(2, spec.num_kv_heads)
}

/// The blocks that the last of `num_tokens` tokens chooses, computed on the host as [`choose_key_blocks`] does on a
/// CPU, to the bit. `spec` is of the attention or of the indexer that scores the keys. Returns a list of blocks for
/// each row and chooser, [`BlockChoice::num_choosers`] a row: ascending, then -1.
///
/// # Shapes
/// - q: `[batch, num_heads, head_dim]`
/// - keys: pooled keys or an indexer's keys, `[batch, num_kv_heads, keys, head_dim]`; `None`: there is none yet
pub fn choose_token_blocks<B: Backend>(
    q: Tensor<B, 3>,
    keys: Option<Tensor<B, 4>>,
    num_tokens: usize,
    spec: AttentionSpec,
    choice: BlockChoice,
) -> Vec<Vec<i32>> {
    let [batch, _, head_dim] = q.dims();
    let host = |data: TensorData| -> Vec<f32> { data.convert::<f32>().into_vec().expect("they were converted") };
    let keys = keys.map_or_else(Vec::new, |keys| host(keys.into_data()));
    let shape = shape_of([batch, 1, spec.packed_heads(), head_dim], spec);
    sieve_cpu::nsa::choose_token_blocks(shape, choice, &host(q.into_data()), &keys, num_tokens)
}

/// Causal attention of each query over the tokens of its blocks, which [`choose_key_blocks`] chose: every query has its
/// local blocks among them.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - block_indices: attended blocks, `[batch, seq_len, choosers, count]`, ascending, then -1
/// - returns: `[batch, seq_len, num_heads, head_dim]`
pub fn chosen_attention<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    block_indices: Tensor<B, 4, Int>,
    documents: &Documents<B>,
    spec: AttentionSpec,
    choice: BlockChoice,
) -> Tensor<B, 4> {
    let first = 0;
    chosen_attention_of_last(qkv, block_indices, documents, spec, (choice, first))
}

/// As [`chosen_attention`] for the tokens from `first` on in each row; those before them chose no block, and their
/// output is 0.
pub fn chosen_attention_of_last<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    block_indices: Tensor<B, 4, Int>,
    documents: &Documents<B>,
    spec: AttentionSpec,
    (choice, first): (BlockChoice, usize),
) -> Tensor<B, 4> {
    let reads = Reads::<B::Inner>::new(documents.bounds(), Some(block_indices.into_primitive()), choice);
    // A run of local blocks would be read for the first tokens, too.
    let reads = if first == 0 { reads.with_local(choice) } else { reads };
    let qkv = primitive(qkv);
    let x = B::value(qkv.clone());
    let read = reads.forward(x.clone(), spec);
    tensor(B::node([&qkv], read.output().o.clone(), move |d_o| [reads.backward(x, spec, read, d_o)]))
}

/// Which tokens of its document each query reads: all tokens up to itself, or the tokens of chosen blocks.
#[derive(Clone, Debug)]
struct Reads<D: DeviceBackend> {
    documents: DocumentBounds<D>,
    /// `[batch, seq_len, choosers, attended blocks]`; `None`: all tokens up to the query.
    chosen: Option<Ints<D>>,
    blocks: NsaBlocks,
    /// See [`NsaCall::local`].
    local: Option<LocalBlocks>,
    /// See [`NsaCall::in_pairs`].
    in_pairs: bool,
}

/// Output of [`Reads::forward`], which the backward pass needs.
#[derive(Clone)]
enum Read<D: DeviceBackend> {
    All(AttentionOutput<D>),
    Chosen(NsaSelected<D>),
}

impl<D: DeviceBackend> Read<D> {
    /// The attention's output, whichever tokens were read.
    fn output(&self) -> &AttentionOutput<D> {
        match self {
            Self::All(output) => output,
            Self::Chosen(selected) => &selected.output,
        }
    }
}

impl<D: DeviceBackend> Reads<D> {
    fn new(documents: DocumentBounds<D>, chosen: Option<Ints<D>>, choice: BlockChoice) -> Self {
        Self { documents, chosen, blocks: choice.attended(), local: None, in_pairs: choice.in_pairs() }
    }

    /// The same reads where every query's blocks hold the local ones of `choice`.
    fn with_local(self, choice: BlockChoice) -> Self {
        Self { local: choice.local(), ..self }
    }

    /// The chosen blocks, the repetition of KV heads that gives each chooser keys of its own, and the attention call
    /// with the repeated heads. `None` where queries read all tokens.
    fn call(&self, spec: AttentionSpec) -> Option<(Ints<D>, Heads, NsaCall<D>)> {
        let chosen = self.chosen.clone()?;
        let heads = Heads { num_kv_heads: spec.num_kv_heads, group: chosen.shape()[2] / spec.num_kv_heads };
        let repeated = AttentionSpec { num_kv_heads: spec.num_kv_heads * heads.group, ..spec };
        let call = NsaCall::new(self.documents.clone(), repeated, self.blocks);
        let call = NsaCall { local: self.local, in_pairs: self.in_pairs, ..call };
        Some((chosen, heads, call))
    }

    /// Attention of a packed tensor.
    fn forward(&self, x: Float<D>, spec: AttentionSpec) -> Read<D> {
        match self.call(spec) {
            None => Read::All(<D as DeviceBackend>::attention(x, &AttentionCall::new(self.documents.clone(), spec))),
            Some((chosen, heads, call)) => Read::Chosen(D::nsa_selected_attention(heads.repeat::<D>(x), chosen, &call)),
        }
    }

    /// The gradient of the packed tensor. Repeated keys and values are recomputed, so that only one copy is kept.
    fn backward(&self, x: Float<D>, spec: AttentionSpec, read: Read<D>, d_o: Float<D>) -> Float<D> {
        match (read, self.call(spec)) {
            (Read::Chosen(selected), Some((chosen, heads, call))) => {
                let x = heads.repeat::<D>(x);
                let gradient = D::nsa_selected_attention_backward(x, chosen, &call, selected, d_o);
                heads.sum::<D>(gradient)
            }
            (Read::All(output), None) => {
                let call = AttentionCall::new(self.documents.clone(), spec);
                D::attention_backward(x, &call, output, d_o)
            }
            _ => unreachable!("forward and backward read the same tokens"),
        }
    }
}

/// Repeats each KV head once for every chooser that reads it.
#[derive(Clone, Copy)]
struct Heads {
    num_kv_heads: usize,
    /// Choosers of a KV head.
    group: usize,
}

impl Heads {
    /// A packed tensor with each KV head's keys and values `group` times.
    fn repeat<B: Backend>(self, qkv: Float<B>) -> Float<B> {
        if self.group == 1 {
            return qkv;
        }
        let [q, k, v] = split_heads::<B>(tensor(qkv), self.num_kv_heads);
        let [k, v] = [k, v].map(|x| repeat_heads(x, self.group));
        primitive(Tensor::cat(vec![q, k, v], 2))
    }

    /// The backward pass of [`repeat`](Self::repeat): sums over each group, in f32 and in a fixed order.
    fn sum<B: Backend>(self, gradient: Float<B>) -> Float<B> {
        if self.group == 1 {
            return gradient;
        }
        let [q, k, v] = split_heads::<B>(tensor(gradient), self.num_kv_heads * self.group);
        let [batch, seq_len, _, width] = k.dims();
        let dtype = k.dtype();
        let [k, v] = [k, v].map(|x| {
            let x = x.reshape([batch, seq_len, self.num_kv_heads, self.group, width]);
            let x = if dtype == DType::BF16 { x.cast(DType::F32) } else { x };
            let x = x.sum_dim(3).reshape([batch, seq_len, self.num_kv_heads, width]);
            x.cast(dtype)
        });
        primitive(Tensor::cat(vec![q, k, v], 2))
    }
}

/// `[batch, seq_len, heads, width]` with each head `group` times.
fn repeat_heads<B: Backend>(x: Tensor<B, 4>, group: usize) -> Tensor<B, 4> {
    let [batch, seq_len, heads, width] = x.dims();
    x.unsqueeze_dim::<5>(3).repeat_dim(3, group).reshape([batch, seq_len, heads * group, width])
}

/// Splits chosen blocks `[batch, seq_len, choosers, count]` into the attended blocks, pieces of 64 tokens
/// ([`BlockChoice::attended`]); pieces after the query's own become -1.
pub fn attended_blocks<B: Backend>(
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
    let own_piece = documents.positions.clone().div_scalar(size);
    let own_piece = own_piece.reshape([batch, seq_len, 1, 1, 1]).expand(all);
    let none = block.clone().greater(own_piece).bool_or(block.clone().lower_elem(0));
    block.mask_fill(none, -1).reshape([batch, seq_len, choosers, count * pieces])
}
