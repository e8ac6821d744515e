//! Launches of `kernels/sparse_attention_forward.cu` and its Hopper form: attention over the keys of a selector's mask.
use crate::KernelError;
use crate::attention::{
    AttentionResult, AttentionShape, BLOCK_KV, KernelFamily, KeySource, Qkv, QueryPass, QueryTiling, head_map,
    list_entries_in_flight, require_scale,
};
use crate::runtime::params::SparseAttentionForwardParams;
use crate::runtime::{CudaTensor, DType, SourceKernel, TileMap, operands, params, require};
use sieve_core::{KeyMask, MaskPlaces, Tiles};
use std::ops::Range;

const NAME: &str = "sparse_attention_forward";

/// Rows of a Hopper tile: two warpgroups of 64.
const HOPPER_ROWS: usize = 128;

/// How the Hopper kernel reads keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SparseKeyReads {
    /// Reads key by key, for any mask.
    Keys,
    /// Whole tiles by TMA, for masks with key tiles of a multiple of 64 keys in order, without single columns. All keys
    /// of a listed tile are read, also keys that no query sees.
    Tiles,
}

/// The fewest keys of one TMA copy.
const SMALL_BOX: usize = 64;

/// Whether two query tiles share a tile of the Hopper kernel, and how many keys one TMA box holds: all keys of a stage
/// where the key tile is a multiple of them.
fn pairs_and_box([query_tile, key_tile]: [usize; 2]) -> (bool, usize) {
    let is_paired = query_tile == HOPPER_ROWS / 2;
    let fills_stage = !is_paired && key_tile.is_multiple_of(BLOCK_KV);
    (is_paired, if fills_stage { BLOCK_KV } else { SMALL_BOX })
}

impl SparseKeyReads {
    /// How the Hopper kernel reads the keys of a mask.
    pub fn of<W>(mask: &KeyMask<W>) -> Self {
        let in_order = mask.places.col_ptr.is_empty() && mask.places.key_order.is_empty();
        if in_order && mask.tiles.key_tile.is_multiple_of(SMALL_BOX) { Self::Tiles } else { Self::Keys }
    }
}

/// What a launch over probe rows stores beside their output, for some query heads.
pub(crate) struct BlockLse<'a> {
    /// Log-sum-exp to base 2 of a probe's logits in each block of keys, f32 `[heads, num_blocks, num_probes]`. Blocks
    /// after the last probe of a tile of probes are not written.
    pub(crate) values: &'a CudaTensor,
    /// The query heads that the launch computes.
    pub(crate) heads: Range<usize>,
    /// Keys of a block: 1, 2, 4, .. 128.
    pub(crate) block: usize,
    /// Rows from one probe to the next; the first probe is the first row of the call.
    pub(crate) gamma: usize,
}

impl Qkv {
    /// Attention of the last `mask.shape.num_queries` tokens of `self` (one row) over the keys of the mask; queries in
    /// the mask's `dense_rows` see all keys up to their own. A query that sees no key gets `o = 0`, `lse = -inf`.
    ///
    /// # Shapes
    /// - q, k, v: bf16 `[1, num_keys, heads, head_dim]`
    /// - returns o bf16 `[1, num_queries, num_heads, head_dim]` and lse f32 `[1, num_heads, num_queries]`
    ///
    /// # Errors
    /// Another type than bf16, sizes that do not fit the mask, values wider or narrower than keys, a scale that is not
    /// positive.
    pub fn sparse_attention_forward(
        &self,
        mask: &KeyMask<CudaTensor>,
        softmax_scale: f32,
    ) -> Result<AttentionResult, KernelError> {
        let result = self.new_sparse_output(mask)?;
        self.sparse_attention_into(mask, softmax_scale, &result, None)?;
        Ok(result)
    }

    /// Room for the output under a mask.
    pub(crate) fn new_sparse_output<W>(&self, mask: &KeyMask<W>) -> Result<AttentionResult, KernelError> {
        let outputs = AttentionShape { seq_len: mask.shape.num_queries, ..self.shape(NAME)? };
        let q = self.q.tensor();
        Ok(AttentionResult {
            o: q.empty_contiguous(&outputs.output(), DType::BF16),
            lse: q.empty_contiguous(&outputs.lse(), DType::F32),
            o_low: None,
            base: None,
        })
    }

