//! The Hugging Face layout: weights, configuration and tokenizer as stock `transformers` classes read them.
//!
//! Dense and sliding-window models are `Qwen3ForCausalLM`, without norms of queries and keys `LlamaForCausalLM`,
//! `MistralForCausalLM` (every layer has the window) or `Qwen2ForCausalLM` (with biases), dynamic mask models
//! `DogeForCausalLM`, latent ones without head norms `DeepseekV3ForCausalLM`; no remote code is needed. What no stock
//! class computes (NSA; DMA or windows with dense layers between them, without norms or with biases) is computed by
//! `modeling_sieve.py`, written next to the weights (`trust_remote_code=True`), as is DMA's published form on request.
//! The same checkpoint always gives the same bytes.

pub(crate) mod config;
mod folder;
mod shards;
pub(crate) mod tensors;
pub(crate) mod tokenizer_files;

use crate::tensor_file::stream_tensor_file;
use crate::{Checkpoint, CheckpointError};
use burn::tensor::DType;
use folder::OutFolder;
use sieve_core::model::{AttentionForm, MlaShape};
use sieve_core::{DmaBias, ModelShape};
use sieve_files::write_synced;
use std::collections::HashMap;
use std::path::Path;
use tensors::ExportTensor;

/// Number type of the exported weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExportDtype {
    /// As trained on the CPU, and as the masters of a GPU run.
    #[default]
    F32,
    /// Rounded to nearest, ties to even. A dynamic mask may keep other keys where scores nearly tie.
    Bf16,
}

impl ExportDtype {
    fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }

    /// PyTorch's name.
    fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
        }
    }
}

/// Whose class of `transformers` computes dynamic mask attention in its published form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportForm {
    /// Stock `DogeForCausalLM`, which leaves the choice among equal scores to `torch.topk`.
    Doge,
    /// `SieveForCausalLM` of the exported `modeling_sieve.py`, which keeps the later key, as in training.
    Sieve,
}

/// What an export needs beside the checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct ExportOptions {
    /// Number type of the weights.
    pub dtype: ExportDtype,
    /// Largest size of one file's tensors, in bytes; a single larger tensor still gets a file.
    pub max_shard_bytes: u64,
    /// The class to export for; `None`: a stock class where there is one.
    pub form: Option<ExportForm>,
    /// The token that ends a document.
    pub eos_token_id: u32,
    /// The token of padding, if there is one.
    pub pad_token_id: Option<u32>,
}

/// 5 GB, the size that the Hugging Face Hub recommends.
pub const DEFAULT_SHARD_BYTES: u64 = 5_000_000_000;

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportReport {
    /// The class of `transformers` that reads it.
    pub architecture: &'static str,
    /// Whether the class leaves the choice among keys of equal score to `torch.topk`, so that logits differ where the
    /// training kept another.
    pub leaves_ties_open: bool,
    /// Whether the class is in the exported `modeling_sieve.py`, which `transformers` runs with
    /// `trust_remote_code=True` alone.
    pub is_remote_code: bool,
    /// Whether `AutoTokenizer` of transformers 5 splits words as Qwen2 does, though the model's tokenizer does not.
    pub replaces_tokenizer: bool,
    /// Why the class of its kind in `transformers` does not do, where there is one.
    pub not_stock: Option<&'static str>,
    /// Names of the files, in the order of writing.
    pub files: Vec<String>,
    /// Numbers in all tensors.
    pub num_parameters: u64,
    /// Bytes of all tensors.
    pub num_bytes: u64,
}

/// The Python file that computes what no class of `transformers` does.
const MODELING: (&str, &str) = ("modeling_sieve.py", include_str!("export/modeling_sieve.py"));

/// The class of `transformers` that computes a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Architecture {
    Qwen3,
    Llama,
    Mistral,
    Qwen2,
    Doge,
    DeepseekV3,
    /// Of `modeling_sieve.py`.
    Sieve,
}

/// What a class of `transformers` is named, and what of a block differs between the classes.
#[derive(Debug)]
pub(crate) struct Class {
    pub(crate) name: &'static str,
    /// `model_type` of its `config.json`.
    pub(crate) model_type: &'static str,
    /// Norms of each head's queries and keys.
    pub(crate) qk_norm: bool,
    /// Biases of queries, keys and values.
    pub(crate) qkv_bias: bool,
    /// Of grouped-query attention: which layers may have a window.
    pub(crate) windows: Windows,
}

