//! Launches of `kernels/select_*.cu`: a prefill selector on the GPU, from queries and keys to the lists of key tiles
//! that attention reads.
mod heavy;
mod lines;
mod order;
mod probes;
mod scores;
mod step;

pub use heavy::KeptKeys;
pub use step::SelectorStep;

use crate::KernelError;
use crate::attention::{AttentionShape, KernelFamily, Qkv};
use crate::runtime::{CudaTensor, DType, SourceKernel, params, ranges, require};
use order::{MOST_IN_SEGMENT, Orders};
use probes::MOST_EXACT;
use scores::CELL_SIDE;
use sieve_core::{
    BlockScores, BlockSelection, ChosenKeys, HeadRule, KeepBlocks, KeyMask, KeyScores, MaskCounts, SlotOrder,
};
use std::ops::Range;

const NAME: &str = "select_blocks";

/// Most bytes of scores in memory at a time; more heads take several launches.
const SCORE_BYTES: usize = 1 << 30;

/// Columns of q and k that select_cells multiplies in a step.
const CELL_STEP: usize = 64;
/// Bytes of shared memory that select_cells takes.
const CELL_SHARED_BYTES: usize = 98_304;

impl Qkv {
    /// Chooses the blocks of keys that each block of queries keeps. The host does not wait for the result.
    ///
    /// # Shapes
    /// - q, k, v: bf16 `[1, num_keys, heads, head_dim]`; v is read for dense probe rows alone
    ///
    /// # Errors
    /// Sizes that do not fit the selection; blocks that are not 1, 2, 4, .. cells (runs of tokens scored as one); cells
    /// with a head width that is not a multiple of 64.
    pub fn select_blocks(&self, selection: &BlockSelection) -> Result<ChosenKeys<CudaTensor>, KernelError> {
        let call = Call::new(self, selection)?;
        let layout = selection.layout();
        let most = layout.places.tile_idx.len().max(layout.places.col_idx.len());
        require!(i32::try_from(most).is_ok(), NAME, "mask": format!("of up to {most} entries"),
            "fewer than 2^31 tiles or keys that could be kept; larger tiles have fewer");
        let [block_rows, columns] = selection.blocks();
        let like = call.qkv.q.tensor();
        let heads = selection.shape.num_heads;
        let kept = like.empty_contiguous(&[heads, block_rows, columns.div_ceil(u32::BITS as usize)], DType::I32);
        let nan_rows = like.zeros_contiguous(&[heads], DType::I32);
        let words = like.empty_contiguous(&[layout.places.num_words()], DType::I32);
        let mask = layout.map(|()| words.clone());
        let orders = call.orders(&mask, &nan_rows)?;
        let bits = [&kept, &nan_rows];
        let rules = selection.rules();
        let (lines, others): (Vec<_>, Vec<_>) =
            rules.into_iter().partition(|rule| matches!(rule.scores, BlockScores::Lines { .. }));
        let (mut single_columns, mut probe_o) = (None, None);
        if !lines.is_empty() {
            // This writes the bits of every head; the other heads' bits are overwritten below.
            single_columns = Some(call.lines(bits, &lines)?);
        }
        match selection.scores.by {
            _ if others.is_empty() => {}
            BlockScores::Patterns { .. } => call.patterns(bits)?,
            BlockScores::Probes { .. } => probe_o = Some(call.probes(bits)?),
            BlockScores::Logits => {
                let supported = "scores of blocks; keep_heavy_keys takes these";
                return Err(KernelError::unsupported(NAME, "scores", "logits", supported));
            }
            _ => call.compare(bits, &orders, &others)?,
        }
        let mask = call.lists(bits, mask, &orders, single_columns.as_ref())?;
        Ok(ChosenKeys { mask, probe_o })
    }
}

/// Output of a selection, before lists are built from it: one bit for each kept block,
/// `[num_heads, rows, ceil(columns / 32)]`, and the number of rows of each head with a NaN score, `[num_heads]`.
type KeptBits<'a> = [&'a CudaTensor; 2];

/// Operands of a launch of select_choose.
struct Choice<'a> {
    /// Scores of `heads`, f32 `[heads, rows, columns]`.
    scores: &'a CudaTensor,
    bits: KeptBits<'a>,
    heads: Range<usize>,
    keep: KeepBlocks,
    /// Whether scores are probability masses already; otherwise the kernel takes their softmax.
    is_mass: bool,
    /// Whether blocks that are kept whatever their scores count towards the number or mass to keep.
    forced: bool,
    /// Whether blocks with a score of minus infinity are never kept.
    drops_absent: bool,
}

