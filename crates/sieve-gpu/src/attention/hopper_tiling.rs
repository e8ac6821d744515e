//! The Hopper family (`sm_90a`) of the attention kernels: which calls take it, its tilings, and its TMA tensor maps.
//!
//! Buffers and params are the same as for the portable kernels: a launch differs in kernel, grid and maps alone, which
//! `launch.rs` chooses.
//!
//! | compute capability | head widths | forward, row sums, backward | dq in a fixed order |
//! |---|---|---|---|
//! | 9.0, unless [`KernelFamilies::Portable`] | 64, 128 (values as wide as keys) | `hopper_*.cu` | in the same pass |
//! | 9.0, likewise | keys of 192, values of 128, consecutive keys without a bias | `hopper_attention_*.cu` | likewise |
//! | any other, or other widths | 16 to 256 | the portable kernels | the portable kernels |
//!
//! `sieve kernels check` compares both families with the reference.
use crate::KernelError;
use crate::attention::{
    AttentionShape, Heads, KeySource, Qkv, QueryPass, define_bias, define_head_dims, query_kernel_names,
};
use crate::runtime::{Arrivals, CudaTensor, KernelFamilies, KernelPolicy, MapLayout, SourceKernel, SumOrder, TileMap};
use sieve_core::KeepOLow;

/// The family of kernels that an attention call takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelFamily {
    /// mma.sync and cp.async: every device since Ampere.
    Portable,
    /// wgmma, TMA and warp specialisation: compute capability 9.0.
    Hopper,
}

/// Keys of a pipeline stage of the forward kernels, and keys of a thread block of the backward kernels.
pub(crate) const BLOCK_KV: usize = 128;
/// Queries that a backward kernel takes in a step of its loop.
pub(crate) const BACKWARD_BLOCK_Q: usize = 64;
/// Threads of a warpgroup, which issues WGMMA together.
const WARPGROUP: usize = 128;

/// Defines how a warp of a Hopper kernel arrives at barriers: by one lane or by every lane, as the policy says.
pub(crate) fn arriving(kernel: SourceKernel, policy: KernelPolicy) -> SourceKernel {
    match policy.arrivals {
        Arrivals::Warp => kernel,
        Arrivals::EveryLane => kernel.define("EVERY_LANE_ARRIVES", 1),
    }
}

impl KernelFamily {
    /// The family that attention of this shape takes with these queries, on their device and under their policy.
    pub fn of(shape: &AttentionShape, source: KeySource, queries: &CudaTensor) -> KernelFamily {
        match queries.policy().families {
            KernelFamilies::Portable => KernelFamily::Portable,
            KernelFamilies::All => {
                let is_hopper = queries.hardware().compute_capability == (9, 0);
                KernelFamily::best(shape, source, is_hopper)
            }
        }
    }

    /// The family that attention of this shape takes on a Hopper device (compute capability 9.0), or on any other.
    pub fn best(shape: &AttentionShape, source: KeySource, is_hopper: bool) -> KernelFamily {
        if is_hopper && has_hopper_form(shape, source) { KernelFamily::Hopper } else { KernelFamily::Portable }
    }

    /// Whether a forward pass with a bias on each key also returns `o_low`, what bf16 o lacks of the f32 output.
    pub fn keeps_o_low(self, o_low: KeepOLow, seq_len: usize) -> bool {
        self == KernelFamily::Hopper && o_low.in_row(seq_len)
    }
}

/// Whether the Hopper kernels take these head widths with keys from `source`.
pub(crate) fn has_hopper_form(shape: &AttentionShape, source: KeySource) -> bool {
    match (shape.head_dim, shape.head_dim_v) {
        (64, 64) | (128, 128) => true,
        (192, 128) => source == KeySource::Dense,
        _ => false,
    }
}

/// Tile sizes of the query-stationary Hopper kernels; most fields have the name of their `#define`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HopperTiling {
    pass: QueryPass,
    source: KeySource,
    head_dim: usize,
    head_dim_v: usize,
    num_consumers: usize,
    k_stages: usize,
    v_stages: usize,
    heads_per_tile: usize,
    /// 2 where consumer warpgroups issue their GEMMs in turns, so that one computes softmax while another multiplies; 0
    /// where they do not.
    take_turns: usize,
    /// Registers per thread of a consumer warpgroup, and of the producer.
    registers: [usize; 2],
}

