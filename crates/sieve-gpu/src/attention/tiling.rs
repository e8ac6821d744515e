//! Chooses the tile sizes of the portable query-stationary attention kernels by head width and by shared memory.
use crate::KernelError;
use crate::attention::AttentionShape;
use crate::dma::oracle::SUPER_BLOCK;
use crate::runtime::SourceKernel;

/// Bytes of a bf16 and of an f32.
const BF16: usize = 2;
const F32: usize = 4;

/// How a kernel reads its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeySource {
    /// Consecutive keys, without a bias on the logits.
    Dense,
    /// Consecutive keys, without a bias, and others beyond a window: first tokens and a band for each KV head.
    Bands,
    /// Consecutive keys with an additive bias each.
    Biased,
    /// Keys gathered from a list, with a bias each.
    Gathered,
    /// Keys gathered from a list, without a bias. The portable kernels add a bias of zeros instead.
    GatheredUnbiased,
}

impl KeySource {
    /// Consecutive keys, with a bias or without, or beyond a window others.
    pub(crate) fn of_neighbours(has_bias: bool, has_far: bool) -> Self {
        match (has_bias, has_far) {
            (true, _) => Self::Biased,
            (false, true) => Self::Bands,
            (false, false) => Self::Dense,
        }
    }

    /// Whether the kernel gathers keys from a list.
    pub(crate) fn is_gathered(self) -> bool {
        matches!(self, Self::Gathered | Self::GatheredUnbiased)
    }

    /// Whether a bias is added to each key's logits.
    pub(crate) fn has_bias(self) -> bool {
        matches!(self, Self::Biased | Self::Gathered)
    }
}

/// What a query-stationary kernel, which loops over keys, computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueryPass {
    /// The attention output and its log-sum-exp.
    Output,
    /// o, lse and `o_low`, what bf16 o lacks of the f32 output; only Hopper kernels have this form.
    OutputAndOLow,
    /// Row sums P dP in f32 for the backward pass with a bias, whose gradients need their precision.
    RowSums,
    /// The gradient of q, summed in a fixed order.
    Gradient,
}

impl QueryPass {
    pub(crate) fn output(with_o_low: bool) -> Self {
        if with_o_low { Self::OutputAndOLow } else { Self::Output }
    }

    /// Whether the gradient of the output is an input.
    pub(crate) fn reads_gradient(self) -> bool {
        matches!(self, Self::RowSums | Self::Gradient)
    }
}

/// Tile sizes of a portable query-stationary kernel; the fields have the names of its `#define`s.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueryTiling {
    pass: QueryPass,
    /// Rows of a warp; a row is a query of one head.
    warp_rows: usize,
    /// Warps of a thread block.
    num_warps: usize,
    /// Keys of a tile in shared memory.
    pub(crate) block_kv: usize,
    /// Key tiles in shared memory at a time.
    pub(crate) num_stages: usize,
    /// Thread blocks that should fit on a multiprocessor at the same time (`__launch_bounds__`).
    min_blocks: usize,
    /// Query heads of a group that share a tile.
    heads_per_tile: usize,
}

impl QueryTiling {
    /// The tiling for a shape on a device with `max_shared_bytes` of shared memory a block.
    ///
    /// # Errors
    /// [`KernelError::Refused`] when no tiling fits the device.
    pub(crate) fn choose(
        kernel: &'static str,
        pass: QueryPass,
        shape: &AttentionShape,
        source: KeySource,
        max_shared_bytes: usize,
    ) -> Result<Self, KernelError> {
        let is_wide = shape.head_dim > 128;
        let (warp_rows, num_warps, block_kv, min_blocks) = match (pass, shape.head_dim) {
            (QueryPass::Gradient, _) => (16, 8, if is_wide { 32 } else { 64 }, 1),
            (QueryPass::RowSums, _) if is_wide => (16, 8, 32, 1),
            (QueryPass::RowSums, _) => (32, 4, 32, 2),
            (_, ..=64) => (32, 4, 64, 2),
            (_, 65..=128) if source.is_gathered() => (32, 4, 64, 2),
            (_, 65..=128) => (32, 4, 48, 2),
            (_, 129..=192) => (16, 8, 64, 1),
            _ => (16, 8, 32, 1),
        };
        let mut tiling = Self { pass, warp_rows, num_warps, block_kv, num_stages: 2, min_blocks, heads_per_tile: 1 };
        // Blocks of fewer warps take less shared memory (consumer Ampere and Ada have 99 KiB).
        while tiling.shared_bytes(shape, source) > max_shared_bytes {
            if tiling.num_warps > 2 {
                tiling.num_warps /= 2;
            } else if tiling.block_kv > 32 {
                tiling.block_kv = 32;
            } else {
                let (what, got) = ("shared memory in bytes", tiling.shared_bytes(shape, source));
                return Err(KernelError::over_limit(kernel, what, got, max_shared_bytes));
            }
        }
        if source.is_gathered() {
            tiling.heads_per_tile = heads_sharing_a_tile(shape, tiling.block_rows());
        }
        Ok(tiling)
    }

