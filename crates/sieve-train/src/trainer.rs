//! The loop: batches, gradients, clipping, update, validation, checkpoints.
mod checkpoints;
mod clock;

use crate::atomic::write_atomically;
use crate::metrics::{History, Metrics};
use crate::{
    AdamW, AttentionStatistics, DeviceBatch, GradientBuffer, Hardware, MemoryProbe, Origin,
    Precision, RunFolder, StepReport, TokenBytes, TrainError, TrainEvent, TrainSummary,
    TrainingData, Unigram, ValidationReport, accumulate_gradients, validate,
};
use burn::module::AutodiffModule;
use burn::tensor::{ElementConversion, Tensor};
use clock::Clock;
use sieve_core::{ModelShape, Recipe};
use sieve_data::{Batch, Loader, LoaderConfig, Order, Packing, Prefetch, PrefetchPlan};
use sieve_hf::{Checkpoint, load_parameters};
use sieve_nn::Qwen3;
use sieve_ops::{RotaryEmbedding, TrainBackend};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Batches made ahead of the step that needs them.
const PREFETCH_DEPTH: usize = 4;

/// A run: model, optimizer, data and where they stand.
pub struct Trainer<B: TrainBackend> {
    recipe: Recipe,
    shape: ModelShape,
    data: TrainingData,
    folder: RunFolder,
    device: B::Device,
    /// Taken while it is mapped to its next value.
    model: Option<Qwen3<B>>,
    optimizer: AdamW<B>,
    rope: RotaryEmbedding<B>,
    loader: Arc<Loader>,
    validation: Validation<B>,
    /// FLOP/s of the device, where known.
    peak_flops: Option<f64>,
    memory: MemoryProbe,
    step: u64,
    next_sample: u64,
    tokens_seen: u64,
    /// What the last step left on the device; `None` before the first of this process.
    last_step: Option<StepOutcome<B>>,
    /// Step of the last checkpoint in `folder`.
    last_checkpoint: Option<u64>,
    /// To be told when the run begins.
    notices: Vec<String>,
}

struct Validation<B: TrainBackend> {
    loader: Loader,
    rope: RotaryEmbedding<B::InnerBackend>,
    token_bytes: TokenBytes,
    unigram: Unigram,
}

/// Where a run's news goes: to its files and to the caller.
struct Reporter<'a> {
    metrics: Metrics,
    observe: &'a mut dyn FnMut(TrainEvent<'_>),
}

impl Reporter<'_> {
    fn tell(&mut self, event: TrainEvent<'_>) {
        (self.observe)(event);
    }
}

/// How `recipe` reads its training shard.
pub fn loader_config(recipe: &Recipe, shape: &ModelShape, data: &TrainingData) -> LoaderConfig {
    let training = &recipe.training;
    LoaderConfig {
        seq_len: training.seq_len,
        order: Order::Shuffled {
            seed: training.seed,
        },
        packing: if training.one_document_per_row {
            Packing::OneDocumentPerRow
        } else {
            Packing::Concatenated
        },
        vocab_size: shape.vocab_size,
        pad_id: data.tokenizer.pad_id().unwrap_or(0),
    }
}

