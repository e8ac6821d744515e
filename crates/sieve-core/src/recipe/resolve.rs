//! Writes defaults into a recipe's table, above all defaults that follow from other values.

use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::{Table, Value};

use super::document::kind_of;
use super::load::FormerForm;
use super::mistake::Mistake;
use super::{AttentionKind, Recipe, schema};
use crate::keys::{Key, Section, Source, value_of};
use crate::model::MAX_CHOSEN_BLOCKS;
use crate::model::{
    DmaForm, DmaRecency, DmaShape, InfllmV2Shape, MlaShape, MobaShape, MsaShape, NsaCompression, NsaShape,
};

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
                // A number of steps that breaks no other rule.
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

/// Writes out the sizes of `[model]` that follow from others, and the keys of `[attention]` that follow from its preset
/// or its kind's defaults. Works on checked values.
///
/// `gives_window`: whether the text has kind DMA and sets its window. Returns [`former_form`] of such a text.
pub(super) fn attention(table: &mut Table, gives_window: bool, mistakes: &mut Vec<Mistake>) -> Option<FormerForm> {
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
    };
    if let (Some(kind), Some(attention)) = (kind, table.get_mut("attention").and_then(Value::as_table_mut)) {
        preset(attention, kind, sizes, mistakes);
        match kind {
            AttentionKind::Mha => {}
            AttentionKind::Swa => derived(attention, "sliding_window", || sizes.part_of_row(4)),
            AttentionKind::Mla => mla_sizes(attention, sizes),
            AttentionKind::Nsa => nsa_sizes(attention, sizes),
            AttentionKind::Dma => return dma_form(attention, sizes).filter(|_| gives_window),
            AttentionKind::InfllmV2 => infllm_v2_sizes(attention, sizes),
            AttentionKind::Moba | AttentionKind::Msa => moba_sizes(attention, sizes),
        }
    }
    None
}

/// Writes out the missing sizes of `[model]` that follow from its width and its number of heads.
fn model_sizes(model: &mut Table, kind: Option<AttentionKind>, mistakes: &mut Vec<Mistake>) {
    let (width, heads) = (number(model, "hidden_size"), number(model, "num_attention_heads"));
    derived(model, "intermediate_size", || width?.checked_mul(3));
    derived(model, "num_key_value_heads", || match kind {
        Some(AttentionKind::Mla) => heads,
        _ => heads.map(|heads| if heads % 2 == 0 { heads / 2 } else { heads }),
    });
    derived(model, "head_dim", || {
        let (width, heads) = (width?, heads.filter(|&heads| heads > 0)?);
        if width % heads.saturating_mul(2) != 0 {
            let what = format!(
                "is missing, and hidden_size = {width} is not an even number times num_attention_heads = {heads}"
            );
            let hint = "give model.head_dim, or another hidden_size";
            mistakes.push(Mistake::new("model.head_dim", what, hint));
        }
        // Even and positive, so that the value made up here breaks no other rule.
        Some((width / heads / 2 * 2).max(2))
    });
}

/// The sizes from which the defaults of `[attention]` follow; `None` for a missing or impossible size.
#[derive(Clone, Copy)]
struct Sizes {
    seq_len: Option<usize>,
    hidden_size: Option<usize>,
    head_dim: Option<usize>,
}

/// From this number of tokens on, rows have NSA's published block sizes by default; shorter rows have smaller blocks.
const LONG_ROW: usize = 2048;
// By default, NSA selects as many blocks as hold a quarter of the row, between these numbers.
const FEWEST_BLOCKS: usize = 4;
const MOST_BLOCKS: usize = 16;
/// The largest default of NSA's window, in tokens.
const MOST_WINDOW: i64 = 512;

impl Sizes {
    /// A fraction 1 / `part` of a row's tokens, at least one token.
    fn part_of_row(self, part: usize) -> Option<i64> {
        whole((self.seq_len? / part).max(1))
    }

    fn is_long(self) -> bool {
        self.seq_len.is_some_and(|seq_len| seq_len >= LONG_ROW)
    }
}

/// A size as a TOML integer; `None` if it is too large.
fn whole(size: usize) -> Option<i64> {
    i64::try_from(size).ok()
}

fn mla_sizes(attention: &mut Table, sizes: Sizes) {
    derived(attention, "kv_lora_rank", || whole((sizes.hidden_size? / 4).max(1)));
    derived(attention, "qk_rope_head_dim", || whole(MlaShape::half_a_head(sizes.head_dim?)));
}