/// Which layers of a class may have a sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Windows {
    None,
    /// All or none.
    Every,
    /// Those that `layer_types` names.
    Named,
}

impl Architecture {
    pub(crate) const ALL: [Self; 7] = [
        Self::Qwen3,
        Self::Llama,
        Self::Mistral,
        Self::Qwen2,
        Self::Doge,
        Self::DeepseekV3,
        Self::Sieve,
    ];

    /// The table of the classes.
    pub(crate) fn class(self) -> Class {
        let (name, model_type, qk_norm, qkv_bias, windows) = match self {
            Self::Qwen3 => ("Qwen3ForCausalLM", "qwen3", true, false, Windows::Named),
            Self::Llama => ("LlamaForCausalLM", "llama", false, false, Windows::None),
            Self::Mistral => ("MistralForCausalLM", "mistral", false, false, Windows::Every),
            Self::Qwen2 => ("Qwen2ForCausalLM", "qwen2", false, true, Windows::Named),
            Self::Doge => ("DogeForCausalLM", "doge", true, false, Windows::None),
            Self::DeepseekV3 => ("DeepseekV3ForCausalLM", "deepseek_v3", true, false, Windows::None),
            Self::Sieve => ("SieveForCausalLM", "sieve", true, false, Windows::Named),
        };
        Class {
            name,
            model_type,
            qk_norm,
            qkv_bias,
            windows,
        }
    }

    /// Whether the attention is grouped-query attention with or without a window.
    pub(crate) fn is_grouped(self) -> bool {
        !matches!(self, Self::Doge | Self::DeepseekV3 | Self::Sieve)
    }

    /// The class that expresses `shape` in the form asked for, or why there is none.
    fn of(shape: &ModelShape, form: Option<ExportForm>) -> Result<Self, CheckpointError> {
        match (form, Self::usual(shape)) {
            (None, usual) => Ok(usual),
            (Some(ExportForm::Doge), Self::Doge) => Ok(Self::Doge),
            (Some(ExportForm::Sieve), Self::Doge | Self::DeepseekV3 | Self::Sieve) => Ok(Self::Sieve),
            (Some(ExportForm::Doge), _) => Err(CheckpointError::refused(
                "this model as Doge: Doge is dynamic mask attention in every layer, ranked by content alone, with \
                 bias = \"exp\", with norms of queries and keys and without biases",
                "leave the form out to get the class that computes this model",
            )),
            (Some(ExportForm::Sieve), _) => Err(CheckpointError::refused(
                "this model as modeling_sieve.py: transformers has a class for it",
                "leave the form out to get the stock class",
            )),
        }
    }

    /// The class that expresses `shape`, a stock one where there is one.
    fn usual(shape: &ModelShape) -> Self {
        match shape.attention.form() {
            AttentionForm::Grouped { .. } if shape.residual_scale => Self::Sieve,
            AttentionForm::Grouped { window } => {
                let needed = match window {
                    None => Windows::None,
                    Some(_) if shape.dense_layers.is_empty() => Windows::Every,
                    Some(_) => Windows::Named,
                };
                let computes = |class: Class| {
                    (class.qk_norm, class.qkv_bias) == (shape.qk_norm, shape.qkv_bias)
                        && (class.windows == Windows::Named || [Windows::None, class.windows].contains(&needed))
                };
                let mut classes = Self::ALL.into_iter().filter(|architecture| architecture.is_grouped());
                let found = classes.find(|architecture| computes(architecture.class()));
                // Norms and biases at once, or windows beside dense layers without either.
                found.unwrap_or(Self::Sieve)
            }
            AttentionForm::Latent(mla) if not_deepseek(shape, mla).is_none() => Self::DeepseekV3,
            AttentionForm::Latent(_) | AttentionForm::Branches(_) | AttentionForm::Blocks(_) => Self::Sieve,
            // Doge has neither recency nor a local window, and adds the exponential of a score.
            AttentionForm::Ranked(dma)
                if dma.ranks_by_content_alone()
                    && dma.bias == DmaBias::Exp
                    && shape.dense_layers.is_empty()
                    && shape.is_like_qwen3() =>
            {
                Self::Doge
            }
            AttentionForm::Ranked(_) => Self::Sieve,
        }
    }
}

