//! The Hugging Face layout: weights, configuration and tokenizer as stock `transformers` classes read them.
//!
//! Stock classes need no remote code. Dense and sliding-window models are `Qwen3ForCausalLM`; without norms of queries
//! and keys they are `LlamaForCausalLM`, `MistralForCausalLM` (every layer has the window), `MinistralForCausalLM`
//! (some layers have it), `SmolLM3ForCausalLM` (some layers do not rotate) or `Qwen2ForCausalLM` (with biases).
//! Dynamic mask models are `DogeForCausalLM`, and latent ones without head norms `DeepseekV3ForCausalLM`.
//!
//! MSA is MiniMax-M3's text class on request, of `transformers` or of vLLM ([`m3`]).
//!
//! Other models (NSA; DMA with dense layers; norms and biases, or norms and layers that do not rotate) are computed by
//! `modeling_sieve.py`, which is written next to the weights (`trust_remote_code=True`); DMA's published form too, on
//! request. The same checkpoint always gives the same bytes.

pub(crate) mod architecture;
mod card;
pub(crate) mod config;
mod folder;
pub(crate) mod form;
mod json_text;
pub(crate) mod m3;
mod shards;
pub(crate) mod tensors;
pub(crate) mod tokenizer_files;

use crate::tensor_file::stream_tensor_file;
use crate::tensor_files::{INDEX, TensorFiles};
use crate::{Checkpoint, CheckpointError};
pub(crate) use architecture::{Architecture, Windows};
pub use architecture::{DEFAULT_SHARD_BYTES, ExportDtype, ExportForm, ExportOptions};
use burn::tensor::DType;
use folder::OutFolder;
pub(crate) use folder::row_tokens;
use sieve_core::ShownPath;
pub(crate) use sieve_core::kinds::DEEPSEEK_LATENT_EPS;
use sieve_files::write_synced;
use std::collections::HashMap;
use std::path::Path;
use tensors::ExportTensor;

/// What an export wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportReport {
    /// The class of `transformers` or vLLM that reads the export.
    pub architecture: &'static str,
    /// Whether the class leaves the choice among keys of equal score to `torch.topk`. Logits differ where training kept
    /// another of these keys.
    pub leaves_ties_open: bool,
    /// Whether the class is in the exported `modeling_sieve.py`, which `transformers` runs only with
    /// `trust_remote_code=True`.
    pub is_remote_code: bool,
    /// Whether the class counts blocks of keys from a row's padding: a batch padded on the left gets other text.
    pub counts_padding: bool,
    /// Whether the class is vLLM's, and `transformers` lacks it.
    pub is_for_vllm: bool,
    /// Whether `AutoTokenizer` of transformers 5 splits words as Qwen2 does, although the model's tokenizer does not.
    pub replaces_tokenizer: bool,
    /// Why the stock class of the model's kind cannot compute it, if there is such a class.
    pub not_stock: Option<&'static str>,
    /// Names of the files, in the order of writing.
    pub files: Vec<String>,
    /// Number of parameters in all tensors.
    pub num_parameters: u64,
    /// Size of all tensors in bytes.
    pub num_bytes: u64,
}

/// The Python files of models that no stock class computes: the class, and the definitions of attention that it
/// imports, which are the package's.
const MODELING: [(&str, &str); 2] = [
    ("modeling_sieve.py", include_str!("export/modeling_sieve.py")),
    ("definitions.py", include_str!("../../../python/sieve_attention/definitions.py")),
];

