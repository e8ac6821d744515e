//! How an earlier version read a recipe.

/// How an earlier version read a text of kind DMA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormerForm {
    /// A sentence for the user: what the text was, and how to write that now.
    pub words: String,
    /// The overrides that give the text its former form.
    pub overrides: Vec<String>,
}
