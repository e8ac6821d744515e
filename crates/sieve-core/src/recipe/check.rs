//! Checks names and types: every key is known, every required key is given, every value has its key's type.

use toml::{Table, Value};

use super::mistake::{Mistake, quoted};
use super::sections::{OWN_LAYER, SHARED_LAYER};
use super::{AttentionKind, TokenizerSection, schema};
use crate::did_you_mean;
use crate::keys::{Bound, Choices, Key, Kind};
use crate::kinds::{ATTENTION_KEYS, table_name};
use crate::number_of_short_form;

/// Checks `table` against the schema and removes unknown sections and keys, so that the rest can still be converted.
pub(super) fn check_table(table: &mut Table, mistakes: &mut Vec<Mistake>) {
    table.retain(|name, value| match schema::section(name) {
        Some(section) => check_section(section, value, mistakes),
        None if name == schema::STAGE => check_stages(value, mistakes),
        None if value.is_table() || is_list_of_tables(value) => {
            mistakes.push(unknown_section(name));
            false
        }
        // A key above all sections.
        None => {
            let hint = match schema::home_of(name) {
                Some(home) => format!("move it below [{home}]"),
                None => "move it below the section it belongs to".to_owned(),
            };
            mistakes.push(Mistake::new(name, "a key must be in a section", hint));
            false
        }
    });
    for section in schema::sections().filter(|section| section.required) {
        let reported = mistakes.iter().any(|mistake| mistake.key == section.name);
        if !table.contains_key(section.name) && !reported {
            let (name, keys) = (section.name, section.keys().iter());
            let required = keys.filter(|key| key.required).map(|key| key.name);
            let hint = match required.collect::<Vec<_>>().join(", ") {
                none if none.is_empty() => none,
                required => format!("[{name}] must give {required}"),
            };
            mistakes.push(Mistake::new(name, format!("section [{name}] is missing"), hint));
        }
    }
}

/// The mistake of a section with an unknown name.
pub(super) fn unknown_section(name: &str) -> Mistake {
    if schema::PLANNED.contains(&name) {
        return not_built(name);
    }
    let known = schema::sections().map(|section| section.name).chain([schema::STAGE]).collect::<Vec<_>>();
    let what = format!("there is no section [{name}]{}", did_you_mean(name, &known));
    Mistake::new(name, what, format!("the sections are {}", known.join(", ")))
}

/// What other programs call the number of passes over a text.
const EPOCHS: [&str; 4] = ["epochs", "num_epochs", "num_train_epochs", "max_epochs"];

/// The mistake of a key that `owner` (a section, or a table inside one) does not have.
pub(super) fn unknown_key(owner: &str, keys: &'static [Key], name: &str) -> Mistake {
    let path = format!("{owner}.{name}");
    if schema::PLANNED.contains(&path.as_str()) {
        return not_built(&path);
    }
    let known = keys.iter().map(|key| key.name).collect::<Vec<_>>();
    let nearest = did_you_mean(name, &known);
    let hint = match (of_other_programs(name), schema::homes_of(name).join("] and [")) {
        (Some(meant), _) => meant.to_owned(),
        (None, homes) if !homes.is_empty() => format!("{name} belongs to [{homes}]"),
        _ if known.is_empty() => format!("{owner} is a value, not a table"),
        _ if EPOCHS.contains(&name) => {
            "a run is counted in steps: training.steps=N; sieve plan prints how often the text is then read".to_owned()
        }
        _ => format!("the keys of [{owner}] are {}", known.join(", ")),
    };
    Mistake::new(path, format!("[{owner}] has no key {name}{nearest}"), hint)
}

/// What to write for a key of other trainers.
fn of_other_programs(name: &str) -> Option<&'static str> {
    Some(match name {
        "epochs" | "num_epochs" | "num_train_epochs" | "max_epochs" => {
            "write training.steps; sieve plan prints how often the text is then read"
        }
        "max_steps" | "num_steps" | "max_iters" | "iters" => "write training.steps",
        "batch_size" | "train_batch_size" => "write training.global_batch_size; local_batch_size is a micro-batch",
        "learning_rate" => "write optimizer.lr",
        _ => return None,
    })
}