/// Why a latent model is no `DeepseekV3ForCausalLM`.
fn not_deepseek(shape: &ModelShape, mla: MlaShape) -> Option<&'static str> {
    if mla.qk_norm {
        Some("DeepseekV3ForCausalLM has no norms of queries and keys in each head (attention.qk_norm)")
    } else if shape.residual_scale {
        Some("DeepseekV3ForCausalLM has no residual scales (model.residual_scale = true)")
    } else if shape.rms_norm_eps != DEEPSEEK_LATENT_EPS {
        Some("DeepseekV3ForCausalLM normalises latents with an epsilon of 1e-6 (model.rms_norm_eps)")
    } else {
        None
    }
}

/// Epsilon of the latent's norm in `transformers`, whatever `rms_norm_eps` says.
pub(crate) const DEEPSEEK_LATENT_EPS: f64 = 1e-6;

/// Writes the model of `checkpoint` to the folder `out`, which must be new, empty, or an earlier export.
///
/// An earlier export is replaced; other files beside it stay. A failure leaves no half-written file under a final name.
///
/// # Errors
/// A model that no stock class expresses, an indexer's warm-up, a folder that holds something else, weights that are
/// not the recipe's model, any failure of the file system.
pub fn export(checkpoint: &Checkpoint, out: &Path, options: &ExportOptions) -> Result<ExportReport, CheckpointError> {
    let (_, shape) = checkpoint.recipe_and_shape()?;
    if shape.attention.index_warmup() == Some(true) {
        return Err(CheckpointError::refused(
            format!(
                "{} is of an indexer's warm-up, in which queries read all keys (index_warmup): the exported model \
                 would choose keys by an indexer that is still learning",
                checkpoint.path.display()
            ),
            "train on to the stage behind the warm-up, and export a checkpoint of it",
        ));
    }
    let architecture = Architecture::of(&shape, options.form)?;
    let weights = checkpoint.model()?;
    let tensors = tensors::tensors_of(&shape, architecture);
    tensors::check_complete(&tensors, &weights)?;

    let beside = tokenizer_files::folder(&checkpoint.path, &checkpoint.recipe_and_shape()?.0);
    let generation = config::generation(options, tokenizer_files::object(&beside, tokenizer_files::GENERATION)?);
    let json_files = [
        ("config.json", config::model(&shape, architecture, options, &generation)),
        (tokenizer_files::GENERATION, config::to_text(&generation)),
    ];
    let tokenizer_files = tokenizer_files::read(checkpoint, &beside, shape.max_seq_len, options)?;
    let replaces_tokenizer = architecture == Architecture::Qwen2 && !tokenizer_files::splits_as_qwen2(&tokenizer_files);

    let modeling = (architecture == Architecture::Sieve).then(|| (MODELING.0, MODELING.1.to_owned()));
    let texts = json_files.into_iter().chain(modeling).chain(tokenizer_files);

    let folder = OutFolder::claim(out)?;
    let mut files = Vec::new();
    for (name, text) in texts {
        write_synced(&folder.partial(name), text.as_bytes())?;
        files.push(name.to_owned());
    }
    let dtype = options.dtype.dtype();
    let shards = shards::plan(&tensors, dtype, options.max_shard_bytes);
    for shard in &shards {
        let headers: Vec<_> = shard.tensors.iter().map(|tensor| tensor.header(dtype)).collect();
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let path = folder.partial(&shard.file);
        stream_tensor_file(&path, &headers, Some(metadata), |n| {
            Ok(shard.tensors[n].read(&weights, dtype)?.bytes)
        })?;
        files.push(shard.file.clone());
    }
    if shards.len() > 1 {
        let name = "model.safetensors.index.json";
        write_synced(&folder.partial(name), shards::index(&shards, dtype).as_bytes())?;
        files.push(name.to_owned());
    }
    folder.publish(&files)?;
    Ok(ExportReport {
        architecture: architecture.class().name,
        leaves_ties_open: architecture == Architecture::Doge,
        is_remote_code: architecture == Architecture::Sieve,
        replaces_tokenizer,
        not_stock: match shape.attention.form() {
            AttentionForm::Latent(mla) => not_deepseek(&shape, mla),
            _ => None,
        },
        files,
        num_parameters: tensors.iter().map(ExportTensor::num_elements).sum(),
        num_bytes: tensors.iter().map(|tensor| tensor.num_bytes(dtype)).sum(),
    })
}

#[cfg(test)]
pub(crate) mod tests;
