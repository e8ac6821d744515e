//! `[[stage]]`: a run whose sequence length, rotary base, window, text or batch size changes between its stages.

use std::collections::BTreeMap;
use std::ops::Range;

use super::Recipe;
use super::mistake::Mistake;
use crate::keys::{KeyValue, Kind, MAX_BATCH, MAX_ROPE_THETA, MAX_SEQ_LEN, MAX_STEPS, Section, USUAL_ROPE_THETA, keys};
use crate::kinds::table_name;
use crate::model::{Conversion, names_of};

keys! {
    /// One `[[stage]]`. What the text leaves out is the value of the sections it comes from.
    pub struct StageSection {
        /// Optimizer steps of the stage.
        #[key(filled("`tokens`, rounded up to whole steps"), size(MAX_STEPS))]
        pub steps: usize,
        /// Tokens of the stage, instead of `steps`.
        text tokens: Option<usize>,
        /// Tokens in one row.
        #[key(from("training.seq_len"), size(MAX_SEQ_LEN))]
        pub seq_len: usize,
        /// Base of the rotary frequencies.
        #[key(from("model.rope_theta"), between(1.0, MAX_ROPE_THETA, USUAL_ROPE_THETA))]
        pub rope_theta: f64,
        /// The attention's window in tokens: `sliding_window`, `keep_window_size` or `window_size`. Kinds without a
        /// window have none.
        #[key(filled("the window of `[attention]`"), size(MAX_SEQ_LEN))]
        pub window: Option<usize>,
        /// Kind `"msa"`: whether queries read all keys while the indexer learns from all of them. Not in the last
        /// stage.
        #[key(filled("as in `[attention]`"))]
        pub index_warmup: Option<bool>,
        /// The kind of the stage's `"sparse"` layers, where it is another than that of `[attention]`: `"mha"`, or the
        /// NAME of a table `[attention.NAME]`, which has its settings. The weights become that kind's as with
        /// `--branch-from`, with the moments of what is kept.
        pub kind: Option<String>,
        /// The stage's own `model.layer_types`.
        pub layer_types: Option<Vec<String>>,
        /// Windows in tokens of tables `[attention.NAME]` in this stage: `{ swa = 512 }`.
        pub windows: Option<BTreeMap<String, usize>>,
        /// Whether the stage may begin without trained tensors that its kinds of attention have no place for, such as
        /// an indexer. Without it a recipe that would lose one is refused.
        pub drop: bool = false,
        /// Globs of text that this stage trains on instead of `data.paths`: the same format, settings and tokenizer.
        pub paths: Option<Vec<String>>,
        /// One number for each of the stage's `paths`, or of `data.paths` if the stage has none: the share of its text
        /// in the stage's tokens, relative to the other numbers. A stage without `paths` needs `data.weights` too.
        pub weights: Option<Vec<f64>>,
        /// Rows one device holds at a time.
        #[key(from("training.local_batch_size"), size(MAX_BATCH))]
        pub local_batch_size: usize,
        /// Rows of one optimizer step; a multiple of `local_batch_size`.
        #[key(from("training.global_batch_size"), size(MAX_BATCH))]
        pub global_batch_size: usize,
    }
}

impl KeyValue for Vec<StageSection> {
    const KIND: Kind = Kind::Tables(StageSection::KEYS);
}

impl StageSection {
    /// Tokens that the stage reads, at most `u64::MAX`.
    pub fn num_tokens(&self) -> u64 {
        let sizes = [self.steps, self.global_batch_size, self.seq_len];
        sizes.iter().fold(1, |tokens: u64, &size| tokens.saturating_mul(size as u64))
    }
}

/// A stage of a run, with its place in the run.
#[derive(Clone, Debug, PartialEq)]
pub struct Stage {
    /// Index of the stage, from 0.
    pub index: usize,
    /// The steps of the stage, counted from 0 over the whole run.
    pub steps: Range<usize>,
    /// Settings of the stage.
    pub section: StageSection,
}

impl Recipe {
    /// One stage for the whole run, with the values of the other sections.
    pub fn whole_run(&self) -> StageSection {
        StageSection {
            steps: self.training.steps,
            seq_len: self.training.seq_len,
            rope_theta: self.model.rope_theta,
            window: self.attention.window(),
            index_warmup: self.attention.index_warmup(),
            kind: None,
            layer_types: None,
            windows: None,
            drop: false,
            paths: None,
            weights: None,
            local_batch_size: self.training.local_batch_size,
            global_batch_size: self.training.global_batch_size,
        }
    }

    /// The stages in order; a recipe without `[[stage]]` is one stage.
    pub fn stages(&self) -> Vec<Stage> {
        let sections = if self.stage.is_empty() { vec![self.whole_run()] } else { self.stage.clone() };
        let mut first = 0;
        let numbered = sections.into_iter().enumerate();
        numbered
            .map(|(index, section)| {
                let steps = first..first + section.steps;
                first = steps.end;
                Stage { index, steps, section }
            })
            .collect()
    }

