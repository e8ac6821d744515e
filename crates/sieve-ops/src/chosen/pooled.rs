//! An indexer that scores blocks as QSA does (Qwen3.8-Flash-Next): each complete block of a document has one key, kb,
//! and a query's score of it is `I = s sum_h max(0, q_h . kb)` with the softmax scale s and the indexer's heads h. All
//! heads of the attention read the blocks with the largest scores.
//!
//! P are the probabilities of the attention, summed over its heads. T is the largest P in each complete block that the
//! query reads, normalised over these blocks. The indexer's loss is `KL(T || softmax(I))` over the same blocks. GEMMs
//! compute scores and probabilities for some queries at a time, so no matrix of all pairs exists.
//!
//! Padding counts as documents of one token (`Batch::part_padding`), whose divergence is 0.
use super::{IndexedCall, Reads};
use crate::backend::value;
use crate::tensors::{Float, compute_dtype, primitive, split_heads, tensor};
use crate::{AttentionSpec, DeviceBackend, DocumentBounds, Documents, SieveBackend};
use burn::tensor::activation::log_softmax;
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, DType, IndexingUpdateOp, Int, Tensor};
use sieve_core::GemmKind;
use sieve_core::SCORES_AT_ONCE;
use sieve_core::{BlockChoice, NsaBlocks};

/// The complete blocks of a batch's documents. A row has a fixed number of slots; [`NsaBlocks::first_slot`] says which
/// slot a block has.
pub(super) struct Slots<B: Backend> {
    /// First token of each token's document, `[batch, seq_len]`.
    start: Tensor<B, 2, Int>,
    /// First token of each slot's block, `[batch, num_slots]`; -1 in empty slots.
    first: Tensor<B, 2, Int>,
    /// Block size in tokens.
    size: usize,
}

impl<B: Backend> Slots<B> {
    /// Finds the complete blocks of these documents.
    pub(super) fn new(documents: &DocumentBounds<B>, blocks: NsaBlocks) -> Self {
        let [start, end] = documents.clone().map(Tensor::<B, 2, Int>::from_primitive);
        let ([batch, n], size) = (start.dims(), blocks.select_block_size);
        let num_slots = blocks.num_slots(n);
        let token = Tensor::<B, 1, Int>::arange(0..n as i64, &start.device());
        let token = token.unsqueeze_dim::<2>(0).expand([batch, n]);
        let position = token.clone() - start.clone();
        let of_block = position.clone().div_scalar(size as i64).mul_scalar(size as i64);
        let is_first = position.equal(of_block);
        let is_complete = (token.clone() + size as i64).lower_equal(end);
        let others = is_first.bool_and(is_complete).bool_not();
        // Slot s takes the block that begins at one of the tokens (s - 1) * size + 1 to s * size: at most one does.
        // Tokens are numbered from 1 here, so that 0 stands for none.
        let begins = (token + 1).mask_fill(others, 0);
        let begins = Tensor::cat(vec![Tensor::zeros([batch, size - 1], &begins.device()), begins], 1);
        let begins = begins.narrow(1, 0, num_slots * size).reshape([batch, num_slots, size]);
        let first = begins.sum_dim(2).reshape([batch, num_slots]) - 1;
        Self { start, first, size }
    }

    /// First tokens of the documents of some queries of a row, `[queries, 1]`.
    fn starts(&self, row: usize, queries: &Tensor<B, 1, Int>) -> Tensor<B, 2, Int> {
        let starts = self.start.clone().narrow(0, row, 1).squeeze_dim::<1>(0);
        starts.select(0, queries.clone()).unsqueeze_dim(1)
    }

    /// For some queries of a row, the first slot of each query's document, `[queries, 1]`: start / size, rounded up.
    fn first_slots(&self, row: usize, queries: &Tensor<B, 1, Int>) -> Tensor<B, 2, Int> {
        let up = self.size as i64 - 1;
        (self.starts(row, queries) + up).div_scalar(self.size as i64)
    }

