//! MOMO (Measure Once, Mask Once: Delta Refined Block Sparse Attention): dense probe rows choose blocks while they
//! stream, and correct the sparse output.

mod topk;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sieve_cpu::{Matrix, MatrixMut, Threads, exp_row, matmul, max_of_row};

use crate::attention::dense_rows_attention;
use crate::call::{Call, Tiles};
use crate::error::SelectError;
use crate::gqa::{self, GqaPolicy};
use crate::keep::{falling, sorted};
use crate::mask::{Correction, CorrectionMode, SparseMask};
use crate::prefill::delta::probe_rows;
use crate::prefill::{Knob, PrefillMethod};
use crate::range::Rules;
use crate::selector::Reads;
use crate::settings::settings;

/// How the best blocks of a probe are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TopK {
    /// A buffer of k.
    Exact,
    /// A tournament tree.
    Tree,
    /// A Gaussian gate.
    Gauss,
    /// A small buffer, then the gate.
    Hybrid,
}

/// What is compared between the probes of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProbeScore {
    /// Log-sum-exp of the block's logits (the paper's).
    Raw,
    /// The same minus that of the row.
    Normalised,
}

settings! {
    /// Settings of `momo`.
    pub struct MomoConfig {
        /// One row in this many is a probe.
        pub gamma: usize = 16,
        /// Tokens of a key block.
        pub beta: usize = 64,
        /// Rows of a query tile.
        pub chi: usize = 128,
        /// Blocks per probe.
        pub k: usize = 128,
        /// Those of them found exactly with `topk=hybrid`.
        pub k_exact: usize = 8,
        /// How they are found.
        pub topk: TopK = TopK::Hybrid,
        /// Blocks per query tile; as many as `k` when not given.
        pub k_trim: Option<usize> = None,
        /// First blocks that always stay.
        pub sink_blocks: usize = 1,
        /// What is compared between probes.
        pub score: ProbeScore = ProbeScore::Raw,
        /// What the probes' dense outputs do.
        pub mode: CorrectionMode = CorrectionMode::Correct,
    }
    small
        "momo:gamma=4,beta=8,chi=16,k=3,k_exact=1,first_dense_layers=0",
        "momo:gamma=32,beta=16,chi=16,k=2,k_exact=1,topk=tree,first_dense_layers=0,gqa=union,score=normalised";
    everything "momo:gamma=4,beta=8,chi=16,k=1000,first_dense_layers=0";
}

/// Probes multiplied at once.
const CHUNK_PROBES: usize = 32;

/// One probe: its dense output and its chosen blocks with their scores.
struct Probe {
    o: Vec<f32>,
    chosen: Vec<(usize, f32)>,
}

impl PrefillMethod for MomoConfig {
    fn check(&self, gqa: GqaPolicy) -> Result<(), SelectError> {
        let rules = Rules("momo");
        for (key, value) in [
            ("gamma", self.gamma),
            ("beta", self.beta),
            ("chi", self.chi),
            ("k", self.k),
        ] {
            rules.positive(key, value)?;
        }
        let mut pair = [("gamma", self.gamma), ("chi", self.chi)];
        pair.sort_by_key(|setting| setting.1);
        let [(small_key, small), (large_key, large)] = pair;
        rules.divides(small_key, small, large_key, large)?;
        if self.topk == TopK::Hybrid && self.k_exact > self.k {
            return rules.fail(
                format!("k_exact={} is more than k={}", self.k_exact, self.k),
                "k counts the exact ones too",
            );
        }
        if gqa == GqaPolicy::Mean {
            return rules.fail(
                "gqa=mean is not defined: probes choose blocks one by one".to_owned(),
                "use gqa=per_query or gqa=union",
            );
        }
        Ok(())
    }

