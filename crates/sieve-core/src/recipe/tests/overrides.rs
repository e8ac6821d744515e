//! `--set section.key=value`.

use super::*;
use sieve_testing::{cases, refusal};

fn load(overrides: &[&str]) -> Result<Recipe, RecipeError> {
    load_with(MINIMAL, overrides)
}

fn loaded(overrides: &[&str]) -> Recipe {
    load(overrides).unwrap_or_else(|error| panic!("{overrides:?}: {error}"))
}

#[test]
fn values_are_toml_or_bare_strings() {
    assert_eq!(loaded(&["optimizer.lr=3e-4"]).optimizer.lr, 3e-4);
    assert_eq!(loaded(&["training.max_norm=2"]).training.max_norm, 2.0);
    assert!(loaded(&["training.deterministic=true"]).training.deterministic);
    assert_eq!(loaded(&["data.paths=[\"a\", \"b\"]"]).data.paths, ["a", "b"]);
    assert_eq!(loaded(&["data.format=jsonl"]).data.format, DataFormat::Jsonl);
    assert_eq!(loaded(&["data.format=\"jsonl\""]).data.format, DataFormat::Jsonl);
    assert_eq!(loaded(&["data.text_column=a = b"]).data.text_column, "a = b");
    assert_eq!(loaded(&["data.text_column=12"]).data.text_column, "12");
    assert_eq!(loaded(&[" training.steps = 50 "]).training.steps, 50);
    assert_eq!(
        loaded(&["data.cache_dir=x\n[model]\nhidden_size=3"]).model.hidden_size,
        48
    );
}

#[test]
fn later_overrides_win_and_sections_appear_when_needed() {
    let recipe = loaded(&["training.steps=50", "checkpoint.at_start=true", "training.steps=60"]);
    assert_eq!(recipe.training.steps, 60);
    assert!(recipe.checkpoint.at_start);
    assert_eq!(recipe.checkpoint.interval, CheckpointSection::default().interval);
}

#[test]
fn global_batch_follows_an_overridden_local_batch_unless_given() {
    assert_eq!(loaded(&["training.local_batch_size=9"]).training.global_batch_size, 9);
    let both = loaded(&["training.local_batch_size=9", "training.global_batch_size=27"]);
    assert_eq!(both.training.global_batch_size, 27);
}

#[test]
fn another_kind_drops_the_keys_of_the_texts_kind_only() {
    assert_eq!(loaded(&["attention.kind=mha"]).attention, Attention::Mha);
    let swa = loaded(&["attention.kind=swa", "attention.sliding_window=9"]);
    assert_eq!(swa.attention, Attention::Swa(SwaShape { sliding_window: 9 }));
    let same = loaded(&["attention.kind=dma"]);
    assert_eq!(same.attention, minimal().attention);
    refusal(
        load(&["attention.kind=mha", "attention.keep_window_size=4"]),
        "does not go with kind = \"mha\"",
    );
    refusal(load(&["attention.kind=swa"]), "attention.sliding_window: is missing");
}

#[test]
fn another_number_of_paths_drops_the_weights() {
    let text = include_str!("../../../../../recipes/dma_1p7b.toml");
    let weights = |overrides: &[&str]| load_with(text, overrides).map(|recipe| recipe.data.weights);
    let four = Some(vec![0.7, 0.2, 0.05, 0.05]);
    assert_eq!(weights(&[]).expect("valid"), four);
    assert_eq!(
        weights(&["data.paths=[\"w\", \"t\", \"c\", \"m\"]"]).expect("valid"),
        four
    );
    assert_eq!(weights(&["data.paths=[\"text\"]"]).expect("valid"), None);
    let two = ["data.paths=[\"text\"]", "data.weights=[1, 2]"];
    assert!(weights(&two).is_err());
}

