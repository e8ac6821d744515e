//! Suggests learning rate, batch size and steps for a model and a token budget, by Step Law (arXiv:2503.04715).

use serde::Serialize;
use sieve_core::Recipe;

use crate::Plan;
use crate::context_parallel::RowShare;

/// Default budget: tokens per parameter without the embedding (arXiv:2203.15556, table 3).
const TOKENS_PER_PARAMETER: u64 = 20;

/// Suggested settings for a new run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Suggestion {
    /// Number of tokens to train on.
    pub num_tokens: u64,
    /// Training FLOPs of the run.
    pub total_flops: f64,
    /// Suggested learning rate.
    pub lr: f64,
    /// Rows of a step, of the first stage: a multiple of its `local_batch_size` and of the plan's processes.
    pub global_batch_size: usize,
    /// Steps of the run, all stages together.
    pub steps: usize,
    /// Steps and rows of a step of each `[[stage]]`; empty without stages.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<[usize; 2]>,
    /// A fifth of the steps as warm-up, where the recipe has more warm-up steps than `steps`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_steps: Option<usize>,
}

impl Suggestion {
    /// A suggestion for the model of `plan` on `num_tokens` tokens; `None` takes `TOKENS_PER_PARAMETER` per
    /// parameter.
    ///
    /// DMA's training follows Step Law (arXiv:2508.02124, section 5.1). The suggested rates are within 20 % of that
    /// paper's table 4. Batches are within 16 % up to 680M parameters; at 1.7B the table has 1M tokens per step, the
    /// law 0.66M.
    pub fn new(plan: &Plan, recipe: &Recipe, num_tokens: Option<u64>) -> Self {
        let num_tokens = num_tokens.unwrap_or(TOKENS_PER_PARAMETER * plan.num_non_embedding);
        let total_flops = plan.total_flops / plan.num_tokens.max(1) as f64 * num_tokens as f64;
        let (lr, tokens_per_step) = step_law(plan.num_non_embedding as f64, num_tokens as f64);
        let ranks = plan.ranks.map_or(1, |together| together.ranks.size);
        let row_groups = RowShare::of(recipe).groups(ranks);
        let stages = recipe.stages().into_iter().map(|stage| {
            let section = stage.section;
            let rows = section.local_batch_size * row_groups;
            let times = (tokens_per_step / (rows * section.seq_len) as f64).round().max(1.0);
            let rows = times as usize * rows;
            // Each stage keeps its share of the tokens.
            let own = section.steps * section.global_batch_size * section.seq_len;
            let tokens = u128::from(num_tokens) * own as u128;
            let tokens = tokens.div_ceil(u128::from(plan.num_tokens.max(1)));
            [tokens.div_ceil((rows * section.seq_len) as u128).max(1) as usize, rows]
        });
        let stages = stages.collect::<Vec<_>>();
        let steps: usize = stages.iter().map(|[steps, _]| steps).sum();
        Self {
            num_tokens,
            total_flops,
            lr,
            global_batch_size: stages[0][1],
            steps,
            warmup_steps: (recipe.lr_scheduler.warmup_steps > steps).then_some(steps / 5),
            stages: if recipe.stage.is_empty() { Vec::new() } else { stages },
        }
    }

    /// The suggestion as `--set` flags.
    pub fn overrides(&self) -> String {
        let mut sets = format!("--set optimizer.lr={:.1e}", self.lr);
        if self.stages.is_empty() {
            sets += &format!(" --set training.global_batch_size={}", self.global_batch_size);
        }
        for (number, [steps, rows]) in (1..).zip(&self.stages) {
            sets += &format!(" --set stage.{number}.steps={steps} --set stage.{number}.global_batch_size={rows}");
        }
        sets += &format!(" --set training.steps={}", self.steps);
        let warmup = self.warmup_steps;
        sets + &warmup.map_or(String::new(), |steps| format!(" --set lr_scheduler.warmup_steps={steps}"))
    }
}

