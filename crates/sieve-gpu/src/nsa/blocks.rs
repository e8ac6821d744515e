//! Launches of `kernels/nsa_blocks*.cu` and `kernels/nsa_positions_backward.cu`: the blocks of keys and values that NSA
//! compresses, and their gradients.
use super::{Bounds, require_bounds};
use crate::KernelError;
use crate::attention::{AttentionShape, Qkv};
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params};
use crate::step::{column_sums, require_words};
use sieve_core::NsaBlocks;

const NAME: &str = "nsa_blocks";

/// Columns of a thread block of nsa_positions_backward.
const POSITION_COLUMNS: usize = 1024;
/// Partial sums that nsa_positions_backward writes for each element.
const POSITION_PARTS: usize = 128;

impl Qkv {
    /// Gathers the keys, then the values, of every compressed block into a row and adds `positions`, the position
    /// embeddings of keys and of values, each bf16 `[compress_block_size, head_dim]`. Returns bf16
    /// `[2, batch * num_slots * num_kv_heads, compress_block_size * head_dim]`, the input of the compression MLPs.
    ///
    /// # Errors
    /// Another type than bf16, sizes that do not fit.
    pub fn nsa_blocks(
        &self,
        positions: [&CudaTensor; 2],
        documents: Bounds,
        blocks: NsaBlocks,
    ) -> Result<CudaTensor, KernelError> {
        forward(self, Some(positions), documents, blocks)
    }

    /// Means of the keys, then of the values, of every compressed block: bf16
    /// `[2, batch * num_slots * num_kv_heads, head_dim]`.
    ///
    /// # Errors
    /// The errors of [`Self::nsa_blocks`].
    pub fn nsa_mean_pool(&self, documents: Bounds, blocks: NsaBlocks) -> Result<CudaTensor, KernelError> {
        let positions = None;
        forward(self, positions, documents, blocks)
    }
}

/// Gathers blocks and adds `positions`; without `positions` takes the mean of each block. A row of the batch has
/// `num_slots` slots, one for each block that may be complete.
fn forward(
    qkv: &Qkv,
    positions: Option<[&CudaTensor; 2]>,
    documents: Bounds,
    blocks: NsaBlocks,
) -> Result<CudaTensor, KernelError> {
    blocks.check();
    let shape = qkv.shape(NAME)?;
    let qkv = qkv.with_kernel_strides();
    let (size, head_dim) = (blocks.compress_block_size, shape.head_dim);
    let [start, end] = require_bounds(NAME, documents, [shape.batch, shape.seq_len])?;
    let mut embeddings = Vec::new();
    for positions in positions.into_iter().flatten() {
        operands!(NAME, positions: BF16[size, head_dim]);
        embeddings.push(positions);
    }
    let num_slots = blocks.num_slots(shape.seq_len);
    let rows = shape.batch * num_slots * shape.num_kv_heads;
    let width = if positions.is_some() { size * head_dim } else { head_dim };
    let k = qkv.k.tensor();
    let y = k.empty_contiguous(&[2, rows, width], DType::BF16);
    let [_, k_words, v_words] = qkv.head_words(NAME)?;
    let params = params!(NsaBlocksParams {
        { seq_len, num_kv_heads }: shape,
        width: head_dim,
        size,
        stride: blocks.compress_stride,
        [k_offset, k_token_stride, k_batch_stride]: k_words,
        [v_offset, v_token_stride, v_batch_stride]: v_words,
    });
    let mut tensors = vec![k, qkv.v.tensor(), &start, &end];
    tensors.extend(&embeddings);
    tensors.push(&y);
    let kernel = nsa_blocks_kernel(positions.is_none());
    // SAFETY: sizes, strides and types checked above; reads keys and values inside documents, writes every element of
    // y.
    unsafe { kernel.launch([num_slots, 2, shape.batch], &tensors, &params) }?;
    Ok(y)
}

/// Gradients `[dqkv, dk_positions, dv_positions]` of [`nsa_blocks`](crate::Qkv::nsa_blocks) for a packed `qkv` of
/// `shape`. dqkv is bf16, packed, and zero for queries; the gradients of position embeddings are f32.
///
/// # Errors
/// Types or sizes that do not fit.
pub fn nsa_blocks_backward(
    shape: &AttentionShape,
    documents: Bounds,
    blocks: NsaBlocks,
    dy: &CudaTensor,
) -> Result<[CudaTensor; 3], KernelError> {
    let is_mean = false;
    let dqkv = backward(shape, documents, blocks, dy, is_mean)?;
    let (size, head_dim) = (blocks.compress_block_size, shape.head_dim);
    let columns = size * head_dim;
    let documents = require_bounds(NAME, documents, [shape.batch, shape.seq_len])?;
    let partials = dqkv.empty_contiguous(&[POSITION_PARTS, 2 * columns], DType::F32);
    let num_slots = blocks.num_slots(shape.seq_len);
    let params = params!(NsaPositionsBackwardParams {
        { batch, seq_len, num_kv_heads }: shape,
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

/// Gradient `dqkv` of [`nsa_mean_pool`](crate::Qkv::nsa_mean_pool): bf16, packed, and zero for queries.
///
/// # Errors
/// Types or sizes that do not fit.
pub fn nsa_mean_pool_backward(
    shape: &AttentionShape,
    documents: Bounds,
    blocks: NsaBlocks,
    dy: &CudaTensor,
) -> Result<CudaTensor, KernelError> {
    let is_mean = true;
    backward(shape, documents, blocks, dy, is_mean)
}

/// The gradient of packed q, k and v, from the gradient `dy` of gathered blocks or of their means.
fn backward(
    shape: &AttentionShape,
    documents: Bounds,
    blocks: NsaBlocks,
    dy: &CudaTensor,
    is_mean: bool,
) -> Result<CudaTensor, KernelError> {
    blocks.check();
    let [start, end] = require_bounds(NAME, documents, [shape.batch, shape.seq_len])?;
    let num_slots = blocks.num_slots(shape.seq_len);
    let rows = shape.batch * num_slots * shape.num_kv_heads;
    let (size, head_dim) = (blocks.compress_block_size, shape.head_dim);
    let width = if is_mean { head_dim } else { size * head_dim };
    operands!(NAME, dy: BF16[2, rows, width]);
    require_words(NAME, head_dim)?;
    let heads = shape.num_heads + 2 * shape.num_kv_heads;
    let dqkv = dy.empty_contiguous(&[shape.batch, shape.seq_len, heads, head_dim], DType::BF16);
    let params = params!(NsaBlocksBackwardParams {
        { seq_len, num_heads, num_kv_heads }: shape,
        width: head_dim,
        size,
        stride: blocks.compress_stride,
        num_slots,
    });
    let grid = [shape.seq_len, shape.batch, 1];
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
