//! Every recipe the project ships loads, and the paper's have the paper's numbers.
#![allow(clippy::disallowed_methods, reason = "paths of tests")]

use std::collections::BTreeMap;
use std::path::Path;

use sieve_core::recipe::{AttentionKind, siblings};
use sieve_core::{Attention, DmaShape, LayerType, Recipe, paths};

/// What the recipes of one size take from Table 4 of arXiv:2508.02124v1.
struct Row {
    size: &'static str,
    steps: usize,
    /// Millions of tokens in a step, rounded by the paper.
    batch: f64,
    lr: f64,
    num_layers: usize,
    d_model: usize,
    num_heads: usize,
    keep_window_size: usize,
}

#[rustfmt::skip]
const TABLE_4: [Row; 4] = [
    Row {
        size: "80m", steps: 13_500, batch: 0.128, lr: 3e-3, num_layers: 12, d_model: 768,
        num_heads: 6, keep_window_size: 1024,
    },
    Row {
        size: "200m", steps: 20_800, batch: 0.192, lr: 2e-3, num_layers: 16, d_model: 1024,
        num_heads: 8, keep_window_size: 1024,
    },
    Row {
        size: "680m", steps: 35_000, batch: 0.392, lr: 1e-3, num_layers: 24, d_model: 1536,
        num_heads: 12, keep_window_size: 1024,
    },
    Row {
        size: "1p7b", steps: 40_000, batch: 1.0, lr: 1e-3, num_layers: 28, d_model: 2048,
        num_heads: 16, keep_window_size: 2048,
    },
];

