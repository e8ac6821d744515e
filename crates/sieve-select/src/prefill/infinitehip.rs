//! InfiniteHiP (arXiv:2502.08910): chunks of keys ranked by one representative, found by halving, in three stages.
//!
//! In decode a stage is recomputed only every `refresh` steps; see [`crate::decode::infinitehip`].

use sieve_cpu::max_of_row;

use crate::keep::top_k;
use crate::pool::scores;
use crate::prelude::*;

settings! {
    /// Settings of `infinitehip`. Stage `i` samples every `stride_i`-th query of a block and ranks chunks of `chunk_i`
    /// keys.
    pub struct InfinitehipConfig {
        /// Query rows of a block.
        pub block: usize = 64,
        /// One query in this many is sampled in stage 1, which ranks all keys but sink and window.
        pub stride_1: usize = 4,
        /// Keys of a chunk that stage 1 ranks.
        pub chunk_1: usize = 256,
        /// Tokens that stage 1 passes on to stage 2.
        pub budget_2: usize = 32_768,
        /// One query in this many is sampled in stage 2.
        pub stride_2: usize = 4,
        /// Keys of a chunk that stage 2 ranks.
        pub chunk_2: usize = 32,
        /// Tokens that stage 2 passes on to stage 3.
        pub budget_3: usize = 8192,
        /// One query in this many is sampled in stage 3.
        pub stride_3: usize = 1,
        /// Keys of a chunk, stage 3; the tile of the mask.
        pub chunk_3: usize = 8,
        /// Tokens that the last stage keeps, beside sink and window.
        pub budget: usize = 2048,
        /// First tokens of the text that always stay.
        pub sink: usize = 256,
        /// Last tokens before each query that stay.
        pub window: usize = 1024,
        /// A prefill call with fewer keys is dense. So are the early chunks of a long prompt: there a prompt in chunks
        /// differs from the whole prompt.
        pub prefill_dense_below: usize = 8192,
        /// In decode, steps between two runs of stage 1.
        pub refresh_1: usize = 32,
        /// In decode, steps between two runs of stage 2; divides `refresh_1`.
        pub refresh_2: usize = 16,
        /// In decode, steps between two runs of stage 3; divides `refresh_2`.
        pub refresh_3: usize = 8,
    }
    small
        "infinitehip:block=8,stride_1=2,chunk_1=16,budget_2=64,stride_2=2,chunk_2=8,budget_3=32,chunk_3=4,budget=16,\
     sink=8,window=16,prefill_dense_below=0,first_dense_layers=0";
    everything
        "infinitehip:budget=100000,budget_2=100000,budget_3=100000,window=8,sink=8,prefill_dense_below=0,\
     first_dense_layers=0";
}

/// A chunk: keys `[start, end)`.
pub(crate) type Chunk = (usize, usize);

/// One of the three stages that rank chunks of keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stage {
    /// One query in this many is sampled.
    pub(crate) stride: usize,
    /// Number of chunks that the stage keeps.
    pub(crate) num_kept: usize,
    /// Keys of the chunks into which the kept chunks are then cut.
    pub(crate) next_chunk: usize,
    /// Decoding steps between two runs of this stage.
    pub(crate) refresh: usize,
}

impl PrefillMethod for InfinitehipConfig {
    /// Sizes are positive, and each stage's chunk and interval divide those of the stage before it.
    fn check(&self, gqa: GqaPolicy) -> Result<(), SelectError> {
        let rules = Rules("infinitehip");
        for (key, value) in [
            ("block", self.block),
            ("stride_1", self.stride_1),
            ("stride_2", self.stride_2),
            ("stride_3", self.stride_3),
            ("window", self.window),
        ] {
            rules.positive(key, value)?;
        }
        rules.divides("chunk_2", self.chunk_2, "chunk_1", self.chunk_1)?;
        rules.divides("chunk_3", self.chunk_3, "chunk_2", self.chunk_2)?;
        rules.divides("refresh_2", self.refresh_2, "refresh_1", self.refresh_1)?;
        rules.divides("refresh_3", self.refresh_3, "refresh_2", self.refresh_2)?;
        if self.sink > 0 {
            rules.divides("chunk_3", self.chunk_3, "sink", self.sink)?;
        }
        rules.no_mean(gqa, "gqa=mean is not defined: chunks are ranked by single keys")
    }

    fn select(&self, call: &Call<'_>, gqa: GqaPolicy) -> Selected {
        if call.shape.num_keys < self.prefill_dense_below {
            return Selected::dense(call.shape);
        }
        let tiles = Tiles::new(call.shape, self.block, self.chunk_3);
        gqa::mask(call, tiles, gqa, |heads| gqa::rows_or_nan(tiles, |i| self.row(call, tiles, heads[0], i)))
    }

    fn knob(&self) -> Option<Knob> {
        Some(("budget", &["64", "128", "256", "512"]))
    }
}