    /// Writes the results of [`sparse_attention_forward`](Self::sparse_attention_forward) into `result`: one launch
    /// computes the queries that the mask has lists of keys for, and another one each range of its `dense_rows`.
    ///
    /// With `blocks` the mask is one of probe rows (every gamma-th query, which sees all keys up to its own), only some
    /// heads are computed, and log-sum-exps of blocks are stored too.
    pub(crate) fn sparse_attention_into(
        &self,
        mask: &KeyMask<CudaTensor>,
        softmax_scale: f32,
        result: &AttentionResult,
        blocks: Option<&BlockLse<'_>>,
    ) -> Result<(), KernelError> {
        let shape = self.shape(NAME)?;
        let qkv = self.with_kernel_strides();
        require_scale(NAME, softmax_scale)?;
        let num_words = mask.places.num_words();
        operands!(only NAME, mask: I32[num_words] contiguous = &mask.words);
        let of_mask = [mask.shape.num_heads, mask.shape.num_kv_heads];
        let expected = AttentionShape::new(1, mask.shape.num_keys, of_mask, [shape.head_dim; 2]);
        require!(shape == expected, NAME, "shape": format!("{shape:?}"), "the mask's {expected:?}");
        let pass = SparsePass { qkv: &qkv, shape, reads: SparseKeyReads::of(mask), blocks };
        let num_probes = mask.tiles.num_queries;
        if let Some(blocks) = blocks {
            let lse = [blocks.heads.len(), pass.num_blocks(), num_probes];
            operands!(only NAME, lse: F32 lse contiguous = blocks.values);
        }
        let mut tensors = vec![qkv.q.tensor(), qkv.k.tensor(), qkv.v.tensor()];
        tensors.extend([&mask.words, &result.o, &result.lse]);
        tensors.extend(blocks.map(|blocks| blocks.values));
        let heads = pass.heads();
        let launch = |rows: &LaunchRows<'_>| -> Result<(), KernelError> {
            let params = SparseAttentionForwardParams {
                first_head: heads.start.into(),
                launch_heads: heads.len().into(),
                launch_kv_heads: pass.scheduled_kv_heads().into(),
                num_blocks: pass.num_blocks().into(),
                num_probes: blocks.map_or(0, |_| num_probes).into(),
                gamma: blocks.map_or(0, |blocks| blocks.gamma).into(),
                ..launch_rows_params(&qkv, mask, rows, softmax_scale)?
            };
            let (kernel, grid, maps) = pass.kernel(rows)?;
            // SAFETY: sizes, strides and types checked above; every index was checked when the mask was built; the
            // mask's query tiles cover every query, so all of o and lse is written (with `blocks` the probe rows of its
            // heads); the maps read k and v, which are among the tensors.
            unsafe { kernel.launch_with_maps(grid, &maps, &tensors, &params) }
        };
        launch(&LaunchRows::of(mask))?;
        // Without lists (default places) the kernel takes all keys up to each query's own.
        for rows in &mask.dense_rows {
            launch(&LaunchRows {
                first: rows.start,
                tiles: Tiles { num_queries: rows.len(), ..Tiles::new(mask.shape, HOPPER_ROWS, HOPPER_ROWS) },
                heads_per_list: 1,
                places: &MaskPlaces::default(),
            })?;
        }
        Ok(())
    }
}

/// What decides the kernel of a pass under a mask, and the heads that it computes.
struct SparsePass<'a> {
    /// Heads with strides that the kernels take, and their sizes.
    qkv: &'a Qkv,
    shape: AttentionShape,
    reads: SparseKeyReads,
    /// The log-sum-exps of blocks that a pass over probe rows stores.
    blocks: Option<&'a BlockLse<'a>>,
}

impl<'a> SparsePass<'a> {
    /// The query heads that a launch computes.
    fn heads(&self) -> Range<usize> {
        self.blocks.map_or(0..self.shape.num_heads, |blocks| blocks.heads.clone())
    }

    /// The KV heads among which a launch's query heads are divided to schedule thread blocks. Query heads that are not
    /// whole groups count as if one KV head had them all.
    fn scheduled_kv_heads(&self) -> usize {
        let (num_heads, group) = (self.heads().len(), self.shape.group_size());
        if num_heads.is_multiple_of(group) { num_heads / group } else { 1 }
    }

