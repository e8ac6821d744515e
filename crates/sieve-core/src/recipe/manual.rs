//! Describes the keys of a recipe, as the page docs/recipe.md and as a JSON schema for editors.

use serde_json::{Map, Value, json};

use super::{AttentionKind, Recipe, TokenizerSection};
use crate::keys::{Bound, Choices, Key, Kind, MAX_F32, Section, Source, short_number};

/// Text of the page before its first section.
const HEAD: &str = "# Recipe keys
A recipe is one TOML text that describes one complete run. `sieve recipe keys` prints this page; `sieve recipe schema`
prints a JSON schema of the same keys, for editors. Unknown keys are refused with the nearest known name, and every
mistake of a text is reported at once.

Whole numbers are at least 0. A default of *none* leaves the key without a value. The column *resume* says which keys
may have another value when a run is resumed.
";

/// Documentation of every section and key, as Markdown.
pub fn keys_page() -> String {
    let mut page = HEAD.to_owned();
    for section in Recipe::KEYS {
        let title = match section.kind {
            Kind::Tables(_) => format!("[[{}]]", section.name),
            _ => format!("[{}]", section.name),
        };
        let may_be_absent = if section.required { "" } else { " May be left out." };
        let doc = one_line(section.doc);
        page += &format!("\n## {title}\n{doc}{may_be_absent}\n\n");
        match (section.name, section.kind) {
            ("attention", Kind::Table(keys)) => {
                // The first key is `kind`; each kind's own keys have a table of their own.
                page += &table(&keys[..1]);
                for kind in AttentionKind::ALL {
                    if !kind.keys().is_empty() {
                        page += &format!("\n### kind = {:?}\n\n", kind.name());
                        page += &table(kind.keys());
                    }
                }
            }
            _ => page += &table(section.keys()),
        }
        for key in section.keys() {
            if let Kind::Table(keys) = key.kind {
                page += &format!("\n### {title} {}\n\n{}", key.name, table(keys));
            }
        }
    }
    page
}

/// Every section and key, as a JSON schema (draft 7).
pub fn json_schema() -> String {
    let mut schema = object(Recipe::KEYS);
    schema["$schema"] = json!("http://json-schema.org/draft-07/schema#");
    schema["title"] = json!("Sieve recipe");
    let tokenizer = &mut schema["properties"]["tokenizer"];
    let of_sources = TokenizerSection::SOURCES.map(|source| {
        let is_other = |key: &Key| key.name != source && TokenizerSection::SOURCES.contains(&key.name);
        let keys = TokenizerSection::KEYS.iter();
        let mut of_source = object(&keys.filter(|key| !is_other(key)).copied().collect::<Vec<_>>());
        of_source["required"] = json!([source]);
        of_source
    });
    *tokenizer = json!({"description": tokenizer["description"], "oneOf": of_sources});
    let attention = &mut schema["properties"]["attention"];
    let kind = attention["properties"]["kind"].take();
    let of_kinds = AttentionKind::ALL.map(|attention_kind| {
        let mut of_kind = object(attention_kind.keys());
        let mut kind = kind.clone();
        kind["enum"] = json!([attention_kind.name()]);
        of_kind["properties"]["kind"] = kind;
        // Tables [attention.NAME].
        of_kind["additionalProperties"] = json!({"type": "object"});
        let required = of_kind["required"].as_array_mut();
        required.expect("a list").push(json!("kind"));
        of_kind
    });
    *attention = json!({"description": attention["description"], "oneOf": of_kinds});
    format!("{schema:#}\n")
}

/// The keys as a Markdown table.
fn table(keys: &[Key]) -> String {
    let mut text = "| key | value | default | resume | meaning |\n|---|---|---|---|---|\n".to_owned();
    for key in keys {
        let cells = [
            format!("`{}`", key.name),
            value_words(key),
            default_words(key),
            if key.may_change { "may change" } else { "" }.to_owned(),
            meaning(key),
        ];
        text += &format!("| {} |\n", cells.map(|cell| cell.replace('|', "\\|")).join(" | "));
    }
    text
}

