//! Attention whose blocks an indexer chooses (MSA, arXiv:2606.13392), with the gradient of the indexer's loss.
//!
//! P are the attention's probabilities and I the indexer's, both over the tokens that the query reads. The
//! loss of a query is `KL(mean_h P^h || I)`, with h over the group's heads; its gradient in the indexer's scores is `dS
//! = I - mean_h P^h`. Both GEMMs with dS are attention with the indexer's keys k as values:
//!
//! - `dq_i = s sum_j dS_ij k_j` is the output of the indexer's attention minus the mean output of the group's heads;
//! - `dk_j = s sum_i dS_ij q_i` is the gradient of these values when the gradient of the output is q.
//!
//! So the attention kernels compute the gradient, forward and backward, without storing probabilities. A device may
//! have fused kernels instead, which compute `I - mean_h P^h` over the chosen blocks.
//!
//! The logged loss does not contain the indexer's. The attention's node returns the indexer's gradient beside its
//! own, weighted by `LayerContext::token_share`. On Hopper `kernels/hopper_index_gradient.cu` computes both
//! products from the lists of chosen blocks.
use super::{IndexGradientCall, Read, Reads, pooled, repeat_heads};
use crate::backend::value;
use crate::tensors::{Float, compute_dtype, primitive, split_heads, tensor};
use crate::{AttentionSpec, DeviceBackend, Documents, SieveBackend};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, DType, Int, Tensor};
use sieve_core::{BlockChoice, NsaBlocks};

/// Operands of [`indexed_attention`] other than the packed tensors.
#[derive(Clone, Debug)]
pub struct IndexedCall<'a, B: SieveBackend> {
    /// Document bounds and positions of the tokens.
    pub documents: &'a Documents<B>,
    /// Heads and scale of the attention; the indexer has a query head for each KV head, one key head and the same
    /// scale.
    pub spec: AttentionSpec,
    /// How the indexer chooses blocks of keys.
    pub choice: BlockChoice,
    /// The blocks whose tokens are read, `[batch, seq_len, num_kv_heads, count]`, ascending, then -1, chosen by
    /// [`choose_key_blocks`](crate::choose_key_blocks) on the indexer's tensor; `None`: all tokens up to the query.
    pub chosen: Option<Tensor<B, 4, Int>>,
    /// One key per block, `[batch, num_slots, head_dim]`, for an indexer that scores blocks by them
    /// ([`ChoiceRule::SumOfHeads`](sieve_core::ChoiceRule::SumOfHeads)); `None` for one with a key per token.
    pub block_keys: Option<Tensor<B, 3>>,
    /// Weight in the loss of the divergence of one query and KV head; with `block_keys`, of one query.
    pub loss_weight: f64,
}

impl<B: SieveBackend> IndexedCall<'_, B> {
    pub(super) fn reads(&self) -> Reads<B::Inner> {
        let chosen = self.chosen.clone().map(Tensor::into_primitive);
        Reads::new(self.documents.bounds(), chosen, self.choice)
    }
}

/// The heads of an indexer for the attention of `spec`.
pub fn indexer_spec(spec: AttentionSpec) -> AttentionSpec {
    AttentionSpec { num_heads: spec.num_kv_heads, num_kv_heads: 1, window_size: None, ..spec }
}

/// Causal attention over the tokens of `call.chosen`. Its backward pass gives `index` the gradient of the indexer's
/// loss, `loss_weight * sum over queries and KV heads of KL(mean_h P^h || I)`: P^h are the attention's probabilities of
/// head h of the KV head's group, I the indexer's. The loss has no gradient in `qkv`, and the output has none in
/// `index`.
///
/// With `call.block_keys` the indexer scores blocks, not tokens. The loss of a query is then `KL(T || I)` over complete
/// blocks, where T is the largest attention probability in each block, normalised over the blocks. The block keys get
/// its gradient too.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - index: `[batch, seq_len, num_kv_heads + 2, head_dim]`, queries, key and value heads of [`indexer_spec`]; its
///   values are not read
/// - returns: `[batch, seq_len, num_heads, head_dim]`
pub fn indexed_attention<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    index: Tensor<B, 4>,
    call: &IndexedCall<'_, B>,
) -> Tensor<B, 4> {
    if let Some(keys) = &call.block_keys {
        return pooled::attention(qkv, index, keys.clone(), call);
    }
    let (reads, spec, weight) = (call.reads(), call.spec, call.loss_weight);
    let (qkv, index) = (primitive(qkv), primitive(index));
    let (x, scored) = (B::value(qkv.clone()), B::value(index.clone()));
    let read = reads.forward(x.clone(), spec);
    let needs_qkv = B::is_tracked(&qkv);
    tensor(B::node([&qkv, &index], read.output().o.clone(), move |d_o| {
        let d_index = index_gradient(&reads, &read, x.clone(), scored, spec, weight);
        // Where an indexer alone is trained, nothing takes the first.
        [if needs_qkv { reads.backward(x, spec, read, d_o) } else { d_o }, d_index]
    }))
}

