use super::*;
use crate::model::{Attention, LayerType};
use sieve_testing::{refusal, says};

const OWN: LayerType = LayerType::OWN;
const DENSE: LayerType = LayerType::of(Attention::DENSE);

#[test]
fn a_pattern_of_layers_fits_the_model() {
    let dma = "kind = \"dma\"\nkeep_window_size = 8";
    let load = |types: &str, attention: &str| {
        load_replaced(&format!("\n[attention]\n{DMA}"), &format!("layer_types = {types}\n[attention]\n{attention}"))
    };
    let recipe = load("[\"dma\", \"mha\", \"dma\"]", dma).expect("the second layer is dense");
    assert_eq!(recipe.layer_pattern().types(), [OWN, DENSE, OWN]);
    let any = "[\"sparse\", \"mha\", \"sparse\"]";
    for (attention, wanted) in [
        (dma, &[OWN, DENSE, OWN][..]),
        ("kind = \"swa\"\nsliding_window = 8", &[OWN, DENSE, OWN]),
        // One setting takes a recipe to dense attention in every layer.
        ("kind = \"mha\"", &[]),
    ] {
        let recipe = load(any, attention).expect("a pattern of any kind");
        assert_eq!(recipe.layer_pattern().types(), wanted, "{attention}");
    }
    let msa = "kind = \"msa\"";
    let recipe = load("[\"msa\", \"shared\", \"mha\"]", msa).expect("the second layer shares");
    assert_eq!(recipe.layer_pattern().types(), [OWN, LayerType::SHARED, DENSE]);
    assert_eq!(load(any, msa).expect("no layer shares").layer_pattern().types(), [OWN, DENSE, OWN]);
    for [types, kind, wanted] in rows("layer types") {
        let attention = match kind {
            "dma" => dma.to_owned(),
            "mla" => "kind = \"mla\"\nkv_lora_rank = 8\nqk_rope_head_dim = 8".to_owned(),
            kind => format!("kind = {kind:?}"),
        };
        refusal(load(types, &attention), wanted);
    }
}

#[test]
fn an_entry_may_repeat_a_name() {
    let load = |types: &str| {
        let attention = "kind = \"msa\"\n[attention.swa]\nsliding_window = 9";
        load_replaced(&format!("\n[attention]\n{DMA}"), &format!("layer_types = {types}\n[attention]\n{attention}"))
    };
    let window = LayerType::of(Attention::swa(9));
    let recipe = load("[\"2 swa\", \"1 sparse\"]").expect("three layers");
    assert_eq!(recipe.layer_pattern().types(), [window, window, OWN]);
    assert_eq!(load("[\"swa\", \"swa\", \"sparse\"]"), Ok(recipe));
    refusal(load("[\"4 swa\", \"sparse\"]"), "has 5 entries, which do not divide num_hidden_layers");
    for text in ["0 swa", "-1 swa", "1001 swa", "swa 2", "2"] {
        refusal(load(&format!("[{text:?}, \"sparse\"]")), &format!("holds {text:?}, which names no layer"));
    }
    refusal(load("[\"2 sw\", \"sparse\"]"), "holds \"sw\", which names no layer");
}

#[test]
fn each_layer_may_have_a_kind_of_its_own() {
    let load = |types: &str, tables: &str, overrides: &[&str]| {
        let text = format!("{DMA}\n{tables}\n");
        load_with(
            &MINIMAL.replacen(DMA, &text, 1).replacen("[attention]", &format!("layer_types = {types}\n[attention]"), 1),
            overrides,
        )
    };
    let tables = "[attention.swa]\nsliding_window = 9\n[attention.chosen]\nkind = \"msa\"\nselect_block_size = 8";
    let types = "[\"sliding_attention\", \"chosen\", \"sparse\"]";
    let recipe = load(types, tables, &[]).unwrap_or_else(|error| panic!("{error}"));
    let shape = recipe.model_shape(512).expect("large enough");
    let of = |layer| shape.attention_of(layer);
    // A key that a table leaves out has the same default as where its kind is the model's own.
    let alone =
        load_with(MINIMAL, &["attention.kind=msa", "attention.select_block_size=8"]).expect("valid").attention.own;
    assert_eq!([of(0), of(1), of(2)], [Attention::swa(9), alone, recipe.attention.own]);
    let written = recipe.to_toml().expect("small numbers");
    assert_eq!(load_with(&written, &[]).as_ref(), Ok(&recipe), "{written}");
    let template = recipe.to_template().expect("small numbers");
    assert_eq!(load_with(&template, &[]).as_ref(), Ok(&recipe), "{template}");
    assert!(written.contains("[attention.swa]\nkind = \"swa\"\nsliding_window = 9\n"), "{written}");
    // Overrides reach the tables, and a change of one is a change of the run.
    let wider = load(types, tables, &["attention.swa.sliding_window=12"]).expect("valid");
    assert_eq!(wider.attention.others["swa"], Attention::swa(12));
    refusal(recipe.check_resume(&wider, 1), "attention.swa.sliding_window was 9, is now 12");
    let weight = load(types, tables, &["attention.chosen.index_loss_weight=0.5"]).expect("valid");
    assert!(recipe.check_resume(&weight, 1).is_ok(), "the key may change");
    // A shared layer has the kind of the layer whose choice it reads.
    let shared =
        load("[\"chosen\", \"sparse\", \"shared\"]", &tables[tables.find("[attention.chosen").expect("there")..], &[]);
    let shared = shared.unwrap_or_else(|error| panic!("{error}"));
    let other = LayerType::of(alone);
    assert_eq!(shared.layer_pattern().types(), [other, OWN, LayerType { is_shared: true, ..other }]);
    // An override that makes "swa" the model's own kind replaces the table [attention.swa].
    let (windows, left_out) = Recipe::load_with_left_out(
        &MINIMAL.replacen(DMA, &format!("{DMA}\n{tables}\n"), 1).replacen(
            "[attention]",
            &format!("layer_types = {types}\n[attention]"),
            1,
        ),
        "r.toml",
        &["attention.kind=swa".to_owned(), "attention.sliding_window=5".to_owned()],
    )
    .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(windows.layer_pattern().types(), [OWN, other, OWN]);
    assert!(left_out.contains(&"attention.swa".to_owned()), "{left_out:?}");
    for [types, tables, wanted] in rows("tables of layers") {
        refusal(load(types, tables, &[]), wanted);
    }
}

