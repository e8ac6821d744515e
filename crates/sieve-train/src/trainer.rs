//! The loop: batches, gradients, clipping, update, validation, checkpoints.
use crate::memory::process_memory;
use crate::metrics::Metrics;
use crate::{
    AdamW, AttentionStatistics, DeviceBatch, GradientBuffer, RunFolder, Start, StepReport,
    TokenBytes, TrainError, TrainEvent, TrainSummary, TrainingData, Unigram, ValidationReport,
    accumulate_gradients, validate,
};
use burn::module::AutodiffModule;
use burn::tensor::{ElementConversion, Tensor};
use sieve_core::{ModelShape, Recipe};
use sieve_data::{Batch, Loader, LoaderConfig, Order, Packing, Prefetch, PrefetchPlan};
use sieve_hf::{
    Checkpoint, CheckpointFiles, CheckpointState, FORMAT_VERSION, list_checkpoints,
    load_parameters, named_parameters,
};
use sieve_nn::Qwen3;
use sieve_ops::{RotaryEmbedding, TrainBackend};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

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
    metrics: Metrics,
    /// FLOP/s of the device, where known.
    peak_flops: Option<f64>,
    step: u64,
    next_sample: u64,
    tokens_seen: u64,
    last_checkpoint: Option<(u64, PathBuf)>,
}

struct Validation<B: TrainBackend> {
    loader: Loader,
    rope: RotaryEmbedding<B::InnerBackend>,
    token_bytes: TokenBytes,
    unigram: Unigram,
}

