//! Launch of `kernels/selected_blocks.cu`: a caller's blocks of each query in the form that attention reads.
use super::Bounds;
use super::lists::require_cells;
use crate::KernelError;
use crate::attention::{AttentionResult, Qkv};
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params, require};
use sieve_core::{NsaBlocks, SELECTED_SIZES, selected_pieces};

const NAME: &str = "selected_blocks";

/// Lists of a thread block, a warp each.
const WARPS: usize = 8;

/// Blocks that a caller gives each query and KV head, in any order. Indices below 0, of blocks after the query's own
/// one and of a block that is named before count as none.
#[derive(Debug, Clone, Copy)]
pub struct SelectedBlocks<'a> {
    /// Indices of blocks from the document's first token on, i32 `[batch, seq_len, num_kv_heads, num_indices]`.
    pub indices: &'a CudaTensor,
    /// How many of its indices each query has, the first ones, i32 `[batch, seq_len, num_kv_heads]`; `None`: all.
    pub counts: Option<&'a CudaTensor>,
    /// Tokens of a block, one of [`SELECTED_SIZES`].
    pub block: usize,
}

impl SelectedBlocks<'_> {
    /// The blocks as attention reads them, i32 `[batch, seq_len, num_kv_heads, num_selected_blocks]`: ascending, each
    /// once, then -1; and their sizes. A block of 128 tokens is two blocks there.
    ///
    /// # Errors
    /// Another type than i32, another size of blocks, shapes that do not fit, more tokens than lists take.
    pub fn attended(&self, doc_start: &CudaTensor) -> Result<(CudaTensor, NsaBlocks), KernelError> {
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
        let num_words = words(seq_len, block);
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
        Ok((attended, NsaBlocks { num_selected_blocks: num_indices * pieces, ..NsaBlocks::of([size; 4]) }))
    }
}

impl Qkv {
    /// Causal attention of each query over the tokens of the blocks that a caller gives it. A query without a block
    /// gets `o = 0`, `lse = -inf`; a block that no query has is not read. Also returns the blocks as
    /// [`AttentionGradients::nsa_selected_attention_backward`](crate::AttentionGradients) takes them, and their sizes.
    ///
    /// # Errors
    /// Another type than bf16, sizes that do not fit or have no kernel.
    pub fn selected_attention_forward(
        &self,
        [start, end]: Bounds,
        selected: SelectedBlocks,
        softmax_scale: f32,
    ) -> Result<(AttentionResult, CudaTensor, NsaBlocks), KernelError> {
        let shape = self.shape(NAME)?;
        let (indices, [.., num_indices]) = (selected.indices, selected.indices.dims::<4>(NAME, "indices")?);
        operands!(only NAME, indices: I32[shape.batch, shape.seq_len, shape.num_kv_heads, num_indices] strided);
        let (attended, blocks) = selected.attended(start)?;
        let (result, _) = self.nsa_selected_attention_forward([start, end], &attended, blocks, softmax_scale)?;
        Ok((result, attended, blocks))
    }
}

/// Words of the bits of a warp: a bit for each block of a row. A power of two, so that few different launches exist.
fn words(seq_len: usize, block: usize) -> usize {
    seq_len.div_ceil(32 * block).next_power_of_two()
}

/// The kernel with or without counts, for warps of `num_words` words.
pub(super) fn selected_blocks_kernel(has_counts: bool, num_words: usize) -> SourceKernel {
    SourceKernel::new(NAME)
        .define("COUNTS", u8::from(has_counts))
        .threads(32 * WARPS)
        .shared_bytes(WARPS * num_words * 4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Hardware, Recorder};

    fn attended(block: usize, seq_len: usize, counts: &[usize]) -> Result<(CudaTensor, NsaBlocks), KernelError> {
        let gpu = Recorder::new(Hardware::HOPPER);
        let tensor = |shape: &[usize]| gpu.tensor(shape, DType::I32);
        let (indices, counts) = (tensor(&[2, seq_len, 3, 5]), tensor(counts));
        SelectedBlocks { indices: &indices, counts: Some(&counts), block }.attended(&tensor(&[2, seq_len]))
    }

    #[test]
    fn blocks_of_128_are_two_and_other_sizes_are_refused_by_name() {
        for (block, size, pieces) in [(16, 16, 1), (32, 32, 1), (64, 64, 1), (128, 64, 2)] {
            let (indices, blocks) = attended(block, 1000, &[2, 1000, 3]).expect("a size with kernels");
            assert_eq!(indices.shape(), [2, 1000, 3, 5 * pieces]);
            assert_eq!((blocks.select_block_size, blocks.num_selected_blocks), (size, 5 * pieces));
            blocks.check();
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
                let (words, limit) = (words(seq_len, block), Hardware::HOPPER.max_shared_bytes);
                assert!(words * 32 * block >= seq_len, "{block} {seq_len}");
                assert!(selected_blocks_kernel(true, words).dynamic_shared_bytes() <= limit, "{block} {seq_len}");
            }
        }
    }
}
