//! `--set section.key=value`.

use super::*;
use crate::model::{DmaBias, DmaRecency, DmaShape, LayerType, MlaShape, MsaShape, NsaCompression, NsaShape};
use sieve_testing::refusal;

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
    assert!(!loaded(&["training.deterministic=false"]).training.deterministic);
    assert_eq!(loaded(&["data.paths=[\"a\", \"b\"]"]).data.paths, ["a", "b"]);
    assert_eq!(loaded(&["data.format=jsonl"]).data.format, DataFormat::Jsonl);
    assert_eq!(loaded(&["data.format=\"jsonl\""]).data.format, DataFormat::Jsonl);
    assert_eq!(loaded(&["data.text_column=a = b"]).data.text_column, "a = b");
    assert_eq!(loaded(&["data.text_column=12"]).data.text_column, "12");
    assert_eq!(loaded(&[" training.steps = 50 "]).training.steps, 50);
    assert_eq!(loaded(&["data.cache_dir=x\n[model]\nhidden_size=3"]).model.hidden_size, 48);
}

#[test]
fn equal_bits_in_training_refuse_what_changes_a_tokens_sums() {
    let wanted = ["training.same_bits=true", "training.one_document_per_row=true", "model.head_dim=16"];
    assert!(loaded(&wanted).training.same_bits);
    let msa = [&wanted[..], &["attention.kind=msa", "attention.select_block_size=16"]].concat();
    assert!(loaded(&msa).training.same_bits);
    for (words, says) in [
        (&["training.precision=fp8"][..], "precision = \"fp8\""),
        (&["training.dense_steps=0.5"], "dense_steps"),
        (&["attention.index_warmup=true"], "index_warmup"),
    ] {
        let words = [&msa[..], words].concat();
        refusal(load(&words), &format!("training.same_bits: does not go with {says}"));
    }
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
    assert_eq!(loaded(&["attention.kind=mha"]).attention.own, Attention::Mha);
    let swa = loaded(&["attention.kind=swa", "attention.sliding_window=9"]);
    assert_eq!(swa.attention.own, Attention::Swa(SwaShape { sliding_window: 9 }));
    let same = loaded(&["attention.kind=dma"]);
    assert_eq!(same.attention, minimal().attention);
    refusal(load(&["attention.sliding_window=4"]), "attention.sliding_window: does not go with kind = \"dma\"");
}

const ONE_DENSE: [LayerType; 3] = [LayerType::OWN, LayerType::of(Attention::DENSE), LayerType::OWN];

#[test]
fn one_key_chooses_a_kind_and_what_is_left_out_is_named() {
    let left_out = |text: &str, overrides: &[&str]| {
        let overrides: Vec<String> = overrides.iter().map(|&item| item.to_owned()).collect();
        let loaded = Recipe::load_with_left_out(text, "r.toml", &overrides);
        loaded.unwrap_or_else(|error| panic!("{overrides:?}: {error}"))
    };
    let patterned = MINIMAL.replacen("[attention]", "layer_types = [\"dma\", \"mha\", \"dma\"]\n[attention]", 1);
    let staged = format!("{patterned}[[stage]]\nsteps = 40\nwindow = 8\n").replacen("steps = 40\n", "", 1);
    for [kind, more, gone] in rows("another kind by one key") {
        let sets = format!("attention.kind={kind} {more}");
        let sets = sets.split_whitespace().collect::<Vec<_>>();
        let (recipe, names) = left_out(&staged, &sets);
        assert_eq!(names.join(" "), gone, "{sets:?}");
        let is_latent = recipe.attention.kind() == AttentionKind::Mla;
        assert_eq!(recipe.model.num_key_value_heads, if is_latent { 6 } else { 2 });
        let dense = match recipe.attention.kind() {
            AttentionKind::Mha | AttentionKind::Mla => &[][..],
            _ => &ONE_DENSE,
        };
        assert_eq!(recipe.layer_pattern().types(), dense, "{kind}");
    }
    // In a text whose kind is dense, "sparse" layers take the kind of the override.
    let dense = with_attention("kind = \"mha\"").replacen(
        "[attention]",
        "layer_types = [\"sparse\", \"mha\", \"sparse\"]\n[attention]",
        1,
    );
    let (recipe, names) = left_out(&dense, &["attention.kind=nsa"]);
    assert_eq!((recipe.layer_pattern().types(), names), (&ONE_DENSE[..], Vec::new()));
    // Only the text's values are left out: an override that the new kind does not allow is a mistake.
    refusal(
        load(&["attention.kind=mla", "model.num_key_value_heads=3"]),
        "model.num_key_value_heads: is 3, but kind = \"mla\" has keys",
    );
}

