//! The Hugging Face layout: weights, configuration and tokenizer as stock `transformers` classes read them.
//!
//! Stock classes need no remote code. Dense and sliding-window models are `Qwen3ForCausalLM`; without norms of queries
//! and keys they are `LlamaForCausalLM`, `MistralForCausalLM` (every layer has the window), `MinistralForCausalLM`
//! (some layers have it), `SmolLM3ForCausalLM` (some layers do not rotate) or `Qwen2ForCausalLM` (with biases).
//! Dynamic mask models are `DogeForCausalLM`, and latent ones without head norms `DeepseekV3ForCausalLM`.
//!
//! Other models (NSA; DMA with dense layers; norms and biases, or norms and layers that do not rotate) are computed by
//! `modeling_sieve.py`, which is written next to the weights (`trust_remote_code=True`); DMA's published form too, on
//! request. The same checkpoint always gives the same bytes.

mod card;
pub(crate) mod config;
mod folder;
mod shards;
pub(crate) mod tensors;
pub(crate) mod tokenizer_files;

use crate::tensor_file::stream_tensor_file;
use crate::{Checkpoint, CheckpointError};
use burn::tensor::DType;
use folder::OutFolder;
pub(crate) use sieve_core::kinds::DEEPSEEK_LATENT_EPS;
use sieve_core::kinds::StockClass;
use sieve_core::{ModelShape, ShownPath};
use sieve_files::write_synced;
use std::collections::HashMap;
use std::path::Path;
use tensors::ExportTensor;

/// Float type of the exported weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExportDtype {
    /// The weights as trained on the CPU, or the masters of a GPU run.
    #[default]
    F32,
    /// Rounded to nearest, ties to even. A dynamic mask may then keep other keys whose scores are nearly equal.
    Bf16,
}

impl ExportDtype {
    fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }

    /// Name of the type in PyTorch.
    fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
        }
    }
}

/// The class that computes dynamic mask attention in its published form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportForm {
    /// Stock `DogeForCausalLM`, which leaves the choice among equal scores to `torch.topk`.
    Doge,
    /// `SieveForCausalLM` of the exported `modeling_sieve.py`, which of equal scores keeps the later key, as training
    /// does.
    Sieve,
}

/// Settings of an export to the Hugging Face layout.
#[derive(Clone, Copy, Debug)]
pub struct ExportOptions {
    /// Float type of the weights.
    pub dtype: ExportDtype,
    /// Largest size of one file's tensors, in bytes; a larger tensor gets a file of its own.
    pub max_shard_bytes: u64,
    /// The class to export for; `None` for a stock class if there is one.
    pub form: Option<ExportForm>,
    /// Id of the token that ends a document.
    pub eos_token_id: u32,
    /// Id of the padding token, if there is one.
    pub pad_token_id: Option<u32>,
}

/// 5 GB, the size that the Hugging Face Hub recommends.
pub const DEFAULT_SHARD_BYTES: u64 = 5_000_000_000;

/// What an export wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportReport {
    /// The class of `transformers` that reads the export.
    pub architecture: &'static str,
    /// Whether the class leaves the choice among keys of equal score to `torch.topk`. Logits differ where training kept
    /// another of these keys.
    pub leaves_ties_open: bool,
    /// Whether the class is in the exported `modeling_sieve.py`, which `transformers` runs only with
    /// `trust_remote_code=True`.
    pub is_remote_code: bool,
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

/// The class of `transformers` that computes a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Architecture {
    Qwen3,
    Llama,
    Mistral,
    Qwen2,
    Ministral,
    SmolLm3,
    Doge,
    DeepseekV3,
    /// The class in `modeling_sieve.py`, which is exported with the weights.
    Sieve,
}

/// A class of `transformers`: its names, and the properties in which the classes differ.
#[derive(Debug)]
pub(crate) struct Class {
    pub(crate) name: &'static str,
    /// Value of `model_type` in `config.json`.
    pub(crate) model_type: &'static str,
    /// Whether each head's queries and keys are normed.
    pub(crate) qk_norm: bool,
    /// Whether queries, keys and values have biases.
    pub(crate) qkv_bias: bool,
    /// Layers that may have a sliding window, with grouped-query attention.
    pub(crate) windows: Windows,
    /// Whether layers may leave queries and keys unrotated (NoPE).
    pub(crate) nope: bool,
}

/// Which layers of a class may have a sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Windows {
    None,
    /// The window is in all layers, or in none.
    Every,
    /// The layers that `layer_types` of `config.json` names.
    Named,
}

impl Architecture {
    pub(crate) const ALL: [Self; 9] = [
        Self::Qwen3,
        Self::Llama,
        Self::Mistral,
        Self::Qwen2,
        Self::Ministral,
        Self::SmolLm3,
        Self::Doge,
        Self::DeepseekV3,
        Self::Sieve,
    ];

