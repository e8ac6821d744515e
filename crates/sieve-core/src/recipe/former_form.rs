//! How an earlier version read a recipe.

/// What a recipe of kind DMA, as it is written, meant to earlier versions of Sieve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormerForm {
    /// The overrides that give the recipe the form it named then.
    pub overrides: Vec<String>,
}
