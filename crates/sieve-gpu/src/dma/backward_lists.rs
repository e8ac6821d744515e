//! Launch of `kernels/dma_backward_lists.cu`: the key lists of a backward pass in a free order.
use crate::KernelError;
use crate::attention::{AttentionGradients, BACKWARD_BLOCK_Q};
use crate::dma::KeyLists;
use crate::dma::oracle::SUPER_BLOCK;
use crate::runtime::{CudaTensor, DType, SourceKernel, params};

const NAME: &str = "dma_backward_lists";

/// Chunks of a list (128 entries each, the keys of a thread block) that may have keys of the list's own super-block.
const ENTERING_CHUNKS: usize = 8;

/// What it costs to list 128 keys once more, beside the steps over their queries, in steps of 64 queries of a thread
/// block. The block's start and end take 8 of them (`LISTED_BLOCK_STEPS`), clearing and converting sums the others.
const CHUNK_STEPS: usize = 13;

/// Key lists of a backward pass that avoids sums in memory. Where it can, a thread block holds its keys for all queries
/// that see them, and then writes the keys' gradients. The other keys' gradients are summed from several thread blocks.
#[derive(Debug)]
pub(crate) struct BackwardLists {
    /// `{position, expire}` of each listed key in the shape of [`KeyLists::list`], without the keys that a thread block
    /// of an earlier super-block holds.
    pub(crate) list: CudaTensor,
    /// Entries in use, in the shape of [`KeyLists::list_len`].
    pub(crate) list_len: CudaTensor,
    /// The end of each chunk's queries, i32 `[batch, num_kv_heads, num_super_blocks, 8]`: the first query that its
    /// thread block does not take.
    pub(crate) chunk_end: CudaTensor,
    /// 1 for a key whose gradients are summed, i32 `[batch, num_kv_heads, seq_len]`.
    pub(crate) summed: CudaTensor,
}

impl KeyLists {
    /// Makes the lists of a backward pass with launches of `launch_queries` queries. Clears the gradient sums
    /// `[dk, dv]` of summed keys, all of `ddelta`, and the gradients of keys that no query sees.
    pub(crate) fn backward_lists(
        &self,
        call: &AttentionGradients,
        launch_queries: usize,
        [dk_sum, dv_sum]: [&CudaTensor; 2],
        ddelta: &CudaTensor,
    ) -> Result<BackwardLists, KernelError> {
        let [batch, num_kv_heads, seq_len, head_dim] = dk_sum.dims(NAME, "the sums of dk")?;
        let [.., head_dim_v] = dv_sum.dims::<4>(NAME, "the sums of dv")?;
        let new = |shape: &[usize]| ddelta.empty_contiguous(shape, DType::I32);
        let lists = BackwardLists {
            list: new(self.list.shape()),
            list_len: new(self.list_len.shape()),
            chunk_end: new(&[batch, num_kv_heads, self.num_super_blocks(), ENTERING_CHUNKS]),
            summed: new(&[batch, num_kv_heads, seq_len]),
        };
        let [_, dk, dv] = call.grads.head_words(NAME)?;
        let params = params!(DmaBackwardListsParams {
            seq_len,
            num_kv_heads,
            list_capacity: self.capacity(),
            launch_queries,
            worth: CHUNK_STEPS * BACKWARD_BLOCK_Q / call.qkv.shape(NAME)?.group_size(),
            [dk_offset, dk_token_stride, dk_batch_stride]: dk,
            [dv_offset, dv_token_stride, dv_batch_stride]: dv,
        });
        let mut tensors = vec![&self.list, &self.list_len];
        tensors.extend([&lists.list, &lists.list_len, &lists.chunk_end, &lists.summed]);
        tensors.extend([dk_sum, dv_sum, ddelta, call.grads.k.tensor(), call.grads.v.tensor()]);
        let kernel = dma_backward_lists_kernel([head_dim, head_dim_v]);
        let grid = [self.num_super_blocks(), num_kv_heads, batch];
        // SAFETY: `require_gradients` and `require_lists` checked the operands; the lists name positions below seq_len;
        // writes within the new tensors, the sums and the gradients of keys and values.
        unsafe { kernel.launch(grid, &tensors, &params) }?;
        Ok(lists)
    }
}

/// The kernel that makes the lists, for keys and values of these widths.
fn dma_backward_lists_kernel([head_dim, head_dim_v]: [usize; 2]) -> SourceKernel {
    SourceKernel::new(NAME).define("HEAD_DIM", head_dim).define("HEAD_DIM_V", head_dim_v).threads(SUPER_BLOCK)
}

/// Makes a backward kernel take [`BackwardLists`].
pub(crate) fn with_whole_keys(kernel: SourceKernel) -> SourceKernel {
    kernel.define("WHOLE_KEYS", 1)
}
