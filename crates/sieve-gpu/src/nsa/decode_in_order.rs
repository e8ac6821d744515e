//! Launch of `kernels/nsa_token_lists.cu`: a token behind a cache attends over its blocks by the kernels of whole rows.
//! A block's partial result sees no other query, and a query's results are joined in the order of its blocks, so that
//! the token has the bits of its row.
use super::lists::{ChoiceLists, Listed};
use super::no_gap;
use super::selected::Work;
use crate::KernelError;
use crate::attention::{AttentionShape, DecodeScratch, DecodeStep, Heads, KvCache, Qkv, require_scale};
use crate::runtime::{
    CudaTensor, DType, NsaSelectedAttentionForwardParams, SourceKernel, SumOrder, operands, params, require,
    require_non_empty,
};
use sieve_core::{selected_gap, selected_pieces};

const NAME: &str = "nsa_token_lists";
const THREADS: usize = 128;

impl KvCache {
    /// Attention of the queries `q` of one token a row over the tokens of the blocks `chosen`, i32
    /// `[batch, 1, choosers, number of blocks]`, of `block_size` tokens of this cache, as
    /// [`selected_attention_token`](Self::selected_attention_token), whose bits it has with sums in a fixed order. Then
    /// the queries must be all heads of a contiguous tensor.
    ///
    /// # Errors
    /// Types or sizes that do not fit or have no kernel.
    pub(super) fn attend_chosen(
        &self,
        q: &Heads,
        length: &CudaTensor,
        step: DecodeStep<'_>,
        (chosen, block_size): (&CudaTensor, usize),
        scratch: &DecodeScratch,
    ) -> Result<CudaTensor, KernelError> {
        let [batch, _, choosers, count] = chosen.dims(NAME, "chosen")?;
        let chosen = chosen.reshaped(NAME, "chosen", &[batch, choosers, count])?;
        if q.tensor().policy().sums == SumOrder::Fixed {
            return self.selected_attention_token(q.tensor(), length, step, &chosen, block_size);
        }
        self.attention_decode_chosen(q, length, step, scratch, &chosen, block_size)
    }

    /// Attention of `q`, bf16 `[batch, 1, num_heads, head_dim]`, over the tokens of the blocks `chosen` of this cache,
    /// i32 `[batch, choosers, number of blocks]`: ascending indices of blocks of `block_size` tokens, then -1. A
    /// chooser is a KV head, or one of as many groups of query heads in each. The cache holds `length` tokens a row,
    /// i32 `[batch]`, and the query's own, whose block is the last that is read. A query with an empty list gets an
    /// output of zeros. The result has the bits of that row of
    /// [`nsa_selected_attention_forward`](Qkv::nsa_selected_attention_forward).
    ///
    /// # Errors
    /// Types or sizes that do not fit or have no kernel.
    pub fn selected_attention_token(
        &self,
        q: &CudaTensor,
        length: &CudaTensor,
        step: DecodeStep<'_>,
        chosen: &CudaTensor,
        block_size: usize,
    ) -> Result<CudaTensor, KernelError> {
        let shape = self.query_shape(NAME, &Heads::all(q))?;
        let AttentionShape { batch, num_heads, num_kv_heads, head_dim, .. } = shape;
        let capacity = self.capacity(NAME, &shape)?;
        let [_, choosers, num_chosen] = chosen.dims(NAME, "chosen")?;
        let fits = choosers > 0 && choosers.is_multiple_of(num_kv_heads) && num_heads.is_multiple_of(choosers);
        require!(fits, NAME, "choosers": choosers, "groups of the {num_heads} heads of {num_kv_heads} KV heads");
        require!(head_dim == shape.head_dim_v, NAME, "call:": "values of a different width", "one width");
        require_non_empty(NAME, "number of chosen blocks", num_chosen)?;
        require_non_empty(NAME, "block size", block_size)?;
        // Query heads of a chooser, and choosers of a KV head.
        let (group, members) = (num_heads / choosers, choosers / num_kv_heads);
        let pieces = selected_pieces(block_size);
        let block_size = block_size / pieces;
        no_gap(NAME, selected_gap(block_size, head_dim, group))?;
        require_scale(NAME, step.softmax_scale)?;
        require!(step.max_length < capacity, NAME, "length": step.max_length, "below the cache's capacity, {capacity}");
        operands!(only NAME,
            q: BF16[batch, 1, num_heads, head_dim] contiguous,
            chosen: I32[batch, choosers, num_chosen] contiguous,
        );
        operands!(NAME, length: I32[batch]);
        // Each row and KV head of the cache is a row of one KV head, in a launch for each of its choosers.
        let (rows, num_selected) = (batch * num_kv_heads, num_chosen * pieces);
        let new = |shape: &[usize]| chosen.empty_contiguous(shape, DType::I32);
        let (entries, items) = (new(&[members * rows, 1, num_selected, 2]), new(&[members * rows, 1, num_selected, 4]));
        let (num_items, indices) = (new(&[members * (rows + 1)]), new(&[members * rows, 1, 1, num_selected]));
        let documents = [new(&[capacity]), new(&[capacity])];
        let tensors = [chosen, &length, &indices, &entries, &items, &num_items, &documents[0], &documents[1]];
        let params = params!(NsaTokenListsParams { num_chosen, pieces, block_size, capacity, members });
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
                listed: Listed { block_size, per_list: 1 },
                num_selected,
                softmax_scale: step.softmax_scale,
                onto: false,
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
