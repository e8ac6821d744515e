//! The largest logits, after computing them all: an upper bound for other methods at the same budget, no faster than
//! dense.

use super::cache::{Cache, amount, ascending};
use crate::keep::descending;
use crate::prelude::*;

settings! {
    /// Settings of the decode method `exact_top`.
    pub struct ExactTopConfig {
        /// Keys that each query head reads, or a share of the keys so far when below 1.
        pub k: f64 = 1024.0,
    }
}

impl ExactTopConfig {
    pub(crate) fn check(&self) -> Result<(), SelectError> {
        let hint = "give a number of keys, or a share below 1";
        Rules("exact_top").above_zero("k", self.k, hint)
    }
}

/// The kept keys per query head; of equal logits the later key is kept.
pub(crate) fn choose(config: &ExactTopConfig, cache: &Cache, q: &[f32]) -> Vec<Vec<u32>> {
    let (d, m) = (cache.shape.head_dim, cache.shape.group_size());
    let all: Vec<u32> = (0..cache.len as u32).collect();
    (0..cache.shape.num_heads)
        .map(|head| {
            let logits = cache.logits(head / m, &q[head * d..(head + 1) * d], &all);
            let mut order: Vec<usize> = (0..cache.len).collect();
            order.sort_by(|&a, &b| descending(logits[a], logits[b]).then(b.cmp(&a)));
            ascending(order.into_iter().take(amount(config.k, cache.len)))
        })
        .collect()
}
