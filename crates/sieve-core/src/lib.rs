//! Recipes, shapes and errors of Sieve: what every other crate agrees on. No Burn, no CUDA, no input or output.
//!
//! ```
//! use sieve_core::Recipe;
//!
//! # let text = include_str!("../../../recipes/quickstart.toml");
//! let overrides = ["optimizer.lr=1e-3".to_owned()];
//! let recipe = Recipe::load(text, "quickstart.toml", &overrides)?;
//! let shape = recipe.model_shape(4096)?;
//! let sparse = shape.executed_flops_per_token(recipe.training.seq_len);
//! let dense = shape.dense_flops_per_token(recipe.training.seq_len);
//! assert!(sparse.attention < dense.attention && sparse.linear == dense.linear);
//! # Ok::<(), sieve_core::RecipeError>(())
//! ```
//!
//! - [`recipe`]: the TOML recipe, its rules and its error messages
//! - [`paths`]: variables in a recipe's paths
//! - [`model`]: the sizes a model is built from, in Sieve's own names, and its parameter counts
//! - [`kinds`]: what each kind of attention is, one file a kind
//! - `calls`: what an op is called with: sizes, masks, choices of blocks, options of its kernels
//! - `wording`: what errors and lines have in common: refusals, suggestions, texts that a terminal may show

mod calls;
pub mod kinds;
pub mod model;
pub mod paths;
pub mod recipe;
mod wording;

mod keys;
mod lasting;
mod model_line;

pub use calls::*;
pub use kinds::shapes::*;
pub use lasting::{Lasting, TensorSizes};
pub use model::{
    Attention, AttentionPreset, DmaBias, DmaForm, DmaRecency, DmaWindow, IndexScores, LayerPattern, LayerType,
    ModelShape, NsaCompression, RopeLayers,
};
pub use model_line::{
    InitialWeights, MODEL_LINE, NumberFormat, attention_label, attention_words, covered_words, fitted_model_line,
    model_line, thousands,
};
pub use recipe::{Recipe, RecipeError};
pub use wording::*;
