//! A query behind a cache attends over its chosen blocks by the kernels of whole rows: a choice's partial result sees
//! no other query, and a query's results are joined in the order of its blocks, so a step has the bits of a row.
use super::lists::ChoiceLists;
use super::selected::Work;
use super::{Bounds, no_gap};
use crate::KernelError;
use crate::attention::{AttentionShape, Heads, KvCache, Qkv, require_scale};
use crate::runtime::{CudaTensor, DType, NsaSelectedAttentionForwardParams, operands, require, require_non_empty};
use sieve_core::selected_gap;

const NAME: &str = "nsa_selected_attention";

/// The blocks of one query for each row and KV head, as the caller lists them: each is the only entry of its list.
#[derive(Debug, Clone, Copy)]
pub struct TokenBlocks<'a> {
    /// Ascending indices of blocks up to the query's own, then -1, i32 `[batch, num_kv_heads, blocks]`.
    pub indices: &'a CudaTensor,
    /// `{the query's position, number of the block among its row's}`, i32 `[batch, num_kv_heads, blocks, 2]`.
    pub entries: &'a CudaTensor,
    /// `{number of the block, 1, its index, 0}`, i32 `[batch, num_kv_heads, blocks, 4]`.
    pub items: &'a CudaTensor,
    /// Blocks of each row and KV head, then 0, i32 `[batch * num_kv_heads + 1]`. The kernels count in it.
    pub num_items: &'a CudaTensor,
    /// Tokens of a block, up to 64.
    pub block_size: usize,
}

impl KvCache {
    /// Attention of `q`, bf16 `[batch, 1, num_heads, head_dim]`, over the tokens of its blocks in this cache, with the
    /// bits of that row of [`selected_attention_forward`](Qkv::selected_attention_forward). At a query's position
    /// `documents`, i32 `[capacity]`, hold 0 and the position behind it. The lists' numbers are not checked.
    ///
    /// # Errors
    /// Types or sizes that do not fit or have no kernel.
    pub fn selected_attention_token(
        &self,
        q: &CudaTensor,
        blocks: TokenBlocks<'_>,
        documents: Bounds,
        softmax_scale: f32,
    ) -> Result<CudaTensor, KernelError> {
        let TokenBlocks { indices, entries, items, num_items, block_size } = blocks;
        let shape = self.query_shape(NAME, &Heads::all(q))?;
        let capacity = self.capacity(NAME, &shape)?;
        let AttentionShape { batch, num_heads, num_kv_heads, head_dim, .. } = shape;
        let group = shape.group_size();
        require!(head_dim == shape.head_dim_v, NAME, "call:": "values of a different width", "one width");
        require_non_empty(NAME, "block size", block_size)?;
        no_gap(NAME, selected_gap(block_size, head_dim, group))?;
        require_scale(NAME, softmax_scale)?;
        let [_, _, num_selected] = indices.dims(NAME, "indices")?;
        require_non_empty(NAME, "number of chosen blocks", num_selected)?;
        let [doc_start, doc_end] = documents;
        operands!(only NAME,
            q: BF16[batch, 1, num_heads, head_dim] contiguous,
            indices: I32[batch, num_kv_heads, num_selected] contiguous,
            entries: I32[batch, num_kv_heads, num_selected, 2] contiguous,
            items: I32[batch, num_kv_heads, num_selected, 4] contiguous,
            num_items: I32[batch * num_kv_heads + 1] contiguous,
            doc_start: I32[capacity] contiguous,
            doc_end: I32[capacity] contiguous,
        );
        // Each row and KV head of the cache is a row of one KV head.
        let rows = batch * num_kv_heads;
        let of_rows = |x: &CudaTensor, sizes: [usize; 3]| x.reshaped(NAME, "rows", &[&[rows][..], &sizes].concat());
        let lists = ChoiceLists {
            entries: of_rows(entries, [1, num_selected, 2])?,
            items: of_rows(items, [1, num_selected, 4])?,
            num_items: num_items.clone(),
        };
        let work = Work {
            shape: AttentionShape { batch: rows, num_heads: group, num_kv_heads: 1, ..shape },
            qkv: Qkv::separate(
                &of_rows(q, [1, group, head_dim])?,
                &of_rows(&self.k, [capacity, 1, head_dim])?,
                &of_rows(&self.v, [capacity, 1, head_dim])?,
            ),
            documents: documents.map(CudaTensor::clone),
            indices: of_rows(indices, [1, 1, num_selected])?,
            block_size,
            num_selected,
            softmax_scale,
        };
        // Entries name a token by its position, at which all rows read the bounds; a row has one query.
        let params = NsaSelectedAttentionForwardParams {
            seq_len: 0u64.into(),
            q_token_stride: 0u64.into(),
            ..work.params(&lists)?
        };
        let (o, lse) = (q.empty_contiguous(q.shape(), DType::BF16), q.empty_contiguous(&work.shape.lse(), DType::F32));
        let width = group * head_dim;
        // SAFETY: sizes, strides and types checked above; each list is of the row's one query.
        unsafe { work.attend(&lists, &params, ([&o, &lse], [0, width, width]), 0..1) }?;
        Ok(o)
    }
}