/// The mistake of a section or key that is reserved for a feature that is not built yet.
fn not_built(key: &str) -> Mistake {
    let hint = "each GPU holds the whole model: sieve launch --nproc N shares rows and the optimizer, and \
        parallelism.context_parallel_degree long rows; leave this out";
    Mistake::new(key, "is not built yet", hint)
}

/// Checks a section. Returns `false` if the value is no table, so that the caller removes it.
fn check_section(section: &'static Key, value: &mut Value, mistakes: &mut Vec<Mistake>) -> bool {
    let Some(table) = value.as_table_mut() else {
        mistakes.push(wrong_type(section.name, &format!("a section [{}]", section.name), value));
        return false;
    };
    // Tables [attention.NAME], which have keys of their own.
    let inner = if section.name == ATTENTION { take_layer_tables(table, mistakes) } else { Table::new() };
    check_keys(section.name, section.keys(), table, mistakes);
    match section.name {
        ATTENTION => {
            check_attention(ATTENTION, table, mistakes);
            check_layer_tables(inner, table, mistakes);
        }
        "tokenizer" => check_tokenizer(table, mistakes),
        _ => {}
    }
    true
}

/// Checks all stages. Returns `false` if the value is no list of tables, so that the caller removes it.
fn check_stages(value: &mut Value, mistakes: &mut Vec<Mistake>) -> bool {
    let name = schema::STAGE;
    if !is_list_of_tables(value) {
        mistakes.push(wrong_type(name, "one or more blocks [[stage]]", value));
        return false;
    }
    let stages = value.as_array_mut().into_iter().flatten();
    for (number, stage) in (1..).zip(stages.filter_map(Value::as_table_mut)) {
        check_keys(&format!("{name}.{number}"), schema::STAGE_KEYS, stage, mistakes);
    }
    true
}

/// Checks the keys of a section or table: reports and removes unknown ones, and reports required ones that are missing.
fn check_keys(owner: &str, keys: &'static [Key], table: &mut Table, mistakes: &mut Vec<Mistake>) {
    table.retain(|name, value| match schema::key(keys, name) {
        Some(key) => {
            check_value(&format!("{owner}.{name}"), key, value, mistakes);
            true
        }
        None => {
            mistakes.push(unknown_key(owner, keys, name));
            false
        }
    });
    for key in keys.iter().filter(|key| key.required && !table.contains_key(key.name)) {
        let no_reason = "";
        mistakes.push(missing(owner, key, no_reason));
    }
}

/// The mistake of a missing key; `of` is the end of its sentence, which may name what needs the key.
fn missing(owner: &str, key: &Key, of: &str) -> Mistake {
    let what = format!("is missing; it must be {}{of}", wanted(key));
    Mistake::new(format!("{owner}.{}", key.name), what, "")
}

/// The mistake of a value whose type is not its key's.
fn wrong_type(path: &str, wanted: &str, value: &Value) -> Mistake {
    let hint = match whole_number(value) {
        Some(number) if wanted.starts_with(WHOLE_NUMBER) => format!("write {number}"),
        _ => String::new(),
    };
    Mistake::new(path, format!("expected {wanted}, got {}", describe(value)), hint)
}

/// Beginning of the words for a key that takes a whole number.
const WHOLE_NUMBER: &str = "a whole number";

/// The whole number that is meant by `1e3`, `"1000"` or `"1k"`; of a unit that has two meanings, both.
fn whole_number(value: &Value) -> Option<String> {
    match value {
        Value::Float(number) if number.fract() == 0.0 && (0.0..1e15).contains(number) => Some(format!("{number:.0}")),
        Value::String(text) => number_of_short_form(text),
        _ => None,
    }
}

