//! Selection by columns and diagonals of the last queries' attention (MInference's vertical-slash), and FlexPrefill's
//! choice between these and the largest entries of an estimated block map.
use super::call::{Call, NAME, SCORE_BYTES};
use super::choose::{Amount, KeptBits, LongChoice};
use super::order::Orders;
use super::scores::{Cut, Pooled};
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, params, ranges};
use sieve_core::{BlockScores, HeadRule};
use std::ops::Range;

/// Bits of the kept columns and of the kept diagonals of each head.
type Lines = [CudaTensor; 2];

/// The tensors that receive sums of some queries' attention probabilities.
pub(super) struct ProbeSums<'a> {
    /// Query heads whose probabilities one sum adds up.
    pub(super) group: usize,
    /// Factor on each probability before it is added.
    pub(super) factor: f32,
    /// Whether sums by key are added to the values of `columns`, or overwrite them.
    pub(super) adds: bool,
    /// Sums of probabilities by key, f32 `[groups, num_keys]`.
    pub(super) columns: &'a CudaTensor,
    /// Sums by distance between query and key, f32 `[groups, num_keys]`; `None` if only sums by key are needed.
    pub(super) diagonals: Option<&'a CudaTensor>,
}

impl ProbeSums<'_> {
    /// Sums the softmax of causal logits `[heads, rows, num_keys]`, whose first row is the query at `first_position`.
    /// `nan_rows`, i32 `[num_heads]`, counts each head's rows with a NaN logit or an infinite largest one; this adds to
    /// it.
    pub(super) fn add(
        &self,
        logits: &CudaTensor,
        first_position: usize,
        first_head: usize,
        nan_rows: &CudaTensor,
    ) -> Result<(), KernelError> {
        let [heads, rows, num_keys] = logits.dims(NAME, "logits")?;
        let scale = logits.empty_contiguous(&[heads, rows, 2], DType::F32);
        let params = params!(SelectProbeRowsParams { rows, num_keys, first_position, first_head });
        let grid = [rows, heads, 1];
        // SAFETY: reads logits of keys not after each query; writes every scale.
        unsafe { SELECT_PROBE_ROWS.launch(grid, &[logits, &scale, nan_rows], &params) }?;
        let params = params!(SelectProbeSumsParams {
            rows,
            num_keys,
            first_position,
            { group, factor, adds }: self,
        });
        let kinds = 1 + usize::from(self.diagonals.is_some());
        let grid = [num_keys.div_ceil(256), heads / self.group, kinds];
        let diagonals = self.diagonals.unwrap_or(self.columns);
        let tensors = [logits, &scale, self.columns, diagonals];
        // SAFETY: reads logits of keys not after each query; writes every sum.
        unsafe { SELECT_PROBE_SUMS.launch(grid, &tensors, &params) }
    }
}

