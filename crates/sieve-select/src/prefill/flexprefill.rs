//! A pattern and a budget per head from the attention of the last queries: FlexPrefill (arXiv:2502.20766).

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::keep::{falling, softmax, top_k_forced};
use crate::pool::{block_sums, key_means, last_rows, mean_pool, probe_sums, scores};
use crate::prefill::meanpool::pooled_scores;
use crate::prelude::*;

settings! {
    /// Settings of the prefill method `flexprefill`.
    pub struct FlexprefillConfig {
        /// Tokens of a block, and queries of the probe.
        pub block: usize = 128,
        /// Share of the probe's attention that columns and diagonals must cover.
        pub gamma: f64 = 0.95,
        /// Distance below which the estimated block map is trusted.
        pub tau: f64 = 0.1,
        /// Fewest tokens in the kept columns, and in the kept diagonals.
        pub min_budget: usize = 512,
        /// Most tokens in the kept columns, and in the kept diagonals.
        pub max_budget: Option<usize> = None,
    }
    small
        "flexprefill:block=16,min_budget=16,gamma=0.5",
        "flexprefill:block=16,min_budget=16,gamma=0.5,tau=1,gqa=union";
    everything
        "flexprefill:block=16,gamma=1,min_budget=16,tau=1",
        "flexprefill:block=16,gamma=1,min_budget=16,tau=0";
}

impl PrefillMethod for FlexprefillConfig {
    fn check(&self, gqa: GqaPolicy) -> Result<(), SelectError> {
        let rules = Rules("flexprefill");
        rules.positive("block", self.block)?;
        rules.share("gamma", self.gamma)?;
        rules.share("tau", self.tau)?;
        rules.no_mean(gqa, "gqa=mean is not defined: heads of a group may take different patterns")?;
        match self.max_budget {
            Some(max) if max < self.min_budget => rules.fail(
                format!("max_budget={max} is below min_budget={}", self.min_budget),
                "raise max_budget or lower min_budget",
            ),
            _ => Ok(()),
        }
    }

    /// Each head's tiles by its own pattern; a short prompt is dense.
    fn select(&self, call: &Call<'_>, gqa: GqaPolicy) -> Selected {
        if self.is_short(call.shape.num_keys) {
            return Selected::dense(call.shape);
        }
        let tiles = Tiles::new(call.shape, self.block, self.block);
        let query_aware = AtomicUsize::new(0);
        let mut chosen = gqa::mask(call, tiles, gqa, |heads| {
            // One head: `check` refuses gqa=mean.
            let (list, aware) = self.rows(call, tiles, heads[0])?;
            query_aware.fetch_add(usize::from(aware), Ordering::Relaxed);
            Some(list)
        });
        let aware = query_aware.into_inner();
        let vertical_slash = call.shape.num_heads - chosen.stats.nan_lists - aware;
        chosen.stats.patterns = vec![("query_aware", aware), ("vertical_slash", vertical_slash)];
        chosen
    }

    /// `None` for a short prompt, which is dense.
    fn steps(&self, call: &Call<'_>, _: GqaPolicy) -> Option<BlockSelection> {
        let n = call.shape.num_keys;
        let scores = BlockScores::Patterns {
            gamma: self.gamma,
            tau: self.tau,
            blocks: [self.min_budget / self.block, self.max_budget.map_or(n, |most| most / self.block)],
        };
        // The patterns keep blocks by rules of their own.
        let ignored = KeepBlocks::Mass(1.0);
        (!self.is_short(n)).then(|| BlockSelection::new(call.shape, self.block, scores, ignored))
    }

    fn knob(&self) -> Option<Knob> {
        Some(("gamma", SHARES))
    }
}

impl FlexprefillConfig {
    /// Whether there are so few keys that all are kept.
    fn is_short(&self, num_keys: usize) -> bool {
        num_keys <= (2 * self.block).max(self.min_budget.next_multiple_of(self.block))
    }

    /// Kept tiles of a head, and whether its pattern is query-aware: block means predict the probe's attention well, so
    /// they choose blocks for all queries. `None` on NaN.
    fn rows(&self, call: &Call<'_>, tiles: Tiles, head: usize) -> Option<(KeptRows, bool)> {
        let probe = last_rows(call, self.block);
        let factor = 1.0 / probe.len() as f32;
        let mut sums = probe_sums(call, &[head], probe.clone())?;
        sums.column.iter_mut().chain(&mut sums.diagonal).for_each(|x| *x *= factor);
        let column_blocks = block_sums(&sums.column, self.block);
        let diagonal_blocks = block_sums(&sums.diagonal, self.block);

        let d = call.shape.head_dim;
        let q = mean_pool(std::iter::once(probe.map(|row| call.query(head, row))), d);
        let k = key_means(call, call.kv_head(head), tiles, |key| key);
        let mut estimate = scores(&q, &k, d, call.shape.softmax_scale());
        if !softmax(&mut estimate) {
            return None;
        }
        let is_query_aware = jensen_shannon(&estimate, &column_blocks) < self.tau;
        let num_kept = if is_query_aware {
            [self.min_budget / self.block; 2]
        } else {
            [&sums.column, &sums.diagonal].map(|sums| self.num_blocks(sums))
        };
        let mut kept = slashes(tiles, [&column_blocks, &diagonal_blocks], num_kept);
        if is_query_aware {
            self.add_query_aware(call, tiles, head, &mut kept)?;
        }
        let list = gqa::rows(tiles, |i| (0..kept[i].len()).filter(|&j| kept[i][j]).collect());
        Some((list, is_query_aware))
    }