impl HopperTiling {
    /// The fastest measured tiling for a shape.
    pub(crate) fn new(pass: QueryPass, shape: &AttentionShape, source: KeySource) -> Self {
        let is_wide = shape.head_dim >= 128;
        let heads_share_tile = source.is_gathered() && shape.group_size().is_multiple_of(2);
        let reads_gradient = pass.reads_gradient();
        let has_three_consumers = !is_wide && source == KeySource::Dense && !reads_gradient;
        Self {
            pass,
            source,
            head_dim: shape.head_dim,
            head_dim_v: shape.head_dim_v,
            num_consumers: if has_three_consumers { 3 } else { 2 },
            k_stages: if is_wide { 2 } else { 3 },
            v_stages: if is_wide && (reads_gradient || shape.head_dim > 128) { 2 } else { 3 },
            heads_per_tile: if heads_share_tile { 2 } else { 1 },
            take_turns: if reads_gradient { 0 } else { 2 },
            registers: if has_three_consumers { [160, 32] } else { [216, 72] },
        }
    }

    /// Queries of a tile, of which each consumer warpgroup has 64 rows; a row is a query of one head.
    fn tile_queries(&self) -> usize {
        self.num_consumers * 64 / self.heads_per_tile
    }

    /// Dynamic shared memory of a thread block, in bytes.
    pub(crate) fn shared_bytes(&self) -> usize {
        let rows = self.num_consumers * 64;
        let stages = self.k_stages + self.v_stages;
        // Per row and column: q alone, or q and d_o, in bf16.
        let row_bytes = if self.pass.reads_gradient() { 4 } else { 2 };
        // The bias enters Q K^T as one more K step of the GEMM: four buffers of 128 keys and two of the tile's rows, 16
        // bytes for each key and row.
        let bias = if self.source.has_bias() { 8192 + 2 * rows * 16 } else { 0 };
        // Bytes of the list entries of gathered keys, or of the queries' document starts.
        let (entries, starts) = if self.source.is_gathered() { (4096, 0) } else { (0, self.tile_queries() * 4) };
        // With bands the runs of stages and what is seen.
        let head = if self.source == KeySource::Bands { 64 } else { 32 };
        // In this order: q and d_o; stages of 128 keys or values, 256 bytes a column in bf16; bias; entries; the work
        // items of two tiles with their document starts; barriers; the alignment of the buffers.
        rows * self.head_dim * row_bytes
            + 256 * (self.k_stages * self.head_dim + self.v_stages * self.head_dim_v)
            + bias
            + entries
            + 2 * (head + starts)
            + (2 * stages + 2) * 8
            + 1024
    }

    /// The kernel with this tiling's `#define`s.
    pub(crate) fn kernel(&self) -> SourceKernel {
        let [_, name] = query_kernel_names(self.pass, self.source);
        self.kernel_named(name)
    }

    /// The kernel of this name, which takes the defines of this tiling.
    pub(crate) fn kernel_named(&self, name: &'static str) -> SourceKernel {
        let kernel = define_head_dims(SourceKernel::new(name), [self.head_dim, self.head_dim_v])
            .define("NUM_CONSUMERS", self.num_consumers)
            .define("BLOCK_KV", BLOCK_KV)
            .define("K_STAGES", self.k_stages)
            .define("V_STAGES", self.v_stages)
            .define("TAKE_TURNS", self.take_turns)
            .define("CONSUMER_REGISTERS", self.registers[0])
            .define("PRODUCER_REGISTERS", self.registers[1])
            .define("HEADS_PER_TILE", self.heads_per_tile)
            .threads(WARPGROUP * (1 + self.num_consumers))
            .shared_bytes(self.shared_bytes());
        let kernel = define_bias(kernel, self.source);
        match self.pass {
            QueryPass::OutputAndOLow => kernel.define("RESIDUAL", 1),
            QueryPass::Output | QueryPass::RowSums | QueryPass::Gradient => kernel,
        }
    }

    /// One thread block for each multiprocessor: blocks are persistent and fetch their tiles.
    pub(crate) fn grid(&self, like: &CudaTensor) -> [usize; 3] {
        [like.hardware().num_multiprocessors, 1, 1]
    }

    /// Tensor maps of q, of k and v unless they are gathered, and of the output's gradient for the row sums.
    ///
    /// # Errors
    /// [`KernelError::Refused`] when the heads have strides that the kernels do not take.
    pub(crate) fn maps<'a>(
        &self,
        kernel: &'static str,
        qkv: &'a Qkv,
        d_o: Option<&'a CudaTensor>,
        shape: &AttentionShape,
    ) -> Result<Vec<TileMap<'a>>, KernelError> {
        let [q, k, v] = qkv.head_words(kernel)?;
        let rows = self.tile_queries();
        let q_width = shape.num_heads * shape.head_dim;
        let mut maps = vec![head_map(&qkv.q, q, q_width, shape, rows)];
        if !self.source.is_gathered() {
            let widths = [shape.head_dim, shape.head_dim_v].map(|width| shape.num_kv_heads * width);
            maps.push(head_map(&qkv.k, k, widths[0], shape, BLOCK_KV));
            maps.push(head_map(&qkv.v, v, widths[1], shape, BLOCK_KV));
        }
        maps.extend(d_o.map(|d_o| output_map(d_o, shape, rows)));
        Ok(maps)
    }
}