/// A choice of the largest entries of a long row of scores for each head; of equal entries the first is chosen.
#[derive(Clone, Copy, Debug)]
pub struct LongChoice<'a> {
    /// f32 `[heads, length]` of the heads in `heads`.
    pub scores: &'a CudaTensor,
    /// One bit for each chosen entry, i32 `[all heads, length / 32 rounded up]`; the rows of `heads` are written.
    pub kept: &'a CudaTensor,
    /// i32 `[all heads]`: 1 is added for a head with a NaN score; such a head chooses nothing.
    pub nan_rows: &'a CudaTensor,
    /// The first head, and the number of heads.
    pub heads: [usize; 2],
    /// Scores of a row.
    pub length: usize,
    /// How many entries of a row are chosen.
    pub amount: Amount<'a>,
    /// Whether entries of minus infinity are never chosen.
    pub drops_absent: bool,
}

/// How many entries of each row a [`LongChoice`] chooses.
#[derive(Clone, Copy, Debug)]
pub enum Amount<'a> {
    /// The `top` largest, among them the first `num_first` entries, whatever their scores.
    Count {
        /// Number of entries.
        top: usize,
        /// Number of first entries that are always chosen.
        num_first: usize,
    },
    /// As many of the largest as it takes for their sum to reach a goal.
    Sum {
        /// The sum to reach; infinity chooses all entries.
        goal: f32,
        /// Whether the sum must exceed `goal` rather than reach it.
        strict: bool,
    },
    /// An amount for each head, which an earlier kernel has computed.
    OfHead {
        /// i32 `[all heads]`: above 0 as [`Count`](Self::Count) with this `top`, 0 as [`Sum`](Self::Sum), below 0 none.
        tops: &'a CudaTensor,
        /// Number of first entries that are always chosen, in heads with a count.
        num_first: usize,
        /// The sum to reach in heads without a count.
        goal: f32,
    },
}

impl<'a> LongChoice<'a> {
    /// A choice of this amount in the rows of `heads`: the first one and their number.
    pub fn new(
        [scores, kept, nan_rows]: [&'a CudaTensor; 3],
        heads: [usize; 2],
        length: usize,
        amount: Amount<'a>,
    ) -> Self {
        Self { scores, kept, nan_rows, heads, length, amount, drops_absent: false }
    }

    /// Writes `kept`.
    ///
    /// # Errors
    /// A launch that is refused.
    pub fn choose(&self) -> Result<(), KernelError> {
        let [first_head, num_heads] = self.heads;
        // To the kernel a `top` of 0 means that the amount is a sum.
        let (top, num_first, goal, strict) = match self.amount {
            Amount::Count { top, num_first } => (top, num_first, 0.0, false),
            Amount::Sum { goal, strict } => (0, 0, goal, strict),
            Amount::OfHead { num_first, goal, .. } => (0, num_first, goal, false),
        };
        // Without a count for each head `nan_rows` stands in for `tops`, which the kernel then does not read.
        let (has_tops, tops) = match self.amount {
            Amount::OfHead { tops, .. } => (true, tops),
            _ => (false, self.nan_rows),
        };
        // To the kernel the row is one query's scores of blocks of one key.
        let num_keys = self.length;
        let params = params!(SelectChooseParams {
            num_queries: 1usize,
            num_keys,
            block: 1usize,
            offset: 0usize,
            query_block: 1usize,
            first_head,
            top,
            num_first,
            goal,
            strict,
            drops_absent: self.drops_absent,
            has_tops,
            segment: 0usize,
            share: 0u64,
            absolute: true,
        });
        let [is_mass, is_forced, is_long] = [true, false, true];
        let tensors = [self.scores, self.kept, self.nan_rows, tops];
        // SAFETY: reads `length` scores a head, writes every word of these heads' rows.
        unsafe { select_choose_kernel(is_mass, is_forced, is_long).launch([1, num_heads, 1], &tensors, &params) }
    }
}

/// A row of blocks overlaps one segment or two, runs of tokens that may be reordered. These have at most so many
/// blocks, since select_lists marks them in a 64-bit mask.
const MOST_OWN_BLOCKS: usize = 64;

/// A selector's call with its checked operands.
struct Call<'a> {
    selection: &'a BlockSelection,
    shape: AttentionShape,
    qkv: Qkv,
    q: [usize; 3],
    k: [usize; 3],
}