    /// Number of blocks that hold as many tokens as the largest probabilities that together exceed gamma.
    fn num_blocks(&self, p: &[f32]) -> usize {
        let most = self.max_budget.map_or(usize::MAX, |max| max / self.block);
        if self.gamma >= 1.0 {
            // A rounded sum may exceed 1 before the end.
            return p.len().div_ceil(self.block).min(most);
        }
        let mut sum = 0.0_f32;
        let within = falling(p)
            .into_iter()
            .take_while(|&j| {
                sum += p[j];
                f64::from(sum) <= self.gamma
            })
            .count();
        // `within` counts the probabilities before the one that exceeds gamma.
        let blocks = (within + 1) / self.block + 1;
        blocks.max(self.min_budget / self.block).min(most)
    }

    /// Adds the largest entries of the whole block map until their sum reaches gamma times the number of rows. `None`
    /// on NaN.
    fn add_query_aware(&self, call: &Call<'_>, tiles: Tiles, head: usize, kept: &mut [Vec<bool>]) -> Option<()> {
        let cols = tiles.num_key_tiles();
        let mut map = pooled_scores(call, tiles, &[head]);
        for (i, row) in map.chunks_exact_mut(cols).enumerate() {
            let (admissible, rest) = row.split_at_mut(tiles.admissible(i));
            rest.fill(0.0);
            if !softmax(admissible) {
                return None;
            }
        }
        // A gamma of 1 keeps all entries, whatever rounding makes of their sum.
        let goal = if self.gamma < 1.0 { self.gamma * tiles.num_query_tiles() as f64 } else { f64::INFINITY };
        let mut sum = 0.0_f64;
        for at in falling(&map) {
            if sum >= goal {
                break;
            }
            sum += f64::from(map[at]);
            if let Some(kept) = kept[at / cols].get_mut(at % cols) {
                *kept = true;
            }
        }
        Some(())
    }
}

/// Whether each tile is in one of the best block columns or block diagonals, `[query tiles][admissible key tiles]`, by
/// their `sums`. `numbers` gives how many columns and how many diagonals are kept; column 0 and diagonal 0 are always
/// among them.
fn slashes(tiles: Tiles, sums: [&[f32]; 2], numbers: [usize; 2]) -> Vec<Vec<bool>> {
    let best = |sums: &[f32], number: usize| top_k_forced(sums, number.max(1), |at| at == 0);
    let (columns, diagonals) = (best(sums[0], numbers[0]), best(sums[1], numbers[1]));
    (0..tiles.num_query_tiles())
        .map(|i| {
            let admissible = tiles.admissible(i);
            let mut kept = vec![false; admissible];
            for &j in columns.iter().take_while(|&&j| j < admissible) {
                kept[j] = true;
            }
            for &offset in &diagonals {
                for own in tiles.diagonal(i) {
                    if let Some(j) = own.checked_sub(offset) {
                        kept[j] = true;
                    }
                }
            }
            kept
        })
        .collect()
}

/// Jensen-Shannon distance: the square root of the mean of both divergences from the midpoint, with 0 log 0 = 0.
fn jensen_shannon(p: &[f32], q: &[f32]) -> f64 {
    let half = |x: f32, m: f64| {
        let x = f64::from(x);
        if x > 0.0 { x * (x / m).ln() } else { 0.0 }
    };
    let sum: f64 = p
        .iter()
        .zip(q)
        .map(|(&p, &q)| {
            let m = (f64::from(p) + f64::from(q)) / 2.0;
            half(p, m) + half(q, m)
        })
        .sum();
    (sum / 2.0).max(0.0).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flexprefill_distance_of_equal_and_disjoint_distributions() {
        assert_eq!(jensen_shannon(&[0.25, 0.75, 0.0], &[0.25, 0.75, 0.0]), 0.0);
        let apart = jensen_shannon(&[1.0, 0.0], &[0.0, 1.0]);
        assert!((apart - 2.0_f64.ln().sqrt()).abs() < 1e-12);
    }

    #[test]
    fn flexprefill_budget_counts_tokens_to_pass_gamma() {
        let config = FlexprefillConfig { block: 4, gamma: 0.75, min_budget: 4, ..Default::default() };
        // 0.5 + 0.25 is within gamma 0.75, and a third token exceeds it: 3 tokens fill 0 blocks, and one is added.
        assert_eq!(config.num_blocks(&[0.125, 0.5, 0.125, 0.25]), 1);
        let even = [1.0 / 16.0; 16];
        // 12 tokens are within gamma, and one more exceeds it: 13 / 4 + 1 blocks.
        assert_eq!(config.num_blocks(&even), 4);
        let config = FlexprefillConfig { max_budget: Some(8), ..config };
        assert_eq!(config.num_blocks(&even), 2);
    }
}
