//! Loads a checkpoint and its tokenizer on a device, for the commands that use a trained model.
use crate::device::{DeviceChoice, DtypeArg, Place};
use crate::out_of_memory::MemoryArgs;
use crate::terminal;
use anyhow::{Context, Result, bail, ensure};
use burn::module::{ModuleMapper, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use clap::Args;
use indicatif::ProgressBar;
use sieve_core::{ModelShape, Recipe, ShownPath};
use sieve_data::Tokenizer;
use sieve_hf::{
    ChatTemplate, CheckpointError, Kept, LoadedModel, SamplingDefaults, importable_families, load_model,
    load_model_then, peek_model,
};
use sieve_infer::LogitRules;
use sieve_plan::InferenceSize;
use std::path::Path;

/// The help of `--checkpoint` where a command reads every model.
pub fn checkpoint_help() -> String {
    format!(
        "A checkpoint (step-N), a run folder (then its latest), an export, or another Hugging Face folder of {}; \
         hf://OWNER/NAME or hf://OWNER/NAME@REVISION is a model on the hub",
        importable_families()
    )
}

/// `--device`, `--dtype` and `--ignore-memory`.
#[derive(Args, Clone, Copy, Debug)]
pub struct PlaceArgs {
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    pub device: DeviceChoice,
    /// What a CPU keeps the weights of projections, feed-forward layers, embedding and output in: f32, or bf16, which
    /// takes half the memory and reads it in half the time; sums are f32. A GPU computes in bf16
    #[arg(long, value_enum)]
    pub dtype: Option<DtypeArg>,
    /// Whether work that does not fit into memory is tried.
    #[command(flatten)]
    pub memory: MemoryArgs,
}

impl PlaceArgs {
    /// Finds the device for a checkpoint's model.
    pub fn place(self, checkpoint: &Path) -> Result<Place> {
        (self.device).resolve_for(self.dtype, || Ok(peek_model(checkpoint)?.1))
    }

    /// Finds the device for a checkpoint's model, and checks that work of this size fits into its memory.
    pub fn for_checkpoint(
        self,
        checkpoint: &Path,
        size: impl FnOnce(&Recipe, &ModelShape) -> InferenceSize,
    ) -> Result<Place> {
        let place = self.place(checkpoint)?;
        self.memory.check_inference(checkpoint, &place, size)?;
        Ok(place)
    }
}

/// Calls `$run::<Backend>(arguments.., device, kept)` for the backend of a [`Place`].
#[macro_export]
macro_rules! on_device {
    ($place:expr, $run:ident($($argument:expr),*)) => {{
        let place = $place;
        match place.device {
            $crate::device::Device::Cpu => {
                $run::<$crate::backends::Flex>($($argument,)* &$crate::backends::FlexDevice, place.kept)
            }
            $crate::device::Device::Cuda(gpu) => {
                $run::<$crate::backends::Cuda>(
                    $($argument,)* &$crate::backends::CudaDevice::new(gpu.index), place.kept
                )
            }
        }
    }};
}
pub use on_device;

/// Loads the tokenizer of a model of this shape. The recipe may name its end-of-document token.
pub fn tokenizer(path: &Path, recipe: &Recipe, shape: &ModelShape) -> Result<Tokenizer> {
    let tokenizer = Tokenizer::from_file(path)?.with_eos_token(recipe.tokenizer.eos_token.as_deref());
    check_tokenizer(&tokenizer, path, shape)?;
    Ok(tokenizer)
}

/// Refuses a tokenizer with more tokens than the model has rows. Tokens that were added on top may lack one: a text
/// that holds such a token is refused later.
pub fn check_tokenizer(tokenizer: &Tokenizer, path: &Path, shape: &ModelShape) -> Result<()> {
    let (tokens, rows) = (tokenizer.vocab_size(), shape.vocab_size);
    if tokens > rows && tokenizer.num_base_tokens() > rows {
        bail!(
            "{} has {} tokens without the added ones, and the embedding {} rows: it is the tokenizer of another \
             model\n  hint: take the tokenizer.json that was published with the weights",
            path.shown(),
            terminal::thousands(tokenizer.num_base_tokens() as u64),
            terminal::thousands(rows as u64)
        );
    }
    // Rows without a token are usual, but not most of them.
    if 2 * tokens < rows {
        log::warn!(
            "{} has {} tokens, and the embedding {} rows: it may be the tokenizer of another model",
            path.shown(),
            terminal::thousands(tokens as u64),
            terminal::thousands(rows as u64)
        );
    }
    Ok(())
}

/// From so many bytes of weights on, in f32, opening a model has a bar.
const BAR_BYTES: u64 = 2 << 30;

/// Loads a checkpoint's model, a large one with a bar of its bytes.
pub fn load_with_bar<B: Backend>(
    checkpoint: &Path,
    device: &B::Device,
    kept: Kept,
) -> Result<LoadedModel<B>, CheckpointError> {
    let num_bytes = peek_model(checkpoint).map_or(0, |(_, shape)| shape.parameters().total() * F32_BYTES);
    if num_bytes < BAR_BYTES {
        load_model(checkpoint, device, kept)
    } else {
        terminal::with_bytes_bar(num_bytes, |bar| load_model_then(checkpoint, device, kept, &mut Counted(bar)))
    }
}

/// Bytes of a number in f32, in which the bar counts: the file may hold another format.
const F32_BYTES: u64 = 4;

/// Moves a bar with each parameter that was read.
struct Counted<'a>(&'a ProgressBar);

impl<B: Backend> ModuleMapper<B> for Counted<'_> {
    fn map_float<const D: usize>(&mut self, parameter: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        self.0.inc(parameter.val().shape().num_elements() as u64 * F32_BYTES);
        parameter
    }
}

/// Loads a checkpoint's model and its tokenizer.
pub fn load<B: Backend>(checkpoint: &Path, device: &B::Device, kept: Kept) -> Result<(LoadedModel<B>, Tokenizer)> {
    let loaded = load_with_bar::<B>(checkpoint, device, kept)?;
    let tokenizer = tokenizer(&loaded.tokenizer_path, &loaded.recipe, &loaded.shape)?;
    Ok((loaded, tokenizer))
}

/// What the `generation_config.json` of a model says of logits before a token is drawn.
pub fn logit_rules(defaults: &SamplingDefaults) -> LogitRules {
    let none = LogitRules::NONE;
    LogitRules {
        min_p: defaults.min_p.unwrap_or(none.min_p),
        repetition_penalty: defaults.repetition_penalty.unwrap_or(none.repetition_penalty),
        ..none
    }
}

/// Tokens of a text or conversation: `--max-context`, or the model's own context.
///
/// # Errors
/// More tokens than the model's context.
pub fn context(max_context: Option<u64>, shape: &ModelShape) -> Result<usize> {
    let most = shape.max_seq_len;
    let context = max_context.map_or(most, |context| context as usize);
    ensure!(
        context <= most,
        "--max-context is {context}, but the model's context is {most} (max_position_embeddings)\n  hint: use at most \
         {most} or leave it out"
    );
    Ok(context)
}

/// The chat template of the model in a folder. `instead` is what the hint of the error says to do without one.
pub fn chat_template(checkpoint: &Path, instead: &str) -> Result<ChatTemplate> {
    ChatTemplate::of_model(checkpoint)?.with_context(|| {
        format!(
            "{} has no chat template\n  hint: {instead}, or put the model's chat_template.jinja next to its \
             tokenizer.json",
            checkpoint.shown()
        )
    })
}
