//! Quest (arXiv:2406.10774): reads the pages of keys with the largest upper bounds of products with the query. It
//! evicts nothing.

use super::cache::{Cache, LayerShape, amount, ascending};
use crate::keep::top_k_forced;
use crate::prelude::*;

settings! {
    /// Settings of the decode method `quest`.
    pub struct QuestConfig {
        /// Page size in tokens.
        pub page: usize = 16,
        /// Tokens that a query reads, or a share of the tokens so far when below 1.
        pub budget: f64 = 1024.0,
        /// First layers of the model, which read all keys.
        pub dense_layers: usize = 2,
    }
}

impl QuestConfig {
    pub(crate) fn check(&self) -> Result<(), SelectError> {
        Rules("quest").positive("page", self.page)?;
        let hint = "give a number of tokens, or a share below 1";
        Rules("quest").above_zero("budget", self.budget, hint)
    }

    /// Pages that the last of `n` tokens reads.
    pub(super) fn num_pages(&self, n: usize) -> usize {
        (amount(self.budget, n) / self.page).max(MIN_PAGES)
    }
}

/// A query reads at least this many pages.
const MIN_PAGES: usize = 3;

/// State of `quest`: minima and maxima per page, KV head and channel.
#[derive(Clone, Debug)]
pub(crate) struct Quest {
    config: QuestConfig,
    /// Smallest key values, `[pages, num_kv_heads, head_dim]`.
    min: Vec<f32>,
    /// Largest key values, laid out as `min`.
    max: Vec<f32>,
    len: usize,
    dense: bool,
}

impl Quest {
    pub(crate) fn new(config: QuestConfig, shape: LayerShape) -> Self {
        Self { dense: shape.layer < config.dense_layers, config, min: Vec::new(), max: Vec::new(), len: 0 }
    }

    /// Updates the minima and maxima with the cache's new keys.
    pub(crate) fn extend(&mut self, cache: &Cache) {
        let width = cache.shape.num_kv_heads * cache.shape.head_dim;
        for key in self.len..cache.len {
            // The key begins a new page.
            if key % self.config.page == 0 {
                self.min.extend(std::iter::repeat_n(f32::INFINITY, width));
                self.max.extend(std::iter::repeat_n(f32::NEG_INFINITY, width));
            }
            let at = self.min.len() - width;
            let k = &cache.keys[key * width..(key + 1) * width];
            for ((min, max), &k) in self.min[at..].iter_mut().zip(&mut self.max[at..]).zip(k) {
                *min = min.min(k);
                *max = max.max(k);
            }
        }
        self.len = cache.len;
    }

    /// Upper bounds of a query head's products with the keys of each page, summed over the heads of the group,
    /// `[pages]`.
    pub(crate) fn page_scores(&self, cache: &Cache, q: &[f32], kv_head: usize) -> Vec<f32> {
        let (d, m) = (cache.shape.head_dim, cache.shape.group_size());
        let width = cache.shape.num_kv_heads * d;
        (0..self.min.len() / width)
            .map(|page| {
                let at = page * width + kv_head * d;
                (kv_head * m..(kv_head + 1) * m)
                    .map(|head| {
                        let q = &q[head * d..(head + 1) * d];
                        let bounds = self.min[at..at + d].iter().zip(&self.max[at..at + d]);
                        q.iter()
                            .zip(bounds)
                            // The largest product that a key between the page's minimum and maximum can have.
                            .map(|(q, (min, max))| (q * min).max(q * max))
                            .sum::<f32>()
                    })
                    .sum()
            })
            .collect()
    }

    /// The keys that the newest token reads, a list for each KV head: those of the best pages and of the last page.
    pub(crate) fn choose(&mut self, cache: &Cache, q: &[f32]) -> Vec<Vec<u32>> {
        self.extend(cache);
        let n = cache.len;
        (0..cache.shape.num_kv_heads)
            .map(|kv_head| {
                if self.dense {
                    return (0..n as u32).collect();
                }
                let scores = self.page_scores(cache, q, kv_head);
                let last = scores.len() - 1;
                let pages = self.config.num_pages(n);
                // Of equal scores the later page is read, so the scores are ranked from the last page on.
                let turned: Vec<f32> = scores.into_iter().rev().collect();
                let kept = top_k_forced(&turned, pages, |at| at == 0).into_iter().map(|at| last - at);
                let tokens = |page: usize| page * self.config.page..((page + 1) * self.config.page).min(n);
                ascending(kept.flat_map(tokens))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vector::dot;
    use sieve_testing::Random;

    #[test]
    fn quest_score_bounds_every_product_in_the_page() {
        let mut random = Random(4);
        let shape = LayerShape::new([2, 2], 12, 5);
        let cache = Cache { shape, keys: random.vector(50 * 24), values: random.vector(50 * 24), len: 50 };
        let mut quest = Quest::new(QuestConfig::default(), shape);
        quest.extend(&cache);
        for _ in 0..20 {
            let q = random.vector(24);
            for h in 0..2 {
                for (page, &bound) in quest.page_scores(&cache, &q, h).iter().enumerate() {
                    for key in page * 16..(page * 16 + 16).min(50) {
                        let product = dot(&q[h * 12..(h + 1) * 12], cache.key(h, key));
                        assert!(product <= bound + 1e-5, "page {page}: {product} above {bound}");
                    }
                }
            }
        }
    }
}
