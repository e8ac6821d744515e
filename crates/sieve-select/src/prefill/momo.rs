//! MOMO (Measure Once, Mask Once: Delta Refined Block Sparse Attention): dense probe rows choose blocks while they
//! stream, and correct the sparse output.

mod topk;

use rayon::prelude::*;
use sieve_cpu::{Matrix, exp_row, max_of_row};

use crate::keep::{falling, top_k};
use crate::mask::CorrectionMode;
use crate::pool::logits;
use crate::prefill::delta::{correction, probe_rows};
use crate::prelude::*;

choices! {
    /// How the best blocks of a probe are found.
    pub enum TopK {
        /// A sorted buffer of the best k blocks.
        Exact,
        /// A tournament tree, which finds the same blocks. Here the code of `Exact` finds them.
        Tree,
        /// A Gaussian gate: keeps a block whose score is likely among the best of the stream, k at most.
        Gauss,
        /// A buffer for the `k_exact` best, then the gate for the rest.
        Hybrid,
    }

    /// What is compared between the probes of a tile.
    pub enum ProbeScore {
        /// Log-sum-exp of the block's logits (the paper's).
        Raw,
        /// Log-sum-exp of the block's logits minus the log-sum-exp of the row.
        Normalised,
    }
}

settings! {
    /// Settings of the prefill method `momo`.
    pub struct MomoConfig {
        /// Distance between two probe rows.
        pub gamma: usize = 16,
        /// Size of a key block, in tokens.
        pub beta: usize = 64,
        /// Query rows of a tile.
        pub chi: usize = 128,
        /// Blocks that each probe keeps.
        pub k: usize = 128,
        /// With `topk=hybrid`: how many of the `k` blocks are found exactly.
        pub k_exact: usize = 8,
        /// Algorithm that finds the best blocks of a probe.
        pub topk: TopK = TopK::Hybrid,
        /// Blocks per query tile; as many as `k` when not given.
        pub k_trim: Option<usize> = None,
        /// First blocks of the text that always stay.
        pub sink_blocks: usize = 1,
        /// The block score that is compared between probes.
        pub score: ProbeScore = ProbeScore::Raw,
        /// How the probes' dense outputs are used.
        pub mode: CorrectionMode = CorrectionMode::Correct,
    }
    small
        "momo:gamma=4,beta=8,chi=16,k=3,k_exact=1,first_dense_layers=0",
        "momo:gamma=32,beta=16,chi=16,k=2,k_exact=1,topk=tree,first_dense_layers=0,gqa=union,score=normalised";
    everything "momo:gamma=4,beta=8,chi=16,k=1000,first_dense_layers=0";
}

/// Probes whose logits are computed at once.
const CHUNK_PROBES: usize = 32;

/// The blocks that a probe chose, with their scores.
type Chosen = Vec<(usize, f32)>;

/// Most blocks that a device can find exactly for a probe (`k_exact`).
const MOST_EXACT: usize = 128;

impl PrefillMethod for MomoConfig {
    fn check(&self, gqa: GqaPolicy) -> Result<(), SelectError> {
        let rules = Rules("momo");
        for (key, value) in [("gamma", self.gamma), ("beta", self.beta), ("chi", self.chi), ("k", self.k)] {
            rules.positive(key, value)?;
        }
        // The smaller of the two must divide the larger.
        let mut pair = [("gamma", self.gamma), ("chi", self.chi)];
        pair.sort_by_key(|setting| setting.1);
        let [(small_key, small), (large_key, large)] = pair;
        rules.divides(small_key, small, large_key, large)?;
        if self.topk == TopK::Hybrid && self.k_exact > self.k {
            return rules
                .fail(format!("k_exact={} is more than k={}", self.k_exact, self.k), "k counts the exact ones too");
        }
        rules.no_mean(gqa, "gqa=mean is not defined: probes choose blocks one by one")
    }

    /// The blocks that probe rows choose, and the probes' dense outputs as a correction.
    fn select(&self, call: &Call<'_>, gqa: GqaPolicy) -> Selected {
        let tiles = Tiles::new(call.shape, self.chi, self.beta);
        let probes = probe_rows(call.shape, self.gamma);
        let mut chosen = gqa::mask(call, tiles, gqa, |heads| {
            let chunks = probes.par_chunks(CHUNK_PROBES);
            let of_chunks: Option<Vec<Vec<Chosen>>> =
                chunks.map(|rows| self.choices(call, tiles, heads[0], rows, &probes)).collect();
            let of_probes = of_chunks?.concat();
            Some(gqa::rows(tiles, |i| self.tile_row(tiles, i, &probes, &of_probes)))
        });
        chosen.correction = Some(correction(call, &probes, self.mode));
        chosen
    }

    /// `None` for settings and shapes that the kernels do not take.
    fn steps(&self, call: &Call<'_>, _: GqaPolicy) -> Option<BlockSelection> {
        let num_exact = match self.topk {
            TopK::Hybrid => self.k_exact,
            TopK::Gauss => 0,
            TopK::Exact | TopK::Tree => self.k,
        };
        // What the kernels support.
        let fits = self.score == ProbeScore::Raw
            && num_exact <= MOST_EXACT
            && call.shape.context().is_multiple_of(self.gamma)
            && self.chi.is_multiple_of(self.gamma)
            && self.beta.is_power_of_two()
            && self.beta <= 128
            && call.shape.head_dim.is_multiple_of(64);
        let probes = BlockScores::Probes { gamma: self.gamma, chosen: [self.k, num_exact] };
        let keep = KeepBlocks::Top(self.k_trim.unwrap_or(self.k));
        let mut selection = BlockSelection::new(call.shape, self.beta, probes, keep);
        selection.scores.query_block = self.chi;
        // Keeps the last block that is complete at the tile's first row, and all later blocks.
        selection.keep.local_tokens = self.beta - 1;
        selection.keep.first_tiles = self.sink_blocks;
        fits.then_some(selection)
    }

