//! Blocks by the sums of their antidiagonals: XAttention (arXiv:2503.16428).

use std::ops::Range;
use std::path::Path;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sieve_cpu::{Matrix, MatrixMut, Threads, exp_row, matmul, max_of_row};

use crate::call::{Call, Tiles};
use crate::error::{SelectError, read_json};
use crate::gqa::{self, GqaPolicy};
use crate::keep::{keep_mass_forced, sorted};
use crate::mask::{ListRows, SparseMask};
use crate::prefill::{Knob, PrefillMethod, SHARES};
use crate::range::Rules;
use crate::settings::settings;
use crate::vector::{add, mix, sum};

/// Which pairs of a stride-by-stride cell are sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SampleMode {
    /// The antidiagonal.
    Antidiagonal,
    /// The main diagonal.
    Slash,
    /// A fixed random order of the queries.
    Random,
}

settings! {
    /// Settings of `xattention`.
    pub struct XattentionConfig {
        /// Tokens of a block.
        pub block: usize = 128,
        /// Side of the cells whose antidiagonals are summed; divides `block`.
        pub stride: usize = 8,
        /// Share of the estimated mass that stays.
        pub tau: f64 = 0.9,
        /// File with a share for each layer and query head in place of `tau`, a JSON list of lists; empty: none.
        pub taus: String = String::new(),
        /// What it holds, `[layers][heads]`.
        #[serde(skip)]
        pub head_taus: Vec<Vec<f64>> = Vec::new(),
        /// Divides the estimated logits, beside the stride.
        pub norm: f64 = 1.0,
        /// Which pairs are sampled.
        pub mode: SampleMode = SampleMode::Antidiagonal,
        /// Seed of `mode=random`.
        pub seed: u64 = 1,
    }
    small
        "xattention:block=16,stride=4,tau=0.5",
        "xattention:block=16,stride=4,tau=0.5,mode=random,gqa=mean",
        "xattention:block=16,stride=8,tau=0.4,mode=slash,norm=0.5,gqa=union";
    everything "xattention:tau=1,block=16,stride=4";
}

/// Query tiles with the sums of their blocks, `[admissible]`.
type TileSums = Vec<(usize, Vec<f32>)>;

/// Reduced rows handled together: enough for a fast product, few enough that little of it is above the diagonal.
const CHUNK_CELLS: usize = 256;

impl PrefillMethod for XattentionConfig {
    fn check(&self, gqa: GqaPolicy) -> Result<(), SelectError> {
        let rules = Rules("xattention");
        rules.divides("stride", self.stride, "block", self.block)?;
        rules.share("tau", self.tau)?;
        if !(self.norm > 0.0 && self.norm.is_finite()) {
            return rules.fail(
                format!("norm={} is not positive", self.norm),
                "the method's own is 1; smaller values sharpen the estimate",
            );
        }
        for &tau in self.head_taus.iter().flatten() {
            rules.share("a threshold of taus", tau)?;
        }
        if gqa == GqaPolicy::Mean && !self.head_taus.is_empty() {
            return rules.fail(
                "taus gives the heads of a group thresholds of their own, gqa=mean one list".to_owned(),
                "use gqa=per_query or gqa=union",
            );
        }
        Ok(())
    }

    fn select(&self, call: &Call<'_>, gqa: GqaPolicy) -> SparseMask {
        // Tiles end at multiples of the block, so the first one of a misaligned chunk is short.
        let tiles = Tiles::aligned(call.shape, self.block);
        let of_heads = self.block_scores(call, tiles);
        gqa::mask(call, tiles, gqa, |heads| {
            let mut scores: Vec<Vec<f32>> = vec![Vec::new(); tiles.num_query_tiles()];
            for &head in heads {
                for (sum, row) in scores.iter_mut().zip(of_heads[head].as_ref()?) {
                    add(sum, row.clone());
                }
            }
            let tau = self.tau_of(call.layer, heads[0]);
            let rows = scores.into_iter().enumerate().map(|(i, row)| {
                let mut forced = vec![0];
                forced.extend(tiles.diagonal(i));
                sorted(keep_mass_forced(&row, &forced, tau))
            });
            Some(ListRows::of_tiles(rows.collect()))
        })
    }

