//! The keys of `config.json` that the classes of `transformers` have, and what an import does with each.
//!
//! A test compares the list with a dump of the classes (`tests/golden/transformers_config_keys.json`).
//!
//! Where keys contradict each other, a folder is read as transformers 5.23 reads it:
//!
//! | in the folder | read as |
//! |---|---|
//! | a key is absent | the class's default |
//! | `rope_theta` inside and outside of `rope_scaling` or `rope_parameters` | the one inside; a warning if not equal |
//! | `rope_scaling` and `rope_parameters` | `rope_scaling`, unless it is empty; a warning if they differ |
//! | `rope_type` and `type` differ | refused: versions 4 and 5 read different ones |
//! | `original_max_position_embeddings` differs inside and outside | refused, for the same reason |
//! | a rotary key that the type does not use, one that transformers lacks | a warning; refused |
//! | `layer_types` with another word, or of another length | refused |
//! | `layer_types` in a Mistral file | windows by layer: AutoModelForCausalLM takes the file for a Ministral |
//! | `no_rope_layers` null or absent in a SmolLM3 file | every `no_rope_layer_interval`-th layer does not rotate |
//! | `head_dim` or `sliding_window` null in a Ministral file | refused, as transformers refuses it |
//!
//! A tensor in two shards is read where the copies are equal or the index names the last shard, as transformers does.
use crate::export::Architecture::{
    self, DeepseekV3, Doge, Llama, M3, M3Vllm, Ministral, Mistral, Qwen2, Qwen3, SmolLm3,
};
use serde_json::{Map, Value};

