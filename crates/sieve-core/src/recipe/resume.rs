//! Which keys of a recipe may differ when a run is resumed.

use std::collections::BTreeMap;
use std::fmt;

use toml::Value;

use super::{Recipe, RecipeError, resolve, schema};

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

const WARMUP: &str = "lr_scheduler.warmup_steps";

impl fmt::Display for KeyChange {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let saved = self.saved.as_deref().unwrap_or("absent");
        let now = self.now.as_deref().unwrap_or("absent");
        write!(out, "{} was {saved}, is now {now}", self.key)
    }
}

impl Recipe {
    /// Every key whose value differs in `now`, defaults written out, in the order of the keys' names.
    ///
    /// # Errors
    /// [`RecipeError::NotRepresentable`], as [`to_toml`](Self::to_toml).
    pub fn diff(&self, now: &Self) -> Result<Vec<KeyChange>, RecipeError> {
        let (saved, now) = (flatten(self)?, flatten(now)?);
        let mut keys = saved.keys().chain(now.keys()).collect::<Vec<_>>();
        keys.sort();
        keys.dedup();
        Ok(keys
            .into_iter()
            .filter(|key| saved.get(*key) != now.get(*key))
            .map(|key| KeyChange { key: key.clone(), saved: saved.get(key).cloned(), now: now.get(key).cloned() })
            .collect())
    }

    /// Whether the warm-up is the one that follows from the number of steps.
    pub fn has_usual_warmup(&self) -> bool {
        let usual = i64::try_from(self.training.steps).map(resolve::default_warmup);
        usual.is_ok_and(|usual| usual == self.lr_scheduler.warmup_steps as i64)
    }

    /// Checks that a run which took `steps_done` steps with `self` may be resumed with `now`. Returns the allowed
    /// changes. Stages may be changed, added or removed as long as no step already taken would have had other values.
    ///
    /// # Errors
    /// [`RecipeError::ResumeChanged`] with every key that differs and [may not](KeyChange::is_allowed).
    pub fn check_resume(&self, now: &Self, steps_done: usize) -> Result<Vec<KeyChange>, RecipeError> {
        let same_past = self.past(steps_done) == now.past(steps_done);
        let (allowed, refused) = self.diff(now)?.into_iter().partition::<Vec<_>, _>(|change| {
            change.is_allowed()
                    || (same_past && change.key.starts_with("stage."))
                    // Both warm-ups lie in the past and did not set the rates of steps to come.
                    || (change.key == WARMUP
                        && [self, now].iter().all(|r| r.lr_scheduler.warmup_steps <= steps_done))
        });
        if refused.is_empty() { Ok(allowed) } else { Err(RecipeError::ResumeChanged { refused }) }
    }
}

/// The values of a recipe as TOML by `section.key`, defaults included.
fn flatten(recipe: &Recipe) -> Result<BTreeMap<String, String>, RecipeError> {
    let mut leaves = BTreeMap::new();
    collect_leaves("", &Value::try_from(recipe)?, &mut leaves);
    Ok(leaves)
}

/// Adds every value below `path` to `leaves`; the tables of a list are counted from 1.
fn collect_leaves(path: &str, value: &Value, leaves: &mut BTreeMap<String, String>) {
    match value {
        Value::Array(items) if items.iter().any(Value::is_table) => {
            for (number, inner) in (1..).zip(items) {
                collect_leaves(&format!("{path}.{number}"), inner, leaves);
            }
        }
        Value::Table(table) => {
            for (name, inner) in table {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                collect_leaves(&path, inner, leaves);
            }
        }
        leaf => {
            leaves.insert(path.to_owned(), leaf.to_string());
        }
    }
}
