//! The JSON schema of recipes takes what the program takes.
#![allow(clippy::disallowed_methods, reason = "paths of tests")]

use serde_json::Value;
use sieve_core::Recipe;
use sieve_core::recipe::{AttentionKind, json_schema, siblings};
use sieve_testing::cases;

/// Why `value` does not fit `schema`, judged by the keywords of draft 7 that the schema uses; `None` if it fits.
fn misfit(schema: &Value, value: &Value, path: &str) -> Option<String> {
    let told = |what: &str| Some(format!("{path}: {what}"));
    if let Some(kinds) = schema["oneOf"].as_array() {
        let fits = kinds.iter().filter(|kind| misfit(kind, value, path).is_none());
        return (fits.count() != 1).then(|| format!("{path}: not exactly one kind"));
    }
    let has_type = match schema["type"].as_str().expect("a type") {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        other => panic!("{other}"),
    };
    if !has_type {
        return told("type");
    }
    if let Some(names) = schema["enum"].as_array()
        && !names.contains(value)
    {
        return told("no such name");
    }
    let number = value.as_f64().unwrap_or(0.0);
    let limit = |name: &str| schema[name].as_f64();
    if limit("minimum").is_some_and(|least| number < least)
        || limit("maximum").is_some_and(|most| number > most)
        || limit("exclusiveMinimum").is_some_and(|least| number <= least)
        || limit("exclusiveMaximum").is_some_and(|most| number >= most)
    {
        return told("outside its bound");
    }
    if let Some(items) = value.as_array() {
        let mut items = items.iter();
        return items.find_map(|item| misfit(&schema["items"], item, path));
    }
    let table = value.as_object()?;
    let mut required = schema["required"].as_array().expect("a list").iter();
    if let Some(key) = required.find(|key| !table.contains_key(key.as_str().expect("a name"))) {
        return told(&format!("{key} is missing"));
    }
    table.iter().find_map(|(name, value)| {
        let path = format!("{path}.{name}");
        match schema["properties"].get(name) {
            Some(schema) => misfit(schema, value, &path),
            // A table [attention.NAME].
            None if schema["additionalProperties"]["type"] == "object" && value.is_object() => None,
            None => Some(format!("{path}: unknown")),
        }
    })
}

/// Why a recipe's text does not fit the schema of recipes; `None` if it fits.
fn misfit_of(text: &str) -> Option<String> {
    let schema: Value = serde_json::from_str(&json_schema()).expect("JSON");
    let table: toml::Table = text.parse().expect("TOML");
    misfit(&schema, &serde_json::to_value(table).expect("JSON"), "")
}

#[test]
fn every_shipped_recipe_fits_the_schema_as_written_and_with_its_defaults() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let mut kinds = std::collections::BTreeSet::new();
    let folders = ["recipes", "lab/recipes"].map(|name| std::fs::read_dir(format!("{root}/{name}")).expect("recipes"));
    let read = |path: &str| std::fs::read_to_string(path).expect("readable");
    let mut all = siblings(|dense| read(&format!("{root}/recipes/{dense}.toml")));
    for entry in folders.into_iter().flatten() {
        let path = entry.expect("an entry").path().to_string_lossy().into_owned();
        if path.ends_with(".toml") {
            all.insert(path.clone(), read(&path));
        }
    }
    for (name, text) in all {
        assert_eq!(misfit_of(&text), None, "{name}");
        let recipe = Recipe::load(&text, "a recipe", &[]).expect("a shipped recipe");
        let resolved = recipe.to_toml().expect("it can be written");
        assert_eq!(misfit_of(&resolved), None, "{name}");
        kinds.insert(recipe.attention.kind().name());
    }
    assert_eq!(kinds.len(), AttentionKind::ALL.len(), "{kinds:?}");
}

#[test]
fn the_schema_finds_what_the_program_refuses() {
    let text = include_str!("../../../recipes/quickstart.toml");
    for [from, to, found] in cases(
        r#"
        hidden_size => hiden_size => missing
        [metrics] => [metrics]\nlog_frequency = 3 => unknown
        kind = "dma" => kind = "dmo" => kind
        kind = "dma" => kind = "dma"\nsliding_window = 3 => kind
        beta1 = 0.9 => beta1 = "high" => type
        name = "AdamW" => name = "SGD" => no such name
        eps = 1e-8 => eps = 0 => bound
        beta2 = 0.95 => beta2 = 1.0 => bound
        [tokenizer] => [tokenizer]\nnumbers = 300 => kind
        num_hidden_layers = 4 => num_hidden_layers = 400000 => bound
    "#,
    ) {
        assert!(text.contains(from), "{from}");
        let broken = text.replacen(from, to, 1);
        let misfit = misfit_of(&broken).unwrap_or_else(|| panic!("{to} fits"));
        assert!(misfit.contains(found), "{to}: {misfit}");
        assert!(Recipe::load(&broken, "broken", &[]).is_err(), "{to}");
    }
}