/// The key-stationary Hopper kernel for a shape; one launch computes all gradients. `head_by_head`: in a fixed order it
/// finishes one query head before the next, so that the L2 cache holds the head's queries; for sliding windows.
pub(crate) fn hopper_backward_kernel(
    shape: &AttentionShape,
    source: KeySource,
    order: SumOrder,
    head_by_head: bool,
) -> SourceKernel {
    let [d, d_v] = [shape.head_dim, shape.head_dim_v];
    let is_ordered = order == SumOrder::Fixed;
    // In a fixed order a thread sends a tile of dq: adds, fence, signal. In heads 64 wide that takes longer than a step
    // of the loop, so two threads send tiles from two buffers. In heads 128 wide a second buffer, in place of a stage
    // of queries, lets a thread block compute on while its tile of dq waits for its turn.
    let waits_long = is_ordered && !head_by_head && source == KeySource::Dense;
    let (q_stages, do_stages, dq_bulk, dq_stages, senders) = match d {
        64 if is_ordered => (3, 3, 1, 2, 2),
        64 => (3, 3, 0, 1, 1),
        128 if waits_long => (2, 2, 1, 2, 1),
        128 => (3, 2, 1, 1, 1),
        _ => (2, 2, 1, 1, 1),
    };
    let stages = q_stages + do_stages;
    // Each warp stages its part of dQ in shared memory before a bulk add to the sums: this many columns at a time.
    let dq_columns = if d > 128 { 128 } else { d };
    let dq_bytes = 256 * dq_columns * dq_bulk * dq_stages;
    let dq_barriers = if is_ordered { senders.max(dq_stages) } else { 0 };
    // Log-sum-exp and row sum of 64 queries: one f32 each, or 16 bytes each where they enter the GEMMs as one more K
    // step. With a bias also 16 bytes for each query's base and each key's bias.
    let stats_bytes = match source {
        KeySource::Biased | KeySource::Gathered => q_stages * 1024 + do_stages * 1280 + 2048,
        KeySource::GatheredUnbiased => stages * 1024,
        KeySource::Dense | KeySource::Bands if d == 64 => stages * 1024,
        KeySource::Dense | KeySource::Bands => do_stages * 512,
    };
    // K and V of 128 keys take 256 bytes a column in bf16, a stage of 64 rows of q or d_o 128. Then two buffers
    // of dS (32768 bytes), the staged dq, statistics, barriers, and the alignment of the buffers.
    let tiles = (256 + 128 * q_stages) * d + (256 + 128 * do_stages) * d_v;
    let shared = tiles + 32768 + dq_bytes + stats_bytes + (2 * (stages + dq_barriers) + 1) * 8 + 1024;
    let [consumer, producer] = if d == 192 { [240, 24] } else { [232, 40] };
    let name = if source.is_gathered() { "hopper_dma_attention_backward" } else { "hopper_attention_backward" };
    let kernel = define_head_dims(SourceKernel::new(name), [d, d_v])
        .define("DQ_BULK", dq_bulk)
        .define("Q_STAGES", q_stages)
        .define("DO_STAGES", do_stages)
        .define("CONSUMER_REGISTERS", consumer)
        .define("PRODUCER_REGISTERS", producer)
        .threads(3 * WARPGROUP)
        .shared_bytes(shared);
    let kernel = match order {
        SumOrder::Any => kernel,
        SumOrder::Fixed => kernel.define("ORDERED", 1).define("DQ_STAGES", dq_stages).define("SENDERS", senders),
    };
    let kernel = define_bias(kernel, source);
    if is_ordered && head_by_head { kernel.define("HEAD_BY_HEAD", 1) } else { kernel }
}

/// Tensor maps of q and of the output's gradient, which is contiguous, for the backward kernels.
///
/// # Errors
/// [`KernelError::Refused`] when the heads have strides that the kernels do not take.
pub(crate) fn backward_maps<'a>(
    kernel: &'static str,
    qkv: &'a Qkv,
    d_o: &'a CudaTensor,
    shape: &AttentionShape,
) -> Result<[TileMap<'a>; 2], KernelError> {
    let [q, _, _] = qkv.head_words(kernel)?;
    Ok([
        head_map(&qkv.q, q, shape.num_heads * shape.head_dim, shape, BACKWARD_BLOCK_Q),
        output_map(d_o, shape, BACKWARD_BLOCK_Q),
    ])
}

/// The kernel that computes each query's log-sum-exp in base 2, and its row sum o . do from o and `o_low`.
pub(crate) fn hopper_attention_backward_prepare_kernel(head_dim_v: usize) -> SourceKernel {
    SourceKernel::new("hopper_attention_backward_prepare").define("HEAD_DIM_V", head_dim_v).threads(256)
}