#[test]
fn sizes_of_a_kind_follow_from_the_row_and_the_model() {
    let dense = with_attention("kind = \"mha\"");
    let of = |kind: &str, seq_len: usize, more: &[&str]| {
        let own = [
            format!("attention.kind={kind}"),
            format!("training.seq_len={seq_len}"),
            format!("model.max_position_embeddings={seq_len}"),
        ];
        let own = own.iter().map(String::as_str).chain(more.iter().copied()).collect::<Vec<_>>();
        let recipe = load_with(&dense, &own).unwrap_or_else(|error| panic!("{own:?}: {error}"));
        // A text that itself has this kind gives the same attention as the override.
        if more.is_empty() {
            let written = dense.replacen("kind = \"mha\"", &format!("kind = {kind:?}"), 1);
            // Bands follow from the number of KV heads, all other sizes do not.
            let given = if kind == "cowa" { "" } else { "num_key_value_heads = 2\n" };
            let written = written.replacen(given, "", 1);
            let alone = load_with(&written, &own[1..]).expect("the kind alone");
            assert_eq!(alone.attention, recipe.attention);
            let heads = [("mla", 6), ("cowa", 2)].into_iter().find_map(|(of, heads)| (of == kind).then_some(heads));
            assert_eq!(alone.model.num_key_value_heads, heads.unwrap_or(3));
        }
        recipe.attention.own
    };
    // The sizes written out.
    let written = |kind: &str, seq_len: usize, keys: &str| {
        let text = with_attention(&format!("kind = {kind:?}\n{}", keys.replace(", ", "\n")));
        let lengths = ["training.seq_len", "model.max_position_embeddings"].map(|key| format!("{key}={seq_len}"));
        let heads = if kind == "mla" { 6 } else { 2 };
        let heads = format!("model.num_key_value_heads={heads}");
        let loaded = load_with(&text, &[&lengths[0], &lengths[1], &heads]);
        loaded.unwrap_or_else(|error| panic!("{kind} {seq_len}: {error}")).attention.own
    };
    for [kind, lengths, keys] in rows("sizes of kinds") {
        for seq_len in lengths.split(' ').map(|length| length.parse().expect("a length")) {
            let found = of(kind, seq_len, &[]);
            assert_eq!(found, written(kind, seq_len, keys), "{kind} {seq_len}");
        }
    }
    // The sizes that are left out follow from those that are given.
    let third = "keep_window_size = 24, bias = \"linear\", recency = \"slope\", local_window_size = 3";
    let given = of("dma", 256, &["attention.keep_window_size=24"]);
    assert_eq!(given, written("dma", 256, third));
    let Attention::Dma(exp) = of("dma", 256, &["attention.bias=exp"]) else { panic!("not DMA") };
    assert_eq!((exp.recency, exp.bias), (DmaRecency::None, DmaBias::Exp));
    for (set, hidden) in [("compress=mlp", 20), ("compress_hidden_size=7", 7)] {
        let Attention::Nsa(mlp) = of("nsa", 256, &[&format!("attention.{set}")]) else { panic!("not NSA") };
        assert_eq!((mlp.compress, mlp.compress_hidden_size), (NsaCompression::Mlp, Some(hidden)));
    }
}

