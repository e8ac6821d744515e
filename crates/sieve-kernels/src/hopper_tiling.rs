//! The Hopper family (`sm_90a`) of the attention kernels: when it is taken, its tilings, and its tensor maps.
//!
//! Buffers and params words are those of the portable kernels, so that a wrapper differs in kernel, grid and maps alone.
//!
//! | device | widths | forward, row sums, backward |
//! |---|---|---|
//! | compute capability 9.0 | 64, 128 (values as wide as keys) | `hopper_*.cu` |
//! | any other, or other widths | 16 to 256, 192/128 | the portable kernels |
use crate::attention_backward_tiling::GradientSet;
use crate::attention_tiling::KeySource;
use crate::cuda_tensor::CudaTensor;
use crate::error::KernelError;
use crate::heads::{AttentionShape, Heads, Qkv};
use crate::source_kernel::{SourceKernel, TileMap};
use std::sync::atomic::{AtomicBool, Ordering};

/// Which kernels an attention call takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelFamily {
    /// mma.sync and cp.async: every device since Ampere.
    Portable,
    /// wgmma, TMA and warp specialisation: compute capability 9.0.
    Hopper,
}

/// Keys of a stage of the forward kernels, and of a block of the backward kernels.
const BLOCK_KV: usize = 128;
/// Queries of a step of the backward kernels.
const BLOCK_Q: usize = 64;
/// Threads of a warpgroup.
const WARPGROUP: usize = 128;

// Process-wide, as the choice of the order of sums: a mode, for cross-checks of one family by the other.
static PORTABLE_ONLY: AtomicBool = AtomicBool::new(false);

/// Takes the portable kernels everywhere from now on, or again the best for the device.
pub fn use_portable_kernels_only(portable_only: bool) {
    PORTABLE_ONLY.store(portable_only, Ordering::Relaxed);
}

/// The family that attention of this shape takes on the tensor's device.
pub fn attention_family(shape: &AttentionShape, like: &CudaTensor) -> KernelFamily {
    let is_hopper = crate::probe::compute_capability(like.device().index) == Some((9, 0));
    if is_hopper && has_hopper_form(shape) && !PORTABLE_ONLY.load(Ordering::Relaxed) {
        KernelFamily::Hopper
    } else {
        KernelFamily::Portable
    }
}

/// Whether the Hopper kernels are made for these widths.
pub fn has_hopper_form(shape: &AttentionShape) -> bool {
    matches!(shape.head_dim, 64 | 128) && shape.head_dim_v == shape.head_dim
}

/// What a query-stationary kernel makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HopperPass {
    /// o and lse.
    Output,
    /// The row sums that the backward pass needs.
    RowSums,
}

/// Tile sizes of the query-stationary Hopper kernels, named as their defines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HopperTiling {
    pass: HopperPass,
    source: KeySource,
    head_dim: usize,
    num_consumers: usize,
    k_stages: usize,
    v_stages: usize,
    heads_per_tile: usize,
}

impl HopperTiling {
    /// The tiling measured best for a shape.
    pub fn new(pass: HopperPass, shape: &AttentionShape, source: KeySource) -> Self {
        let is_wide = shape.head_dim == 128;
        let shares = source == KeySource::Gathered && shape.group_size().is_multiple_of(2);
        Self {
            pass,
            source,
            head_dim: shape.head_dim,
            num_consumers: 2,
            k_stages: if is_wide { 2 } else { 3 },
            v_stages: if is_wide && pass == HopperPass::RowSums {
                2
            } else {
                3
            },
            heads_per_tile: if shares { 2 } else { 1 },
        }
    }

    /// Dynamic shared memory of a block.
    pub fn shared_bytes(&self) -> usize {
        let rows = self.num_consumers * 64;
        let stages = self.k_stages + self.v_stages;
        let row_bytes = match self.pass {
            HopperPass::Output => 2,
            HopperPass::RowSums => 4,
        };
        let bias = if self.source == KeySource::Dense {
            0
        } else {
            2048
        };
        let (entries, starts) = match self.source {
            KeySource::Gathered => (4096, 0),
            KeySource::Dense | KeySource::Biased => (0, rows / self.heads_per_tile * 4),
        };
        rows * self.head_dim * row_bytes
            + stages * 256 * self.head_dim
            + bias
            + entries
            + 2 * (32 + starts)
            + (2 * stages + 2) * 8
            + 1024
    }

