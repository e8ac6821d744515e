//! A recipe as an unchecked TOML table: where each key was written, and the overrides applied to it.

use std::collections::{BTreeMap, BTreeSet};

use toml::Value;
use toml::de::{DeTable, DeValue};

use super::check;
use super::error::RecipeError;
use super::mistake::{Location, Mistake};
use super::sections::{OWN_LAYER, SHARED_LAYER};
use super::{Attention, AttentionKind, TokenizerSection, resolve, schema};
use crate::keys::{Key, Kind};
use crate::kinds::{Chooses, Projections, table_name};

/// The key that names the kind of each layer.
const LAYER_TYPES: &str = "model.layer_types";

/// A parsed recipe text with its overrides.
pub(super) struct Document {
    pub(super) table: toml::Table,
    /// Mistakes in the overrides, not in the text.
    pub(super) mistakes: Vec<Mistake>,
    /// Keys that do not go with the kind of attention that an override chose.
    pub(super) left_out: Vec<String>,
    /// The kind of the text without overrides.
    kind: Option<AttentionKind>,
    /// Where each section, stage and key was written, by its path.
    locations: BTreeMap<String, Location>,
}

impl Document {
    /// Parses a TOML text.
    ///
    /// # Errors
    /// [`RecipeError::Syntax`] with the line.
    pub(super) fn parse(text: &str, origin: &str) -> Result<Self, RecipeError> {
        let syntax = |error: toml::de::Error| RecipeError::Syntax {
            origin: origin.to_owned(),
            message: error.to_string().trim_end().to_owned(),
        };
        let table = text.parse::<toml::Table>().map_err(syntax)?;
        let spans = DeTable::parse(text).map_err(syntax)?;
        let mut locations = BTreeMap::new();
        record_lines(spans.get_ref(), "", &LineStarts::new(text), &mut locations);
        let kind = resolve::kind_of(&table);
        Ok(Self { table, mistakes: Vec::new(), left_out: Vec::new(), kind, locations })
    }

    /// Applies `section.key=value` items in order; an item that cannot be applied becomes a mistake.
    ///
    /// The value is read as TOML, else taken as a bare string. So that one override is enough, it also removes the keys
    /// that it contradicts: `attention.kind` removes the keys of other kinds, a tokenizer source removes the text's
    /// source, a preset removes the keys that it sets, and another number of `data.paths` removes the text's
    /// `data.weights`.
    pub(super) fn apply(&mut self, overrides: &[String]) {
        let mut set = BTreeSet::new();
        for item in overrides {
            match self.apply_one(item) {
                Ok(key) => {
                    self.locate_override(&key, item);
                    set.insert(key);
                }
                Err(mut mistake) => {
                    mistake.location = Some(Location::Override(item.clone()));
                    self.mistakes.push(*mistake);
                }
            }
        }
        // An override may repeat a layer's name, as the text may: `"3 swa"` becomes three entries.
        resolve::repeated_layers(&mut self.table);
        self.drop_replaced(&set);
    }

    /// Where `key` was written, or else the innermost section or table around it.
    pub(super) fn locate(&self, key: &str) -> Option<Location> {
        let mut key = key;
        loop {
            if let Some(location) = self.locations.get(key) {
                return Some(location.clone());
            }
            key = key.rsplit_once('.')?.0;
        }
    }

    /// Records that `item` gave `key`, with all that the text had below it, and each table around it that the text
    /// lacks.
    fn locate_override(&mut self, key: &str, item: &str) {
        let location = || Location::Override(item.to_owned());
        let below = format!("{key}.");
        self.locations.retain(|other, _| !other.starts_with(&below));
        self.locations.insert(key.to_owned(), location());
        for (end, _) in key.match_indices('.') {
            self.locations.entry(key[..end].to_owned()).or_insert_with(location);
        }
    }