    /// The stage that computes step `step`, counted from 0; the last stage for a step past the run's end.
    pub fn stage_of_step(&self, step: usize) -> Stage {
        let stages = self.stages();
        let found = stages.iter().position(|stage| stage.steps.contains(&step));
        let index = found.unwrap_or(stages.len() - 1);
        stages[index].clone()
    }

    /// The stage that computed the state after `steps_done` steps; the first stage for the state before the first step.
    pub fn stage_of_state(&self, steps_done: usize) -> Stage {
        self.stage_of_step(steps_done.saturating_sub(1))
    }

    /// The recipe of one stage alone: its values in `[model]`, `[attention]` and `[training]`, no `[[stage]]`.
    ///
    /// `training.steps` stays the whole run's, since the learning-rate schedule spans all stages.
    pub fn at_stage(&self, stage: &Stage) -> Self {
        let section = &stage.section;
        let mut recipe = self.clone();
        recipe.stage.clear();
        recipe.model.rope_theta = section.rope_theta;
        recipe.attention = self.attention.of_stage(section);
        if section.layer_types.is_some() {
            recipe.model.layer_types.clone_from(&section.layer_types);
        }
        let types = recipe.model.layer_types.as_deref().unwrap_or_default();
        recipe.attention.others.retain(|name, _| types.iter().any(|of| table_name(of) == name));
        if let Some(paths) = &section.paths {
            recipe.data.paths.clone_from(paths);
            // The weights of `[data]` belong to the paths that are replaced here.
            recipe.data.weights = None;
        }
        if section.weights.is_some() {
            recipe.data.weights.clone_from(&section.weights);
        }
        recipe.training.seq_len = section.seq_len;
        recipe.training.local_batch_size = section.local_batch_size;
        recipe.training.global_batch_size = section.global_batch_size;
        recipe
    }

    /// A mistake for each stage whose model the stage before cannot become, because sizes differ or trained tensors
    /// would be lost without `drop = true`.
    pub(super) fn impossible_stages(&self) -> Vec<Mistake> {
        let stages = self.stages();
        let shape = |stage: &Stage| {
            let any_vocabulary = 0;
            self.at_stage(stage).model_shape(any_vocabulary).ok()
        };
        let pairs = stages.iter().zip(stages.iter().skip(1));
        let mistakes = pairs.filter_map(|(before, stage)| {
            let (number, section) = (stage.index + 1, &stage.section);
            let key = match section.layer_types {
                Some(_) => format!("stage.{number}.layer_types"),
                None => format!("stage.{number}.kind"),
            };
            match Conversion::of(&shape(before)?, &shape(stage)?) {
                Err(gap) => {
                    let hint = "stages change kinds between which weights can be kept";
                    Some(Mistake::new(key, format!("cannot follow the stage before it: {gap}"), hint))
                }
                Ok(made) if made.dropped.is_empty() || section.drop => None,
                Ok(made) => {
                    let lost = names_of(&made.dropped);
                    let what = format!("would lose trained tensors that its layers have no place for: {lost}");
                    Some(Mistake::new(key, what, format!("give stage {number} drop = true, or keep those layers")))
                }
            }
        });
        mistakes.collect()
    }

    /// Whether attention of a kind that hides keys hides none in any stage
    /// ([`Attention::covers_rows`](crate::Attention::covers_rows)). A stage in which an indexer warms up reads all keys
    /// on purpose and does not count.
    pub fn covers_rows(&self) -> bool {
        let stages = self.stages().into_iter().map(|stage| self.at_stage(&stage));
        let mut choosing = stages.filter(|stage| stage.attention.index_warmup() != Some(true)).peekable();
        choosing.peek().is_some() && choosing.all(|stage| stage.attention.covers_rows(stage.training.seq_len))
    }

    /// Tokens that the whole run reads, at most `u64::MAX`.
    pub fn num_tokens(&self) -> u64 {
        self.stages().iter().fold(0, |sum, stage| sum.saturating_add(stage.section.num_tokens()))
    }

    /// The stages of steps `0..steps_done`, cut at `steps_done`. The local batch size is left out of the comparison: it
    /// only divides the same rows into other micro-batches.
    pub(super) fn past(&self, steps_done: usize) -> Vec<StageSection> {
        let stages = self.stages().into_iter();
        stages
            .take_while(|stage| stage.steps.start < steps_done)
            .map(|stage| StageSection {
                steps: stage.steps.end.min(steps_done) - stage.steps.start,
                local_batch_size: 0,
                ..stage.section
            })
            .collect()
    }
}
