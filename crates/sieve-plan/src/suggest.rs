//! Learning rate, batch and steps for a model and a budget of tokens, by published scaling laws.

use serde::Serialize;
use sieve_core::Recipe;

use crate::Plan;

/// Tokens for each parameter besides the embedding where no budget is given (arXiv:2203.15556, table 3).
const TOKENS_PER_PARAMETER: u64 = 20;

/// What a scaling law says of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Suggestion {
    /// Tokens of the run.
    pub num_tokens: u64,
    /// FLOPs of the run.
    pub total_flops: f64,
    /// Learning rate.
    pub lr: f64,
    /// Rows of a step: a multiple of the recipe's `local_batch_size`.
    pub global_batch_size: usize,
    /// Steps.
    pub steps: usize,
}

impl Suggestion {
    /// For the model of `plan`, made from `recipe`, on `num_tokens` tokens; 20 a parameter where none are named.
    ///
    /// With C the FLOPs of the run, the learning rate is 0.3118 C^-0.125 and a step has 0.2920 C^0.3271 tokens
    /// (arXiv:2401.02954, section 3.1: fitted to dense models of 1e17 to 2e19 FLOPs with AdamW and a schedule in
    /// steps).
    pub fn new(plan: &Plan, recipe: &Recipe, num_tokens: Option<u64>) -> Self {
        let num_tokens = num_tokens.unwrap_or(TOKENS_PER_PARAMETER * plan.num_non_embedding);
        let total_flops = plan.total_flops / plan.num_tokens.max(1) as f64 * num_tokens as f64;
        let training = &recipe.training;
        let tokens_per_step = 0.2920 * total_flops.powf(0.3271);
        let micro_batch = training.local_batch_size * training.seq_len;
        let micro_batches = (tokens_per_step / micro_batch as f64).round().max(1.0) as usize;
        let global_batch_size = micro_batches * training.local_batch_size;
        let steps = num_tokens.div_ceil((global_batch_size * training.seq_len) as u64);
        Self {
            num_tokens,
            total_flops,
            lr: 0.3118 * total_flops.powf(-0.125),
            global_batch_size,
            steps: steps.max(1) as usize,
        }
    }

    /// The same as the changes of a recipe.
    pub fn overrides(&self) -> String {
        format!(
            "--set optimizer.lr={:.1e} --set training.global_batch_size={} --set training.steps={}",
            self.lr, self.global_batch_size, self.steps
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Target, plan};

    #[test]
    fn a_suggestion_follows_the_law_and_can_be_set() {
        let text = include_str!("../../../recipes/mha_80m.toml");
        let recipe = Recipe::load(text, "mha_80m", &[]).expect("shipped");
        let target = Target::Cpu {
            flops_per_second: None,
            memory_bytes: 1 << 40,
        };
        let planned = plan(&recipe, 50_304, &target).expect("a plan");
        let usual = Suggestion::new(&planned, &recipe, None);
        assert_eq!(usual.num_tokens, 20 * planned.num_non_embedding);
        // 1.7B tokens of 85M parameters and their output are a little above 1e18 FLOPs: 1.7e-3 and 0.23M tokens a step.
        assert!((1e18..2e18).contains(&usual.total_flops), "{usual:?}");
        assert!((1.6e-3..1.8e-3).contains(&usual.lr), "{usual:?}");
        let tokens = usual.global_batch_size * recipe.training.seq_len;
        assert!((190_000..280_000).contains(&tokens), "{usual:?}");
        // More tokens: a lower rate, larger steps.
        let long = Suggestion::new(&planned, &recipe, Some(100 * usual.num_tokens));
        assert!(long.lr < usual.lr && long.global_batch_size > usual.global_batch_size);
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
}
