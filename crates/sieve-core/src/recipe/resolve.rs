//! Writes defaults into a recipe's table, above all defaults that follow from other values.

use toml::{Table, Value};

use super::mistake::Mistake;
use super::sections::OWN_LAYER;
use super::{AttentionKind, Recipe, schema};
use crate::keys::{Key, Section, Source};
use crate::kinds::settings::{Sizes, derived, number};
use crate::kinds::{Projections, table_name};

/// Replaces a stage's `tokens` by `steps`, and sets a missing `training.steps` to the sum over the stages.
///
/// Works on unchecked values: values of a wrong type are left as they are, and reported later.
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
                mistakes.push(Mistake::new(key, "is given together with steps", "give one of the two"));
                stage.remove("tokens");
            } else if let (Some(per_step @ 1..), 1..) = (per_step, tokens) {
                // Rounded up.
                let steps = (tokens - 1) / per_step + 1;
                stage.insert("steps".to_owned(), Value::Integer(steps));
                stage.remove("tokens");
            } else {
                let what = format!("is {tokens}, which is not a whole number of steps");
                let hint = "give tokens, seq_len and the batch sizes at least 1";
                mistakes.push(Mistake::new(key, what, hint));
                stage.remove("tokens");
                // A valid number of steps, so that no other mistake is reported for the same reason.
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

/// Writes out the entries of `model.layer_types`, and of a stage's, that repeat a name: `"3 swa"` stands for three of
/// `"swa"`. What is no such entry stays, and is checked later.
pub(super) fn repeated_layers(table: &mut Table) {
    for section in ["model", schema::STAGE] {
        for section in tables(table, section) {
            if let Some(Value::Array(names)) = section.get_mut("layer_types") {
                write_out(names);
            }
        }
    }
}

/// Replaces each entry of one list that repeats a name, such as `"3 swa"`, by that many names.
fn write_out(names: &mut Vec<Value>) {
    let written_out = std::mem::take(names).into_iter().flat_map(|entry| {
        let repeated = entry.as_str().and_then(|text| text.trim().split_once(char::is_whitespace));
        let repeated = repeated.and_then(|(count, name)| Some((count.parse::<usize>().ok()?, name.trim().to_owned())));
        match repeated {
            Some((count @ 1..=MOST_REPEATS, name)) => vec![Value::String(name); count],
            _ => vec![entry],
        }
    });
    *names = written_out.collect();
}

/// Most layers that one entry of `model.layer_types` stands for.
const MOST_REPEATS: usize = 1000;

/// Writes out the sizes of `[model]` that follow from others, and the keys of `[attention]` that follow from its preset
/// or its kind's defaults. Works on checked values.
pub(super) fn attention(table: &mut Table, mistakes: &mut Vec<Mistake>) {
    let kind = kind_of(table);
    if let Some(model) = table.get_mut("model").and_then(Value::as_table_mut) {
        model_sizes(model, kind, mistakes);
    }
    let size = |path| {
        let value = value_at(table, path)?.as_integer()?;
        usize::try_from(value).ok()
    };
    let sizes = Sizes {
        seq_len: size("training.seq_len"),
        hidden_size: size("model.hidden_size"),
        head_dim: size("model.head_dim"),
        num_kv_heads: size("model.num_key_value_heads"),
    };
    if let (Some(kind), Some(attention)) = (kind, table.get_mut("attention").and_then(Value::as_table_mut)) {
        for (name, table) in attention.iter_mut() {
            if let Some((kind, table)) = table.as_table_mut().and_then(|table| Some((own_kind(table)?, table))) {
                of_kind(&format!("attention.{name}"), table, kind, sizes, mistakes);
            }
        }
        of_kind("attention", attention, kind, sizes, mistakes);
    }
}

/// Writes out the keys of `[attention]`, or of a table `owner` in it, that follow from its preset or its kind's
/// defaults.
fn of_kind(owner: &str, attention: &mut Table, kind: AttentionKind, sizes: Sizes, mistakes: &mut Vec<Mistake>) {
    preset(owner, attention, kind, sizes, mistakes);
    kind.resolve(attention, sizes);
}

/// Writes out the missing sizes of `[model]` that follow from its width and its number of heads.
fn model_sizes(model: &mut Table, kind: Option<AttentionKind>, mistakes: &mut Vec<Mistake>) {
    let (width, heads) = (number(model, "hidden_size"), number(model, "num_attention_heads"));
    derived(model, "intermediate_size", || width?.checked_mul(3));
    let projections = kind.map_or(Projections::Grouped, |kind| kind.facts().projections);
    derived(model, "num_key_value_heads", || Some(projections.default_kv_heads(heads?)));
    derived(model, "head_dim", || {
        let (width, heads) = (width?, heads.filter(|&heads| heads > 0)?);
        if width % heads.saturating_mul(2) != 0 {
            let what = format!(
                "is missing, and hidden_size = {width} is not an even number times num_attention_heads = {heads}"
            );
            let hint = "give model.head_dim, or a different hidden_size";
            mistakes.push(Mistake::new("model.head_dim", what, hint));
        }
        // Even and positive, so that the value made up here breaks no other rule.
        Some((width / heads / 2 * 2).max(2))
    });
}

/// Writes out what `attention.preset = "paper"` stands for.
fn preset(owner: &str, attention: &mut Table, kind: AttentionKind, sizes: Sizes, mistakes: &mut Vec<Mistake>) {
    let name = attention.remove(PRESET);
    if name.as_ref().and_then(Value::as_str) != Some("paper") {
        return;
    }
    // Without `model.head_dim` any width does: the mistake that kept it from being filled in is reported.
    let head_dim = sizes.head_dim.unwrap_or(2);
    let published = Table::try_from(kind.published(head_dim)).expect("its values are those of TOML");
    for name in preset_keys(kind) {
        let own = published.get(name);
        if let Some(given) = attention.get(name).filter(|given| Some(*given) != own) {
            let what = match own {
                Some(own) => format!("is {given}, but preset = \"paper\" sets it to {own}"),
                None => format!("is {given}, but preset = \"paper\" has no slope"),
            };
            let hint = format!("leave {owner}.{name} or {owner}.preset out");
            mistakes.push(Mistake::new(format!("{owner}.{name}"), what, hint));
        } else if let Some(own) = own {
            attention.insert(name.to_owned(), own.clone());
        }
    }
}

/// The key of `[attention]` whose value stands for several others.
pub(super) const PRESET: &str = "preset";

/// The keys of `kind` that its preset sets, or that must not be given together with the preset.
pub(super) fn preset_keys(kind: AttentionKind) -> impl Iterator<Item = &'static str> {
    const OTHERS: [&str; 6] = [
        PRESET,
        "keep_window_size",
        "compress_hidden_size",
        "index_loss_weight",
        "index_warmup",
        "index_loss_of_shared",
    ];
    let names = kind.keys().iter().map(|key| key.name);
    names.filter(|name| !OTHERS.contains(name))
}