    /// Blocks of keys whose log-sum-exps are stored; 0: none.
    fn num_blocks(&self) -> usize {
        self.blocks.map_or(0, |blocks| self.shape.seq_len.div_ceil(blocks.block))
    }

    /// Kernel, grid and maps of a launch.
    ///
    /// # Errors
    /// [`KernelError::Refused`] when no tiling fits the device.
    fn kernel(&self, rows: &LaunchRows<'_>) -> Result<(SourceKernel, [usize; 3], Vec<TileMap<'a>>), KernelError> {
        let Tiles { query_tile, key_tile, .. } = rows.tiles;
        let hardware = self.qkv.q.tensor().hardware();
        let block = self.blocks.map_or(0, |blocks| blocks.block);
        match KernelFamily::of(&self.shape, KeySource::Dense, self.qkv.q.tensor()) {
            KernelFamily::Hopper => {
                let tiles = [query_tile, key_tile];
                let kernel = hopper_sparse_attention_forward_kernel(&self.shape, self.reads, tiles, block);
                Ok((kernel, [hardware.num_multiprocessors, 1, 1], self.maps(tiles)?))
            }
            KernelFamily::Portable => {
                let tiling = sparse_attention_tiling(&self.shape, hardware.max_shared_bytes)?;
                let parts = query_tile.div_ceil(tiling.block_rows());
                let grid = [rows.tiles.num_query_tiles() * parts, self.heads().len(), 1];
                Ok((sparse_attention_forward_kernel(&self.shape, &tiling, block), grid, Vec::new()))
            }
        }
    }

    /// The Hopper kernel's maps of keys and of values; none where it reads key by key.
    fn maps(&self, tiles: [usize; 2]) -> Result<Vec<TileMap<'a>>, KernelError> {
        if self.reads == SparseKeyReads::Keys {
            return Ok(Vec::new());
        }
        let [_, k, v] = self.qkv.head_words(NAME)?;
        let width = self.shape.num_kv_heads * self.shape.head_dim;
        let (_, keys) = pairs_and_box(tiles);
        let map = |heads, words| head_map(heads, words, width, &self.shape, keys);
        Ok(vec![map(&self.qkv.k, k), map(&self.qkv.v, v)])
    }
}

/// The queries that one launch computes, and where their lists lie in the mask's words.
pub(crate) struct LaunchRows<'a> {
    first: usize,
    /// Tiles of the mask; `num_queries` counts the queries of this launch.
    tiles: Tiles,
    heads_per_list: usize,
    places: &'a MaskPlaces,
}

impl<'a> LaunchRows<'a> {
    /// All queries of a mask.
    pub(crate) fn of<W>(mask: &'a KeyMask<W>) -> Self {
        Self { first: 0, tiles: mask.tiles, heads_per_list: mask.heads_per_list, places: &mask.places }
    }
}

/// The params of a launch over all heads.
pub(crate) fn launch_rows_params<W>(
    qkv: &Qkv,
    mask: &KeyMask<W>,
    rows: &LaunchRows<'_>,
    softmax_scale: f32,
) -> Result<SparseAttentionForwardParams, KernelError> {
    let shape = qkv.shape(NAME)?;
    let places = rows.places;
    Ok(params!(SparseAttentionForwardParams {
        base: qkv.params(NAME, &shape)?,
        num_queries: mask.shape.num_queries,
        first_row: rows.first,
        num_slots: rows.tiles.num_queries,
        query_tile: rows.tiles.query_tile,
        query_offset: rows.tiles.query_offset,
        key_tile: rows.tiles.key_tile,
        num_query_tiles: rows.tiles.num_query_tiles(),
        heads_per_list: rows.heads_per_list,
        heads_per_order: mask.heads_per_order,
        tile_order: places.tile_order.start,
        row_ptr: places.row_ptr.start,
        tile_idx: places.tile_idx.start,
        col_ptr: places.col_ptr.start,
        col_idx: places.col_idx.start,
        key_order: places.key_order.start,
        query_order: places.query_order.start,
        windows: places.windows.start,
        softmax_scale,
        first_head: 0usize,
        launch_heads: shape.num_heads,
        launch_kv_heads: shape.num_kv_heads,
        num_blocks: 0usize,
        num_probes: 0usize,
        gamma: 0usize,
    }))
}

