//! The state of the present stage, and the switch to the next one.
use super::{AWAY, Reporter, Trainer};
use crate::data::rows_needed;
use crate::segment::Segment;
use crate::share::Share;
use crate::validation::{ValidationSize, check_labels};
use crate::{Precision, TrainError, TrainingData};
use burn::module::Module;
use burn::tensor::{DType, Tensor};
use sieve_core::kinds::Part;
use sieve_core::model::Conversion;
use sieve_core::recipe::Stage;
use sieve_core::{ModelShape, Recipe, ShownPath};
use sieve_data::{Batch, Loader, LoaderConfig, Order, Packing, Prefetch, PrefetchPlan};
use sieve_hf::{Checkpoint, LoadedThen, ParameterLoader, converted_source, load_parameters};
use sieve_nn::Qwen3;
use sieve_ops::{RotaryEmbedding, TrainBackend};
use std::collections::HashSet;
use std::sync::Arc;

/// Batches prepared ahead of the step that needs them.
const PREFETCH_DEPTH: usize = 4;
/// The seed of a stage's row order is XORed with the stage's index times this: the golden ratio in 64 bits.
const STAGE_SALT: u64 = 0x9E37_79B9_7F4A_7C15;

/// The most held-out tokens on which a model is compared before and after a conversion; a longer row is taken whole.
const CONVERTED_TOKENS: usize = 16_384;

/// Recipe, sizes and batches of one stage of the run.
pub(super) struct StageState {
    pub(super) stage: Stage,
    /// The recipe with this stage's settings applied.
    pub(super) recipe: Recipe,
    pub(super) shape: ModelShape,
    pub(super) loader: Arc<Loader>,
    pub(super) validation_loader: Loader,
    /// Micro-batches of a step in this process.
    pub(super) micro_batches: usize,
    /// This process's share of the rows. Processes that share a row (context parallelism) have the same share.
    share: Share,
}

/// How the training rows of a stage are read; `recipe` is the stage's. Without a padding token in the vocabulary, rows
/// are filled up with token 0, which has no label there.
fn loader_config(recipe: &Recipe, shape: &ModelShape, data: &TrainingData) -> LoaderConfig {
    let training = &recipe.training;
    LoaderConfig {
        seq_len: training.seq_len,
        order: Order::Shuffled { seed: training.seed },
        packing: if training.one_document_per_row { Packing::OneDocumentPerRow } else { Packing::Concatenated },
        vocab_size: shape.vocab_size,
        pad_id: data.tokenizer.pad_id().filter(|&id| (id as usize) < shape.vocab_size).unwrap_or(0),
    }
}

impl StageState {
    /// The state of `stage` in a process with this `share` of the rows; `recipe` is the whole run's.
    pub(super) fn new(recipe: &Recipe, stage: Stage, data: &TrainingData, share: Share) -> Result<Self, TrainError> {
        let recipe = recipe.at_stage(&stage);
        let shape = recipe.model_shape(rows_needed(&recipe, &data.tokenizer))?;
        let share = share.of_rows(recipe.parallelism.context_parallel_degree);
        let micro_batches = TrainError::micro_batches(&recipe.training, share.size)?;
        let mut config = loader_config(&recipe, &shape, data);
        if let Order::Shuffled { seed } = &mut config.order {
            // Without this every stage would begin with the same rows.
            *seed ^= STAGE_SALT.wrapping_mul(stage.index as u64);
        }
        let sequential = LoaderConfig { order: Order::Sequential, ..config };
        Ok(Self {
            loader: Arc::new(data.stage_loader(&stage, config)?),
            validation_loader: data.validation_loader(sequential)?,
            micro_batches,
            share,
            stage,
            shape,
            recipe,
        })
    }

    /// Checks the stages after `index` before the run begins: a stage that cannot be entered would end the run halfway,
    /// and again whenever it is resumed.
    pub(super) fn check_later(
        recipe: &Recipe,
        index: usize,
        data: &TrainingData,
        share: Share,
    ) -> Result<(), TrainError> {
        for stage in recipe.stages().into_iter().filter(|stage| stage.index > index) {
            let number = stage.index + 1;
            let stage = Self::new(recipe, stage, data, share);
            let checked = stage.and_then(|stage| check_labels(&stage.validation_loader, stage.validation_size()));
            checked.map_err(|error| TrainError::in_stage(number, error))?;
        }
        Ok(())
    }

    /// Tokens and batch size of a validation.
    pub(super) fn validation_size(&self) -> ValidationSize {
        ValidationSize { num_tokens: self.recipe.validation.tokens, batch_size: self.recipe.training.local_batch_size }
    }