/// Writes out the remaining defaults: fixed values, values of other keys, and for stages the window of `[attention]`.
pub(super) fn defaults(table: &mut Table) {
    let of_steps = value_at(table, "training.steps").and_then(|steps| steps.as_integer());
    let schedule = table.entry("lr_scheduler").or_insert_with(|| Value::Table(Table::new()));
    if let Some(schedule) = schedule.as_table_mut() {
        derived(schedule, "warmup_steps", || of_steps.map(default_warmup));
    }
    fill(table, Recipe::KEYS);
    let attention = table.get("attention").and_then(Value::as_table).cloned();
    for section in Recipe::KEYS {
        let mut inherited = Vec::new();
        for key in section.keys() {
            if let Some(Source::Key(source)) = key.source {
                inherited.push((key.name, value_at(table, source)));
            }
        }
        for table in tables(table, section.name) {
            let mut inherited = inherited.clone();
            if section.name == schema::STAGE {
                inherited.extend(of_attention(attention.as_ref(), table));
            }
            for (key, value) in &inherited {
                if let Some(value) = value
                    && !table.contains_key(*key)
                {
                    table.insert((*key).to_owned(), value.clone());
                }
            }
        }
    }
    original_positions(table);
}

/// The table of a stage's own kind: `[attention]`, or a table in it that the stage's `kind` names.
fn attention_of_stage<'t>(attention: &'t Table, stage: &Table) -> Option<&'t Table> {
    match stage.get("kind").and_then(Value::as_str) {
        Some(name) if name != OWN_LAYER && attention.get("kind").and_then(Value::as_str) != Some(table_name(name)) => {
            attention.get(table_name(name))?.as_table()
        }
        _ => Some(attention),
    }
}

