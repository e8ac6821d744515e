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
use super::{IndexGradientCall, Read, Reads, pooled, repeat_heads};
use crate::backend::value;
use crate::tensors::{Float, compute_dtype, primitive, split_heads, tensor};
use crate::{AttentionSpec, DeviceBackend, Documents, SieveBackend};
use burn::tensor::{Bool, DType, Int, Tensor};
use sieve_core::BlockChoice;

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
    tensor(B::node([&qkv, &index], read.output().o.clone(), move |d_o| {
        let d_index = index_gradient(&reads, &read, x.clone(), scored, spec, weight);
        [reads.backward(x, spec, read, d_o), d_index]
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
    let (groups, group, blocks) = (call.spec.num_kv_heads, call.spec.group_size(), call.choice.blocks);
    let ([_, n, _, d], size) = (qkv.dims(), blocks.select_block_size);
    let (count, num_blocks, device) = (MEASURED_QUERIES.min(n), n.div_ceil(size), qkv.device());
    let of_row = |x: Tensor<B, 4>| value::<B, 4>(x).narrow(0, 0, 1).cast(DType::F32).squeeze_dim::<3>(0);
    // The measured queries lie in the middle of `count` equal parts of the row.
    let queries: Vec<i32> = (0..count).map(|at| ((2 * at + 1) * n / (2 * count)) as i32).collect();
    let queries = Tensor::<B::Inner, 1, Int>::from_ints(queries.as_slice(), &device);
    let packed_index = index.clone();
    let [qkv, index] = [of_row(qkv), of_row(index)];
    let heads = |x: &Tensor<B::Inner, 3>, first: usize, count: usize| x.clone().narrow(1, first, count).swap_dims(0, 1);
    let of_queries = |x: Tensor<B::Inner, 3>| x.select(1, queries.clone());

    // Each query's keys are taken in the order of its document, so that a block is a range of them. Burn's kernels
    // reduce a dimension in one thread: sums and maxima go over the tokens of a block, then over blocks.
    let (tokens, all) = (num_blocks * size, |heads| [groups, heads, count, num_blocks, size]);
    let range = |len: usize| Tensor::<B::Inner, 1, Int>::arange(0..len as i64, &device).unsqueeze_dim::<2>(0);
    let starts = Tensor::<B::Inner, 2, Int>::from_primitive(call.documents.start.clone().into_primitive());
    let starts = starts.narrow(0, 0, 1).select(1, queries.clone()).swap_dims(0, 1);
    let position = queries.clone().unsqueeze_dim::<2>(1) - starts.clone();
    let key = (range(tokens) + starts.clone()).clamp_max(n as i64 - 1).unsqueeze_dim::<3>(0);
    let of_document = |scores: Tensor<B::Inner, 3>, heads: usize| {
        let scores = scores.reshape([groups * heads, count, n]);
        let scores = scores.gather(2, key.clone().expand([groups * heads, count, tokens]));
        (scores * call.spec.softmax_scale).reshape(all(heads))
    };
    let hidden = range(tokens).greater(position.clone()).reshape([1, 1, count, num_blocks, size]);
    let log_softmax = |scores: Tensor<B::Inner, 5>, hidden: Tensor<B::Inner, 5, Bool>| {
        let scores = scores.mask_fill(hidden, f32::NEG_INFINITY);
        let shifted = scores.clone() - scores.max_dim(4).max_dim(3);
        shifted.clone() - shifted.exp().sum_dim(4).sum_dim(3).log()
    };
    let q = of_queries(heads(&qkv, 0, groups * group)).reshape([groups, group * count, d]);
    let k = heads(&qkv, groups * group, groups);
    let logits = of_document(q.matmul(k.swap_dims(1, 2)), group);
    let scores = of_queries(heads(&index, 0, groups));
    let scores = scores.matmul(heads(&index, groups, 1).expand([groups, n, d]).swap_dims(1, 2));
    // Computes the probabilities of the keys that are not hidden, averaged over the heads of each group.
    let mean_over = |hidden: &Tensor<B::Inner, 5, Bool>| log_softmax(logits.clone(), hidden.clone()).exp().mean_dim(1);
    let dense = mean_over(&hidden);

    // Masks the keys outside the chosen blocks. `chosen` lists attended blocks, the pieces of larger ones.
    let not_chosen = {
        let chosen = Tensor::<B::Inner, 4, Int>::from_primitive(chosen.into_primitive()).narrow(0, 0, 1);
        let chosen = chosen.select(1, queries.clone()).permute([2, 1, 0, 3]);
        let num_pieces = num_blocks * call.choice.pieces();
        let is_chosen = range(num_pieces).reshape([1, 1, num_pieces, 1]).equal(chosen).any_dim(3);
        let is_chosen = is_chosen.expand([groups, count, num_pieces, tokens / num_pieces]);
        hidden.clone().bool_or(is_chosen.reshape(all(1)).bool_not())
    };
    // Divides the probability in the chosen blocks by the probability in the best blocks.
    let recall = {
        let of_blocks = dense.clone().sum_dim(4).reshape([groups, count, num_blocks]);
        // Each query reads its own block, so the best blocks have it too: 1 more than a probability puts it first, and
        // the sum is lowered by these ones again.
        let is_own = range(num_blocks).equal(position.div_scalar(size as i64)).unsqueeze_dim::<3>(0);
        let best = match blocks.num_selected_blocks {
            most if most < num_blocks => (of_blocks + is_own.float()).topk(most, 2).sum() - (groups * count) as f64,
            _ => of_blocks.sum(),
        };
        dense.mask_fill(not_chosen.clone(), 0.0).sum() / best
    };
    let unread = if call.chosen.is_some() { not_chosen } else { hidden };
    let p = mean_over(&unread);
    if let Some(keys) = &call.block_keys {
        let p = p.sum_dim(0).reshape([count, tokens]);
        let [teacher, student] = pooled::measured(p, starts, &packed_index, keys, &queries, call);
        let log_teacher = teacher.clone().clamp_min(f32::MIN_POSITIVE).log();
        let (mean, p_index) = (1.0 / count as f64, student.clone().exp());
        let divergence = (teacher * (log_teacher - student.clone())).sum() * mean;
        return Tensor::cat(vec![divergence, recall, (p_index * student).sum() * -mean], 0);
    }
    // `0 log 0` counts as 0 in the divergence and in the entropy.
    let log_index = log_softmax(of_document(scores, 1), unread.clone()).mask_fill(unread, 0.0);
    let log_p = p.clone().clamp_min(f32::MIN_POSITIVE).log();
    let mean = 1.0 / (groups * count) as f64;
    let divergence = (p * (log_p - log_index.clone())).sum() * mean;
    let entropy = (log_index.clone().exp() * log_index).sum() * -mean;
    Tensor::cat(vec![divergence, recall, entropy], 0)
}
