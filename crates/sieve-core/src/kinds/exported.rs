//! How a kind is written to and read from the `config.json` of an export, and which class of `transformers` computes
//! it.

use serde_json::Value;

use crate::model::ModelShape;

/// A key of an export's `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct ConfigKey<'a> {
    /// Name of the key.
    pub name: &'a str,
    /// Whether an export that lacks the key is refused; else a recipe's default holds.
    pub is_needed: bool,
}

impl<'a> ConfigKey<'a> {
    /// The key of this name, which an export may lack.
    pub fn named(name: &'a str) -> Self {
        Self { name, is_needed: false }
    }
}

/// How a kind is exported.
pub trait Exported {
    /// The sizes of the kind as keys of `config.json`, for the exported `modeling_sieve.py`.
    fn config_keys(&self, layer: &ModelShape) -> Value;

    /// Where an export's `config.json` has a recipe's key of `[attention]`.
    fn config_key<'a>(&self, key: &'a str) -> ConfigKey<'a> {
        ConfigKey::named(key)
    }

    /// The class of `transformers` that computes a model of this kind in its layers, and its keys of `config.json`.
    ///
    /// # Errors
    /// `None` without such a class; else why the kind's class does not compute this model.
    fn stock(&self, _model: &ModelShape) -> Result<Stock, Option<&'static str>> {
        Err(None)
    }
}

/// A class of `transformers` for a kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Stock {
    /// The class, or family of classes.
    pub class: StockClass,
    /// Its keys of `config.json` that describe the attention.
    pub keys: Value,
}

/// Classes of `transformers`, by what their attention computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StockClass {
    /// Qwen3, Llama, Mistral or Qwen2: grouped-query attention, with a window where `windowed`.
    Grouped {
        /// Whether layers have a window.
        windowed: bool,
    },
    /// `DogeForCausalLM`.
    Doge,
    /// `DeepseekV3ForCausalLM`.
    DeepseekV3,
}

/// The name of a dense layer in `layer_types` of `transformers`.
pub const FULL_ATTENTION: &str = "full_attention";

/// The name of a layer with a sliding window in `layer_types` of `transformers`.
pub const SLIDING_ATTENTION: &str = "sliding_attention";
