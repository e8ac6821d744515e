//! The loop: batches, gradients, clipping, update, validation, checkpoints.
//!
//! The trainer owns its parts: `Checkpoints` knows what is on disk, `Ranks` the other processes, `GuardLog` the
//! steps that the host has not read yet, `StageState` the present stage. One step reads from top to bottom in
//! `trainer/steps.rs`.
mod best;
mod checkpoints;
mod clock;
mod device_memory;
mod faults;
mod guard_log;
mod guarding;
mod peak;
mod ranks;
mod replay;
mod reporter;
mod sampling;
mod saving;
mod stage;
mod steps;
mod validating;
mod writer;

pub use best::{BestCheckpoint, best_checkpoint};
use checkpoints::{Checkpoints, Fallback};
pub use faults::{FaultInjection, Moment};
pub use sampling::WriteSamples;
pub use stage::step_batch;
pub use steps::StepAhead;

use crate::group::{StepHooks, Weights};
use crate::guard::{LossMean, gate};
use crate::metrics::{History, Metrics};
use crate::origin::Begun;
use crate::segments::{Alone, BlockSettings, MicroBatchResult, PassHooks, pass};
use crate::share::Share;
use crate::tries::WriteLimits;
use crate::unigram::Unigram;
use crate::validation::{TokenBytes, check_labels};
use crate::{
    DeviceBatch, GradientBuffer, Group, Hardware, MemoryProbe, Optimizer, Origin, Precision, RunFolder, TrainError,
    TrainEvent, TrainSummary, TrainingData,
};
use burn::module::Module;
use burn::tensor::Tensor;
use guard_log::{GuardLog, norms_by_part};
use ranks::Ranks;
use reporter::Reporter;
pub use saving::tidy_finished;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sieve_comm::Work;
use sieve_core::{Keeping, ModelShape, Recipe, model_line};
use sieve_data::{Prepared, ShardCheck};
use sieve_hf::{Checkpoint, GuardState};
use sieve_nn::{PassSettings, Qwen3};
use sieve_ops::TrainBackend;
use stage::{Ropes, StageState};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

/// Message of a panic that cannot occur: `Learner::model` is `None` only while a function has moved the model out.
const AWAY: &str = "the model is put back before an update returns";

/// A run: model, optimizer, data, and how far the run is.
pub struct Trainer<B: TrainBackend> {
    /// The recipe with all stages; [`StageState`] has the present stage's recipe.
    recipe: Recipe,
    stage: StageState,
    data: TrainingData,
    machine: Machine<B>,
    learner: Learner<B>,
    progress: Progress,
    guard_log: GuardLog<B>,
    held_out: HeldOut,
    checkpoints: Checkpoints,
    ranks: Ranks<B>,
    lines: Lines<B>,
    /// On rank 0, threads that check the shards' checksums while training continues.
    shard_checks: Vec<ShardCheck>,
}

/// The model, its optimizer, and the rotary tables that the model reads.
struct Learner<B: TrainBackend> {
    model: Option<Qwen3<B>>,
    optimizer: Optimizer<B>,
    ropes: Ropes<B>,
    /// Learning rate of the last step, and the result of its last micro-batch.
    last_step: Option<(f64, MicroBatchResult<B>)>,
}

/// How far the run is.
#[derive(Default)]
struct Progress {
    /// Number of optimizer steps done.
    step: u64,
    /// Index of the next row in the order of the stage.
    next_sample: u64,
    /// Tokens of all rows that the run has read.
    tokens_seen: u64,
    unlabelled: Unlabelled,
    /// Step after which this process stops, with a checkpoint.
    stop_at: Option<u64>,
}

/// What the losses of held-out tokens are compared with.
struct HeldOut {
    token_bytes: TokenBytes,
    unigram: Unigram,
}

impl HeldOut {
    fn tokens(&self) -> (&TokenBytes, &Unigram) {
        (&self.token_bytes, &self.unigram)
    }
}

/// What the run computes on.
struct Machine<B: TrainBackend> {
    device: B::Device,
    precision: Precision,
    /// Peak FLOP/s of the device, if it is known.
    peak_flops: Option<f64>,
    memory: MemoryProbe,
    /// Optional activations that fit into the memory.
    keeping: Keeping,
    /// Faults that tests inject; none in a usual run.
    disturbance: FaultInjection,
}