    /// The specialisation.
    pub fn kernel(&self) -> SourceKernel {
        let name = match (self.source, self.pass) {
            (KeySource::Gathered, HopperPass::Output) => "hopper_dma_attention_forward",
            (KeySource::Gathered, HopperPass::RowSums) => "hopper_dma_attention_row_sums",
            (_, HopperPass::Output) => "hopper_attention_forward",
            (_, HopperPass::RowSums) => "hopper_attention_row_sums",
        };
        let kernel = SourceKernel::new(name)
            .define("HEAD_DIM", self.head_dim)
            .define("NUM_CONSUMERS", self.num_consumers)
            .define("BLOCK_KV", BLOCK_KV)
            .define("K_STAGES", self.k_stages)
            .define("V_STAGES", self.v_stages)
            .define("TAKE_TURNS", 1)
            .define("CONSUMER_REGISTERS", 216)
            .define("PRODUCER_REGISTERS", 72)
            .define("HEADS_PER_TILE", self.heads_per_tile)
            .threads(WARPGROUP * (1 + self.num_consumers))
            .shared_bytes(self.shared_bytes());
        match self.source {
            // The gathered kernels define HAS_BIAS themselves and take no maps.
            KeySource::Gathered => kernel,
            KeySource::Dense => kernel.define("TENSOR_MAPS", 1).define("HAS_BIAS", 0),
            KeySource::Biased => kernel.define("TENSOR_MAPS", 1).define("HAS_BIAS", 1),
        }
    }

    /// One block for each multiprocessor: blocks fetch their work themselves.
    pub(crate) fn grid(&self, like: &CudaTensor) -> [usize; 3] {
        let hardware = &like.client().properties().hardware;
        [
            hardware.num_streaming_multiprocessors.unwrap_or(132) as usize,
            1,
            1,
        ]
    }

    /// Maps of k and v where their rows are contiguous.
    ///
    /// # Errors
    /// [`KernelError::Layout`] when the heads cannot be walked.
    pub(crate) fn maps<'a>(
        &self,
        kernel: &'static str,
        qkv: &'a Qkv,
        shape: &AttentionShape,
    ) -> Result<Vec<TileMap<'a>>, KernelError> {
        if self.source == KeySource::Gathered {
            return Ok(Vec::new());
        }
        let [_, k, v] = qkv.head_words(kernel)?;
        let heads = shape.num_kv_heads;
        Ok(vec![
            head_map(&qkv.k, k, heads, shape, BLOCK_KV),
            head_map(&qkv.v, v, heads, shape, BLOCK_KV),
        ])
    }
}

/// The key-stationary Hopper kernel for a shape and a set of gradients; all of dk and dv in one launch.
pub fn hopper_backward_kernel(
    shape: &AttentionShape,
    source: KeySource,
    set: GradientSet,
    deterministic: bool,
) -> SourceKernel {
    const Q_STAGES: usize = 3;
    const DO_STAGES: usize = 2;
    let (d, stages) = (shape.head_dim, Q_STAGES + DO_STAGES);
    let dq_bytes = if set.dq { 256 * d } else { 0 };
    let shared = 512 * d
        + stages * 128 * d
        + 32768
        + dq_bytes
        + DO_STAGES * 512
        + (2 * stages + 1) * 8
        + 1024;
    let name = match source {
        KeySource::Gathered => "hopper_dma_attention_backward",
        KeySource::Dense | KeySource::Biased => "hopper_attention_backward",
    };
    let kernel = SourceKernel::new(name)
        .define("HEAD_DIM", d)
        .define("DQ_BULK", 1)
        .define("Q_STAGES", Q_STAGES)
        .define("DO_STAGES", DO_STAGES)
        .define("TENSOR_MAPS", 1)
        .define("CONSUMER_REGISTERS", 224)
        .define("PRODUCER_REGISTERS", 56)
        .define("COMPUTE_DQ", set.dq as u8)
        .threads(3 * WARPGROUP)
        .shared_bytes(shared);
    match source {
        KeySource::Gathered => kernel.define("DETERMINISTIC", deterministic as u8),
        KeySource::Dense => kernel.define("HAS_BIAS", 0),
        KeySource::Biased => kernel.define("HAS_BIAS", 1),
    }
}