    /// The names and properties of the class.
    pub(crate) fn class(self) -> Class {
        let (name, model_type, qk_norm, qkv_bias, windows) = match self {
            Self::Qwen3 => ("Qwen3ForCausalLM", "qwen3", true, false, Windows::Named),
            Self::Llama => ("LlamaForCausalLM", "llama", false, false, Windows::None),
            Self::Mistral => ("MistralForCausalLM", "mistral", false, false, Windows::Every),
            Self::Qwen2 => ("Qwen2ForCausalLM", "qwen2", false, true, Windows::Named),
            Self::Ministral => ("MinistralForCausalLM", "ministral", false, false, Windows::Named),
            Self::SmolLm3 => ("SmolLM3ForCausalLM", "smollm3", false, false, Windows::Named),
            Self::Doge => ("DogeForCausalLM", "doge", true, false, Windows::None),
            Self::DeepseekV3 => ("DeepseekV3ForCausalLM", "deepseek_v3", true, false, Windows::None),
            Self::Sieve => ("SieveForCausalLM", "sieve", true, false, Windows::Named),
        };
        let nope = matches!(self, Self::SmolLm3 | Self::Sieve);
        Class { name, model_type, qk_norm, qkv_bias, windows, nope }
    }

    /// Whether the attention is grouped-query attention with or without a window.
    pub(crate) fn is_grouped(self) -> bool {
        !matches!(self, Self::Doge | Self::DeepseekV3 | Self::Sieve)
    }

    /// The class that computes a model of `shape`; with `form`, only that class.
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

    /// The class that computes a model of `shape`, a stock one if there is one.
    fn usual(shape: &ModelShape) -> Self {
        let Ok(stock) = shape.attention.as_kind().stock(shape) else {
            return Self::Sieve;
        };
        match stock.class {
            StockClass::Doge => Self::Doge,
            StockClass::DeepseekV3 => Self::DeepseekV3,
            StockClass::Grouped { windowed } => {
                let needed = match windowed {
                    false => Windows::None,
                    true if shape.is_uniform() => Windows::Every,
                    true => Windows::Named,
                };
                let computes = |class: Class| {
                    (class.qk_norm, class.qkv_bias) == (shape.qk_norm, shape.qkv_bias)
                        && (class.nope || shape.rope_layers.is_every())
                        && (class.windows == Windows::Named || [Windows::None, class.windows].contains(&needed))
                };
                let mut classes = Self::ALL.into_iter().filter(|architecture| architecture.is_grouped());
                let found = classes.find(|architecture| computes(architecture.class()));
                // No class has both norms and biases, or either in layers that do not rotate.
                found.unwrap_or(Self::Sieve)
            }
        }
    }
}

/// Writes the model of `checkpoint` to the folder `out`, which must be new, empty, or an earlier export.
///
/// An earlier export is replaced; other files in the folder stay. A failure leaves no incomplete file under a final
/// name.
///
/// # Errors
/// A model that the class asked for cannot compute, an indexer's warm-up, a folder that holds something else, weights
/// that do not fit the recipe's model, any failure of the file system.
pub fn export(checkpoint: &Checkpoint, out: &Path, options: &ExportOptions) -> Result<ExportReport, CheckpointError> {
    let (recipe, shape) = checkpoint.recipe_and_shape()?;
    if shape.attentions().iter().any(|(attention, _)| attention.index_warmup() == Some(true)) {
        return Err(CheckpointError::refused(
            format!(
                "{} is of an indexer's warm-up, in which queries read all keys (index_warmup): the exported model \
                 would choose keys by an indexer that is still learning",
                checkpoint.path.shown()
            ),
            "train on to the stage behind the warm-up, and export a checkpoint of it",
        ));
    }
    let architecture = Architecture::of(&shape, options.form)?;
    let weights = checkpoint.model()?;
    let tensors = tensors::tensors_of(&shape, architecture);
    tensors::check_complete(&tensors, &weights)?;

    let beside = tokenizer_files::folder(&checkpoint.path, &recipe);
    let generation = config::generation(options, tokenizer_files::object(&beside, tokenizer_files::GENERATION)?);
    let json_files = [
        ("config.json", config::model(&shape, architecture, options, &generation)),
        (tokenizer_files::GENERATION, config::to_text(&generation)),
    ];
    let tokenizer_files = tokenizer_files::read(checkpoint, &beside, shape.max_seq_len, options)?;
    let replaces_tokenizer = architecture == Architecture::Qwen2 && !tokenizer_files::splits_as_qwen2(&tokenizer_files);

    let modeling = MODELING.into_iter().filter(|_| architecture == Architecture::Sieve);
    let modeling = modeling.map(|(name, text)| (name, text.to_owned()));
    let num_parameters = tensors.iter().map(ExportTensor::num_elements).sum();
    let card = card::Card {
        checkpoint,
        recipe: &recipe,
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
    for shard in &shards {
        let headers: Vec<_> = shard.tensors.iter().map(|tensor| tensor.header(dtype)).collect();
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let path = folder.partial(&shard.file);
        stream_tensor_file(&path, &headers, Some(metadata), |n| Ok(shard.tensors[n].read(&weights, dtype)?.bytes))?;
        files.push(shard.file.clone());
    }
    if shards.len() > 1 {
        let name = "model.safetensors.index.json";
        write_synced(&folder.partial(name), shards::index(&shards, dtype).as_bytes())?;
        files.push(name.to_owned());
    }
    folder.publish(&files)?;
    files.push(folder::MARKER.to_owned());
    Ok(ExportReport {
        architecture: architecture.class().name,
        leaves_ties_open: architecture == Architecture::Doge,
        is_remote_code: architecture == Architecture::Sieve,
        replaces_tokenizer,
        not_stock: shape.attention.as_kind().stock(&shape).err().flatten(),
        files,
        num_parameters,
        num_bytes: tensors.iter().map(|tensor| tensor.num_bytes(dtype)).sum(),
    })
}

#[cfg(test)]
pub(crate) mod tests;
