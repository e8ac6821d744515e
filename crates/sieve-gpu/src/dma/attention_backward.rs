//! Launches of `kernels/dma_attention_backward*.cu`: gradients of attention over DMA's key lists.
use crate::KernelError;
use crate::attention::{
    AttentionGradients, BACKWARD_BLOCK_Q, BackwardTiling, Bias, GradientSet, GradientWords, Heads, KernelFamily,
    KeyTiles, PassInputs, QueryPass, QueryShares, convert_dq, dq_sum_shape, gradient_params, require_gradients,
    row_stats,
};
use crate::dma::oracle::SUPER_BLOCK;
use crate::dma::{BackwardLists, KeyLists, listed_bias, listed_source, require_lists, with_whole_keys};
use crate::runtime::{CudaTensor, DType, SourceKernel, SumOrder, params, require};
use crate::step::{empty_zero, fill_zero};
use std::ops::Range;

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
        let converted = match &own_lists {
            Some(lists) => ConvertedSums::Marked(&lists.summed),
            None => ConvertedSums::All,
        };
        let [_, dk, dv] = self.grads.head_words(NAME)?;
        // The softmax scale is a factor of dk, not of dv.
        convert_rows(&dk_sum, converted, &self.grads.k, dk, self.softmax_scale)?;
        convert_rows(&dv_sum, converted, &self.grads.v, dv, 1.0)?;
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
    let d_o = call.d_o.contiguous();
    let source = listed_source(delta.is_some(), &shape, qkv.q.tensor());
    require!(lists.queries == SUPER_BLOCK, NAME, "queries of a list": lists.queries, "{SUPER_BLOCK}");
    let pass = PassInputs { name: NAME, qkv: &qkv, d_o: Some(&d_o), shape: &shape, source, list_queries: SUPER_BLOCK };
    let bias = listed_bias(&pass, delta, call.result.base.as_ref(), lists)?;
    let stats = row_stats(call, &d_o, &shape)?;
    let dq_sums = LaunchSums::new(&pass, &d_o)?;
    let ddelta = bias.as_ref().map(|_| d_o.empty_contiguous(&shape.per_key(), DType::F32));
    let mut inputs = vec![qkv.q.tensor(), qkv.k.tensor(), qkv.v.tensor(), &d_o, &stats];
    inputs.extend(bias.iter().flat_map(Bias::tensors));
    let listed = ListedPass {
        call,
        pass: &pass,
        lists,
        key_sums,
        ddelta: ddelta.as_ref(),
        dq_sums: &dq_sums,
        inputs,
        words: GradientWords::new(NAME, call, &qkv, &shape)?,
        tiles: pass.key_tiles()?,
    };
    let own_lists = listed.own_lists(rows)?;
    if call.result.o_low.is_none() && delta.is_some() {
        listed.recompute_row_sums()?;
    }
    for first in (0..lists.num_super_blocks()).step_by(dq_sums.super_blocks) {
        if first > 0 {
            dq_sums.clear()?;
        }
        let end = lists.num_super_blocks().min(first + dq_sums.super_blocks);
        listed.add_super_blocks(first..end, own_lists.as_ref())?;
    }
    if dq_sums.sums.is_none() {
        listed.dq_by_query()?;
    }
    Ok((ddelta, own_lists))
}

/// The f32 sums of dq of one launch's queries.
struct LaunchSums {
    /// Super-blocks of a launch.
    super_blocks: usize,
    /// `None` for the portable kernels in a fixed order: a pass by query computes dq.
    sums: Option<CudaTensor>,
    /// In a fixed order, the semaphores that order the adds: to dq for each query tile, to dk and dv for each key.
    semaphores: Option<[CudaTensor; 2]>,
}

impl LaunchSums {
    /// Zeros for the queries of a launch.
    fn new(pass: &PassInputs<'_>, d_o: &CudaTensor) -> Result<Self, KernelError> {
        let (shape, order) = (pass.shape, pass.qkv.policy().sums);
        if (order, pass.family()) == (SumOrder::Fixed, KernelFamily::Portable) {
            // One launch for each super-block, so that dk and dv of a key are added in the order of the super-blocks.
            return Ok(Self { super_blocks: 1, sums: None, semaphores: None });
        }
        let super_blocks = KeyLists::dq_sum_queries(shape.seq_len).div_ceil(SUPER_BLOCK);
        let queries = super_blocks * SUPER_BLOCK;
        let sums = empty_zero(d_o, &dq_sum_shape(shape, queries))?;
        let semaphores = match order {
            SumOrder::Any => None,
            SumOrder::Fixed => {
                let of_queries = empty_zero(d_o, &[shape.batch, shape.num_heads, queries / BACKWARD_BLOCK_Q])?;
                Some([of_queries, empty_zero(d_o, &shape.per_key())?])
            }
        };
        Ok(Self { super_blocks, sums: Some(sums), semaphores })
    }

