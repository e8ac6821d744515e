//! A key whose value differs between two recipes.

use std::fmt;

use super::schema;

/// Why the losses of runs whose recipes differ in these keys cannot be compared: they read other text, or through other
/// tokenizers. `None` if they can.
pub fn other_losses<'a>(keys: impl IntoIterator<Item = &'a str>) -> Option<&'static str> {
    let mut reason = None;
    for key in keys {
        let is_of_stage = key.starts_with("stage") && (key.ends_with(".paths") || key.ends_with(".weights"));
        if key.starts_with("tokenizer.") || key == "model.vocab_size" {
            return Some("their tokenizers differ");
        }
        let is_of_data = key.starts_with("data.") && key != "data.cache_dir";
        if is_of_data || is_of_stage || matches!(key, "validation.paths" | "validation.tokens") {
            reason = Some("their texts differ");
        }
    }
    reason
}

/// A key whose value differs between two recipes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyChange {
    /// Name of the key, as `section.key`.
    pub key: String,
    /// The value the run began with, as TOML; `None` when absent.
    pub saved: Option<String>,
    /// The value now, as TOML; `None` when absent.
    pub now: Option<String>,
}

impl KeyChange {
    /// Whether this key may change on resume: its declaration has `may_change`, or `data.format` changes from or to
    /// `auto`, which may stand for the same format. If it does not, the shards have another fingerprint and are
    /// refused.
    ///
    /// A key that may change alters neither the steps already taken nor the tokens that later steps read.
    ///
    /// - `training.steps` and the shape of the decay: a run is made longer, or its decay is tried again from a
    ///   checkpoint of the stable phase. A decay that has begun continues with the new numbers.
    /// - `model.max_position_embeddings`: how far the rotary tables reach; a longer stage may need more.
    /// - `training.local_batch_size`: the same rows in other micro-batches, whose gradients are added in another order;
    ///   `global_batch_size` may not change.
    /// - `validation.paths` may not change: its documents are kept out of the training split.
    /// - `data.fallback`: it matters only where `data.paths` matches no file; `data.paths` itself may not change.
    /// - the others decide what is written, measured and printed, not what is learned.
    pub fn is_allowed(&self) -> bool {
        let values = [&self.saved, &self.now].map(Option::as_deref);
        if self.key == "data.format" && values.contains(&Some("\"auto\"")) {
            return true;
        }
        schema::key_at(&self.key).is_some_and(|key| key.may_change)
    }
}

impl fmt::Display for KeyChange {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let saved = self.saved.as_deref().unwrap_or("absent");
        let now = self.now.as_deref().unwrap_or("absent");
        write!(out, "{} was {saved}, is now {now}", self.key)
    }
}
