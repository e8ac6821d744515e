//! Launches of `kernels/nsa_blocks*.cu` and `kernels/nsa_positions_backward.cu`: the blocks of keys and values that NSA
//! compresses, and their gradients.
use super::{Bounds, require_bounds};
use crate::KernelError;
use crate::attention::Heads;
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params, require};
use crate::step::{column_sums, require_words};
use sieve_core::NsaBlocks;

const NAME: &str = "nsa_blocks";

/// Columns of a thread block of nsa_positions_backward.
const POSITION_COLUMNS: usize = 1024;
/// Partial sums that nsa_positions_backward writes for each element.
const POSITION_PARTS: usize = 128;

/// Gathers the keys, then the values, of every compressed block into a row and adds `positions`, the position
/// embeddings of keys and of values, each bf16 `[compress_block_size, head_dim]`. Returns bf16
/// `[2, batch * num_slots * num_kv_heads, compress_block_size * head_dim]`, the input of the compression MLPs. A row of
/// the batch has `num_slots` slots, one for each block that may be complete ([`NsaBlocks::num_slots`]).
///
/// # Errors
/// Another type than bf16, sizes that do not fit.
pub fn nsa_blocks(
    keys_and_values: [&Heads; 2],
    positions: [&CudaTensor; 2],
    documents: Bounds,
    blocks: NsaBlocks,
) -> Result<CudaTensor, KernelError> {
    forward(keys_and_values, Some(positions), documents, blocks)
}

/// Means of the keys, then of the values, of every compressed block: bf16
/// `[2, batch * num_slots * num_kv_heads, head_dim]`, in slots as [`nsa_blocks`] has them.
///
/// # Errors
/// The errors of [`nsa_blocks`].
pub fn nsa_mean_pool(
    keys_and_values: [&Heads; 2],
    documents: Bounds,
    blocks: NsaBlocks,
) -> Result<CudaTensor, KernelError> {
    let positions = None;
    forward(keys_and_values, positions, documents, blocks)
}

/// Gathers blocks and adds `positions`; without `positions` takes the mean of each block.
fn forward(
    [k, v]: [&Heads; 2],
    positions: Option<[&CudaTensor; 2]>,
    documents: Bounds,
    blocks: NsaBlocks,
) -> Result<CudaTensor, KernelError> {
    blocks.check();
    let dims = k.sizes(NAME, "k")?;
    let dims_of_v = v.sizes(NAME, "v")?;
    require!(dims_of_v == dims, NAME, "v": format!("of shape {dims_of_v:?}"), "the shape of k, {dims:?}");
    let [batch, seq_len, num_kv_heads, head_dim] = dims;
    let [k, v] = [k, v].map(Heads::with_kernel_strides);
    let size = blocks.compress_block_size;
    let [start, end] = require_bounds(NAME, documents, [batch, seq_len])?;
    let mut embeddings = Vec::new();
    for positions in positions.into_iter().flatten() {
        operands!(NAME, positions: BF16[size, head_dim]);
        embeddings.push(positions);
    }
    let num_slots = blocks.num_slots(seq_len);
    let width = if positions.is_some() { size * head_dim } else { head_dim };
    let y = k.tensor().empty_contiguous(&[2, batch * num_slots * num_kv_heads, width], DType::BF16);
    let params = params!(NsaBlocksParams {
        seq_len,
        num_kv_heads,
        width: head_dim,
        size,
        stride: blocks.compress_stride,
        [k_offset, k_token_stride, k_batch_stride]: k.require_words(NAME, "k")?,
        [v_offset, v_token_stride, v_batch_stride]: v.require_words(NAME, "v")?,
    });
    let mut tensors = vec![k.tensor(), v.tensor(), &start, &end];
    tensors.extend(&embeddings);
    tensors.push(&y);
    let kernel = nsa_blocks_kernel(positions.is_none());
    // SAFETY: sizes, strides and types checked above; reads keys and values inside documents, writes every element of
    // y.
    unsafe { kernel.launch([num_slots, 2, batch], &tensors, &params) }?;
    Ok(y)
}

/// Sizes of the gradient of a packed tensor of queries, keys and values.
#[derive(Debug, Clone, Copy)]
pub struct PackedGradient {
    /// `[batch, seq_len, query heads + 2 * num_kv_heads, head_dim]`; the gradients of query heads are zero.
    pub dims: [usize; 4],
    /// Number of key heads, and of value heads.
    pub num_kv_heads: usize,
}

