//! Launches of `kernels/selected_blocks.cu`: a caller's blocks of each query in the form that attention reads, and of
//! `kernels/selected_block_sums.cu`: the attention that lies on each.
use super::Bounds;
use super::lists::require_cells;
use super::selected::{AttendedBlocks, JoinedRange, Work};
use crate::KernelError;
use crate::attention::{AttentionResult, AttentionShape, Qkv};
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params, require};
use sieve_core::{SELECTED_SIZES, selected_in_pairs, selected_pieces};

const NAME: &str = "selected_blocks";

/// Warps of a thread block; each takes the list of one query and KV head.
const WARPS: usize = 8;

/// Blocks that a caller gives each query and KV head, in any order. An index counts as none if it is below 0, if its
/// block comes after the query's own, or if an earlier index names the same block.
#[derive(Debug, Clone, Copy)]
pub struct SelectedBlocks<'a> {
    /// Indices of blocks from the document's first token on, i32 `[batch, seq_len, num_kv_heads, num_indices]`.
    pub indices: &'a CudaTensor,
    /// How many of a query's indices count, from the first on, i32 `[batch, seq_len, num_kv_heads]`; `None`: all.
    pub counts: Option<&'a CudaTensor>,
    /// Tokens of a block, one of [`SELECTED_SIZES`].
    pub block: usize,
}

impl SelectedBlocks<'_> {
    /// The blocks as attention reads them, i32 `[batch, seq_len, num_kv_heads, number of blocks]`: ascending, each
    /// once, then -1; and their size in tokens. A block of 128 tokens is two blocks there.
    ///
    /// # Errors
    /// Another type than i32, another size of blocks, shapes that do not fit, more tokens than lists take.
    pub fn attended(&self, doc_start: &CudaTensor) -> Result<(CudaTensor, usize), KernelError> {
        let Self { indices, counts, block } = *self;
        let [batch, seq_len, num_choosers, num_indices] = indices.dims(NAME, "indices")?;
        let [a, b, c, d] = SELECTED_SIZES;
        require!(SELECTED_SIZES.contains(&block), NAME, "block": block, "{a}, {b}, {c} and {d}");
        require!(num_indices > 0, NAME, "number of indices": num_indices, "at least 1");
        operands!(NAME,
            indices: I32[batch, seq_len, num_choosers, num_indices],
            doc_start: I32[batch, seq_len],
        );
        let pieces = selected_pieces(block);
        let size = block / pieces;
        let shared_bytes = indices.hardware().max_shared_bytes;
        require_cells(NAME, seq_len, size, shared_bytes)?;
        let attended = indices.empty_contiguous(&[batch, seq_len, num_choosers, num_indices * pieces], DType::I32);
        let num_words = words_per_warp(seq_len, block);
        let lists = batch * seq_len * num_choosers;
        let params = params!(SelectedBlocksParams {
            lists,
            seq_len,
            num_choosers,
            num_indices,
            block_size: block,
            pieces,
            num_words,
        });
        let kernel = selected_blocks_kernel(counts.is_some(), num_words);
        let counts = match counts {
            Some(counts) => {
                operands!(NAME, counts: I32[batch, seq_len, num_choosers]);
                Some(counts)
            }
            None => None,
        };
        let mut tensors = vec![&indices];
        tensors.extend(&counts);
        tensors.extend([&doc_start, &attended]);
        // SAFETY: reads the operands, whose shapes were checked; a query's own block has a bit in `num_words` words;
        // writes every element of `attended`.
        unsafe { kernel.launch([lists.div_ceil(WARPS), 1, 1], &tensors, &params) }?;
        Ok((attended, size))
    }

    /// Writes the sums of a range of queries, whose blocks attention read as `attended`.
    fn sum(
        &self,
        shape: &AttentionShape,
        attended: &CudaTensor,
        range: JoinedRange<'_>,
        sums: &CudaTensor,
    ) -> Result<(), KernelError> {
        let JoinedRange { queries, part_lse, per_part, lse } = range;
        let params = params!(SelectedBlockSumsParams {
            seq_len: shape.seq_len,
            num_choosers: shape.num_kv_heads,
            num_indices: sums.shape()[3],
            pieces: selected_pieces(self.block),
            group: shape.group_size(),
            first_query: queries.start,
            num_queries: queries.len(),
            per_part,
        });
        let indices = self.indices.contiguous();
        let counts = self.counts.map(CudaTensor::contiguous);
        let mut tensors = vec![&indices];
        tensors.extend(&counts);
        tensors.extend([attended, part_lse, lse, sums]);
        let lists = queries.len() * shape.num_kv_heads;
        let kernel = selected_block_sums_kernel(self.counts.is_some());
        // SAFETY: `attended` checked the operands; each block in it has a log-sum-exp; writes the range's sums.
        unsafe { kernel.launch([lists.div_ceil(WARPS), shape.batch, 1], &tensors, &params) }
    }
}

