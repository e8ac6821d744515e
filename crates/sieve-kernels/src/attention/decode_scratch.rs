//! What the decode kernels share: how a row's keys are split over blocks, and the buffers that join the parts.
use crate::attention::heads::AttentionShape;
use crate::error::KernelError;
use crate::runtime::cuda_tensor::CudaTensor;
use crate::runtime::source_kernel::SourceKernel;
use crate::step::fill_zero::empty_zero;
use burn::tensor::DType;

/// Query rows of a block, which share its keys.
const DECODE_ROWS: usize = 16;

/// Keys below which a split is not worth its join.
const MIN_SPLIT_KEYS: usize = 64;

/// Blocks for a multiprocessor: one is fastest for long caches, two for short ones (2 % either way), three are slower.
const BLOCKS_PER_MULTIPROCESSOR: usize = 2;

/// Buffers that a decode kernel needs between its blocks. Made once for a batch and used for every token and layer,
/// since launches follow each other on one stream and leave the counters at zero.
#[derive(Debug, Clone)]
pub struct DecodeScratch {
    pub(crate) partials: CudaTensor,
    pub(crate) counters: CudaTensor,
    pub(crate) num_splits: usize,
    shape: AttentionShape,
}

impl DecodeScratch {
    /// Buffers for caches of at most `max_keys` keys. `like` is any tensor on the device; `shape.seq_len` does not
    /// count.
    ///
    /// # Errors
    /// An empty batch.
    pub fn new(
        like: &CudaTensor,
        shape: AttentionShape,
        max_keys: usize,
    ) -> Result<Self, KernelError> {
        let multiprocessors = like.hardware().num_multiprocessors;
        let num_splits = num_splits(&shape, max_keys, multiprocessors);
        let partials = [
            shape.batch,
            shape.num_heads,
            num_splits,
            shape.head_dim_v + 2,
        ];
        let partials = like.empty_contiguous(&partials, DType::F32);
        // 32-bit counters; zero has the same bits as an f32.
        let counters = empty_zero(like, &[shape.batch, shape.num_kv_heads])?;
        Ok(Self {
            partials,
            counters,
            num_splits,
            shape,
        })
    }

    /// True when the buffers were made for these heads and this batch.
    pub(crate) fn fits(&self, shape: &AttentionShape) -> bool {
        AttentionShape {
            seq_len: self.shape.seq_len,
            ..*shape
        } == self.shape
    }

    /// The grid of a decode kernel.
    pub(crate) fn grid(&self) -> [usize; 3] {
        [self.num_splits, row_blocks(&self.shape), self.shape.batch]
    }

    /// An error for buffers of another batch or model.
    pub(crate) fn misfit(&self, kernel: &'static str, shape: &AttentionShape) -> KernelError {
        let (got, supported) = (
            format!("{shape:?}"),
            format!("what it was made for, {:?}", self.shape),
        );
        KernelError::Unsupported {
            kernel,
            what: "shape for this DecodeScratch:",
            got,
            supported,
        }
    }
}

/// Blocks along the heads: groups wider than a block take several.
fn row_blocks(shape: &AttentionShape) -> usize {
    shape.num_kv_heads * shape.group_size().div_ceil(DECODE_ROWS)
}

/// Parts a row's keys are split into, so that the device is full.
fn num_splits(shape: &AttentionShape, max_keys: usize, multiprocessors: usize) -> usize {
    let blocks = shape.batch * row_blocks(shape);
    let wanted = BLOCKS_PER_MULTIPROCESSOR * multiprocessors / blocks.max(1);
    wanted.clamp(1, max_keys.div_ceil(MIN_SPLIT_KEYS).max(1))
}

/// Sets the defines, block and shared memory that all decode kernels share.
pub(crate) fn decode_kernel(
    kernel: SourceKernel,
    head_dim: usize,
    head_dim_v: usize,
) -> SourceKernel {
    let num_warps = if head_dim.max(head_dim_v) > 128 { 2 } else { 4 };
    let num_stages = if head_dim.max(head_dim_v) <= 64 { 4 } else { 2 };
    let queries = DECODE_ROWS * (2 * head_dim + 16);
    let ring = num_warps * num_stages * (32 * head_dim + 32 * head_dim_v + 576);
    kernel
        .define("HEAD_DIM", head_dim)
        .define("HEAD_DIM_V", head_dim_v)
        .define("NUM_STAGES", num_stages)
        .threads(num_warps * 32)
        .shared_bytes(queries + ring)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(batch: usize, num_heads: usize, num_kv_heads: usize) -> AttentionShape {
        AttentionShape {
            batch,
            seq_len: 1,
            num_heads,
            num_kv_heads,
            head_dim: 128,
            head_dim_v: 128,
        }
    }

    #[test]
    fn splits_fill_the_device_and_no_more() {
        assert_eq!(num_splits(&shape(16, 16, 8), 2048, 132), 2);
        assert_eq!(
            num_splits(&shape(1, 16, 8), 2048, 132),
            32,
            "not below 64 keys a split"
        );
        assert_eq!(num_splits(&shape(1, 16, 8), 131072, 132), 33);
        assert_eq!(num_splits(&shape(512, 16, 8), 131072, 132), 1);
        assert_eq!(num_splits(&shape(1, 1, 1), 1, 132), 1);
        assert_eq!(
            row_blocks(&shape(1, 64, 2)),
            4,
            "a group of 32 takes two blocks"
        );
    }
}