/// Gradients `[dqkv, dk_positions, dv_positions]` of [`nsa_blocks`] from the gradient `dy` of its result. dqkv is bf16
/// of the sizes `packed`, the gradients of position embeddings are f32.
///
/// # Errors
/// Types or sizes that do not fit.
pub fn nsa_blocks_backward(
    packed: PackedGradient,
    documents: Bounds,
    blocks: NsaBlocks,
    dy: &CudaTensor,
) -> Result<[CudaTensor; 3], KernelError> {
    let is_mean = false;
    let dqkv = backward(packed, documents, blocks, dy, is_mean)?;
    let PackedGradient { dims: [batch, seq_len, _, head_dim], num_kv_heads } = packed;
    let size = blocks.compress_block_size;
    let columns = size * head_dim;
    let documents = require_bounds(NAME, documents, [batch, seq_len])?;
    let partials = dqkv.empty_contiguous(&[POSITION_PARTS, 2 * columns], DType::F32);
    let num_slots = blocks.num_slots(seq_len);
    let params = params!(NsaPositionsBackwardParams {
        batch,
        seq_len,
        num_kv_heads,
        columns,
        size,
        stride: blocks.compress_stride,
        num_slots,
    });
    let grid = [columns.div_ceil(POSITION_COLUMNS), 2, POSITION_PARTS];
    let dy = dy.contiguous();
    let tensors = [&dy, &documents[0], &documents[1], &partials];
    // SAFETY: `backward` checked dy's size; writes every element of the partials.
    unsafe { NSA_POSITIONS_BACKWARD.launch(grid, &tensors, &params) }?;
    let [dk_positions, dv_positions] = column_sums(&partials, [&[size, head_dim]; 2])?;
    Ok([dqkv, dk_positions, dv_positions])
}

/// Gradient `dqkv` of [`nsa_mean_pool`] from the gradient `dy` of its result: bf16 of the sizes `packed`.
///
/// # Errors
/// Types or sizes that do not fit.
pub fn nsa_mean_pool_backward(
    packed: PackedGradient,
    documents: Bounds,
    blocks: NsaBlocks,
    dy: &CudaTensor,
) -> Result<CudaTensor, KernelError> {
    let is_mean = true;
    backward(packed, documents, blocks, dy, is_mean)
}

/// The gradient of packed q, k and v, from the gradient `dy` of gathered blocks or of their means.
fn backward(
    packed: PackedGradient,
    documents: Bounds,
    blocks: NsaBlocks,
    dy: &CudaTensor,
    is_mean: bool,
) -> Result<CudaTensor, KernelError> {
    blocks.check();
    let PackedGradient { dims: [batch, seq_len, heads, head_dim], num_kv_heads } = packed;
    let num_heads = heads.saturating_sub(2 * num_kv_heads);
    require!(num_heads > 0, NAME, "number of packed heads": heads, "more than the {num_kv_heads} of k and of v");
    let [start, end] = require_bounds(NAME, documents, [batch, seq_len])?;
    let num_slots = blocks.num_slots(seq_len);
    let size = blocks.compress_block_size;
    let width = if is_mean { head_dim } else { size * head_dim };
    operands!(NAME, dy: BF16[2, batch * num_slots * num_kv_heads, width]);
    require_words(NAME, head_dim)?;
    let dqkv = dy.empty_contiguous(&packed.dims, DType::BF16);
    let params = params!(NsaBlocksBackwardParams {
        seq_len,
        num_heads,
        num_kv_heads,
        width: head_dim,
        size,
        stride: blocks.compress_stride,
        num_slots,
    });
    let grid = [seq_len, batch, 1];
    let kernel = nsa_blocks_backward_kernel(is_mean);
    // SAFETY: sizes and types checked above; writes every element of dqkv.
    unsafe { kernel.launch(grid, &[&dy, &start, &end, &dqkv], &params) }?;
    Ok(dqkv)
}

/// The kernel that gathers the tokens of each block, or takes their mean.
fn nsa_blocks_kernel(is_mean: bool) -> SourceKernel {
    SourceKernel::new(NAME).define("MEAN", u8::from(is_mean)).threads(256)
}

/// The gradient kernel for keys and values.
fn nsa_blocks_backward_kernel(is_mean: bool) -> SourceKernel {
    SourceKernel::new("nsa_blocks_backward").define("MEAN", u8::from(is_mean)).threads(128)
}

/// The gradient kernel for position embeddings, which writes partial sums.
const NSA_POSITIONS_BACKWARD: SourceKernel = SourceKernel::new("nsa_positions_backward").threads(128);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Hardware, Recorder};

    #[test]
    fn values_of_another_size_than_keys_and_gradients_without_queries_are_refused() {
        let gpu = Recorder::new(Hardware::HOPPER);
        let heads = |count, width| Heads::all(&gpu.tensor(&[2, 100, count, width], DType::BF16));
        let bound = gpu.tensor(&[2, 100], DType::I32);
        let pool = |k: &Heads, v: &Heads| nsa_mean_pool([k, v], [&bound; 2], NsaBlocks::PUBLISHED);
        let pooled = pool(&heads(3, 64), &heads(3, 64)).expect("equal sizes");
        // A row of 100 tokens has 7 slots of 16 tokens.
        assert_eq!(pooled.shape(), [2, 2 * 7 * 3, 64]);
        for (count, width) in [(3, 48), (2, 64)] {
            let error = pool(&heads(3, 64), &heads(count, width)).expect_err("other sizes").to_string();
            let sizes = format!("[2, 100, {count}, {width}]");
            assert!(error.contains(&sizes) && error.contains("[2, 100, 3, 64]"), "{error}");
        }
        let gradient = |heads| {
            let packed = PackedGradient { dims: [2, 100, heads, 64], num_kv_heads: 3 };
            nsa_mean_pool_backward(packed, [&bound; 2], NsaBlocks::PUBLISHED, &pooled)
        };
        assert_eq!(gradient(7).expect("one query head").shape(), [2, 100, 7, 64]);
        assert!(gradient(6).is_err_and(|error| error.to_string().contains("more than the 3 of k and of v")));
    }
}