#[test]
fn another_tokenizer_source_replaces_the_texts() {
    let recipe = loaded(&["tokenizer.path=my/tokenizer.json"]);
    let path = TokenizerSource::Path("my/tokenizer.json");
    assert_eq!(recipe.tokenizer.source(), path);
    let named = loaded(&["tokenizer.path=my/tokenizer.json", "tokenizer.eos_token=</s>"]);
    assert_eq!(named.tokenizer.source(), path);
    assert_eq!(named.tokenizer.eos_token.as_deref(), Some("</s>"));
    let train = loaded(&["tokenizer.train.vocab_size=700"]).tokenizer.train;
    let train = train.expect("train");
    assert_eq!((train.vocab_size, train.sample_bytes), (700, 16 << 20));
    let train = loaded(&["tokenizer.train={vocab_size=701}"]).tokenizer.train;
    assert_eq!(train.expect("train").vocab_size, 701);
    let error = load(&["tokenizer.train.vocab_size=700", "tokenizer.path=x"]).expect_err("both by name");
    assert!(error.to_string().contains("got two"), "{error}");
}

#[test]
fn bad_overrides_are_refused_by_name() {
    for [item, expected] in cases(
        r#"
        training.steps => --set training.steps: override: an override is written section.key=value
        steps=3 => steps: is named without its section\n    hint: write training.steps=3
        stepz=3 => an override is written section.key=value
        =3 => an override is written section.key=value
        training.=3 => an override is written section.key=value
        .steps=3 => an override is written section.key=value
        trainning.steps=3 => there is no section [trainning], did you mean training?
        training.step=3 => --set training.step=3: training.step: [training] has no key step, did you mean steps?
        training.steps.x=3 => [training.steps] has no key x\n    hint: training.steps is a value, not a table
        training.steps=x => --set training.steps=x: training.steps: wanted a whole number of at least 0, got the \
            string "x"
        training.steps= => training.steps: wanted a whole number of at least 0, got the string ""
        optimizer.lr=-1 => --set optimizer.lr=-1: optimizer.lr: is -1, not a finite number of at least 0
        attention.kind=mlaa => there is no "mlaa", did you mean mla?
        parallelism.tensor_parallel_degree=2 => parallelism.tensor_parallel_degree: is not built yet
        data.weights=[1, 2] => has 2 entries, data.paths has 1
    "#,
    ) {
        refusal(load(&[item]), expected);
    }
}

const SLOPED: &str = "kind = \"dma\"\nkeep_window_size = 7\nbias = \"linear\"\nrecency = \"slope\"\n\
    local_window_size = 2\nlongest_period = 9.0\na_init = 0.5";

fn with_attention(keys: &str) -> String {
    let own = "kind = \"dma\"\nkeep_window_size = 16";
    assert!(MINIMAL.contains(own));
    MINIMAL.replacen(own, keys, 1)
}

#[test]
fn one_preset_replaces_all_that_departs_from_the_paper() {
    let text = with_attention(SLOPED).replace(
        "num_hidden_layers = 3",
        "num_hidden_layers = 3\nlayer_types = [\"sparse\", \"sparse\", \"mha\"]",
    );
    let published = Attention::Dma(DmaShape::published(7));
    let load = |overrides: &[&str]| load_with(&text, overrides);
    let recipe = load(&["attention.preset=paper"]).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(recipe.attention, published);
    assert_eq!(recipe.model.layer_types, None);
    let written = recipe.to_toml().expect("a loaded recipe can be written");
    assert!(!written.contains("preset"), "{written}");
    assert_eq!(Recipe::load(&written, "r.toml", &[]).as_ref(), Ok(&recipe));
    // In the text, on its own.
    let short = with_attention("kind = \"dma\"\nkeep_window_size = 7\npreset = \"paper\"");
    let recipe = Recipe::load(&short, "r.toml", &[]).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(recipe.attention, published);
    // What contradicts it is told, from the text and from an override.
    let both = with_attention(&format!("{SLOPED}\npreset = \"paper\""));
    refusal(
        Recipe::load(&both, "r.toml", &[]),
        "attention.bias: is \"linear\", but preset = \"paper\" sets it to \"exp\" | \
         attention.recency: is \"slope\", but | attention.local_window_size: is 2, but | \
         attention.longest_period: is 9.0, but preset = \"paper\" has no slope | attention.a_init: is 0.5, but | \
         hint: leave attention.bias or attention.preset out",
    );
    refusal(
        load(&["attention.preset=paper", "attention.bias=linear"]),
        "attention.bias",
    );
    refusal(load(&["attention.preset=papers"]), "paper");
}
