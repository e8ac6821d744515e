use super::MINIMAL;
use crate::recipe::Recipe;
use sieve_testing::refusal;

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
    for (types, attention, wanted) in [
        (
            any,
            "kind = \"mla\"\nkv_lora_rank = 8\nqk_rope_head_dim = 8",
            "model.layer_types: holds \"mha\", but attention.kind = \"mla\"",
        ),
        (
            "[\"dma\", \"swa\"]",
            dma,
            "model.layer_types: holds \"swa\", which is neither",
        ),
        ("[\"mha\"]", dma, "model.layer_types: holds dense layers alone"),
        (
            "[\"dma\", \"mha\"]",
            dma,
            "model.layer_types: has 2 entries, which do not divide num_hidden_layers",
        ),
        ("[]", dma, "recipe: 1 mistake"),
        ("[]", dma, "model.layer_types: is an empty list"),
        ("[1]", dma, "wanted a list of strings"),
    ] {
        refusal(load(types, attention), wanted);
    }
}
