//! A checkpoint with its tokenizer, as the commands that use a trained model need them.
use crate::device::{Device, DeviceChoice};
use anyhow::Result;
use burn::tensor::DType;
use burn::tensor::backend::Backend;
use sieve_data::Tokenizer;
use sieve_hf::{LoadedModel, load_model, peek_model};
use std::path::Path;

/// Where the model of a checkpoint computes.
pub(crate) fn device(choice: DeviceChoice, checkpoint: &Path) -> Result<Device> {
    choice.resolve_for(|| {
        let (_, shape) = peek_model(checkpoint)?;
        Ok(shape)
    })
}

/// The model of a checkpoint in `dtype`, and its tokenizer.
pub(crate) fn load<B: Backend>(
    checkpoint: &Path,
    device: &B::Device,
    dtype: DType,
) -> Result<(LoadedModel<B>, Tokenizer)> {
    let loaded = load_model::<B>(checkpoint, device)?;
    let loaded = LoadedModel {
        model: sieve_nn::cast_parameters(loaded.model, dtype),
        ..loaded
    };
    let eos_token = loaded.recipe.tokenizer.eos_token.as_deref();
    let tokenizer = Tokenizer::from_file(&loaded.tokenizer_path)?.with_eos_token(eos_token);
    Ok((loaded, tokenizer))
}