    /// Applies one `section.key=value` item and returns its key.
    fn apply_one(&mut self, item: &str) -> Result<String, Box<Mistake>> {
        let form = || Box::new(override_form());
        let (path, text) = item.split_once('=').ok_or_else(form)?;
        let (path, text) = (path.trim(), text.trim());
        let mut names = path.split('.');
        let section_name = names.next().filter(|name| !name.is_empty()).ok_or_else(form)?;
        let names = names.collect::<Vec<_>>();
        if let (true, Some(home)) = (names.is_empty(), schema::home_of(section_name)) {
            let hint = format!("write {home}.{section_name}={text}");
            let what = "is named without its section";
            return Err(Box::new(Mistake::new(section_name, what, hint)));
        }
        if names.is_empty() || names.iter().any(|name| name.is_empty()) {
            return Err(form());
        }
        if section_name == schema::STAGE {
            return self.apply_to_stage(path, &names, text);
        }
        let section = schema::section(section_name).ok_or_else(|| Box::new(check::unknown_section(section_name)))?;
        let kind = match names[..] {
            // The key of a table [attention.NAME].
            [name, key] if section.name == "attention" && schema::key(section.keys(), name).is_none() => {
                resolve_key(&format!("attention.{name}"), section.keys(), &[key])?
            }
            _ => resolve_key(section.name, section.keys(), &names)?,
        };
        let value = parse_value(text, kind);

        let mut target = &mut self.table;
        for name in std::iter::once(section_name).chain(names[..names.len() - 1].iter().copied()) {
            let entry = target.entry(name).or_insert_with(|| Value::Table(toml::Table::new()));
            if !entry.is_table() {
                // The text has a value of another type instead of a table; the override replaces it.
                *entry = Value::Table(toml::Table::new());
            }
            target = entry.as_table_mut().expect("made a table just above");
        }
        target.insert(names[names.len() - 1].to_owned(), value);
        Ok(path.to_owned())
    }

    /// Applies an override such as `stage.2.steps=100`, whose stages are counted from 1.
    fn apply_to_stage(&mut self, path: &str, names: &[&str], text: &str) -> Result<String, Box<Mistake>> {
        let stages = self.table.get_mut(schema::STAGE);
        let mut stages = stages.and_then(Value::as_array_mut);
        let count = stages.as_ref().map_or(0, |stages| stages.len());
        let (number, key, inner) = match names {
            [number, key] => (number, key, None),
            // The window of a table, `stage.2.windows.swa`.
            [number, key, inner] => (number, key, Some(*inner)),
            _ => return Err(Box::new(override_form())),
        };
        let stage = number.parse::<usize>().ok().and_then(|number| stages.as_mut()?.get_mut(number.checked_sub(1)?));
        let Some(stage) = stage.and_then(Value::as_table_mut) else {
            let hint = format!("the recipe has {count} blocks [[stage]], counted from 1");
            let what = format!("there is no stage {number}");
            return Err(Box::new(Mistake::new(path, what, hint)));
        };
        let kind = resolve_key(&format!("stage.{number}"), schema::STAGE_KEYS, &[key])?;
        if let (Some(inner), Kind::Sizes) = (inner, kind) {
            let sizes = stage.entry(*key).or_insert_with(|| Value::Table(toml::Table::new()));
            let Some(sizes) = sizes.as_table_mut() else {
                return Err(Box::new(override_form()));
            };
            sizes.insert(inner.to_owned(), parse_value(text, Kind::Integer));
            return Ok(path.to_owned());
        }
        if inner.is_some() {
            return Err(Box::new(override_form()));
        }
        // A stage gives either steps or tokens: the override replaces the other one.
        match *key {
            "steps" => stage.remove("tokens"),
            "tokens" => stage.remove("steps"),
            _ => None,
        };
        stage.insert((*key).to_owned(), parse_value(text, kind));
        Ok(path.to_owned())
    }