/// (learning rate, tokens per step) for N parameters without the embedding and D tokens: 1.79 N^-0.713 D^0.307 and
/// 0.58 D^0.571 (arXiv:2503.04715: dense and mixture-of-experts models with AdamW and a final learning rate of 1e-5).
fn step_law(num_parameters: f64, num_tokens: f64) -> (f64, f64) {
    let lr = 1.79 * num_parameters.powf(-0.713) * num_tokens.powf(0.307);
    (lr, 0.58 * num_tokens.powf(0.571))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Ranks, Target, plan, plan_of_ranks};

    #[test]
    fn a_suggestion_follows_the_law_and_can_be_set() {
        let text = include_str!("../../../recipes/mha_80m.toml");
        let recipe = Recipe::load(text, "mha_80m", &[]).expect("shipped");
        let target = Target::Cpu { flops_per_second: None, memory_bytes: 1 << 40 };
        let planned = plan(&recipe, 50_304, &target).expect("a plan");
        let usual = Suggestion::new(&planned, &recipe, None);
        assert_eq!(usual.num_tokens, 20 * planned.num_non_embedding);
        // 1.7B tokens of 85M parameters and their output are a little above 1e18 FLOPs.
        assert!((1e18..2e18).contains(&usual.total_flops), "{usual:?}");
        // More tokens: a higher rate, larger steps.
        let long = Suggestion::new(&planned, &recipe, Some(100 * usual.num_tokens));
        assert!(long.lr > usual.lr && long.global_batch_size > usual.global_batch_size);
        for suggestion in [usual, long] {
            let sets = suggestion.overrides().replace("--set ", "");
            let sets = sets.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            let set = Recipe::load(text, "mha_80m", &sets).expect("all can be set");
            assert_eq!(set.training.steps, suggestion.steps);
            let tokens = set.num_tokens();
            let over = tokens - suggestion.num_tokens;
            assert!(over < set.training.tokens_per_step() as u64, "{suggestion:?}");
        }
    }

    #[test]
    fn a_suggestion_can_be_set_with_stages_several_processes_and_few_tokens() {
        let h200 = Target::Gpu(sieve_core::model::gpu::find("h200").expect("known"));
        let mha = include_str!("../../../recipes/mha_80m.toml");
        let msa = sieve_core::recipe::sibling("msa_80m", mha).expect("a known name");
        for (text, degree) in [(mha, 2), (msa.as_str(), 1), (include_str!("../../../recipes/mha_1p7b.toml"), 2)] {
            // From fewer tokens than a step has to many steps.
            for (size, num_tokens) in [(2, 1), (4, 500_000_000), (8, 30_000_000_000)] {
                let parts = format!("parallelism.context_parallel_degree={degree}");
                let load = |sets: &str| {
                    let sets = sets.split_whitespace().chain([parts.as_str()]);
                    Recipe::load(text, "a recipe", &sets.map(str::to_owned).collect::<Vec<_>>()).expect("can be set")
                };
                let (recipe, ranks) = (load(""), Ranks { size, hosts: 1 });
                let planned = plan_of_ranks(&recipe, 50_304, &h200, ranks).expect("a plan");
                let suggestion = Suggestion::new(&planned, &recipe, Some(num_tokens));
                let set = load(&suggestion.overrides().replace("--set ", ""));
                assert_eq!(set.training.steps, suggestion.steps);
                let mut most = 0;
                for stage in set.stages() {
                    let alone = set.at_stage(&stage).training;
                    assert!(alone.accumulation_steps(size / degree).is_some(), "{suggestion:?}");
                    most += alone.tokens_per_step() as u64;
                }
                let over = set.num_tokens() - num_tokens;
                assert!(over <= most, "{over} of {num_tokens}: {suggestion:?}");
            }
        }
    }

    #[test]
    fn suggestions_are_those_of_table_4() {
        // Steps, tokens of a step and learning rates of arXiv:2508.02124, table 4, for the models of its sizes.
        for (text, steps, tokens_per_step, lr) in [
            (include_str!("../../../recipes/mha_80m.toml"), 13_500.0, 0.128e6, 3e-3),
            (include_str!("../../../recipes/mha_200m.toml"), 20_800.0, 0.192e6, 2e-3),
            (include_str!("../../../recipes/mha_680m.toml"), 35_000.0, 0.392e6, 1e-3),
            (include_str!("../../../recipes/mha_1p7b.toml"), 40_000.0, 1e6, 1e-3),
        ] {
            let recipe = Recipe::load(text, "mha", &[]).expect("shipped");
            let target = Target::Cpu { flops_per_second: None, memory_bytes: 1 << 40 };
            let planned = plan(&recipe, 50_304, &target).expect("a plan");
            let suggestion = Suggestion::new(&planned, &recipe, Some((steps * tokens_per_step) as u64));
            let ratio = suggestion.lr / lr;
            assert!((0.8..1.2).contains(&ratio), "{suggestion:?}: {ratio} of {lr}");
            let (_, law) = step_law(planned.num_non_embedding as f64, steps * tokens_per_step);
            let ratio = law / tokens_per_step;
            let expected = if tokens_per_step < 1e6 { 0.84..1.16 } else { 0.6..0.7 };
            assert!(expected.contains(&ratio), "{law} tokens a step: {ratio}");
            // A step is a whole number of micro-batches.
            let rows = suggestion.global_batch_size as f64 - law / recipe.training.seq_len as f64;
            assert!(rows.abs() <= recipe.training.local_batch_size as f64, "{suggestion:?}");
        }
    }
}