/// Writes the model of `checkpoint` to the folder `out`, which must be new, empty, or an earlier export.
///
/// An earlier export is replaced; other files in the folder stay. A failure leaves no incomplete file under a final
/// name, and no `config.json` beside weights of another model.
///
/// # Errors
/// A model that the class asked for cannot compute, an indexer's warm-up, a folder that holds something else, weights
/// that do not fit the recipe's model, any failure of the file system.
pub fn export(checkpoint: &Checkpoint, out: &Path, options: &ExportOptions) -> Result<ExportReport, CheckpointError> {
    let (recipe, shape) = checkpoint.recipe_and_shape()?;
    if shape.attentions().iter().any(|(attention, _)| attention.index_warmup() == Some(true)) {
        return Err(CheckpointError::refused(
            format!(
                "{} is from an indexer's warm-up, in which queries read all keys (index_warmup): the exported model \
                 would choose keys by an indexer that is still learning",
                checkpoint.path.shown()
            ),
            "continue training to the stage after the warm-up, and export a checkpoint of that stage",
        ));
    }
    let architecture = Architecture::of(&shape, options.form)?;
    let weights = checkpoint.model()?;
    let tensors = tensors::tensors_of(&shape, architecture);
    tensors::check_complete(&tensors, &weights)?;

    let beside = tokenizer_files::folder(&checkpoint.path, &recipe);
    let generation = config::generation(options, tokenizer_files::object(&beside, tokenizer_files::GENERATION)?);
    let json_files = [
        (folder::CONFIG, config::model(&shape, architecture, options, &generation)),
        (tokenizer_files::GENERATION, json_text::to_text(&generation)),
    ];
    let tokenizer_files = tokenizer_files::read(checkpoint, &beside, shape.max_seq_len, options)?;
    let replaces_tokenizer = architecture == Architecture::Qwen2 && !tokenizer_files::splits_as_qwen2(&tokenizer_files);

    let modeling = MODELING.into_iter().filter(|_| architecture == Architecture::Sieve);
    let modeling = modeling.map(|(name, text)| (name, text.to_owned()));
    let num_parameters = tensors.iter().map(ExportTensor::num_elements).sum();
    let card = card::Card {
        checkpoint,
        recipe: &recipe,
        stages: checkpoint.trained_stages()?,
        shape: &shape,
        architecture,
        options,
        num_parameters,
        replaces_tokenizer,
    };
    let card = (card::CARD, card.text());
    let texts = json_files.into_iter().chain(modeling).chain(tokenizer_files).chain([card]);

    let folder = OutFolder::claim(out)?;
    let mut files = Vec::new();
    for (name, text) in texts {
        write_synced(&folder.partial(name), text.as_bytes())?;
        files.push(name.to_owned());
    }
    let dtype = options.dtype.dtype();
    let shards = shards::plan(&tensors, dtype, options.max_shard_bytes);
    files.extend(write_shards(&folder, &shards, &weights, dtype)?);
    folder.publish(&files, recipe.training.seq_len)?;
    files.push(folder::MARKER.to_owned());
    Ok(ExportReport {
        architecture: architecture.class().name,
        leaves_ties_open: architecture == Architecture::Doge,
        is_remote_code: architecture == Architecture::Sieve,
        counts_padding: architecture == Architecture::M3,
        is_for_vllm: architecture == Architecture::M3Vllm,
        replaces_tokenizer,
        not_stock: shape
            .attention
            .as_kind()
            .stock(&shape)
            .err()
            .flatten()
            .filter(|_| architecture == Architecture::Sieve),
        files,
        num_parameters,
        num_bytes: tensors.iter().map(|tensor| tensor.num_bytes(dtype)).sum(),
    })
}

/// Writes the weights, and an index of several files. Returns the files' names.
fn write_shards(
    folder: &OutFolder,
    shards: &[shards::Shard<'_>],
    weights: &TensorFiles,
    dtype: DType,
) -> Result<Vec<String>, CheckpointError> {
    let mut files = Vec::new();
    for shard in shards {
        let headers: Vec<_> = shard.tensors.iter().map(|tensor| tensor.header(dtype)).collect();
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let path = folder.partial(&shard.file);
        stream_tensor_file(&path, &headers, Some(metadata), |n| Ok(shard.tensors[n].read(weights, dtype)?.bytes))?;
        files.push(shard.file.clone());
    }
    if shards.len() > 1 {
        write_synced(&folder.partial(INDEX), shards::index(shards, dtype).as_bytes())?;
        files.push(INDEX.to_owned());
    }
    Ok(files)
}

#[cfg(test)]
pub(crate) mod tests;
