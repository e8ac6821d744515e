//! The recipe from outside: what loads, what is refused, and in which words.

mod errors;
mod layers;
mod overrides;
mod properties;
mod resume;
mod stages;

use super::*;
use crate::keys::{Bound, Key, Kind, Section};
use crate::model::DmaShape;
use sieve_testing::says;

/// A small valid recipe that leaves every optional key out.
pub(super) const MINIMAL: &str = include_str!("tests/minimal.toml");

/// The minimal recipe's `[attention]`.
pub(super) const DMA: &str = "kind = \"dma\"\nkeep_window_size = 16";

/// The text of the minimal recipe with another `[attention]`.
pub(super) fn with_attention(keys: &str) -> String {
    assert!(MINIMAL.contains(DMA));
    MINIMAL.replacen(DMA, keys, 1)
}

/// A table of `mistakes.txt`.
pub(super) fn rows<const COLUMNS: usize>(name: &str) -> Vec<[&'static str; COLUMNS]> {
    let (_, text) = include_str!("tests/mistakes.txt")
        .split_once(&format!("\n== {name}\n"))
        .unwrap_or_else(|| panic!("no table {name}"));
    sieve_testing::cases(text.split("\n== ").next().unwrap_or(text))
}

pub(super) fn minimal() -> Recipe {
    Recipe::load(MINIMAL, "minimal.toml", &[]).expect("the minimal recipe is valid")
}

/// Loads a text with overrides.
pub(super) fn load_with(text: &str, overrides: &[&str]) -> Result<Recipe, RecipeError> {
    let overrides: Vec<String> = overrides.iter().map(|&item| item.to_owned()).collect();
    Recipe::load(text, "r.toml", &overrides)
}

/// Loads `MINIMAL` with `from` replaced by `to`; the text must hold `from`.
pub(super) fn load_replaced(from: &str, to: &str) -> Result<Recipe, RecipeError> {
    assert!(MINIMAL.contains(from), "{from}");
    Recipe::load(&MINIMAL.replacen(from, to, 1), "r.toml", &[])
}

#[test]
fn sizes_and_schedule_that_follow_from_others_may_be_left_out() {
    let short = [
        "intermediate_size = 80\n",
        "head_dim = 10\n",
        "tie_word_embeddings = true\n",
        "max_position_embeddings = 128\n",
        "[lr_scheduler]\nwarmup_steps = 7\ndecay_ratio = 0.2\n",
    ];
    let text = short.iter().fold(MINIMAL.to_owned(), |text, line| {
        assert!(text.contains(line), "{line}");
        text.replacen(line, "", 1)
    });
    let load = |sets: &[&str]| load_with(&text, sets);
    let recipe = load(&[]).expect("short");
    let model = &recipe.model;
    assert_eq!((model.intermediate_size, model.head_dim), (144, 8));
    assert_eq!((model.max_position_embeddings, model.tie_word_embeddings), (64, true));
    let schedule = &recipe.lr_scheduler;
    assert_eq!((schedule.warmup_steps, schedule.decay_ratio), (8, 0.2));
    // A smoke run of fewer steps, and a long one.
    for (steps, warmup_steps) in [(1, 0), (5, 1), (499, 99), (10_000, 100)] {
        let recipe = load(&[&format!("training.steps={steps}")]).expect("any number");
        assert_eq!(recipe.lr_scheduler.warmup_steps, warmup_steps);
    }
    let error = load(&["model.num_attention_heads=10"]).expect_err("4.8 columns a head");
    let error = error.to_string();
    says(&error, "model.head_dim: is missing, and hidden_size = 48 is not an even number times");
    assert!(error.starts_with("r.toml is not a valid recipe: 1 mistake"), "{error}");
}

// The defaults that follow from other values are stored here; docs/recipe.md has all others.
const FOLLOWING: &str = include_str!("tests/following.toml");

#[test]
fn resolved_text_states_every_default_and_loads_back_equal() {
    fn fill(table: &mut toml::Table, more: toml::Table) {
        for (name, value) in more {
            match (table.get_mut(&name), value) {
                (Some(toml::Value::Table(inner)), toml::Value::Table(more)) => fill(inner, more),
                (Some(_), _) => {}
                (None, value) => drop(table.insert(name, value)),
            }
        }
    }
    let recipe = minimal();
    let text = recipe.to_toml().expect("a loaded recipe can be written");
    let mut wanted: toml::Table = MINIMAL.parse().expect("TOML");
    fill(&mut wanted, FOLLOWING.parse().expect("TOML"));
    // The keys of [attention] are its kind's: they are given, or follow from others.
    for section in schema::sections().filter(|section| section.name != "attention") {
        let defaults = section.keys().iter().filter_map(|key| Some((key.name.to_owned(), key.default?()?)));
        let defaults = toml::Value::Table(defaults.collect());
        fill(&mut wanted, toml::Table::from_iter([(section.name.to_owned(), defaults)]));
    }
    assert_eq!(text.parse::<toml::Table>().expect("TOML"), wanted);
    // Sections and keys are written in the order of the page.
    let mut places = schema::sections().map(|section| text.find(&format!("[{}", section.name)).expect(section.name));
    assert!(places.by_ref().is_sorted());
    let [rate, decay] = ["\nlr = ", "\nweight_decay = "].map(|key| text.find(key).expect("a key of [optimizer]"));
    assert!(rate < decay);
    assert_eq!(Recipe::load(&text, "resolved", &[]), Ok(recipe));
}