/// The tiling of the portable kernel: dense attention's, in the shared memory that the list entries leave.
///
/// # Errors
/// [`KernelError::Refused`] when no tiling fits the device.
fn sparse_attention_tiling(shape: &AttentionShape, max_shared_bytes: usize) -> Result<QueryTiling, KernelError> {
    tiling_beside_entries(NAME, QueryPass::Output, shape, max_shared_bytes)
}

/// Dense attention's tiling of a pass, in the shared memory that the entries of a mask's keys leave.
///
/// # Errors
/// [`KernelError::Refused`] when no tiling fits the device.
pub(crate) fn tiling_beside_entries(
    kernel: &'static str,
    pass: QueryPass,
    shape: &AttentionShape,
    max_shared_bytes: usize,
) -> Result<QueryTiling, KernelError> {
    /// Most bytes of list entries: four tiles of 64 keys, 8 bytes a key.
    const MOST_ENTRIES: usize = 64 * 8 * 4;
    let limit = max_shared_bytes.saturating_sub(MOST_ENTRIES);
    QueryTiling::choose(kernel, pass, shape, KeySource::Dense, limit)
}

/// The specialisation that also stores log-sum-exps of blocks of `block` keys; 0: none.
fn with_block_lse(kernel: SourceKernel, block: usize) -> SourceKernel {
    match block {
        0 => kernel,
        _ => kernel.define("BLOCK_LSE", block),
    }
}

/// The portable specialisation for a shape and tiling, which stores log-sum-exps of blocks of `block` keys; 0: none.
fn sparse_attention_forward_kernel(shape: &AttentionShape, tiling: &QueryTiling, block: usize) -> SourceKernel {
    let entries = tiling.block_kv * 8 * list_entries_in_flight(tiling.num_stages);
    tiling
        .apply(with_block_lse(SourceKernel::new(NAME), block), shape, KeySource::Dense)
        .shared_bytes(tiling.shared_bytes(shape, KeySource::Dense) + entries)
}

/// The Hopper specialisation for a shape, which stores log-sum-exps of blocks of `block` keys; 0: none. `tiles`, the
/// sizes of query and key tiles, matters only where keys are read by tiles.
fn hopper_sparse_attention_forward_kernel(
    shape: &AttentionShape,
    reads: SparseKeyReads,
    tiles: [usize; 2],
    block: usize,
) -> SourceKernel {
    let d = shape.head_dim;
    let (k_stages, v_stages) = if d == 64 { (3, 3) } else { (2, 3) };
    let stages = k_stages + v_stages;
    let entries = match reads {
        SparseKeyReads::Keys => 4096,
        SparseKeyReads::Tiles => 128,
    };
    // q of 128 rows; stages of 128 keys or values; list entries; two work items and their rows; barriers; alignment.
    let shared = 256 * d + stages * 256 * d + entries + 2 * (32 + 512) + (2 * stages + 2) * 8 + 1024;
    let kernel = with_block_lse(SourceKernel::new("hopper_sparse_attention_forward"), block)
        .define("HEAD_DIM", d)
        .define("NUM_CONSUMERS", 2)
        .define("BLOCK_KV", BLOCK_KV)
        .define("K_STAGES", k_stages)
        .define("V_STAGES", v_stages)
        .define("GATHER", (reads == SparseKeyReads::Keys) as u8)
        .define("CONSUMER_REGISTERS", 216)
        .define("PRODUCER_REGISTERS", 72)
        .define("HEADS_PER_TILE", 1)
        .threads(384)
        .shared_bytes(shared);
    if reads == SparseKeyReads::Keys {
        return kernel.define("TAKE_TURNS", 2);
    }
    let (pairs, keys) = pairs_and_box(tiles);
    // Without paired query tiles the kernel is a few percent faster if warpgroups do not take turns at the GEMMs.
    kernel.define("TAKE_TURNS", if pairs { 2 } else { 0 }).define("PAIRS", pairs as u8).define("KEY_BOX", keys)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_fills_a_stage_where_the_tiles_allow() {
        for (tiles, form) in [
            ([128, 128], (false, 128)),
            ([100, 256], (false, 128)),
            ([128, 64], (false, 64)),
            ([128, 192], (false, 64)),
            ([64, 128], (true, 64)),
        ] {
            assert_eq!(pairs_and_box(tiles), form, "{tiles:?}");
        }
    }
}
