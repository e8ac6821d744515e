//! How an earlier version read a recipe.

/// What a recipe of kind DMA, as it is written, meant to earlier versions of Sieve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormerForm {
    /// A sentence for the user: which form of DMA the recipe named then, and which keys name that form now.
    pub words: String,
    /// The overrides that give the recipe the form it named then.
    pub overrides: Vec<String>,
}
