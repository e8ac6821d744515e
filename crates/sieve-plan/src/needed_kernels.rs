//! The kernels that a recipe's model launches, so that they can be compiled before the first step.
use sieve_core::kinds::{KeyReads, LatentSizes};
use sieve_core::{Attention, Recipe};
use sieve_kernels::{AttentionNeeds, AttentionShape, NeededKernels, NeededKeys, StepSizes, SumOrder};

/// The kernels that a recipe's model launches on an architecture; without a recipe, all kernels that ship.
///
/// # Errors
/// Why there are no kernels for the recipe's heads.
pub fn needed_kernels(recipe: Option<&Recipe>, arch: &str) -> Result<NeededKernels, String> {
    let Some(recipe) = recipe else {
        return Ok(NeededKernels::shipped_for(arch));
    };
    let model = &recipe.model;
    let kind = recipe.attention.own.as_kind();
    let latent = kind.latent(model.head_dim);
    let mut list = NeededKernels::step(
        arch,
        StepSizes {
            d_model: model.hidden_size,
            d_ff: model.intermediate_size,
            // Latent attention's queries and keys are rotated by the kernel that packs them.
            rotated_head_dim: match latent {
                None => Some(model.head_dim),
                Some(_) => None,
            },
        },
    );
    if let Some(LatentSizes { rank, rope_width, has_norm }) = latent {
        let widths = [model.head_dim, rope_width];
        list.extend(NeededKernels::mla_pack(arch, widths, has_norm));
        list.extend(NeededKernels::mla_decode(arch, rank, widths, has_norm));
    }
    let (kv_heads, head_dim) = (model.num_key_value_heads, model.head_dim);
    if let Some(slopes) = kind.rank_slopes(kv_heads) {
        let slopes: Vec<f32> = slopes.into_iter().map(|slope| slope as f32).collect();
        list.extend(NeededKernels::dma_ranks(arch, head_dim, &slopes));
    }
    for needs in attention_needs(recipe)? {
        list.extend(needs.kernels(arch));
    }
    Ok(list)
}

/// The attention kernels of a recipe's layers, without regard to batch and row length.
fn attention_needs(recipe: &Recipe) -> Result<Vec<AttentionNeeds>, String> {
    let layers = recipe.layer_pattern();
    let mut kinds = vec![recipe.attention.own];
    for other in layers.types().iter().filter_map(|of| of.other) {
        if !kinds.contains(&other) {
            kinds.push(other);
        }
    }
    let needs = kinds.into_iter().map(|attention| kind_needs(recipe, attention));
    Ok(needs.collect::<Result<Vec<_>, _>>()?.concat())
}

/// The kernels of layers of one kind. DMA also needs dense kernels with a bias: rows no longer than its window mask
/// nothing.
fn kind_needs(recipe: &Recipe, attention: Attention) -> Result<Vec<AttentionNeeds>, String> {
    let model = &recipe.model;
    let heads = [model.num_attention_heads, model.num_key_value_heads];
    let mut shape = AttentionShape::new(1, 1, heads, [model.head_dim; 2]);
    let order = if recipe.training.deterministic { SumOrder::Fixed } else { SumOrder::Any };
    let kind = attention.as_kind();
    if let Some((got, supported)) = kind.block_gap(shape.head_dim, shape.num_heads / shape.num_kv_heads) {
        let kind = attention.kind().name();
        return Err(format!("attention.kind {kind:?} has no CUDA kernels for {got} (they take {supported})"));
    }
    shape.num_kv_heads = kind.attended_kv_heads(heads);
    shape.head_dim += kind.latent(model.head_dim).map_or(0, |latent| latent.rope_width);
    let mut keys = Vec::new();
    for reads in kind.reads() {
        match reads {
            KeyReads::Neighbours => keys.push(NeededKeys::Neighbours),
            KeyReads::Bands => keys.push(NeededKeys::Bands),
            KeyReads::Blocks => keys.push(NeededKeys::Blocks),
            KeyReads::Listed(bias) => keys.extend([NeededKeys::Chosen((*bias).into()), NeededKeys::AllBiased]),
        }
    }
    // An indexer's queries read all keys in the first `training.dense_steps` steps.
    keys.extend(kind.indexer().map(|_| NeededKeys::Neighbours));
    let has_sinks = model.attention_sinks;
    Ok(keys.into_iter().map(|keys| AttentionNeeds { shape, keys, order, has_sinks }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_core::recipe::{sibling, siblings};

    /// A refused call of a launch wrapper would run as its reference.
    #[test]
    fn the_models_of_all_recipes_have_kernels_on_all_architectures() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let (mut num_recipes, mut narrow) = (0, 0);
        let folders = ["recipes", "lab/recipes"].map(|name| std::fs::read_dir(folder.join(name)).expect("recipes"));
        let read = |path: std::path::PathBuf| std::fs::read_to_string(path).expect("text");
        let mut all = siblings(|dense| read(folder.join(format!("recipes/{dense}.toml"))));
        for file in folders.into_iter().flatten() {
            let file = file.expect("a recipe").path();
            all.insert(file.to_string_lossy().into_owned(), read(file));
        }
        for (file, text) in all {
            let recipe = Recipe::load(&text, "a recipe", &[]).expect("valid");
            num_recipes += 1;
            for arch in ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"] {
                match needed_kernels(Some(&recipe), arch) {
                    Ok(needed) => assert_eq!(needed.refused, [], "{file:?} {arch}"),
                    // The recipes for two CPU cores have heads of 32, and kernels choose blocks for wider heads alone.
                    Err(error) => {
                        assert!(error.contains("heads of 32"), "{file:?} {arch}: {error}");
                        narrow += 1;
                    }
                }
            }
        }
        assert!(num_recipes > 50 && narrow < 6 * num_recipes / 4, "{num_recipes} {narrow}");
    }

    #[test]
    fn a_recipe_of_latent_attention_gets_its_own_kernels() {
        let latent = |text: &str, settings: &[&str]| {
            let settings: Vec<String> = settings.iter().map(|x| (*x).to_owned()).collect();
            let recipe = Recipe::load(text, "a recipe", &settings).expect("valid");
            let wanted = needed_kernels(Some(&recipe), "sm_90a").expect("kernels");
            let mut names: Vec<String> = wanted
                .kernels
                .iter()
                .filter(|kernel| kernel.name().starts_with("mla_"))
                .map(|kernel| match kernel.defines() {
                    [] => kernel.name().to_owned(),
                    [first, ..] => format!("{} {first:?}", kernel.name()),
                })
                .collect();
            names.sort();
            names
        };
        let mla = sibling("mla_80m", include_str!("../../../recipes/mha_80m.toml")).expect("a known name");
        let names = latent(&mla, &["model.head_dim=64", "attention.kv_lora_rank=96"]);
        assert_eq!(
            names,
            [
                "mla_decode (\"KEY_DIM\", \"160\")",
                "mla_decode (\"KEY_DIM\", \"160\")",
                "mla_decode_join (\"VALUE_DIM\", \"96\")",
                "mla_join_token (\"HEAD_DIM\", \"64\")",
                "mla_pack_backward (\"CONTENT_DIM\", \"64\")",
                "mla_pack_forward (\"CONTENT_DIM\", \"64\")",
                "mla_values",
            ]
        );
        let dma = include_str!("../../../recipes/dma_80m.toml");
        assert_eq!(latent(dma, &[]), [""; 0]);
    }
}
