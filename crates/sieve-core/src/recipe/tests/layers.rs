use super::MINIMAL;
use crate::recipe::Recipe;
use sieve_testing::{cases, refusal};

#[test]
fn a_pattern_of_layers_fits_the_model() {
    let dma = "kind = \"dma\"\nkeep_window_size = 8";
    let load = |types: &str, attention: &str| {
        let dma = "\n[attention]\nkind = \"dma\"\nkeep_window_size = 16";
        let pattern = format!("layer_types = {types}\n[attention]\n{attention}");
        let text = MINIMAL.replacen(dma, &pattern, 1);
        assert_ne!(text, MINIMAL);
        Recipe::load(&text, "r.toml", &[])
    };
    let recipe = load("[\"dma\", \"mha\", \"dma\"]", dma).expect("the second layer is dense");
    assert_eq!(recipe.dense_layers(), [false, true, false]);
    let any = "[\"sparse\", \"mha\", \"sparse\"]";
    for (attention, wanted) in [
        (dma, &[false, true, false][..]),
        ("kind = \"swa\"\nsliding_window = 8", &[false, true, false]),
        // One setting takes a recipe to dense attention in every layer.
        ("kind = \"mha\"", &[]),
    ] {
        let recipe = load(any, attention).expect("a pattern of any kind");
        assert_eq!(recipe.dense_layers(), wanted, "{attention}");
    }
    let msa = "kind = \"msa\"";
    let recipe = load("[\"msa\", \"shared\", \"mha\"]", msa).expect("the second layer shares");
    assert_eq!(recipe.shared_layers(), [false, true, false]);
    assert_eq!(recipe.dense_layers(), [false, false, true]);
    assert!(load(any, msa).expect("no layer shares").shared_layers().is_empty());
    for [types, kind, wanted] in cases(
        r#"
        ["shared", "sparse", "mha"] => msa => \
            model.layer_types: begins with "shared", and no layer before it chooses blocks
        ["mha", "shared", "sparse"] => msa => model.layer_types: begins with "shared", and no layer before it
        ["shared"] => msa => model.layer_types: begins with "shared"
        ["sparse", "shared", "mha"] => dma => \
            model.layer_types: holds "shared", but layers of attention.kind = "dma" choose no blocks
        ["sparse", "shared"] => nsa => model.layer_types: holds "shared", but layers of attention.kind = "nsa"
        ["sparse", "mha", "sparse"] => mla => model.layer_types: holds "mha", but attention.kind = "mla"
        ["dma", "swa"] => dma => model.layer_types: holds "swa", which is neither
        ["mha"] => dma => model.layer_types: holds dense layers alone
        ["dma", "mha"] => dma => model.layer_types: has 2 entries, which do not divide num_hidden_layers
        [] => dma => recipe: 1 mistake | model.layer_types: is an empty list
        [1] => dma => wanted a list of strings
    "#,
    ) {
        let attention = match kind {
            "dma" => dma.to_owned(),
            "mla" => "kind = \"mla\"\nkv_lora_rank = 8\nqk_rope_head_dim = 8".to_owned(),
            kind => format!("kind = {kind:?}"),
        };
        refusal(load(types, &attention), wanted);
    }
}

#[test]
fn dense_steps_are_spread_evenly_and_of_kinds_that_choose_blocks() {
    let load = |attention: &str, share: f64| {
        let text = MINIMAL
            .replacen("kind = \"dma\"\nkeep_window_size = 16", attention, 1)
            .replacen("[training]", &format!("[training]\ndense_steps = {share}"), 1);
        Recipe::load(&text, "r.toml", &[])
    };
    let dense = |share: f64| {
        let training = load("kind = \"moba\"", share).expect("valid").training;
        (0..8)
            .map(|step| usize::from(training.reads_all(step)))
            .collect::<Vec<_>>()
    };
    assert_eq!(dense(0.5), [0, 1, 0, 1, 0, 1, 0, 1]);
    assert_eq!(dense(0.25), [0, 0, 0, 1, 0, 0, 0, 1]);
    assert_eq!(dense(0.75), [0, 1, 1, 1, 0, 1, 1, 1]);
    assert_eq!(dense(0.0), [0; 8]);
    refusal(
        load("kind = \"moba\"", 1.0),
        "training.dense_steps: is 1, outside 0 to 0.999",
    );
    refusal(load("kind = \"moba\"", -0.5), "training.dense_steps: is -0.5");
    refusal(
        load("kind = \"swa\"\nsliding_window = 8", 0.5),
        "training.dense_steps: does not go with kind = \"swa\", whose queries choose no blocks",
    );
}