/// The gradient of the indexer's packed tensor; `read` is the output of the attention over `qkv`.
fn index_gradient<D: DeviceBackend>(
    reads: &Reads<D>,
    read: &Read<D>,
    qkv: Float<D>,
    index: Float<D>,
    spec: AttentionSpec,
    weight: f64,
) -> Float<D> {
    if weight == 0.0 {
        return primitive(tensor::<D, 4>(index).zeros_like());
    }
    if let (Read::Chosen(attention), Some((chosen, _, call))) = (read, reads.call(spec)) {
        let call = IndexGradientCall { call, attention, weight };
        if let Some(gradient) = D::index_gradient([qkv.clone(), index.clone()], chosen, &call) {
            return gradient;
        }
    }
    let index = tensor::<D, 4>(index);
    let dtype = index.dtype();
    let wide = |x: Float<D>| tensor::<D, 4>(x).cast(compute_dtype(dtype));
    let (groups, group, index_spec) = (spec.num_kv_heads, spec.group_size(), indexer_spec(spec));
    let [q_index, k_index, _] = split_heads(index, 1);
    let [q, k, _] = split_heads(tensor::<D, 4>(qkv.clone()), groups);
    let [batch, seq_len, _, d] = q.dims();
    // The student is the indexer, the teacher is the attention whose probabilities it learns; both take the indexer's
    // keys as values.
    let student = primitive(Tensor::cat(vec![q_index.clone(), k_index.clone(), k_index.clone()], 2));
    // For the gradient of q, the attention sums over keys.
    let of_student = reads.forward(student.clone(), index_spec);
    let teacher = primitive(Tensor::cat(vec![q, k, k_index.clone().repeat_dim(2, groups)], 2));
    let of_teacher = reads.forward(teacher.clone(), spec);
    let mean = wide(of_teacher.output().o.clone()).reshape([batch, seq_len, groups, group, d]);
    let mean = mean.mean_dim(3).reshape([batch, seq_len, groups, d]);
    let factor = weight * spec.softmax_scale;
    let dq = (wide(of_student.output().o.clone()) - mean) * factor;

    // For the gradient of k, the attention's backward pass sums over queries.
    let by_head = repeat_heads(q_index.clone(), group);
    let of_student = reads.backward(student, index_spec, of_student, primitive(q_index));
    let of_teacher = reads.backward(teacher, spec, of_teacher, primitive(by_head));
    let [_, _, of_student] = split_heads(wide(of_student), 1);
    let [_, _, of_teacher] = split_heads(wide(of_teacher), groups);
    let dk = (of_student - of_teacher.sum_dim(2) / group as f64) * factor;
    let d_value = dk.zeros_like();
    primitive(Tensor::cat(vec![dq, dk, d_value], 2).cast(dtype))
}

/// Number of queries whose statistics [`index_statistics`] computes.
const MEASURED_QUERIES: usize = 16;