    /// The stage's batches from row `first_sample` on. Of N shares, share r reads the micro-batches r, r + N, …, so
    /// that the number of processes does not change the rows of a step.
    pub(super) fn batches(&self, first_sample: u64) -> Result<Prefetch, TrainError> {
        let local = self.recipe.training.local_batch_size;
        let rank_and_size = [self.share.rank, self.share.size];
        let depth = PREFETCH_DEPTH.max(self.micro_batches);
        let plan = PrefetchPlan::of_rank(first_sample, local, rank_and_size, depth);
        Ok(Prefetch::new(self.loader.clone(), plan)?)
    }
}

/// The rows of one step, counted from 1, of a run that took every step before it.
///
/// # Errors
/// A recipe that does not fit the data, an unreadable shard.
pub fn step_batch(recipe: &Recipe, data: &TrainingData, step: u64) -> Result<Batch, TrainError> {
    let index = step.saturating_sub(1) as usize;
    let state = StageState::new(recipe, recipe.stage_of_step(index), data, Share::ALL)?;
    let rows = state.recipe.training.global_batch_size;
    let steps_before = index - state.stage.steps.start.min(index);
    Ok(state.loader.batch((steps_before * rows) as u64, rows)?)
}

/// Rotary tables of the model, for training and for validation.
pub(super) struct Ropes<B: TrainBackend> {
    pub(super) training: RotaryEmbedding<B>,
    pub(super) validation: RotaryEmbedding<B::InnerBackend>,
}

impl<B: TrainBackend> Ropes<B> {
    pub(super) fn new(model: &Qwen3<B>, seq_len: usize, device: &B::Device) -> Self {
        let training = model.rope(seq_len, device);
        Self { validation: training.map(&Tensor::inner), training }
    }
}

impl<B: TrainBackend> Trainer<B> {
    /// The stage of the next step, if it is not the present one.
    pub(super) fn next_stage(&self) -> Option<Stage> {
        let next = self.recipe.stage_of_step(self.progress.step as usize);
        (next.index != self.stage.stage.index).then_some(next)
    }

    /// Switches to `stage`: keeps weights and moments, in a model with the stage's window and rotary base, and begins
    /// with the stage's first row. Where the stage has other kinds of attention, tensors become those of its model as
    /// [`Conversion`] says; the returned notes say what was done, with the losses of the same rows before and after.
    pub(super) fn enter_stage(&mut self, stage: Stage) -> Result<Vec<String>, TrainError> {
        self.finish_leaves()?;
        let former = self.stage.shape.clone();
        self.stage = StageState::new(&self.recipe, stage, &self.data, self.share())?;
        self.progress.next_sample = 0;
        self.progress.unlabelled.num_rows_in_a_row = 0;
        self.guard_log.loss_mean.restart();
        let conversion = self.conversion_from(&former, "the stage before")?;
        let (seed, seq_len) = (self.recipe.training.seed, self.stage.recipe.training.seq_len);
        let size = self.size_of_comparison();
        let loss_before = if conversion.changes_layers() {
            // The former model on the rows of the new stage.

            self.learner.ropes = Ropes::new(self.model(), seq_len, &self.machine.device);
            Some(self.present_report(size)?.loss)
        } else {
            None
        };
        let next = Qwen3::new(&self.stage.shape, seed, &self.machine.device);
        let before = self.learner.model.take().expect(AWAY);
        let model =
            Segment::with_parameters_of(next, &before, &mut self.learner.optimizer.holder(self.machine.precision));
        if conversion.changes_layers() {
            self.learner.optimizer.go_on_with(&self.stage.shape, &model);
        }
        self.learner.ropes = Ropes::new(&model, seq_len, &self.machine.device);
        self.learner.model = Some(model);
        let Some(loss_before) = loss_before else {
            return Ok(Vec::new());
        };
        let after = self.present_report(size)?;
        let words = conversion.words().map(|words| format!("note: {words}"));
        Ok(words.into_iter().chain(losses_in_words(loss_before, after.loss, after.num_labels)).collect())
    }

    /// How the weights of a model of `former` become those of the present stage; `whose` says whose model that is.
    fn conversion_from(&self, former: &ModelShape, whose: &str) -> Result<Conversion, TrainError> {
        Conversion::of(former, &self.stage.shape).map_err(|gap| {
            let what = format!("the model of {whose} does not fit: {gap}");
            TrainError::refused(what, "give the recipe of the run that wrote it")
        })
    }

    /// How much held-out text models before and after a conversion are compared on.
    fn size_of_comparison(&self) -> ValidationSize {
        let own = self.stage.validation_size();
        let seq_len = self.stage.recipe.training.seq_len;
        ValidationSize { num_tokens: own.num_tokens.min(CONVERTED_TOKENS.max(seq_len)), ..own }
    }

    /// Enters a stage. If no rank can, the state before it is written as a checkpoint.
    pub(super) fn enter_or_save(
        &mut self,
        stage: Stage,
        reporter: &mut Reporter<'_>,
    ) -> Result<Vec<String>, TrainError> {
        let entered = self.enter_stage(stage);
        if !self.gathered(entered.is_ok())?.contains(&true) {
            self.save_last(reporter)?;
        }
        entered
    }