impl<'a> Call<'a> {
    /// Checks the heads against the selection, and copies heads whose strides the kernels do not take.
    fn new(qkv: &Qkv, selection: &'a BlockSelection) -> Result<Self, KernelError> {
        let shape = qkv.shape(NAME)?;
        let s = selection;
        let sizes = [shape.batch, shape.seq_len, shape.num_heads, shape.num_kv_heads];
        let fits = sizes == [1, s.shape.num_keys, s.shape.num_heads, s.shape.num_kv_heads]
            && (1..=s.shape.num_keys).contains(&s.shape.num_queries)
            && s.scores.offset < s.scores.query_block
            && s.scores.block.is_multiple_of(s.keep.tile)
            && (s.keep.tile == s.scores.block || s.scores.offset == 0)
            && s.scores.query_block.is_multiple_of(s.scores.block / s.keep.tile)
            && s.shape.num_heads.is_multiple_of(s.keep.heads_per_list)
            && s.keep.by != KeepBlocks::Top(0);
        require!(fits, NAME, "selection": format!("{shape:?} with {s:?}"),
            "one row as long as the selection says, tiles that divide blocks");
        require_order(s)?;
        require_probes(s)?;
        require_cells(s, shape.head_dim)?;
        let qkv = qkv.with_kernel_strides();
        let [q, k, _] = qkv.head_words(NAME)?;
        Ok(Self { selection, shape, qkv, q, k })
    }

    /// Chooses the blocks that the rows of some heads keep, and sets their bits.
    fn choose(&self, choice: &Choice<'_>) -> Result<(), KernelError> {
        let s = self.selection;
        let [rows, columns] = s.blocks();
        let (top, share, goal) = match choice.keep {
            KeepBlocks::Mass(share) => (0, 0.0, share as f32),
            KeepBlocks::Top(top) => (top, 0.0, 0.0),
            KeepBlocks::Share(share) => (0, share, 0.0),
        };
        let params = params!(SelectChooseParams {
            { num_queries, num_keys }: s.shape,
            { block, offset, query_block }: s.scores,
            first_head: choice.heads.start,
            drops_absent: choice.drops_absent,
            top,
            has_tops: false,
            segment: self.segment(),
            num_first: 0usize,
            share: share.to_bits(),
            goal,
            absolute: false,
            strict: false,
        });
        let is_long = false;
        let kernel = select_choose_kernel(choice.is_mass, choice.forced, is_long);
        let kernel = kernel.shared_bytes(columns * DType::F32.size());
        let [kept, nan_rows] = choice.bits;
        let tensors = [choice.scores, kept, nan_rows, nan_rows];
        // SAFETY: reads scores of competing blocks, writes every word of these heads' rows.
        unsafe { kernel.launch([rows, choice.heads.len(), 1], &tensors, &params) }
    }

    /// Tokens of a segment, inside which tokens may be reordered; 0 if there are no segments.
    fn segment(&self) -> usize {
        self.selection.order.map_or(0, |order| order.segment)
    }

    /// Scores all blocks and chooses the blocks that the rules' heads keep.
    fn compare(&self, bits: KeptBits<'_>, orders: &Orders, rules: &[HeadRule]) -> Result<(), KernelError> {
        let s = self.selection;
        let means = match s.scores.by {
            BlockScores::Means { .. } => Some(self.means(orders)?),
            _ => None,
        };
        let row_bytes = self.score_rows() * s.blocks()[1] * DType::F32.size();
        for rule in rules {
            for heads in self.slabs(rule.heads.clone(), row_bytes) {
                let scores = match &means {
                    Some(means) => self.scores_by_means(means, heads.clone())?,
                    None => self.scores_by_cells(orders, heads.clone())?,
                };
                self.choose(&Choice {
                    scores: &scores,
                    bits,
                    heads,
                    keep: rule.keep,
                    is_mass: self.is_lse(),
                    forced: s.keep.counts_own,
                    drops_absent: false,
                })?;
            }
        }
        Ok(())
    }

    /// Splits `heads` into ranges whose scores are in memory at the same time; a head has `head_bytes` of scores.
    fn slabs(&self, heads: Range<usize>, head_bytes: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let at_once = ranges(heads.len(), SCORE_BYTES / head_bytes.max(1));
        at_once.map(move |at| heads.start + at.start..heads.start + at.end)
    }

    /// All query heads.
    fn heads(&self) -> Range<usize> {
        0..self.selection.shape.num_heads
    }

