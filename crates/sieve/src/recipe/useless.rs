//! Warnings about valid settings without effect.
use sieve_core::kinds::Indexer;
use sieve_core::recipe::{
    ActivationCheckpointMode, ActivationCheckpointSection, AttentionSection, Stage, TrainingPrecision,
};
use sieve_core::{Recipe, covered_words};

/// Warnings about valid settings with which the model cannot learn, whose attention hides no key, or which are not
/// read.
pub(crate) fn useless_settings(recipe: &Recipe) -> Vec<String> {
    let (training, checkpoint, stages) = (&recipe.training, &recipe.activation_checkpoint, recipe.stages());
    let has_single_tokens = stages.iter().any(|stage| stage.section.seq_len == 1);
    let usual = ActivationCheckpointSection::default().selective_ac_option;
    let is_read = checkpoint.mode == ActivationCheckpointMode::Selective || checkpoint.selective_ac_option == usual;
    let is_fp8 = training.precision == TrainingPrecision::Fp8;
    let is_alone = training.train.is_some();
    let indexers =
        |attention: &AttentionSection| attention.kinds().filter_map(|kind| kind.as_kind().indexer()).collect();
    let of_run: Vec<Indexer> = indexers(&recipe.attention);
    let has_none = |stage: &Stage| indexers(&recipe.at_stage(stage).attention).is_empty();
    let found = [
        (recipe.optimizer.lr == 0.0, "optimizer.lr is 0, so nothing is learned"),
        (
            is_alone && recipe.optimizer.indexer_lr == Some(0.0),
            "optimizer.indexer_lr is 0, and training.train has indexers alone, so nothing is learned",
        ),
        (
            of_run.iter().any(|indexer| !indexer.learns),
            "attention.index_loss_weight is 0, so that an indexer learns nothing",
        ),
        (
            is_alone && stages.iter().any(has_none),
            "training.train has indexers alone, and a stage has a kind without one, so that nothing is learned there",
        ),
        (has_single_tokens, "rows of one token (training.seq_len): no token sees another"),
        (
            training.bf16_end_blocks > 0 && !is_fp8,
            "training.bf16_end_blocks has no effect without training.precision = \"fp8\"",
        ),
        (!is_read, "activation_checkpoint.selective_ac_option has no effect without mode = \"selective\""),
    ];
    let found = found.into_iter().filter(|(is_so, _)| *is_so).map(|(_, words)| words.to_owned());
    let dense = if has_single_tokens { Vec::new() } else { dense_attention(recipe, &stages) };
    found.chain(dense).collect()
}

/// The warning about a run that trains indexers alone and does not begin with weights of a checkpoint.
pub(crate) fn untrained_model(recipe: &Recipe) -> Option<&'static str> {
    recipe.training.trains_indexers_alone().then_some(
        "training.train has indexers alone, and all other weights are random and stay so: the indexers learn the \
         attention of an untrained model\n  hint: begin with a trained one, by model.initial_weights or --branch-from",
    )
}

/// A warning for each stage whose attention is meant to hide keys and hides none in rows of the stage's length.
fn dense_attention(recipe: &Recipe, stages: &[Stage]) -> Vec<String> {
    let covered = stages.iter().filter_map(|stage| {
        let (attention, seq_len) = (recipe.at_stage(stage).attention, stage.section.seq_len);
        let key = attention.covers_rows(seq_len).then(|| attention.as_kind().reads_words())??;
        let number = stage.index + 1;
        let key = if attention.window() == recipe.attention.window() {
            key
        } else {
            // The stage has a window of its own.
            format!("stage.{number}.window is {}", attention.window()?)
        };
        let place = if stages.len() > 1 { format!(" in stage {number}") } else { String::new() };
        Some(format!("{key}{place}: attention {}", covered_words(seq_len)))
    });
    covered.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_without_effect_are_named() {
        let text = include_str!("../../../../recipes/quickstart.toml");
        for (overrides, expected) in [
            ("", None),
            (
                "attention.kind=infllm_v2 attention.preset=paper",
                Some("hold 4096 tokens: attention attends to every key of rows of 256 tokens: dense attention"),
            ),
            (
                "attention.kind=nsa attention.window_size=300",
                Some("attention.window_size is 300: attention attends to every key"),
            ),
            (
                "attention.kind=swa attention.sliding_window=300",
                Some("attention.sliding_window is 300: attention attends to every key"),
            ),
            (
                "attention.keep_window_size=300",
                Some("attention.keep_window_size is 300: attention attends to every key"),
            ),
            ("training.bf16_end_blocks=1", Some("training.bf16_end_blocks has no effect")),
            ("activation_checkpoint.selective_ac_option=3", Some("selective_ac_option has no effect")),
            ("activation_checkpoint.selective_ac_option=3 activation_checkpoint.mode=selective", None),
            (
                "attention.kind=msa attention.num_selected_blocks=1 attention.index_loss_weight=0",
                Some("attention.index_loss_weight is 0"),
            ),
            (
                "attention.kind=msa attention.num_selected_blocks=1 training.train=['indexer'] optimizer.indexer_lr=0",
                Some("optimizer.indexer_lr is 0, and"),
            ),
        ] {
            let overrides = overrides.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            let recipe = Recipe::load(text, "quickstart", &overrides).expect("a recipe");
            let found = useless_settings(&recipe);
            assert_eq!(found.len(), expected.iter().len(), "{overrides:?}: {found:?}");
            assert!(expected.is_none_or(|words| found[0].contains(words)), "{found:?}");
        }
        let staged = |window| format!("{text}\n[[stage]]\nsteps = 3\n{window}").replace("steps = 500\n", "");
        for (window, expected) in [
            ("window = 300", "stage.1.window is 300: attention attends to every key"),
            ("", "attention.keep_window_size"),
        ] {
            let overrides = ["attention.keep_window_size=299".to_owned(), "lr_scheduler.warmup_steps=1".to_owned()];
            let recipe = Recipe::load(&staged(window), "quickstart", &overrides).expect("a recipe");
            assert!(useless_settings(&recipe)[0].starts_with(expected), "{:?}", useless_settings(&recipe));
        }
    }
}
