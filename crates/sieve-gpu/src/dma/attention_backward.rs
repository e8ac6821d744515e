//! Launches of `kernels/dma_attention_backward*.cu`: gradients of attention over DMA's key lists.
use crate::KernelError;
use crate::attention::{
    AttentionGradients, BACKWARD_BLOCK_Q, BackwardTiling, Bias, GradientWords, Heads, KernelFamily, PassInputs,
    QueryPass, QueryShares, convert_dq, dq_sum_shape, require_gradients, row_stats,
};
use crate::dma::oracle::SUPER_BLOCK;
use crate::dma::{BackwardLists, KeyLists, listed_bias, listed_source, require_lists, with_whole_keys};
use crate::runtime::{CudaTensor, DType, SourceKernel, SumOrder, params};
use crate::step::{empty_zero, fill_zero};

const NAME: &str = "dma_attention_backward";

/// Super-blocks (1024 queries with one key list) of a launch, which share a buffer of dq sums: enough thread blocks to
/// fill a large GPU, while the buffer stays small beside the sums of dk and dv.
const SUPER_BLOCKS_PER_LAUNCH: usize = 16;

/// Key lists of a super-block, times shares of query heads, that keep the GPU busy in a fixed order. With fewer, thread
/// blocks of the next super-block run at the same time and wait until this super-block has added to dk and dv.
const ORDERED_LISTS: usize = 8;

impl KeyLists {
    /// Queries of a row whose f32 sums of dq are in memory at the same time; the buffer is padded to super-blocks.
    pub fn dq_sum_queries(seq_len: usize) -> usize {
        seq_len.min(SUPER_BLOCKS_PER_LAUNCH * SUPER_BLOCK)
    }
}

impl AttentionGradients<'_> {
    /// Gradients of [`dma_attention_forward`](crate::Qkv::dma_attention_forward) with the same lists and the same bias
    /// `delta` of each key. Returns ddelta, f32 `[batch, num_kv_heads, seq_len]`; keys that no query saw get exactly 0
    /// in dk, dv and ddelta.
    ///
    /// # Errors
    /// Types or sizes that do not fit the forward call; a width whose tiles do not fit the device's shared memory.
    pub fn dma_attention_backward(self, delta: &CudaTensor, lists: &KeyLists) -> Result<CudaTensor, KernelError> {
        let shape = self.qkv.shape(NAME)?;
        let [batch, kv_heads, seq_len] = shape.per_key();
        let sums = |width| {
            let shape = [batch, kv_heads, seq_len, width];
            self.d_o.empty_contiguous(&shape, DType::F32)
        };
        let (dk_sum, dv_sum) = (sums(shape.head_dim), sums(shape.head_dim_v));
        let (ddelta, own_lists) = listed_key_sums(&self, Some(delta), lists, [&dk_sum, &dv_sum], SumRows::Undefined)?;
        let summed = own_lists.as_ref().map(|lists| &lists.summed);
        let [_, dk, dv] = self.grads.head_words(NAME)?;
        // The softmax scale is a factor of dk, not of dv.
        convert_rows(&dk_sum, summed, &self.grads.k, dk, self.softmax_scale)?;
        convert_rows(&dv_sum, summed, &self.grads.v, dv, 1.0)?;
        ddelta.ok_or_else(|| KernelError::empty(NAME, "the gradient of the bias"))
    }
}

/// What f32 sums of dk and dv hold when a backward pass over lists begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SumRows {
    /// Zeros in the rows of listed keys.
    Cleared,
    /// Anything. The pass clears the rows that it adds to. With a bias and in a free order it may also write gradients
    /// of keys instead of adding to their sums; it then returns the lists that say which.
    Undefined,
}

