//! Launches of `kernels/nsa_local_blocks.cu`: a query's blocks divided into its local ones and the others.
//!
//! The local blocks are a run of keys that ends with the query. Dense attention's kernels read such a run several times
//! as fast as lists do, whose (query, block) pairs each write a partial result to memory.
use super::{Bounds, require_bounds};
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params, require};
use sieve_core::LocalBlocks;

const NAME: &str = "nsa_local_blocks";

/// Warps of a thread block; each takes the list of one query and KV head.
const WARPS: usize = 8;

/// The blocks of each query, its local ones among them.
#[derive(Debug, Clone, Copy)]
pub struct BlocksWithLocal<'a> {
    /// Blocks of `size` tokens, i32 `[batch, seq_len, num_kv_heads, number of blocks]`: counted from the document's
    /// first token, ascending, then -1. All local blocks of the query are among them.
    pub indices: &'a CudaTensor,
    /// Tokens of a block.
    pub size: usize,
    /// The local blocks, of a multiple of `size` tokens.
    pub local: LocalBlocks,
}

/// Blocks without the local ones, and where each token's run of local keys begins and ends.
pub(super) struct Divided {
    /// The other blocks, i32 `[batch, seq_len, num_kv_heads, number of blocks - local ones]`, ascending, then -1.
    pub(super) far: CudaTensor,
    /// The first key in the local blocks of each query, i32 `[batch, seq_len]`.
    pub(super) first_key: CudaTensor,
    /// For each key the query at which it leaves the local blocks, i32 `[batch, seq_len]`.
    pub(super) end_query: CudaTensor,
}

impl BlocksWithLocal<'_> {
    /// Divides the blocks of each query.
    pub(super) fn divided(&self, documents: Bounds) -> Result<Divided, KernelError> {
        let Self { size, local, .. } = *self;
        let [batch, seq_len, num_choosers, num_selected] = self.indices.dims(NAME, "block_indices")?;
        operands!(NAME, indices: I32[batch, seq_len, num_choosers, num_selected] = self.indices);
        let [start, end] = require_bounds(NAME, documents, [batch, seq_len])?;
        let whole = size > 0 && local.size.is_multiple_of(size);
        require!(whole, NAME, "local blocks of": local.size, "multiples of {size} tokens");
        let of_local = local.tokens() / size;
        require!((1..num_selected).contains(&of_local), NAME, "local blocks": of_local, "1 to {}", num_selected - 1);
        let num_far = num_selected - of_local;
        let new = |shape: &[usize]| indices.empty_contiguous(shape, DType::I32);
        let far = new(&[batch, seq_len, num_choosers, num_far]);
        let (first_key, end_query) = (new(&[batch, seq_len]), new(&[batch, seq_len]));
        let lists = batch * seq_len * num_choosers;
        let params = params!(NsaLocalBlocksParams {
            lists,
            seq_len,
            num_choosers,
            num_selected,
            num_far,
            block_size: size,
            local_size: local.size,
            local_count: local.count,
        });
        let tensors = [&indices, &start, &end, &far, &first_key, &end_query];
        let kernel = SourceKernel::new(NAME).threads(32 * WARPS);
        // SAFETY: reads the operands, whose shapes were checked; writes every element of the results.
        unsafe { kernel.launch([lists.div_ceil(WARPS), 1, 1], &tensors, &params) }?;
        Ok(Divided { far, first_key, end_query })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Hardware, Recorder};

    #[test]
    fn local_blocks_that_cannot_be_divided_from_the_others_are_refused_by_name() {
        let gpu = Recorder::new(Hardware::HOPPER);
        let tensor = |shape: &[usize]| gpu.tensor(shape, DType::I32);
        let (indices, bounds) = (tensor(&[2, 1000, 3, 8]), tensor(&[2, 1000]));
        let divided = |size, local, count| {
            let local = LocalBlocks { size: local, count };
            BlocksWithLocal { indices: &indices, size, local }.divided([&bounds; 2])
        };
        for (size, local, count, far) in [(64, 64, 4, 4), (64, 128, 3, 2), (16, 16, 7, 1)] {
            let divided = divided(size, local, count).expect("whole blocks");
            assert_eq!(divided.far.shape(), [2, 1000, 3, far]);
        }
        for (size, local, count, sentence) in [
            (64, 96, 1, "local blocks of 96 is not supported (supported: multiples of 64 tokens)"),
            (0, 64, 1, "local blocks of 64 is not supported (supported: multiples of 0 tokens)"),
            (64, 64, 8, "local blocks 8 is not supported (supported: 1 to 7)"),
            (64, 128, 4, "local blocks 8 is not supported (supported: 1 to 7)"),
            (64, 64, 0, "local blocks 0 is not supported (supported: 1 to 7)"),
        ] {
            let error = divided(size, local, count).err().expect("cannot be divided").to_string();
            assert!(error.contains(sentence), "{error}");
        }
    }
}