/// A tensor map of a contiguous `[batch, seq_len, num_heads, head_dim_v]`, in tiles of `rows` tokens.
fn output_map<'a>(d_o: &'a CudaTensor, shape: &AttentionShape, rows: usize) -> TileMap<'a> {
    let width = shape.num_heads * shape.head_dim_v;
    TileMap {
        tensor: d_o,
        offset: 0,
        layout: MapLayout {
            shape: [shape.batch, shape.seq_len, width],
            strides: [shape.seq_len * width, width],
            tile: [rows, 64],
        },
    }
}

/// A tensor map of `width` columns of consecutive heads, in tiles of `rows` tokens and 64 columns.
pub(crate) fn head_map<'a>(
    heads: &'a Heads,
    [offset, token_stride, batch_stride]: [usize; 3],
    width: usize,
    shape: &AttentionShape,
    rows: usize,
) -> TileMap<'a> {
    TileMap {
        tensor: heads.tensor(),
        offset,
        layout: MapLayout {
            shape: [shape.batch, shape.seq_len, width],
            strides: [batch_stride, token_stride],
            tile: [rows, 64],
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A shape with `group` query heads for each KV head.
    fn shape(head_dim: usize, group: usize) -> AttentionShape {
        AttentionShape::new(2, 2500, [3 * group, 3], [head_dim, head_dim])
    }

    /// The widths of latent attention: keys of 192 columns, values of 128.
    fn latent() -> AttentionShape {
        AttentionShape { head_dim_v: 128, ..shape(192, 1) }
    }

    #[test]
    fn hopper_kernels_take_widths_64_and_128_and_dense_latent_attention() {
        for width in (16..=256).step_by(16) {
            let expected = width == 64 || width == 128;
            for source in [KeySource::Dense, KeySource::Biased, KeySource::Gathered] {
                let form = has_hopper_form(&shape(width, 2), source);
                assert_eq!(form, expected, "{width}");
            }
        }
        let narrow = AttentionShape { head_dim_v: 64, ..shape(128, 2) };
        assert!(!has_hopper_form(&narrow, KeySource::Dense));
        assert!(has_hopper_form(&latent(), KeySource::Dense));
        assert!(!has_hopper_form(&latent(), KeySource::Biased));
    }

    #[test]
    fn every_tiling_fits_a_hopper_block() {
        const LIMIT: usize = 227 * 1024;
        let tiling = HopperTiling::new(QueryPass::Output, &latent(), KeySource::Dense);
        assert!(tiling.shared_bytes() <= LIMIT, "{tiling:?}");
        let kernel = hopper_backward_kernel(&latent(), KeySource::Dense, SumOrder::Any, false);
        assert!(kernel.dynamic_shared_bytes() <= LIMIT);
        for width in [64, 128] {
            for source in [KeySource::Dense, KeySource::Biased, KeySource::Gathered] {
                for pass in [QueryPass::Output, QueryPass::OutputAndOLow, QueryPass::RowSums, QueryPass::Gradient] {
                    let tiling = HopperTiling::new(pass, &shape(width, 2), source);
                    assert!(tiling.shared_bytes() <= LIMIT, "{tiling:?}");
                }
                for (order, head_by_head) in [(SumOrder::Any, false), (SumOrder::Fixed, false), (SumOrder::Fixed, true)]
                {
                    let kernel = hopper_backward_kernel(&shape(width, 2), source, order, head_by_head);
                    assert!(kernel.dynamic_shared_bytes() <= LIMIT, "{width} {source:?} {order:?}");
                }
            }
            let [biased, unbiased] = [KeySource::Gathered, KeySource::GatheredUnbiased]
                .map(|source| hopper_backward_kernel(&shape(width, 2), source, SumOrder::Any, false));
            assert!(unbiased.dynamic_shared_bytes() < biased.dynamic_shared_bytes());
        }
    }

    #[test]
    fn hopper_kernels_alone_keep_o_low() {
        assert!(KernelFamily::Hopper.keeps_o_low(KeepOLow::ShortRows, 1024));
        assert!(!KernelFamily::Hopper.keeps_o_low(KeepOLow::Never, 1024));
        assert!(!KernelFamily::Portable.keeps_o_low(KeepOLow::Always, 1024));
    }

    #[test]
    fn two_heads_share_a_gathered_tile_where_the_group_is_even() {
        let heads = |group, source| HopperTiling::new(QueryPass::Output, &shape(128, group), source).heads_per_tile;
        assert_eq!([1, 2, 3, 4].map(|group| heads(group, KeySource::Gathered)), [1, 2, 1, 2]);
        assert_eq!(heads(4, KeySource::Dense), 1);
    }
}
