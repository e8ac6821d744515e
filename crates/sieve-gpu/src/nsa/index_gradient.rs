//! Launch of `kernels/hopper_index_gradient.cu`: how an indexer (MSA, arXiv:2606.13392) learns over chosen blocks.
use super::hopper;
use super::selected::Work;
use super::{Bounds, lists::ChoiceLists};
use crate::KernelError;
use crate::attention::{AttentionShape, Heads, Qkv, arriving};
use crate::dma::convert_rows;
use crate::runtime::{CudaTensor, DType, NsaSelectedAttentionForwardParams, SumOrder, operands, params, require};
use crate::step::empty_zero;
use sieve_core::NsaBlocks;

const NAME: &str = "index_gradient";

/// What the gradient of an indexer's loss reads beside queries and keys of its attention.
#[derive(Clone, Copy, Debug)]
pub struct IndexGradient<'a> {
    /// The indexer's queries, one a KV head, its key, and a head that is not read: bf16 `[batch, seq_len,
    /// num_kv_heads + 2, head_dim]`.
    pub index: &'a CudaTensor,
    /// Log-sum-exp of the attention over the chosen tokens, f32 `[batch, num_heads, seq_len]`.
    pub lse: &'a CudaTensor,
    /// The same of the indexer's scores, f32 `[batch, num_kv_heads, seq_len]`.
    pub index_lse: &'a CudaTensor,
    /// The chosen blocks, as [`Qkv::nsa_selected_attention_forward`] takes them.
    pub block_indices: &'a CudaTensor,
    /// Their lists, as that attention made them.
    pub lists: &'a [ChoiceLists],
    /// What the divergence of one query and KV head weighs in the loss.
    pub weight: f32,
}

impl Qkv {
    /// The gradient of `weight * sum over queries and KV heads of KL(mean probabilities of the group || the
    /// indexer's)` over the chosen tokens in the indexer's packed tensor (bf16, shaped as it), with zeros for the head
    /// that is not read. `None` where no kernel has this call: off Hopper.
    ///
    /// # Errors
    /// Another type than bf16, sizes that do not fit or have no kernel, lists of other queries.
    pub fn index_gradient(
        &self,
        documents: Bounds,
        call: IndexGradient<'_>,
        blocks: NsaBlocks,
        softmax_scale: f32,
    ) -> Result<Option<CudaTensor>, KernelError> {
        let work = Work::new(self, documents, call.block_indices, blocks, softmax_scale)?;
        let shape = work.shape;
        if !hopper::is_hopper(&shape, self.q.tensor()) {
            return Ok(None);
        }
        let AttentionShape {
            batch,
            seq_len,
            num_kv_heads: groups,
            head_dim,
            ..
        } = shape;
        operands!(NAME,
            index: BF16[batch, seq_len, groups + 2, head_dim] aligned = call.index,
            lse: F32[batch, shape.num_heads, seq_len] = call.lse,
            index_lse: F32[batch, groups, seq_len] = call.index_lse,
        );
        let got = || format!("{} of a row's ranges of queries", call.lists.len());
        require!(work.ranges().count() == call.lists.len(), NAME, "lists:": got(), "the lists of all ranges");
        let gradient = index.empty_contiguous(index.shape(), DType::BF16);
        let [d_query, d_key, d_unread] =
            [(0, groups), (groups, 1), (groups + 1, 1)].map(|(first, count)| Heads::some(&gradient, first, count));
        let out = Qkv {
            q: d_query,
            k: d_key,
            v: d_unread,
        };
        let [d_query, d_key, d_unread] = out.head_words(NAME)?;
        // The indexer's heads: one query head for each list, with one part a choice.
        let own = Work {
            shape: AttentionShape {
                num_heads: groups,
                ..shape
            },
            softmax_scale: softmax_scale * call.weight,
            ..work.clone()
        };
        // In a fixed order each KV head has sums of its own.
        let sums = self.policy().sums;
        let is_fixed = sums == SumOrder::Fixed;
        let key_sum = empty_zero(&index, &[batch, if is_fixed { groups } else { 1 }, seq_len, head_dim])?;
        let token = (groups + 2) * head_dim;
        let kernel = arriving(hopper::index_gradient_kernel(head_dim, sums), self.policy());
        for (range, lists) in work.ranges().zip(call.lists) {
            let parts = own.parts(lists, head_dim, DType::BF16);
            let [q, k] = [&work.qkv.q, &work.qkv.k].map(Heads::tensor);
            // Which piece adds next, of each key and a quarter of its columns.
            let turns = match is_fixed {
                true => Some(empty_zero(&index, &[batch, groups, seq_len, 4])?),
                false => None,
            };
            let (operands, mut results) = ([q, k, &index, &lse, &index_lse], vec![&parts, &key_sum]);
            results.extend(&turns);
            let params = params!(IndexGradientParams {
                base: NsaSelectedAttentionForwardParams {
                    v_offset: (groups * head_dim).into(),
                    v_token_stride: token.into(),
                    v_batch_stride: (token * seq_len).into(),
                    ..work.params(lists)?
                },
                index_q_offset: 0usize,
            });
            // SAFETY: sizes, strides and types checked above; the sums were cleared.
            unsafe { work.launch((&kernel, true), lists, &operands, &results, &params) }?;
            own.combine(lists, [&parts; 2], [&gradient; 2], d_query, range, true)?;
        }
        convert_rows(&key_sum, &out.k, d_key, own.softmax_scale)?;
        convert_rows(&key_sum, &out.v, d_unread, 0.0)?;
        Ok(Some(gradient))
    }
}