/// Result of [`Qkv::selected_attention_forward`].
#[derive(Debug, Clone)]
pub struct SelectedAttention {
    /// Output and log-sum-exp.
    pub result: AttentionResult,
    /// The blocks as [`AttentionGradients::nsa_selected_attention_backward`](crate::AttentionGradients) takes them.
    pub block_indices: CudaTensor,
    /// Tokens of one of these blocks.
    pub block_size: usize,
    /// The attention on the block of each index, summed over the heads of the group, f32 of the indices' shape: 0 where
    /// an index counts as none, and at each place of a block that is given twice. An indexer's loss reads it.
    pub block_sums: Option<CudaTensor>,
}

impl Qkv {
    /// Causal attention of each query over the tokens of the blocks that a caller gives it. A query without a block
    /// gets `o = 0`, `lse = -inf`; a block that no query has is not read.
    ///
    /// # Errors
    /// Another type than bf16, sizes that do not fit or have no kernel.
    pub fn selected_attention_forward(
        &self,
        [start, end]: Bounds,
        selected: SelectedBlocks,
        softmax_scale: f32,
        wants_sums: bool,
    ) -> Result<SelectedAttention, KernelError> {
        let shape = self.shape(NAME)?;
        let (indices, [.., num_indices]) = (selected.indices, selected.indices.dims::<4>(NAME, "indices")?);
        operands!(only NAME, indices: I32[shape.batch, shape.seq_len, shape.num_kv_heads, num_indices] strided);
        let (block_indices, block_size) = selected.attended(start)?;
        let in_pairs = selected_in_pairs(selected.block);
        let blocks = AttendedBlocks { indices: &block_indices, size: block_size, in_pairs };
        let work = Work::new(self, [start, end], blocks, softmax_scale)?;
        let block_sums = wants_sums.then(|| indices.empty_contiguous(indices.shape(), DType::F32));
        let (result, _) = work.forward(|range| match &block_sums {
            Some(sums) => selected.sum(&shape, &block_indices, range, sums),
            None => Ok(()),
        })?;
        Ok(SelectedAttention { result, block_indices, block_size, block_sums })
    }
}

/// Words in which a warp has a bit for each block of a row. A power of two, so that few different launches exist.
fn words_per_warp(seq_len: usize, block: usize) -> usize {
    seq_len.div_ceil(32 * block).next_power_of_two()
}

/// The kernel with or without counts, for warps of `num_words` words.
fn selected_blocks_kernel(has_counts: bool, num_words: usize) -> SourceKernel {
    SourceKernel::new(NAME)
        .define("COUNTS", u8::from(has_counts))
        .threads(32 * WARPS)
        .shared_bytes(WARPS * num_words * 4)
}

/// The kernel that sums the attention on each block, with or without counts.
fn selected_block_sums_kernel(has_counts: bool) -> SourceKernel {
    SourceKernel::new("selected_block_sums").define("COUNTS", u8::from(has_counts)).threads(32 * WARPS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Hardware, Recorder};

    /// The blocks as attention reads them, of 5 indices for each query and KV head; the counts have the shape `counts`.
    fn attended(block: usize, seq_len: usize, counts: &[usize]) -> Result<(CudaTensor, usize), KernelError> {
        let gpu = Recorder::new(Hardware::HOPPER);
        let tensor = |shape: &[usize]| gpu.tensor(shape, DType::I32);
        let (indices, counts) = (tensor(&[2, seq_len, 3, 5]), tensor(counts));
        SelectedBlocks { indices: &indices, counts: Some(&counts), block }.attended(&tensor(&[2, seq_len]))
    }

    #[test]
    fn blocks_of_128_are_two_and_other_sizes_are_refused_by_name() {
        for (block, size, pieces) in [(16, 16, 1), (32, 32, 1), (64, 64, 1), (128, 64, 2)] {
            let (indices, block_size) = attended(block, 1000, &[2, 1000, 3]).expect("a size with kernels");
            assert_eq!(indices.shape(), [2, 1000, 3, 5 * pieces]);
            assert_eq!(block_size, size);
        }
        for (block, seq_len, counts, sentence) in [
            (48, 1000, [2, 1000, 3], "block 48 is not supported (supported: 16, 32, 64 and 128)"),
            (64, 1000, [2, 1000, 2], "counts has shape [2, 1000, 2], expected [2, 1000, 3]"),
            (16, 1 << 20, [2, 1 << 20, 3], "rows of 1048576 tokens in selected blocks of 16"),
        ] {
            let error = attended(block, seq_len, &counts).expect_err("no kernel").to_string();
            assert!(error.contains(sentence), "{error}");
        }
    }

    #[test]
    fn a_warp_has_a_bit_for_each_block_of_the_longest_row() {
        for block in SELECTED_SIZES {
            let size = block / selected_pieces(block);
            let most = crate::ChoiceLists::most_tokens(size, Hardware::HOPPER.max_shared_bytes);
            for seq_len in [1, 32 * block, 32 * block + 1, most] {
                let (words, limit) = (words_per_warp(seq_len, block), Hardware::HOPPER.max_shared_bytes);
                assert!(words * 32 * block >= seq_len, "{block} {seq_len}");
                assert!(selected_blocks_kernel(true, words).dynamic_shared_bytes() <= limit, "{block} {seq_len}");
            }
        }
    }
}