    /// Zeros again, for the queries of the next launch. The keys' semaphores count on over all launches.
    fn clear(&self) -> Result<(), KernelError> {
        self.sums.iter().try_for_each(fill_zero)?;
        self.semaphores.iter().try_for_each(|[of_queries, _]| fill_zero(of_queries))
    }
}

/// A backward pass over key lists: its checked operands, and what its launches share.
struct ListedPass<'a> {
    call: &'a AttentionGradients<'a>,
    pass: &'a PassInputs<'a>,
    lists: &'a KeyLists,
    /// The f32 sums of dk and of dv.
    key_sums: [&'a CudaTensor; 2],
    /// The gradient of the bias, if there is a bias.
    ddelta: Option<&'a CudaTensor>,
    dq_sums: &'a LaunchSums,
    /// The tensors that all kernels begin with: q, k, v, the gradient of the output, the statistics of queries, and the
    /// bias with its base.
    inputs: Vec<&'a CudaTensor>,
    words: GradientWords,
    tiles: KeyTiles,
}

impl ListedPass<'_> {
    /// How many thread blocks share a chunk of a list in a launch of `super_blocks` super-blocks.
    fn shares(&self, super_blocks: usize) -> QueryShares {
        let (shape, policy) = (self.pass.shape, self.pass.qkv.policy());
        let group = shape.group_size();
        match (&self.dq_sums.sums, policy.sums, policy.blocks_per_tile) {
            // The portable fixed order has one thread block for each key tile: shares would add in any order.
            (None, _, _) => QueryShares::ONE,
            (_, _, Some(blocks)) => QueryShares::of_count(blocks.min(group), group),
            (_, SumOrder::Any, None) => QueryShares::of_lists(shape, super_blocks, self.lists.capacity(), self.tiles),
            (_, SumOrder::Fixed, None) => {
                let lists = shape.batch * shape.num_kv_heads;
                QueryShares::of_count(ORDERED_LISTS.div_ceil(lists).min(group), group)
            }
        }
    }

    /// Lists by which thread blocks write the gradients of some keys instead of adding to their sums; they clear the
    /// other keys' sums. `None` where the pass adds to the sums of all keys: then all sums are cleared here.
    fn own_lists(&self, rows: SumRows) -> Result<Option<BackwardLists>, KernelError> {
        let (order, most) = (self.pass.qkv.policy().sums, self.lists.num_super_blocks());
        let first_shares = self.shares(self.dq_sums.super_blocks.min(most));
        let may_write = (rows, order, first_shares) == (SumRows::Undefined, SumOrder::Any, QueryShares::ONE);
        if let (true, Some(ddelta)) = (may_write, self.ddelta) {
            let queries = self.dq_sums.super_blocks * SUPER_BLOCK;
            return self.lists.backward_lists(self.call, queries, self.key_sums, ddelta).map(Some);
        }
        self.ddelta.into_iter().try_for_each(fill_zero)?;
        if rows == SumRows::Undefined {
            self.key_sums.into_iter().try_for_each(fill_zero)?;
        }
        Ok(None)
    }

    /// Overwrites the row sums among the statistics of queries by sum P dP. Without `o_low` (what the bf16 output lacks
    /// of the f32 one) their other form, do . o, has the rounding error of o, which would dominate the gradients where
    /// a bias makes the softmax peaked.
    fn recompute_row_sums(&self) -> Result<(), KernelError> {
        let params = params!(DmaAttentionRowSumsParams {
            { base, softmax_scale, padded_len }: self.words,
            list_capacity: self.lists.capacity(),
            { tile_queries }: self.lists,
        });
        let mut tensors = self.inputs.clone();
        tensors.extend([&self.lists.list, &self.lists.tile_window]);
        let (kernel, grid, maps) = self.pass.by_query(QueryPass::RowSums)?;
        // SAFETY: `listed_key_sums` checked sizes, strides and types; overwrites the row sum of each query.
        unsafe { kernel.launch_with_maps(grid, &maps, &tensors, &params) }
    }

    /// Adds to the sums of dk, dv, dq and the bias what the queries of some super-blocks add, and writes their dq.
    fn add_super_blocks(&self, blocks: Range<usize>, own: Option<&BackwardLists>) -> Result<(), KernelError> {
        let shares = match own {
            Some(_) => QueryShares::ONE,
            None => self.shares(blocks.len()),
        };
        for set in BackwardTiling::launches(self.pass.shape, self.dq_sums.sums.is_some()) {
            self.launch(&blocks, own, set, shares)?;
        }
        match &self.dq_sums.sums {
            Some(sums) => convert_dq(sums, self.call, blocks.len() * SUPER_BLOCK, blocks.start * SUPER_BLOCK),
            None => Ok(()),
        }
    }

    /// Launches the kernel by key tiles that adds the gradients in `set`.
    fn launch(
        &self,
        blocks: &Range<usize>,
        own: Option<&BackwardLists>,
        set: GradientSet,
        shares: QueryShares,
    ) -> Result<(), KernelError> {
        let list_capacity = self.lists.capacity();
        let words = &self.words;
        let params = gradient_params!(DmaAttentionBackwardParams {
            words;
            list_capacity,
            first_super_block: blocks.start,
            dq_len: blocks.len() * SUPER_BLOCK,
            head_shares: shares.heads,
        });
        let [dk_sum, dv_sum] = self.key_sums;
        let mut tensors = self.inputs.clone();
        match own {
            Some(own) => tensors.extend([&own.list, &own.list_len, &own.chunk_end]),
            None => tensors.extend([&self.lists.list, &self.lists.list_len]),
        }
        tensors.extend(self.dq_sums.sums.as_ref().filter(|_| set.dq));
        tensors.extend(self.dq_sums.semaphores.iter().flatten());
        if own.is_some() {
            tensors.extend([self.call.grads.k.tensor(), self.call.grads.v.tensor()]);
        }
        tensors.extend(set.dk.then_some(dk_sum));
        tensors.extend(set.dv.then_some(dv_sum));
        tensors.extend(self.ddelta.filter(|_| set.dk));
        let head_by_head = false;
        let (mut kernel, maps) = self.pass.by_key(set, shares, head_by_head)?;
        if own.is_some() {
            kernel = with_whole_keys(kernel);
        }
        let shape = self.pass.shape;
        let chunks = blocks.len() * list_capacity.div_ceil(self.tiles.block_kv);
        let grid = [chunks, shape.num_kv_heads * shares.heads, shape.batch];
        // SAFETY: `listed_key_sums` checked sizes, strides and types; the lists name positions below seq_len only; adds
        // to sums that were cleared, or writes rows of the gradients; the maps read q and d_o, which are among the
        // tensors.
        unsafe { kernel.launch_with_maps(grid, &maps, &tensors, &params) }
    }

    /// Writes dq by a pass over the queries' keys, in a fixed order.
    fn dq_by_query(&self) -> Result<(), KernelError> {
        let [dq, _, _] = self.call.grads.head_words(NAME)?;
        let params = params!(DmaAttentionBackwardQueryParams {
            { base, softmax_scale, padded_len }: self.words,
            list_capacity: self.lists.capacity(),
            [dq_offset, dq_token_stride, dq_batch_stride]: dq,
            { tile_queries }: self.lists,
        });
        let mut tensors = self.inputs.clone();
        tensors.extend([&self.lists.list, &self.lists.tile_window, self.call.grads.q.tensor()]);
        let (kernel, grid, maps) = self.pass.by_query(QueryPass::Gradient)?;
        // SAFETY: as above; writes every element of dq.
        unsafe { kernel.launch_with_maps(grid, &maps, &tensors, &params) }
    }
}

