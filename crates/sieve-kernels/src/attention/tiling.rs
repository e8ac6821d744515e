//! Tile sizes of the attention kernels, by head width and by what the device has; the one place that chooses them.
use crate::attention::heads::AttentionShape;
use crate::dma::oracle::SUPER_BLOCK;
use crate::error::KernelError;
use crate::runtime::source_kernel::SourceKernel;

/// Bytes of a bf16 and of an f32.
const BF16: usize = 2;
const F32: usize = 4;

/// How a forward kernel reads its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeySource {
    /// Neighbouring keys, no bias.
    Dense,
    /// Neighbouring keys with an additive bias each.
    Biased,
    /// Keys gathered from a list, with a bias each.
    Gathered,
}

/// Tile sizes of a forward kernel, named as its defines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ForwardTiling {
    /// Rows of a warp.
    pub(crate) warp_rows: usize,
    /// Warps of a block.
    pub(crate) num_warps: usize,
    /// Keys of a tile.
    pub(crate) block_kv: usize,
    /// Key tiles in flight.
    pub(crate) num_stages: usize,
    /// Blocks that should share a multiprocessor.
    pub(crate) min_blocks: usize,
    /// Keep the queries in registers.
    pub(crate) q_in_registers: bool,
    /// Query heads of a group that share a tile.
    pub(crate) heads_per_tile: usize,
}

impl ForwardTiling {
    /// The tiling for a shape on a device with `max_shared_bytes` of shared memory a block.
    ///
    /// # Errors
    /// [`KernelError::DeviceLimit`] when no tiling fits the device.
    pub(crate) fn choose(
        kernel: &'static str,
        shape: &AttentionShape,
        source: KeySource,
        max_shared_bytes: usize,
    ) -> Result<Self, KernelError> {
        let (warp_rows, num_warps, block_kv, min_blocks) = match shape.head_dim {
            ..=64 => (32, 4, 64, 2),
            65..=128 if source == KeySource::Gathered => (32, 4, 64, 2),
            65..=128 => (32, 4, 48, 2),
            129..=192 => (16, 8, 64, 1),
            _ => (16, 8, 32, 1),
        };
        let mut tiling = Self {
            warp_rows,
            num_warps,
            block_kv,
            num_stages: 2,
            min_blocks,
            q_in_registers: shape.head_dim <= 64,
            heads_per_tile: 1,
        };
        // Blocks of fewer warps ask for less shared memory (consumer Ampere and Ada have 99 KiB).
        while tiling.shared_bytes(shape, source) > max_shared_bytes {
            if tiling.num_warps > 2 {
                tiling.num_warps /= 2;
            } else if tiling.block_kv > 32 {
                tiling.block_kv = 32;
            } else {
                let got = tiling.shared_bytes(shape, source);
                return Err(KernelError::DeviceLimit {
                    kernel,
                    what: "shared memory in bytes",
                    got,
                    limit: max_shared_bytes,
                });
            }
        }
        if source == KeySource::Gathered {
            tiling.heads_per_tile = heads_sharing_a_tile(shape, tiling.block_rows());
        }
        Ok(tiling)
    }

    /// Rows of a tile: heads times queries.
    pub(crate) fn block_rows(&self) -> usize {
        self.warp_rows * self.num_warps
    }

    /// Queries of a tile.
    pub(crate) fn tile_queries(&self) -> usize {
        self.block_rows() / self.heads_per_tile
    }

    /// Dynamic shared memory of a block.
    pub(crate) fn shared_bytes(&self, shape: &AttentionShape, source: KeySource) -> usize {
        let queries = self.block_rows() * shape.head_dim * BF16;
        let keys = self.num_stages * self.block_kv * (shape.head_dim + shape.head_dim_v) * BF16;
        let bias = if source == KeySource::Dense {
            0
        } else {
            self.num_stages * self.block_kv * F32
        };
        let entries_in_flight = list_entries_in_flight(self.num_stages);
        let entries = if source == KeySource::Gathered {
            self.block_kv * 8 * entries_in_flight
        } else {
            0
        };
        queries + keys + bias + entries
    }

    /// The grid over a whole sequence.
    pub(crate) fn grid(&self, shape: &AttentionShape, source: KeySource) -> [usize; 3] {
        let tiles = match source {
            KeySource::Gathered => {
                shape.seq_len.div_ceil(SUPER_BLOCK) * SUPER_BLOCK.div_ceil(self.tile_queries())
            }
            KeySource::Dense | KeySource::Biased => shape.seq_len.div_ceil(self.tile_queries()),
        };
        [tiles, shape.num_heads / self.heads_per_tile, shape.batch]
    }

