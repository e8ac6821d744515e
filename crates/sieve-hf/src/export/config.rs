//! `config.json` and `generation_config.json`, readable by `transformers` 4 and 5.
use super::json_text::to_text;
use super::{Architecture, ExportOptions, m3, tokenizer_files};
use serde_json::{Map, Value, json};
use sieve_core::model::RopeScaling;
use sieve_core::{Attention, ModelShape};

/// The key of an export for `modeling_sieve.py` that holds the scaling of its rotary frequencies.
pub(crate) const SCALING: &str = "rotary_scaling";

/// Keys of an export for `modeling_sieve.py` that follow from others of its keys. If absent, [`AMPLITUDE`] is 1 there
/// and the others are `None`.
pub(crate) const DERIVED: [&str; 3] = ["periods", "rope_frequencies", AMPLITUDE];
pub(crate) const AMPLITUDE: &str = "rope_amplitude";

/// Text of `config.json`. `generation` is the result of [`generation`]; its ids of special tokens are repeated here.
pub(super) fn model(
    shape: &ModelShape,
    architecture: Architecture,
    options: &ExportOptions,
    generation: &Value,
) -> String {
    // Exports for `modeling_sieve.py` store the scaling under a key of their own ([`SCALING`]): opening their tokenizer
    // uses transformers' base configuration, which would try to interpret the usual key.
    let scaling = shape.rope_scaling.filter(|_| architecture != Architecture::Sieve);
    let mut config = json!({
        "architectures": [architecture.class().name],
        "model_type": architecture.class().model_type,
        "attention_bias": false,
        "attention_dropout": 0.0,
        "bos_token_id": generation["bos_token_id"],
        "eos_token_id": generation["eos_token_id"],
        "pad_token_id": generation["pad_token_id"],
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.d_model,
        "initializer_range": shape.initializer_range,
        "intermediate_size": shape.d_ff,
        "max_position_embeddings": shape.max_seq_len,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        // Version 4 reads rope_theta and torch_dtype, version 5 rope_parameters and dtype.
        "rope_theta": shape.rope_theta,
        "rope_parameters": rope_parameters(shape, scaling),
        "tie_word_embeddings": shape.tie_word_embeddings,
        "torch_dtype": options.dtype.name(),
        "dtype": options.dtype.name(),
        "use_cache": true,
        "vocab_size": shape.vocab_size,
    });
    let mut of_kind = attention(shape, architecture);
    if architecture.is_grouped() {
        of_kind.retain(|key, _| window_keys(architecture).contains(&key.as_str()));
    }
    if architecture.class().nope && !shape.rope_layers.is_every() {
        of_kind.insert(NO_ROPE.to_owned(), no_rope_layers(shape));
    }
    if scaling.is_some() {
        of_kind.insert("rope_scaling".to_owned(), rope_parameters(shape, scaling));
    }
    let all = config.as_object_mut().expect("built as an object above");
    all.extend(of_kind);
    to_text(&if architecture == Architecture::M3Vllm { m3::nested(config) } else { config })
}

/// The keys of windows that a class of grouped-query attention has.
fn window_keys(architecture: Architecture) -> &'static [&'static str] {
    match architecture {
        Architecture::Ministral => &["sliding_window", "layer_types"],
        Architecture::SmolLm3 => &["use_sliding_window", "sliding_window", "layer_types"],
        Architecture::Qwen2 | Architecture::Qwen3 => {
            &["use_sliding_window", "sliding_window", "max_window_layers", "layer_types"]
        }
        _ => &["sliding_window"],
    }
}

/// The key of `config.json` that says of each layer whether it rotates queries and keys: 1 if so, 0 if not.
pub(crate) const NO_ROPE: &str = "no_rope_layers";

/// The value of [`NO_ROPE`].
fn no_rope_layers(shape: &ModelShape) -> Value {
    (0..shape.num_layers).map(|layer| usize::from(shape.has_rope(layer))).collect()
}

/// Base and scaling of the rotary frequencies.
fn rope_parameters(shape: &ModelShape, scaling: Option<RopeScaling>) -> Value {
    let mut parameters = json!({ "rope_type": "default", "rope_theta": shape.rope_theta });
    let scaling = json!(scaling.map(|scaling| scaling.filled(shape.max_seq_len)));
    if let (Value::Object(parameters), Value::Object(scaling)) = (&mut parameters, scaling) {
        parameters.extend(scaling.into_iter().filter(|(_, value)| !value.is_null()));
    }
    parameters
}