/// Which of the f32 sums of dk or dv are converted, and where they go.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ConvertedSums<'a> {
    /// The sums of all keys.
    All,
    /// The sums of the keys that [`BackwardLists::summed`] marks.
    Marked(&'a CudaTensor),
    /// The sums of all keys, added to what the gradient holds.
    Onto,
}

/// The kernel that converts f32 sums of dk or dv, `row_dim` columns a key (the head's width, or that of its values), to
/// bf16 rows.
fn dma_attention_backward_convert_kernel(row_dim: usize, converted: ConvertedSums, is_joined: bool) -> SourceKernel {
    let kernel = SourceKernel::new("dma_attention_backward_convert").define("ROW_DIM", row_dim).threads(256);
    let kernel = if is_joined { kernel.define("JOINED", 1) } else { kernel };
    match converted {
        ConvertedSums::All => kernel,
        ConvertedSums::Marked(_) => kernel.define("SOME_ROWS", 1),
        ConvertedSums::Onto => kernel.define("ONTO", 1),
    }
}

/// Converts a gradient's f32 sums to bf16 rows. The sums have as many heads as the gradient; or the gradient has one
/// head and is the sum over the heads of `sums`, added in their order. `layout` is the gradient's `{offset, token
/// stride, batch stride}`; `scale` is a factor on every sum.
pub(crate) fn convert_rows(
    sums: &CudaTensor,
    converted: ConvertedSums,
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
    let kernel = dma_attention_backward_convert_kernel(row_dim, converted, kv_heads != num_sums);
    let mut tensors = vec![sums];
    if let ConvertedSums::Marked(summed) = converted {
        tensors.push(summed);
    }
    tensors.push(grad.tensor());
    // SAFETY: reads the sums, writes their rows of the gradient's heads; require_gradients checked their shape.
    unsafe { kernel.launch([threads.div_ceil(256), 1, 1], &tensors, &params) }
}