#[test]
fn every_required_key_is_really_required_and_no_other() {
    let full = toml::Table::try_from(minimal()).expect("serialises");
    for section in schema::sections() {
        for key in section.keys() {
            let mut table = full.clone();
            let Some(_) = table[section.name].as_table_mut().expect("a section").remove(key.name) else {
                continue;
            };
            let loaded = Recipe::load(&table.to_string(), "r.toml", &[]);
            let needed = key.required || ["train", "paths"].contains(&key.name);
            assert_eq!(loaded.is_err(), needed, "{}.{}: {loaded:?}", section.name, key.name);
        }
        let mut table = full.clone();
        table.remove(section.name);
        assert_eq!(Recipe::load(&table.to_string(), "r.toml", &[]).is_err(), section.required, "[{}]", section.name);
    }
}

#[test]
fn every_bound_goes_with_the_type_of_its_key() {
    fn check(path: &str, keys: &[Key], bounds: &mut usize) {
        for key in keys {
            let path = format!("{path}.{}", key.name);
            check(&path, key.keys(), bounds);
            let fits = match key.bound {
                None => continue,
                Some(Bound::Within(..) | Bound::AtLeastOne) => matches!(key.kind, Kind::Integer),
                Some(Bound::Between(..) | Bound::Share(..)) => {
                    matches!(key.kind, Kind::Number)
                }
            };
            assert!(fits, "{path}: {:?}", key.bound);
            *bounds += 1;
        }
    }
    let mut bounds = 0;
    check("", Recipe::KEYS, &mut bounds);
    assert!(bounds > 40, "{bounds}");
}

#[test]
fn every_bound_of_a_section_is_checked() {
    let mut bounds = 0;
    // The keys of [attention] are several kinds', some of which have another bound.
    for section in schema::sections().filter(|section| section.name != "attention") {
        for key in section.keys() {
            let outside = match key.bound {
                None => continue,
                Some(Bound::AtLeastOne) => "0".to_owned(),
                Some(Bound::Within(_, most, _)) => (most as u64 + 1).to_string(),
                Some(Bound::Between(least, ..)) => format!("{:?}", least - 1.0),
                Some(Bound::Share(..)) => "1.5".to_owned(),
            };
            let path = format!("{}.{}", section.name, key.name);
            let Err(error) = load_with(MINIMAL, &[&format!("{path}={outside}")]) else { panic!("{path} = {outside}") };
            let error = error.to_string();
            assert!(error.contains(&format!("{path}: is ")), "{path} = {outside}: {error}");
            bounds += 1;
        }
    }
    assert!(bounds > 20, "{bounds}");
}

#[test]
fn model_shape_translates_every_name() {
    let mut recipe = minimal();
    let shape = recipe.model_shape(512).expect("the vocabulary fits");
    assert_eq!((shape.d_model, shape.d_ff, shape.num_layers), (48, 80, 3));
    assert_eq!((shape.num_heads, shape.num_kv_heads, shape.head_dim), (6, 2, 10));
    assert_eq!((shape.vocab_size, shape.max_seq_len, shape.group_size()), (512, 128, 3));
    assert_eq!((shape.q_width(), shape.kv_width()), (60, 20));
    assert_eq!(shape.attention, crate::model::Attention::Dma(DmaShape::new(16)));

    recipe.model.vocab_size = Some(640);
    assert_eq!(recipe.model_shape(512).map(|shape| shape.vocab_size), Ok(640));
    let error = recipe.model_shape(641).expect_err("641 tokens do not fit");
    assert_eq!(error, RecipeError::VocabularyTooSmall { model: 640, tokenizer: 641 });
}

#[test]
fn accumulation_divides_the_global_batch() {
    let mut training = minimal().training;
    training.local_batch_size = 4;
    training.global_batch_size = 24;
    assert_eq!(training.accumulation_steps(1), Some(6));
    assert_eq!(training.accumulation_steps(3), Some(2));
    assert_eq!(training.accumulation_steps(4), None);
    assert_eq!(training.accumulation_steps(0), None);
    assert_eq!(training.tokens_per_step(), 24 * 64);
}
