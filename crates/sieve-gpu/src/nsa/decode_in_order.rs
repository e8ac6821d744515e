//! Launch of `kernels/nsa_token_lists.cu`: a new token attends over the blocks that it chose by the kernels of whole
//! rows, with their bits.
use super::lists::ChoiceLists;
use super::no_gap;
use super::selected::Work;
use crate::KernelError;
use crate::attention::{AttentionShape, DecodeScratch, DecodeStep, Heads, KvCache, Qkv, require_scale};
use crate::runtime::{
    CudaTensor, DType, NsaSelectedAttentionForwardParams, SourceKernel, SumOrder, operands, params, require,
};
use sieve_core::{BlockChoice, selected_gap};

const NAME: &str = "nsa_token_lists";
const THREADS: usize = 128;

impl KvCache {
    /// Attention of `q`, bf16 `[batch, 1, num_heads, head_dim]`, over the tokens of the blocks `chosen`, i32
    /// `[batch, 1, choosers, number of blocks]`, of this cache, which holds `length` tokens a row and the query's own.
    /// A chooser is a group of query heads. With sums in a fixed order the result has the bits of a whole row.
    ///
    /// # Errors
    /// Types or sizes that do not fit or have no kernel.
    pub(super) fn attend_chosen(
        &self,
        q: &CudaTensor,
        length: &CudaTensor,
        step: DecodeStep<'_>,
        (chosen, choice): (&CudaTensor, BlockChoice),
        scratch: &DecodeScratch,
    ) -> Result<CudaTensor, KernelError> {
        if q.policy().sums == SumOrder::Fixed {
            return self.attend_chosen_in_order(q, length, step, chosen, choice);
        }
        let [batch, _, choosers, count] = chosen.dims(NAME, "chosen")?;
        let chosen = chosen.reshaped(NAME, "chosen", &[batch, choosers, count])?;
        let (q, block_size) = (Heads::all(q), choice.blocks.select_block_size);
        self.attention_decode_chosen(&q, length, step, scratch, &chosen, block_size)
    }

    /// [`attend_chosen`](Self::attend_chosen) by the kernels of whole rows.
    fn attend_chosen_in_order(
        &self,
        q: &CudaTensor,
        length: &CudaTensor,
        step: DecodeStep<'_>,
        chosen: &CudaTensor,
        choice: BlockChoice,
    ) -> Result<CudaTensor, KernelError> {
        let [_, _, choosers, num_chosen] = chosen.dims(NAME, "chosen")?;
        let shape = Heads::all(q).as_queries(NAME, self.k.shape()[1], self.k.shape()[3])?;
        let AttentionShape { batch, num_heads, num_kv_heads, head_dim, .. } = shape;
        let capacity = self.capacity(NAME, &shape)?;
        let block_size = choice.attended().select_block_size;
        let fits = choosers.is_multiple_of(num_kv_heads) && num_heads.is_multiple_of(choosers);
        require!(fits, NAME, "choosers": choosers, "groups of the {num_heads} heads of {num_kv_heads} KV heads");
        // Query heads of a chooser, and choosers of a KV head.
        let (group, members) = (num_heads / choosers, choosers / num_kv_heads);
        no_gap(NAME, selected_gap(block_size, head_dim, group))?;
        require_scale(NAME, step.softmax_scale)?;
        require!(step.max_length < capacity, NAME, "length": step.max_length, "below the cache's capacity, {capacity}");
        operands!(only NAME,
            q: BF16[batch, 1, num_heads, head_dim] contiguous,
            chosen: I32[batch, 1, choosers, num_chosen] contiguous,
        );
        operands!(NAME, length: I32[batch]);
        // Each row and KV head of the cache is a row of one KV head, in a launch for each of its choosers.
        let (rows, num_selected) = (batch * num_kv_heads, num_chosen * choice.pieces());
        let new = |shape: &[usize]| chosen.empty_contiguous(shape, DType::I32);
        let (entries, items) = (new(&[members * rows, 1, num_selected, 2]), new(&[members * rows, 1, num_selected, 4]));
        let (num_items, indices) = (new(&[members * (rows + 1)]), new(&[members * rows, 1, 1, num_selected]));
        let documents = [new(&[capacity]), new(&[capacity])];
        let tensors = [chosen, &length, &indices, &entries, &items, &num_items, &documents[0], &documents[1]];
        let params =
            params!(NsaTokenListsParams { num_chosen, pieces: choice.pieces(), block_size, capacity, members });
        // SAFETY: sizes checked above; writes every entry and item, and the bounds of each row's token.
        unsafe { nsa_token_lists_kernel().launch([choosers, batch, 1], &tensors, &params) }?;

        let of_heads =
            |x: &CudaTensor, tokens: usize, heads: usize| x.reshaped(NAME, "heads", &[rows, tokens, heads, head_dim]);
        let of_q = of_heads(q, 1, members * group)?;
        let [k, v] = [of_heads(&self.k, capacity, 1)?, of_heads(&self.v, capacity, 1)?].map(|x| Heads::all(&x));
        let shape = AttentionShape { batch: rows, num_heads: group, num_kv_heads: 1, ..shape };
        let (o, lse) = (q.empty_contiguous(q.shape(), DType::BF16), q.empty_contiguous(&shape.lse(), DType::F32));
        for member in 0..members {
            let of_member = |x: &CudaTensor, rows: usize| x.row_range(NAME, "lists", member * rows, rows);
            let lists = ChoiceLists {
                entries: of_member(&entries, rows)?,
                items: of_member(&items, rows)?,
                num_items: of_member(&num_items, rows + 1)?,
            };
            let work = Work {
                shape,
                qkv: Qkv { q: Heads::some(&of_q, member * group, group), k: k.clone(), v: v.clone() },
                documents: documents.clone(),
                indices: of_member(&indices, rows)?,
                block_size,
                num_selected,
                softmax_scale: step.softmax_scale,
            };
            // Entries name a token by its position, at which all rows read their documents' bounds; a row has one
            // query.
            let params = NsaSelectedAttentionForwardParams {
                seq_len: 0u64.into(),
                q_token_stride: 0u64.into(),
                ..work.params(&lists)?
            };
            let (first, width) = (member * group * head_dim, members * group * head_dim);
            // SAFETY: sizes, strides and types checked above; each list is of the row's one query.
            unsafe { work.attend(&lists, &params, ([&o, &lse], [first, width, width]), 0..1) }?;
        }
        Ok(o)
    }
}

/// The kernel that lists the blocks of a new token.
fn nsa_token_lists_kernel() -> SourceKernel {
    SourceKernel::new(NAME).threads(THREADS).starts_early()
}