    /// Whether queries of a row read the blocks in the first `num_slots` slots, `[queries, num_slots]`. They read the
    /// blocks of their document that end at or before them, and with `chosen`, `[batch, seq_len, choosers, count]`,
    /// only the blocks of the first chooser.
    pub(super) fn read(
        &self,
        row: usize,
        queries: &Tensor<B, 1, Int>,
        num_slots: usize,
        chosen: Option<&Tensor<B, 4, Int>>,
    ) -> Tensor<B, 2, Bool> {
        let all = [queries.dims()[0], num_slots];
        let first = self.first.clone().narrow(0, row, 1).narrow(1, 0, num_slots).expand(all);
        let of_document = first.clone().greater_equal(self.starts(row, queries).expand(all));
        let last = first + (self.size as i64 - 1);
        let ended = last.lower_equal(queries.clone().unsqueeze_dim::<2>(1).expand(all));
        let visible = of_document.bool_and(ended);
        let Some(chosen) = chosen else {
            return visible;
        };
        let of_row = chosen.clone().narrow(0, row, 1).narrow(2, 0, 1);
        let [_, n, _, count] = of_row.dims();
        let of_row = of_row.reshape([n, count]).select(0, queries.clone());
        let slot = of_row.clone() + self.first_slots(row, queries).expand(of_row.dims());
        // Slot s is marked at index s + 1. Index 0 stands for no block, and for incomplete blocks, which have no slot.
        let outside = of_row.lower_elem(0).bool_or(slot.clone().greater_equal_elem(num_slots as i64));
        let place = (slot + 1).mask_fill(outside, 0);
        let device = place.device();
        let marks = Tensor::<B, 2>::zeros([all[0], num_slots + 1], &device);
        let marks = marks.scatter(1, place.clone(), Tensor::ones(place.dims(), &device), IndexingUpdateOp::Add);
        visible.bool_and(marks.narrow(1, 1, num_slots).greater_elem(0.0))
    }

    /// Tokens of the blocks in the first `num_slots` slots of a row, `[num_slots * size]`; for empty slots, any tokens.
    pub(super) fn tokens(&self, row: usize, num_slots: usize) -> Tensor<B, 1, Int> {
        let first = self.first.clone().narrow(0, row, 1).narrow(1, 0, num_slots).clamp_min(0);
        let all = [num_slots, self.size];
        let offset = Tensor::<B, 1, Int>::arange(0..self.size as i64, &first.device());
        let tokens = first.reshape([num_slots, 1]).expand(all) + offset.unsqueeze_dim::<2>(0).expand(all);
        // The tokens of an empty slot must be in the row too.
        let last = self.start.dims()[1] as i64 - 1;
        tokens.reshape([num_slots * self.size]).clamp_max(last)
    }
}

/// For each slot, the position in its document of the block's first token, `[batch, num_slots]`; 0 in empty slots.
pub fn block_positions<B: Backend>(documents: &Documents<B>, blocks: NsaBlocks) -> Tensor<B, 2, Int> {
    let first = Slots::<B>::new(&documents.bounds(), blocks).first;
    documents.positions.clone().gather(1, first.clone().clamp_min(0)).mask_fill(first.lower_elem(0), 0)
}

/// `q . k`, `[queries, heads, keys]`, in f32 (f64 for f64 operands), from q `[queries, heads, d]` and k `[keys, d]`.
fn scores_of<D: DeviceBackend>(q: Tensor<D, 3>, k: Tensor<D, 2>) -> Tensor<D, 3> {
    let ([queries, heads, d], [keys, _], dtype) = (q.dims(), k.dims(), compute_dtype(q.dtype()));
    let q = q.reshape([queries * heads, d]);
    // The op for weight gradients is a GEMM of bf16 matrices with an f32 result.
    let earlier_sum = None;
    let scores = D::linear_weight_gradient(primitive(k.transpose()), primitive(q.transpose()), earlier_sum);
    let scores = tensor::<D, 2>(scores).reshape([queries, heads, keys]);
    // The op's reference returns the operands' dtype.
    scores.cast(dtype)
}

/// Splits a row's queries into ranges `[first, end]`, `end` excluded, so that with `per_query` scores for each query a
/// range has at most [`SCORES_AT_ONCE`] scores, but at least one query.
fn query_ranges(seq_len: usize, per_query: usize) -> impl Iterator<Item = [usize; 2]> {
    let at_once = (SCORES_AT_ONCE / per_query.max(1)).clamp(1, seq_len);
    (0..seq_len).step_by(at_once).map(move |first| [first, (first + at_once).min(seq_len)])
}

/// The integers from `first` to `end`, `end` excluded, as a tensor.
fn indices<B: Backend>([first, end]: [usize; 2], device: &B::Device) -> Tensor<B, 1, Int> {
    Tensor::arange(first as i64..end as i64, device)
}