/// Sets missing sizes of pooled keys and selected blocks: a pooled key covers two strides, a selected block two, or
/// four in long rows.
fn pooled_sizes(attention: &mut Table, sizes: Sizes, most_blocks: usize) {
    derived(attention, "compress_stride", || Some(if sizes.is_long() { 16 } else { 8 }));
    let stride = number(attention, "compress_stride");
    derived(attention, "compress_block_size", || stride?.checked_mul(2));
    derived(attention, "select_block_size", || stride?.checked_mul(if sizes.is_long() { 4 } else { 2 }));
    num_blocks(attention, sizes, most_blocks);
}

/// Sets a missing number of selected blocks to as many as hold a quarter of the row, `most` at most.
fn num_blocks(attention: &mut Table, sizes: Sizes, most: usize) {
    let block = number(attention, "select_block_size").and_then(|block| usize::try_from(block).ok());
    derived(attention, "num_selected_blocks", || {
        let blocks = sizes.seq_len? / 4 / block?.max(1);
        whole(blocks.clamp(FEWEST_BLOCKS, most))
    });
}

fn number(table: &Table, key: &str) -> Option<i64> {
    table.get(key).and_then(Value::as_integer)
}

fn infllm_v2_sizes(attention: &mut Table, sizes: Sizes) {
    pooled_sizes(attention, sizes, MAX_CHOSEN_BLOCKS);
    let selected = number(attention, "num_selected_blocks");
    derived(attention, "num_local_blocks", || Some((selected? / 2).max(1)));
}

fn moba_sizes(attention: &mut Table, sizes: Sizes) {
    derived(attention, "select_block_size", || Some(if sizes.is_long() { 64 } else { 16 }));
    num_blocks(attention, sizes, MOST_BLOCKS);
}

fn nsa_sizes(attention: &mut Table, sizes: Sizes) {
    pooled_sizes(attention, sizes, MOST_BLOCKS);
    derived(attention, "window_size", || Some(sizes.part_of_row(8)?.min(MOST_WINDOW)));
    let compress = match attention.contains_key("compress_hidden_size") {
        true => NsaCompression::Mlp,
        false => NsaCompression::Mean,
    };
    choice(attention, "compress", compress);
    if attention.get("compress").and_then(Value::as_str) == Some("mlp") {
        derived(attention, "compress_hidden_size", || whole(sizes.head_dim?.checked_mul(2)?));
    }
}

/// Whether a recipe's text has kind DMA and sets its window.
pub(super) fn gives_window(text: &Table, kind: Option<AttentionKind>) -> bool {
    kind == Some(AttentionKind::Dma) && text["attention"].get("keep_window_size").is_some()
}

/// Writes out the missing keys of DMA. Returns [`former_form`].
fn dma_form(attention: &mut Table, sizes: Sizes) -> Option<FormerForm> {
    derived(attention, "keep_window_size", || sizes.part_of_row(4));
    let window = number(attention, "keep_window_size").and_then(|window| usize::try_from(window).ok());
    let given = DmaForm {
        bias: named(attention, "bias"),
        recency: named(attention, "recency"),
        local_window_size: number(attention, "local_window_size").and_then(|local| usize::try_from(local).ok()),
    };
    // Without a window, which is a mistake that is reported, any does.
    let form = DmaShape::with_form(window.unwrap_or(1), given);
    let starts_at_0 = attention.get("a_init").is_none_or(|a_init| a_init.as_float() == Some(0.0));
    choice(attention, "recency", form.recency);
    choice(attention, "bias", form.bias);
    derived(attention, "local_window_size", || whole(window.map(|_| form.local_window_size)?));
    former_form(form, given, starts_at_0)
}

/// How a text that gives DMA's window was read before 0.1.0, if it is read differently now: what it left out of
/// `recency` and `local_window_size` was as published. To be removed in the release after 0.1.0.
fn former_form(now: DmaShape, given: DmaForm, starts_at_0: bool) -> Option<FormerForm> {
    let recency = given.recency.or(Some(DmaRecency::None));
    let local_window_size = given.local_window_size.or(Some(0));
    let window = now.keep_window_size;
    let before = DmaShape::with_form(window, DmaForm { recency, local_window_size, ..given });
    let [then, today] = [before, now].map(|form| Table::try_from(form).expect("its values are those of TOML"));
    let differing = then.into_iter().filter(|(key, value)| today.get(key) != Some(value)).collect::<Table>();
    if differing.is_empty() {
        return None;
    }
    let words = match starts_at_0 && before == DmaShape::published(window) {
        true => "this text was the published form; write preset = \"paper\" for it".to_owned(),
        false => {
            let keys = differing.iter().map(|(key, value)| format!("{key} = {value}")).collect::<Vec<_>>();
            format!("this text stood for {} too; write that for the same attention", keys.join(", "))
        }
    };
    let overrides = differing.iter().map(|(key, value)| format!("attention.{key}={value}")).collect();
    Some(FormerForm { words: format!("attention: before 0.1.0 {words}"), overrides })
}