/// How well the indexer fits its attention, f32 `[3]`: means over some queries of the first row and all KV heads.
/// `chosen` are the blocks that the indexer chooses, even in a warm-up, when attention reads all tokens.
///
/// - `KL(mean_h P^h || I)` over the tokens that are read, in nats;
/// - recall: dense attention's probability in the chosen blocks, divided by that in the best choice of as many blocks;
///   both include the query's own block;
/// - the entropy of I, in nats.
///
/// With `block_keys`, divergence and entropy are over complete blocks. A block's share of the attention is its largest
/// token probability, normalised over these blocks.
///
/// Shapes as in [`indexed_attention`].
pub fn index_statistics<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    index: Tensor<B, 4>,
    chosen: Tensor<B, 4, Int>,
    call: &IndexedCall<'_, B>,
) -> Tensor<B::Inner, 1> {
    let (groups, group) = (call.spec.num_kv_heads, call.spec.group_size());
    let of_row = |x: Tensor<B, 4>| value::<B, 4>(x).narrow(0, 0, 1).cast(DType::F32).squeeze_dim::<3>(0);
    let packed_index = index.clone();
    let [qkv, index] = [of_row(qkv), of_row(index)];
    let heads = |x: &Tensor<B::Inner, 3>, first: usize, count: usize| x.clone().narrow(1, first, count).swap_dims(0, 1);
    let [n, _, d] = qkv.dims();
    let starts = Tensor::<B::Inner, 2, Int>::from_primitive(call.documents.start.clone().into_primitive());
    let measured = Measured::new(starts, n, call.spec, call.choice.blocks);
    let q = measured.of_queries(heads(&qkv, 0, groups * group)).reshape([groups, group * measured.count(), d]);
    let k = heads(&qkv, groups * group, groups);
    let logits = measured.in_documents(q.matmul(k.swap_dims(1, 2)), group);
    let scores = measured.of_queries(heads(&index, 0, groups));
    let scores = scores.matmul(heads(&index, groups, 1).expand([groups, n, d]).swap_dims(1, 2));
    // The probabilities of the keys that are not hidden, averaged over the heads of each group.
    let mean_over = |hidden: &Tensor<B::Inner, 5, Bool>| log_softmax(logits.clone(), hidden.clone()).exp().mean_dim(1);
    let later = measured.later_keys();
    let not_chosen = measured.not_chosen(Tensor::from_primitive(chosen.into_primitive()), call.choice.pieces());
    let recall = measured.recall(mean_over(&later), not_chosen.clone());
    let unread = if call.chosen.is_some() { not_chosen } else { later };
    let p = mean_over(&unread);
    if let Some(keys) = &call.block_keys {
        let p = p.sum_dim(0).reshape([measured.count(), measured.num_tokens()]);
        let starts = measured.starts.clone();
        let [teacher, student] = pooled::measured(p, starts, &packed_index, keys, &measured.queries, call);
        return fit(teacher, student, recall, measured.count());
    }
    // `0 log 0` counts as 0 in the divergence and in the entropy.
    let log_index = log_softmax(measured.in_documents(scores, 1), unread.clone()).mask_fill(unread, 0.0);
    fit(p, log_index, recall, groups * measured.count())
}

/// `[divergence, recall, entropy]` of `count` distributions: the attention's `p`, and the logarithms of the indexer's.
fn fit<B: Backend, const D: usize>(
    p: Tensor<B, D>,
    log_index: Tensor<B, D>,
    recall: Tensor<B, 1>,
    count: usize,
) -> Tensor<B, 1> {
    let mean = 1.0 / count as f64;
    let log_p = p.clone().clamp_min(f32::MIN_POSITIVE).log();
    let divergence = (p * (log_p - log_index.clone())).sum() * mean;
    let entropy = (log_index.clone().exp() * log_index).sum() * -mean;
    Tensor::cat(vec![divergence, recall, entropy], 0)
}

/// Logarithms of the softmax over the keys that are not hidden, the last two dimensions. Burn's kernels reduce a
/// dimension in one thread: sums and maxima go over the tokens of a block, then over blocks.
fn log_softmax<B: Backend>(scores: Tensor<B, 5>, hidden: Tensor<B, 5, Bool>) -> Tensor<B, 5> {
    let scores = scores.mask_fill(hidden, f32::NEG_INFINITY);
    let shifted = scores.clone() - scores.max_dim(4).max_dim(3);
    shifted.clone() - shifted.exp().sum_dim(4).sum_dim(3).log()
}

/// The measured queries of a row. The keys of each are taken in the order of its document, so that a block is a range
/// of them.
struct Measured<B: Backend> {
    /// Their tokens, in the middle of equal parts of the row.
    queries: Tensor<B, 1, Int>,
    /// The first token of each one's document, `[queries, 1]`.
    starts: Tensor<B, 2, Int>,
    /// Tokens of the row.
    num_keys: usize,
    /// KV heads, each of which chooses blocks.
    groups: usize,
    blocks: NsaBlocks,
    softmax_scale: f64,
}

impl<B: Backend> Measured<B> {
    /// Queries of the first row, which has `num_keys` tokens. `starts` has the first token of each token's document,
    /// `[batch, seq_len]`.
    fn new(starts: Tensor<B, 2, Int>, num_keys: usize, spec: AttentionSpec, blocks: NsaBlocks) -> Self {
        let count = MEASURED_QUERIES.min(num_keys);
        let queries: Vec<i32> = (0..count).map(|at| ((2 * at + 1) * num_keys / (2 * count)) as i32).collect();
        let queries = Tensor::from_ints(queries.as_slice(), &starts.device());
        let starts = starts.narrow(0, 0, 1).select(1, queries.clone()).swap_dims(0, 1);
        let (groups, softmax_scale) = (spec.num_kv_heads, spec.softmax_scale);
        Self { queries, starts, num_keys, groups, blocks, softmax_scale }
    }