/// Checks that a value has its key's type; whole numbers in a list of numbers become floats.
fn check_value(path: &str, key: &Key, value: &mut Value, mistakes: &mut Vec<Mistake>) {
    let fits = match (key.kind, &mut *value) {
        (Kind::Integer, Value::Integer(number)) => *number >= 0,
        (Kind::Number, Value::Integer(_) | Value::Float(_)) => true,
        (Kind::Bool, Value::Boolean(_)) | (Kind::String, Value::String(_)) => true,
        (Kind::Strings, Value::Array(items)) => items.iter().all(Value::is_str),
        (Kind::Bools, Value::Array(items)) => items.iter().all(Value::is_bool),
        (Kind::Integers, Value::Array(items)) => {
            items.iter().all(|item| item.as_integer().is_some_and(|number| number >= 0))
        }
        (Kind::Sizes, Value::Table(items)) => {
            items.iter().all(|(_, size)| size.as_integer().is_some_and(|number| number >= 1))
        }
        (Kind::Numbers, Value::Array(items)) => {
            // Whole numbers among floats become floats: serde takes no integer for an f64.
            for item in items.iter_mut() {
                if let Some(number) = item.as_integer() {
                    *item = Value::Float(number as f64);
                }
            }
            items.iter().all(Value::is_float)
        }
        (Kind::Choice(choices), Value::String(name)) => {
            check_choice(path, name, choices, mistakes);
            true
        }
        (Kind::Table(keys), Value::Table(table)) => {
            check_keys(path, keys, table, mistakes);
            true
        }
        _ => false,
    };
    if !fits {
        mistakes.push(wrong_type(path, &wanted(key), value));
    }
}

/// Reports a name that a key does not take.
fn check_choice(path: &str, name: &str, choices: &Choices, mistakes: &mut Vec<Mistake>) {
    let known = choices.names;
    if !known.contains(&name) {
        let what = format!("there is no {:?}{}", shorten(name), did_you_mean(name, known));
        mistakes.push(Mistake::new(path, what, format!("it can be {}", quoted(known))));
    }
}

/// Name of the section `[attention]`.
const ATTENTION: &str = "attention";

/// Takes the tables `[attention.NAME]` out of `[attention]`, by the name that [`table_name`] gives; two of one name are
/// a mistake. A table in the place of an ordinary key of `[attention]` stays: it is refused later as a wrong value.
fn take_layer_tables(table: &mut Table, mistakes: &mut Vec<Mistake>) -> Table {
    let is_inner = |name: &str, value: &Value| value.is_table() && schema::key(&ATTENTION_KEYS, name).is_none();
    let names = table.iter().filter(|(name, value)| is_inner(name, value)).map(|(name, _)| name.clone());
    let mut inner = Table::new();
    for name in names.collect::<Vec<_>>() {
        let kept = table_name(&name).to_owned();
        let value = table.remove(&name).expect("it was just found");
        if inner.insert(kept.clone(), value).is_some() {
            let what = format!("is a second table of {kept:?}");
            let hint = "[attention.sliding_attention] and [attention.swa] are one: leave either out";
            mistakes.push(Mistake::new(format!("{ATTENTION}.{name}"), what, hint));
        }
    }
    inner
}

/// Checks the tables `[attention.NAME]` and puts them back into `[attention]`, each with its kind. NAME may be another
/// kind than `[attention]` has, which is then the table's kind, or a word that `model.layer_types` gives no meaning.
fn check_layer_tables(inner: Table, attention: &mut Table, mistakes: &mut Vec<Mistake>) {
    let own = attention.get("kind").and_then(Value::as_str).map(str::to_owned);
    for (name, mut value) in inner {
        let path = format!("{ATTENTION}.{name}");
        let Some(table) = value.as_table_mut() else { continue };
        let is_kind = AttentionKind::named(&name).is_some();
        if is_kind && !table.contains_key("kind") {
            table.insert("kind".to_owned(), Value::String(name.clone()));
        }
        let taken = [Some(OWN_LAYER), Some(SHARED_LAYER), own.as_deref()].contains(&Some(name.as_str()));
        let kind = table.get("kind").and_then(Value::as_str);
        if taken || (is_kind && kind.is_some_and(|kind| kind != name)) {
            let what = "has a name that means other layers in model.layer_types".to_owned();
            let hint = "give the table a different name and its kind as kind = …, and use that name for its layers";
            mistakes.push(Mistake::new(&path, what, hint));
        }
        check_keys(&path, &ATTENTION_KEYS, table, mistakes);
        check_attention(&path, table, mistakes);
        attention.insert(name, value);
    }
}

