//! Values that follow from others: the global batch, and what a stage leaves out.

use toml::{Table, Value};

use super::mistake::{Mistake, Problem};
use super::{AttentionKind, Recipe, schema};
use crate::keys::{Key, Section, Source};
use crate::model::DmaShape;

/// Gives keys of a saved recipe the names that they have now; `schema::RENAMED` lists them.
pub(super) fn earlier_names(table: &mut Table) {
    let training = |key: &str| value_at(table, &format!("training.{key}"))?.as_integer();
    let batch = training("local_batch_size").zip(training("seq_len"));
    if let Some(validation) = table.get_mut("validation").and_then(Value::as_table_mut)
        && let (Some((rows, seq_len)), Some(Value::Integer(steps))) = (batch, validation.get("steps"))
    {
        let tokens = steps.saturating_mul(rows).saturating_mul(seq_len);
        validation.remove("steps");
        validation.insert("tokens".to_owned(), Value::Integer(tokens));
    }
}

/// Turns a stage's `tokens` into steps, and fills `training.steps` in with their sum.
///
/// Works on unchecked values: what has a wrong type is left to be reported.
pub(super) fn steps_of_stages(table: &mut Table, mistakes: &mut Vec<Mistake>) {
    let training = table.get("training").and_then(Value::as_table);
    let of_training = |key: &str| training.and_then(|training| training.get(key)).cloned();
    let seq_len = of_training("seq_len");
    let rows = of_training("global_batch_size").or_else(|| of_training("local_batch_size"));
    let Some(stages) = table.get_mut("stage").and_then(Value::as_array_mut) else {
        return;
    };
    let mut sum = Some(0i64);
    for (number, stage) in (1..).zip(stages) {
        let Some(stage) = stage.as_table_mut() else {
            return;
        };
        if let Some(tokens) = stage.get("tokens").and_then(Value::as_integer) {
            let key = format!("stage.{number}.tokens");
            let own = |key: &str| stage.get(key).cloned();
            let seq_len = own("seq_len").or_else(|| seq_len.clone());
            let rows = own("global_batch_size").or_else(|| rows.clone());
            let size = |value: Option<Value>| value.and_then(|value| value.as_integer());
            let per_step = size(seq_len).and_then(|len| size(rows)?.checked_mul(len));
            if stage.contains_key("steps") {
                let problem = Problem::Rule {
                    what: "stands beside steps".to_owned(),
                    hint: "give one of the two".to_owned(),
                };
                mistakes.push(Mistake::new(key, problem));
                stage.remove("tokens");
            } else if let (Some(per_step @ 1..), 1..) = (per_step, tokens) {
                let steps = (tokens - 1) / per_step + 1;
                stage.insert("steps".to_owned(), Value::Integer(steps));
                stage.remove("tokens");
            } else {
                let problem = Problem::Rule {
                    what: format!("is {tokens}, which is no number of steps"),
                    hint: "give tokens, seq_len and the batch sizes at least 1".to_owned(),
                };
                mistakes.push(Mistake::new(key, problem));
                stage.remove("tokens");
                stage.insert("steps".to_owned(), Value::Integer(1));
            }
        }
        let steps = stage.get("steps").and_then(Value::as_integer);
        sum = sum.zip(steps).and_then(|(sum, steps)| sum.checked_add(steps));
    }
    if let Some(sum) = sum
        && let Some(training) = table.get_mut("training").and_then(Value::as_table_mut)
        && !training.contains_key("steps")
    {
        training.insert("steps".to_owned(), Value::Integer(sum));
    }
}

/// Writes out what `attention.preset = "paper"` stands for. Works on checked values.
pub(super) fn preset(table: &mut Table, mistakes: &mut Vec<Mistake>) {
    let Some(attention) = table.get_mut("attention").and_then(Value::as_table_mut) else {
        return;
    };
    if attention
        .remove(PRESET)
        .and_then(|name| name.as_str().map(str::to_owned))
        .as_deref()
        != Some("paper")
    {
        return;
    }
    let published = published();
    for name in preset_keys() {
        let own = published.get(name);
        if let Some(given) = attention.get(name).filter(|given| Some(*given) != own) {
            let problem = Problem::Rule {
                what: match own {
                    Some(own) => format!("is {given}, but preset = \"paper\" sets it to {own}"),
                    None => format!("is {given}, but preset = \"paper\" has no slope"),
                },
                hint: format!("leave attention.{name} or attention.preset out"),
            };
            mistakes.push(Mistake::new(format!("attention.{name}"), problem));
        } else if let Some(own) = own {
            attention.insert(name.to_owned(), own.clone());
        }
    }
}

/// The key whose value stands for others.
pub(super) const PRESET: &str = "preset";