impl InfinitehipConfig {
    /// The three stages. Each keeps the chunks that fill the token budget of the next one.
    pub(crate) fn stages(&self) -> [Stage; 3] {
        [
            Stage {
                stride: self.stride_1,
                num_kept: self.budget_2 / self.chunk_1,
                next_chunk: self.chunk_2,
                refresh: self.refresh_1,
            },
            Stage {
                stride: self.stride_2,
                num_kept: self.budget_3 / self.chunk_2,
                next_chunk: self.chunk_3,
                refresh: self.refresh_2,
            },
            Stage {
                stride: self.stride_3,
                num_kept: self.budget / self.chunk_3,
                next_chunk: self.chunk_3,
                refresh: self.refresh_3,
            },
        ]
    }

    /// Keys that compete for a query at a position: those between sink and window, in whole chunks of the last stage,
    /// so that sink, chunks and window do not overlap.
    pub(crate) fn candidates(&self, position: usize) -> Chunk {
        let high = (position + 1).saturating_sub(self.window) / self.chunk_3 * self.chunk_3;
        (self.sink, high.max(self.sink))
    }

    /// Cuts the candidate keys into chunks for stage 1.
    pub(crate) fn first_chunks(&self, candidates: Chunk) -> Vec<Chunk> {
        cut(std::iter::once(candidates), self.chunk_1)
    }

    /// Key tiles (of `chunk_3` keys) that a query block keeps: sink, window and chosen chunks; `None` on NaN.
    fn row(&self, call: &Call<'_>, tiles: Tiles, head: usize, i: usize) -> Option<Vec<usize>> {
        let (sink_end, window_start) = self.candidates(tiles.first(i));
        let admissible = tiles.admissible(i);
        let mut kept: Vec<usize> = (0..(self.sink / self.chunk_3).min(admissible)).collect();
        kept.extend(window_start / self.chunk_3..admissible);
        let mut chunks = self.first_chunks((sink_end, window_start));
        for stage in self.stages() {
            let queries: Vec<f32> =
                tiles.rows(i).step_by(stage.stride).flat_map(|row| call.query(head, row).iter().copied()).collect();
            chunks = stage.run(&chunks, |keys| best_products(call, head, &queries, keys))?;
        }
        kept.extend(chunks.into_iter().map(|(start, _)| start / self.chunk_3));
        Some(kept)
    }
}

impl Stage {
    /// The best chunks by the scores of their representatives, cut for the next stage; `None` on NaN.
    pub(crate) fn run(self, chunks: &[Chunk], scores_of: impl Fn(&[usize]) -> Vec<f32>) -> Option<Vec<Chunk>> {
        if chunks.len() <= self.num_kept {
            return Some(cut(chunks.iter().copied(), self.next_chunk));
        }
        let found = representatives(chunks, scores_of);
        if found.iter().any(|x| x.is_nan()) {
            return None;
        }
        let best = top_k(&found, self.num_kept);
        Some(cut(best.into_iter().map(|at| chunks[at]), self.next_chunk))
    }
}

/// Cuts ranges of keys into chunks.
fn cut(ranges: impl Iterator<Item = Chunk>, chunk: usize) -> Vec<Chunk> {
    ranges.flat_map(|(start, end)| (start..end).step_by(chunk).map(move |at| (at, (at + chunk).min(end)))).collect()
}

/// The score of each chunk's representative. A chunk is halved until one key is left; of two halves stays the one whose
/// first key has the larger score, the first half on a tie. All chunks are halved at once, so that a step is one GEMM.
fn representatives(chunks: &[Chunk], scores_of: impl Fn(&[usize]) -> Vec<f32>) -> Vec<f32> {
    let firsts: Vec<usize> = chunks.iter().map(|chunk| chunk.0).collect();
    let mut best = scores_of(&firsts);
    let mut chunks = chunks.to_vec();
    loop {
        let halved: Vec<(usize, usize)> = chunks
            .iter()
            .enumerate()
            .filter(|(_, (start, end))| end - start > 1)
            .map(|(at, (start, end))| (at, start + (end - start).div_ceil(2)))
            .collect();
        if halved.is_empty() {
            return best;
        }
        let middles: Vec<usize> = halved.iter().map(|half| half.1).collect();
        for ((at, middle), score) in halved.into_iter().zip(scores_of(&middles)) {
            if score > best[at] || score.is_nan() {
                (chunks[at].0, best[at]) = (middle, score);
            } else {
                chunks[at].1 = middle;
            }
        }
    }
}

/// The largest product of each key with any of the queries `[queries, head_dim]`; NaN if any product is NaN.
fn best_products(call: &Call<'_>, head: usize, queries: &[f32], keys: &[usize]) -> Vec<f32> {
    let (d, kv_head) = (call.shape.head_dim, call.kv_head(head));
    let keys: Vec<f32> = keys.iter().flat_map(|&key| call.key(kv_head, key).iter().copied()).collect();
    let num_queries = queries.len() / d;
    let products = scores(&keys, queries, d, 1.0);
    products.chunks_exact(num_queries).map(max_of_row).collect()
}