    /// Removes keys of the text that contradict the overridden keys `set`.
    fn drop_replaced(&mut self, set: &BTreeSet<String>) {
        let tokenizer_source = |source: &str| {
            let prefix = format!("tokenizer.{source}");
            set.iter().any(|key| *key == prefix || key.starts_with(&format!("{prefix}.")))
        };
        let sources = TokenizerSection::SOURCES.into_iter();
        let chosen = sources.filter(|source| tokenizer_source(source));
        if let [chosen] = chosen.collect::<Vec<_>>()[..]
            && let Some(tokenizer) = self.table.get_mut("tokenizer").and_then(Value::as_table_mut)
        {
            tokenizer.retain(|key, _| key == chosen || !TokenizerSection::SOURCES.contains(&key));
        }
        if set.contains("data.paths")
            && !set.contains("data.weights")
            && let Some(Value::Table(data)) = self.table.get_mut("data")
        {
            let count = |key: &str| data.get(key).and_then(Value::as_array).map(Vec::len);
            if count("paths") != count("weights") {
                data.remove("weights");
            }
        }
        let Some(kind) = resolve::kind_of(&self.table) else {
            return; // It is missing or misspelt, which `check_table` reports.
        };
        if set.contains("attention.kind") {
            self.leave_out_other_kinds(kind, set);
        }
        if set.contains("attention.preset") && schema::key(kind.keys(), resolve::PRESET).is_some() {
            let mut drop = |section: &str, key: &str| {
                if let Some(Value::Table(section)) = self.table.get_mut(section) {
                    section.remove(key);
                }
            };
            for name in resolve::preset_keys(kind) {
                if !set.contains(&format!("attention.{name}")) {
                    drop("attention", name);
                }
            }
            if !set.contains(LAYER_TYPES) {
                drop("model", "layer_types");
                // No list names their layers any more.
                if let Some(Value::Table(attention)) = self.table.get_mut("attention") {
                    attention.retain(|_, value| !value.is_table());
                }
            }
        }
    }

    /// Removes what an override to `kind` makes invalid: the keys of other kinds, given in the text or by overrides;
    /// and settings of the text elsewhere that go only with the text's kind.
    fn leave_out_other_kinds(&mut self, kind: AttentionKind, set: &BTreeSet<String>) {
        self.leave_out_attention_of_others(kind);
        // Otherwise the override names the kind of the text, so the text's other settings go with it.
        if self.kind != Some(kind) {
            self.leave_out_of_stages(kind, set);
            self.leave_out_keys_of_choices(kind, set);
            self.rename_own_layers(set);
            if kind.facts().projections == Projections::Latent {
                self.leave_out_beside_latent(set);
            }
        }
    }

    /// Removes the keys and tables of `[attention]` that `kind` does not have.
    fn leave_out_attention_of_others(&mut self, kind: AttentionKind) {
        let left_out = &mut self.left_out;
        if let Some(Value::Table(attention)) = self.table.get_mut("attention") {
            attention.retain(|name, value| {
                let kinds = schema::attention_kinds_with(name);
                // A table is removed if its layers now have the model's own kind.
                let is_gone = value.is_table() && table_name(name) == kind.name();
                let stays = !is_gone && (kinds.is_empty() || kinds.contains(&kind.name()));
                if !stays {
                    left_out.push(format!("attention.{name}"));
                }
                stays
            });
        }
    }

    /// Removes the text's keys of stages that do not go with `kind`, or that were meant for the text's kind.
    fn leave_out_of_stages(&mut self, kind: AttentionKind, set: &BTreeSet<String>) {
        let left_out = &mut self.left_out;
        let of_text = |key: &str| !set.contains(key);
        let stages = self.table.get_mut(schema::STAGE).and_then(Value::as_array_mut);
        let stages = stages.into_iter().flatten().filter_map(Value::as_table_mut);
        for (number, stage) in (1..).zip(stages) {
            for (name, keys) in resolve::OF_ATTENTION {
                let key = format!("{}.{number}.{name}", schema::STAGE);
                // A stage's window in the text is meant for the text's kind, if that kind has a window.
                let is_the_texts = of_text(&key) && self.kind.is_some_and(|own| resolve::has_any(own, keys));
                let is_of_kind = resolve::has_any(kind, keys) && !is_the_texts;
                if !is_of_kind && stage.remove(name).is_some() {
                    left_out.push(key);
                }
            }
        }
    }