/// The queries of an indexer's packed tensor in row `row`, `[seq_len, heads, d]`. The last two heads are the key and
/// the value.
fn queries_of_row<B: Backend>(index: &Tensor<B, 4>, row: usize) -> Tensor<B, 3> {
    let [_, _, heads, _] = index.dims();
    index.clone().narrow(0, row, 1).narrow(2, 0, heads - 2).squeeze_dim::<3>(0)
}

fn row_of<B: Backend>(keys: &Tensor<B, 3>, row: usize) -> Tensor<B, 2> {
    keys.clone().narrow(0, row, 1).squeeze_dim::<2>(0)
}

/// Scores each query's blocks, without the factor s: calls `each(first query, scores)` for ranges of a row's queries,
/// with scores `[queries, num_slots]` in the order of the blocks of the query's document. Scores of the query's own
/// block and of later ones are meaningless.
#[cfg(any(feature = "cuda", test))]
pub(super) fn block_scores<D: DeviceBackend>(
    index: &Tensor<D, 4>,
    block_keys: &Tensor<D, 3>,
    slots: &Slots<D>,
    row: usize,
    mut each: impl FnMut(usize, Tensor<D, 2>),
) {
    let ([_, n, heads, _], num_slots) = (index.dims(), block_keys.dims()[1]);
    let (q, device) = (queries_of_row(index, row), index.device());
    for [first, end] in query_ranges(n, heads * num_slots) {
        let (queries, all) = (indices::<D>([first, end], &device), [end - first, num_slots]);
        let scores = scores_of(q.clone().narrow(0, first, end - first), row_of(block_keys, row));
        let scores = scores.clamp_min(0.0).sum_dim(1).reshape(all);
        let block = indices::<D>([0, num_slots], &device).unsqueeze_dim::<2>(0).expand(all);
        let slot = block + slots.first_slots(row, &queries).expand(all);
        each(first, scores.gather(1, slot.clamp_max(num_slots as i64 - 1)));
    }
}

/// The indexer's target T and its own log softmax(I), as at the top of this file, `[queries, num_slots]` each, 0 for
/// blocks that are not read. `summed` are the attention's probabilities summed over its heads,
/// `[queries, num_slots * size]`; `scores` is I.
pub(super) fn distributions<B: Backend>(
    summed: Tensor<B, 2>,
    scores: Tensor<B, 2>,
    read: Tensor<B, 2, Bool>,
) -> [Tensor<B, 2>; 2] {
    let ([count, num_slots], tokens) = (scores.dims(), summed.dims()[1]);
    let unread = read.bool_not();
    let largest = summed.reshape([count, num_slots, tokens / num_slots]).max_dim(2);
    let largest = largest.reshape([count, num_slots]).mask_fill(unread.clone(), 0.0);
    let teacher = largest.clone() / largest.sum_dim(1).clamp_min(f32::MIN_POSITIVE);
    // The mask's value is finite, because a query may read no complete block.
    let student = log_softmax(scores.mask_fill(unread.clone(), -1e30), 1);
    [teacher, student.mask_fill(unread, 0.0)]
}

/// Causal attention over the tokens of `call.chosen`. Its backward pass gives `index` and `block_keys` the gradients of
/// `loss_weight * sum over queries of KL(T || softmax(I))`. The loss has no gradient in `qkv`, and the output has none
/// in `index` and `block_keys`.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - index: `[batch, seq_len, num_kv_heads + 2, head_dim]`; its queries alone are read
/// - block_keys: `[batch, num_slots, head_dim]`
/// - returns: `[batch, seq_len, num_heads, head_dim]`
pub(super) fn attention<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    index: Tensor<B, 4>,
    block_keys: Tensor<B, 3>,
    call: &IndexedCall<'_, B>,
) -> Tensor<B, 4> {
    let (reads, spec, weight) = (call.reads(), call.spec, call.loss_weight);
    let (qkv, index, keys) = (primitive(qkv), primitive(index), primitive(block_keys));
    let x = B::value(qkv.clone());
    let scored = [index.clone(), keys.clone()].map(B::value);
    let read = reads.forward(x.clone(), spec);
    let (choice, needs_qkv) = (call.choice, B::is_tracked(&qkv));
    tensor(B::node([&qkv, &index, &keys], read.output().o.clone(), move |d_o| {
        let lse = read.output().lse.clone();
        let [d_index, d_keys] = gradients(&reads, x.clone(), lse, scored, choice, (spec, weight));
        // Where an indexer alone is trained, nothing takes the first.
        [if needs_qkv { reads.backward(x, spec, read, d_o) } else { d_o }, d_index, d_keys]
    }))
}