    fn knob(&self) -> Option<Knob> {
        // Thresholds of a file take the place of tau.
        self.head_taus.is_empty().then_some(("tau", SHARES))
    }
}

impl XattentionConfig {
    /// Reads the thresholds, when a file is named.
    pub(crate) fn load(&mut self) -> Result<(), SelectError> {
        let hint = "the file is a JSON list with one list per layer: [[0.9, 0.85, …], …]";
        if !self.taus.is_empty() {
            self.head_taus = read_json(Path::new(&self.taus), hint)?;
        }
        Ok(())
    }

    fn tau_of(&self, layer: usize, head: usize) -> f64 {
        let layer = self.head_taus.get(layer);
        layer.and_then(|taus| taus.get(head).copied()).unwrap_or(self.tau)
    }

    /// Sums of the cells' softmax per block, `[num_heads][query tiles][admissible]`; `None` for heads with NaN.
    fn block_scores(&self, call: &Call<'_>, tiles: Tiles) -> Vec<Option<Vec<Vec<f32>>>> {
        let (s, context) = (self.stride, call.shape.context());
        let keys: Vec<Vec<f32>> = (0..call.shape.num_kv_heads)
            .into_par_iter()
            .map(|kv_head| {
                let head = call.group(kv_head).start;
                self.cells_of_keys(call, head, 0..call.shape.num_keys, |key| key)
            })
            .collect();
        // Cells in absolute positions: the first query cell may reach before the call.
        let first_cell = context / s;
        let num_cells = call.shape.num_keys.div_ceil(s) - first_cell;
        // Late rows have more keys: they start first.
        let tasks: Vec<(usize, usize)> = (0..num_cells)
            .step_by(CHUNK_CELLS)
            .rev()
            .flat_map(|start| (0..keys.len()).map(move |kv_head| (kv_head, start)))
            .collect();
        let done: Vec<Vec<(usize, Option<TileSums>)>> = tasks
            .into_par_iter()
            .with_max_len(1)
            .map(|(kv_head, start)| {
                let end = (start + CHUNK_CELLS).min(num_cells);
                self.chunk_scores(
                    call,
                    tiles,
                    kv_head,
                    &keys[kv_head],
                    first_cell + start..first_cell + end,
                )
            })
            .collect();
        let mut all = vec![Some(vec![Vec::new(); tiles.num_query_tiles()]); call.shape.num_heads];
        // Back in the order of the rows, so that sums do not depend on the order of the tasks.
        for (head, sums) in done.into_iter().rev().flatten() {
            match (sums, &mut all[head]) {
                (Some(sums), Some(tiles)) => sums.into_iter().for_each(|(i, sum)| add(&mut tiles[i], sum)),
                (None, scores) => *scores = None,
                (Some(_), None) => {}
            }
        }
        all
    }