#[test]
fn each_kind_that_a_paper_gives_sizes_has_them_as_a_preset() {
    let paper = "attention.preset=paper";
    let nsa = Attention::Nsa(NsaShape::published(Some(20)));
    // Sizes that follow from the model's, or that the minimal recipe gives.
    let with_sizes_of_the_recipe = [
        ("nsa", nsa),
        ("mla", Attention::Mla(MlaShape::published(10))),
        ("dma", Attention::Dma(DmaShape::published(16))),
    ];
    for kind in AttentionKind::ALL.into_iter().filter(|kind| kind.keys().iter().any(|key| key.name == "preset")) {
        let name = kind.name();
        let published = with_sizes_of_the_recipe.iter().find(|(known, _)| *known == name);
        let published = published.map_or_else(|| kind.example(), |(_, published)| *published);
        let found = loaded(&[&format!("attention.kind={name}"), paper]);
        assert_eq!(found.attention.own, published, "{name}");
    }
    let msa = loaded(&["attention.kind=msa", paper, "attention.index_loss_weight=0.5"]).attention.own;
    let published = MsaShape { index_loss_weight: 0.5, ..MsaShape::published() };
    assert_eq!(msa, Attention::Msa(published));
    // The indexer's learning rate goes with its kind.
    let text = with_attention("kind = \"msa\"").replacen("lr = 1e-3", "lr = 1e-3\nindexer_lr = 2e-3", 1);
    let of_indexer = |recipe: Recipe| recipe.optimizer.indexer_lr;
    assert_eq!(load_with(&text, &[]).map(of_indexer), Ok(Some(2e-3)));
    assert_eq!(load_with(&text, &["attention.kind=nsa"]).map(of_indexer), Ok(None));
    for kind in ["mha", "swa"] {
        let kind = format!("attention.kind={kind}");
        let overrides = [kind, paper.to_owned()];
        let (_, left_out) = Recipe::load_with_left_out(MINIMAL, "r.toml", &overrides).expect("without a preset");
        assert!(left_out.contains(&"attention.preset".to_owned()), "{left_out:?}");
    }
    let text = with_attention("kind = \"nsa\"\npreset = \"paper\"\nwindow_size = 8");
    refusal(load_with(&text, &[]), "attention.window_size: is 8, but preset = \"paper\" sets it to 512");
    let replaced = load_with(&with_attention("kind = \"nsa\"\nwindow_size = 8"), &[paper]);
    assert_eq!(replaced.expect("the text's is replaced").attention.own, nsa);
}

#[test]
fn another_number_of_paths_drops_the_weights() {
    let text = include_str!("../../../../../recipes/dma_1p7b.toml");
    let weights = |overrides: &[&str]| load_with(text, overrides).map(|recipe| recipe.data.weights);
    let four = Some(vec![0.7, 0.2, 0.05, 0.05]);
    assert_eq!(weights(&[]).expect("valid"), four);
    assert_eq!(weights(&["data.paths=[\"w\", \"t\", \"c\", \"m\"]"]).expect("valid"), four);
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
    for [item, expected] in rows("overrides") {
        refusal(load(&[item]), expected);
    }
}

const SLOPED: &str = "kind = \"dma\"\nkeep_window_size = 7\nbias = \"linear\"\nrecency = \"slope\"\n\
    local_window_size = 2\nlongest_period = 9.0\na_init = 0.5";

#[test]
fn one_preset_replaces_all_that_departs_from_the_paper() {
    let text = with_attention(SLOPED)
        .replace("num_hidden_layers = 3", "num_hidden_layers = 3\nlayer_types = [\"sparse\", \"sparse\", \"mha\"]");
    let published = Attention::Dma(DmaShape::published(7));
    let load = |overrides: &[&str]| load_with(&text, overrides);
    let recipe = load(&["attention.preset=paper"]).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(recipe.attention.own, published);
    assert_eq!(recipe.model.layer_types, None);
    let written = recipe.to_toml().expect("a loaded recipe can be written");
    assert!(!written.contains("preset"), "{written}");
    assert_eq!(Recipe::load(&written, "r.toml", &[]).as_ref(), Ok(&recipe));
    // A text with the preset, and without the keys that it sets.
    let short = with_attention("kind = \"dma\"\nkeep_window_size = 7\npreset = \"paper\"");
    let recipe = Recipe::load(&short, "r.toml", &[]).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(recipe.attention.own, published);
    // A key that contradicts the preset is refused, in the text and in an override.
    let both = with_attention(&format!("{SLOPED}\npreset = \"paper\""));
    refusal(
        Recipe::load(&both, "r.toml", &[]),
        "attention.bias: is \"linear\", but preset = \"paper\" sets it to \"exp\" | \
         attention.recency: is \"slope\", but | attention.local_window_size: is 2, but | \
         attention.longest_period: is 9.0, but preset = \"paper\" has no slope | attention.a_init: is 0.5, but | \
         hint: leave attention.bias or attention.preset out",
    );
    refusal(load(&["attention.preset=paper", "attention.bias=linear"]), "attention.bias");
    refusal(load(&["attention.preset=papers"]), "paper");
}
