//! Tile sizes of the attention backward kernels, and how the gradients are divided into launches.
use crate::KernelError;
use crate::attention::{AttentionShape, KeySource, define_bias, define_head_dims};
use crate::runtime::{SourceKernel, SumOrder};

/// Bytes of a bf16.
const BF16: usize = 2;

/// The gradients that one launch of a key-stationary kernel computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GradientSet {
    /// Whether the launch adds to the sums of dq.
    pub(crate) dq: bool,
    /// Whether the launch computes dk and the gradient of the bias.
    pub(crate) dk: bool,
    /// Whether the launch computes dv.
    pub(crate) dv: bool,
}

/// Tile sizes of the key-stationary kernels; each field has the name of its `#define`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BackwardTiling {
    /// Warps of a thread block; each has 16 keys.
    pub(crate) num_warps: usize,
    /// Queries of one step of the loop.
    pub(crate) block_q: usize,
    /// Thread blocks that should fit on a multiprocessor at the same time (`__launch_bounds__`).
    pub(crate) min_blocks: usize,
}

impl BackwardTiling {
    /// The tiling for a shape on a device with `max_shared_bytes` of shared memory a block.
    ///
    /// # Errors
    /// [`KernelError::Refused`] when no tiling fits the device.
    pub(crate) fn choose(
        kernel: &'static str,
        shape: &AttentionShape,
        source: KeySource,
        max_shared_bytes: usize,
    ) -> Result<Self, KernelError> {
        let of = |num_warps, block_q, min_blocks| Self { num_warps, block_q, min_blocks };
        let small = of(4, 32, 1);
        let tiling = match shape.head_dim {
            ..=64 => of(4, 64, 2),
            65..=128 => of(8, 64, 1),
            _ => small,
        };
        let all = GradientSet { dq: true, dk: true, dv: true };
        // Steps of 32 queries fit the shared memory of an A100 (163 KiB); with tiles of 64 keys they also fit the
        // shared memory of consumer GPUs (99 KiB).
        let candidates = [tiling, of(8, 32, 1), small];
        let fits = |tiling: &Self| tiling.shared_bytes(shape, source, all) <= max_shared_bytes;
        candidates.into_iter().find(fits).ok_or_else(|| {
            let got = small.shared_bytes(shape, source, all);
            KernelError::over_limit(kernel, "shared memory in bytes", got, max_shared_bytes)
        })
    }

    /// Keys of a thread block's tile.
    pub(crate) fn block_kv(&self) -> usize {
        16 * self.num_warps
    }

    /// The launches that compute all gradients: one, or two where a warp's registers cannot hold both dk and dv.
    /// Without `dq` the query-stationary kernel computes dq.
    pub(crate) fn launches(shape: &AttentionShape, dq: bool) -> Vec<GradientSet> {
        if shape.head_dim + shape.head_dim_v > 320 {
            let set = |dq, dk, dv| GradientSet { dq, dk, dv };
            return vec![set(false, false, true), set(dq, true, false)];
        }
        vec![GradientSet { dq, dk: true, dv: true }]
    }

    /// Dynamic shared memory of a thread block, in bytes.
    pub(crate) fn shared_bytes(&self, shape: &AttentionShape, source: KeySource, set: GradientSet) -> usize {
        let (keys, queries) = (self.block_kv(), self.block_q);
        let tiles = (keys + 2 * queries) * (shape.head_dim + shape.head_dim_v) * BF16;
        // Warps exchange P (for dv) and dS (for dk and dq). dq is computed one step later, so dS is kept for two steps.
        let ds_buffers = if set.dq { 2 } else { usize::from(set.dk) };
        let exchanged = keys * queries * BF16 * (usize::from(set.dv) + ds_buffers);
        // Bytes per query: log-sum-exp and row sum of two steps, with a bias also its base. Bytes per key: its list
        // entry, with a bias also the bias, and the queries that have it in their band. The last 128 bytes describe the
        // block's work.
        let (query_bytes, key_bytes) = match source {
            KeySource::Dense => (16, 8),
            KeySource::Bands => (16, 16),
            _ => (24, 12),
        };
        tiles + exchanged + query_bytes * queries + key_bytes * keys + 128
    }

    /// The kernel with this tiling's `#define`s.
    pub(crate) fn kernel(
        &self,
        shape: &AttentionShape,
        source: KeySource,
        set: GradientSet,
        order: SumOrder,
    ) -> SourceKernel {
        let name = if source.is_gathered() { "dma_attention_backward" } else { "attention_backward" };
        let kernel = define_head_dims(SourceKernel::new(name), [shape.head_dim, shape.head_dim_v])
            .define("NUM_WARPS", self.num_warps)
            .define("BLOCK_Q", self.block_q)
            .define("MIN_BLOCKS", self.min_blocks)
            .define("COMPUTE_DQ", set.dq as u8)
            .define("COMPUTE_DK", set.dk as u8)
            .define("COMPUTE_DV", set.dv as u8)
            .threads(self.num_warps * 32)
            .shared_bytes(self.shared_bytes(shape, source, set));
        match (source.is_gathered(), order) {
            (true, SumOrder::Fixed) => kernel.define("DETERMINISTIC", 1),
            _ => define_bias(kernel, source),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(head_dim: usize, head_dim_v: usize) -> AttentionShape {
        AttentionShape::new(2, 2500, [6, 3], [head_dim, head_dim_v])
    }

    #[test]
    fn usual_widths_fit_a_small_device() {
        for head_dim in [16, 32, 64, 96, 128] {
            for source in [KeySource::Dense, KeySource::Biased, KeySource::Gathered] {
                let shape = shape(head_dim, head_dim);
                assert!(BackwardTiling::choose("k", &shape, source, 99 * 1024).is_ok(), "{head_dim}");
            }
        }
        let latent = BackwardTiling::choose("k", &shape(192, 128), KeySource::Dense, 99 * 1024);
        assert!(latent.is_ok(), "latent attention: {latent:?}");
        let error = BackwardTiling::choose("k", &shape(256, 256), KeySource::Dense, 99 * 1024);
        assert!(error.is_err(), "refused before the launch, not by it");
        let on = |kib: usize| {
            let tiling = BackwardTiling::choose("k", &shape(128, 128), KeySource::Gathered, kib * 1024);
            tiling.map(|tiling| (tiling.num_warps, tiling.block_q))
        };
        assert_eq!([on(227), on(163), on(99)], [Ok((8, 64)), Ok((8, 32)), Ok((4, 32))]);
    }

    #[test]
    fn the_launches_compute_each_gradient_once() {
        for (head_dim, head_dim_v) in [(64, 64), (128, 128), (192, 128), (256, 256)] {
            for dq in [true, false] {
                let launches = BackwardTiling::launches(&shape(head_dim, head_dim_v), dq);
                let count = |made: fn(&GradientSet) -> bool| launches.iter().filter(|set| made(set)).count();
                assert_eq!(count(|set| set.dq), dq as usize);
                assert_eq!(count(|set| set.dk), 1);
                assert_eq!(count(|set| set.dv), 1);
            }
        }
        assert_eq!(BackwardTiling::launches(&shape(192, 128), true).len(), 1);
        assert_eq!(BackwardTiling::launches(&shape(256, 256), true).len(), 2);
    }
}