    /// Removes the text's keys outside of `[attention]` that go only with kinds whose queries choose blocks, or that
    /// have an indexer. Layers that share a choice, where no layer makes one, get the kind of `[attention]`.
    fn leave_out_keys_of_choices(&mut self, kind: AttentionKind, set: &BTreeSet<String>) {
        let chooses = kind.facts().chooses == Chooses::Blocks;
        let has_indexer = kind.example().as_kind().indexer().is_some();
        for (section, name, is_of_kind) in [
            ("training", "dense_steps", chooses),
            ("training", "train", has_indexer),
            ("optimizer", "indexer_lr", has_indexer),
        ] {
            let key = format!("{section}.{name}");
            if is_of_kind || set.contains(&key) {
                continue;
            }
            let section = self.table.get_mut(section).and_then(Value::as_table_mut);
            if section.is_some_and(|section| section.remove(name).is_some()) {
                self.left_out.push(key);
            }
        }
        let is_shared = |name: &&mut Value| name.as_str() == Some(SHARED_LAYER);
        let names = self.layer_types(set).into_iter().flatten();
        let shared = names.filter(is_shared).filter(|_| !chooses);
        if shared.map(|name| *name = Value::String(OWN_LAYER.to_owned())).count() > 0 {
            self.left_out.push(format!("\"{SHARED_LAYER}\" in {LAYER_TYPES}"));
        }
    }

    /// The text's `model.layer_types`, unless an override gives them.
    fn layer_types(&mut self, set: &BTreeSet<String>) -> Option<&mut Vec<Value>> {
        let model = self.table.get_mut("model").filter(|_| !set.contains(LAYER_TYPES));
        model?.as_table_mut()?.get_mut("layer_types")?.as_array_mut()
    }

    /// Gives layers of the text's `model.layer_types` that name the text's kind the kind of `[attention]`, which they
    /// mean.
    fn rename_own_layers(&mut self, set: &BTreeSet<String>) {
        let is_dense = |name: &Value| name.as_str() == Some(Attention::DENSE.kind().name());
        let own = self.kind.map(|own| Value::String(own.name().to_owned()));
        let names = self.layer_types(set).into_iter().flatten();
        for name in names.filter(|name| !is_dense(name) && own.as_ref() == Some(&**name)) {
            *name = Value::String(OWN_LAYER.to_owned());
        }
    }

    /// Removes what latent attention does not have: layers of other kinds, with which it goes in no model; and keys of
    /// `[model]`, since it has norms and rotated channels of its own and a key and value for each query head.
    fn leave_out_beside_latent(&mut self, set: &BTreeSet<String>) {
        let of_text = |key: &str| !set.contains(key);
        let left_out = &mut self.left_out;
        if let Some(Value::Table(attention)) = self.table.get_mut("attention") {
            attention.retain(|name, value| {
                if value.is_table() {
                    left_out.push(format!("attention.{name}"));
                }
                !value.is_table()
            });
        }
        let stages = self.table.get_mut(schema::STAGE).and_then(Value::as_array_mut);
        let stages = stages.into_iter().flatten().filter_map(Value::as_table_mut);
        for (number, stage) in (1..).zip(stages) {
            for name in ["kind", "layer_types", "windows", "drop"] {
                let key = format!("{}.{number}.{name}", schema::STAGE);
                if of_text(&key) && stage.remove(name).is_some() {
                    left_out.push(key);
                }
            }
        }
        let is_other = |name: &Value| !matches!(name.as_str(), Some(OWN_LAYER | SHARED_LAYER));
        let names_others = self.layer_types(set).is_some_and(|names| names.iter().any(is_other));
        let Some(Value::Table(model)) = self.table.get_mut("model") else {
            return;
        };
        if names_others {
            model.remove("layer_types");
            self.left_out.push(LAYER_TYPES.to_owned());
        }
        // Each key with the one value that latent attention does not have, or `None` if it has no value of that key.
        for (name, only) in [
            ("qk_norm", Some(Value::Boolean(false))),
            ("qkv_bias", Some(Value::Boolean(true))),
            ("rope_scaling", None),
            ("rope_layers", None),
        ] {
            let key = format!("model.{name}");
            let conflicts = model.get(name).is_some_and(|value| only.as_ref().is_none_or(|only| value == only));
            if of_text(&key) && conflicts {
                model.remove(name);
                self.left_out.push(key);
            }
        }
        let differs = model.get("num_key_value_heads") != model.get("num_attention_heads");
        let kv_heads = "model.num_key_value_heads";
        if differs && of_text(kv_heads) && model.remove("num_key_value_heads").is_some() {
            self.left_out.push(kv_heads.to_owned());
        }
    }
}

