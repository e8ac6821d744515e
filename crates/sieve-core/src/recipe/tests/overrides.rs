//! `--set section.key=value`.

use super::*;
use crate::model::{DmaBias, DmaRecency, InfllmV2Shape, MlaShape, MobaShape, MsaShape, NsaCompression, NsaShape};
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
    assert!(!loaded(&["training.deterministic=false"]).training.deterministic);
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
        load(&["attention.sliding_window=4"]),
        "attention.sliding_window: does not go with kind = \"dma\"",
    );
}

#[test]
fn one_key_chooses_a_kind_and_what_is_left_out_is_named() {
    let left_out = |text: &str, overrides: &[&str]| {
        let overrides: Vec<String> = overrides.iter().map(|&item| item.to_owned()).collect();
        let loaded = Recipe::load_and_left_out(text, "r.toml", &overrides);
        loaded.unwrap_or_else(|error| panic!("{overrides:?}: {error}"))
    };
    let patterned = MINIMAL.replacen(
        "[attention]",
        "layer_types = [\"dma\", \"mha\", \"dma\"]\n[attention]",
        1,
    );
    let staged = format!("{patterned}[[stage]]\nsteps = 40\nwindow = 8\n").replacen("steps = 40\n", "", 1);
    let own = "attention.keep_window_size";
    for (kind, more, gone) in [
        (
            "mha",
            &["attention.bias=exp"][..],
            &["attention.bias", own, "stage.1.window"][..],
        ),
        ("swa", &["stage.1.window=9"], &[own]),
        (
            "swa",
            &["attention.window_size=7"],
            &[own, "attention.window_size", "stage.1.window"],
        ),
        ("nsa", &[], &[own, "stage.1.window"]),
        ("dma", &["attention.compress=mlp"], &["attention.compress"]),
        (
            "mla",
            &[],
            &[own, "stage.1.window", "model.layer_types", "model.num_key_value_heads"],
        ),
        (
            "mla",
            &["model.num_key_value_heads=6"],
            &[own, "stage.1.window", "model.layer_types"],
        ),
    ] {
        let kind = format!("attention.kind={kind}");
        let (recipe, names) = left_out(&staged, &[&[kind.as_str()], more].concat());
        assert_eq!(names, gone, "{kind} {more:?}");
        let is_latent = recipe.attention.kind() == AttentionKind::Mla;
        assert_eq!(recipe.model.num_key_value_heads, if is_latent { 6 } else { 2 });
        let dense = match recipe.attention.kind() {
            AttentionKind::Mha | AttentionKind::Mla => &[][..],
            _ => &[false, true, false],
        };
        assert_eq!(recipe.dense_layers(), dense, "{kind}");
    }
    // The pattern of a text whose kind is dense is of the kinds that it may be overridden with.
    let dense = with_attention("kind = \"mha\"").replacen(
        "[attention]",
        "layer_types = [\"sparse\", \"mha\", \"sparse\"]\n[attention]",
        1,
    );
    let (recipe, names) = left_out(&dense, &["attention.kind=nsa"]);
    assert_eq!((recipe.dense_layers(), names), (vec![false, true, false], Vec::new()));
    // What another kind needs and the text cannot have stays a mistake where the command gives it.
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
        let own = own
            .iter()
            .map(String::as_str)
            .chain(more.iter().copied())
            .collect::<Vec<_>>();
        let recipe = load_with(&dense, &own).unwrap_or_else(|error| panic!("{own:?}: {error}"));
        // The text of a recipe of that kind alone says the same.
        if more.is_empty() {
            let written = dense.replacen("kind = \"mha\"", &format!("kind = {kind:?}"), 1);
            let written = written.replacen("num_key_value_heads = 2\n", "", 1);
            let alone = load_with(&written, &own[1..]).expect("the kind alone");
            assert_eq!(alone.attention, recipe.attention);
            assert_eq!(alone.model.num_key_value_heads, if kind == "mla" { 6 } else { 3 });
        }
        recipe.attention
    };
    let dma = |keep_window_size, local_window_size| {
        Attention::Dma(DmaShape {
            bias: DmaBias::Linear,
            recency: DmaRecency::Slope,
            local_window_size,
            ..DmaShape::published(keep_window_size)
        })
    };
    let nsa = |stride, select_block_size, num_selected_blocks, window_size| {
        Attention::Nsa(NsaShape {
            compress_block_size: 2 * stride,
            compress_stride: stride,
            compress: NsaCompression::Mean,
            select_block_size,
            num_selected_blocks,
            window_size,
            shared_kv: true,
            ..NsaShape::published(None)
        })
    };
    let chosen = |stride, select_block_size, num_selected_blocks| {
        let infllm = InfllmV2Shape {
            compress_block_size: 2 * stride,
            compress_stride: stride,
            select_block_size,
            num_selected_blocks,
            num_local_blocks: num_selected_blocks / 2,
        };
        let moba = MobaShape {
            select_block_size,
            num_selected_blocks: num_selected_blocks.min(16),
        };
        let msa = MsaShape {
            select_block_size,
            num_selected_blocks: moba.num_selected_blocks,
            ..MsaShape::published()
        };
        [Attention::InfllmV2(infllm), Attention::Moba(moba), Attention::Msa(msa)]
    };
    for (seq_len, sizes) in [
        (1, chosen(8, 16, 4)),
        (256, chosen(8, 16, 4)),
        (2048, chosen(16, 64, 8)),
        (8192, chosen(16, 64, 32)),
        (131_072, chosen(16, 64, 64)),
    ] {
        assert_eq!(["infllm_v2", "moba", "msa"].map(|kind| of(kind, seq_len, &[])), sizes);
    }
    for (seq_len, swa, dma, nsa) in [
        (1, 1, dma(1, 0), nsa(8, 16, 4, 1)),
        (256, 64, dma(64, 8), nsa(8, 16, 4, 32)),
        (1024, 256, dma(256, 32), nsa(8, 16, 16, 128)),
        (2048, 512, dma(512, 64), nsa(16, 64, 8, 256)),
        // The published sizes.
        (8192, 2048, dma(2048, 256), nsa(16, 64, 16, 512)),
        (131_072, 32_768, dma(32_768, 4096), nsa(16, 64, 16, 512)),
    ] {
        assert_eq!(of("mha", seq_len, &[]), Attention::Mha);
        assert_eq!(of("swa", seq_len, &[]), Attention::swa(swa));
        assert_eq!(of("dma", seq_len, &[]), dma);
        assert_eq!(of("nsa", seq_len, &[]), nsa);
        // A latent of a quarter of the width; half a head of ten, rounded up to whole pairs.
        let Attention::Mla(mla) = of("mla", seq_len, &[]) else {
            panic!("not MLA")
        };
        assert_eq!((mla.kv_lora_rank, mla.qk_rope_head_dim), (12, 6));
    }
    // What is given decides about the rest.
    assert_eq!(of("dma", 256, &["attention.keep_window_size=24"]), dma(24, 3));
    let Attention::Dma(exp) = of("dma", 256, &["attention.bias=exp"]) else {
        panic!("not DMA")
    };
    assert_eq!((exp.recency, exp.bias), (DmaRecency::None, DmaBias::Exp));
    for (set, hidden) in [("compress=mlp", 20), ("compress_hidden_size=7", 7)] {
        let Attention::Nsa(mlp) = of("nsa", 256, &[&format!("attention.{set}")]) else {
            panic!("not NSA")
        };
        assert_eq!(
            (mlp.compress, mlp.compress_hidden_size),
            (NsaCompression::Mlp, Some(hidden))
        );
    }
}