    fn reads(&self) -> Reads {
        Reads::Values
    }

    fn knob(&self) -> Option<Knob> {
        Some(("k", &["2", "4", "8", "16", "32"]))
    }
}

impl MomoConfig {
    /// Blocks that a probe chooses from: those after the sink and before the last block that is complete at the first
    /// probe of the probe's tile.
    fn stream(&self, tiles: Tiles, probe: usize, probes: &[usize]) -> std::ops::Range<usize> {
        let first = first_probe(tiles, tiles.tile_of_row(probe), probes);
        let complete = (tiles.context() + probes[first] + 1) / self.beta;
        let end = complete.saturating_sub(1);
        self.sink_blocks.min(end)..end
    }

    /// The blocks that the probes in `rows` choose for a head, by the log-sum-exp of their logits in each block; `None`
    /// on NaN. `probes` are all probes of the call.
    fn choices(
        &self,
        call: &Call<'_>,
        tiles: Tiles,
        head: usize,
        rows: &[usize],
        probes: &[usize],
    ) -> Option<Vec<Chosen>> {
        let (d, context) = (call.shape.head_dim, call.shape.context());
        let end = context + rows.last()? + 1;
        let q: Vec<f32> = rows.iter().flat_map(|&row| call.query(head, row).iter().copied()).collect();
        let mut x = logits(call, head, Matrix::new(&q, rows.len(), d), end);
        let choice = |(&row, x): (&usize, &mut [f32])| {
            let blocks = x[..=context + row].chunks_mut(self.beta);
            let scores: Option<Vec<f32>> = blocks.map(log_sum_exp).collect();
            let (scores, stream) = (scores?, self.stream(tiles, row, probes));
            let subtracted = match self.score {
                ProbeScore::Raw => 0.0,
                ProbeScore::Normalised => log_sum_exp(&mut scores.clone())?,
            };
            let candidates = &scores[stream.clone()];
            let best = self.best(candidates);
            Some(best.into_iter().map(|j| (stream.start + j, candidates[j] - subtracted)).collect())
        };
        rows.iter().zip(x.chunks_exact_mut(end)).map(choice).collect()
    }

    /// The `k` blocks that a probe chooses by their scores, ascending.
    fn best(&self, scores: &[f32]) -> Vec<usize> {
        if scores.len() <= self.k {
            return (0..scores.len()).collect();
        }
        match self.topk {
            TopK::Exact | TopK::Tree => top_k(scores, self.k),
            TopK::Gauss => topk::hybrid(scores, self.k, 0),
            TopK::Hybrid => topk::hybrid(scores, self.k, self.k_exact),
        }
    }

    /// The key blocks of query tile `i`: the union of the blocks that its probes chose (`of_probes`, in the order of
    /// `probes`), trimmed by mean score (algorithm 2), with sink and local blocks.
    fn tile_row(&self, tiles: Tiles, i: usize, probes: &[usize], of_probes: &[Chosen]) -> Vec<usize> {
        let blocks = tiles.admissible(i);
        let first = first_probe(tiles, i, probes);
        let rows = tiles.rows(i);
        let mut sum = vec![0.0_f32; blocks];
        let mut votes = vec![0_u32; blocks];
        for (probe, choices) in probes.iter().zip(of_probes).skip(first) {
            // The first probe may lie before the tile, which then has no probe of its own.
            if *probe >= rows.end {
                break;
            }
            for &(j, score) in choices {
                sum[j] += score;
                votes[j] += 1;
            }
        }
        let chosen: Vec<usize> = (0..blocks).filter(|&j| votes[j] > 0).collect();
        let mean: Vec<f32> = chosen.iter().map(|&j| sum[j] / votes[j] as f32).collect();
        let mut kept: Vec<usize> =
            falling(&mean).into_iter().take(self.k_trim.unwrap_or(self.k)).map(|at| chosen[at]).collect();
        kept.extend(0..self.sink_blocks.min(blocks));
        // From the last block that is complete at the first probe to the diagonal.
        let complete = (tiles.context() + probes[first] + 1) / self.beta;
        kept.extend(complete.saturating_sub(1)..blocks);
        kept
    }
}

/// Index of the first probe inside a tile, or of the last one before it.
fn first_probe(tiles: Tiles, i: usize, probes: &[usize]) -> usize {
    let rows = tiles.rows(i);
    let inside = probes.partition_point(|&row| row < rows.start);
    if probes.get(inside).is_some_and(|&row| row < rows.end) { inside } else { inside.saturating_sub(1) }
}

/// Log-sum-exp of a row of logits, which is overwritten; `None` if one is NaN or +inf.
fn log_sum_exp(x: &mut [f32]) -> Option<f32> {
    let max = max_of_row(x);
    if max.is_nan() || max == f32::INFINITY {
        return None;
    }
    // Of a row of -inf, -inf minus -inf would be NaN.
    let sum = exp_row(x, max.max(f32::MIN));
    Some(if max == f32::NEG_INFINITY { max } else { max + sum.ln() })
}