impl Call<'_> {
    /// Ranges of KV heads whose logits of `rows` queries are in memory at the same time.
    fn groups_at_once(&self, rows: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let s = self.selection;
        let (kv_heads, group) = (s.shape.num_kv_heads, s.shape.group_size());
        let bytes = rows * s.shape.num_keys * DType::F32.size() * group;
        ranges(kv_heads, SCORE_BYTES / bytes.max(1))
    }

    /// Sums by key the attention of the queries at `positions`, over the query heads of each KV head, into `all`, f32
    /// `[num_kv_heads, num_keys]`: added to its values, or instead of them.
    pub(super) fn add_attention(
        &self,
        positions: Range<usize>,
        adds: bool,
        all: &CudaTensor,
        nan_rows: &CudaTensor,
    ) -> Result<(), KernelError> {
        let group = self.selection.shape.group_size();
        for kv_heads in self.groups_at_once(positions.len()) {
            let columns = all.row_range(NAME, "attention", kv_heads.start, kv_heads.len())?;
            let sums = ProbeSums { group, factor: 1.0, adds, columns: &columns, diagonals: None };
            let first_head = kv_heads.start * group;
            let logits = self.logits(positions.clone(), first_head..kv_heads.end * group)?;
            sums.add(&logits, positions.start, first_head, nan_rows)?;
        }
        Ok(())
    }

    /// Sums of the attention of the last `rows` queries by key and by distance, each f32 `[num_heads, num_keys]`.
    fn all_probe_sums(&self, rows: usize, nan_rows: &CudaTensor, factor: f32) -> Result<[CudaTensor; 2], KernelError> {
        let s = self.selection;
        let group = s.shape.group_size();
        let new = || self.new_f32(&[s.shape.num_heads, s.shape.num_keys]);
        let sums = [new(), new()];
        for kv_heads in self.groups_at_once(rows) {
            let heads = kv_heads.start * group..kv_heads.end * group;
            let part = |sums: &CudaTensor| sums.row_range(NAME, "sums", heads.start, heads.len());
            let parts = [part(&sums[0])?, part(&sums[1])?];
            let sums = ProbeSums { group: 1, factor, adds: false, columns: &parts[0], diagonals: Some(&parts[1]) };
            let first_position = s.shape.num_keys - rows;
            let logits = self.logits(first_position..s.shape.num_keys, heads.clone())?;
            sums.add(&logits, first_position, heads.start, nan_rows)?;
        }
        Ok(sums)
    }

    /// Bits of the entries that are chosen among `length` scores of each head.
    fn best_of(
        &self,
        scores: &CudaTensor,
        nan_rows: &CudaTensor,
        length: usize,
        amount: Amount<'_>,
    ) -> Result<CudaTensor, KernelError> {
        let num_heads = self.selection.shape.num_heads;
        let kept = nan_rows.empty_contiguous(&[num_heads, length.div_ceil(u32::BITS as usize)], DType::I32);
        LongChoice::new([scores, &kept, nan_rows], [0, num_heads], length, amount).choose()?;
        Ok(kept)
    }

    /// Marks in `kept` the blocks that the kept columns and diagonals meet, and the blocks of `map`. With `by_token` a
    /// bit of columns and diagonals stands for a token, otherwise for a block.
    fn mark_blocks(
        &self,
        [columns, diagonals]: &Lines,
        map: Option<&CudaTensor>,
        by_token: bool,
        kept: &CudaTensor,
    ) -> Result<(), KernelError> {
        let s = self.selection;
        let params = params!(SelectSlashesParams {
            { num_queries, num_keys }: s.shape,
            { block, offset, query_block }: s.scores,
            by_token,
            has_map: map.is_some(),
        });
        let grid = [s.blocks()[0].div_ceil(4), s.shape.num_heads, 1];
        let tensors = [columns, diagonals, map.unwrap_or(columns), kept];
        // SAFETY: columns and diagonals have a bit for each token or block; writes every word of `kept`.
        unsafe { SELECT_SLASHES.launch(grid, &tensors, &params) }
    }

    /// Marks the blocks that the kept diagonals meet, none of heads without a rule; returns the bits of the kept
    /// columns, which become single columns.
    pub(super) fn lines(&self, [kept, nan_rows]: KeptBits<'_>, rules: &[HeadRule]) -> Result<CudaTensor, KernelError> {
        let s = self.selection;
        let numbers = |rule: &HeadRule| match rule.scores {
            BlockScores::Lines { rows, columns, diagonals } => (rows.min(s.shape.num_queries), [columns, diagonals]),
            _ => unreachable!("the caller matched this variant"),
        };
        let (rows, _) = numbers(&rules[0]);
        let factor = 1.0;
        let sums = self.all_probe_sums(rows, nan_rows, factor)?;
        let words = s.shape.num_keys.div_ceil(u32::BITS as usize);
        let best = |kind: usize| {
            let kept = nan_rows.zeros_contiguous(&[s.shape.num_heads, words], DType::I32);
            for rule in rules {
                let heads = [rule.heads.start, rule.heads.len()];
                let scores = sums[kind].row_range(NAME, "sums", heads[0], heads[1])?;
                let (_, numbers) = numbers(rule);
                let [top, num_first] = numbers[kind];
                let amount = Amount::Count { top, num_first };
                LongChoice::new([&scores, &kept, nan_rows], heads, s.shape.num_keys, amount).choose()?;
            }
            Ok(kept)
        };
        let lines = [best(0)?, best(1)?];
        let (map, by_token) = (None, true);
        self.mark_blocks(&lines, map, by_token, kept)?;
        let [columns, _] = lines;
        Ok(columns)
    }

    /// Marks the blocks that FlexPrefill keeps: of each head the columns and diagonals, or the largest entries of the
    /// block map.
    pub(super) fn patterns(&self, [kept, nan_rows]: KeptBits<'_>) -> Result<(), KernelError> {
        let s = self.selection;
        let BlockScores::Patterns { gamma, tau, blocks: [least, most] } = s.scores.by else {
            unreachable!("the caller matched this variant")
        };
        let rows = s.scores.block.min(s.shape.num_queries);
        let [_, columns] = s.blocks();
        let sums = self.all_probe_sums(rows, nan_rows, 1.0 / rows as f32)?;
        let estimate = self.estimated_blocks(rows)?;
        // Chooses the tokens whose columns or diagonals hold a share of `gamma` of the attention.
        let passes = |sums: &CudaTensor| {
            // A gamma of 1 keeps all: a rounded sum may exceed 1 before the last entry.
            let goal = if gamma < 1.0 { gamma as f32 } else { f32::INFINITY };
            self.best_of(sums, nan_rows, s.shape.num_keys, Amount::Sum { goal, strict: true })
        };
        let tokens = [passes(&sums[0])?, passes(&sums[1])?];
        let new = || self.new_f32(&[s.shape.num_heads, columns]);
        let by_block = [new(), new()];
        // For each head the numbers of columns and of diagonals to keep, then 0 if it keeps the block map, else -1.
        let tops = nan_rows.empty_contiguous(&[3, s.shape.num_heads], DType::I32);
        let params = params!(SelectPatternsParams {
            { num_heads, num_keys }: s.shape,
            block: s.scores.block,
            least,
            most,
            tau: tau.to_bits(),
        });
        let tensors =
            [&sums[0], &sums[1], &estimate, &tokens[0], &tokens[1], &by_block[0], &by_block[1], &tops, nan_rows];
        // SAFETY: sums, bits and estimates have a row for each head; writes all of by_block and tops.
        unsafe { SELECT_PATTERNS.launch([s.shape.num_heads, 1, 1], &tensors, &params) }?;
        let best = |at: usize| {
            let tops = tops.row_range(NAME, "tops", at, 1)?;
            let amount = Amount::OfHead { tops: &tops, num_first: 1, goal: 0.0 };
            self.best_of(&by_block[at], nan_rows, columns, amount)
        };
        let lines = [best(0)?, best(1)?];
        let wanted = tops.row_range(NAME, "tops", 2, 1)?;
        let map = self.map_bits(&wanted, nan_rows, gamma)?;
        let by_token = false;
        self.mark_blocks(&lines, Some(&map), by_token, kept)
    }

    /// The logits of the mean of the last `rows` queries, at most a block of them, with the means of all blocks of
    /// keys: an estimate of the attention on each block, f32 `[num_heads, 1, blocks of keys]`.
    fn estimated_blocks(&self, rows: usize) -> Result<CudaTensor, KernelError> {
        let s = self.selection;
        let [_, columns] = s.blocks();
        let last_queries = Pooled {
            heads: &self.qkv.q,
            at: self.q,
            num_heads: s.shape.num_heads,
            first_token: s.shape.num_keys - rows,
            num_tokens: rows,
            block: s.scores.block,
            offset: 0,
            order: None,
        };
        let (has_variance, order, adds) = (false, None, false);
        let [q, _] = self.pool(&last_queries, has_variance)?;
        let [k, _] = self.pool(&self.pooled_keys(order), has_variance)?;
        let estimate = self.new_f32(&[s.shape.num_heads, 1, columns]);
        let cut = Cut { num_queries: rows, block: s.scores.block, query_block: s.scores.block, offset: 0 };
        self.dot_products(&[q, k], &estimate, cut, 0..s.shape.num_heads, s.scores.softmax_scale, adds)?;
        Ok(estimate)
    }

    /// Bits of the largest entries of the block map, for the heads in `wanted` whose pattern is the block map.
    fn map_bits(&self, wanted: &CudaTensor, nan_rows: &CudaTensor, gamma: f64) -> Result<CudaTensor, KernelError> {
        let s = self.selection;
        let [rows, columns] = s.blocks();
        let length = rows * columns;
        let words = length.div_ceil(u32::BITS as usize);
        let kept = nan_rows.empty_contiguous(&[s.shape.num_heads, words], DType::I32);
        let means = self.means(&Orders::default())?;
        for heads in self.slabs(self.heads(), length * DType::F32.size()) {
            let scores = self.scores_by_means(&means, heads.clone())?;
            let params = params!(SelectSoftmaxParams {
                { num_queries, num_keys }: s.shape,
                { block, offset, query_block }: s.scores,
                first_head: heads.start,
            });
            let grid = [rows, heads.len(), 1];
            let tensors = [&scores, wanted, nan_rows];
            // SAFETY: writes the rows of the scores in place.
            unsafe { SELECT_SOFTMAX.launch(grid, &tensors, &params) }?;
            let goal = if gamma < 1.0 { (gamma * rows as f64) as f32 } else { f32::INFINITY };
            let amount = Amount::OfHead { tops: wanted, num_first: 0, goal };
            LongChoice::new([&scores, &kept, nan_rows], [heads.start, heads.len()], length, amount).choose()?;
        }
        Ok(kept)
    }
}

const SELECT_PROBE_ROWS: SourceKernel = SourceKernel::new("select_probe_rows").threads(256);
const SELECT_PROBE_SUMS: SourceKernel = SourceKernel::new("select_probe_sums").threads(256);
const SELECT_SLASHES: SourceKernel = SourceKernel::new("select_slashes").threads(128);
const SELECT_PATTERNS: SourceKernel = SourceKernel::new("select_patterns").threads(256);
const SELECT_SOFTMAX: SourceKernel = SourceKernel::new("select_softmax").threads(128);