#[test]
fn each_kind_that_a_paper_gives_sizes_has_them_as_a_preset() {
    let paper = "attention.preset=paper";
    let nsa = loaded(&["attention.kind=nsa", paper]).attention;
    assert_eq!(nsa, Attention::Nsa(NsaShape::published(Some(20))));
    let mla = loaded(&["attention.kind=mla", paper]).attention;
    assert_eq!(mla, Attention::Mla(MlaShape::published(10)));
    let dma = loaded(&["attention.kind=dma", paper]).attention;
    assert_eq!(dma, Attention::Dma(DmaShape::published(16)));
    let infllm = loaded(&["attention.kind=infllm_v2", paper]).attention;
    assert_eq!(infllm, Attention::InfllmV2(InfllmV2Shape::published()));
    let moba = loaded(&["attention.kind=moba", paper]).attention;
    assert_eq!(moba, Attention::Moba(MobaShape::published()));
    let msa = loaded(&["attention.kind=msa", paper, "attention.index_loss_weight=0.5"]).attention;
    let published = MsaShape {
        index_loss_weight: 0.5,
        ..MsaShape::published()
    };
    assert_eq!(msa, Attention::Msa(published));
    for kind in ["mha", "swa"] {
        let kind = format!("attention.kind={kind}");
        let overrides = [kind, paper.to_owned()];
        let (_, names) = Recipe::load_and_left_out(MINIMAL, "r.toml", &overrides).expect("without a preset");
        assert!(names.contains(&"attention.preset".to_owned()), "{names:?}");
    }
    let text = with_attention("kind = \"nsa\"\npreset = \"paper\"\nwindow_size = 8");
    refusal(
        load_with(&text, &[]),
        "attention.window_size: is 8, but preset = \"paper\" sets it to 512",
    );
    let replaced = load_with(&with_attention("kind = \"nsa\"\nwindow_size = 8"), &[paper]);
    assert_eq!(replaced.expect("the text's is replaced").attention, nsa);
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
        optimizer.lr=-1 => --set optimizer.lr=-1: optimizer.lr: is -1, outside 0 to 3.4e38
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