    /// The same for some cells of queries of the heads of a group, whose products share one pass over the keys.
    fn chunk_scores(
        &self,
        call: &Call<'_>,
        tiles: Tiles,
        kv_head: usize,
        keys: &[f32],
        cells: Range<usize>,
    ) -> Vec<(usize, Option<TileSums>)> {
        let (s, context) = (self.stride, call.shape.context());
        let (width, cols) = (s * call.shape.head_dim, cells.end);
        let queries: Vec<f32> = call
            .group(kv_head)
            .flat_map(|head| {
                self.cells_of_queries(call, cells.clone(), |position| {
                    position
                        .checked_sub(context)
                        .filter(|&row| row < call.shape.num_queries)
                        .map(|row| call.query(head, row))
                })
            })
            .collect();
        let scale = call.shape.softmax_scale() / (s as f64 * self.norm) as f32;
        let mut x = cell_scores(&queries, &keys[..cols * width], width, scale);
        let of_head = |x: &mut [f32]| {
            let mut sums = TileSums::new();
            for (cell, x) in cells.clone().zip(x.chunks_exact_mut(cols)) {
                let i = tiles.tile_of_row((cell * s).saturating_sub(context));
                if sums.last().is_none_or(|last| last.0 != i) {
                    sums.push((i, vec![0.0; tiles.admissible(i)]));
                }
                let sum = &mut sums.last_mut()?.1;
                add_block_softmax(&mut x[..=cell], self.block / s, sum)?;
            }
            Some(sums)
        };
        let heads = call.group(kv_head).zip(x.chunks_exact_mut(cells.len() * cols));
        heads.map(|(head, x)| (head, of_head(x))).collect()
    }

    /// Keys of a cell side by side, `[cells, stride * head_dim]`; slot `i` holds key `order(i)`; missing keys are zero.
    pub(crate) fn cells_of_keys(
        &self,
        call: &Call<'_>,
        head: usize,
        slots: Range<usize>,
        order: impl Fn(usize) -> usize,
    ) -> Vec<f32> {
        let (s, d) = (self.stride, call.shape.head_dim);
        let kv_head = call.kv_head(head);
        let mut cells = vec![0.0; slots.len().div_ceil(s) * s * d];
        for (slot, cell) in slots.zip(cells.chunks_exact_mut(d)) {
            cell.copy_from_slice(call.key(kv_head, order(slot)));
        }
        cells
    }

    /// Queries of a cell side by side in the sampled order, `[cells, stride * head_dim]`; missing queries are zero.
    pub(crate) fn cells_of_queries<'q>(
        &self,
        call: &Call<'_>,
        cells: Range<usize>,
        query: impl Fn(usize) -> Option<&'q [f32]>,
    ) -> Vec<f32> {
        let (s, d) = (self.stride, call.shape.head_dim);
        let order = self.order();
        let mut out = vec![0.0; cells.len() * s * d];
        for (cell, out) in cells.zip(out.chunks_exact_mut(s * d)) {
            for (&c, out) in order.iter().zip(out.chunks_exact_mut(d)) {
                if let Some(q) = query(cell * s + c) {
                    out.copy_from_slice(q);
                }
            }
        }
        out
    }

    /// Which query of a cell meets its keys 0, 1, ….
    fn order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.stride).collect();
        match self.mode {
            SampleMode::Antidiagonal => order.reverse(),
            SampleMode::Slash => {}
            SampleMode::Random => {
                let mut state = self.seed;
                for i in (1..order.len()).rev() {
                    state = mix(state);
                    order.swap(i, (state % (i as u64 + 1)) as usize);
                }
            }
        }
        order
    }
}

/// Adds the softmax of a row of cells to sums per block; `None` on NaN. The row is used up.
pub(crate) fn add_block_softmax(row: &mut [f32], cells_per_block: usize, sums: &mut [f32]) -> Option<()> {
    let max = max_of_row(row);
    if max == f32::NEG_INFINITY {
        return Some(());
    }
    if !max.is_finite() {
        return None;
    }
    let factor = 1.0 / exp_row(row, max);
    for (total, cells) in sums.iter_mut().zip(row.chunks(cells_per_block)) {
        *total += factor * sum(cells);
    }
    Some(())
}

/// Products of cells, `[query cells, key cells]`.
pub(crate) fn cell_scores(q: &[f32], k: &[f32], width: usize, scale: f32) -> Vec<f32> {
    let (rows, cols) = (q.len() / width, k.len() / width);
    let mut x = vec![0.0; rows * cols];
    matmul(
        Threads::One,
        scale,
        Matrix::new(q, rows, width),
        Matrix::new(k, cols, width).t(),
        0.0,
        MatrixMut::new(&mut x, rows, cols),
    );
    x
}