/// Keys of a block of the backward kernels.
pub(crate) const BACKWARD_BLOCK_KV: usize = BLOCK_KV;

/// Maps of q and of the output's gradient, contiguous, for the backward kernels.
///
/// # Errors
/// [`KernelError::Layout`] when the heads cannot be walked.
pub(crate) fn backward_maps<'a>(
    kernel: &'static str,
    qkv: &'a Qkv,
    d_o: &'a CudaTensor,
    shape: &AttentionShape,
) -> Result<[TileMap<'a>; 2], KernelError> {
    let [q, _, _] = qkv.head_words(kernel)?;
    let width = shape.num_heads * shape.head_dim;
    Ok([
        head_map(&qkv.q, q, shape.num_heads, shape, BLOCK_Q),
        TileMap {
            tensor: d_o,
            offset: 0,
            shape: [shape.batch, shape.seq_len, width],
            strides: [shape.seq_len * width, width],
            tile: [BLOCK_Q, 64],
        },
    ])
}

fn head_map<'a>(
    heads: &'a Heads,
    [offset, token_stride, batch_stride]: [u64; 3],
    num_heads: usize,
    shape: &AttentionShape,
    rows: usize,
) -> TileMap<'a> {
    TileMap {
        tensor: heads.tensor(),
        offset: offset as usize,
        shape: [shape.batch, shape.seq_len, num_heads * shape.head_dim],
        strides: [batch_stride as usize, token_stride as usize],
        tile: [rows, 64],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(head_dim: usize, group: usize) -> AttentionShape {
        AttentionShape {
            batch: 2,
            seq_len: 2500,
            num_heads: 3 * group,
            num_kv_heads: 3,
            head_dim,
            head_dim_v: head_dim,
        }
    }

    #[test]
    fn only_two_widths_have_a_hopper_form() {
        for width in (16..=256).step_by(16) {
            let expected = width == 64 || width == 128;
            assert_eq!(has_hopper_form(&shape(width, 2)), expected, "{width}");
        }
        let narrow = AttentionShape {
            head_dim_v: 64,
            ..shape(128, 2)
        };
        assert!(!has_hopper_form(&narrow));
    }

    #[test]
    fn every_tiling_fits_a_hopper_block() {
        const LIMIT: usize = 227 * 1024;
        let all = GradientSet {
            dq: true,
            dk: true,
            dv: true,
        };
        for width in [64, 128] {
            for source in [KeySource::Dense, KeySource::Biased, KeySource::Gathered] {
                for pass in [HopperPass::Output, HopperPass::RowSums] {
                    let tiling = HopperTiling::new(pass, &shape(width, 2), source);
                    assert!(tiling.shared_bytes() <= LIMIT, "{tiling:?}");
                }
                let kernel = hopper_backward_kernel(&shape(width, 2), source, all, false);
                assert!(kernel.dynamic_shared_bytes() <= LIMIT, "{width} {source:?}");
            }
        }
    }

    #[test]
    fn two_heads_share_a_gathered_tile_where_the_group_is_even() {
        let heads = |group, source| {
            HopperTiling::new(HopperPass::Output, &shape(128, group), source).heads_per_tile
        };
        assert_eq!(
            [1, 2, 3, 4].map(|group| heads(group, KeySource::Gathered)),
            [1, 2, 1, 2]
        );
        assert_eq!(heads(4, KeySource::Dense), 1);
    }
}