    /// Builds the model of the present stage from a checkpoint's weights, and loads the moments unless
    /// `fresh_optimizer`. Tensors that the checkpoint does not have start as in a new model.
    pub(super) fn install(&mut self, checkpoint: &Checkpoint, fresh_optimizer: bool) -> Result<(), TrainError> {
        let (seed, shape) = (self.recipe.training.seed, &self.stage.shape);
        let (former, saved) = checkpoint.recipe_and_shape()?;
        let conversion = self.conversion_from(&saved, &checkpoint.path.shown().to_string())?;
        let weights = checkpoint.model()?;
        let model = Qwen3::new(shape, seed, &self.machine.device);
        self.learner.ropes = Ropes::new(&model, self.stage.recipe.training.seq_len, &self.machine.device);
        let mut read = |name: &str, shape: &[usize]| weights.tensor(name, shape).map_err(TrainError::from);
        let mut source = converted_source(&model, &conversion, &mut read);
        let loader = ParameterLoader::new(DType::F32, &mut source);
        let mut held = LoadedThen { loader, then: &mut self.learner.optimizer.holder(self.machine.precision) };
        let model = model.map(&mut held);
        held.loader.finish()?;
        if checkpoint.has_optimizer() && !fresh_optimizer {
            let moments = checkpoint.optimizer()?;
            let names = moments.names().into_iter().collect::<HashSet<_>>();
            let has = |name: &str| names.contains(name);
            // A run that trains indexers alone has moments of nothing else, and needs none.
            let of_indexers = former.training.trains_indexers_alone() || self.recipe.training.trains_indexers_alone();
            let parameters = shape.all_parameters().into_iter().filter(|spec| spec.part != Part::Indexer);
            let without: HashSet<String> = parameters.filter(|_| of_indexers).map(|spec| spec.ours).collect();
            let mut read = |name: &str, shape: &[usize], range| moments.part(name, shape, range);
            self.learner.optimizer.load_state(&model, &self.machine.device, &mut read, &has, &|name| {
                conversion.adds(name) || without.contains(name)
            })?;
        }
        self.learner.model = Some(model);
        Ok(())
    }

    /// How the checkpoint that the run goes on from became the present stage's model, in words. For a branch these are
    /// the losses alone: the notices of its `Origin` say the rest. Empty if no layer changed. With sharded weights no
    /// process could hold the former model, so only the loss after the conversion is given. All ranks call it.
    pub(super) fn conversion_notes(
        &mut self,
        checkpoint: &Checkpoint,
        is_branch: bool,
    ) -> Result<Vec<String>, TrainError> {
        let (recipe, saved) = checkpoint.recipe_and_shape()?;
        let conversion = self.conversion_from(&saved, &checkpoint.path.shown().to_string())?;
        if !conversion.changes_layers() {
            return Ok(Vec::new());
        }
        let words = conversion.words().filter(|_| !is_branch).map(|words| format!("note: {words}"));
        Ok(words.into_iter().chain(self.converted_losses(checkpoint, &recipe, &saved)?).collect())
    }

    /// The losses of the same held-out rows before and after a conversion, in words; with divided weights (ZeRO-3) the
    /// loss after it alone. `None` on ranks that have no losses.
    fn converted_losses(
        &mut self,
        checkpoint: &Checkpoint,
        recipe: &Recipe,
        saved: &ModelShape,
    ) -> Result<Option<String>, TrainError> {
        let (seq_len, size) = (self.stage.recipe.training.seq_len, self.size_of_comparison());
        let after = self.present_report(size)?;
        let labels = after.num_labels;
        if !self.share().keeps_whole {
            return Ok(after
                .loss
                .is_finite()
                .then(|| format!("note: loss of {labels} held-out tokens after the conversion: {:.4}", after.loss)));
        }
        let dtype = match self.machine.precision {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
        };
        let weights = checkpoint.model()?;
        let former = Qwen3::<B::InnerBackend>::new(saved, recipe.training.seed, &self.machine.device);
        let former = load_parameters(former, dtype, &mut |name, shape| weights.tensor(name, shape))?;
        let before = self.report_of(&former, &former.rope(seq_len, &self.machine.device), size)?;
        Ok(losses_in_words(before.loss, after.loss, labels))
    }
}

/// The losses of the same `labels` held-out tokens before and after a conversion, in words; `None` on ranks that have
/// none.
fn losses_in_words(before: f64, after: f64, labels: u64) -> Option<String> {
    let is_number = before.is_finite() && after.is_finite();
    is_number.then(|| format!("note: loss of the same {labels} held-out tokens: {before:.4} before, {after:.4} after"))
}
