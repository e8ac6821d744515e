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

pub mod recipe;

pub mod paths;
mod pickles;

pub mod model;

mod adamw_step;
mod attention_shape;
pub mod block_choice;
mod block_selection;
mod call_shape;
mod did_you_mean;
mod draw;
mod fp8_format;
mod gemm_kind;
mod keeping;
mod kernel_policy;
mod key_mask;
mod keys;
pub mod kinds;
mod lasting;
mod model_line;
mod nsa_blocks;
mod refusal;
mod score_matrix;
mod short_form;
mod shown;

pub use adamw_step::AdamWStep;
pub use attention_shape::AttentionShape;
pub use block_choice::{BlockChoice, ChoiceRule, ForcedBlocks, SELECTED_SIZES, selected_pieces};
pub use block_selection::{
    BlockScores, BlockSelection, HeadRule, HeavyKeys, KeepBlocks, KeptBlocks, KeyScores, ProbeCorrection, Rescue,
    ScoredBlocks, SlotOrder, TokenKeys,
};
pub use call_shape::{CallShape, Tiles};
pub use did_you_mean::did_you_mean;
pub use draw::Draw;
pub use fp8_format::Fp8Format;
pub use gemm_kind::GemmKind;
pub use keeping::{KeepOLow, Keeping};
pub use kernel_policy::{Arrivals, KernelFamilies, KernelPolicy, SumOrder};
pub use key_mask::{ChosenKeys, KeptRows, KeyMask, MaskCounts, MaskError, MaskPlaces, TokenWindow};
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
pub use nsa_blocks::{NsaBlocks, selected_gap};
pub use pickles::how_to_convert;
pub use recipe::{Recipe, RecipeError};
pub use refusal::Refusal;
pub use score_matrix::{MOST_REFERENCE_SCORES, ReferenceTooLarge, ScoreMatrix};
pub use short_form::number_of_short_form;
pub use shown::{Shown, ShownPath, quoted, shell_word, shown_text};
