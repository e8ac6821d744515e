//! InfLLM (arXiv:2402.04617): a local window, the first tokens, and the past blocks whose representative keys have the
//! largest products with the query, read at a fixed distance.

use super::cache::{Cache, LayerShape, ascending};
use super::rope::rotate;
use crate::keep::{falling, top_k};
use crate::pool::for_each_prompt_row;
use crate::prelude::*;
use crate::vector::dot;
use std::ops::Range;

settings! {
    /// Settings of the decode method `infllm`.
    pub struct InfllmConfig {
        /// First tokens that all queries see.
        pub init: usize = 128,
        /// Last tokens a query sees at their true positions, its own included.
        pub local: usize = 4096,
        /// Block size in tokens.
        pub block: usize = 128,
        /// Blocks that a query attends to.
        pub topk: usize = 16,
        /// Keys of a block whose mean represents the block.
        pub repr: usize = 4,
        /// Queries that choose blocks together in `stream` form, so that an earlier query's blocks depend on later
        /// ones; while decoding each query chooses alone. The paper's prefill has 512; with 1 every row depends on
        /// earlier tokens only.
        pub chunk: usize = 1,
        /// Base of the rotary embedding; the model's when not given.
        pub rope_theta: Option<f64> = None,
    }
}

impl InfllmConfig {
    pub(crate) fn check(&self) -> Result<(), SelectError> {
        let rules = Rules("infllm");
        for (key, value) in [("local", self.local), ("block", self.block), ("repr", self.repr), ("chunk", self.chunk)] {
            rules.positive(key, value)?;
        }
        rules.rope_theta(self.rope_theta)
    }
}

/// State of the decode method `infllm` in one layer.
#[derive(Clone, Debug)]
pub(crate) struct Infllm {
    config: InfllmConfig,
    shape: LayerShape,
    rope_theta: f64,
    /// The cache's keys, `[keys, num_kv_heads, head_dim]`, rotated back to position 0.
    unrotated: Vec<f32>,
    /// Attention that each key received while it was in the local window, `[num_kv_heads][keys]`.
    received: Vec<Vec<f32>>,
    /// Representative key of each block, `[blocks, num_kv_heads, head_dim]`.
    representatives: Vec<f32>,
    /// Blocks that the current chunk of queries chose together; `None` while decoding, where each query chooses alone.
    chosen: Option<Vec<usize>>,
}

impl Infllm {
    /// Fails without `rope_theta`: the method rotates keys to other positions.
    pub(crate) fn new(mut config: InfllmConfig, shape: LayerShape) -> Result<Self, SelectError> {
        // Positions are u32; larger settings mean the same, but their sums would overflow.
        for tokens in [&mut config.init, &mut config.local, &mut config.block] {
            *tokens = (*tokens).min(u32::MAX as usize);
        }
        Ok(Self {
            rope_theta: Rules("infllm").need_rope_theta(config.rope_theta)?,
            config,
            shape,
            unrotated: Vec::new(),
            received: vec![Vec::new(); shape.num_kv_heads],
            representatives: Vec::new(),
            chosen: None,
        })
    }

    pub(crate) fn chunk(&self) -> usize {
        self.config.chunk
    }

    /// Sums the attention that each key of the prompt received from the queries whose local window it was in.
    pub(crate) fn prompt(&mut self, call: &Call<'_>) {
        let n = call.shape.num_keys;
        for kv_head in 0..call.shape.num_kv_heads {
            let mut received = vec![0.0_f32; n];
            for_each_prompt_row(call, kv_head, |row, p| {
                let local = (row + 1).saturating_sub(self.config.local);
                let seen = p.iter().enumerate().skip(local);
                seen.for_each(|(key, &p)| received[key] += p);
            });
            self.received[kv_head] = received;
        }
        let (d, heads) = (call.shape.head_dim, call.shape.num_kv_heads);
        for (at, k) in call.k.chunks_exact(d).enumerate() {
            self.unrotated.extend(rotate(k, -((at / heads) as f64), self.rope_theta));
        }
    }

    /// Chooses blocks by the mean of a chunk's queries, whose keys are not in the cache yet. Keys that leave the window
    /// during the chunk form no blocks.
    pub(crate) fn begin_chunk(&mut self, cache: &Cache, q: &[f32]) {
        self.form_blocks(cache.len + 1);
        let q_len = self.shape.num_heads * self.shape.head_dim;
        let mut mean = vec![0.0_f32; q_len];
        let rows = q.len() / q_len;
        for (row, q) in q.chunks_exact(q_len).enumerate() {
            let far = self.at_distance(q, cache.len + row);
            mean.iter_mut().zip(far).for_each(|(mean, x)| *mean += x / rows as f32);
        }
        self.chosen = Some(self.best_blocks(&mean));
    }

    pub(crate) fn end_chunk(&mut self) {
        self.chosen = None;
    }

