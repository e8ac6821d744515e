//! Tile sizes of the attention backward kernels, and into which launches they fall apart.
use crate::attention::heads::AttentionShape;
use crate::attention::tiling::{
    KeySource, define_head_dims, heads_sharing_a_tile, list_entries_in_flight,
};
use crate::dma::oracle::SUPER_BLOCK;
use crate::error::KernelError;
use crate::runtime::source_kernel::SourceKernel;

const BF16: usize = 2;
const F32: usize = 4;

/// In which order sums over many keys or queries are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SumOrder {
    /// Whatever order the hardware happens to take: fastest, last bits vary from run to run.
    #[default]
    Any,
    /// Always the same order, so that two runs are bit-equal: no float atomics, dq in a pass of its own.
    Fixed,
}

/// The gradients one launch of a key-stationary kernel makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GradientSet {
    /// Sums of dq.
    pub(crate) dq: bool,
    /// dk, and the gradient of the bias.
    pub(crate) dk: bool,
    /// dv.
    pub(crate) dv: bool,
}

/// Tile sizes of the key-stationary kernels, named as their defines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BackwardTiling {
    /// Warps of a block, 16 keys each.
    pub(crate) num_warps: usize,
    /// Queries of a step.
    pub(crate) block_q: usize,
    /// Blocks that should share a multiprocessor.
    pub(crate) min_blocks: usize,
}

impl BackwardTiling {
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
        let of = |num_warps, block_q, min_blocks| Self {
            num_warps,
            block_q,
            min_blocks,
        };
        let small = of(4, 32, 1);
        let tiling = match shape.head_dim {
            ..=64 => of(4, 64, 2),
            65..=128 => of(8, 64, 1),
            _ => small,
        };
        let all = GradientSet {
            dq: true,
            dk: true,
            dv: true,
        };
        // Shorter steps fit an A100 (163 KiB), fewer keys consumer cards (99 KiB).
        for candidate in [tiling, of(8, 32, 1), small] {
            if candidate.shared_bytes(shape, source, all) <= max_shared_bytes {
                return Ok(candidate);
            }
        }
        let got = small.shared_bytes(shape, source, all);
        Err(KernelError::DeviceLimit {
            kernel,
            what: "shared memory in bytes",
            got,
            limit: max_shared_bytes,
        })
    }

    /// Keys of a block.
    pub(crate) fn block_kv(&self) -> usize {
        16 * self.num_warps
    }

    /// The launches that make all gradients: one, or two where a warp's registers cannot hold both dk and dv. With a
    /// fixed order dq is left to the query-stationary kernel.
    pub(crate) fn launches(shape: &AttentionShape, order: SumOrder) -> Vec<GradientSet> {
        let dq = order == SumOrder::Any;
        if shape.head_dim + shape.head_dim_v > 320 {
            let values = GradientSet {
                dq: false,
                dk: false,
                dv: true,
            };
            return vec![
                values,
                GradientSet {
                    dq,
                    dk: true,
                    dv: false,
                },
            ];
        }
        vec![GradientSet {
            dq,
            dk: true,
            dv: true,
        }]
    }

    /// Dynamic shared memory of a block.
    pub(crate) fn shared_bytes(
        &self,
        shape: &AttentionShape,
        source: KeySource,
        set: GradientSet,
    ) -> usize {
        let (keys, queries) = (self.block_kv(), self.block_q);
        let tiles = (keys + 2 * queries) * (shape.head_dim + shape.head_dim_v) * BF16;
        // P for dv and dS for dk change hands between warps; dS of two steps where dq is made a step later.
        let ds = if set.dq { 2 } else { usize::from(set.dk) };
        let swapped = keys * queries * BF16 * (usize::from(set.dv) + ds);
        // Two steps' lse and D of each query, and with a bias its base; each key's entry, and its bias.
        let (stats, entries) = if source == KeySource::Dense {
            (16, 8)
        } else {
            (24, 12)
        };
        tiles + swapped + stats * queries + keys * entries + 128
    }

    /// Sets the defines, block and shared memory of a kernel.
    pub(crate) fn apply(
        &self,
        kernel: SourceKernel,
        shape: &AttentionShape,
        source: KeySource,
        set: GradientSet,
    ) -> SourceKernel {
        let kernel = define_head_dims(kernel, shape)
            .define("NUM_WARPS", self.num_warps)
            .define("BLOCK_Q", self.block_q)
            .define("MIN_BLOCKS", self.min_blocks)
            .define("COMPUTE_DQ", set.dq as u8)
            .define("COMPUTE_DK", set.dk as u8)
            .define("COMPUTE_DV", set.dv as u8)
            .threads(self.num_warps * 32)
            .shared_bytes(self.shared_bytes(shape, source, set));
        define_bias(kernel, source)
    }
}

/// The kernels that keep queries in place and stream keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueryPass {
    /// dq in a fixed order.
    Gradient,
    /// Exact row sums, which a bias makes worth their time.
    RowSums,
}

/// Tile sizes of a query-stationary kernel, named as their defines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueryTiling {
    /// What the kernel computes.
    pub(crate) pass: QueryPass,
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
    /// Query heads of a group that share a tile.
    pub(crate) heads_per_tile: usize,
}