/// What an import does with a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// The import reads its value.
    Read,
    /// Its value changes no logits, for this reason.
    NoEffect(&'static str),
    /// A value other than null, false and empty is refused: it changes logits, and this is what a recipe lacks.
    Off(&'static str),
    /// Any value but true is refused, for this reason.
    On(&'static str),
}

/// Keys with one use in these classes; an empty list of classes stands for all.
type Entry = (&'static [Architecture], &'static [&'static str], Use);

const EXPERTS: &str = "settings of experts, and is_moe is false";
const TRAINING: &str = "only training uses it";

/// All keys. A key that is not in this list belongs to no class.
const KEYS: &[Entry] = &[
    (
        &[],
        &[
            "model_type",
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "hidden_act",
            "max_position_embeddings",
            "initializer_range",
            "rms_norm_eps",
            "tie_word_embeddings",
            "rope_theta",
            "rope_scaling",
            "rope_parameters",
            "partial_rotary_factor",
            "original_max_position_embeddings",
            "layer_types",
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
        ],
        Use::Read,
    ),
    (&[Mistral, Ministral, SmolLm3, Qwen2, Qwen3, Llama], &["sliding_window"], Use::Read),
    (&[Qwen2, Qwen3, SmolLm3], &["use_sliding_window"], Use::Read),
    (&[Qwen2, Qwen3], &["max_window_layers"], Use::Read),
    (&[SmolLm3], &["no_rope_layers", "no_rope_layer_interval"], Use::Read),
    (&[Doge], &["keep_window_size"], Use::Read),
    (
        &[DeepseekV3],
        &[
            "q_lora_rank",
            "kv_lora_rank",
            "qk_rope_head_dim",
            "qk_nope_head_dim",
            "v_head_dim",
            "first_k_dense_replace",
            "rope_interleave",
        ],
        Use::Read,
    ),
    (
        &[M3, M3Vllm],
        &[
            "dense_intermediate_size",
            "swiglu_alpha",
            "swiglu_limit",
            "mlp_layer_types",
            "moe_layer_freq",
            "sparse_attention_config",
            "index_n_heads",
            "index_head_dim",
            "index_block_size",
            "index_topk_blocks",
            "index_local_blocks",
        ],
        Use::Read,
    ),
    (&[M3], &["swiglu_up_scale"], Use::Read),
    (&[M3Vllm], &["swiglu_beta"], Use::Read),
    // Refused unless off.
    (&[], &["attention_bias"], Use::Off("biases of all four projections of the attention")),
    (&[], &["mlp_bias"], Use::Off("biases of feed-forward layers")),
    (&[], &["alibi"], Use::Off("biases by distance")),
    (
        &[Llama, Mistral, Ministral, SmolLm3, Qwen2, Qwen3, Doge, DeepseekV3, Architecture::Sieve],
        &["num_local_experts"],
        Use::Off("experts"),
    ),
    (&[], &["per_layer_config"], Use::Off("keys that differ by layer")),
    (&[], &["transformers_weights"], Use::Off("weights in files of other names")),
    (&[], &["configuration_files"], Use::Off("a different configuration for each version of transformers")),
    (&[], &["quantization_config"], Use::Off("quantised weights: save dequantised ones, without this key")),
    (&[], &["pruned_heads"], Use::Off("layers with fewer heads than others")),
    (&[], &["is_encoder_decoder"], Use::Off("an encoder")),
    (&[], &["add_cross_attention"], Use::Off("attention to a different text")),
    (&[], &["fusion_config"], Use::Off("layers of other kinds fused into one")),
    (&[Doge], &["is_moe"], Use::Off("experts")),
    (&[M3Vllm], &["attention_output_gate"], Use::Off("gates of the attention's output")),
    (&[M3Vllm], &["use_gemma_norm"], Use::On("norms are stored as w - 1 in this class")),
    (&[M3Vllm], &["use_qk_norm"], Use::On("the class norms queries and keys")),
    (&[Doge], &["sliding_window"], Use::Off("a window below the dynamic mask")),
    (&[DeepseekV3], &["sliding_window"], Use::Off("a window over latents")),
    (&[M3, M3Vllm], &["sliding_window"], Use::Off("a window below the choice of blocks")),
    (&[Llama, Mistral, Ministral, SmolLm3, Qwen2, Qwen3, DeepseekV3], &["num_experts"], Use::Off("experts")),
    (&[], &["is_causal"], Use::On("in a recipe's model no token reads a later one")),
    // No effect on logits.
    (
        &[Doge],
        &["num_experts", "num_experts_per_tok", "norm_topk_prob", "output_router_logits", "router_aux_loss_coef"],
        Use::NoEffect(EXPERTS),
    ),
    (
        &[DeepseekV3],
        &[
            "moe_intermediate_size",
            "n_shared_experts",
            "n_routed_experts",
            "output_router_logits",
            "routed_scaling_factor",
            "n_group",
            "topk_group",
            "topk_method",
            "scoring_func",
            "aux_loss_alpha",
            "seq_aux",
            "moe_layer_freq",
            "ep_size",
            "num_experts_per_tok",
            "norm_topk_prob",
        ],
        Use::NoEffect("no layer has experts: first_k_dense_replace is checked"),
    ),
    (
        &[M3, M3Vllm],
        &[
            "num_experts",
            "num_local_experts",
            "num_experts_per_tok",
            "shared_intermediate_size",
            "n_shared_experts",
            "routed_scaling_factor",
            "scoring_func",
            "use_routing_bias",
            "output_router_logits",
            "router_aux_loss_coef",
            "router_jitter_noise",
        ],
        Use::NoEffect("no layer has experts: mlp_layer_types is checked"),
    ),
    (&[M3, M3Vllm], &["rotary_dim"], Use::NoEffect("the class reads partial_rotary_factor")),
    (&[M3Vllm], &["qk_norm_type"], Use::NoEffect("the class has norms of heads alone")),
    (&[M3Vllm], &["num_mtp_modules"], Use::NoEffect("a layer that predicts further tokens is not read")),
    (
        &[DeepseekV3],
        &["num_mtp_layers", "num_nextn_predict_layers"],
        Use::NoEffect("the class does not compute the layers that predict further tokens"),
    ),
    (&[], &["attention_dropout", "hidden_dropout", "gradient_checkpointing"], Use::NoEffect(TRAINING)),
    (
        &[],
        &["pretraining_tp", "chunk_size_feed_forward", "attn_implementation", "_attn_implementation"],
        Use::NoEffect("a different order of the same operations"),
    ),
    (
        &[],
        &["_attn_implementation_autoset", "experts_implementation", "torchscript", "use_bfloat16", "tf_legacy_loss"],
        Use::NoEffect("how PyTorch or TensorFlow runs the model"),
    ),
    (
        &[],
        &["dtype", "torch_dtype"],
        Use::NoEffect("each tensor's type is in its file, and the command chooses the precision"),
    ),
    (
        &[],
        &[
            "output_hidden_states",
            "output_attentions",
            "return_dict",
            "use_cache",
            "tie_last_hidden_states",
            "tie_encoder_decoder",
            "cross_attention_hidden_size",
            "is_decoder",
        ],
        Use::NoEffect("what the Python class returns or keeps"),
    ),
    (
        &[],
        &[
            "architectures",
            "auto_map",
            "transformers_version",
            "name_or_path",
            "_name_or_path",
            "_commit_hash",
            "commit_message",
            "resume_download",
            "use_auth_token",
            "tokenizer_class",
        ],
        Use::NoEffect("where the model came from; model_type names the class"),
    ),
    (
        &[],
        &["id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params", "prefix"],
        Use::NoEffect("labels of classifiers and settings of tasks"),
    ),
    (&[], &["sep_token_id", "decoder_start_token_id"], Use::NoEffect("tokens of models with an encoder")),
    (&[], &["attention_chunk_size"], Use::NoEffect("only layers of the kind chunked_attention have it")),
    (&[], GENERATION, Use::NoEffect("a setting of generate() in Python")),
];

/// Settings of generation, which old configurations held too.
const GENERATION: &[&str] = &[
    "_from_model_config",
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "assistant_lookbehind",
    "bad_words_ids",
    "begin_suppress_tokens",
    "cache_config",
    "cache_implementation",
    "compile_config",
    "constraints",
    "continuous_batching_config",
    "disable_compile",
    "diversity_penalty",
    "do_sample",
    "dola_layers",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "force_words_ids",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "guidance_scale",
    "is_assistant",
    "length_penalty",
    "low_memory",
    "max_cache_len",
    "max_length",
    "max_matching_ngram_size",
    "max_new_tokens",
    "max_time",
    "min_length",
    "min_new_tokens",
    "min_p",
    "no_repeat_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_logits",
    "output_scores",
    "penalty_alpha",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
    "remove_invalid_values",
    "renormalize_logits",
    "repetition_penalty",
    "return_dict_in_generate",
    "return_legacy_cache",
    "sequence_bias",
    "speculation_type",
    "stop_strings",
    "suppress_tokens",
    "target_lookbehind",
    "temperature",
    "token_healing",
    "top_h",
    "top_k",
    "top_p",
    "typical_p",
    "use_mtp",
    "watermarking_config",
];

/// Which types of rotary embedding use a key of a rotary dictionary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RotaryUse {
    /// All types do.
    Every,
    /// These types; `transformers` passes over the key in a dictionary of another type.
    Types(&'static [&'static str]),
    /// Types that no recipe has: the key is refused.
    Refused,
}

/// All keys of a rotary dictionary (`rope_scaling`, `rope_parameters`).
const ROTARY_KEYS: [(&str, RotaryUse); 17] = [
    ("rope_type", RotaryUse::Every),
    ("type", RotaryUse::Every),
    ("rope_theta", RotaryUse::Every),
    ("partial_rotary_factor", RotaryUse::Every),
    ("factor", RotaryUse::Types(&["linear", "llama3", "yarn"])),
    ("original_max_position_embeddings", RotaryUse::Types(&["llama3", "yarn"])),
    ("low_freq_factor", RotaryUse::Types(&["llama3"])),
    ("high_freq_factor", RotaryUse::Types(&["llama3"])),
    ("attention_factor", RotaryUse::Types(&["yarn"])),
    ("beta_fast", RotaryUse::Types(&["yarn"])),
    ("beta_slow", RotaryUse::Types(&["yarn"])),
    ("mscale", RotaryUse::Types(&["yarn"])),
    ("mscale_all_dim", RotaryUse::Types(&["yarn"])),
    ("truncate", RotaryUse::Types(&["yarn"])),
    ("mrope_section", RotaryUse::Refused),
    ("short_factor", RotaryUse::Refused),
    ("long_factor", RotaryUse::Refused),
];

/// The use of a key of `config.json` in a class; `None` for a key that the class does not have.
pub(super) fn use_of(architecture: Architecture, key: &str) -> Option<Use> {
    let is_of = |classes: &[Architecture]| classes.is_empty() || classes.contains(&architecture);
    let found = KEYS.iter().find(|(classes, names, _)| is_of(classes) && names.contains(&key));
    found.map(|(.., usage)| *usage)
}

/// Whether any class has the key.
pub(super) fn is_known(key: &str) -> bool {
    KEYS.iter().any(|(_, names, _)| names.contains(&key))
}

/// The use of a key of a rotary dictionary; `None` for a key that `transformers` does not know.
pub(super) fn rotary_use(key: &str) -> Option<RotaryUse> {
    ROTARY_KEYS.into_iter().find(|(name, _)| *name == key).map(|(_, usage)| usage)
}

/// The values that a class has for keys that `config.json` leaves out; a key without one has null.
pub(super) fn defaults(architecture: Architecture) -> Map<String, Value> {
    let of_class = match architecture {
        Llama => {
            r#"{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
                "num_attention_heads": 32, "max_position_embeddings": 2048}"#
        }
        Mistral => {
            r#"{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
                "sliding_window": 4096}"#
        }
        Ministral => {
            r#"{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
                "sliding_window": 4096}"#
        }
        SmolLm3 => {
            r#"{"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
                "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32768,
                "use_sliding_window": false, "no_rope_layer_interval": 4, "tie_word_embeddings": true,
                "rope_theta": 2000000.0}"#
        }
        Qwen2 => {
            r#"{"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768,
                "use_sliding_window": false, "sliding_window": 4096, "max_window_layers": 28}"#
        }
        Qwen3 => {
            r#"{"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
                "max_position_embeddings": 32768, "use_sliding_window": false, "sliding_window": 4096,
                "max_window_layers": 28}"#
        }
        Doge => {
            r#"{"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 32,
                "num_attention_heads": 8, "max_position_embeddings": 2048, "keep_window_size": 2048}"#
        }
        DeepseekV3 => {
            r#"{"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
                "num_attention_heads": 128, "num_key_value_heads": 128, "max_position_embeddings": 4096,
                "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
                "qk_nope_head_dim": 128, "first_k_dense_replace": 3, "rope_interleave": true}"#
        }
        M3 | M3Vllm => {
            r#"{"vocab_size": 200064, "hidden_size": 6144, "intermediate_size": 3072, "num_hidden_layers": 60,
                "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
                "max_position_embeddings": 524288, "rope_theta": 5000000.0, "dense_intermediate_size": 12288,
                "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "index_n_heads": 4, "index_head_dim": 128,
                "index_block_size": 128, "index_topk_blocks": 16, "index_local_blocks": 1}"#
        }
        Architecture::Sieve => "{}",
    };
    let of_all = r#"{"hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": false, "rope_theta": 10000.0}"#;
    let parsed = [of_all, of_class].map(|text| serde_json::from_str::<Map<String, Value>>(text).expect("JSON above"));
    parsed.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    static DUMP: &str = include_str!("../../../../tests/golden/transformers_config_keys.json");

    /// The dumps of the releases of `transformers`.
    fn releases() -> Vec<Value> {
        serde_json::from_str(DUMP).expect("stored JSON")
    }

    fn names(value: &Value) -> Vec<&str> {
        value.as_array().expect("a list").iter().map(|name| name.as_str().expect("a name")).collect()
    }

    fn classes(release: &Value) -> Vec<(Architecture, &Value)> {
        let classes = Architecture::stock();
        let classes = classes.map(|architecture| (architecture, &release["classes"][architecture.class().model_type]));
        // An older release lacks newer classes.
        classes.filter(|(_, class)| !class.is_null()).collect()
    }

    #[test]
    fn every_key_of_transformers_is_listed() {
        let mut count = 0;
        for release in releases() {
            let version = &release["transformers"];
            for (architecture, class) in classes(&release) {
                let own = class["defaults"].as_object().expect("a dictionary").keys().map(String::as_str);
                let lists = ["base", "read_by_models", "generation"].into_iter();
                let shared = lists.flat_map(|list| names(&release[list]));
                for key in own.chain(shared) {
                    let usage = use_of(architecture, key);
                    assert!(usage.is_some(), "{version}: {key} of {architecture:?} is in no list");
                    count += 1;
                }
            }
            for key in names(&release["rotary"]) {
                assert!(rotary_use(key).is_some(), "{version}: {key} of rotary dictionaries is in no list");
            }
        }
        assert!(count > 1000, "{count}");
    }

    #[test]
    fn defaults_are_those_of_the_classes() {
        for release in releases() {
            let version = &release["transformers"];
            for (architecture, class) in classes(&release) {
                let ours = defaults(architecture);
                assert_eq!(class["default_theta"], ours["rope_theta"], "{version}: {architecture:?}");
                for (key, theirs) in class["defaults"].as_object().expect("a dictionary") {
                    let is_read = use_of(architecture, key) == Some(Use::Read) && !key.ends_with("_token_id");
                    if is_read {
                        let own = ours.get(key).unwrap_or(&Value::Null);
                        assert_eq!(own, theirs, "{version}: {key} of {architecture:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn no_key_has_two_uses_in_a_class() {
        for architecture in Architecture::ALL {
            let own = KEYS.iter().filter(|(classes, ..)| classes.is_empty() || classes.contains(&architecture));
            let mut all = own.flat_map(|(_, names, _)| names.iter()).collect::<Vec<_>>();
            let count = all.len();
            all.sort();
            all.dedup();
            assert_eq!(all.len(), count, "{architecture:?}");
        }
    }
}