/// The keys of DMA that the preset sets, or that do not go with it.
pub(super) fn preset_keys() -> impl Iterator<Item = &'static str> {
    let names = DmaShape::KEYS.iter().map(|key| key.name);
    names.filter(|name| ![PRESET, "keep_window_size"].contains(name))
}

/// The published form as a table.
fn published() -> Table {
    Table::try_from(DmaShape::published(1)).expect("its values are those of TOML")
}

/// Writes out what the text leaves to a default: a value of the key's own, another key's, or the attention's window.
pub(super) fn defaults(table: &mut Table, mistakes: &mut Vec<Mistake>) {
    let of_steps = value_at(table, "training.steps").and_then(|steps| steps.as_integer());
    let schedule = table.entry("lr_scheduler");
    let schedule = schedule.or_insert_with(|| Value::Table(Table::new()));
    if let Some(schedule) = schedule.as_table_mut() {
        derived(schedule, "warmup_steps", || of_steps.map(default_warmup));
    }
    fill(table, Recipe::KEYS);
    if let Some(model) = table.get_mut("model").and_then(Value::as_table_mut) {
        let number = |key: &str| model.get(key).and_then(Value::as_integer);
        let (width, heads) = (number("hidden_size"), number("num_attention_heads"));
        derived(model, "intermediate_size", || width?.checked_mul(3));
        derived(model, "head_dim", || {
            let (width, heads) = (width?, heads.filter(|&heads| heads > 0)?);
            if width % (2 * heads) != 0 {
                let problem = Problem::Rule {
                    what: format!(
                        "is missing, and hidden_size = {width} is no even number times num_attention_heads = {heads}"
                    ),
                    hint: "give model.head_dim, or another hidden_size".to_owned(),
                };
                mistakes.push(Mistake::new("model.head_dim", problem));
            }
            // Another mistake about a made-up value would tell nothing.
            Some((width / heads / 2 * 2).max(2))
        });
    }
    let windows = ["sliding_window", "keep_window_size", "window_size"];
    let attention = table.get("attention").and_then(Value::as_table);
    let window = windows.iter().find_map(|key| attention?.get(*key)).cloned();
    for section in Recipe::KEYS {
        let mut inherited = Vec::new();
        for key in section.keys() {
            if let Some(Source::Key(source)) = key.source {
                inherited.push((key.name, value_at(table, source)));
            }
        }
        if section.name == schema::STAGE {
            inherited.push(("window", window.clone()));
        }
        for table in tables(table, section.name) {
            for (key, value) in &inherited {
                if let Some(value) = value
                    && !table.contains_key(*key)
                {
                    table.insert((*key).to_owned(), value.clone());
                }
            }
        }
    }
}

/// Warm-up where a recipe gives none, at most.
const MOST_WARMUP_STEPS: i64 = 100;

/// Warm-up steps of a run of `steps` steps whose recipe names none.
pub(super) fn default_warmup(steps: i64) -> i64 {
    (steps / 5).min(MOST_WARMUP_STEPS)
}

/// Writes out a value that follows from others.
fn derived(table: &mut Table, key: &str, value: impl FnOnce() -> Option<i64>) {
    if !table.contains_key(key)
        && let Some(value) = value()
    {
        table.insert(key.to_owned(), Value::Integer(value));
    }
}

/// The defaults that a key has of its own, in this table and those inside.
fn fill(table: &mut Table, keys: &'static [Key]) {
    for key in keys {
        if !table.contains_key(key.name)
            && let Some(value) = key.default.and_then(|default| default())
        {
            table.insert(key.name.to_owned(), value);
        }
        for table in tables(table, key.name) {
            // Of [attention], the keys of its kind.
            let kind = table.get("kind").and_then(Value::as_str);
            let of_kind = kind.and_then(schema::attention_kind);
            fill(table, of_kind.map_or(key.keys(), AttentionKind::keys));
        }
    }
}

/// The tables of a section: one, or each `[[stage]]`.
fn tables<'t>(table: &'t mut Table, name: &str) -> impl Iterator<Item = &'t mut Table> {
    let (one, many) = match table.get_mut(name) {
        Some(Value::Table(table)) => (Some(table), None),
        Some(Value::Array(items)) => (None, Some(items)),
        _ => (None, None),
    };
    let many = many.into_iter().flatten().filter_map(Value::as_table_mut);
    one.into_iter().chain(many)
}

/// The value of `section.key`, or its default where the section is missing.
fn value_at(table: &Table, path: &str) -> Option<Value> {
    let (section, key) = path.split_once('.')?;
    let written = table.get(section).and_then(|section| section.get(key));
    written.cloned().or_else(|| schema::key_at(path)?.default?())
}