    /// Rows of a tile: heads times queries.
    pub(crate) fn block_rows(&self) -> usize {
        self.warp_rows * self.num_warps
    }

    /// Queries of a thread block's tile.
    pub(crate) fn tile_queries(&self) -> usize {
        self.block_rows() / self.heads_per_tile
    }

    /// Dynamic shared memory of a thread block, in bytes.
    pub(crate) fn shared_bytes(&self, shape: &AttentionShape, source: KeySource) -> usize {
        let widths = shape.head_dim + shape.head_dim_v;
        // A row is q, or q and the gradient of the output.
        let row_width = if self.pass.reads_gradient() { widths } else { shape.head_dim };
        let keys = self.num_stages * self.block_kv;
        let tiles = (self.block_rows() * row_width + keys * widths) * BF16;
        let bias = match source {
            KeySource::Dense | KeySource::Bands => 0,
            _ => keys * F32,
        };
        // A list entry has 8 bytes: a key's position, and `expire`, the first query that no longer sees the key.
        let entries =
            if source.is_gathered() { self.block_kv * 8 * list_entries_in_flight(self.num_stages) } else { 0 };
        tiles + bias + entries
    }

    /// Grid, in thread blocks, over a whole sequence, where `list_queries` queries share a list of keys.
    pub(crate) fn grid(&self, shape: &AttentionShape, source: KeySource, list_queries: usize) -> [usize; 3] {
        let tiles = if source.is_gathered() {
            shape.seq_len.div_ceil(list_queries) * list_queries.div_ceil(self.tile_queries())
        } else {
            shape.seq_len.div_ceil(self.tile_queries())
        };
        [tiles, shape.num_heads / self.heads_per_tile, shape.batch]
    }

    /// The kernel with this tiling's `#define`s.
    pub(crate) fn kernel(&self, shape: &AttentionShape, source: KeySource) -> SourceKernel {
        let [name, _] = query_kernel_names(self.pass, source);
        self.apply(SourceKernel::new(name), shape, source)
    }

    /// Sets the defines, block and shared memory of a kernel.
    pub(crate) fn apply(&self, kernel: SourceKernel, shape: &AttentionShape, source: KeySource) -> SourceKernel {
        let kernel = define_head_dims(kernel, [shape.head_dim, shape.head_dim_v])
            .define("NUM_WARPS", self.num_warps)
            .define("BLOCK_KV", self.block_kv)
            .define("NUM_STAGES", self.num_stages)
            .define("MIN_BLOCKS", self.min_blocks)
            .threads(self.num_warps * 32)
            .shared_bytes(self.shared_bytes(shape, source));
        let widest_in_registers = match self.pass {
            QueryPass::Output | QueryPass::OutputAndOLow => Some(64),
            QueryPass::RowSums => Some(128),
            QueryPass::Gradient => None,
        };
        let kernel = match widest_in_registers {
            Some(widest) => {
                kernel.define("WARP_ROWS", self.warp_rows).define("Q_IN_REGISTERS", (shape.head_dim <= widest) as u8)
            }
            None => kernel,
        };
        if source.is_gathered() {
            kernel.define("HEADS_PER_TILE", self.heads_per_tile)
        } else {
            define_bias(kernel, source)
        }
    }
}

/// Names of the query-stationary kernel of a pass: portable, Hopper.
pub(crate) fn query_kernel_names(pass: QueryPass, source: KeySource) -> [&'static str; 2] {
    use QueryPass::{Gradient, Output, OutputAndOLow, RowSums};
    match (source.is_gathered(), pass) {
        (true, Output | OutputAndOLow) => ["dma_attention_forward", "hopper_dma_attention_forward"],
        (true, RowSums) => ["dma_attention_row_sums", "hopper_dma_attention_row_sums"],
        (false, Output | OutputAndOLow) => ["attention_forward", "hopper_attention_forward"],
        (false, RowSums) => ["attention_row_sums", "hopper_attention_row_sums"],
        // Hopper kernels compute dq by key; they have no pass for it.
        (true, Gradient) => ["dma_attention_backward_query"; 2],
        (false, Gradient) => ["attention_backward_query"; 2],
    }
}

/// Adds the `#define`s HAS_BIAS, except for key lists with a bias: their kernels have a bias unless it is 0, and
/// HAS_FAR for keys beyond a window.
pub(crate) fn define_bias(kernel: SourceKernel, source: KeySource) -> SourceKernel {
    match source {
        KeySource::Gathered => kernel,
        KeySource::Bands => kernel.define("HAS_BIAS", 0u8).define("HAS_FAR", 1u8),
        source => kernel.define("HAS_BIAS", source.has_bias() as u8),
    }
}