/// Checks that `[attention]`, or a table `owner` in it, has the required keys of its kind, and no keys of other kinds.
fn check_attention(owner: &str, table: &mut Table, mistakes: &mut Vec<Mistake>) {
    let Some(kind) = table.get("kind").and_then(Value::as_str).map(str::to_owned) else {
        return; // `check_keys` has reported that the kind is missing or no string.
    };
    let Some(own) = AttentionKind::named(&kind).map(AttentionKind::keys) else {
        return; // `check_choice` has reported the kind, and its keys are unknown.
    };
    table.retain(|name, _| {
        let belongs = name == "kind" || schema::key(own, name).is_some();
        if !belongs {
            let keys = match own {
                [] => "none".to_owned(),
                own => own.iter().map(|key| key.name).collect::<Vec<_>>().join(", "),
            };
            let kinds = quoted(&schema::attention_kinds_with(name));
            let hint = format!("it belongs to kind = {kinds}; besides kind, {kind:?} takes {keys}");
            let what = format!("does not go with kind = {kind:?}");
            mistakes.push(Mistake::new(format!("{owner}.{name}"), what, hint));
        }
        belongs
    });
    for key in own.iter().filter(|key| key.required && !table.contains_key(key.name)) {
        mistakes.push(missing(owner, key, &format!(" for kind = {kind:?}")));
    }
}

/// Checks that `[tokenizer]` has exactly one source.
fn check_tokenizer(table: &Table, mistakes: &mut Vec<Mistake>) {
    let sources = TokenizerSection::SOURCES.iter();
    let given = sources.filter(|source| table.contains_key(**source));
    let got = match given.count() {
        0 => "none",
        1 => return,
        2 => "two",
        _ => "all",
    };
    let what = format!("needs exactly one of path, train and numbers, got {got}");
    let hint = "path = \"…/tokenizer.json\" to read one, train = { vocab_size = 4096 } to make one, or numbers = 8192 \
        for a synthetic task";
    mistakes.push(Mistake::new("tokenizer", what, hint));
}

fn is_list_of_tables(value: &Value) -> bool {
    value.as_array().is_some_and(|items| !items.is_empty() && items.iter().all(Value::is_table))
}

/// The values of a key in words, for "expected ...".
fn wanted(key: &Key) -> String {
    match key.kind {
        Kind::Integer => {
            let least = match key.bound {
                Some(Bound::Within(least, ..)) => least,
                Some(Bound::AtLeastOne) => 1,
                _ => 0,
            };
            format!("{WHOLE_NUMBER} of at least {least}")
        }
        Kind::Number => "a number".to_owned(),
        Kind::Bool => "true or false".to_owned(),
        Kind::String => "a string".to_owned(),
        Kind::Strings => "a list of strings, like [\"a\", \"b\"]".to_owned(),
        Kind::Bools => "a list of true and false, like [true, false]".to_owned(),
        Kind::Integers => "a list of whole numbers of at least 0, like [64, 128]".to_owned(),
        Kind::Sizes => "a table of whole numbers of at least 1, like { swa = 512 }".to_owned(),
        Kind::Numbers => "a list of numbers, like [0.7, 0.3]".to_owned(),
        Kind::Choice(choices) => format!("one of {}", quoted(choices.names)),
        Kind::Table(keys) | Kind::Tables(keys) => {
            let keys = keys.iter().map(|key| format!("{} = …", key.name)).collect::<Vec<_>>();
            format!("a table, like {{ {} }}", keys.join(", "))
        }
    }
}

/// A value in words, short enough for one line.
fn describe(value: &Value) -> String {
    match value {
        // --set reads a number of more than 64 bits as a string, because TOML cannot hold it.
        Value::String(text) if is_too_large(text) => {
            format!("{}, which is too large a number", shorten(text))
        }
        Value::String(text) => format!("the string {:?}", shorten(text)),
        Value::Integer(number) => format!("{number}"),
        Value::Float(number) => format!("{number:?}"),
        Value::Boolean(flag) => format!("{flag}"),
        Value::Datetime(date) => format!("the date {date}"),
        Value::Table(_) => "a table".to_owned(),
        Value::Array(items) => match items.iter().find(|item| !item.is_str()) {
            Some(Value::Array(_)) => "a list of lists".to_owned(),
            Some(item) => format!("a list with {}", describe(item)),
            None => "a list of strings".to_owned(),
        },
    }
}

/// Whether a text is a whole number that TOML cannot hold.
fn is_too_large(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit()) && !text.is_empty() && text.parse::<i64>().is_err()
}

fn shorten(text: &str) -> String {
    const LIMIT: usize = 60;
    if text.chars().count() <= LIMIT { text.to_owned() } else { text.chars().take(LIMIT).chain(['…']).collect() }
}