/// The attention whose probabilities the indexer learns to predict.
struct Teacher<D: DeviceBackend> {
    /// Queries and keys, `[batch, seq_len, heads, head_dim]`.
    q: Tensor<D, 4>,
    k: Tensor<D, 4>,
    /// Log-sum-exp of each query, `[batch, num_heads, seq_len]`.
    lse: Tensor<D, 3>,
    spec: AttentionSpec,
}

impl<D: DeviceBackend> Teacher<D> {
    fn new(qkv: Float<D>, lse: Float<D>, spec: AttentionSpec) -> Self {
        let [q, k, _] = split_heads(tensor::<D, 4>(qkv), spec.num_kv_heads);
        Self { q, k, lse: tensor(lse), spec }
    }

    /// The keys of some tokens of a row, `[tokens, head_dim]` for each KV head.
    fn keys(&self, row: usize, tokens: &Tensor<D, 1, Int>) -> Vec<Tensor<D, 2>> {
        let [_, n, _, d] = self.k.dims();
        let of_head = |kv_head: usize| {
            let k = self.k.clone().narrow(0, row, 1).narrow(2, kv_head, 1);
            k.reshape([n, d]).select(0, tokens.clone())
        };
        (0..self.spec.num_kv_heads).map(of_head).collect()
    }

    /// The probabilities that the queries of a range give the first `count` tokens of `keys`, summed over all heads,
    /// `[queries, tokens]`.
    fn summed(&self, row: usize, [first, end]: [usize; 2], keys: &[Tensor<D, 2>], count: usize) -> Tensor<D, 2> {
        let (group, queries, dtype) = (self.spec.group_size(), end - first, compute_dtype(self.q.dtype()));
        let of_head = |(kv_head, k): (usize, &Tensor<D, 2>)| {
            let first_head = kv_head * group;
            let q = self.q.clone().narrow(0, row, 1).narrow(1, first, queries).narrow(2, first_head, group);
            let k = k.clone().narrow(0, 0, count);
            let logits = scores_of(q.squeeze_dim::<3>(0), k) * self.spec.softmax_scale;
            let lse = self.lse.clone().narrow(0, row, 1).narrow(1, first_head, group).narrow(2, first, queries);
            let lse = lse.squeeze_dim::<2>(0).transpose().unsqueeze_dim::<3>(2);
            (logits - lse.cast(dtype)).exp().sum_dim(1).reshape([queries, count])
        };
        let zeros = Tensor::zeros([queries, count], (&self.q.device(), dtype));
        keys.iter().enumerate().map(of_head).fold(zeros, |sum, p| sum + p)
    }
}

