//! Every section and key a recipe may hold, by name.

use super::{AttentionKind, Recipe, StageSection};
use crate::keys::{Key, Kind, Section};

/// The keys of a recipe's `[[stage]]`.
pub(super) const STAGE_KEYS: &[Key] = StageSection::KEYS;

/// Name of the section `[[stage]]`.
pub(super) const STAGE: &str = "stage";

/// Sections and keys that are reserved for features that are not built yet.
pub(super) const PLANNED: &[&str] = &[
    "parallelism.data_parallel_shard_degree",
    "parallelism.tensor_parallel_degree",
    "parallelism.pipeline_parallel_degree",
];

/// Every section except `[[stage]]`, in the order in which a recipe is written.
pub(super) fn sections() -> impl Iterator<Item = &'static Key> {
    let keys = Recipe::KEYS.iter();
    keys.filter(|key| matches!(key.kind, Kind::Table(_)))
}

/// Names of the attention kinds that have a key called `name`.
pub(super) fn attention_kinds_with(name: &str) -> Vec<&'static str> {
    let kinds = AttentionKind::ALL.into_iter();
    kinds.filter(|kind| key(kind.keys(), name).is_some()).map(AttentionKind::name).collect()
}

/// The recipe section with this name.
pub(super) fn section(name: &str) -> Option<&'static Key> {
    sections().find(|section| section.name == name)
}

/// The key with this name, out of `keys`.
pub(super) fn key(keys: &'static [Key], name: &str) -> Option<&'static Key> {
    keys.iter().find(|key| key.name == name)
}

/// The key that a path like `data.mqar.seed` leads to; `None` if a name of it is unknown.
pub(super) fn key_at(path: &str) -> Option<&'static Key> {
    let mut keys = Recipe::KEYS;
    let mut found = None;
    let mut names = path.split('.').peekable();
    while let Some(name) = names.next() {
        // NAME of a table [attention.NAME], whose keys are those of [attention].
        if found.is_some_and(|key: &Key| key.name == "attention") && names.peek().is_some() {
            continue;
        }
        found = Some(key(keys, name)?);
        keys = found?.keys();
    }
    found
}

/// The sections that have a key called `name`, to help with keys written in the wrong section.
pub(super) fn homes_of(name: &str) -> Vec<&'static str> {
    let homes = sections().filter(|section| key(section.keys(), name).is_some());
    homes.map(|section| section.name).collect()
}

/// The first of [`homes_of`].
pub(super) fn home_of(name: &str) -> Option<&'static str> {
    homes_of(name).first().copied()
}