/// How many query heads of a group share a gathered tile of `block_rows` rows: up to 8 for the common widths 64 and
/// 128, up to 2 for others, so that fewer specialisations ship. A tile has at least 16 queries.
fn heads_sharing_a_tile(shape: &AttentionShape, block_rows: usize) -> usize {
    let most = if matches!(shape.head_dim, 64 | 128) { 8 } else { 2 };
    let fits = |heads: &usize| *heads <= most && shape.group_size().is_multiple_of(*heads) && block_rows / heads >= 16;
    [8, 4, 2, 1].into_iter().find(fits).unwrap_or(1)
}

/// Tiles of list entries in shared memory at a time. Entries are fetched further ahead than the keys they name.
pub(crate) fn list_entries_in_flight(num_stages: usize) -> usize {
    match num_stages {
        2 => 4,
        3 | 4 => 8,
        _ => 16,
    }
}

/// Adds the `#define` LIST_QUERIES where lists of keys are shared by another number of queries than usual.
pub(crate) fn define_list_queries(kernel: SourceKernel, queries: usize) -> SourceKernel {
    if queries == SUPER_BLOCK { kernel } else { kernel.define("LIST_QUERIES", queries) }
}

/// Adds the `#define` HEAD_DIM, and HEAD_DIM_V if values differ in width.
pub(crate) fn define_head_dims(kernel: SourceKernel, [keys, values]: [usize; 2]) -> SourceKernel {
    let kernel = kernel.define("HEAD_DIM", keys);
    if keys == values { kernel } else { kernel.define("HEAD_DIM_V", values) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(head_dim: usize, head_dim_v: usize, group: usize) -> AttentionShape {
        AttentionShape::new(2, 2500, [3 * group, 3], [head_dim, head_dim_v])
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
                        QueryTiling::choose("k", QueryPass::Output, &shape, source, limit).expect("a tiling exists");
                    assert!(tiling.shared_bytes(&shape, source) <= limit);
                    assert!(tiling.tile_queries() >= 4, "{head_dim} {source:?} {limit}: {tiling:?}");
                }
            }
        }
        assert!(QueryTiling::choose("k", QueryPass::Output, &shape(256, 256, 1), KeySource::Dense, 10_000).is_err());
    }

    #[test]
    fn heads_of_a_group_share_a_gathered_tile() {
        let heads = |group| {
            let tiling =
                QueryTiling::choose("k", QueryPass::Output, &shape(128, 128, group), KeySource::Gathered, HOPPER);
            tiling.expect("fits").heads_per_tile
        };
        assert_eq!([1, 2, 3, 4, 6, 8, 16].map(heads), [1, 2, 1, 4, 2, 8, 8]);
    }

    #[test]
    fn grids_cover_every_query() {
        let shape = shape(128, 128, 2);
        let dense = QueryTiling::choose("k", QueryPass::Output, &shape, KeySource::Dense, HOPPER).expect("fits");
        // 20 tiles of 128 queries, 6 heads, 2 rows of the batch.
        assert_eq!(dense.grid(&shape, KeySource::Dense, SUPER_BLOCK), [20, 6, 2]);
        let gathered = QueryTiling::choose("k", QueryPass::Output, &shape, KeySource::Gathered, HOPPER).expect("fits");
        // 3 super-blocks of 16 tiles of 64 queries; two heads a tile.
        assert_eq!(gathered.grid(&shape, KeySource::Gathered, SUPER_BLOCK), [48, 3, 2]);
        // 20 epochs of two tiles.
        assert_eq!(gathered.grid(&shape, KeySource::Gathered, 128), [40, 3, 2]);
    }

    #[test]
    fn shared_memory_is_the_sum_of_its_parts() {
        let shape = shape(192, 128, 2);
        let tiling = QueryTiling::choose("k", QueryPass::Output, &shape, KeySource::Gathered, HOPPER).expect("fits");
        // q of 128 rows; two stages of 64 keys and values, 192 + 128 columns of bf16; gathered keys also have a bias
        // (f32) and four tiles of list entries.
        assert_eq!(tiling.shared_bytes(&shape, KeySource::Dense), 128 * 192 * 2 + 2 * 64 * 320 * 2);
        assert_eq!(
            tiling.shared_bytes(&shape, KeySource::Gathered),
            128 * 192 * 2 + 2 * 64 * (320 * 2 + 4) + 64 * 8 * 4
        );
    }

    #[test]
    fn passes_that_read_the_gradient_fit_a_small_device_at_usual_widths() {
        for head_dim in [16, 32, 64, 96, 128] {
            for source in [KeySource::Dense, KeySource::Biased, KeySource::Gathered] {
                for pass in [QueryPass::RowSums, QueryPass::Gradient] {
                    let shape = shape(head_dim, head_dim, 2);
                    let tiling = QueryTiling::choose("k", pass, &shape, source, ADA);
                    assert!(tiling.is_ok(), "{head_dim} {source:?} {pass:?}");
                }
            }
        }
    }
}