/// The value of a key that is one of some names.
fn named<T: DeserializeOwned>(table: &Table, key: &str) -> Option<T> {
    table.get(key)?.clone().try_into().ok()
}

/// Sets a missing key to a name.
fn choice<T: Serialize>(table: &mut Table, key: &str, name: T) {
    if let Some(name) = value_of(name).filter(|_| !table.contains_key(key)) {
        table.insert(key.to_owned(), name);
    }
}

/// Writes out what `attention.preset = "paper"` stands for.
fn preset(attention: &mut Table, kind: AttentionKind, sizes: Sizes, mistakes: &mut Vec<Mistake>) {
    let name = attention.remove(PRESET);
    if name.as_ref().and_then(Value::as_str) != Some("paper") {
        return;
    }
    // Without `model.head_dim` any width does: the mistake that kept it from being filled in is reported.
    let head_dim = sizes.head_dim.unwrap_or(2);
    let published = published(kind, head_dim);
    for name in preset_keys(kind) {
        let own = published.get(name);
        if let Some(given) = attention.get(name).filter(|given| Some(*given) != own) {
            let what = match own {
                Some(own) => format!("is {given}, but preset = \"paper\" sets it to {own}"),
                None => format!("is {given}, but preset = \"paper\" has no slope"),
            };
            let hint = format!("leave attention.{name} or attention.preset out");
            mistakes.push(Mistake::new(format!("attention.{name}"), what, hint));
        } else if let Some(own) = own {
            attention.insert(name.to_owned(), own.clone());
        }
    }
}

/// The key of `[attention]` whose value stands for several others.
pub(super) const PRESET: &str = "preset";

/// The keys of `kind` that its preset sets, or that must not be given together with the preset.
pub(super) fn preset_keys(kind: AttentionKind) -> impl Iterator<Item = &'static str> {
    let names = kind.keys().iter().map(|key| key.name);
    names.filter(|name| {
        ![PRESET, "keep_window_size", "compress_hidden_size", "index_loss_weight", "index_warmup"].contains(name)
    })
}

/// The keys of `[attention]` in a kind's published form, for heads of width `head_dim`. The caller uses those of
/// [`preset_keys`]; DMA's window and the width of NSA's MLP are not among them, and have any value here.
fn published(kind: AttentionKind, head_dim: usize) -> Table {
    let form = match kind {
        AttentionKind::Mha | AttentionKind::Swa => Ok(Table::new()),
        AttentionKind::Mla => Table::try_from(MlaShape::published(head_dim)),
        AttentionKind::Nsa => Table::try_from(NsaShape::published(None)),
        AttentionKind::Dma => Table::try_from(DmaShape::published(1)),
        AttentionKind::InfllmV2 => Table::try_from(InfllmV2Shape::published()),
        AttentionKind::Moba => Table::try_from(MobaShape::published()),
        AttentionKind::Msa => Table::try_from(MsaShape::published()),
    };
    form.expect("its values are those of TOML")
}

/// Writes out the remaining defaults: fixed values, values of other keys, and for stages the window of `[attention]`.
pub(super) fn defaults(table: &mut Table) {
    let of_steps = value_at(table, "training.steps").and_then(|steps| steps.as_integer());
    let schedule = table.entry("lr_scheduler").or_insert_with(|| Value::Table(Table::new()));
    if let Some(schedule) = schedule.as_table_mut() {
        derived(schedule, "warmup_steps", || of_steps.map(default_warmup));
    }
    fill(table, Recipe::KEYS);
    let attention = table.get("attention").and_then(Value::as_table);
    let of_attention = OF_ATTENTION.map(|(name, keys)| {
        let value = keys.iter().find_map(|key| attention?.get(*key));
        (name, value.cloned())
    });
    for section in Recipe::KEYS {
        let mut inherited = Vec::new();
        for key in section.keys() {
            if let Some(Source::Key(source)) = key.source {
                inherited.push((key.name, value_at(table, source)));
            }
        }
        if section.name == schema::STAGE {
            inherited.extend(of_attention.clone());
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
    original_positions(table);
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

/// Sets a missing key to `value()`, unless that is `None`.
fn derived(table: &mut Table, key: &str, value: impl FnOnce() -> Option<i64>) {
    if !table.contains_key(key)
        && let Some(value) = value()
    {
        table.insert(key.to_owned(), Value::Integer(value));
    }
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
            // [attention] is filled in with the keys of its kind only.
            let kind = table.get("kind").and_then(Value::as_str);
            let of_kind = kind.and_then(AttentionKind::named);
            fill(table, of_kind.map_or(key.keys(), AttentionKind::keys));
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
