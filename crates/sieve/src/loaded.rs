//! Loads a checkpoint and its tokenizer on a device, for the commands that use a trained model.
use crate::device::{Device, DeviceChoice};
use crate::out_of_memory::MemoryArgs;
use anyhow::{Context, Result, bail};
use burn::tensor::DType;
use burn::tensor::backend::Backend;
use clap::{Args, ValueEnum};
use sieve_core::{ModelShape, Recipe, ShownPath};
use sieve_data::Tokenizer;
use sieve_hf::{ChatTemplate, Kept, LoadedModel, load_model, peek_model};
use sieve_plan::InferenceSize;
use std::path::Path;

/// `--device`, `--dtype` and `--ignore-memory`.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct PlaceArgs {
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    pub(crate) device: DeviceChoice,
    /// What a CPU keeps the weights of projections, feed-forward layers, embedding and output in: f32, or bf16, which
    /// takes half the memory and reads it in half the time; sums are f32. A GPU computes in bf16
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<DtypeArg>,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
}

/// Number type of the loaded weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DtypeArg {
    F32,
    Bf16,
}

/// The device a model runs on, and the type its parameters have there.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Place {
    pub(crate) device: Device,
    pub(crate) kept: Kept,
}

impl Place {
    /// # Errors
    /// `dtype` with a GPU: parameters are always bf16 there.
    pub(crate) fn new(device: Device, dtype: Option<DtypeArg>) -> Result<Self> {
        let kept = match (&device, dtype) {
            (Device::Cpu, None | Some(DtypeArg::F32)) => Kept::All(DType::F32),
            (Device::Cpu, Some(DtypeArg::Bf16)) => Kept::Bf16Weights,
            (Device::Cuda(_), None) => Kept::All(DType::BF16),
            (Device::Cuda(gpu), Some(_)) => bail!(
                "--dtype is what a CPU keeps weights in; this model computes on cuda:{}, where all is bf16\n  \
                 hint: leave --dtype out, or add --device cpu",
                gpu.index
            ),
        };
        Ok(Self { device, kept })
    }
}

impl PlaceArgs {
    /// Finds the device for a checkpoint's model.
    pub(crate) fn place(self, checkpoint: &Path) -> Result<Place> {
        (self.device).resolve_for(self.dtype, || Ok(peek_model(checkpoint)?.1))
    }

    /// As [`place`](Self::place), and checks that work of this size fits into the device's memory.
    pub(crate) fn for_checkpoint(
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
macro_rules! on_device {
    ($place:expr, $run:ident($($argument:expr),*)) => {{
        let place = $place;
        match place.device {
            $crate::device::Device::Cpu => {
                $run::<burn_flex::Flex>($($argument,)* &burn_flex::FlexDevice, place.kept)
            }
            $crate::device::Device::Cuda(gpu) => {
                $run::<sieve_ops::Cuda>($($argument,)* &burn_cuda::CudaDevice::new(gpu.index), place.kept)
            }
        }
    }};
}
pub(crate) use on_device;

/// Loads a model's tokenizer. The recipe may name its end-of-document token.
pub(crate) fn tokenizer(path: &Path, recipe: &Recipe) -> Result<Tokenizer> {
    Ok(Tokenizer::from_file(path)?.with_eos_token(recipe.tokenizer.eos_token.as_deref()))
}

/// Loads a checkpoint's model and its tokenizer.
pub(crate) fn load<B: Backend>(
    checkpoint: &Path,
    device: &B::Device,
    kept: Kept,
) -> Result<(LoadedModel<B>, Tokenizer)> {
    let loaded = load_model::<B>(checkpoint, device, kept)?;
    let tokenizer = tokenizer(&loaded.tokenizer_path, &loaded.recipe)?;
    Ok((loaded, tokenizer))
}

/// The chat template of the model in a folder, for the flag that asks for it.
pub(crate) fn chat_template(checkpoint: &Path, flag: &str) -> Result<ChatTemplate> {
    ChatTemplate::of_model(checkpoint)?.with_context(|| {
        format!(
            "{} has no chat template\n  hint: leave {flag} out, or put the model's chat_template.jinja beside its \
             tokenizer.json",
            checkpoint.shown()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::tests::h200;

    #[test]
    fn only_a_cpu_has_a_choice_of_type() {
        let gpu = h200(2);
        let kept = |dtype| Place::new(Device::Cpu, dtype).expect("a CPU takes any").kept;
        assert_eq!(kept(None), Kept::All(DType::F32));
        assert_eq!(kept(Some(DtypeArg::F32)), Kept::All(DType::F32));
        assert_eq!(kept(Some(DtypeArg::Bf16)), Kept::Bf16Weights);
        assert_eq!(Place::new(gpu.clone(), None).expect("bf16").kept, Kept::All(DType::BF16));
        for dtype in [DtypeArg::F32, DtypeArg::Bf16] {
            let error = Place::new(gpu.clone(), Some(dtype)).expect_err("a GPU").to_string();
            assert!(error.contains("cuda:2") && error.contains("--device cpu"), "{error}");
        }
    }
}
