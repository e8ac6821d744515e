//! A checkpoint with its tokenizer, as the commands that use a trained model need them.
use crate::device::{Device, DeviceChoice};
use crate::out_of_memory::MemoryArgs;
use anyhow::Result;
use burn::tensor::DType;
use burn::tensor::backend::Backend;
use clap::Args;
use sieve_core::{ModelShape, Recipe};
use sieve_data::Tokenizer;
use sieve_hf::{LoadedModel, load_model, peek_model};
use sieve_plan::InferenceSize;
use std::path::Path;

/// Where the model of a checkpoint computes.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct PlaceArgs {
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    pub(crate) device: DeviceChoice,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
}

impl PlaceArgs {
    /// The device for the model of a checkpoint.
    pub(crate) fn device(self, checkpoint: &Path) -> Result<Device> {
        (self.device).resolve_for(|| Ok(peek_model(checkpoint)?.1))
    }

    /// The same; work of this size, by recipe and shape, fits there.
    pub(crate) fn for_checkpoint(
        self,
        checkpoint: &Path,
        size: impl FnOnce(&Recipe, &ModelShape) -> InferenceSize,
    ) -> Result<Device> {
        let device = self.device(checkpoint)?;
        self.memory.check_inference(checkpoint, &device, size)?;
        Ok(device)
    }
}

/// Calls a function of a backend: its arguments, then the device, and the type of the numbers there.
macro_rules! on_device {
    ($device:expr, $run:ident($($argument:expr),*)) => {
        match $device {
            $crate::device::Device::Cpu => $run::<burn_flex::Flex>(
                $($argument,)*
                &burn_flex::FlexDevice,
                burn::tensor::DType::F32,
            ),
            $crate::device::Device::Cuda(gpu) => $run::<sieve_ops::Cuda>(
                $($argument,)*
                &burn_cuda::CudaDevice::new(gpu.index),
                burn::tensor::DType::BF16,
            ),
        }
    };
}
pub(crate) use on_device;

/// The tokenizer of a model at `path`, with the name that its recipe gives the end-of-document token.
pub(crate) fn tokenizer(path: &Path, recipe: &Recipe) -> Result<Tokenizer> {
    Ok(Tokenizer::from_file(path)?.with_eos_token(recipe.tokenizer.eos_token.as_deref()))
}

/// The model of a checkpoint in `dtype`, and its tokenizer.
pub(crate) fn load<B: Backend>(
    checkpoint: &Path,
    device: &B::Device,
    dtype: DType,
) -> Result<(LoadedModel<B>, Tokenizer)> {
    let loaded = load_model::<B>(checkpoint, device, dtype)?;
    let tokenizer = tokenizer(&loaded.tokenizer_path, &loaded.recipe)?;
    Ok((loaded, tokenizer))
}
