//! Blocks by the sums of their antidiagonals: XAttention (arXiv:2503.16428).

use std::ops::Range;
use std::path::Path;

use sieve_cpu::{exp_row, max_of_row};

use crate::error::read_json;
use crate::keep::keep_mass_forced;
use crate::pool::scores;
use crate::prelude::*;
use crate::vector::{mix, sum};

choices! {
    /// Which pairs of a stride-by-stride cell are sampled.
    pub enum SampleMode {
        /// The cell's antidiagonal, as in the paper.
        Antidiagonal,
        /// The cell's main diagonal.
        Slash,
        /// A fixed random order of the queries.
        Random,
    }
}

settings! {
    /// Settings of the prefill method `xattention`.
    pub struct XattentionConfig {
        /// Block size in tokens.
        pub block: usize = 128,
        /// Tokens on a side of the squares of scores whose antidiagonals are summed; divides `block`.
        pub stride: usize = 8,
        /// Share of the estimated mass that stays.
        pub tau: f64 = 0.9,
        /// File with a share for each layer and query head in place of `tau`, a JSON list of lists; empty: none.
        pub taus: String = String::new(),
        /// The content of that file, `[layers][query heads]`.
        #[serde(skip)]
        pub head_taus: Vec<Vec<f64>> = Vec::new(),
        /// The estimated logits are divided by this and by the stride.
        pub norm: f64 = 1.0,
        /// Which pairs of each stride-by-stride cell are sampled.
        pub mode: SampleMode = SampleMode::Antidiagonal,
        /// Random seed with `mode=random`.
        pub seed: u64 = 1,
    }
    small
        "xattention:block=16,stride=4,tau=0.5",
        "xattention:block=16,stride=4,tau=0.5,mode=random,gqa=mean",
        "xattention:block=16,stride=8,tau=0.4,mode=slash,norm=0.5,gqa=union";
    everything "xattention:tau=1,block=16,stride=4";
}

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
        if self.head_taus.is_empty() {
            return Ok(());
        }
        rules.no_mean(gqa, "taus gives the heads of a group thresholds of their own, gqa=mean one list")
    }

    /// Thresholds from a file must be those of this model: a list for each layer, a number for each head.
    fn check_call(&self, call: &Call<'_>) -> Result<(), SelectError> {
        let heads = call.shape.num_heads;
        let knows_depth = call.num_layers > 0;
        let (layers, found) = (self.head_taus.len(), self.head_taus.get(call.layer).map_or(0, Vec::len));
        if layers == 0 || found == heads && (!knows_depth || layers == call.num_layers) {
            return Ok(());
        }
        let of_model = if knows_depth { format!("{} layers", call.num_layers) } else { "a model".to_owned() };
        let layer = call.layer;
        Rules("xattention").fail(
            format!(
                "taus has {layers} layers and {found} heads in layer {layer}, for {of_model} of {heads} query heads"
            ),
            "give the thresholds of this model: a list for each layer, with a number for each query head",
        )
    }

    fn select(&self, call: &Call<'_>, gqa: GqaPolicy) -> Selected {
        // Tiles end at multiples of the block, so the first one of a misaligned chunk is short.
        let tiles = Tiles::aligned(call.shape, self.block);
        gqa::mask(call, tiles, gqa, |heads| {
            let keys = self.cells_of_keys(call, heads[0], |key| key);
            let tau = self.tau_of(call.layer, heads[0]);
            gqa::rows_or_nan(tiles, |i| {
                let mut mass = vec![0.0; tiles.admissible(i)];
                for &head in heads {
                    self.add_mass(call, tiles.rows(i), head, &keys, &mut mass)?;
                }
                let mut forced = vec![0];
                forced.extend(tiles.diagonal(i));
                Some(keep_mass_forced(&mass, &forced, tau))
            })
        })
    }

    /// `None` with a tau for each head or with random samples: only the host selects by these.
    fn steps(&self, call: &Call<'_>, _: GqaPolicy) -> Option<BlockSelection> {
        let cells = BlockScores::Cells {
            stride: self.stride,
            reversed: self.mode == SampleMode::Antidiagonal,
            norm: self.norm,
        };
        let mut selection = BlockSelection::new(call.shape, self.block, cells, KeepBlocks::Mass(self.tau));
        // As in `select`: blocks of queries end at multiples of the block, and the first block and the diagonal are
        // kept first and count towards tau.
        selection.scores.offset = Tiles::aligned(call.shape, self.block).query_offset;
        selection.keep.counts_own = true;
        (self.head_taus.is_empty() && self.mode != SampleMode::Random).then_some(selection)
    }

    fn knob(&self) -> Option<Knob> {
        // With thresholds from a file tau has no effect.
        self.head_taus.is_empty().then_some(("tau", SHARES))
    }
}

