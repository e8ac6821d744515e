//! Launch of `kernels/hopper_index_gradient.cu`: the gradient of an indexer's loss (MSA, arXiv:2606.13392) over chosen
//! blocks.
use super::hopper;
use super::selected::{AttendedBlocks, Joined, Work};
use super::{Bounds, lists::ChoiceLists};
use crate::KernelError;
use crate::attention::{AttentionShape, Heads, Qkv, arriving};
use crate::dma::{ConvertedSums, convert_rows};
use crate::runtime::{CudaTensor, DType, SumOrder, operands, params, require};
use crate::step::empty_zero;

const NAME: &str = "index_gradient";

/// Operands of the gradient of an indexer's loss.
#[derive(Clone, Copy, Debug)]
pub struct IndexGradient<'a> {
    /// Queries and keys of the attention that the indexer learns to predict, bf16 `[batch, seq_len, heads, head_dim]`.
    pub queries_and_keys: [&'a Heads; 2],
    /// Packed heads of the indexer, bf16 `[batch, seq_len, num_kv_heads + 2, head_dim]`: a query for each KV head, a
    /// key, and a value that is not read.
    pub index: &'a CudaTensor,
    /// Log-sum-exp of the attention over the chosen tokens, f32 `[batch, num_heads, seq_len]`.
    pub lse: &'a CudaTensor,
    /// The blocks each query chose, ascending.
    pub blocks: AttendedBlocks<'a>,
    /// The lists of the chosen blocks from the forward pass of the attention.
    pub lists: &'a [ChoiceLists],
    /// Weight of the KL divergence of one query and KV head in the loss.
    pub weight: f32,
}

impl IndexGradient<'_> {
    /// The gradient of the indexer's packed heads (bf16, in their shape, zero for the value) of the loss `weight * sum
    /// of KL(P || Q)` over queries and KV heads. P is the mean over a group's query heads of the attention's
    /// probabilities over the chosen tokens, Q the indexer's probabilities. `None` on devices other than
    /// Hopper, which have no kernel.
    ///
    /// # Errors
    /// Another type than bf16, sizes that do not fit or have no kernel, lists of other queries.
    pub fn index_gradient(self, documents: Bounds, softmax_scale: f32) -> Result<Option<CudaTensor>, KernelError> {
        let [q, k] = self.queries_and_keys;
        let dims_of_k = k.sizes(NAME, "k")?;
        let [_, _, groups, head_dim] = dims_of_k;
        let shape = q.as_queries(NAME, groups, head_dim)?;
        let AttentionShape { batch, seq_len, .. } = shape;
        require!(dims_of_k == [batch, seq_len, groups, shape.head_dim], NAME, "k": format!("of shape {dims_of_k:?}"),
            "the batch, the tokens and the width of q, {shape:?}");
        if !hopper::is_hopper(&shape, q.tensor()) {
            return Ok(None);
        }
        operands!(NAME,
            index: BF16[batch, seq_len, groups + 2, head_dim] aligned = self.index,
            lse: F32[batch, shape.num_heads, seq_len] = self.lse,
        );
        let num_index_keys = 1;
        // The kernel reads the indexer's key where attention's kernels read values.
        let read = Qkv { q: q.clone(), k: k.clone(), v: Heads::some(&index, groups, num_index_keys) };
        let work = Work::of(shape, &read, documents, self.blocks, softmax_scale)?;
        let got = || format!("{} of a row's ranges of queries", self.lists.len());
        require!(work.ranges().count() == self.lists.len(), NAME, "lists:": got(), "the lists of all ranges");
        let gradient = index.empty_contiguous(index.shape(), DType::BF16);
        let out = Qkv::packed(&gradient, groups, num_index_keys);
        let [d_query, d_key, d_value] = out.head_words(NAME)?;
        // The same work with the indexer's heads: one query head for each KV head, so one part for each choice.
        let scores = Work {
            shape: AttentionShape { num_heads: groups, ..shape },
            qkv: Qkv::packed(&index, groups, num_index_keys),
            ..work.clone()
        };
        let index_work = Work { softmax_scale: softmax_scale * self.weight, ..scores.clone() };
        let index_lse = index.empty_contiguous(&scores.shape.lse(), DType::F32);
        // In a fixed order each KV head has sums of its own.
        let policy = q.tensor().policy();
        let sums = policy.sums;
        let is_fixed = sums == SumOrder::Fixed;
        let key_sum = empty_zero(&index, &[batch, if is_fixed { groups } else { 1 }, seq_len, head_dim])?;
        let [lse_kernel, kernel] =
            [hopper::index_lse_kernel(head_dim, work.listed), hopper::index_gradient_kernel(head_dim, sums)]
                .map(|kernel| arriving(kernel, policy));
        for (range, lists) in work.ranges().zip(self.lists) {
            work.require_own(lists, &range)?;
            let part_lse = scores.parts(lists, Joined::LogSumExp, 1, DType::F32);
            let (operands, params) = ([&index, &index], scores.params(lists)?);
            // SAFETY: sizes, strides and types checked above.
            unsafe { scores.launch(&lse_kernel, lists, &operands, &[&part_lse], &params) }?;
            let no_output = [0; 3];
            scores.combine(lists, (Joined::LogSumExp, &[&part_lse, &index_lse]), no_output, range.clone())?;
            let parts = index_work.parts(lists, Joined::IndexGradient, head_dim, DType::BF16);
            let [q, k] = [&work.qkv.q, &work.qkv.k].map(Heads::tensor);
            // Semaphores that order the adds to the gradient of each key and quarter of its columns.
            let semaphores = is_fixed.then(|| empty_zero(&index, &[batch, groups, seq_len, 4])).transpose()?;
            let (operands, mut results) = ([q, k, &index, &lse, &index_lse], vec![&parts, &key_sum]);
            results.extend(&semaphores);
            let params = params!(IndexGradientParams { base: work.params(lists)?, index_q_offset: 0usize });
            // SAFETY: sizes, strides and types checked above; the sums were cleared.
            unsafe { work.launch(&kernel, lists, &operands, &results, &params) }?;
            index_work.combine(lists, (Joined::IndexGradient, &[&parts, &gradient]), d_query, range)?;
        }
        convert_rows(&key_sum, ConvertedSums::All, &out.k, d_key, index_work.softmax_scale)?;
        // A scale of 0 writes the zero gradient of the value.
        convert_rows(&key_sum, ConvertedSums::All, &out.v, d_value, 0.0)?;
        Ok(Some(gradient))
    }
}