    /// Builds the lists of key tiles and columns that attention reads. `single` has a bit for each kept column.
    fn lists(
        &self,
        [kept, nan_rows]: KeptBits<'_>,
        mask: KeyMask<CudaTensor>,
        orders: &Orders,
        single: Option<&CudaTensor>,
    ) -> Result<KeyMask<CudaTensor>, KernelError> {
        let (s, data, tiles) = (self.selection, &mask.words, mask.tiles);
        let (rows, columns) = (tiles.num_query_tiles(), tiles.num_key_tiles());
        let (lists, num_words) = (s.num_lists(), columns.div_ceil(u32::BITS as usize));
        let new = |shape: &[usize]| kept.empty_contiguous(shape, DType::I32);
        let bits = new(&[lists, rows, num_words]);
        let (counts, pairs) = (new(&[lists, rows]), new(&[lists, rows]));
        let params = params!(SelectListsParams {
            { num_queries, num_keys }: s.shape,
            { block, offset, query_block }: s.scores,
            { tile, heads_per_list, first_tiles }: s.keep,
            num_lists_per_order: lists / s.shape.num_kv_heads,
            local: s.keep.local_tokens,
            segment: self.segment(),
            keeps_first: s.order.is_some_and(|order| order.keeps_first),
            moves_keys: orders.keys.is_some(),
            moves_queries: orders.queries.is_some(),
            { stride, limit, seed, is_linear, by_block }: s.keep.rescue,
        });
        // Tokens that do not move have no order: `data` stands in for it, and is not read as an order.
        let [keys, queries] = [&orders.keys, &orders.queries].map(|x| x.as_ref().unwrap_or(data));
        let tensors = [kept, nan_rows, keys, queries, &bits, &counts, &pairs];
        // SAFETY: reads what select_choose wrote, writes every element of bits, counts and pairs.
        unsafe { SELECT_LISTS.launch([rows.div_ceil(4), lists, 1], &tensors, &params) }?;
        let places = &mask.places;
        let [row_ptr_at, tile_idx_at] = [places.row_ptr.start, places.tile_idx.start];
        let [col_ptr_at, col_idx_at] = [places.col_ptr.start, places.col_idx.start];
        let all_rows = lists * rows;
        let offsets = |counts: &CudaTensor, row_ptr_at: usize| {
            let params = params!(SelectOffsetsParams { rows: all_rows, row_ptr_at });
            // SAFETY: the array has one word more than there are rows.
            unsafe { SELECT_OFFSETS.launch([1, 1, 1], &[counts, data], &params) }
        };
        offsets(&counts, row_ptr_at)?;
        let params = params!(SelectFillParams { rows: all_rows, words: num_words, row_ptr_at, tile_idx_at });
        let grid = [all_rows.div_ceil(4), 1, 1];
        // SAFETY: tile_idx has room for every tile that rows may keep.
        unsafe { SELECT_FILL.launch(grid, &[&bits, data], &params) }?;
        if let Some(single) = single {
            let singles = new(&[lists, rows]);
            let tensors = [single, &bits, &singles, &pairs, data];
            let launch = |fills: bool| {
                let params = params!(SelectColumnsParams {
                    { num_queries, num_keys }: s.shape,
                    block: s.keep.tile,
                    offset: s.scores.offset,
                    query_block: tiles.query_tile,
                    fills,
                    col_ptr_at,
                    col_idx_at,
                });
                // SAFETY: col_idx has room for every column that rows may keep.
                unsafe { SELECT_COLUMNS.launch([rows.div_ceil(4), lists, 1], &tensors, &params) }
            };
            // The first launch counts the columns of each row, the second writes them.
            launch(false)?;
            offsets(&singles, col_ptr_at)?;
            launch(true)?;
        }
        Ok(KeyMask { counts: Some(MaskCounts { tiles: counts, pairs, nan_rows: nan_rows.clone() }), ..mask })
    }
}

/// Refuses orders of tokens whose segments the kernels do not take.
fn require_order(s: &BlockSelection) -> Result<(), KernelError> {
    let Some(order) = s.order else {
        return Ok(());
    };
    let moves = order.keys.is_some() || order.moves_queries;
    let fits = order.segment.is_multiple_of(s.scores.block)
        && (!moves || order.segment <= MOST_IN_SEGMENT)
        && s.keep.tile == s.scores.block
        && s.scores.query_block == s.scores.block
        && s.scores.offset == 0;
    require!(fits, NAME, "order": format!("{s:?}"),
        "square blocks that divide a segment, of at most 512 tokens where they move");
    // A row of blocks that straddles two segments meets the blocks of both.
    let context = s.shape.context();
    let segments = if context.is_multiple_of(s.scores.block) { 1 } else { 2 };
    let blocks = segments * order.segment / s.scores.block;
    require!(blocks <= MOST_OWN_BLOCKS, NAME, "number of blocks in a row's own segments": blocks, "at most 64");
    Ok(())
}

