//! Which keys of a recipe may differ when a run is resumed.

use std::collections::BTreeMap;

use toml::Value;

use super::key_change::KeyChange;
use super::{Recipe, RecipeError, resolve};

const WARMUP: &str = "lr_scheduler.warmup_steps";

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