/// Writes out the number of positions from which rotary frequencies are scaled, so that it stays the same when a run is
/// resumed with a larger `max_position_embeddings`.
fn original_positions(table: &mut Table) {
    let positions = value_at(table, "model.max_position_embeddings").and_then(|value| value.as_integer());
    let scaling = table.get_mut("model").and_then(|model| model.get_mut("rope_scaling"));
    if let Some(scaling) = scaling.and_then(Value::as_table_mut)
        && scaling.get("rope_type").and_then(Value::as_str) != Some("linear")
    {
        derived(scaling, "original_max_position_embeddings", || positions);
    }
}

/// Keys of a stage whose default is a key of `[attention]`, by whatever name the stage's kind has it, and that default.
pub(super) fn of_attention(attention: Option<&Table>, stage: &Table) -> [(&'static str, Option<Value>); 2] {
    let own = attention.and_then(|attention| attention_of_stage(attention, stage));
    OF_ATTENTION.map(|(name, keys)| {
        let value = keys.iter().find_map(|key| own?.get(*key));
        (name, value.cloned())
    })
}

/// Keys of a stage, each with the keys of `[attention]` that it replaces.
pub(super) const OF_ATTENTION: [(&str, &[&str]); 2] =
    [("window", &["sliding_window", "keep_window_size", "window_size"]), ("index_warmup", &["index_warmup"])];

/// Whether `kind` has one of these keys, so that a stage may change it.
pub(super) fn has_any(kind: AttentionKind, keys: &[&str]) -> bool {
    let mut names = kind.keys().iter().map(|key| key.name);
    names.any(|name| keys.contains(&name))
}

/// Most steps of a default warm-up.
const MOST_WARMUP_STEPS: i64 = 100;

/// The default of `lr_scheduler.warmup_steps` in a run of `steps` steps.
pub(super) fn default_warmup(steps: i64) -> i64 {
    (steps / 5).min(MOST_WARMUP_STEPS)
}

/// Writes out the fixed defaults of `keys` in this table and in the tables inside it.
fn fill(table: &mut Table, keys: &'static [Key]) {
    for key in keys {
        if !table.contains_key(key.name)
            && let Some(value) = key.default.and_then(|default| default())
        {
            table.insert(key.name.to_owned(), value);
        }
        for table in tables(table, key.name) {
            // [attention] and its tables are filled in with the keys of their kinds only. A stage has a `kind` too.
            let of_kind = own_kind(table).filter(|_| key.name == "attention");
            fill(table, of_kind.map_or(key.keys(), AttentionKind::keys));
            let inner = table.iter_mut().filter(|_| of_kind.is_some());
            for inner in inner.filter_map(|(_, value)| value.as_table_mut()) {
                fill(inner, own_kind(inner).map_or(&[], AttentionKind::keys));
            }
        }
    }
}

/// The tables of a section: one table, or every `[[stage]]`.
fn tables<'t>(table: &'t mut Table, name: &str) -> impl Iterator<Item = &'t mut Table> {
    let (one, many) = match table.get_mut(name) {
        Some(Value::Table(table)) => (Some(table), None),
        Some(Value::Array(items)) => (None, Some(items)),
        _ => (None, None),
    };
    let many = many.into_iter().flatten().filter_map(Value::as_table_mut);
    one.into_iter().chain(many)
}

/// The value of `section.key`, or its default if it is missing.
fn value_at(table: &Table, path: &str) -> Option<Value> {
    let (section, key) = path.split_once('.')?;
    let written = table.get(section).and_then(|section| section.get(key));
    written.cloned().or_else(|| schema::key_at(path)?.default?())
}

/// The attention kind of a recipe's table.
pub(super) fn kind_of(table: &Table) -> Option<AttentionKind> {
    own_kind(table.get("attention")?.as_table()?)
}

/// The kind that `[attention]`, or a table in it, gives.
pub(super) fn own_kind(attention: &Table) -> Option<AttentionKind> {
    AttentionKind::named(attention.get("kind")?.as_str()?)
}