impl<B: TrainBackend> Trainer<B> {
    /// A new run, or one restored from its checkpoint.
    ///
    /// # Errors
    /// A recipe that does not fit the tokenizer or the checkpoint, a damaged checkpoint, an unreadable shard.
    pub fn new(
        recipe: Recipe,
        data: TrainingData,
        folder: RunFolder,
        start: &Start,
        device: B::Device,
        peak_flops: Option<f64>,
    ) -> Result<Self, TrainError> {
        let shape = recipe.model_shape(data.tokenizer.vocab_size())?;
        let training = &recipe.training;
        let config = LoaderConfig {
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
        };
        let train_shard = Arc::new(data.prepared.train()?);
        let counts = train_shard.token_counts(shape.vocab_size)?;
        let loader = Arc::new(Loader::new(train_shard, config)?);
        let sequential = LoaderConfig {
            order: Order::Sequential,
            ..config
        };
        let rope = |max| RotaryEmbedding::new(shape.head_dim, max, shape.rope_theta, &device);
        let validation = Validation {
            loader: Loader::new(Arc::new(data.prepared.validation()?), sequential)?,
            rope: RotaryEmbedding::new(shape.head_dim, training.seq_len, shape.rope_theta, &device),
            token_bytes: TokenBytes::new(&data.tokenizer, shape.vocab_size)?,
            unigram: Unigram::new(&counts),
        };
        let mut trainer = Self {
            model: Some(Qwen3::new(&shape, training.seed, &device)),
            optimizer: AdamW::new(recipe.optimizer.clone()),
            rope: rope(training.seq_len),
            loader,
            validation,
            metrics: Metrics::open(&folder, 0, false)?,
            peak_flops,
            step: 0,
            next_sample: 0,
            tokens_seen: 0,
            last_checkpoint: None,
            shape,
            recipe,
            data,
            folder,
            device,
        };
        match start {
            Start::New => {}
            Start::Resume => {
                let path = trainer.folder.checkpoint_path();
                trainer.restore(&Checkpoint::open(&path)?)?;
            }
            Start::ResumeFrom(path) => trainer.restore(&Checkpoint::open(path)?)?,
        }
        let tensorboard = trainer.recipe.metrics.enable_tensorboard;
        trainer.metrics = Metrics::open(&trainer.folder, trainer.step, tensorboard)?;
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
        let saved = checkpoint.recipe_toml()?;
        let origin = checkpoint.path.join("config.toml");
        let saved = Recipe::load(&saved, &origin.display().to_string(), &[])?;
        saved.check_resume(&self.recipe)?;
        let state = &checkpoint.state;
        if state.vocab_size != self.shape.vocab_size {
            return Err(TrainError::OtherTokenizer {
                saved: state.vocab_size,
                now: self.shape.vocab_size,
            });
        }
        if state.data_fingerprint != self.data.prepared.meta.fingerprint {
            return Err(TrainError::OtherData {
                path: self.data.prepared.dir.clone(),
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
        self.last_checkpoint = Some((state.step, checkpoint.path.clone()));
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
        let first_validation = self.validate(observe)?;
        let mut summary = TrainSummary {
            step: self.step,
            interrupted: false,
            first_validation: Some(first_validation.clone()),
            last_validation: Some(first_validation),
            checkpoint: None,
            last_step: None,
        };
        if self.step == 0 && self.recipe.checkpoint.at_start {
            self.write_checkpoint(observe)?;
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
        let mut clock = Clock::default();
        while self.step < num_steps && !stop.load(Ordering::Relaxed) {
            let started = Instant::now();
            let mut step_batches = Vec::with_capacity(micro_batches);
            for _ in 0..micro_batches {
                let batch = batches.next().expect("the plan has no end");
                step_batches.push(batch?);
            }
            let outcome = self.train_step(&step_batches)?;
            clock.add(
                started.elapsed(),
                (rows * self.recipe.training.seq_len) as u64,
            );

            let is_last = self.step == num_steps;
            let log_freq = self.recipe.metrics.log_freq.max(1) as u64;
            if self.step.is_multiple_of(log_freq) || self.step == 1 || is_last {
                let report = self.step_report(outcome, &step_batches, &mut clock)?;
                self.metrics.step(&report)?;
                observe(TrainEvent::Step(&report));
                summary.last_step = Some(report);
            }
            let interval = self.recipe.validation.interval as u64;
            if is_last || (interval > 0 && self.step.is_multiple_of(interval)) {
                summary.last_validation = Some(self.validate(observe)?);
            }
            let interval = self.recipe.checkpoint.interval as u64;
            if is_last || (interval > 0 && self.step.is_multiple_of(interval)) {
                self.write_checkpoint(observe)?;
            }
        }
        drop(batches);
        summary.step = self.step;
        summary.interrupted = self.step < num_steps;
        let saved = self.last_checkpoint.as_ref().map(|(step, _)| *step);
        if saved != Some(self.step) {
            self.write_checkpoint(observe)?;
        }
        summary.checkpoint = self.last_checkpoint.as_ref().map(|(_, path)| path.clone());
        Ok(summary)
    }

    /// Gradients over all micro-batches, clipping, update.
    fn train_step(&mut self, batches: &[Batch]) -> Result<StepOutcome<B>, TrainError> {
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
        Ok(StepOutcome {
            loss,
            grad_norm,
            lr,
            expire,
        })
    }

    /// Learning rate of the step that comes next.
    fn learning_rate(&self) -> f64 {
        let steps = self.recipe.training.steps;
        self.recipe.optimizer.lr * self.recipe.lr_scheduler.factor(self.step as usize, steps)
    }

    fn step_report(
        &self,
        outcome: StepOutcome<B>,
        batches: &[Batch],
        clock: &mut Clock,
    ) -> Result<StepReport, TrainError> {
        let loss = outcome.loss.into_scalar().elem::<f64>();
        if !loss.is_finite() {
            return Err(TrainError::Diverged {
                step: self.step,
                loss,
                lr: outcome.lr,
            });
        }
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
        let (memory_bytes, memory_total_bytes) = process_memory();
        let num_steps = self.recipe.training.steps as u64;
        Ok(StepReport {
            step: self.step,
            num_steps,
            loss,
            grad_norm: outcome.grad_norm.into_scalar().elem::<f64>(),
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

    fn validate(
        &mut self,
        observe: &mut dyn FnMut(TrainEvent<'_>),
    ) -> Result<ValidationReport, TrainError> {
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
        self.metrics.validation(&report)?;
        observe(TrainEvent::Validation(&report));
        Ok(report)
    }

    fn write_checkpoint(
        &mut self,
        observe: &mut dyn FnMut(TrainEvent<'_>),
    ) -> Result<(), TrainError> {
        let folder = self.folder.checkpoint_path();
        std::fs::create_dir_all(&folder).map_err(TrainError::io("creating", &folder))?;
        let tokenizer = &self.data.tokenizer_path;
        let files = CheckpointFiles {
            model: named_parameters(self.model()),
            optimizer: self.optimizer.state(self.model()),
            recipe_toml: self.recipe.to_toml()?,
            tokenizer_json: std::fs::read_to_string(tokenizer)
                .map_err(TrainError::io("reading", tokenizer))?,
        };
        let state = CheckpointState {
            format_version: FORMAT_VERSION,
            step: self.step,
            next_sample: self.next_sample,
            tokens_seen: self.tokens_seen,
            vocab_size: self.shape.vocab_size,
            data_fingerprint: self.data.prepared.meta.fingerprint.clone(),
            num_threads: rayon::current_num_threads(),
            sieve_version: env!("CARGO_PKG_VERSION").to_owned(),
            checksums: Default::default(),
        };
        let path = Checkpoint::write(&folder, state, &files)?;
        observe(TrainEvent::Checkpoint(&path));
        self.last_checkpoint = Some((self.step, path));
        self.prune(&folder)
    }

    /// Removes all but the latest checkpoints; the one before the first step stays.
    fn prune(&self, folder: &std::path::Path) -> Result<(), TrainError> {
        let keep = self.recipe.checkpoint.keep_latest_k;
        let kept = |step: u64| step == 0 && self.recipe.checkpoint.at_start;
        let all: Vec<_> = list_checkpoints(folder)?
            .into_iter()
            .filter(|(step, _)| !kept(*step))
            .collect();
        if keep == 0 || all.len() <= keep {
            return Ok(());
        }
        // Never the one just written, also when older runs left later ones behind.
        for (step, path) in &all[..all.len() - keep] {
            if *step != self.step {
                std::fs::remove_dir_all(path).map_err(TrainError::io("removing", path))?;
            }
        }
        Ok(())
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

/// Time and tokens of steps alone, without validation and checkpoints.
#[derive(Default)]
struct Clock {
    elapsed: Duration,
    tokens: u64,
    steps: u32,
}

impl Clock {
    fn add(&mut self, elapsed: Duration, tokens: u64) {
        self.elapsed += elapsed;
        self.tokens += tokens;
        self.steps += 1;
    }

    /// `(tokens a second, seconds a step)` since the last call.
    fn restart(&mut self) -> (f64, f64) {
        let seconds = self.elapsed.as_secs_f64().max(1e-9);
        let result = (
            self.tokens as f64 / seconds,
            seconds / f64::from(self.steps.max(1)),
        );
        *self = Self::default();
        result
    }
}
