//! Blocks by the sums of their antidiagonals: XAttention (arXiv:2503.16428).

use std::ops::Range;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sieve_cpu::{Matrix, MatrixMut, Threads, matmul};

use crate::call::{Call, Tiles};
use crate::error::SelectError;
use crate::gqa::{self, GqaPolicy};
use crate::keep::{keep_mass_forced, softmax, sorted};
use crate::mask::{ListRows, SparseMask};
use crate::range::Rules;
use crate::vector::{add, mix};

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

/// Settings of `xattention`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct XattentionConfig {
    /// Tokens of a block.
    pub block: usize,
    /// Side of the cells whose antidiagonals are summed; divides `block`.
    pub stride: usize,
    /// Share of the estimated mass that stays.
    pub tau: f64,
    /// Which pairs are sampled.
    pub mode: SampleMode,
    /// Seed of `mode=random`.
    pub seed: u64,
}

impl Default for XattentionConfig {
    fn default() -> Self {
        Self {
            block: 128,
            stride: 8,
            tau: 0.9,
            mode: SampleMode::Antidiagonal,
            seed: 1,
        }
    }
}

/// Query tiles with the sums of their blocks, `[admissible]`.
type TileSums = Vec<(usize, Vec<f32>)>;

/// Reduced rows handled together: enough for a fast product, few enough that little of it is above the diagonal.
const CHUNK_CELLS: usize = 128;

impl XattentionConfig {
    pub(crate) fn check(&self) -> Result<(), SelectError> {
        Rules("xattention").divides("stride", self.stride, "block", self.block)?;
        Rules("xattention").share("tau", self.tau)
    }

    pub(crate) fn select(&self, call: &Call<'_>, gqa: GqaPolicy) -> SparseMask {
        // Tiles end at multiples of the block, so the first one of a misaligned chunk is short.
        let tiles = Tiles::aligned(call.shape, self.block);
        gqa::mask(call, tiles, gqa, |heads| {
            let scores = self.block_scores(call, tiles, heads)?;
            let rows = scores.into_iter().enumerate().map(|(i, row)| {
                let mut forced = vec![0];
                forced.extend(tiles.diagonal(i));
                sorted(keep_mass_forced(&row, &forced, self.tau))
            });
            Some(ListRows {
                tiles: rows.collect(),
                columns: Vec::new(),
            })
        })
    }

    /// Sums of the cells' softmax per block, `[query tiles][admissible]`, added over heads; `None` on NaN.
    fn block_scores(
        &self,
        call: &Call<'_>,
        tiles: Tiles,
        heads: &[usize],
    ) -> Option<Vec<Vec<f32>>> {
        let s = self.stride;
        let context = call.shape.context();
        let key_cells = self.cells_of_keys(call, heads[0], 0..call.shape.num_keys, |key| key);
        // Cells in absolute positions: the first query cell may reach before the call.
        let first_cell = context / s;
        let num_cells = call.shape.num_keys.div_ceil(s) - first_cell;
        let scale = call.shape.softmax_scale() / s as f32;
        let mut all: Vec<Vec<f32>> = vec![Vec::new(); tiles.num_query_tiles()];
        for &head in heads {
            let query_cells =
                self.cells_of_queries(call, first_cell..first_cell + num_cells, |position| {
                    position
                        .checked_sub(context)
                        .filter(|&row| row < call.shape.num_queries)
                        .map(|row| call.query(head, row))
                });
            let width = s * call.shape.head_dim;
            let chunks: Option<Vec<TileSums>> = (0..num_cells)
                .step_by(CHUNK_CELLS)
                .collect::<Vec<_>>()
                .into_par_iter()
                .map(|start| {
                    let end = (start + CHUNK_CELLS).min(num_cells);
                    let cols = first_cell + end;
                    let mut x = cell_scores(
                        &query_cells[start * width..end * width],
                        &key_cells[..cols * width],
                        width,
                        scale,
                    );
                    let mut sums = TileSums::new();
                    for (r, x) in x.chunks_exact_mut(cols).enumerate() {
                        let cell = first_cell + start + r;
                        let seen = &mut x[..=cell];
                        if !softmax(seen) {
                            return None;
                        }
                        let i = tiles.tile_of_row((cell * s).saturating_sub(context));
                        if sums.last().is_none_or(|last| last.0 != i) {
                            sums.push((i, vec![0.0; tiles.admissible(i)]));
                        }
                        if let Some((_, sum)) = sums.last_mut() {
                            for (sum, cells) in sum.iter_mut().zip(seen.chunks(self.block / s)) {
                                *sum += cells.iter().sum::<f32>();
                            }
                        }
                    }
                    Some(sums)
                })
                .collect();
            for (i, sum) in chunks?.into_iter().flatten() {
                add(&mut all[i], sum);
            }
        }
        Some(all)
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
