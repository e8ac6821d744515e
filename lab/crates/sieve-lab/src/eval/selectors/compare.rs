//! `--compare`: models with an attention of their own beside the selectors.
use anyhow::{Context, Result, bail};
use serde::Serialize;
use sieve_core::ShownPath;
use sieve_data::Tokenizer;
use sieve_eval::{TrainedMeasure, measure_trained};
use sieve_hf::{Kept, LoadedModel};
use sieve_host::{hub, loaded};
use sieve_ops::DeviceBackend;
use std::path::PathBuf;

/// A compared model's row of the table.
#[derive(Debug, Serialize)]
pub(super) struct Trained {
    /// Folder of the model's checkpoint.
    pub(super) checkpoint: String,
    /// Optimizer step of the checkpoint, if its folder says it.
    pub(super) step: Option<u64>,
    #[serde(flatten)]
    pub(super) measure: TrainedMeasure,
}

/// Loads the models. Fails if one has another tokenizer or a context shorter than the prompts.
pub(super) fn load<B: DeviceBackend>(
    folders: &[PathBuf],
    tokenizer: &Tokenizer,
    longest: usize,
    device: &B::Device,
    kept: Kept,
) -> Result<Vec<LoadedModel<B>>> {
    let mut models = Vec::new();
    for folder in folders {
        let in_folder = || format!("--compare {}", folder.shown());
        let fetched = hub::folder(folder).with_context(in_folder)?;
        let (loaded, other) = loaded::load::<B>(&fetched, device, kept).with_context(in_folder)?;
        if other.hash() != tokenizer.hash() {
            bail!(
                "--compare {}: its tokenizer is not the one of --checkpoint, so losses per token cannot be compared\n  \
                 hint: train both with one tokenizer ([tokenizer] path), on the same text",
                folder.shown()
            );
        }
        let context = loaded.shape.max_seq_len;
        if longest > context {
            bail!(
                "--compare {}: prompts of {longest} tokens do not fit into its context of {context} \
                 (max_position_embeddings)\n  \
                 hint: give shorter --lengths",
                folder.shown()
            );
        }
        models.push(loaded);
    }
    Ok(models)
}

/// Measures each model on the same prompts.
pub(super) fn measure<B: DeviceBackend>(
    models: &[LoadedModel<B>],
    windows: &[Vec<u32>],
    device: &B::Device,
) -> Result<Vec<Trained>> {
    models
        .iter()
        .map(|loaded| {
            let measure = measure_trained(&loaded.model, windows, device)
                .with_context(|| format!("--compare {}", loaded.path.shown()))?;
            Ok(Trained { checkpoint: loaded.path.to_string_lossy().into_owned(), step: loaded.step(), measure })
        })
        .collect()
}