/// The gradients of the indexer's packed tensor and of the blocks' keys; zero where the loss has no weight. `lse` is
/// the attention's. Scores of all queries would not fit into memory, so a range of queries is computed at a time.
fn gradients<D: DeviceBackend>(
    reads: &Reads<D>,
    qkv: Float<D>,
    lse: Float<D>,
    [index, block_keys]: [Float<D>; 2],
    choice: BlockChoice,
    (spec, weight): (AttentionSpec, f64),
) -> [Float<D>; 2] {
    let (index, block_keys) = (tensor::<D, 4>(index), tensor::<D, 3>(block_keys));
    if weight == 0.0 {
        return [primitive(index.zeros_like()), primitive(block_keys.zeros_like())];
    }
    let slots = Slots::new(&reads.documents, choice.blocks);
    let chosen = reads.chosen.clone().map(Tensor::<D, 4, Int>::from_primitive);
    let ([batch, n, packed_heads, d], num_slots) = (index.dims(), block_keys.dims()[1]);
    let (heads, device, dtype) = (packed_heads - 2, index.device(), index.dtype());
    let teacher = Teacher::new(qkv, lse, spec);
    let (mut d_queries, mut d_keys) = (Vec::new(), Vec::new());
    for row in 0..batch {
        let (q_index, keys) = (queries_of_row(&index, row), row_of(&block_keys, row));
        let keys_of_slots = teacher.keys(row, &slots.tokens(row, num_slots));
        let mut d_row_keys = Tensor::<D, 2>::zeros([num_slots, d], (&device, compute_dtype(dtype)));
        for range in query_ranges(n, spec.group_size() * num_slots * slots.size) {
            let [first, end] = range;
            let (count, queries) = (end - first, indices::<D>(range, &device));
            // Blocks in later slots end after the last of these queries.
            let seen = end.div_ceil(slots.size);
            let read = slots.read(row, &queries, seen, chosen.as_ref());
            let summed = teacher.summed(row, range, &keys_of_slots, seen * slots.size);
            let (q_index, keys) = (q_index.clone().narrow(0, first, count), keys.clone().narrow(0, 0, seen));
            let scores = scores_of(q_index.clone(), keys.clone());
            let sums = scores.clone().clamp_min(0.0).sum_dim(1).reshape([count, seen]) * spec.softmax_scale;
            let [teacher, student] = distributions(summed, sums, read.clone());
            // Computes the gradient of the blocks' scores, then of each index head's `q . kb` (0 where the ReLU is 0).
            let d_sums = (student.exp().mask_fill(read.bool_not(), 0.0) - teacher) * (weight * spec.softmax_scale);
            let d_scores = d_sums.unsqueeze_dim::<3>(1).expand([count, heads, seen]);
            let d_scores = d_scores.mask_fill(scores.lower_equal_elem(0.0), 0.0);
            let d_scores = primitive(d_scores.reshape([count * heads, seen]).cast(dtype));
            // Computes the gradients of the index queries and of the block keys; `None`: no earlier sum is added.
            let d_query = D::gemm(GemmKind::Nn, d_scores.clone(), primitive(keys), None);
            d_queries.push(tensor::<D, 2>(d_query).reshape([1, count, heads, d]));
            let q_index = primitive(q_index.reshape([count * heads, d]));
            let d_seen = tensor::<D, 2>(D::linear_weight_gradient(q_index, d_scores, None));
            let sum = d_row_keys.clone().narrow(0, 0, seen) + d_seen.cast(compute_dtype(dtype));
            d_row_keys = d_row_keys.slice_assign([0..seen, 0..d], sum);
        }
        d_keys.push(d_row_keys.unsqueeze_dim::<3>(0));
    }
    let d_queries = Tensor::cat(d_queries, 1).reshape([batch, n, heads, d]);
    let unread = Tensor::zeros([batch, n, 2, d], (&device, dtype));
    let d_index = Tensor::cat(vec![d_queries.cast(dtype), unread], 2);
    [primitive(d_index), primitive(Tensor::cat(d_keys, 0).cast(dtype))]
}

/// T and log softmax(I) of some queries of the first row, in f32. `p` are the attention's probabilities over the tokens
/// that are read, summed over heads, `[queries, at least seq_len]` from the first token of each query's document on:
/// `starts`, `[queries, 1]`.
pub(super) fn measured<B: SieveBackend>(
    p: Tensor<B::Inner, 2>,
    starts: Tensor<B::Inner, 2, Int>,
    index: &Tensor<B, 4>,
    block_keys: &Tensor<B, 3>,
    queries: &Tensor<B::Inner, 1, Int>,
    call: &IndexedCall<'_, B>,
) -> [Tensor<B::Inner, 2>; 2] {
    let slots = Slots::<B::Inner>::new(&call.documents.bounds(), call.choice.blocks);
    let chosen = call.chosen.clone().map(|chosen| Tensor::from_primitive(chosen.into_primitive()));
    let (index, block_keys) = (value::<B, 4>(index.clone()), value::<B, 3>(block_keys.clone()));
    let (num_slots, count) = (block_keys.dims()[1], queries.dims()[0]);
    let q = queries_of_row(&index, 0).cast(DType::F32).select(0, queries.clone()).swap_dims(0, 1);
    let [heads, _, d] = q.dims();
    let keys = block_keys.narrow(0, 0, 1).cast(DType::F32).expand([heads, num_slots, d]);
    let scores = q.matmul(keys.swap_dims(1, 2)).clamp_min(0.0).sum_dim(0) * call.spec.softmax_scale;
    // Slots of other documents are not read.
    let position = (slots.tokens(0, num_slots).unsqueeze_dim::<2>(0) - starts).clamp_min(0);
    let summed = p.gather(1, position);
    let read = slots.read(0, queries, num_slots, chosen.as_ref());
    distributions(summed, scores.reshape([count, num_slots]), read)
}