impl<B: TrainBackend> Trainer<B> {
    /// A new run, or one restored from its checkpoint. Writes nothing: [`run`](Self::run) does.
    ///
    /// # Errors
    /// A recipe that does not fit the tokenizer or the checkpoint, an unreadable shard.
    pub fn new(
        recipe: Recipe,
        data: TrainingData,
        folder: RunFolder,
        origin: Origin,
        hardware: Hardware<B>,
    ) -> Result<Self, TrainError> {
        let Hardware {
            device,
            precision,
            peak_flops,
            memory,
        } = hardware;
        let shape = recipe.model_shape(data.tokenizer.vocab_size())?;
        let training = &recipe.training;
        let config = loader_config(&recipe, &shape, &data);
        let train_shard = Arc::new(data.prepared.train()?);
        let counts = train_shard.token_counts(shape.vocab_size)?;
        let loader = Arc::new(Loader::new(train_shard, config)?);
        let sequential = LoaderConfig {
            order: Order::Sequential,
            ..config
        };
        let validation = Validation {
            loader: Loader::new(Arc::new(data.prepared.validation()?), sequential)?,
            rope: RotaryEmbedding::new(shape.head_dim, training.seq_len, shape.rope_theta, &device),
            token_bytes: TokenBytes::new(&data.tokenizer, shape.vocab_size)?,
            unigram: Unigram::new(&counts),
        };
        let mut trainer = Self {
            model: Some(Qwen3::new(&shape, training.seed, &device)),
            optimizer: AdamW::new(recipe.optimizer.clone()),
            rope: RotaryEmbedding::new(shape.head_dim, training.seq_len, shape.rope_theta, &device),
            loader,
            validation,
            peak_flops,
            memory,
            step: 0,
            next_sample: 0,
            tokens_seen: 0,
            last_step: None,
            last_checkpoint: None,
            notices: origin.notices,
            shape,
            recipe,
            data,
            folder,
            device,
        };
        if let Some(checkpoint) = &origin.checkpoint {
            trainer.restore(checkpoint)?;
        }
        if precision == Precision::Bf16 {
            let model = trainer.model.take();
            trainer.model = model.map(|model| trainer.optimizer.hold_masters(model));
        }
        Ok(trainer)
    }

    /// The model as it stands.
    pub fn model(&self) -> &Qwen3<B> {
        self.model
            .as_ref()
            .expect("the model is only away inside an update")
    }

    /// The model's sizes.
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// The tokenizer and the shards.
    pub fn data(&self) -> &TrainingData {
        &self.data
    }

    /// Optimizer steps done.
    pub fn step(&self) -> u64 {
        self.step
    }

    fn restore(&mut self, checkpoint: &Checkpoint) -> Result<(), TrainError> {
        let state = &checkpoint.state;
        if state.vocab_size != self.shape.vocab_size {
            return Err(TrainError::OtherTokenizer {
                saved: state.vocab_size,
                now: self.shape.vocab_size,
            });
        }
        let weights = checkpoint.model()?;
        let model = self
            .model
            .take()
            .expect("the model is only away inside an update");
        let model = load_parameters(model, &mut |name, shape| weights.tensor(name, shape))?;
        let moments = checkpoint.optimizer()?;
        self.optimizer
            .load_state(&model, &self.device, &mut |name, shape| {
                moments.tensor(name, shape)
            })?;
        self.model = Some(model);
        self.step = state.step;
        self.next_sample = state.next_sample;
        self.tokens_seen = state.tokens_seen;
        // A checkpoint of another run begins this one, and is written here before the first step.
        let parent = |path: &std::path::Path| path.parent().and_then(|p| p.canonicalize().ok());
        let own = self.folder.checkpoint_path().canonicalize().ok();
        if own.is_some() && parent(&checkpoint.path) == own {
            self.last_checkpoint = Some(state.step);
        }
        Ok(())
    }