#[test]
fn some_layers_have_no_positions() {
    let load = |line: &str, attention: &str| {
        load_replaced(&format!("\n[attention]\n{DMA}"), &format!("rope_layers = {line}\n[attention]\n{attention}"))
    };
    let recipe = load("[true, true, false]", DMA).unwrap_or_else(|error| panic!("{error}"));
    let shape = recipe.model_shape(512).expect("large enough");
    assert_eq!([0, 1, 2].map(|layer| shape.has_rope(layer)), [true, true, false]);
    let written = recipe.to_toml().expect("small numbers");
    assert_eq!(load_with(&written, &[]).as_ref(), Ok(&recipe), "{written}");
    let words = crate::attention_label(&shape);
    assert!(words.ends_with("1 of 3 layers without RoPE"), "{words}");
    // All layers rotate: the same model as without the key.
    let all = load("[true]", DMA).expect("valid").model_shape(512).expect("large enough");
    assert_eq!(all, load_with(MINIMAL, &[]).expect("valid").model_shape(512).expect("large enough"));
    refusal(load("[]", DMA), "model.rope_layers: is an empty list | leave it out");
    refusal(load("[true, false]", DMA), "model.rope_layers: has 2 entries, which do not divide num_hidden_layers = 3");
    refusal(load("[1, 0, 1]", DMA), "model.rope_layers: expected a list of true and false");
    let mla = "kind = \"mla\"\nkv_lora_rank = 8\nqk_rope_head_dim = 8";
    refusal(load("[true, true, false]", mla), "model.rope_layers: does not go with kind = \"mla\"");
    // An override to that kind leaves the key out.
    let text = MINIMAL.replacen("[attention]", "rope_layers = [false]\n[attention]", 1);
    let (latent, left_out) = Recipe::load_with_left_out(&text, "r.toml", &["attention.kind=mla".to_owned()])
        .unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(latent.model.rope_layers, None);
    assert!(left_out.contains(&"model.rope_layers".to_owned()), "{left_out:?}");
    // Weights that learned with positions are not resumed without them.
    refusal(recipe.check_resume(&load("[false]", DMA).expect("valid"), 1), "model.rope_layers was");
}

#[test]
fn an_indexer_is_trained_alone_where_there_is_one() {
    let load = |attention: &str, train: &str| {
        let train = format!("[training]\ntrain = {train}");
        load_with(&with_attention(attention).replacen("[training]", &train, 1), &[])
    };
    for kind in AttentionKind::ALL {
        let lines = format!("kind = {:?}", kind.name());
        let loaded = load(&lines, "[\"indexer\"]");
        if kind.example().as_kind().indexer().is_some() {
            assert!(loaded.expect("valid").training.trains_indexers_alone());
        } else {
            let Err(error) = loaded else { panic!("{lines} trains an indexer") };
            says(&error.to_string(), &format!("training.train: does not go with {lines}, which has no indexer"));
        }
    }
    refusal(load("kind = \"msa\"", "[\"mlp\"]"), "training.train: is [\"mlp\"], and only [\"indexer\"]");
    refusal(load("kind = \"msa\"", "[]"), "training.train: is [], and only");
}

#[test]
fn dense_steps_are_spread_evenly_and_need_a_kind_that_chooses_blocks() {
    let load = |attention: &str, share: f64| {
        let steps = format!("[training]\ndense_steps = {share}");
        load_with(&with_attention(attention).replacen("[training]", &steps, 1), &[])
    };
    for kind in AttentionKind::ALL {
        let lines = format!("kind = {:?}", kind.name());
        if kind.example().as_kind().block_choice().is_none() {
            let Err(error) = load(&lines, 0.5) else { panic!("{lines} takes dense steps") };
            says(&error.to_string(), &format!("does not go with {lines}, whose queries choose no blocks"));
            continue;
        }
        let dense = |share: f64| {
            let training = load(&lines, share).expect("valid").training;
            (0..8).map(|step| usize::from(training.reads_all(step))).collect::<Vec<_>>()
        };
        assert_eq!(dense(0.5), [0, 1, 0, 1, 0, 1, 0, 1]);
        assert_eq!(dense(0.25), [0, 0, 0, 1, 0, 0, 0, 1]);
        assert_eq!(dense(0.75), [0, 1, 1, 1, 0, 1, 1, 1]);
        assert_eq!(dense(0.0), [0; 8]);
        refusal(load(&lines, 1.0), "training.dense_steps: is 1, outside 0 to 0.999");
        refusal(load(&lines, -0.5), "training.dense_steps: is -0.5");
    }
}
