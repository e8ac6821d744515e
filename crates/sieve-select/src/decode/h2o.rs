//! H2O (arXiv:2306.14048): the keys that have received the most attention, and the most recent ones.

use sieve_core::{DmaWindow, HeavyKeys};

use super::cache::{Cache, LayerShape, RowAttention, amount, most_attended};
use crate::pool::for_each_prompt_row;
use crate::prelude::*;

settings! {
    /// Settings of `h2o`. Values below 1 are shares of the prompt (of the tokens so far in `stream` form).
    pub struct H2oConfig {
        /// Keys that stay because they received the most attention.
        pub heavy: f64 = 0.1,
        /// Last keys that stay whatever their sum.
        pub recent: f64 = 0.1,
    }
}

impl H2oConfig {
    /// Refuses a number of heavy or recent keys that is not positive.
    pub(crate) fn check(&self) -> Result<(), SelectError> {
        if self.heavy > 0.0 && self.recent > 0.0 {
            return Ok(());
        }
        Rules("h2o").fail(
            format!("heavy={} and recent={} must be positive", self.heavy, self.recent),
            "give shares below 1 or numbers of tokens",
        )
    }

    /// The keys kept of a prompt of `shape.num_keys` tokens, as device steps; a later token evicts the key with the
    /// least accumulated attention.
    pub(super) fn heavy_keys(&self, shape: CallShape) -> HeavyKeys {
        let n = shape.num_keys;
        let (heavy, recent) = (amount(self.heavy, n), amount(self.recent, n));
        // One slot more than heavy + recent, as the key with the least attention leaves only when the next token comes;
        // that token is recent too.
        let slots = DmaWindow { keep_window_size: heavy + recent + 1, local_window_size: recent + 1 };
        HeavyKeys { slots: Some(slots), ..most_attended(shape, n, [slots.keep_window_size, recent]) }
    }
}

/// State of `h2o`, per KV head: the kept keys, ascending, with the attention they received.
#[derive(Clone, Debug)]
pub(crate) struct H2o {
    config: H2oConfig,
    kept: Vec<Vec<(u32, f32)>>,
    /// The prompt's tokens, which the settings' shares multiply; 0 without a prompt (shares are of the tokens so far).
    prompt_tokens: usize,
}

impl H2o {
    pub(crate) fn new(config: H2oConfig, shape: LayerShape) -> Self {
        Self { config, kept: vec![Vec::new(); shape.num_kv_heads], prompt_tokens: 0 }
    }

    /// Sums the attention that each key received from all rows of the prompt, then evicts.
    pub(crate) fn prompt(&mut self, call: &Call<'_>) {
        let n = call.shape.num_keys;
        self.prompt_tokens = n;
        for kv_head in 0..call.shape.num_kv_heads {
            let mut received = vec![0.0_f32; n];
            for_each_prompt_row(call, kv_head, |_row, p| {
                received.iter_mut().zip(p).for_each(|(sum, &p)| *sum += p);
            });
            self.kept[kv_head] = (0..n as u32).zip(received).collect();
            self.evict(kv_head, n);
        }
    }

    /// The kept keys and the newest one, which has received no attention yet.
    pub(crate) fn choose(&mut self, cache: &Cache) -> Vec<Vec<u32>> {
        let newest = cache.len as u32 - 1;
        for kept in &mut self.kept {
            kept.push((newest, 0.0));
        }
        self.kept.iter().map(|kept| kept.iter().map(|key| key.0).collect()).collect()
    }

    /// Adds the attention of the new token to the kept keys, then evicts.
    pub(crate) fn after(&mut self, cache: &Cache, kept: &[Vec<u32>], rows: &[RowAttention]) {
        let m = cache.shape.group_size();
        for kv_head in 0..kept.len() {
            for row in &rows[kv_head * m..(kv_head + 1) * m] {
                for (key, &p) in self.kept[kv_head].iter_mut().zip(&row.p) {
                    key.1 += p;
                }
            }
            self.evict(kv_head, cache.len);
        }
    }

    /// Evicts the keys beyond `heavy + recent`: of those that are not recent, the keys with the least attention, and of
    /// keys with equal attention the older. `tokens` is the length of the text so far.
    fn evict(&mut self, kv_head: usize, tokens: usize) {
        let whole = if self.prompt_tokens > 0 { self.prompt_tokens } else { tokens };
        // A setting that is a share is a share of `whole`.
        let (heavy, recent) = (amount(self.config.heavy, whole), amount(self.config.recent, whole));
        let kept = &mut self.kept[kv_head];
        let surplus = kept.len().saturating_sub(heavy + recent);
        if surplus == 0 {
            return;
        }
        let num_old = kept.len() - recent;
        let mut order: Vec<usize> = (0..num_old).collect();
        let attention = |at: usize| kept[at].1;
        order.sort_by(|&a, &b| attention(a).total_cmp(&attention(b)).then(a.cmp(&b)));
        let evicted: std::collections::HashSet<u32> = order[..surplus].iter().map(|&at| kept[at].0).collect();
        kept.retain(|key| !evicted.contains(&key.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn h2o_evicts_the_older_of_keys_with_equal_attention() {
        let shape = LayerShape::new([1, 1], 4, 0);
        let config = H2oConfig { heavy: 2.0, recent: 1.0 };
        let mut state = H2o::new(config, shape);
        state.kept[0] = vec![(3, 0.5), (4, 0.25), (6, 0.25), (7, 0.25), (9, 0.0)];
        state.evict(0, 10);
        assert_eq!(state.kept[0], [(3, 0.5), (7, 0.25), (9, 0.0)]);
    }

    #[test]
    fn h2o_with_huge_settings_keeps_all_keys() {
        for [heavy, recent] in [[1e30, 4.0], [4.0, 1e30], [1e30, 1e30]] {
            let config = H2oConfig { heavy, recent };
            let mut state = H2o::new(config.clone(), LayerShape::new([1, 1], 4, 0));
            state.kept[0] = (0..9).map(|key| (key, 0.5)).collect();
            state.evict(0, 9);
            assert_eq!(state.kept[0].len(), 9, "{heavy} {recent}");
            let slots = config.heavy_keys(CallShape::new([1, 9], [1, 1], 4)).slots;
            assert!(slots.is_some_and(|slots| slots.keep_window_size > 9), "{heavy} {recent}");
        }
    }
}