    /// Sets the defines, block and shared memory of a kernel.
    pub(crate) fn apply(
        &self,
        kernel: SourceKernel,
        shape: &AttentionShape,
        source: KeySource,
    ) -> SourceKernel {
        let kernel = define_head_dims(kernel, shape)
            .define("WARP_ROWS", self.warp_rows)
            .define("NUM_WARPS", self.num_warps)
            .define("BLOCK_KV", self.block_kv)
            .define("NUM_STAGES", self.num_stages)
            .define("MIN_BLOCKS", self.min_blocks)
            .define("Q_IN_REGISTERS", self.q_in_registers as u8)
            .threads(self.num_warps * 32)
            .shared_bytes(self.shared_bytes(shape, source));
        match source {
            KeySource::Dense => kernel.define("HAS_BIAS", 0),
            KeySource::Biased => kernel.define("HAS_BIAS", 1),
            // The gathered kernel defines HAS_BIAS itself.
            KeySource::Gathered => kernel.define("HEADS_PER_TILE", self.heads_per_tile),
        }
    }
}

/// Query heads of a group whose rows share a gathered tile of `block_rows` rows. Widths in wide use have a form for
/// every group; others one for two heads.
pub(crate) fn heads_sharing_a_tile(shape: &AttentionShape, block_rows: usize) -> usize {
    let most = if matches!(shape.head_dim, 64 | 128) {
        8
    } else {
        2
    };
    let fits = |heads: &usize| {
        *heads <= most && shape.group_size().is_multiple_of(*heads) && block_rows / heads >= 16
    };
    [8, 4, 2, 1].into_iter().find(fits).unwrap_or(1)
}

/// Tiles of list entries in flight: fetched further ahead than the keys they name.
pub(crate) fn list_entries_in_flight(num_stages: usize) -> usize {
    match num_stages {
        2 => 4,
        3 | 4 => 8,
        _ => 16,
    }
}

/// HEAD_DIM, and HEAD_DIM_V where it differs.
pub(crate) fn define_head_dims(kernel: SourceKernel, shape: &AttentionShape) -> SourceKernel {
    let kernel = kernel.define("HEAD_DIM", shape.head_dim);
    if shape.head_dim_v == shape.head_dim {
        kernel
    } else {
        kernel.define("HEAD_DIM_V", shape.head_dim_v)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(head_dim: usize, head_dim_v: usize, group: usize) -> AttentionShape {
        AttentionShape {
            batch: 2,
            seq_len: 2500,
            num_heads: 3 * group,
            num_kv_heads: 3,
            head_dim,
            head_dim_v,
        }
    }

    const HOPPER: usize = 227 * 1024;
    const ADA: usize = 99 * 1024;

    #[test]
    fn every_width_fits_every_device() {
        for head_dim in (16..=256).step_by(16) {
            for source in [KeySource::Dense, KeySource::Biased, KeySource::Gathered] {
                for limit in [HOPPER, ADA] {
                    let shape = shape(head_dim, head_dim, 4);
                    let tiling =
                        ForwardTiling::choose("k", &shape, source, limit).expect("a tiling exists");
                    assert!(tiling.shared_bytes(&shape, source) <= limit);
                    assert!(
                        tiling.tile_queries() >= 4,
                        "{head_dim} {source:?} {limit}: {tiling:?}"
                    );
                }
            }
        }
        assert!(ForwardTiling::choose("k", &shape(256, 256, 1), KeySource::Dense, 10_000).is_err());
    }

    #[test]
    fn a_group_shares_a_gathered_tile() {
        let heads = |group| {
            let tiling =
                ForwardTiling::choose("k", &shape(128, 128, group), KeySource::Gathered, HOPPER);
            tiling.expect("fits").heads_per_tile
        };
        assert_eq!([1, 2, 3, 4, 6, 8, 16].map(heads), [1, 2, 1, 4, 2, 8, 8]);
    }

    #[test]
    fn grids_cover_every_query() {
        let shape = shape(128, 128, 2);
        let dense = ForwardTiling::choose("k", &shape, KeySource::Dense, HOPPER).expect("fits");
        assert_eq!(dense.grid(&shape, KeySource::Dense), [20, 6, 2]);
        let gathered =
            ForwardTiling::choose("k", &shape, KeySource::Gathered, HOPPER).expect("fits");
        // 3 super-blocks of 16 tiles of 64 queries; two heads a tile.
        assert_eq!(gathered.grid(&shape, KeySource::Gathered), [48, 3, 2]);
    }

    #[test]
    fn shared_memory_is_the_sum_of_its_parts() {
        let shape = shape(192, 128, 2);
        let tiling = ForwardTiling::choose("k", &shape, KeySource::Gathered, HOPPER).expect("fits");
        assert_eq!(
            tiling.shared_bytes(&shape, KeySource::Dense),
            128 * 192 * 2 + 2 * 64 * 320 * 2
        );
        assert_eq!(
            tiling.shared_bytes(&shape, KeySource::Gathered),
            128 * 192 * 2 + 2 * 64 * (320 * 2 + 4) + 64 * 8 * 4
        );
    }
}