    /// Attention of the newest token, `[num_heads, head_dim]`. Keys before the local window are read at a distance of
    /// `local` tokens. Writes the keys that were read to `kept`, and adds the attention of local keys to `received`.
    pub(crate) fn step(&mut self, cache: &Cache, q: &[f32], kept: &mut Vec<Vec<u32>>) -> Vec<f32> {
        let num_tokens = cache.len;
        self.add_key(cache);
        let far_q = self.at_distance(q, num_tokens - 1);
        let blocks = match &self.chosen {
            Some(blocks) => blocks.clone(),
            None => {
                self.form_blocks(num_tokens);
                self.best_blocks(&far_q)
            }
        };
        let first_local = num_tokens.saturating_sub(self.config.local);
        let keys = self.keys_read(&blocks, first_local..num_tokens);
        let (d, group_size) = (self.shape.head_dim, self.shape.group_size());
        let mut o = Vec::with_capacity(q.len());
        for head in 0..self.shape.num_heads {
            let (kv_head, of_head) = (head / group_size, head * d..(head + 1) * d);
            let logit = |&key: &u32| {
                let key = key as usize;
                let product = if key >= first_local {
                    dot(&q[of_head.clone()], cache.key(kv_head, key))
                } else {
                    dot(&far_q[of_head.clone()], self.unrotated_key(kv_head, key))
                };
                cache.scale() * product
            };
            let row = cache.weigh(kv_head, keys.iter().map(logit).collect(), &keys);
            for (&key, p) in keys.iter().zip(&row.p).filter(|(key, _)| **key as usize >= first_local) {
                self.received[kv_head][key as usize] += p;
            }
            o.extend(row.o);
        }
        *kept = vec![keys; self.shape.num_kv_heads];
        o
    }

    /// Keeps the newest key without its rotation, which far queries read.
    fn add_key(&mut self, cache: &Cache) {
        let position = cache.len - 1;
        for kv_head in 0..self.shape.num_kv_heads {
            let k = rotate(cache.key(kv_head, position), -(position as f64), self.rope_theta);
            self.unrotated.extend(k);
            self.received[kv_head].push(0.0);
        }
    }

    /// The keys that a token reads, ascending: the first ones, the chosen `blocks`, the keys before the local window
    /// that do not fill a block yet, and the window.
    fn keys_read(&self, blocks: &[usize], local: Range<usize>) -> Vec<u32> {
        let InfllmConfig { init, block, .. } = self.config;
        let tokens_of = |&chosen: &usize| init + chosen * block..init + (chosen + 1) * block;
        let not_in_blocks = (init + self.num_blocks() * block).min(local.start)..local.end;
        ascending((0..init.min(local.start)).chain(blocks.iter().flat_map(tokens_of)).chain(not_in_blocks))
    }

    fn num_blocks(&self) -> usize {
        self.representatives.len() / (self.shape.num_kv_heads * self.shape.head_dim)
    }

    fn unrotated_key(&self, kv_head: usize, key: usize) -> &[f32] {
        let at = (key * self.shape.num_kv_heads + kv_head) * self.shape.head_dim;
        &self.unrotated[at..at + self.shape.head_dim]
    }

    /// A query at `position`, rotated to position `local`: keys at position 0 are then `local` tokens away.
    fn at_distance(&self, q: &[f32], position: usize) -> Vec<f32> {
        let shift = self.config.local as f64 - position as f64;
        q.chunks_exact(self.shape.head_dim).flat_map(|q| rotate(q, shift, self.rope_theta)).collect()
    }

    /// Forms blocks of the keys that have left the local window of the `n`-th token. The mean of the `repr` keys that
    /// received the most attention represents a block.
    fn form_blocks(&mut self, n: usize) {
        let local = n.saturating_sub(self.config.local);
        loop {
            let first = self.config.init + self.num_blocks() * self.config.block;
            let keys = first..first + self.config.block;
            if keys.end > local {
                return;
            }
            for kv_head in 0..self.shape.num_kv_heads {
                let received = &self.received[kv_head][keys.clone()];
                let most: Vec<usize> = falling(received).into_iter().take(self.config.repr).collect();
                let mut mean = vec![0.0_f32; self.shape.head_dim];
                for &at in &most {
                    let key = self.unrotated_key(kv_head, keys.start + at);
                    mean.iter_mut().zip(key).for_each(|(mean, k)| *mean += k / most.len() as f32);
                }
                self.representatives.extend(mean);
            }
        }
    }

    /// The blocks whose representatives have the largest products with queries `[num_heads, head_dim]`, summed over
    /// all heads.
    fn best_blocks(&self, far: &[f32]) -> Vec<usize> {
        let (d, m) = (self.shape.head_dim, self.shape.group_size());
        let scores: Vec<f32> = self
            .representatives
            .chunks_exact(self.shape.num_kv_heads * d)
            .map(|block| {
                let head = |(head, q): (usize, &[f32])| dot(q, &block[head / m * d..(head / m + 1) * d]);
                far.chunks_exact(d).enumerate().map(head).sum()
            })
            .collect();
        top_k(&scores, self.config.topk)
    }
}