/// Refuses probe rows that do not fit the call's tiles.
fn require_probes(s: &BlockSelection) -> Result<(), KernelError> {
    let BlockScores::Probes { gamma, chosen } = s.scores.by else {
        return Ok(());
    };
    let context = s.shape.context();
    let [_, num_exact] = chosen;
    let fits = num_exact <= MOST_EXACT
        && s.scores.query_block.is_multiple_of(gamma)
        && context.is_multiple_of(gamma)
        && s.scores.offset == 0;
    require!(fits, NAME, "probes": format!("{s:?}"),
        "calls and tiles of whole distances, at most {MOST_EXACT} blocks that are surely the best");
    Ok(())
}

/// Refuses heads and blocks that select_cells does not take.
fn require_cells(s: &BlockSelection, head_dim: usize) -> Result<(), KernelError> {
    let cell = s.rules().iter().find_map(|rule| cell_of(rule.scores));
    let is_by_attention = |order: SlotOrder| matches!(order.keys, Some(KeyScores::Attention(_)));
    if cell.is_some() || s.order.is_some_and(is_by_attention) {
        let fits = head_dim.is_multiple_of(CELL_STEP);
        require!(fits, NAME, "head_dim": head_dim, "multiples of {CELL_STEP}, for products of cells");
    }
    if let Some(cell) = cell {
        let per_block = s.scores.block / cell.max(1);
        let fits = s.scores.block.is_multiple_of(cell) && per_block.is_power_of_two();
        let has_lines = s.rules().iter().any(|rule| matches!(rule.scores, BlockScores::Lines { .. }));
        let is_one_by_one = has_lines || matches!(s.scores.by, BlockScores::Patterns { .. });
        let fits = is_one_by_one || fits && per_block <= CELL_SIDE;
        let got = || format!("{cell} tokens of {}", s.scores.block);
        require!(fits, NAME, "cell": got(), "blocks of 1, 2, 4, ... 128 cells");
    }
    Ok(())
}

/// Tokens of a cell; `None` where blocks are not scored by cells.
fn cell_of(scores: BlockScores) -> Option<usize> {
    match scores {
        BlockScores::Means { .. } => None,
        BlockScores::Logits | BlockScores::Lines { .. } | BlockScores::Patterns { .. } | BlockScores::Probes { .. } => {
            Some(1)
        }
        BlockScores::LargestOfGroups(cell) | BlockScores::Cells { stride: cell, .. } => Some(cell),
    }
}

const SELECT_POOL: SourceKernel = SourceKernel::new("select_pool").threads(128);
const SELECT_SCORES: SourceKernel = SourceKernel::new("select_scores").threads(256);

/// The kernel that multiplies cells of queries and keys. `is_lse`: scores are log-sum-exps; otherwise largest products.
/// `is_ordered`: keys are permuted.
fn select_cells_kernel(head_dim: usize, [is_lse, is_ordered]: [bool; 2], family: KernelFamily) -> SourceKernel {
    let (name, room_to_align) = match family {
        KernelFamily::Portable => ("select_cells", 0),
        KernelFamily::Hopper => ("hopper_select_cells", 1024),
    };
    SourceKernel::new(name)
        .define("HEAD_DIM", head_dim)
        .define("LSE", u8::from(is_lse))
        .define("ORDERED", u8::from(is_ordered))
        .threads(256)
        .shared_bytes(CELL_SHARED_BYTES + room_to_align)
}

const SELECT_CELL_SUMS: SourceKernel = SourceKernel::new("select_cell_sums").threads(128);

/// The kernel that chooses blocks. `is_mass`: scores are probability masses already; `is_forced`: blocks that are kept
/// whatever their scores count; `is_long`: one long row of scores in global memory for each head.
fn select_choose_kernel(is_mass: bool, is_forced: bool, is_long: bool) -> SourceKernel {
    SourceKernel::new("select_choose")
        .define("IS_MASS", u8::from(is_mass))
        .define("FORCED", u8::from(is_forced))
        .define("LONG", u8::from(is_long))
        .threads(if is_long { 1024 } else { 128 })
}

const SELECT_COLUMNS: SourceKernel = SourceKernel::new("select_columns").threads(128);
const SELECT_LISTS: SourceKernel = SourceKernel::new("select_lists").threads(128);
const SELECT_OFFSETS: SourceKernel = SourceKernel::new("select_offsets").threads(1024);
const SELECT_FILL: SourceKernel = SourceKernel::new("select_fill").threads(128);