    /// Trains until the last step, or until `stop` is set; then the state is on disk.
    ///
    /// # Errors
    /// A shard or checkpoint that fails, or a loss that is no number; earlier checkpoints stay.
    pub fn run(
        &mut self,
        stop: &AtomicBool,
        observe: &mut dyn FnMut(TrainEvent<'_>),
    ) -> Result<TrainSummary, TrainError> {
        let num_steps = self.recipe.training.steps as u64;
        let (rows, local) = (
            self.recipe.training.global_batch_size,
            self.recipe.training.local_batch_size,
        );
        let micro_batches =
            self.recipe
                .training
                .accumulation_steps(1)
                .ok_or(TrainError::BatchSizes {
                    global: rows,
                    local,
                })?;
        let (mut reporter, history) = self.begin(observe)?;
        let first_validation = match history.first {
            Some(report) => report,
            None => self.validate(&mut reporter)?,
        };
        let mut summary = TrainSummary {
            step: self.step,
            interrupted: false,
            last_validation: history.last.or_else(|| Some(first_validation.clone())),
            first_validation: Some(first_validation),
            checkpoint: None,
            last_step: None,
        };
        let is_fork = self.step > 0 && self.last_checkpoint.is_none();
        if is_fork || (self.step == 0 && self.recipe.checkpoint.at_start) {
            self.write_checkpoint(&mut reporter)?;
        }
        let mut batches = Prefetch::new(
            self.loader.clone(),
            PrefetchPlan {
                first_sample: self.next_sample,
                batch: local,
                stride: local as u64,
                num_batches: None,
                depth: PREFETCH_DEPTH.max(micro_batches),
            },
        )?;
        let mut clock = Clock::start();
        while self.step < num_steps && !stop.load(Ordering::Relaxed) {
            let mut step_batches = Vec::with_capacity(micro_batches);
            for _ in 0..micro_batches {
                let batch = batches.next().expect("the plan has no end");
                step_batches.push(batch?);
            }
            self.train_step(&step_batches)?;
            clock.step((rows * self.recipe.training.seq_len) as u64);

            let is_last = self.step == num_steps;
            let log_freq = self.recipe.metrics.log_freq.max(1) as u64;
            if self.step.is_multiple_of(log_freq) || self.step == 1 || is_last {
                let report = self.step_report(&step_batches, &mut clock)?;
                reporter.metrics.step(&report)?;
                reporter.tell(TrainEvent::Step(&report));
                summary.last_step = Some(report);
            }
            let interval = self.recipe.validation.interval as u64;
            if is_last || self.step.is_multiple_of(interval) {
                let report = clock.pause(|| self.validate(&mut reporter))?;
                summary.last_validation = Some(report);
            }
            let interval = self.recipe.checkpoint.interval as u64;
            if is_last || self.step.is_multiple_of(interval) {
                clock.pause(|| self.write_checkpoint(&mut reporter))?;
            }
        }
        drop(batches);
        self.write_checkpoint(&mut reporter)?;
        summary.step = self.step;
        summary.interrupted = self.step < num_steps;
        summary.checkpoint = self.last_checkpoint_path();
        Ok(summary)
    }

    /// The first writes of a run: everything that could be refused has been by now.
    fn begin<'a>(
        &mut self,
        observe: &'a mut dyn FnMut(TrainEvent<'_>),
    ) -> Result<(Reporter<'a>, History), TrainError> {
        write_atomically(&self.folder.config_path(), &self.recipe.to_toml()?)?;
        let tensorboard = self.recipe.metrics.enable_tensorboard;
        let (metrics, history) = Metrics::open(&self.folder, self.step, tensorboard)?;
        let mut reporter = Reporter { metrics, observe };
        for notice in std::mem::take(&mut self.notices) {
            reporter.tell(TrainEvent::Notice(&notice));
        }
        self.tidy_checkpoints(&mut reporter)?;
        Ok((reporter, history))
    }

    /// Gradients over all micro-batches, clipping, update.
    fn train_step(&mut self, batches: &[Batch]) -> Result<(), TrainError> {
        let num_labels: usize = batches.iter().map(Batch::num_labels).sum();
        if num_labels == 0 {
            return Err(TrainError::NoLabels {
                step: self.step + 1,
            });
        }
        let loss_scale = 1.0 / num_labels as f64;
        let mut gradients = GradientBuffer::default();
        let mut loss = Tensor::<B::InnerBackend, 1>::zeros([1], &self.device);
        let mut expire = Vec::new();
        for batch in batches {
            let on_device = DeviceBatch::<B>::new(batch, &self.device);
            let model = self.model();
            let result =
                accumulate_gradients(model, &on_device, &self.rope, loss_scale, &mut gradients);
            loss = loss + result.loss;
            expire = result.expire;
        }
        let model = self
            .model
            .take()
            .expect("the model is only away inside an update");
        let grad_norm = gradients.norm(&model, &self.device);
        let grad_scale = clip_scale::<B>(grad_norm.clone(), self.recipe.training.max_norm);
        let lr = self.learning_rate();
        self.model = Some(self.optimizer.step(model, &mut gradients, grad_scale, lr));

        self.step += 1;
        for batch in batches {
            self.next_sample += batch.batch as u64;
            self.tokens_seen += (batch.batch * batch.seq_len) as u64;
        }
        self.last_step = Some(StepOutcome {
            loss,
            grad_norm,
            lr,
            expire,
        });
        Ok(())
    }

    /// Learning rate of the step that comes next.
    fn learning_rate(&self) -> f64 {
        let steps = self.recipe.training.steps;
        self.recipe.optimizer.lr * self.recipe.lr_scheduler.factor(self.step as usize, steps)
    }

    /// Loss and gradient norm of the last step, read back from the device.
    ///
    /// # Errors
    /// [`TrainError::Diverged`] when one of them is no finite number; the weights are spoilt then.
    fn check_finite(&self) -> Result<Option<(f64, f64)>, TrainError> {
        let Some(outcome) = &self.last_step else {
            return Ok(None);
        };
        let loss = outcome.loss.clone().into_scalar().elem::<f64>();
        let grad_norm = outcome.grad_norm.clone().into_scalar().elem::<f64>();
        if loss.is_finite() && grad_norm.is_finite() {
            return Ok(Some((loss, grad_norm)));
        }
        Err(TrainError::Diverged {
            step: self.step,
            loss,
            grad_norm,
            lr: outcome.lr,
            last_checkpoint: self.last_checkpoint_path(),
        })
    }

    fn step_report(&self, batches: &[Batch], clock: &mut Clock) -> Result<StepReport, TrainError> {
        let (loss, grad_norm) = self.check_finite()?.expect("a step was taken");
        let outcome = self.last_step.as_ref().expect("a step was taken");
        let last = batches.last().expect("a step has at least one batch");
        let attention = AttentionStatistics::of(self.shape.attention, last, &outcome.expire);
        let executed = self
            .shape
            .flops_per_token(attention.mean_active_keys)
            .training();
        let dense = self
            .shape
            .dense_flops_per_token(self.recipe.training.seq_len)
            .training();
        let (tokens_per_second, step_seconds) = clock.restart();
        let percent = |flops: f64| {
            self.peak_flops
                .map(|peak| 100.0 * flops * tokens_per_second / peak)
        };
        let (memory_bytes, memory_total_bytes) = self.memory.read();
        let num_steps = self.recipe.training.steps as u64;
        Ok(StepReport {
            step: self.step,
            num_steps,
            loss,
            grad_norm,
            lr: outcome.lr,
            tokens_seen: self.tokens_seen,
            tokens_per_second,
            tflops: executed * tokens_per_second / 1e12,
            mfu_percent: percent(executed),
            dense_mfu_percent: percent(dense),
            memory_bytes,
            memory_total_bytes,
            eta_seconds: (num_steps - self.step) as f64 * step_seconds,
            attention,
        })
    }

    fn validate(&self, reporter: &mut Reporter<'_>) -> Result<ValidationReport, TrainError> {
        let model = self.model().valid();
        let Validation {
            loader,
            rope,
            token_bytes,
            unigram,
        } = &self.validation;
        let size = [
            self.recipe.validation.steps,
            self.recipe.training.local_batch_size,
        ];
        let report = validate(
            &model,
            loader,
            rope,
            size,
            (token_bytes, unigram),
            &self.device,
        )?;
        let report = ValidationReport {
            step: self.step,
            ..report
        };
        reporter.metrics.validation(&report)?;
        reporter.tell(TrainEvent::Validation(&report));
        Ok(report)
    }
}

/// Device values of one step, read only when they are wanted.
struct StepOutcome<B: TrainBackend> {
    loss: Tensor<B::InnerBackend, 1>,
    grad_norm: Tensor<B::InnerBackend, 1>,
    lr: f64,
    expire: Vec<Tensor<B, 3, burn::tensor::Int>>,
}

/// `min(1, max_norm / (norm + 1e-6))`, as PyTorch's `clip_grad_norm_`.
fn clip_scale<B: TrainBackend>(
    norm: Tensor<B::InnerBackend, 1>,
    max_norm: f64,
) -> Tensor<B::InnerBackend, 1> {
    (norm + 1e-6).recip().mul_scalar(max_norm).clamp_max(1.0)
}