/// Writes dq, adds dk (without the softmax scale) and dv to f32 sums `[batch, num_kv_heads, seq_len, width]` in the
/// column order of the kernels, and returns the gradient of the bias. The sums of keys that are not listed are neither
/// read nor, if [`SumRows::Cleared`], written.
pub(crate) fn listed_key_sums(
    call: &AttentionGradients,
    delta: Option<&CudaTensor>,
    lists: &KeyLists,
    key_sums: [&CudaTensor; 2],
    rows: SumRows,
) -> Result<(Option<CudaTensor>, Option<BackwardLists>), KernelError> {
    let shape = call.qkv.shape(NAME)?;
    let qkv = call.qkv.with_kernel_strides();
    require_gradients(NAME, call, &shape)?;
    require_lists(NAME, lists, &shape)?;
    let order = qkv.policy().sums;
    let d_o = call.d_o.contiguous();
    let pass = PassInputs {
        name: NAME,
        qkv: &qkv,
        d_o: Some(&d_o),
        shape: &shape,
        source: listed_source(delta.is_some(), &shape, qkv.q.tensor()),
    };
    let bias = listed_bias(&pass, delta, call.result.base.as_ref(), lists)?;
    let stats = row_stats(call, &d_o, &shape)?;
    let num_super_blocks = lists.num_super_blocks();
    let [batch, kv_heads, seq_len] = shape.per_key();
    let (per_launch, dq_sum) = match (order, pass.family()) {
        // One launch for each super-block, so that dk and dv of a key are added in the order of the super-blocks.
        (SumOrder::Fixed, KernelFamily::Portable) => (1, None),
        _ => {
            let per_launch = KeyLists::dq_sum_queries(seq_len).div_ceil(SUPER_BLOCK);
            let sums = empty_zero(&d_o, &dq_sum_shape(&shape, per_launch * SUPER_BLOCK))?;
            (per_launch, Some(sums))
        }
    };
    // Semaphores that order the adds: to dq for each query tile, to dk and dv for each key.
    let semaphores = match (order, &dq_sum) {
        (SumOrder::Fixed, Some(_)) => {
            let tiles = per_launch * SUPER_BLOCK / BACKWARD_BLOCK_Q;
            let of_queries = empty_zero(&d_o, &[batch, shape.num_heads, tiles])?;
            Some([of_queries, empty_zero(&d_o, &shape.per_key())?])
        }
        _ => None,
    };
    let tiles = pass.key_tiles()?;
    let group = shape.group_size();
    // How many thread blocks share a chunk of a list in a launch of `super_blocks` super-blocks.
    let shares_of = |super_blocks| match (&dq_sum, order, qkv.policy().blocks_per_tile) {
        // The portable fixed order has one thread block for each key tile: shares would add in any order.
        (None, _, _) => QueryShares::ONE,
        (_, _, Some(blocks)) => QueryShares::of_count(blocks.min(group), group),
        (_, SumOrder::Any, None) => QueryShares::of_lists(&shape, super_blocks, lists.capacity(), tiles),
        (_, SumOrder::Fixed, None) => QueryShares::of_count(ORDERED_LISTS.div_ceil(batch * kv_heads).min(group), group),
    };
    let first_shares = shares_of(per_launch.min(num_super_blocks));
    let ddelta = bias.as_ref().map(|_| d_o.empty_contiguous(&shape.per_key(), DType::F32));
    let own_lists = match (&ddelta, rows, order, first_shares) {
        (Some(ddelta), SumRows::Undefined, SumOrder::Any, QueryShares::ONE) => {
            Some(lists.backward_lists(call, per_launch * SUPER_BLOCK, key_sums, ddelta)?)
        }
        (ddelta, ..) => {
            ddelta.iter().try_for_each(fill_zero)?;
            if rows == SumRows::Undefined {
                key_sums.into_iter().try_for_each(fill_zero)?;
            }
            None
        }
    };
    let mut inputs = vec![qkv.q.tensor(), qkv.k.tensor(), qkv.v.tensor(), &d_o, &stats];
    inputs.extend(bias.iter().flat_map(Bias::tensors));
    let words = GradientWords::new(NAME, call, &qkv, &shape)?;
    let (list_capacity, tile_queries) = (lists.capacity(), lists.tile_queries);

    // Without `o_low` (what the bf16 output lacks of the f32 one) the row sums are recomputed as sum P dP. Their other
    // form, do . o, has the rounding error of o, which would dominate the gradients where a bias makes the softmax
    // peaked.
    if call.result.o_low.is_none() && delta.is_some() {
        let params = params!(DmaAttentionRowSumsParams {
            { base, softmax_scale, padded_len }: words, list_capacity, tile_queries
        });
        let mut tensors = inputs.clone();
        tensors.extend([&lists.list, &lists.tile_window]);
        let (kernel, grid, maps) = pass.by_query(QueryPass::RowSums)?;
        // SAFETY: sizes, strides and types checked above; overwrites the row sum of each query in `stats`.
        unsafe { kernel.launch_with_maps(grid, &maps, &tensors, &params) }?;
    }

    let [dk_sum, dv_sum] = key_sums;
    let [dq, _, _] = call.grads.head_words(NAME)?;
    for first in (0..num_super_blocks).step_by(per_launch) {
        let count = per_launch.min(num_super_blocks - first);
        let shares = match own_lists {
            Some(_) => QueryShares::ONE,
            None => shares_of(count),
        };
        if first > 0 {
            dq_sum.iter().try_for_each(fill_zero)?;
            semaphores.iter().try_for_each(|[of_queries, _]| fill_zero(of_queries))?;
        }
        for set in BackwardTiling::launches(&shape, dq_sum.is_some()) {
            let params = params!(DmaAttentionBackwardParams {
                { base, softmax_scale, padded_len }: words,
                [dk_offset, dk_token_stride, dk_batch_stride]: words.dk,
                [dv_offset, dv_token_stride, dv_batch_stride]: words.dv,
                list_capacity,
                first_super_block: first,
                dq_len: count * SUPER_BLOCK,
                head_shares: shares.heads,
            });
            let mut tensors = inputs.clone();
            match &own_lists {
                Some(own) => tensors.extend([&own.list, &own.list_len, &own.chunk_end]),
                None => tensors.extend([&lists.list, &lists.list_len]),
            }
            tensors.extend(dq_sum.as_ref().filter(|_| set.dq));
            tensors.extend(semaphores.iter().flatten());
            if own_lists.is_some() {
                tensors.extend([call.grads.k.tensor(), call.grads.v.tensor()]);
            }
            tensors.extend(set.dk.then_some(dk_sum));
            tensors.extend(set.dv.then_some(dv_sum));
            tensors.extend(ddelta.as_ref().filter(|_| set.dk));
            let head_by_head = false;
            let (mut kernel, maps) = pass.by_key(set, shares, head_by_head)?;
            if own_lists.is_some() {
                kernel = with_whole_keys(kernel);
            }
            let blocks = count * list_capacity.div_ceil(tiles.block_kv);
            let grid = [blocks, kv_heads * shares.heads, batch];
            // SAFETY: sizes, strides and types checked above; the lists name positions below seq_len only; adds to sums
            // that were cleared, or writes rows of the gradients; the maps read q and d_o, which are among the tensors.
            unsafe { kernel.launch_with_maps(grid, &maps, &tensors, &params) }?;
        }
        if let Some(dq_sum) = &dq_sum {
            convert_dq(dq_sum, call, count * SUPER_BLOCK, first * SUPER_BLOCK)?;
        }
    }
    if dq_sum.is_none() {
        let params = params!(DmaAttentionBackwardQueryParams {
            { base, softmax_scale, padded_len }: words,
            list_capacity,
            [dq_offset, dq_token_stride, dq_batch_stride]: dq,
            tile_queries,
        });
        let mut tensors = inputs.clone();
        tensors.extend([&lists.list, &lists.tile_window, call.grads.q.tensor()]);
        let (kernel, grid, maps) = pass.by_query(QueryPass::Gradient)?;
        // SAFETY: as above; writes every element of dq.
        unsafe { kernel.launch_with_maps(grid, &maps, &tensors, &params) }?;
    }
    Ok((ddelta, own_lists))
}