    fn count(&self) -> usize {
        self.queries.dims()[0]
    }

    fn num_blocks(&self) -> usize {
        self.num_keys.div_ceil(self.blocks.select_block_size)
    }

    /// Tokens of all blocks: the row's, rounded up.
    fn num_tokens(&self) -> usize {
        self.num_blocks() * self.blocks.select_block_size
    }

    /// `[groups, heads, queries, blocks, tokens of a block]`.
    fn sizes(&self, heads: usize) -> [usize; 5] {
        [self.groups, heads, self.count(), self.num_blocks(), self.blocks.select_block_size]
    }

    /// `0 .. len`, `[1, len]`.
    fn range(&self, len: usize) -> Tensor<B, 2, Int> {
        Tensor::<B, 1, Int>::arange(0..len as i64, &self.starts.device()).unsqueeze_dim::<2>(0)
    }

    /// Each query's position in its document, `[queries, 1]`.
    fn positions(&self) -> Tensor<B, 2, Int> {
        self.queries.clone().unsqueeze_dim::<2>(1) - self.starts.clone()
    }

    /// The rows `[heads, queries, ..]` of these queries among those of all tokens.
    fn of_queries(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        x.select(1, self.queries.clone())
    }

    /// Scores of all keys, `[groups, heads * queries, num_keys]`, scaled and in the order of each query's document.
    fn in_documents(&self, scores: Tensor<B, 3>, heads: usize) -> Tensor<B, 5> {
        let (rows, count, tokens) = (self.groups * heads, self.count(), self.num_tokens());
        let keys = (self.range(tokens) + self.starts.clone()).clamp_max(self.num_keys as i64 - 1);
        let keys = keys.unsqueeze_dim::<3>(0).expand([rows, count, tokens]);
        let scores = scores.reshape([rows, count, self.num_keys]).gather(2, keys);
        (scores * self.softmax_scale).reshape(self.sizes(heads))
    }

    /// Where a key comes after the query, `[1, 1, queries, blocks, tokens of a block]`.
    fn later_keys(&self) -> Tensor<B, 5, Bool> {
        let [_, _, count, num_blocks, size] = self.sizes(1);
        self.range(self.num_tokens()).greater(self.positions()).reshape([1, 1, count, num_blocks, size])
    }

    /// Where a key comes after the query or is outside of the chosen blocks. `chosen` lists attended blocks, of which
    /// a block that is chosen has `pieces`.
    fn not_chosen(&self, chosen: Tensor<B, 4, Int>, pieces: usize) -> Tensor<B, 5, Bool> {
        let (groups, count, num_pieces) = (self.groups, self.count(), self.num_blocks() * pieces);
        let chosen = chosen.narrow(0, 0, 1).select(1, self.queries.clone()).permute([2, 1, 0, 3]);
        let is_chosen = self.range(num_pieces).reshape([1, 1, num_pieces, 1]).equal(chosen).any_dim(3);
        let is_chosen = is_chosen.expand([groups, count, num_pieces, self.num_tokens() / num_pieces]);
        self.later_keys().bool_or(is_chosen.reshape(self.sizes(1)).bool_not())
    }

    /// The probability of dense attention in the chosen blocks, divided by that in the best blocks.
    fn recall(&self, dense: Tensor<B, 5>, not_chosen: Tensor<B, 5, Bool>) -> Tensor<B, 1> {
        let (groups, count, num_blocks) = (self.groups, self.count(), self.num_blocks());
        let of_blocks = dense.clone().sum_dim(4).reshape([groups, count, num_blocks]);
        // Each query reads its own block, so the best blocks have it too: 1 more than a probability puts it first, and
        // the sum is lowered by these ones again.
        let own = self.positions().div_scalar(self.blocks.select_block_size as i64);
        let is_own = self.range(num_blocks).equal(own).unsqueeze_dim::<3>(0);
        let best = match self.blocks.num_selected_blocks {
            most if most < num_blocks => (of_blocks + is_own.float()).topk(most, 2).sum() - (groups * count) as f64,
            _ => of_blocks.sum(),
        };
        dense.mask_fill(not_chosen, 0.0).sum() / best
    }
}
