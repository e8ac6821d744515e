//! The training loop: segments, optimizer, validation, checkpoints, metrics.
//!
//! The crate prints nothing; it reports to the caller by [`TrainEvent`]s.

mod error;

mod attention_statistics;
mod collectives;
mod device_batch;
mod gradients;
mod group;
mod guard;
mod hardware;
mod optimizer;
mod segment;
mod segments;
mod share;

mod data;
mod memory;
mod metrics;
mod origin;
mod report;
mod rows;
mod run_folder;
mod session;
mod tensorboard;
mod trainer;
mod tries;
mod unigram;
mod validation;

pub use attention_statistics::{AttentionStatistics, IndexerFit, KeyAges};
pub use collectives::{Collectives, Exchanged, Gathered, HostCollectives, Pending, Primitive};
pub use data::{
    DataEvent, DataSource, RowSource, StageText, TrainingData, chat_format, chat_format_of, chat_template,
    corpus_configs, tokenizer_file,
};
pub use device_batch::DeviceBatch;
pub use error::TrainError;
pub use gradients::GradientBuffer;
pub use group::{Group, Health, PieceKeeper, ShardedWeights};
pub use hardware::{DeviceMemory, Hardware, MemoryProbe, Precision};
pub use metrics::last_validation;
pub use optimizer::{Optimizer, OptimizerSnapshot, ReplicaSums};
pub use origin::{
    BranchOptions, Origin, check_fit, ignored_checkpoint, initial_checkpoint, initial_weights, named_checkpoint,
};
pub use report::{SkippedStep, StepReport, TrainEvent, TrainSummary, ValidationReport};
pub use run_folder::{RunFolder, Start};
pub use segments::{BlockSettings, MicroBatchResult, accumulate_gradients_with};
pub use session::{FoundRun, Opened, RecipeFile, RunRequest, Session, check_branch_options, check_recipe};
pub use trainer::{
    BestCheckpoint, FaultInjection, Moment, StepAhead, Trainer, WriteSamples, best_checkpoint, step_batch,
    tidy_finished,
};
pub use tries::WriteLimits;