impl QueryTiling {
    /// The tiling for a shape on a device with `max_shared_bytes` of shared memory a block.
    ///
    /// # Errors
    /// [`KernelError::DeviceLimit`] when no tiling fits the device.
    pub(crate) fn choose(
        kernel: &'static str,
        pass: QueryPass,
        shape: &AttentionShape,
        source: KeySource,
        max_shared_bytes: usize,
    ) -> Result<Self, KernelError> {
        let wide = shape.head_dim > 128;
        let (warp_rows, num_warps, block_kv, min_blocks) = match pass {
            QueryPass::Gradient => (16, 8, if wide { 32 } else { 64 }, 1),
            QueryPass::RowSums if wide => (16, 8, 32, 1),
            QueryPass::RowSums => (32, 4, 32, 2),
        };
        let (num_stages, heads_per_tile) = (2, 1);
        let mut tiling = Self {
            pass,
            warp_rows,
            num_warps,
            block_kv,
            num_stages,
            min_blocks,
            heads_per_tile,
        };
        while tiling.shared_bytes(shape, source) > max_shared_bytes {
            if tiling.num_warps <= 2 {
                let got = tiling.shared_bytes(shape, source);
                let what = "shared memory in bytes";
                return Err(KernelError::DeviceLimit {
                    kernel,
                    what,
                    got,
                    limit: max_shared_bytes,
                });
            }
            tiling.num_warps /= 2;
        }
        if source == KeySource::Gathered {
            tiling.heads_per_tile = heads_sharing_a_tile(shape, tiling.block_rows());
        }
        Ok(tiling)
    }

    fn block_rows(&self) -> usize {
        self.warp_rows * self.num_warps
    }

    /// Queries of a tile.
    pub(crate) fn tile_queries(&self) -> usize {
        self.block_rows() / self.heads_per_tile
    }

    /// Dynamic shared memory of a block.
    pub(crate) fn shared_bytes(&self, shape: &AttentionShape, source: KeySource) -> usize {
        let keys = self.num_stages * self.block_kv;
        let tiles = (self.block_rows() + keys) * (shape.head_dim + shape.head_dim_v) * BF16;
        let bias = if source == KeySource::Dense {
            0
        } else {
            keys * F32
        };
        let in_flight = list_entries_in_flight(self.num_stages);
        let entries = if source == KeySource::Gathered {
            self.block_kv * 8 * in_flight
        } else {
            0
        };
        tiles + bias + entries
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
        let mut kernel = define_head_dims(kernel, shape)
            .define("NUM_WARPS", self.num_warps)
            .define("BLOCK_KV", self.block_kv)
            .define("NUM_STAGES", self.num_stages)
            .define("MIN_BLOCKS", self.min_blocks)
            .threads(self.num_warps * 32)
            .shared_bytes(self.shared_bytes(shape, source));
        if self.pass == QueryPass::RowSums {
            let q_in_registers = (shape.head_dim <= 128) as u8;
            kernel = kernel
                .define("WARP_ROWS", self.warp_rows)
                .define("Q_IN_REGISTERS", q_in_registers);
        }
        if source == KeySource::Gathered {
            return kernel.define("HEADS_PER_TILE", self.heads_per_tile);
        }
        define_bias(kernel, source)
    }
}

/// HAS_BIAS, which the gathered kernels define themselves.
fn define_bias(kernel: SourceKernel, source: KeySource) -> SourceKernel {
    match source {
        KeySource::Dense => kernel.define("HAS_BIAS", 0),
        KeySource::Biased => kernel.define("HAS_BIAS", 1),
        KeySource::Gathered => kernel,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(head_dim: usize, head_dim_v: usize) -> AttentionShape {
        AttentionShape {
            batch: 2,
            seq_len: 2500,
            num_heads: 6,
            num_kv_heads: 3,
            head_dim,
            head_dim_v,
        }
    }

    #[test]
    fn usual_widths_fit_a_small_device() {
        for head_dim in [16, 32, 64, 96, 128] {
            for source in [KeySource::Dense, KeySource::Biased, KeySource::Gathered] {
                let shape = shape(head_dim, head_dim);
                assert!(
                    BackwardTiling::choose("k", &shape, source, 99 * 1024).is_ok(),
                    "{head_dim}"
                );
                assert!(
                    QueryTiling::choose("k", QueryPass::Gradient, &shape, source, 99 * 1024)
                        .is_ok(),
                    "{head_dim}"
                );
            }
        }
        let latent = BackwardTiling::choose("k", &shape(192, 128), KeySource::Dense, 99 * 1024);
        assert!(latent.is_ok(), "latent attention: {latent:?}");
        let error = BackwardTiling::choose("k", &shape(256, 256), KeySource::Dense, 99 * 1024);
        assert!(error.is_err(), "refused before the launch, not by it");
        let on = |kib: usize| {
            let tiling =
                BackwardTiling::choose("k", &shape(128, 128), KeySource::Gathered, kib * 1024);
            tiling.map(|tiling| (tiling.num_warps, tiling.block_q))
        };
        assert_eq!(
            [on(227), on(163), on(99)],
            [Ok((8, 64)), Ok((8, 32)), Ok((4, 32))]
        );
    }

    #[test]
    fn every_gradient_is_made_exactly_once() {
        for (head_dim, head_dim_v) in [(64, 64), (128, 128), (192, 128), (256, 256)] {
            for order in [SumOrder::Any, SumOrder::Fixed] {
                let launches = BackwardTiling::launches(&shape(head_dim, head_dim_v), order);
                let count = |made: fn(&GradientSet) -> bool| {
                    launches.iter().filter(|set| made(set)).count()
                };
                assert_eq!(count(|set| set.dq), (order == SumOrder::Any) as usize);
                assert_eq!(count(|set| set.dk), 1);
                assert_eq!(count(|set| set.dv), 1);
            }
        }
        assert_eq!(
            BackwardTiling::launches(&shape(192, 128), SumOrder::Any).len(),
            1
        );
        assert_eq!(
            BackwardTiling::launches(&shape(256, 256), SumOrder::Any).len(),
            2
        );
    }
}