/// What the forward passes of a step give.
struct Forward<B: TrainBackend> {
    /// The losses of this rank's labels, summed and divided by the labels of all ranks, `[1]`.
    loss: Tensor<B::InnerBackend, 1>,
    /// The result of the last micro-batch.
    last: Option<MicroBatchResult<B>>,
}

/// Lines and texts that a run writes besides its events.
struct Lines<B: TrainBackend> {
    /// What is trained, on one line.
    model: String,
    /// Messages that are reported when the run begins.
    notices: Vec<String>,
    /// Writers of the metrics files after [`Trainer::run`], which hands them to its [`Reporter`] before.
    metrics: Option<Metrics>,
    /// Writes the texts of `generation.interval`; `None` where this process writes none.
    samples: Option<WriteSamples<B::InnerBackend>>,
}

/// Steps whose rows hold no label, so that no loss exists.
#[derive(Default)]
struct Unlabelled {
    /// Number of steps without a label in this process.
    num_steps: u64,
    /// Rows of such steps since the last step with a label, or since the stage began.
    num_rows_in_a_row: u64,
}

impl<B: TrainBackend> Trainer<B> {
    /// A new run, or one restored from its checkpoint. Writes nothing; [`run`](Self::run) does.
    ///
    /// All processes of a `group` must be given the same recipe, data and checkpoint. Each takes its share of the rows
    /// of every step, of the update and of each checkpoint. Only rank 0 writes the run's other files.
    ///
    /// # Errors
    /// A recipe that does not fit the tokenizer or the checkpoint, an unreadable shard; a batch that does not divide by
    /// the ranks.
    pub fn new(
        recipe: Recipe,
        data: TrainingData,
        folder: RunFolder,
        mut origin: Origin,
        hardware: Hardware<B>,
        mut group: Option<Group<B>>,
    ) -> Result<Self, TrainError> {
        if let Some(group) = &mut group {
            group.set_zero_stage(recipe.parallelism.zero_stage);
        }
        let Hardware { device, precision, peak_flops, memory, keeping } = hardware;
        let first_stage = recipe.stage_of_step(origin.step() as usize);
        let share = group.as_ref().map_or(Share::ALL, Group::share);
        TrainError::check_ranks(&recipe, share.size)?;
        let stage = StageState::new(&recipe, first_stage, &data, share)?;
        let vocab_size = stage.shape.vocab_size;
        let unigram = Unigram::new(&data.counts_of_rows(vocab_size)?);
        check_labels(&stage.validation_loader, stage.validation_size())?;
        StageState::check_later(&recipe, stage.stage.index, &data, share)?;
        let weights = origin.initial_weights(&folder, &recipe);
        let model_line = model_line(&recipe, &stage.shape, precision.number_format(), &weights);
        let training = &recipe.training;
        let model = Qwen3::new(&stage.shape, training.seed, &device);
        let mut trainer = Self {
            held_out: HeldOut { token_bytes: TokenBytes::new(&data.tokenizer, vocab_size)?, unigram },
            learner: Learner {
                ropes: Ropes::new(&model, stage.recipe.training.seq_len, &device),
                model: Some(model),
                optimizer: Optimizer::of_share(recipe.optimizer.clone(), &stage.shape, share),
                last_step: None,
            },
            guard_log: GuardLog::new(precision, LossMean::new(training, GuardState::default())),
            stage,
            machine: Machine { device, precision, peak_flops, memory, keeping, disturbance: FaultInjection::default() },
            progress: Progress::default(),
            checkpoints: Checkpoints::new(folder),
            ranks: Ranks::new(group),
            lines: Lines {
                model: model_line,
                notices: std::mem::take(&mut origin.notices),
                metrics: None,
                samples: None,
            },
            shard_checks: Vec::new(),
            recipe,
            data,
        };
        if trainer.ranks.writes() {
            trainer.shard_checks = trainer.data.shards().map(Prepared::check_beside).collect::<Result<_, _>>()?;
        }
        if let Some(checkpoint) = &origin.checkpoint {
            trainer.begin_with(checkpoint, &origin)?;
        } else {
            let model = trainer.learner.model.take();
            trainer.learner.model = model.map(|model| model.map(&mut trainer.learner.optimizer.holder(precision)));
        }
        let notes = trainer.sharding_notes();
        trainer.lines.notices.extend(notes);
        Ok(trainer)
    }

