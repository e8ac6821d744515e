//! Families of `transformers` that no recipe describes, and what their models have that a recipe's model lacks.
//!
//! The list is made from the modeling files of `transformers` 5.23.0. It has every `model_type` with which
//! `AutoModelForCausalLM` opens a folder there and an import does not, and the usual ones of other tasks. A test
//! compares it with the names that `transformers` has.

/// What models of some `model_type`s have.
type Family = (&'static [&'static str], &'static [&'static str]);

const ALIBI: &str = "biases by distance (ALiBi)";
const CONVOLUTIONS: &str = "short convolutions";
const ENCODER: &str = "an encoder, or tokens that read later ones";
const EXPERTS: &str = "experts in their feed-forward layers";
const FACTORS: &str = "factors of embeddings, attention, residuals and logits";
const GELU: &str = "GELU in their feed-forward layers";
const INTERLEAVED: &str = "rotated pairs side by side";
const LATENT_QUERIES: &str = "queries of low rank (q_lora_rank)";
const LAYER_NORM: &str = "LayerNorm in place of RMSNorm";
const LEARNED_POSITIONS: &str = "embeddings of positions";
const NORMS_BEHIND: &str = "norms behind attention and feed-forward layers in place of before them";
const NORMS_BEHIND_TOO: &str = "norms behind attention and feed-forward layers too";
const ONE_PLUS: &str = "norms that multiply by 1 + weight";
const OTHER_INPUTS: &str = "inputs of pictures or sound";
const PARALLEL: &str = "attention and feed-forward layers side by side";
const PARTIAL: &str = "a rotary embedding of a part of each head";
const RECURRENT: &str = "layers with a recurrent state";
const SCALED_EMBEDDINGS: &str = "embeddings times the square root of hidden_size";
const SOFT_CAPS: &str = "soft caps of logits";
const UNGATED: &str = "feed-forward layers without a gate";
const WIDE_NORMS: &str = "norms of queries and keys over all heads together";

