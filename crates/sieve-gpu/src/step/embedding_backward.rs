//! Launches of `kernels/embedding_order.cu`, `embedding_backward.cu` and `embedding_carry.cu`: the gradient of the
//! embedding table.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params, require_non_empty};
use crate::step::{Rows, empty_zero};

const NAME: &str = "embedding_backward";
const ORDER: &str = "embedding_order";
const CARRY: &str = "embedding_carry";

/// Sorted tokens of a thread block, a chunk; `RUN_CHUNK` of `common/token_runs.cuh`.
const RUN_CHUNK: usize = 32;

/// Embedding columns of a thread block.
const RUN_COLUMNS: usize = 2048;

/// Gradient of the embedding table, f32 `[vocab_size, width]`: each row of `dy`, bf16 `[batch, seq_len, width]`, is
/// added to the row of its id in `ids`, i32 `[batch, seq_len]`. Tokens of one id are added in their order and without
/// atomics, so two runs have equal bits.
///
/// # Errors
/// Other types or shapes, a width that is not a multiple of 8, no tokens.
pub fn embedding_backward(dy: &CudaTensor, ids: &CudaTensor, vocab_size: usize) -> Result<CudaTensor, KernelError> {
    let [batch, seq_len, width] = dy.dims(NAME, "dy")?;
    operands!(NAME, ids: I32[batch, seq_len]);
    require_non_empty(NAME, "vocab_size", vocab_size)?;
    let dy = Rows::of_words(NAME, "dy", dy)?;
    let dweight = empty_zero(&dy.tensor, &[vocab_size, width])?;
    let order = token_order(&ids, vocab_size)?;
    let tokens = dy.rows;
    let chunks = tokens.div_ceil(RUN_CHUNK);
    // `dweight` is contiguous.
    let dweight_stride = width;
    // Two partial sums of each chunk: `begun` of the id whose tokens began in the previous chunk, `ended` of the id
    // whose tokens continue in the next chunk.
    let partial_sums = || dy.tensor.empty_contiguous(&[chunks, width], DType::F32);
    let (begun, ended) = (partial_sums(), partial_sums());
    let grid = [chunks, width.div_ceil(RUN_COLUMNS), 1];
    let params = params!(EmbeddingBackwardParams { tokens, vocab_size, width, dy_stride: dy.stride, dweight_stride });
    let tensors = [&dy.tensor, &order, &dweight, &begun, &ended];
    // SAFETY: reads every row of dy, adds to rows of dweight, writes rows of the partial sums; sizes checked above.
    unsafe { EMBEDDING_BACKWARD.launch(grid, &tensors, &params) }?;
    let params = params!(EmbeddingCarryParams { tokens, vocab_size, width, dweight_stride });
    // SAFETY: reads the partial sums that the launch before wrote, adds to rows of dweight.
    unsafe { EMBEDDING_CARRY.launch(grid, &[&order, &begun, &ended, &dweight], &params) }?;
    Ok(dweight)
}

/// `{id, token}` of all tokens in ascending order, i32 `[tokens, 2]`.
fn token_order(ids: &CudaTensor, vocab_size: usize) -> Result<CudaTensor, KernelError> {
    let tokens = ids.num_elements();
    let new = || ids.empty_contiguous(&[tokens, 2], DType::I32);
    let (order, scratch) = (new(), new());
    let num_bits = num_bits(vocab_size);
    let params = params!(EmbeddingOrderParams { tokens, vocab_size, num_bits });
    // SAFETY: reads the ids, writes both lists.
    unsafe { EMBEDDING_ORDER.launch([1, 1, 1], &[ids, &order, &scratch], &params) }?;
    Ok(order)
}

/// Bits of the largest number that is sorted: ids outside the table are sorted as `vocab_size`.
fn num_bits(vocab_size: usize) -> u32 {
    usize::BITS - vocab_size.leading_zeros()
}

/// The kernel that sums the tokens of each id inside a chunk.
const EMBEDDING_BACKWARD: SourceKernel = SourceKernel::new(NAME).threads(256);

/// The kernel that sorts tokens by id.
const EMBEDDING_ORDER: SourceKernel = SourceKernel::new(ORDER).threads(1024);

/// The kernel that joins the sums of ids whose tokens lie in several chunks.
const EMBEDDING_CARRY: SourceKernel = SourceKernel::new(CARRY).threads(256);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sort_has_bits_for_all_ids_and_for_ids_outside_the_table() {
        assert_eq!(num_bits(1), 1);
        assert_eq!(num_bits(255), 8);
        assert_eq!(num_bits(256), 9);
        assert_eq!(num_bits(50280), 16);
        assert_eq!(num_bits(151_936), 18);
    }
}