/// Which of the f32 sums of dk or dv are converted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ConvertedSums {
    /// The sums of all keys.
    All,
    /// The sums of the keys that [`BackwardLists::summed`] marks.
    Marked,
    /// The sums of all keys, after several heads' sums of a key are added up.
    Joined,
}

/// The kernel that converts f32 sums of dk or dv to bf16 rows.
fn dma_attention_backward_convert_kernel(row_dim: usize, sums: ConvertedSums) -> SourceKernel {
    let kernel = SourceKernel::new("dma_attention_backward_convert").define("ROW_DIM", row_dim);
    let kernel = match sums {
        ConvertedSums::All => kernel,
        ConvertedSums::Marked => kernel.define("SOME_ROWS", 1),
        ConvertedSums::Joined => kernel.define("JOINED", 1),
    };
    kernel.threads(256)
}

/// Converts a gradient's f32 sums to bf16 rows: all, or those that `summed` marks. The sums have as many heads as the
/// gradient; or the gradient has one head and is the sum over the heads of `sums`, added in their order. `layout` is
/// the gradient's `{offset, token stride, batch stride}`; `scale` is a factor on every sum.
pub(crate) fn convert_rows(
    sums: &CudaTensor,
    summed: Option<&CudaTensor>,
    grad: &Heads,
    layout: [usize; 3],
    scale: f32,
) -> Result<(), KernelError> {
    let [batch, num_sums, seq_len, row_dim] = sums.dims(NAME, "sums")?;
    let kv_heads = grad.num_heads();
    // A thread converts 16 columns.
    let threads = batch * kv_heads * seq_len * (row_dim / 16);
    let params = params!(DmaAttentionBackwardConvertParams {
        batch,
        seq_len,
        num_kv_heads: kv_heads,
        [grad_offset, grad_token_stride, grad_batch_stride]: layout,
        scale,
        num_sums,
    });
    let converted = match summed {
        Some(_) => ConvertedSums::Marked,
        None if kv_heads != num_sums => ConvertedSums::Joined,
        None => ConvertedSums::All,
    };
    let kernel = dma_attention_backward_convert_kernel(row_dim, converted);
    let mut tensors = vec![sums];
    tensors.extend(summed);
    tensors.push(grad.tensor());
    // SAFETY: reads the sums, writes their rows of the gradient's heads; require_gradients checked their shape.
    unsafe { kernel.launch([threads.div_ceil(256), 1, 1], &tensors, &params) }
}