    /// Restores the checkpoint that a run continues or that another run begins with.
    fn begin_with(&mut self, checkpoint: &Checkpoint, origin: &Origin) -> Result<(), TrainError> {
        self.restore(checkpoint, origin.fresh_optimizer)?;
        if self.checkpoints.last.is_none() {
            // `restore` found that the checkpoint is in another folder than this run's.
            self.checkpoints.begun = Begun::of(origin)?;
        }
        if origin.is_branch {
            // With another window or rotary base the losses change.
            self.guard_log.loss_mean.restart();
        }
        let notes = self.conversion_notes(checkpoint, origin.is_branch)?;
        self.lines.notices.extend(notes);
        Ok(())
    }

    /// Notices of weights that are gathered across hosts, or that nothing divides.
    fn sharding_notes(&self) -> Vec<String> {
        let (share, mut notes) = (self.share(), Vec::new());
        if let Some(on_host) = self.ranks.group().and_then(Group::crossed_hosts) {
            let size = share.group.size();
            notes.push(format!(
                "note: parallelism.shard_ranks = {size}, and a host has {on_host} processes: weights are gathered \
                 across hosts"
            ));
        }
        if self.recipe.parallelism.zero_stage == 3 && share.size == 1 {
            let note = "note: parallelism.zero_stage = 3 shards nothing in one process, which holds the whole model";
            notes.push(note.to_owned());
        }
        notes
    }

    /// Stops after this many steps of this process, with a checkpoint to resume from, as after a signal.
    pub fn stop_after(&mut self, num_steps: u64) {
        self.progress.stop_at = Some(self.progress.step.saturating_add(num_steps));
    }

    /// Sets the folder for the last checkpoint of this process if the run's own folder cannot be written to. No other
    /// run may use it (see [`RunFolder::fallback_name`]), and it must be the same for all processes of the run.
    pub fn set_fallback(&mut self, folder: PathBuf) {
        self.checkpoints.fallback = Fallback::Waiting(folder);
    }

    /// Changes how failed writes are retried. For tests.
    #[doc(hidden)]
    pub fn set_write_limits(&mut self, limits: WriteLimits) {
        self.checkpoints.tries.limits = limits;
    }

    /// Whether the run must end before its next step.
    fn is_asked_to_stop(&self, stop: &AtomicBool) -> bool {
        stop.load(Ordering::Relaxed) || self.progress.stop_at.is_some_and(|last| self.progress.step >= last)
    }

    fn share(&self) -> Share {
        self.ranks.share()
    }

    /// Whether this process has only its pieces of the weights between their uses (ZeRO-3).
    pub fn shards_weights(&self) -> bool {
        !self.share().keeps_whole
    }

    /// The model with the weights after the last step. Divided weights are NaN in it if the process
    /// [has only its pieces of them](Self::shards_weights).
    pub fn model(&self) -> &Qwen3<B> {
        self.learner.model.as_ref().expect(AWAY)
    }

    /// Waits until the weights of the last update are gathered from all ranks.
    fn finish_leaves(&mut self) -> Result<(), TrainError> {
        self.ranks.finish_leaves(&mut self.learner.model)
    }

    /// The model's sizes in the present stage.
    pub fn shape(&self) -> &ModelShape {
        &self.stage.shape
    }

    /// The run's output folder.
    pub fn folder(&self) -> &RunFolder {
        &self.checkpoints.folder
    }

    /// The tokenizer and the source of rows.
    pub fn data(&self) -> &TrainingData {
        &self.data
    }

    /// Number of optimizer steps done.
    pub fn step(&self) -> u64 {
        self.progress.step
    }

    /// Injects faults. For tests of the guard.
    #[doc(hidden)]
    pub fn disturb(&mut self, disturbance: FaultInjection) {
        self.machine.disturbance = disturbance;
    }

