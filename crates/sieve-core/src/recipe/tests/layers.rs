use super::{DMA, load_replaced, load_with, rows, with_attention};
use crate::model::{Attention, LayerType};
use sieve_testing::refusal;

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
fn dense_steps_are_spread_evenly_and_of_kinds_that_choose_blocks() {
    let load = |attention: &str, share: f64| {
        let steps = format!("[training]\ndense_steps = {share}");
        load_with(&with_attention(attention).replacen("[training]", &steps, 1), &[])
    };
    let dense = |share: f64| {
        let training = load("kind = \"moba\"", share).expect("valid").training;
        (0..8).map(|step| usize::from(training.reads_all(step))).collect::<Vec<_>>()
    };
    assert_eq!(dense(0.5), [0, 1, 0, 1, 0, 1, 0, 1]);
    assert_eq!(dense(0.25), [0, 0, 0, 1, 0, 0, 0, 1]);
    assert_eq!(dense(0.75), [0, 1, 1, 1, 0, 1, 1, 1]);
    assert_eq!(dense(0.0), [0; 8]);
    refusal(load("kind = \"moba\"", 1.0), "training.dense_steps: is 1, outside 0 to 0.999");
    refusal(load("kind = \"moba\"", -0.5), "training.dense_steps: is -0.5");
    refusal(
        load("kind = \"swa\"\nsliding_window = 8", 0.5),
        "training.dense_steps: does not go with kind = \"swa\", whose queries choose no blocks",
    );
}