/// The key of `config.json` that lists the [keys of layers](layer_keys).
pub(crate) const LAYER_KEYS: &str = "layer_attention";

/// The keys of `config.json` for the attention kind.
pub(crate) fn attention(shape: &ModelShape, architecture: Architecture) -> Map<String, Value> {
    let kind = shape.attention.as_kind();
    let keys = match architecture {
        Architecture::Sieve => of_sieve(shape, shape.attention.kind().name(), kind.config_keys(shape)),
        Architecture::M3 | Architecture::M3Vllm => m3::keys(shape, architecture == Architecture::M3Vllm),
        _ => kind.stock(shape).expect("the architecture is the model's stock class").keys,
    };
    match keys {
        Value::Object(keys) => keys,
        _ => unreachable!("built as an object"),
    }
}

/// One object for each entry of the layer pattern: empty for the model's own kind of attention, else `attention_kind`
/// and that kind's sizes.
fn layer_keys(shape: &ModelShape) -> Value {
    let own = shape.attention;
    let layers = (0..shape.layers.types().len()).map(|layer| shape.attention_of(layer));
    let keys = layers.map(|attention| {
        if attention == own {
            json!({})
        } else {
            let mut keys = attention.as_kind().config_keys(shape);
            keys["attention_kind"] = json!(attention.kind().name());
            keys
        }
    });
    keys.collect()
}

/// Whether `has` holds, for each entry of the layer pattern.
fn marks(shape: &ModelShape, has: impl Fn(&ModelShape, usize) -> bool) -> Vec<bool> {
    (0..shape.layers.types().len()).map(|layer| has(shape, layer)).collect()
}

/// The keys of `config.json` that `modeling_sieve.py` reads.
fn of_sieve(shape: &ModelShape, kind: &str, sizes: Value) -> Value {
    let mut keys = json!({
        "attention_kind": kind,
        "dense_layers": marks(shape, ModelShape::has_dense_attention),
        "shared_layers": if shape.num_shared_layers() > 0 { marks(shape, ModelShape::is_shared_layer) } else { vec![] },
        "residual_scale": shape.residual_scale,
        "qk_norm": shape.qk_norm,
        "qkv_bias": shape.qkv_bias,
        "attention_sinks": shape.attention_sinks,
        "auto_map": {
            "AutoConfig": "modeling_sieve.SieveConfig",
            "AutoModel": "modeling_sieve.SieveModel",
            "AutoModelForCausalLM": "modeling_sieve.SieveForCausalLM",
        },
    });
    if let (Value::Object(keys), Value::Object(sizes)) = (&mut keys, sizes) {
        keys.extend(sizes);
        if shape.attentions().iter().skip(1).any(|(other, _)| *other != Attention::DENSE) {
            keys.insert(LAYER_KEYS.to_owned(), layer_keys(shape));
        }
        if shape.rope_scaling.is_some() {
            let (frequencies, amplitude) = shape.rotary_frequencies(shape.head_dim);
            keys.insert("rope_frequencies".to_owned(), json!(frequencies));
            keys.insert(AMPLITUDE.to_owned(), json!(amplitude));
            keys.insert(SCALING.to_owned(), rope_parameters(shape, shape.rope_scaling));
        }
    }
    keys
}

/// Contents of `generation_config.json`. `source` is an imported model's file; its end tokens are kept if the
/// end-of-document token is still one of them.
pub(super) fn generation(options: &ExportOptions, source: Map<String, Value>) -> Value {
    let eos = json!(options.eos_token_id);
    let source_ends = tokenizer_files::ends(&source, options.eos_token_id);
    let pad = options.pad_token_id.map(|id| json!(id));
    let mut all = json!({
        "eos_token_id": source_ends.unwrap_or(&eos),
        "pad_token_id": pad.as_ref().or(source.get("pad_token_id")),
    });
    for (key, value) in source {
        // `transformers` writes these two keys itself.
        if !["transformers_version", "_from_model_config"].contains(&key.as_str()) && all.get(&key).is_none() {
            all[key] = value;
        }
    }
    all
}