/// The text and the recipe of each file in `recipes/` and `lab/recipes/`, and of those without a file, by its name
/// without `.toml`.
fn shipped() -> BTreeMap<String, (String, Recipe)> {
    let files = ["../../recipes", "../../lab/recipes"].into_iter().flat_map(|name| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
        let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        entries.map(|entry| entry.expect("a readable entry").path())
    });
    let files = files.filter(|path| path.extension().is_some_and(|extension| extension == "toml"));
    let read =
        |path: &Path| std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut texts =
        siblings(|dense| read(&Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../recipes/{dense}.toml"))));
    for path in files {
        let name = path.file_stem().expect("a file name").to_string_lossy().into_owned();
        assert_eq!(texts.insert(name, read(&path)), None, "{}: a recipe that needs no file", path.display());
    }
    texts
        .into_iter()
        .map(|(name, text)| {
            let recipe = Recipe::load(&text, &name, &[]).unwrap_or_else(|error| panic!("{error}"));
            (name, (text, recipe))
        })
        .collect()
}

#[test]
fn every_shipped_recipe_loads_and_is_complete() {
    let recipes = shipped();
    let kinds = AttentionKind::ALL.map(AttentionKind::name);
    let expected = TABLE_4.iter().flat_map(|row| kinds.map(|kind| format!("{kind}_{}", row.size)));
    let synthetic = kinds.map(|kind| format!("mqar_{kind}"));
    for name in expected.chain(synthetic).chain(["quickstart".to_owned()]) {
        assert!(recipes.contains_key(&name), "{name} is missing");
    }
    for (name, (_, recipe)) in &recipes {
        let text = recipe.to_toml().expect("a loaded recipe can be written");
        assert_eq!(Recipe::load(&text, name, &[]).as_ref(), Ok(recipe), "{name}");
        let named = name.trim_start_matches("mqar_").trim_start_matches("hard_");
        let is_named = |kind: &&str| named == *kind || named.starts_with(&format!("{kind}_"));
        if let Some(kind) = kinds.into_iter().find(is_named) {
            assert_eq!(recipe.attention.kind().name(), kind, "{name}: named after another attention");
        }
    }
}

/// The published config.json of Qwen3-8B, 14B and 32B: layers, width, inner width, heads, and billions of parameters.
#[test]
fn recipes_of_qwen3_s_sizes_have_its_shapes() {
    let recipes = shipped();
    for (name, sizes, billions) in [
        ("dma_8b", [36, 4096, 12_288, 32], 8.19),
        ("dma_14b", [40, 5120, 17_408, 40], 14.77),
        ("dma_32b", [64, 5120, 25_600, 64], 32.76),
    ] {
        let (_, recipe) = &recipes[name];
        let model = &recipe.model;
        let found = [model.num_hidden_layers, model.hidden_size, model.intermediate_size, model.num_attention_heads];
        assert_eq!(found, sizes, "{name}");
        let others = (model.num_key_value_heads, model.head_dim, model.vocab_size);
        assert_eq!(others, (8, 128, Some(151_936)), "{name}");
        assert!(!model.tie_word_embeddings && recipe.parallelism.zero_stage == 3, "{name}");
        // DMA adds a projection of a few rows to each layer.
        let parameters = recipe.model_shape(151_936).expect("a model").parameters().total() as f64 / 1e9;
        assert!((parameters - billions).abs() < 0.02, "{name}: {parameters}");
        assert_eq!(recipe.training.tokens_per_step(), 1 << 20, "{name}");
    }
}

#[test]
fn sparse_then_dense_ends_with_a_tenth_of_its_steps_dense() {
    let recipes = shipped();
    let (_, recipe) = &recipes["sparse_then_dense_80m"];
    let stages = recipe.stages();
    let shapes = recipe.shapes_of_stages(&recipe.model_shape(50_304).expect("a model"));
    let found = shapes.iter().map(|shape| shape.attention.kind()).collect::<Vec<_>>();
    assert_eq!(found, [AttentionKind::InfllmV2, AttentionKind::Mha]);
    assert_eq!(10 * stages[1].steps.len(), recipe.training.steps);
    assert!(stages.iter().all(|stage| stage.section.seq_len == 32_768));
    // Any kind may come before the end, where its own tensors are dropped.
    let text = &recipes["sparse_then_dense_80m"].0;
    let msa = Recipe::load(text, "as msa", &["attention.kind=msa".to_owned()]);
    assert!(msa.is_ok(), "{msa:?}");
}

/// The config.json of SmolLM2-135M.
#[test]
fn recipes_of_smollm2_have_its_sizes_and_one_layer_in_four_of_the_other_kind() {
    let recipes = shipped();
    for (name, own, other) in [("smollm2_sparse", "msa", "swa"), ("smollm2_sparse_dma", "dma", "mha")] {
        let (_, recipe) = &recipes[name];
        let model = &recipe.model;
        let sizes = [model.num_hidden_layers, model.hidden_size, model.intermediate_size, model.num_attention_heads];
        assert_eq!(sizes, [30, 576, 1536, 9], "{name}");
        assert_eq!((model.num_key_value_heads, model.head_dim, model.vocab_size), (3, 64, Some(49_152)), "{name}");
        assert!(model.tie_word_embeddings && !model.qk_norm && model.rope_theta == 1e5, "{name}");
        assert!(recipe.training.steps <= 500, "{name}");
        let shape = recipe.model_shape(49_152).expect("a model");
        let kinds = shape.attentions().into_iter().map(|(kind, count)| (kind.kind().name(), count));
        let [few, many] = [7, 23];
        let wanted = if own == "msa" { [(own, few), (other, many)] } else { [(own, many), (other, few)] };
        assert_eq!(kinds.collect::<Vec<_>>(), wanted, "{name}");
    }
}

#[test]
fn the_recipe_of_dense_steps_differs_from_its_kind_s_in_these_alone() {
    let recipes = shipped();
    let (_, mut recipe) = recipes["infllm_v2_80m_ssa"].clone();
    assert_eq!(recipe.training.dense_steps, 0.5);
    recipe.training.dense_steps = 0.0;
    assert_eq!(recipe, recipes["infllm_v2_80m"].1);
}

#[test]
fn paper_recipes_follow_table_4() {
    let recipes = shipped();
    for row in TABLE_4 {
        let size = row.size;
        for kind in AttentionKind::ALL {
            let name = format!("{}_{size}", kind.name());
            let (text, recipe) = &recipes[&name];
            assert_eq!(recipe.training.steps, row.steps, "{name}");
            assert_eq!(recipe.optimizer.lr, row.lr, "{name}");
            assert_eq!(recipe.model.num_hidden_layers, row.num_layers, "{name}");
            assert_eq!(recipe.model.hidden_size, row.d_model, "{name}");
            assert_eq!(recipe.model.num_attention_heads, row.num_heads, "{name}");
            // The table rounds its batches; whole rows of 2048 tokens come within 5 %.
            let tokens = recipe.training.tokens_per_step() as f64 / 1e6;
            assert!((tokens / row.batch - 1.0).abs() < 0.05, "{name}: {tokens}M tokens a step, not {}M", row.batch);
            let shape = recipe.model_shape(50_277).expect("the NeoX tokenizer fits");
            match shape.attention {
                Attention::Mha => {}
                Attention::Swa(swa) => assert_eq!(swa.sliding_window, 1024, "{name}"),
                Attention::Mla(mla) => {
                    assert_eq!(4 * mla.kv_lora_rank, row.d_model, "{name}");
                    assert_eq!(mla.qk_rope_head_dim, 64, "{name}");
                }
                Attention::Nsa(nsa) => {
                    let blocks = [nsa.compress_block_size, nsa.select_block_size];
                    assert_eq!(blocks, [32, 64], "{name}");
                    assert_eq!((nsa.num_selected_blocks, nsa.window_size), (16, 512));
                    let hidden = if size == "1p7b" { 256 } else { 192 };
                    assert_eq!(nsa.compress_hidden_size, Some(hidden), "{name}");
                }
                Attention::Dma(dma) => assert_eq!(dma.keep_window_size, row.keep_window_size, "{name}"),
                Attention::Cowa(cowa) => {
                    let longest = if size == "1p7b" { 8192 } else { 2048 };
                    assert_eq!([cowa.sink_tokens, cowa.near_window], [64, 1024], "{name}");
                    assert_eq!((cowa.far_reach, cowa.num_bands), (longest - 64, shape.num_kv_heads), "{name}");
                }
                chosen => {
                    assert!(chosen.as_kind().block_choice().is_some(), "{name}: no sizes to compare");
                    let label = chosen.as_kind().label();
                    assert_eq!(label.as_deref(), Some("16 x 64 selected"), "{name}");
                }
            }
            let without_row = [AttentionKind::Swa, AttentionKind::Mla].contains(&kind);
            let extrapolated = without_row && ["680m", "1p7b"].contains(&size);
            assert_eq!(text.contains("EXTRAPOLATION"), extrapolated, "{name}");
            assert_eq!(text.contains("TWO STAGES"), size == "1p7b", "{name}");
            if size == "1p7b" {
                let stages = recipe.stages();
                let stage = |index: usize| {
                    let section = &stages[index].section;
                    let tokens = section.global_batch_size * section.seq_len;
                    (section.steps, section.seq_len, section.rope_theta, tokens)
                };
                // MSA's first stage has a warm-up of the indexer before it, which takes some of its steps.
                let warmup = usize::from(kind == AttentionKind::Msa);
                assert_eq!(stages.len(), warmup + 2, "{name}");
                let (steps, ..) = stage(0);
                let first = stage(warmup);
                assert_eq!((first.1, first.2, first.3), (2048, 1e4, 1 << 20), "{name}");
                assert_eq!(first.0 + warmup * steps, 32_000, "{name}");
                assert_eq!(stage(warmup + 1), (8000, 8192, 1e5, 1 << 20), "{name}");
            }
            assert!(text.lines().all(|line| line.chars().count() <= 120), "{name}: a line over 120 letters");
        }
    }
}

#[test]
fn recipes_have_the_sizes_their_names_say() {
    let recipes = shipped();
    // Besides the embedding; the 1.7B counts its vocabulary of 151,936 tokens in the paper's model, Qwen3-1.7B.
    // Beside one recipe of each kind there are these many.
    for (size, millions, more) in [
        // The published form of DMA, another text, code, dense steps, the board, a dense end.
        ("80m", 85.0, 6),
        ("200m", 201.0, 1),
        ("680m", 680.0, 1),
        ("1p7b", 1410.0, 1),
    ] {
        let is_of_size = |name: &str| name.split('_').any(|part| part == size);
        let of_size = recipes.iter().filter(|(name, _)| is_of_size(name));
        let count = AttentionKind::ALL.len() + more;
        assert_eq!(of_size.clone().count(), count, "{size}");
        for (name, (_, recipe)) in of_size {
            // MLA's projections have 2.3 to 2.8 % more; NSA's feed-forward layers make up for its compression MLP.
            let is_latent = recipe.attention.kind() == AttentionKind::Mla;
            let tolerance = if is_latent { 0.03 } else { 0.005 };
            let rows = recipe.stated_vocab_size().unwrap_or(50_277);
            let shape = recipe.model_shape(rows).expect("its tokenizer fits");
            let counted = shape.parameters().non_embedding() as f64 / 1e6;
            assert!((counted / millions - 1.0).abs() < tolerance, "{name}: {counted}M, not {millions}M");
        }
    }
}

#[test]
fn recipes_of_mqar_have_the_published_form_of_dma() {
    let recipes = shipped();
    for (name, window) in [("mqar_dma", 16), ("mqar_hard_dma", 512)] {
        assert_eq!(recipes[name].1.attention.own, Attention::Dma(DmaShape::published(window)), "{name}");
    }
}

#[test]
fn the_published_form_of_dma_ships_beside_the_one_that_learns_better() {
    let recipes = shipped();
    let dma = |name: &str| match recipes[name].1.attention.own {
        Attention::Dma(dma) => dma,
        other => panic!("{name}: {other:?}"),
    };
    for Row { size, .. } in TABLE_4 {
        let (ours, published) = (dma(&format!("dma_{size}")), dma(&format!("dma_{size}_paper")));
        let window = ours.keep_window_size;
        assert_eq!(published, DmaShape::published(window), "{size}");
        assert!(!ours.ranks_by_content_alone(), "{size}");
        let layers = |name: &str| recipes[name].1.layer_pattern();
        let one_in_four = [LayerType::OWN, LayerType::OWN, LayerType::OWN, LayerType::of(Attention::DENSE)];
        assert_eq!(layers(&format!("dma_{size}")).types(), one_in_four, "{size}");
        assert!(layers(&format!("dma_{size}_paper")).types().is_empty());
        assert_eq!(8 * ours.local_window_size, window, "{size}");
        // The last KV head has the longest period, four times the window.
        let slopes = ours.slopes(3).expect("recency");
        assert_eq!(slopes[2], 1.0 / (4 * window) as f64, "{size}");
    }
}

#[test]
fn recipes_of_one_size_differ_in_their_attention_alone() {
    let recipes = shipped();
    for Row { size, .. } in TABLE_4 {
        let (_, mha) = &recipes[&format!("mha_{size}")];
        for kind in AttentionKind::ALL.map(AttentionKind::name).into_iter().chain(["dma_paper"]) {
            let name = match kind {
                "dma_paper" => format!("dma_{size}_paper"),
                _ => format!("{kind}_{size}"),
            };
            let changes = mha.diff(&recipes[&name].1).expect("both can be written");
            let others = changes
                .iter()
                .filter(|change| !change.key.starts_with("attention."))
                // A stage's window is its attention's.
                .filter(|change| !change.key.ends_with(".window"))
                .filter(|change| kind != "mla" || change.key != "model.num_key_value_heads")
                // The project's form of DMA has dense layers.
                .filter(|change| kind != "dma" || change.key != "model.layer_types")
                // MSA's indexer has a warm-up, and its loss no kernel of a fixed order.
                .filter(|change| kind != "msa" || !change.key.starts_with("stage"))
                .filter(|change| kind != "msa" || change.key != "training.deterministic")
                // NSA's compression and MSA's indexer take parameters from the feed-forward layers.
                .filter(|change| !["nsa", "msa"].contains(&kind) || change.key != "model.intermediate_size")
                .collect::<Vec<_>>();
            assert!(others.is_empty(), "{kind}_{size}: {others:?}");
        }
    }
}

#[test]
fn mqar_recipes_differ_in_their_attention_alone() {
    let recipes = shipped();
    for (task, without) in [("mqar", None), ("mqar_hard", Some("mla"))] {
        let (_, mha) = &recipes[&format!("{task}_mha")];
        for kind in AttentionKind::ALL.map(AttentionKind::name).into_iter().filter(|kind| Some(*kind) != without) {
            let (_, other) = &recipes[&format!("{task}_{kind}")];
            let mut changes = mha.diff(other).expect("both can be written");
            changes.retain(|change| kind != "msa" || change.key != "training.deterministic");
            assert!(changes.iter().all(|change| change.key.starts_with("attention.")), "{task}_{kind}: {changes:?}");
        }
    }
}

#[test]
fn quickstart_is_sparse_and_takes_one_override_to_compare() {
    let (text, recipe) = &shipped()["quickstart"];
    let Attention::Dma(DmaShape { keep_window_size, .. }) = recipe.attention.own else { panic!("not DMA") };
    assert!(4 * keep_window_size <= recipe.training.seq_len, "the window is more than a quarter of the length");
    assert!(recipe.tokenizer.train.is_some(), "quickstart must need no file");
    let swa = Recipe::load(text, "quickstart", &["attention.kind=swa".to_owned()]);
    assert_eq!(swa.map(|recipe| recipe.attention.window()), Ok(Some(keep_window_size)));
    // Without CARGO_HOME the registry is found below the home folder.
    for path in &recipe.data.paths {
        let home = |name: &str| (name == "HOME").then(|| "/home/ada".to_owned());
        let expanded = paths::expand(path, &home).unwrap_or_else(|error| panic!("{error}"));
        assert!(expanded.starts_with("/home/ada/.cargo/registry/src/"), "{expanded}");
    }
}

#[test]
fn one_key_gives_any_recipe_any_kind() {
    for (name, (text, own)) in shipped() {
        for kind in AttentionKind::ALL {
            let sets = [format!("attention.kind={}", kind.name())];
            let recipe = Recipe::load(&text, &name, &sets).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(recipe.attention.kind(), kind, "{name}");
            if kind == own.attention.kind() {
                assert_eq!(recipe, own, "{name}");
            }
            let preset = [sets[0].clone(), "attention.preset=paper".to_owned()];
            Recipe::load(&text, &name, &preset).unwrap_or_else(|error| panic!("{error}"));
        }
    }
}