    /// Restores weights, optimizer state (unless `fresh_optimizer`), step, next row and the guard's mean loss from
    /// `checkpoint`. Its tensors become those of the present stage's model as [`Conversion`] says.
    fn restore(&mut self, checkpoint: &Checkpoint, fresh_optimizer: bool) -> Result<(), TrainError> {
        self.finish_leaves()?;
        let state = &checkpoint.state;
        let now = self.stage.shape.vocab_size;
        if state.vocab_size != now {
            return Err(TrainError::refused(
                format!("the tokenizer has {now} tokens, the run began with {}", state.vocab_size),
                "give the tokenizer.json of the run's checkpoint as tokenizer.path",
            ));
        }
        self.learner.optimizer = Optimizer::of_share(self.recipe.optimizer.clone(), &self.stage.shape, self.share());
        self.install(checkpoint, fresh_optimizer)?;
        self.progress.step = state.step;
        self.progress.tokens_seen = state.tokens_seen;
        // The run continues at the checkpoint's next row if stage and data are the same, else at the first row.
        let ended = self.recipe.stage_of_state(state.step as usize).index;
        let same_stage = ended == self.stage.stage.index;
        let [saved, now] = [&state.data_fingerprint, &self.data.fingerprint()]
            .map(|all| crate::data::stages::of_stage(all, ended).to_owned());
        let same_data = saved == now;
        let (next_sample, guard) = if same_stage && same_data {
            (state.next_sample, state.guard.unwrap_or_default())
        } else {
            (0, GuardState::default())
        };
        self.progress.next_sample = next_sample;
        self.guard_log.loss_mean = LossMean::new(&self.recipe.training, guard);
        // Unless the checkpoint is in this run's folder, the run has no checkpoint of its own yet.
        let own = self.checkpoints.folder.checkpoint_path().join(format!("step-{}", state.step));
        let [own, found] = [&own, &checkpoint.path].map(|path| path.canonicalize().ok());
        if own.is_some() && found == own {
            self.checkpoints.last = Some(state.step);
        }
        Ok(())
    }