const FAMILIES: &[Family] = &[
    // Dense models.
    (&["olmo"], &["LayerNorm without weights in place of RMSNorm"]),
    (&["olmo2", "olmo3"], &[NORMS_BEHIND, WIDE_NORMS]),
    (&["exaone4"], &[NORMS_BEHIND]),
    (&["granite", "granite_swa"], &[FACTORS]),
    (&["hyperclovax"], &[FACTORS, NORMS_BEHIND_TOO]),
    (&["minicpm3"], &["factors of embeddings, residuals and logits", LATENT_QUERIES]),
    (&["phi"], &[LAYER_NORM, PARALLEL, PARTIAL, UNGATED]),
    (
        &["phi3"],
        &["queries, keys and values in one tensor, gates in another", "scaling of type longrope, or partial rotation"],
    ),
    (&["gemma"], &[ONE_PLUS, GELU, SCALED_EMBEDDINGS]),
    (&["gemma2"], &[ONE_PLUS, GELU, NORMS_BEHIND_TOO, SOFT_CAPS]),
    (&["gemma3_text"], &[ONE_PLUS, GELU, NORMS_BEHIND_TOO, "another rotary base in layers with a window"]),
    (&["vaultgemma"], &[ONE_PLUS, GELU, SOFT_CAPS]),
    (&["gemma3n_text"], &["embeddings of their own in each layer", GELU, NORMS_BEHIND_TOO]),
    (&["gemma4_text"], &["embeddings of their own in each layer", GELU, NORMS_BEHIND_TOO]),
    (&["gemma4_unified_text"], &[GELU, NORMS_BEHIND_TOO, SOFT_CAPS]),
    (&["gemma4_assistant", "gemma4_unified_assistant"], &["inputs from another model, whose tokens they draft"]),
    (&["cohere", "cohere2", "cohere_compass_text"], &[LAYER_NORM, PARALLEL, INTERLEAVED, "a factor of logits"]),
    (&["glm"], &[PARTIAL, INTERLEAVED]),
    (&["glm4"], &[PARTIAL, INTERLEAVED, NORMS_BEHIND_TOO]),
    (&["helium", "ernie4_5"], &[INTERLEAVED]),
    (&["hunyuan_v1_dense"], &["norms of queries and keys behind their rotation"]),
    (&["nemotron"], &["LayerNorm with 1 + weight in place of RMSNorm", UNGATED, PARTIAL]),
    (&["jais2", "starcoder2"], &[LAYER_NORM, UNGATED]),
    (&["arcee", "apertus"], &[UNGATED]),
    (&["stablelm"], &[LAYER_NORM, PARTIAL]),
    (&["persimmon"], &[LAYER_NORM, UNGATED, PARTIAL]),
    (&["nanochat"], &["norms without weights", UNGATED, SOFT_CAPS]),
    (&["bitnet"], &["norms inside attention and feed-forward layers", "ReLU² in place of SiLU"]),
    (&["diffllama"], &["attention that is the difference of two"]),
    (&["hrm_text"], &["layers that run in cycles", "gates of attention"]),
    (&["youtu"], &[LATENT_QUERIES, INTERLEAVED]),
    (&["ministral3"], &["queries scaled by position"]),
    (&["seed_oss"], &["keys of their own for biases"]),
    (&["cwm", "internlm3", "iquestcoder"], &["defaults of their own, which no import knows"]),
    (&["gpt_neox"], &[LAYER_NORM, PARALLEL, PARTIAL, UNGATED]),
    (&["gpt_neox_japanese"], &[LAYER_NORM, PARTIAL, UNGATED]),
    (&["gptj", "codegen"], &[LAYER_NORM, PARALLEL, PARTIAL, INTERLEAVED, UNGATED]),
    (
        &["gpt2", "gpt-sw3", "gpt_bigcode", "gpt_neo", "opt", "openai-gpt", "biogpt", "xglm", "ctrl", "xlm"],
        &[LEARNED_POSITIONS, LAYER_NORM, UNGATED],
    ),
    (&["bloom", "mpt"], &[ALIBI, LAYER_NORM, UNGATED]),
    (&["falcon"], &[LAYER_NORM, UNGATED, "queries, keys and values in one tensor"]),
    (&["cpmant"], &["biases by distance that are learned", GELU]),
    (&["modernbert-decoder"], &[LAYER_NORM, GELU]),
    (&["blt"], &["an encoder and a decoder of bytes"]),
    (&["reformer"], &["attention to keys by their hashes"]),
    (&["xlnet"], &["attention by relative positions, in any order of tokens"]),
    // Mixtures of experts.
    (&["gpt_oss"], &[EXPERTS, "biases of all projections", "clamped gates"]),
    (
        &[
            "mixtral",
            "qwen2_moe",
            "qwen3_moe",
            "olmoe",
            "flex_olmo",
            "phimoe",
            "granitemoe",
            "granitemoeshared",
            "granitemoe_swa",
            "dbrx",
            "deepseek_v2",
            "deepseek_v32",
            "deepseek_v4",
            "dots1",
            "dots3_note_text",
            "ernie4_5_moe",
            "exaone_moe",
            "glm4_moe",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "hunyuan_v1_moe",
            "hy_v3",
            "hy_v4",
            "jetmoe",
            "kolibri1",
            "laguna",
            "llama4_text",
            "longcat_flash",
            "mellum",
            "mimo_v2_flash",
            "minimax_m2",
            "minimax_m3_vl_text",
            "solar_open",
            "zaya",
            "afmoe",
            "axk1",
            "axk2",
            "beam",
            "flint",
            "cohere2_moe",
            "aria_text",
        ],
        &[EXPERTS],
    ),
    (
        &[
            "qwen3_next",
            "qwen3_5_moe_text",
            "qwen4_exp_text",
            "bailing_hybrid",
            "kimi_linear",
            "jamba",
            "minimax",
            "nemotron_h",
            "granitemoehybrid",
        ],
        &[RECURRENT, EXPERTS],
    ),
    (&["lfm2_moe", "inkling_text", "inkling2_text"], &[CONVOLUTIONS, EXPERTS]),
    // Other layers in place of attention.
    (
        &[
            "mamba",
            "mamba2",
            "falcon_mamba",
            "falcon_h1",
            "bamba",
            "zamba",
            "zamba2",
            "rwkv",
            "xlstm",
            "recurrent_gemma",
            "qwen3_5_text",
            "olmo_hybrid",
        ],
        &[RECURRENT],
    ),
    (&["lfm2", "lfm3"], &[CONVOLUTIONS]),
    // Encoders.
    (
        &[
            "bart",
            "bert",
            "bert-generation",
            "big_bird",
            "bigbird_pegasus",
            "blenderbot",
            "blenderbot-small",
            "camembert",
            "data2vec-text",
            "distilbert",
            "electra",
            "ernie",
            "marian",
            "mbart",
            "megatron-bert",
            "modernbert",
            "mt5",
            "mvp",
            "pegasus",
            "plbart",
            "prophetnet",
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "t5",
            "t5gemma",
            "umt5",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xmod",
        ],
        &[ENCODER],
    ),
    // Other inputs than text.
    (
        &[
            "dots3_note",
            "emu3",
            "fuyu",
            "gemma3",
            "gemma3n",
            "gemma4",
            "gemma4_unified",
            "git",
            "got_ocr2",
            "idefics3",
            "internvl",
            "lfm2_vl",
            "llama4",
            "llava",
            "llava_next",
            "llava_onevision",
            "mistral3",
            "mllama",
            "moshi",
            "moss_transcribe_diarize",
            "musicgen",
            "musicgen_melody",
            "paligemma",
            "phi4_multimodal",
            "qwen2_5_omni",
            "qwen2_5_vl",
            "qwen2_audio",
            "qwen2_vl",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_vl",
            "qwen3_vl_moe",
            "qwen4_exp",
            "smolvlm",
            "trocr",
            "whisper",
        ],
        &[OTHER_INPUTS],
    ),
];

