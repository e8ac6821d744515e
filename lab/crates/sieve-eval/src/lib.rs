//! Evaluation of trained models: tasks, needles, associative recall, attention weights, and selectors on a model.
//!
//! The crate prints nothing and reads no environment; the caller decides where text and progress go.

mod error;

mod long;
mod needle;
mod phases;
mod recall;
mod seeded;
mod tasks;

mod captured;
mod patterns;
mod selectors;
#[cfg(test)]
#[path = "../../../../crates/sieve-infer/src/test_model.rs"]
mod test_model;
mod trained;
mod weights;

pub use error::EvalError;
pub use long::{
    LONG_TASKS, LongCell, LongReport, LongSample, LongSource, LongTask, LongTaskReport, LongText, LongTexts, Match,
    NUM_WRONG, QaData, SampleScore, Split, ask_long, long_texts,
};
pub use needle::{
    Haystack, NUM_DISTRACTORS, NeedleCell, NeedleConfig, NeedleExample, NeedlePhases, NeedleReport, linear_grid,
    needle, needle_by_phase,
};
pub use patterns::{PatternSearch, calibrate_dam, search_minference};
pub use phases::{PhaseGap, PhaseScore, PhaseVerdict};
pub use recall::{Answers, DistanceAnswers, RecallByPhase, RecallOfKind, RecallReport, RecallRun, ValuesRead, recall};
pub use selectors::{
    BlockAgreement, DensityAndRecall, LayerMask, LayerMasks, LayerMeasure, READY_GRIDS, SelectorMeasure,
    block_agreement, measure_selectors, selector_grid, selector_masks, sweep_selectors,
};
pub use tasks::{
    Likelihood, LongBenchAverage, READY_TASKS, RowScore, Score, Task, TaskChat, TaskReport, TaskRows, TaskRun,
    TaskSize, TaskTexts, Turn, run_task,
};
pub use trained::{TrainedMeasure, measure_trained};
pub use weights::{ChosenKeys, DISTANCES, HeadWeights, KeyLifetimes, LayerWeights, attention_weights};
