//! What may change when a run is resumed.

use super::*;
use sieve_testing::{refusal, says};

#[test]
fn equal_recipes_have_no_changes() {
    assert_eq!(minimal().check_resume(&minimal(), 8), Ok(Vec::new()));
}

#[test]
fn allowed_changes_are_returned_with_both_values() {
    let mut now = minimal();
    now.training.steps = 80;
    now.metrics.log_freq = 1;
    now.data.cache_dir = Some("shards".to_owned());
    let changes = minimal().check_resume(&now, 8).expect("all allowed");
    let lines = changes.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(
        lines,
        [
            "data.cache_dir was absent, is now \"shards\"",
            "metrics.log_freq was 10, is now 1",
            "training.steps was 40, is now 80",
        ]
    );
}

#[test]
fn a_format_may_be_named_or_left_to_the_ending() {
    for (saved, now, is_allowed) in [
        (DataFormat::Text, DataFormat::Auto, true),
        (DataFormat::Auto, DataFormat::Jsonl, true),
        (DataFormat::Text, DataFormat::Jsonl, false),
    ] {
        let of = |format| {
            let mut recipe = minimal();
            recipe.data.format = format;
            recipe
        };
        let result = of(saved).check_resume(&of(now), 8);
        assert_eq!(result.is_ok(), is_allowed, "{saved:?} {now:?}: {result:?}");
    }
}

#[test]
fn refused_changes_are_all_named() {
    let mut now = minimal();
    now.training.steps = 80;
    now.model.hidden_size = 96;
    now.optimizer.lr = 2e-3;
    now.optimizer.indexer_lr = Some(4e-3);
    now.checkpoint.folder = "elsewhere".to_owned();
    now.validation.paths = Some(vec!["held/*.md".to_owned()]);
    now.attention = Attention::Swa(SwaShape { sliding_window: 16 }).into();
    let RecipeError::ResumeChanged { refused } = minimal().check_resume(&now, 8).expect_err("another model") else {
        panic!("wrong error")
    };
    let keys = refused.iter().map(|change| change.key.as_str()).collect::<Vec<_>>();
    let wanted = "attention.a_init attention.bias attention.keep_window_size attention.kind \
        attention.local_window_size attention.recency attention.sliding_window checkpoint.folder \
        model.hidden_size optimizer.indexer_lr optimizer.lr validation.paths";
    assert_eq!(keys.join(" "), wanted);
    let text = RecipeError::ResumeChanged { refused }.to_string();
    says(&text, "\n  optimizer.lr was 0.001, is now 0.002\n");
}

#[test]
fn keys_that_change_no_step_taken_may_change() {
    let change = |key: &str| KeyChange { key: key.to_owned(), saved: None, now: None };
    // The page of all keys lists them by section, each with what a resumed run may do: a row is
    // `| key | value | default | resume | meaning |`.
    let (mut section, mut allowed) = ("", 0);
    for line in include_str!("../../../../../docs/recipe.md").lines() {
        if let Some(title) = line.strip_prefix("## [") {
            section = title.trim_end_matches(']');
        } else if line.starts_with("### ") {
            // The keys of a table inside a section, or of a kind, are not compared.
            section = "";
        }
        let mut columns = line.split(" | ");
        let key = columns.next().and_then(|first| first.strip_prefix("| `")?.strip_suffix('`'));
        let (Some(key), Some(resume)) = (key, columns.nth(2)) else { continue };
        if !section.is_empty() && !section.starts_with('[') {
            let key = format!("{section}.{key}");
            assert_eq!(change(&key).is_allowed(), resume == "may change", "{key}");
            allowed += usize::from(resume == "may change");
        }
    }
    assert!(allowed > 20, "{allowed}");
    assert!(change("data.cache_dir").is_allowed() && change("training.steps").is_allowed());
    let fixed = "training.steps_extra training.seed training.global_batch_size lr_scheduler.warmup_steps \
        optimizer.weight_decay validation.paths data.paths data.mqar.seed checkpoint.folder stage.1.steps";
    for key in fixed.split(' ') {
        assert!(!change(key).is_allowed(), "{key}");
    }
}

#[test]
fn more_positions_are_refused_if_they_change_rotary_frequencies() {
    for (rope_type, is_scaled_by_positions) in [("yarn", true), ("llama3", true), ("linear", false)] {
        let scaling = format!("qk_norm = false\nrope_scaling = {{ rope_type = {rope_type:?}, factor = 4.0 }}\n");
        let at = |positions: usize, more: &str| {
            let positions = format!("max_position_embeddings = {positions}\n");
            let model = positions + &scaling.replace(" }", &format!("{more} }}"));
            load_replaced("max_position_embeddings = 128\n", &model).expect("a recipe")
        };
        let (before, longer) = (at(128, ""), at(256, ""));
        if !is_scaled_by_positions {
            assert!(before.check_resume(&longer, 8).is_ok());
        } else {
            refusal(
                before.check_resume(&longer, 8),
                "model.rope_scaling.original_max_position_embeddings was 128, is now 256",
            );
            let same = at(256, ", original_max_position_embeddings = 128");
            assert!(before.check_resume(&same, 8).is_ok(), "{rope_type}");
        }
    }
}

#[test]
fn a_warm_up_that_is_over_may_have_another_length() {
    let mut now = minimal();
    now.lr_scheduler.warmup_steps = 9;
    assert!(minimal().check_resume(&now, 9).is_ok());
    refusal(minimal().check_resume(&now, 8), "--branch-from CHECKPOINT --out DIR");
}

const STAGES: &str = "[[stage]]\nsteps = 30\n[[stage]]\nsteps = 10\nseq_len = 128\nwindow = 32\n[optimizer]";

#[test]
fn stages_may_change_where_no_step_was_taken() {
    let now = load_replaced("[optimizer]", STAGES).expect("two stages of 40 steps");
    // 30 steps at the lengths of the recipe without stages: the rest is still to come.
    let changes = minimal().check_resume(&now, 30).expect("the same past");
    assert!(changes.iter().any(|change| change.to_string() == "stage.2.seq_len was absent, is now 128"), "{changes:?}");
    let RecipeError::ResumeChanged { refused } =
        minimal().check_resume(&now, 31).expect_err("step 31 had another length")
    else {
        panic!("wrong error")
    };
    assert!(refused.iter().all(|change| change.key.starts_with("stage.")));
    let mut longer = now.clone();
    longer.stage[1].steps = 20;
    longer.training.steps = 50;
    assert!(now.check_resume(&longer, 40).is_ok());
    longer.stage[1].window = Some(33);
    assert!(now.check_resume(&longer, 30).is_ok());
    assert!(now.check_resume(&longer, 31).is_err());
}