/// The mistake of an override without a section, a key or a value.
fn override_form() -> Mistake {
    let what = "an override is written section.key=value";
    Mistake::new("override", what, "for example --set optimizer.lr=1e-3")
}

/// The type of values of the key at the path `names` below `owner`.
fn resolve_key(owner: &str, keys: &'static [Key], names: &[&str]) -> Result<Kind, Box<Mistake>> {
    let unknown = |owner: &str, keys, name| Box::new(check::unknown_key(owner, keys, name));
    let key = schema::key(keys, names[0]).ok_or_else(|| unknown(owner, keys, names[0]))?;
    let path = format!("{owner}.{}", key.name);
    match (&names[1..], key.kind) {
        ([], kind) => Ok(kind),
        (rest, Kind::Table(inner)) => resolve_key(&path, inner, rest),
        (rest, _) => Err(unknown(&path, &[], rest[0])),
    }
}

/// The value of an override, read as TOML if that gives the wanted type, else the text itself as a string; one string
/// for a list of strings is a list.
fn parse_value(text: &str, kind: Kind) -> Value {
    let parsed = format!("value = {text}")
        .parse::<toml::Table>()
        .ok()
        .filter(|table| table.len() == 1)
        .and_then(|mut table| table.remove("value"));
    let wants_string = matches!(kind, Kind::String | Kind::Choice(_));
    let value = match parsed {
        Some(value) if !wants_string || value.is_str() => value,
        _ => Value::String(text.to_owned()),
    };
    match (kind, value) {
        // A list of one needs no brackets.
        (Kind::Strings, Value::String(one)) if !one.starts_with('[') => Value::Array(vec![Value::String(one)]),
        (_, value) => value,
    }
}

/// Byte offsets at which the lines of a text begin.
struct LineStarts(Vec<usize>);

impl LineStarts {
    fn new(text: &str) -> Self {
        Self(std::iter::once(0).chain(text.match_indices('\n').map(|(offset, _)| offset + 1)).collect())
    }

    /// The line, from 1, of a byte offset.
    fn line(&self, offset: usize) -> usize {
        self.0.partition_point(|start| *start <= offset)
    }
}

/// Records the line of every key of `table` and of the tables inside it, by its path; `prefix` is the table's own path.
fn record_lines(table: &DeTable<'_>, prefix: &str, lines: &LineStarts, locations: &mut BTreeMap<String, Location>) {
    for (name, value) in table {
        let key = if prefix.is_empty() { name.get_ref().to_string() } else { format!("{prefix}.{}", name.get_ref()) };
        match value.get_ref() {
            DeValue::Table(inner) => record_lines(inner, &key, lines, locations),
            // Blocks [[stage]] are located as stage.1, stage.2 and so on.
            DeValue::Array(items) => {
                for (number, item) in (1..).zip(items.iter()) {
                    if let DeValue::Table(inner) = item.get_ref() {
                        let key = format!("{key}.{number}");
                        record_lines(inner, &key, lines, locations);
                        locations.insert(key, Location::Line(lines.line(item.span().start)));
                    }
                }
            }
            _ => {}
        }
        locations.insert(key, Location::Line(lines.line(name.span().start)));
    }
}
