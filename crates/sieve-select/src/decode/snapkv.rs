//! SnapKV (arXiv:2404.14469): at the end of a prompt, keeps the keys that its last queries attend to most, after
//! smoothing over neighbouring keys.

use sieve_core::HeavyKeys;

use super::cache::{Cache, LayerShape, ascending, most_attended};
use crate::keep::top_k;
use crate::pool::{causal_probabilities, last_rows};
use crate::prelude::*;

choices! {
    /// How the votes for neighbouring keys are smoothed.
    pub enum Pool {
        /// Mean; divides by the kernel also at the ends.
        Avg,
        /// The largest vote in the smoothing window.
        Max,
    }
}

settings! {
    /// Settings of the decode method `snapkv`.
    pub struct SnapkvConfig {
        /// Last queries that vote, and last keys that stay.
        pub window: usize = 32,
        /// Keys that stay in the cache, window included.
        pub capacity: usize = 2048,
        /// Keys in a smoothing window; odd.
        pub kernel: usize = 5,
        /// How votes of neighbouring keys are smoothed.
        pub pool: Pool = Pool::Avg,
    }
}

impl SnapkvConfig {
    /// Refuses a capacity without room beside the window, and an even width of the smoothing window, which has no
    /// middle.
    pub(crate) fn check(&self) -> Result<(), SelectError> {
        let rules = Rules("snapkv");
        rules.positive("window", self.window)?;
        if self.capacity <= self.window {
            return rules.fail(
                format!("capacity={} leaves no room besides window={}", self.capacity, self.window),
                "capacity counts the window too; make it larger",
            );
        }
        if self.kernel % 2 == 1 {
            return Ok(());
        }
        rules.fail(format!("kernel={} is even", self.kernel), "give an odd width")
    }

    /// The selection of the keys kept of a prompt of `shape.num_keys` tokens as device steps.
    pub(super) fn heavy_keys(&self, shape: CallShape) -> HeavyKeys {
        // The last `window` queries vote, and the last `window` keys stay.
        HeavyKeys {
            width: self.kernel,
            by_largest: self.pool == Pool::Max,
            ..most_attended(shape, self.window, [self.capacity, self.window])
        }
    }
}

/// State of `snapkv`, per KV head: the kept keys; and the last queries, for the `stream` form.
#[derive(Clone, Debug)]
pub(crate) struct Snapkv {
    config: SnapkvConfig,
    shape: LayerShape,
    kept: Vec<Vec<u32>>,
    queries: Vec<Vec<f32>>,
    /// Whether a prompt was given: the method acts at its end and never again.
    acted: bool,
}

impl Snapkv {
    pub(crate) fn new(config: SnapkvConfig, shape: LayerShape) -> Self {
        Self { config, shape, kept: vec![Vec::new(); shape.num_kv_heads], queries: Vec::new(), acted: false }
    }

    /// Chooses the keys of a prompt that stay, by the votes of its last queries. Heads with a NaN do not vote; a prompt
    /// within the capacity keeps all keys.
    pub(crate) fn prompt(&mut self, call: &Call<'_>) {
        self.acted = true;
        let n = call.shape.num_keys;
        for kv_head in 0..call.shape.num_kv_heads {
            self.kept[kv_head] = (0..n as u32).collect();
            if n <= self.config.capacity {
                continue;
            }
            let earlier = n - self.config.window;
            let mut votes = vec![0.0_f32; earlier];
            for head in call.group(kv_head) {
                let rows = last_rows(call, self.config.window);
                if let Some(p) = causal_probabilities(call, head, rows) {
                    for row in p.chunks_exact(n) {
                        votes.iter_mut().zip(row).for_each(|(sum, &p)| *sum += p);
                    }
                }
            }
            self.keep(kv_head, &votes);
        }
    }

    pub(crate) fn choose(&mut self, cache: &Cache) -> Vec<Vec<u32>> {
        for kept in &mut self.kept {
            kept.push(cache.len as u32 - 1);
        }
        self.kept.clone()
    }

    /// The `stream` form (our interpretation, since the method acts at the end of a prompt and a stream has none): it
    /// acts whenever the kept keys exceed the capacity by a window.
    pub(crate) fn after(&mut self, cache: &Cache, q: &[f32]) {
        if self.acted {
            return;
        }
        self.queries.push(q.to_vec());
        if self.queries.len() > self.config.window {
            self.queries.remove(0);
        }
        if self.kept[0].len() < self.config.capacity + self.config.window || self.queries.len() < self.config.window {
            return;
        }
        let (d, m) = (self.shape.head_dim, self.shape.group_size());
        for kv_head in 0..self.kept.len() {
            // The last `window` keys stay; the queries vote on the earlier ones.
            let earlier = self.kept[kv_head].len() - self.config.window;
            let mut votes = vec![0.0_f32; earlier];
            for (index, q) in self.queries.iter().enumerate() {
                // A query sees the keys up to its own.
                let list = &self.kept[kv_head][..earlier + index + 1];
                for head in kv_head * m..(kv_head + 1) * m {
                    let row = cache.attend(head, &q[head * d..(head + 1) * d], list);
                    votes.iter_mut().zip(&row.p).for_each(|(sum, &p)| *sum += p);
                }
            }
            self.keep(kv_head, &votes);
        }
    }

    /// Keeps the keys with the most smoothed votes, and the window.
    fn keep(&mut self, kv_head: usize, votes: &[f32]) {
        let best = top_k(&self.smooth(votes), self.config.capacity - self.config.window);
        let kept = &self.kept[kv_head];
        let window = kept.len() - self.config.window..kept.len();
        self.kept[kv_head] = ascending(best.into_iter().chain(window).map(|at| kept[at] as usize));
    }

    /// Pools votes over `kernel` neighbouring keys, stride 1.
    pub(crate) fn smooth(&self, votes: &[f32]) -> Vec<f32> {
        let half = self.config.kernel / 2;
        (0..votes.len())
            .map(|at| {
                let near = &votes[at.saturating_sub(half)..(at + half + 1).min(votes.len())];
                match self.config.pool {
                    Pool::Avg => near.iter().sum::<f32>() / self.config.kernel as f32,
                    Pool::Max => near.iter().copied().fold(f32::NEG_INFINITY, f32::max),
                }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapkv_smoothing_at_the_ends() {
        let shape = LayerShape::new([1, 1], 4, 0);
        let smooth = |pool: Pool| {
            let config = SnapkvConfig { kernel: 3, pool, ..SnapkvConfig::default() };
            Snapkv::new(config, shape).smooth(&[-3.0, -6.0, 9.0, -12.0])
        };
        // At the ends the mean counts missing keys as zero; the maximum leaves them out.
        assert_eq!(smooth(Pool::Avg), [-3.0, 0.0, -3.0, -1.0]);
        assert_eq!(smooth(Pool::Max), [-3.0, 9.0, 9.0, 9.0]);
    }
}