    fn select(&self, call: &Call<'_>, gqa: GqaPolicy) -> SparseMask {
        let tiles = Tiles::new(call.shape, self.chi, self.beta);
        let probes = probe_rows(call, self.gamma);
        let d = call.shape.head_dim;
        let heads: Vec<Option<Vec<Probe>>> = (0..call.shape.num_heads)
            .into_par_iter()
            .map(|head| self.probe_pass(call, tiles, head, &probes))
            .collect();
        let mut mask = gqa::mask(call, tiles, gqa, |list| {
            let found = heads[list[0]].as_ref()?;
            Some(gqa::rows(tiles, |i| self.tile_row(tiles, i, &probes, found)))
        });
        let mut probe_o = vec![f32::NAN; probes.len() * call.shape.num_heads * d];
        for (head, found) in heads.iter().enumerate() {
            for (index, o) in probe_o.chunks_exact_mut(call.shape.num_heads * d).enumerate() {
                if let Some(probe) = found.as_ref().map(|found| &found[index]) {
                    o[head * d..(head + 1) * d].copy_from_slice(&probe.o);
                }
            }
        }
        if heads.iter().any(Option::is_none) {
            // A head with NaN has no probes of its own; the general path writes what dense attention gives.
            probe_o = dense_rows_attention(call, &probes).o;
        }
        mask.correction = Some(Correction {
            mode: self.mode,
            probe_rows: probes.iter().map(|&row| row as i32).collect(),
            probe_o,
        });
        mask
    }

    fn reads(&self) -> Reads {
        Reads::Values
    }

    fn knob(&self) -> Option<Knob> {
        Some(("k", &["2", "4", "8", "16", "32"]))
    }
}

impl MomoConfig {
    /// Blocks a probe chooses among: complete ones between the sink and the last complete block of the tile's first
    /// probe.
    fn stream(&self, tiles: Tiles, probe: usize, probes: &[usize]) -> std::ops::Range<usize> {
        let first = first_probe(tiles, tiles.tile_of_row(probe), probes);
        let complete = (tiles.context() + probes[first] + 1) / self.beta;
        let end = complete.saturating_sub(1);
        self.sink_blocks.min(end)..end
    }

    /// Dense attention of all probes of a head, with their choice of blocks; `None` on NaN.
    fn probe_pass(&self, call: &Call<'_>, tiles: Tiles, head: usize, probes: &[usize]) -> Option<Vec<Probe>> {
        let chunks: Option<Vec<Vec<Probe>>> = probes
            .par_chunks(CHUNK_PROBES)
            .map(|rows| self.probe_chunk(call, tiles, head, rows, probes))
            .collect();
        Some(chunks?.into_iter().flatten().collect())
    }

