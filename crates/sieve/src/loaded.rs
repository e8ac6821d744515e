//! A checkpoint with its tokenizer, as the commands that use a trained model need them.
use anyhow::Result;
use burn::tensor::DType;
use burn::tensor::backend::Backend;
use sieve_data::Tokenizer;
use sieve_hf::{LoadedModel, load_model};
use std::path::Path;

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
    let tokenizer = Tokenizer::from_file(&loaded.tokenizer_path)?;
    Ok((loaded, tokenizer))
}