/// Reads a file of thresholds, `[layers][query heads]`.
pub(crate) fn read_taus(path: &Path) -> Result<Vec<Vec<f64>>, SelectError> {
    read_json(path, "the file is a JSON list with one list per layer: [[0.9, 0.85, …], …]")
}

impl XattentionConfig {
    fn tau_of(&self, layer: usize, head: usize) -> f64 {
        if self.head_taus.is_empty() { self.tau } else { self.head_taus[layer][head] }
    }

    /// Adds the softmax over cells, for some rows of a head, to the mass of each block; `None` on NaN.
    fn add_mass(&self, call: &Call<'_>, rows: Range<usize>, head: usize, keys: &[f32], mass: &mut [f32]) -> Option<()> {
        let (s, context) = (self.stride, call.shape.context());
        // Cells are counted from position 0, so the first cell of a call may begin before the call.
        let cells = (context + rows.start) / s..(context + rows.end).div_ceil(s);
        let queries = self.cells_of_queries(call, cells.clone(), |position| {
            let row = position.checked_sub(context)?;
            (row < call.shape.num_queries).then(|| call.query(head, row))
        });
        let (width, cols) = (s * call.shape.head_dim, cells.end);
        let scale = call.shape.softmax_scale() / (s as f64 * self.norm) as f32;
        let mut x = scores(&queries, &keys[..cols * width], width, scale);
        for (cell, x) in cells.zip(x.chunks_exact_mut(cols)) {
            add_block_softmax(&mut x[..=cell], self.block / s, mass)?;
        }
        Some(())
    }

    /// The keys of each cell, concatenated, `[cells, stride * head_dim]`. Slot `i` holds key `order(i)`; missing keys
    /// are zero.
    pub(crate) fn cells_of_keys(&self, call: &Call<'_>, head: usize, order: impl Fn(usize) -> usize) -> Vec<f32> {
        let (s, d, kv_head) = (self.stride, call.shape.head_dim, call.kv_head(head));
        let mut cells = vec![0.0; call.shape.num_keys.div_ceil(s) * s * d];
        for (slot, cell) in (0..call.shape.num_keys).zip(cells.chunks_exact_mut(d)) {
            cell.copy_from_slice(call.key(kv_head, order(slot)));
        }
        cells
    }

    /// The queries of each cell, concatenated in the sampled order, `[cells, stride * head_dim]`; missing queries are
    /// zero.
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

    /// The query of a cell that is paired with the cell's key 0, 1, ….
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

/// Adds the softmax of a row of cell logits to the sum of each block; `None` on NaN. Overwrites the row.
pub(crate) fn add_block_softmax(row: &mut [f32], cells_per_block: usize, sums: &mut [f32]) -> Option<()> {
    let max = max_of_row(row);
    // Without a finite logit no block gets a share.
    if max == f32::NEG_INFINITY {
        return Some(());
    }
    if !max.is_finite() {
        return None;
    }
    let row_sum = exp_row(row, max);
    let factor = 1.0 / row_sum;
    for (total, cells) in sums.iter_mut().zip(row.chunks(cells_per_block)) {
        *total += factor * sum(cells);
    }
    Some(())
}
