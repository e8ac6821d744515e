//! InfiniteHiP (arXiv:2502.08910) while decoding: the three stages of the prefill method for one query, each recomputed
//! only every `refresh` steps.
//!
//! A stage that is not recomputed keeps its last result, and later stages choose from it. Our interpretation: keys stay
//! in the window until the first stage has seen them, so that every key is reachable between refreshes.

use super::cache::{Cache, LayerShape, ascending};
use crate::prefill::infinitehip::{Chunk, InfinitehipConfig};
use crate::prelude::*;
use crate::vector::dot;

/// Decode state of `infinitehip` in one layer.
#[derive(Clone, Debug)]
pub(crate) struct Infinitehip {
    config: InfinitehipConfig,
    /// Whether all heads of a group read the keys that any of them chose.
    union: bool,
    steps: usize,
    /// One past the last key that the first stage has ranked.
    end: usize,
    /// Ranges of keys that each stage kept, `[num_heads][stages]`.
    chunks: Vec<[Vec<Chunk>; 3]>,
    /// Heads that read all keys until their next choice, because a score was NaN.
    dense: Vec<bool>,
}

impl Infinitehip {
    /// The state before the first token, at which every stage chooses.
    pub(crate) fn new(config: InfinitehipConfig, gqa: GqaPolicy, shape: LayerShape) -> Self {
        let heads = shape.num_heads;
        Self {
            config,
            union: gqa == GqaPolicy::Union,
            steps: 0,
            end: 0,
            chunks: vec![Default::default(); heads],
            dense: vec![false; heads],
        }
    }

    /// The keys that the newest token reads: a list for each query head, or with `gqa=union` for each KV head. A stage
    /// chooses anew every `refresh` tokens and keeps its chunks in between.
    pub(crate) fn choose(&mut self, cache: &Cache, q: &[f32]) -> Vec<Vec<u32>> {
        let position = cache.len - 1;
        let stages = self.config.stages();
        let due: Vec<bool> = stages.iter().map(|stage| self.steps.is_multiple_of(stage.refresh)).collect();
        if due[0] {
            // The first stage ranks the keys from the sink to here; later keys are in the window.
            (_, self.end) = self.config.candidates(position);
        }
        self.steps += 1;
        let first = self.config.first_chunks((self.config.sink, self.end));
        let (d, m) = (cache.shape.head_dim, cache.shape.group_size());
        for (head, chunks) in self.chunks.iter_mut().enumerate() {
            let query = &q[head * d..(head + 1) * d];
            let scores_of = |keys: &[usize]| -> Vec<f32> {
                let keys = keys.iter();
                keys.map(|&key| dot(query, cache.key(head / m, key))).collect()
            };
            if due.contains(&true) {
                self.dense[head] = false;
            }
            for (at, stage) in stages.into_iter().enumerate().filter(|(at, _)| due[*at]) {
                let from = if at == 0 { &first } else { &chunks[at - 1] };
                let kept = stage.run(from, scores_of);
                // NaN scores choose nothing: the head reads all keys.
                self.dense[head] |= kept.is_none();
                chunks[at] = kept.unwrap_or_default();
            }
        }
        let lists: Vec<Vec<u32>> = (0..self.chunks.len()).map(|head| self.list(head, cache.len)).collect();
        if !self.union {
            return lists;
        }
        let all = |group: &[Vec<u32>]| ascending(group.iter().flatten().map(|&key| key as usize));
        lists.chunks(m).map(all).collect()
    }

    /// The keys of a head: sink, chunks of the last stage, and all keys after `end`; every key after a NaN.
    fn list(&self, head: usize, len: usize) -> Vec<u32> {
        if self.dense[head] {
            return (0..len as u32).collect();
        }
        let chosen = self.chunks[head][2].iter().flat_map(|&(start, end)| start..end);
        ascending((0..self.config.sink.min(len)).chain(chosen).chain(self.end..len))
    }
}
