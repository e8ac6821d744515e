//! The classes of `transformers` that compute models, and the settings of an export.

use super::m3;
use crate::CheckpointError;
use burn::tensor::DType;
use sieve_core::ModelShape;
use sieve_core::kinds::StockClass;

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
    pub(super) fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }

    /// Name of the type in PyTorch.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
        }
    }
}

/// A class that computes a model on request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportForm {
    /// Dynamic mask attention as stock `DogeForCausalLM`, which leaves the choice among equal scores to `torch.topk`.
    Doge,
    /// `SieveForCausalLM` of the exported `modeling_sieve.py`, which of equal scores keeps the later key, as training
    /// does.
    Sieve,
    /// MSA as `MiniMaxM3VLForCausalLM`, MiniMax-M3's text class in `transformers`.
    M3,
    /// MSA as `MiniMaxM3SparseForCausalLM`, that class in vLLM.
    M3Vllm,
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
    /// MiniMax-M3's text class in `transformers`.
    M3,
    /// MiniMax-M3's text class in vLLM.
    M3Vllm,
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
    pub(crate) const ALL: [Self; 11] = [
        Self::Qwen3,
        Self::Llama,
        Self::Mistral,
        Self::Qwen2,
        Self::Ministral,
        Self::SmolLm3,
        Self::Doge,
        Self::DeepseekV3,
        Self::M3,
        Self::M3Vllm,
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
            Self::M3 => ("MiniMaxM3VLForCausalLM", "minimax_m3_vl_text", true, false, Windows::None),
            Self::M3Vllm => ("MiniMaxM3SparseForCausalLM", "minimax_m3_text", true, false, Windows::None),
            Self::Sieve => ("SieveForCausalLM", "sieve", true, false, Windows::Named),
        };
        let nope = matches!(self, Self::SmolLm3 | Self::Sieve);
        Class { name, model_type, qk_norm, qkv_bias, windows, nope }
    }

    /// The family's name, with what a model of it must be like to be imported.
    pub(crate) fn family(self) -> &'static str {
        match self {
            Self::DeepseekV3 => "DeepSeek-V3 (only dense layers)",
            Self::M3 | Self::M3Vllm => "MiniMax-M3 (only as exported)",
            _ => self.class().name.trim_end_matches("ForCausalLM"),
        }
    }

    /// Whether the attention is grouped-query attention with or without a window.
    pub(crate) fn is_grouped(self) -> bool {
        !matches!(self, Self::Doge | Self::DeepseekV3 | Self::M3 | Self::M3Vllm | Self::Sieve)
    }

    /// Whether the class is MiniMax-M3's text class.
    pub(crate) fn is_m3(self) -> bool {
        matches!(self, Self::M3 | Self::M3Vllm)
    }

    /// The classes that `transformers` itself has.
    pub(crate) fn stock() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|class| !matches!(class, Self::M3Vllm | Self::Sieve))
    }

    /// The class of MiniMax-M3, if it computes a model of `shape`.
    fn if_fits(self, shape: &ModelShape) -> Result<Self, CheckpointError> {
        m3::fits(shape, self.class().name, self == Self::M3Vllm).map(|()| self)
    }

    /// The class that computes a model of `shape`; with `form`, only that class.
    pub(super) fn of(shape: &ModelShape, form: Option<ExportForm>) -> Result<Self, CheckpointError> {
        match (form, Self::usual(shape)) {
            (None, usual) => Ok(usual),
            (Some(ExportForm::M3), _) => Self::M3.if_fits(shape),
            (Some(ExportForm::M3Vllm), _) => Self::M3Vllm.if_fits(shape),
            (Some(ExportForm::Doge), Self::Doge) => Ok(Self::Doge),
            (Some(ExportForm::Sieve), Self::Doge | Self::DeepseekV3 | Self::Sieve) => Ok(Self::Sieve),
            (Some(ExportForm::Doge), _) => Err(CheckpointError::refused(
                "this model as Doge: Doge is dynamic mask attention in every layer, ranked only by content, with \
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