    /// Trains until the last step, or until `stop` is set, and writes a last checkpoint.
    ///
    /// # Errors
    /// A shard cannot be read, a checkpoint cannot be written, or training diverges. Earlier checkpoints stay.
    pub fn run(
        &mut self,
        stop: &AtomicBool,
        observe: &mut dyn FnMut(TrainEvent<'_>),
    ) -> Result<TrainSummary, TrainError> {
        if let Some(group) = self.ranks.group() {
            group.check_equal(&format!(
                "step {}, row {}, data {}",
                self.progress.step,
                self.progress.next_sample,
                self.data.fingerprint()
            ))?;
        }
        self.ranks.set_work(Work::Long);
        let (mut reporter, history) = self.begin(observe)?;
        // Only rank 0 has read the metrics of an earlier process.
        let is_validated = self.gathered(history.first.is_some())?[0];
        let first_validation = if is_validated { history.first } else { self.validate(&mut reporter)? };
        let mut summary = TrainSummary {
            step: self.progress.step,
            interrupted: false,
            last_validation: history.last.or_else(|| first_validation.clone()),
            first_validation,
            checkpoint: None,
            last_step: None,
            peak_memory: None,
        };
        // The run began with a checkpoint of another folder; after a checkpoint of its own it no longer needs that one.
        let is_fork = self.progress.step > 0 && self.checkpoints.last.is_none();
        if is_fork || (self.progress.step == 0 && self.recipe.checkpoint.at_start) {
            self.start_checkpoint(&mut reporter)?;
            self.finish_checkpoint(&mut reporter)?;
            self.checkpoints.warn_unsaved(&mut reporter);
        }
        let result = self.steps(stop, &mut reporter, &mut summary);
        // After a failed step, a process without others finishes the checkpoint that is being written. A rank drops it,
        // because the other ranks may not know of the error.
        let written = match result {
            Ok(()) => self.save_last(&mut reporter),
            Err(_) if self.ranks.is_alone() => self.finish_checkpoint(&mut reporter),
            Err(_) => self.discard_checkpoint(),
        };
        reporter.metrics.finish();
        reporter.report_writes();
        self.ranks.set_work(Work::Any);
        result?;
        written?;
        summary.peak_memory = self.machine.memory.peak();
        let num_steps = self.recipe.training.steps as u64;
        summary.step = self.progress.step;
        summary.interrupted = self.progress.step < num_steps;
        summary.checkpoint = self.checkpoints.last_path();
        self.lines.metrics = Some(reporter.metrics);
        Ok(summary)
    }

    /// Writes a text that the model generated after its [`run`](Self::run) to the run's TensorBoard file.
    pub fn keep_sample(&mut self, number: usize, text: &str) {
        if let Some(metrics) = &mut self.lines.metrics {
            metrics.sample(number, text, self.progress.step);
        }
    }

    /// A value of every rank, by rank.
    fn gathered<T: Serialize + DeserializeOwned>(&self, own: T) -> Result<Vec<T>, TrainError> {
        self.ranks.gathered(own)
    }

    /// The line of the log about the stage that begins.
    fn stage_line(&self) -> String {
        let stage = &self.stage.stage;
        let section = &stage.section;
        let window = section.window.map_or(String::new(), |window| format!(", window {window}"));
        let kind = match section.kind {
            Some(_) => format!(", {}", self.stage.shape.attention.kind().name()),
            None => String::new(),
        };
        format!(
            "stage {} of {}: steps {} to {}, rows of {} tokens, rope_theta {}{window}{kind}",
            stage.index + 1,
            self.recipe.stages().len(),
            stage.steps.start + 1,
            stage.steps.end,
            section.seq_len,
            section.rope_theta,
        )
    }

    /// Writes the first files of a run. All checks come before it, so that a refused run writes nothing.
    fn begin<'a>(&mut self, observe: &'a mut dyn FnMut(TrainEvent<'_>)) -> Result<(Reporter<'a>, History), TrainError> {
        self.write_config()?;
        let (metrics, history) = self.open_metrics()?;
        let mut reporter = Reporter { metrics, observe };
        let notices = std::mem::take(&mut self.lines.notices);
        for notice in notices.into_iter().chain(reporter.metrics.take_messages()) {
            reporter.emit(if notice.starts_with("warning:") {
                TrainEvent::Warning(&notice)
            } else {
                TrainEvent::Notice(&notice)
            });
        }
        if self.ranks.writes() {
            self.checkpoints.tidy(self.progress.step, &mut reporter)?;
        }
        if !self.recipe.stage.is_empty() {
            reporter.emit(TrainEvent::Notice(&self.stage_line()));
        }
        Ok((reporter, history))
    }

    /// Opens the metrics files, keeps the lines of an earlier process up to the present step, sets later ones aside if
    /// their checkpoints are set aside, and writes the recipe to TensorBoard. Ranks other than 0 write no metrics.
    fn open_metrics(&self) -> Result<(Metrics, History), TrainError> {
        if !self.ranks.writes() {
            return Ok(Default::default());
        }
        let aside = (!self.checkpoints.others(self.progress.step)?.is_empty())
            .then(|| self.checkpoints.folder.metrics_aside_path());
        let has_tensorboard = self.recipe.metrics.enable_tensorboard;
        let (mut metrics, history) =
            Metrics::open(&self.checkpoints.folder, self.progress.step, has_tensorboard, aside.as_deref())?;
        metrics.warn_of_lost_lines(&history, self.progress.step, self.recipe.metrics.log_freq.max(1) as u64);
        metrics.recipe(&self.recipe, self.progress.step)?;
        Ok((metrics, history))
    }

    /// Computes the gradients of all micro-batches, clips them, and updates the model if the guard's gate lets the step
    /// pass. Labels and tokens are counted over all processes.
    fn train_step(
        &mut self,
        step: &StepAhead,
        labels_and_tokens: [usize; 2],
        reporter: &mut Reporter<'_>,
    ) -> Result<(), TrainError> {
        let mut gradients = GradientBuffer::kept_in(self.recipe.training.gradient_dtype);
        let Forward { loss, last } = self.add_micro_batches(step, labels_and_tokens, &mut gradients, reporter)?;
        let model = self.learner.model.take().expect(AWAY);
        let (loss, grad_norm) = match self.ranks.group_mut() {
            None => (loss, gradients.norm(&model, &self.machine.device)),
            Some(group) => {
                group.finish_sums(&mut gradients)?;
                let [loss, norm] = group.totals(loss, &model, &gradients, &self.machine.device)?;
                (loss, norm)
            }
        };
        let clip_scale = clip_scale::<B>(grad_norm.clone(), self.recipe.training.max_norm);
        let gated = gate::<B>(loss, grad_norm, clip_scale);
        let num_rows = self.stage.recipe.training.global_batch_size as u64;
        self.guard_log.note(
            self.progress.step + 1,
            step.lr,
            (self.progress.next_sample, num_rows),
            &step.batches,
            &gated,
            || norms_by_part(&model, &gradients, self.ranks.group(), &self.machine.device),
        )?;
        let scale = gated.grad_scale;
        self.learner.model = Some(match self.ranks.group_mut() {
            None => self.learner.optimizer.step(model, &mut gradients, scale, step.lr),
            Some(group) => self.learner.optimizer.step_by_segment(model, &mut gradients, scale, step.lr, group)?,
        });
        self.count_step();
        self.learner.last_step = last.map(|result| (step.lr, result));
        Ok(())
    }

    /// Runs each micro-batch forward and backward, and adds up its gradients.
    fn add_micro_batches(
        &mut self,
        step: &StepAhead,
        [num_labels, num_tokens]: [usize; 2],
        gradients: &mut GradientBuffer<B>,
        reporter: &mut Reporter<'_>,
    ) -> Result<Forward<B>, TrainError> {
        let (batches, loss_scale) = (&step.batches, step.loss_weight / num_labels as f64);
        let degree = self.recipe.parallelism.context_parallel_degree;
        // With context parallelism, the ranks that share each row.
        let links = self.ranks.group().and_then(|group| group.rank_group(degree));
        let mut settings = BlockSettings::from(&self.recipe);
        settings.layers = PassSettings {
            keeping: self.machine.keeping,
            token_share: 1.0 / num_tokens as f64,
            measures_indexers: self.is_logged(self.progress.step + 1),
            reads_all: self.recipe.training.reads_all(self.progress.step as usize),
            ..settings.layers
        };
        let mut loss = Tensor::<B::InnerBackend, 1>::zeros([1], &self.machine.device);
        let mut last = None;
        for (place, batch) in batches.iter().enumerate() {
            let on_device = match &links {
                Some(links) => DeviceBatch::<B>::of_part(batch, links.clone(), &self.machine.device),
                None => DeviceBatch::new(batch, &self.machine.device),
            };
            let is_last = place + 1 == batches.len();
            let mut together = self.ranks.group_mut().map(|group| {
                group.begin(is_last, gradients);
                StepHooks(Weights { group, pieces: self.learner.optimizer.pieces() })
            });
            let hooks: &mut dyn PassHooks<B> = match &mut together {
                Some(together) => together,
                None => &mut Alone,
            };
            let result = pass(
                &settings,
                self.learner.model.as_mut().expect(AWAY),
                &on_device,
                &self.learner.ropes.training,
                loss_scale,
                gradients,
                hooks,
            )?;
            loss = loss + result.loss.clone();
            last = Some(result);
            let part = (place + 1) as f64 / batches.len() as f64;
            reporter.emit(TrainEvent::Computed(self.progress.step as f64 + part));
        }
        Ok(Forward { loss, last })
    }

    /// Whether this step, counted from 1, is logged.
    fn is_logged(&self, step: u64) -> bool {
        let interval = self.recipe.metrics.log_freq.max(1) as u64;
        step == 1 || step == self.recipe.training.steps as u64 || step.is_multiple_of(interval)
    }
}

/// `min(1, max_norm / (norm + 1e-6))`, as PyTorch's `clip_grad_norm_`.
fn clip_scale<B: TrainBackend>(norm: Tensor<B::InnerBackend, 1>, max_norm: f64) -> Tensor<B::InnerBackend, 1> {
    (norm + 1e-6).recip().mul_scalar(max_norm).clamp_max(1.0)
}