    fn probe_chunk(
        &self,
        call: &Call<'_>,
        tiles: Tiles,
        head: usize,
        rows: &[usize],
        probes: &[usize],
    ) -> Option<Vec<Probe>> {
        let d = call.shape.head_dim;
        let context = call.shape.context();
        let end = context + rows.last()? + 1;
        let kv_head = call.kv_head(head);
        let q: Vec<f32> = rows
            .iter()
            .flat_map(|&row| call.query(head, row).iter().copied())
            .collect();
        let mut p = vec![0.0; rows.len() * end];
        let (queries, keys) = (Matrix::new(&q, rows.len(), d), call.keys(kv_head, 0..end));
        let scale = call.shape.softmax_scale();
        matmul(
            Threads::One,
            scale,
            queries,
            keys.t(),
            0.0,
            MatrixMut::new(&mut p, rows.len(), end),
        );
        let mut chosen = Vec::new();
        let mut sums = Vec::new();
        for (&row, p) in rows.iter().zip(p.chunks_exact_mut(end)) {
            let (seen, future) = p.split_at_mut(context + row + 1);
            future.fill(0.0);
            // Per block: the maximum, and exponentials relative to it. Their sum gives the block's score on the way.
            let mut maxima = Vec::new();
            let mut scores = Vec::new();
            for block in seen.chunks_mut(self.beta) {
                let max = max_of_row(block);
                if max.is_nan() || max == f32::INFINITY {
                    return None;
                }
                let finite = max.max(f32::MIN);
                let sum = exp_row(block, finite);
                maxima.push(finite);
                scores.push(if max == f32::NEG_INFINITY { max } else { max + sum.ln() });
            }
            let max = max_of_row(&maxima);
            let mut total = 0.0;
            for ((block, &block_max), &score) in seen.chunks_mut(self.beta).zip(&maxima).zip(&scores) {
                let factor = (block_max - max).exp();
                block.iter_mut().for_each(|x| *x *= factor);
                total += (score - max).exp();
            }
            sums.push(total);
            let stream = self.stream(tiles, row, probes);
            let lse = match self.score {
                ProbeScore::Raw => 0.0,
                ProbeScore::Normalised => max + total.ln(),
            };
            let candidates = &scores[stream.clone()];
            let best = self.best(candidates);
            chosen.push(
                best.into_iter()
                    .map(|j| (stream.start + j, candidates[j] - lse))
                    .collect(),
            );
        }
        let mut o = vec![0.0; rows.len() * d];
        let (weights, values) = (Matrix::new(&p, rows.len(), end), call.values(kv_head, 0..end));
        matmul(
            Threads::One,
            1.0,
            weights,
            values,
            0.0,
            MatrixMut::new(&mut o, rows.len(), d),
        );
        let outputs = o.chunks_exact(d).zip(sums).zip(chosen);
        Some(
            outputs
                .map(|((o, sum), chosen)| Probe {
                    o: o.iter().map(|x| x / sum).collect(),
                    chosen,
                })
                .collect(),
        )
    }

    fn best(&self, scores: &[f32]) -> Vec<usize> {
        if scores.len() <= self.k {
            return (0..scores.len()).collect();
        }
        match self.topk {
            TopK::Exact => topk::exact(scores, self.k),
            TopK::Tree => topk::tree(scores, self.k),
            TopK::Gauss => topk::gauss(scores, self.k),
            TopK::Hybrid => topk::hybrid(scores, self.k, self.k_exact),
        }
    }

    /// Union of the choices of a tile's probes, trimmed by mean score (algorithm 2), with sink and local blocks.
    fn tile_row(&self, tiles: Tiles, i: usize, probes: &[usize], found: &[Probe]) -> Vec<usize> {
        let blocks = tiles.admissible(i);
        let first = first_probe(tiles, i, probes);
        let rows = tiles.rows(i);
        let mut sum = vec![0.0_f32; blocks];
        let mut votes = vec![0_u32; blocks];
        for (probe, found) in probes.iter().zip(found).skip(first) {
            // The first one may stand before the tile: it then serves this tile alone.
            if *probe >= rows.end {
                break;
            }
            for &(j, score) in &found.chosen {
                sum[j] += score;
                votes[j] += 1;
            }
        }
        let chosen: Vec<usize> = (0..blocks).filter(|&j| votes[j] > 0).collect();
        let mean: Vec<f32> = chosen.iter().map(|&j| sum[j] / votes[j] as f32).collect();
        let mut kept: Vec<usize> = falling(&mean)
            .into_iter()
            .take(self.k_trim.unwrap_or(self.k))
            .map(|at| chosen[at])
            .collect();
        kept.extend(0..self.sink_blocks.min(blocks));
        let complete = (tiles.context() + probes[first] + 1) / self.beta;
        kept.extend(complete.saturating_sub(1)..blocks);
        sorted(kept).into_iter().map(|j| j as usize).collect()
    }
}

/// The first probe inside a tile, or the last one before it.
fn first_probe(tiles: Tiles, i: usize, probes: &[usize]) -> usize {
    let rows = tiles.rows(i);
    let inside = probes.partition_point(|&row| row < rows.start);
    if probes.get(inside).is_some_and(|&row| row < rows.end) {
        inside
    } else {
        inside.saturating_sub(1)
    }
}
