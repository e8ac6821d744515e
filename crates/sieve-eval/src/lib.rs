//! Evaluation of trained models: logits, perplexity, tasks, needles, selectors, and generation token by token.
//!
//! The crate prints nothing and reads no environment; the caller decides where text and progress go.

mod error;

mod input;
mod logits;
mod rows;

mod continuation;
mod generator;
mod greedy;
mod open_texts;
mod sampler;
mod token_scores;

mod document;
mod perplexity;
mod words;

mod long;
mod needle;
mod recall;
mod task_model;
mod tasks;

mod captured;
mod chunks;
mod device_steps;
mod pass;
mod patterns;
mod selection;
mod selectors;
mod stop;
#[cfg(test)]
mod test_model;
mod together;
mod trained;
mod weights;

pub use continuation::{TextsWithEndings, prompt_part, texts_together};
pub use document::{EvalDocument, TextSize, first_tokens, prepared_documents, text_documents};
pub use error::EvalError;
pub use generator::{GenerateConfig, Generator};
pub use logits::logits;
pub use long::{
    LONG_TASKS, LongCell, LongReport, LongSample, LongSource, LongTask, LongTaskReport, LongText, LongTexts, Match,
    NUM_WRONG, QaData, SampleScore, Split, ask_long, long_texts,
};
pub use needle::{
    Haystack, NUM_DISTRACTORS, NeedleCell, NeedleConfig, NeedleExample, NeedleReport, linear_grid, needle,
};
pub use open_texts::OpenTexts;
pub use patterns::{PatternSearch, calibrate_dam, search_minference};
pub use perplexity::{
    Extrapolation, LossByDistance, MeanLoss, PerplexityConfig, PerplexityReport, PositionLoss, RollingPerplexity,
    WordLoss, extrapolation, perplexity,
};
pub use recall::{Answers, DistanceAnswers, RecallOfKind, RecallReport, ValuesRead, recall};
pub use sampler::{Sampler, Sampling};
pub use selection::{LayerPath, Selection, SelectionTotals};
pub use selectors::{
    BlockAgreement, DensityAndRecall, LayerMask, LayerMasks, LayerMeasure, READY_GRIDS, SelectorMeasure,
    block_agreement, measure_selectors, selector_grid, selector_masks, sweep_selectors,
};
pub use stop::StopTexts;
pub use task_model::TaskModel;
pub use tasks::{
    Likelihood, LongBenchAverage, READY_TASKS, RowScore, Score, Task, TaskChat, TaskReport, TaskRows, TaskRun,
    TaskSize, TaskTexts, Turn, run_task,
};
pub use together::BatchGenerator;
pub use token_scores::{PromptScores, TokenScore, score_prompts};
pub use trained::{TrainedMeasure, measure_trained};
pub use weights::{ChosenKeys, DISTANCES, HeadWeights, KeyLifetimes, LayerWeights, attention_weights};
pub use words::WordUse;
