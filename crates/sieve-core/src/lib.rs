//! Recipes, shapes and errors of Sieve: what every other crate agrees on. No Burn, no CUDA, no input or output.
//!
//! - [`recipe`]: the TOML recipe, its rules and its error messages
//! - [`paths`]: variables in a recipe's paths
//! - [`model`]: the sizes a model is built from, in Sieve's own names, and its parameter counts

pub mod recipe;

pub mod paths;

pub mod model;

pub use model::{Attention, DmaBias, ModelShape};
pub use recipe::{Recipe, RecipeError};