/// The words for a `model_type` whose models no recipe describes: what they have that a recipe's lack. `None` for one
/// that is not in the list.
pub(super) fn lacking(model_type: &str) -> Option<String> {
    let (_, features) = FAMILIES.iter().find(|(names, _)| names.contains(&model_type))?;
    let listed = match features {
        [before @ .., last] if !before.is_empty() => format!("{} and {last}", before.join(", ")),
        _ => features.concat(),
    };
    Some(format!("its models have {listed}, and a recipe has no such thing"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::Architecture;
    use serde_json::Value;
    use std::collections::BTreeSet;

    static DUMP: &str = include_str!("../../../../tests/golden/transformers_config_keys.json");

    fn names(release: &Value, list: &str) -> BTreeSet<String> {
        let names = release[list].as_array().expect("a list").iter();
        names.map(|name| name.as_str().expect("a name").to_owned()).collect()
    }

    #[test]
    fn every_family_of_transformers_is_imported_or_refused_with_what_is_missing() {
        let releases: Vec<Value> = serde_json::from_str(DUMP).expect("stored JSON");
        let newest = &releases[0];
        let read = Architecture::ALL.map(|architecture| architecture.class().model_type);
        for name in names(newest, "causal_models") {
            let is_refused = lacking(&name).is_some();
            assert!(is_refused != read.contains(&&*name), "{name} is neither imported nor listed, or both");
        }
        let known = names(newest, "model_types");
        let listed = FAMILIES.iter().flat_map(|(names, _)| *names).collect::<Vec<_>>();
        for name in &listed {
            assert!(known.contains(**name), "transformers has no model_type {name}");
        }
        let different = listed.iter().collect::<BTreeSet<_>>();
        assert_eq!(different.len(), listed.len(), "a name stands twice");
        assert!(FAMILIES.iter().all(|(_, features)| !features.is_empty()));
    }

    #[test]
    fn the_page_names_every_class_that_is_read() {
        let page = include_str!("../../../../docs/export.md");
        for class in Architecture::ALL.map(Architecture::class) {
            assert!(page.contains(class.name), "docs/export.md lacks {}", class.name);
        }
    }

    #[test]
    fn features_are_listed_as_a_sentence() {
        let said = |name: &str| lacking(name).expect(name);
        sieve_testing::says(&said("mixtral"), "its models have experts in their feed-forward layers, and a recipe has");
        sieve_testing::says(&said("exaone4"), "norms behind attention and feed-forward layers in place of before them");
        sieve_testing::says(
            &said("cohere"),
            "LayerNorm in place of RMSNorm, attention | and a factor of logits, and a",
        );
        assert_eq!(lacking("llama"), None);
    }
}
