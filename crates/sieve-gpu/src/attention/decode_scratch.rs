//! The split of a row's keys over thread blocks (split-KV), and the buffers that join the splits' partial results. All
//! decode kernels share them.
use crate::KernelError;
use crate::attention::AttentionShape;
use crate::runtime::{CudaTensor, DType, SourceKernel, require};
use crate::step::empty_zero;

/// Query heads of a thread block, which share its keys.
const DECODE_ROWS: usize = 16;

/// Keys of a warp's tile. A split has at least one tile for each of its warps.
pub const WARP_KEYS: usize = 16;

/// Warps that saturate a multiprocessor's memory bandwidth.
const WARPS_PER_MULTIPROCESSOR: usize = 8;

/// Tile sizes of a decode kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DecodeTiling {
    head_dims: [usize; 2],
    num_warps: usize,
}

impl DecodeTiling {
    /// The tiling for head widths of keys and values, on a device with `max_shared_bytes` of shared memory a block. A
    /// block has eight warps where they fit: two blocks of four would have more partial results to join. For heads
    /// wider than 128 it has two.
    pub(crate) fn new(head_dims: [usize; 2], max_shared_bytes: usize) -> Self {
        let mut tiling = Self { head_dims, num_warps: WARPS_PER_MULTIPROCESSOR };
        if head_dims.iter().any(|dim| *dim > 128) {
            tiling.num_warps = 2;
        } else if tiling.shared_bytes() > max_shared_bytes {
            tiling.num_warps = 4;
        }
        tiling
    }

    /// Tiles of keys and values in a warp's shared memory at a time.
    fn num_stages(&self) -> usize {
        if self.head_dims.iter().all(|dim| *dim <= 64) { 4 } else { 2 }
    }

    /// Dynamic shared memory of a block, in bytes: bf16 rows of queries, and for each warp and stage 16 rows of keys
    /// and values with 16 bytes of padding a row, and one f32 for each key.
    fn shared_bytes(&self) -> usize {
        let [k, v] = self.head_dims;
        let queries = DECODE_ROWS * (2 * k + 16);
        queries + self.num_warps * self.num_stages() * (32 * k + 32 * v + 576)
    }

    /// Sets the defines, block and shared memory that all decode kernels share.
    pub(crate) fn kernel(&self, kernel: SourceKernel) -> SourceKernel {
        kernel
            .define("HEAD_DIM", self.head_dims[0])
            .define("HEAD_DIM_V", self.head_dims[1])
            .define("NUM_WARPS", self.num_warps)
            .define("NUM_STAGES", self.num_stages())
            .threads(self.num_warps * 32)
            .shared_bytes(self.shared_bytes())
    }

    /// KV splits of a row: as many as fill the device with one block of eight warps for each multiprocessor, or two
    /// blocks of fewer warps.
    fn num_splits(&self, shape: &AttentionShape, max_keys: usize, multiprocessors: usize) -> usize {
        let blocks_of_a_split = shape.batch * row_blocks(shape);
        let device_blocks = WARPS_PER_MULTIPROCESSOR.div_ceil(self.num_warps).min(2) * multiprocessors;
        let most = max_keys.div_ceil(self.num_warps * WARP_KEYS);
        (device_blocks / blocks_of_a_split.max(1)).clamp(1, most.max(1))
    }
}

/// Buffers by which the blocks of a decode kernel join their partial results. One set serves every token and layer of a
/// batch: launches follow each other on one stream, and each leaves the counters at zero.
#[derive(Debug, Clone)]
pub struct DecodeScratch {
    pub(crate) partials: CudaTensor,
    pub(crate) counters: CudaTensor,
    pub(crate) num_splits: usize,
    pub(crate) tiling: DecodeTiling,
    shape: AttentionShape,
}

impl DecodeScratch {
    /// Buffers for caches of at most `max_keys` keys. `like` is any tensor on the device; `shape.seq_len` is ignored.
    ///
    /// # Errors
    /// An empty batch.
    pub fn new(like: &CudaTensor, shape: AttentionShape, max_keys: usize) -> Result<Self, KernelError> {
        let hardware = like.hardware();
        let tiling = DecodeTiling::new([shape.head_dim, shape.head_dim_v], hardware.max_shared_bytes);
        let num_splits = tiling.num_splits(&shape, max_keys, hardware.num_multiprocessors);
        // A partial result is an output with its largest logit and its sum of exponentials.
        let partials = [shape.batch, shape.num_heads, num_splits, shape.head_dim_v + 2];
        let partials = like.empty_contiguous(&partials, DType::F32);
        // The counters are 32-bit integers; an f32 of 0 has the same bits.
        let counters = empty_zero(like, &[shape.batch, shape.num_kv_heads])?;
        Ok(Self { partials, counters, num_splits, tiling, shape })
    }

    /// Refuses buffers that were made for another batch or other heads; `seq_len` is ignored.
    pub(crate) fn require(&self, kernel: &'static str, shape: &AttentionShape) -> Result<(), KernelError> {
        let (made_for, seq_len) = (self.shape, self.shape.seq_len);
        let fits = AttentionShape { seq_len, ..*shape } == made_for;
        require!(fits, kernel, "shape for this DecodeScratch:": format!("{shape:?}"),
            "what it was made for, {made_for:?}");
        Ok(())
    }

    /// Grid of the decode kernel, in thread blocks.
    pub(crate) fn grid(&self) -> [usize; 3] {
        [self.num_splits, row_blocks(&self.shape), self.shape.batch]
    }
}

/// Thread blocks along the query heads: a group of more than 16 heads takes several.
fn row_blocks(shape: &AttentionShape) -> usize {
    shape.num_kv_heads * shape.group_size().div_ceil(DECODE_ROWS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(batch: usize, num_heads: usize, num_kv_heads: usize) -> AttentionShape {
        AttentionShape::new(batch, 1, [num_heads, num_kv_heads], [128, 128])
    }

    #[test]
    fn there_are_as_many_splits_as_fill_the_device() {
        let splits = |batch, max_keys, shared: usize| {
            DecodeTiling::new([128, 128], shared << 10).num_splits(&shape(batch, 16, 8), max_keys, 132)
        };
        assert_eq!(splits(16, 2048, 227), 1);
        assert_eq!(splits(1, 2048, 227), 16, "a tile a warp at least");
        assert_eq!(splits(1, 131072, 227), 16);
        assert_eq!(splits(512, 131072, 227), 1);
        assert_eq!(splits(1, 1, 227), 1);
        assert_eq!(splits(16, 2048, 99), 2, "two blocks of four warps");
        assert_eq!(splits(1, 2048, 99), 32);
        assert_eq!(row_blocks(&shape(1, 64, 2)), 4, "a group of 32 takes two blocks");
    }

    #[test]
    fn a_block_fits_every_device() {
        for dim in [16, 32, 64, 96, 128, 192, 256] {
            for limit in [99 << 10, 163 << 10, 227 << 10] {
                let tiling = DecodeTiling::new([dim, dim], limit);
                assert!(tiling.shared_bytes() <= limit, "{tiling:?}");
            }
        }
    }
}