/// The values that a key takes, in words.
pub(super) fn value_words(key: &Key) -> String {
    let number = match key.kind {
        Kind::Integer => "whole number",
        _ => "number",
    };
    match key.kind {
        Kind::Integer | Kind::Number => match key.bound {
            Some(Bound::Within(least, most, _)) => format!("{number}, {least} to {most}"),
            Some(Bound::AtLeastOne) => format!("{number} of at least 1"),
            Some(Bound::Between(least, MAX_F32, _)) => format!("{number} of at least {}", short_number(least)),
            Some(Bound::Between(least, most, _)) => {
                let [least, most] = [least, most].map(short_number);
                format!("{number}, {least} to {most}")
            }
            Some(Bound::Share(range, _)) => format!("{number} in {range}"),
            None => number.to_owned(),
        },
        Kind::Bool => "`true` or `false`".to_owned(),
        Kind::String => "string".to_owned(),
        Kind::Strings => "list of strings".to_owned(),
        Kind::Bools => "list of `true` and `false`".to_owned(),
        Kind::Integers => "list of whole numbers".to_owned(),
        Kind::Sizes => "table of whole numbers of at least 1".to_owned(),
        Kind::Numbers => "list of numbers".to_owned(),
        Kind::Choice(Choices { names, .. }) => {
            let names = names.iter().map(|name| format!("`{name:?}`"));
            names.collect::<Vec<_>>().join(", ")
        }
        Kind::Table(_) | Kind::Tables(_) => "table, below".to_owned(),
    }
}

/// The default of a key, in words.
pub(super) fn default_words(key: &Key) -> String {
    let default = key.default.and_then(|default| default());
    match (default, key.source) {
        // Debug prints 1e-8; TOML's own writer would print 0.00000001.
        (Some(toml::Value::Float(number)), _) => format!("`{number:?}`"),
        (Some(value), _) => format!("`{value}`"),
        (None, Some(Source::Key(source))) => format!("`{source}`"),
        (None, Some(Source::Words(words))) if key.required => format!("needed, or {words}"),
        (None, Some(Source::Words(words))) => words.to_owned(),
        (None, None) if key.required => "needed".to_owned(),
        (None, None) => "none".to_owned(),
    }
}

/// The meaning of a key and of each named value that it can have.
fn meaning(key: &Key) -> String {
    let mut text = one_line(key.doc);
    if let Kind::Choice(Choices { names, docs }) = key.kind {
        for (name, doc) in names.iter().zip(docs.iter()) {
            text += &format!("<br>`{name:?}`: {}", one_line(doc));
        }
    }
    text
}

/// Joins the lines of a doc comment.
fn one_line(doc: &str) -> String {
    doc.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The JSON schema of a table with these keys.
fn object(keys: &[Key]) -> Value {
    let properties: Map<String, Value> = keys.iter().map(|key| (key.name.to_owned(), schema_of(key))).collect();
    let required = keys.iter().filter(|key| key.required && key.source.is_none()).map(|key| key.name);
    json!({
        "type": "object",
        "additionalProperties": false,
        "properties": properties,
        "required": required.collect::<Vec<_>>(),
    })
}

/// The JSON schema of a key's value.
fn schema_of(key: &Key) -> Value {
    let list = |item: Value| json!({"type": "array", "items": item});
    let whole = json!({"type": "integer", "minimum": 0});
    let mut schema = match key.kind {
        Kind::Integer => whole,
        Kind::Number => json!({"type": "number"}),
        Kind::Bool => json!({"type": "boolean"}),
        Kind::String => json!({"type": "string"}),
        Kind::Strings => list(json!({"type": "string"})),
        Kind::Bools => list(json!({"type": "boolean"})),
        Kind::Integers => list(whole),
        Kind::Sizes => json!({"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}}),
        Kind::Numbers => list(json!({"type": "number"})),
        Kind::Choice(Choices { names, .. }) => json!({"type": "string", "enum": names}),
        Kind::Table(keys) => object(keys),
        Kind::Tables(keys) => list(object(keys)),
    };
    match key.bound {
        Some(Bound::Within(least, most, _)) => {
            schema["minimum"] = json!(least);
            schema["maximum"] = json!(most);
        }
        Some(Bound::AtLeastOne) => schema["minimum"] = json!(1),
        Some(Bound::Between(least, most, _)) => {
            schema["minimum"] = json!(least);
            schema["maximum"] = json!(most);
        }
        Some(Bound::Share(range, _)) => {
            let least = if range.starts_with('[') { "minimum" } else { "exclusiveMinimum" };
            let most = if range.ends_with(']') { "maximum" } else { "exclusiveMaximum" };
            schema[least] = json!(0);
            schema[most] = json!(1);
        }
        None => {}
    }
    schema["description"] = json!(one_line(key.doc));
    let is_section = matches!(key.kind, Kind::Table(_) | Kind::Tables(_));
    if let Some(value) = key.default.filter(|_| !is_section).and_then(|value| value()) {
        schema["default"] = json!(value);
    }
    schema
}
