//! Converts `config.json` of `transformers` into a recipe.
use crate::CheckpointError;
use crate::export::config::{AMPLITUDE, DERIVED, SCALING};
use crate::export::{self, Architecture, DEEPSEEK_LATENT_EPS, Windows};
use serde_json::Value;
use sieve_core::ModelShape;
use sieve_core::recipe::{AttentionKind, json_schema};
use std::fs;
use std::path::{Path, PathBuf};

const HINT: &str = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM (rotary embedding plain \
    or scaled as linear, llama3 or yarn), DogeForCausalLM and own exports can be imported, all with dense SiLU \
    feed-forward layers";
/// The hint for a wrong value of a class that can be imported.
const VALUE_HINT: &str = "correct this value, or take the config.json that was published or exported with the weights";
/// Defaults of `rope_theta` and `sliding_window` in the classes of `transformers`.
const USUAL_THETA: f64 = 10_000.0;
const USUAL_WINDOW: usize = 4096;
/// The keys of a scaled rotary embedding that a recipe has too.
const SCALING_KEYS: [&str; 7] = [
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
];

/// The part of a `config.json` that a recipe can express.
pub(super) struct HfConfig {
    pub(super) architecture: Architecture,
    pub(super) vocab_size: usize,
    /// Whether the folder is an export of Sieve with residual scales.
    pub(super) residual_scale: bool,
    pub(super) is_tied: bool,
    /// The lines of the recipe's `[model]`, as TOML, without `residual_scale` and `tie_word_embeddings`.
    model: String,
    /// The lines of the recipe's `[attention]`, as TOML.
    attention: String,
    max_positions: usize,
    /// The whole of `config.json`.
    value: Value,
}

/// The parsed `config.json`, and its path for errors.
struct Reader {
    path: PathBuf,
    value: Value,
}

impl Reader {
    fn refuse(&self, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::not_importable(&self.path, problem.into(), HINT)
    }

    fn bad_value(&self, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::not_importable(&self.path, problem.into(), VALUE_HINT)
    }

    fn integer(&self, key: &str) -> Result<usize, CheckpointError> {
        let number = self.value[key].as_u64();
        number
            .map(|number| number as usize)
            .ok_or_else(|| self.bad_value(format!("{key} is {}, not a whole number", self.value[key])))
    }

    fn number(&self, key: &str) -> Result<f64, CheckpointError> {
        self.value[key].as_f64().ok_or_else(|| self.bad_value(format!("{key} is {}, not a number", self.value[key])))
    }

    /// Refuses any value of `key` but `false`, null and absent.
    fn must_be_off(&self, key: &str) -> Result<(), CheckpointError> {
        match &self.value[key] {
            Value::Null | Value::Bool(false) => Ok(()),
            other => Err(self.refuse(format!("{key} is {other}, and a recipe has no such thing"))),
        }
    }

    /// The rotary base: in `rope_parameters` as of transformers 5, otherwise `rope_theta`.
    fn rope_theta(&self) -> Result<f64, CheckpointError> {
        match (self.value["rope_parameters"]["rope_theta"].as_f64(), &self.value["rope_theta"]) {
            (Some(theta), _) => Ok(theta),
            (None, Value::Null) => Ok(USUAL_THETA),
            (None, _) => self.number("rope_theta"),
        }
    }

    /// The line of `[model]` for scaled rotary frequencies; empty if they are not scaled.
    fn rope_scaling(&self, architecture: Architecture) -> Result<String, CheckpointError> {
        let keys = [SCALING, "rope_parameters", "rope_scaling"];
        let forms = keys.map(|key| &self.value[key]);
        for place in [&self.value].into_iter().chain(forms) {
            match &place["partial_rotary_factor"] {
                Value::Null => {}
                whole if whole.as_f64() == Some(1.0) => {}
                part => {
                    return Err(
                        self.refuse(format!("partial_rotary_factor is {part}, and a recipe rotates whole heads"))
                    );
                }
            }
        }
        let Some((scaling, kind)) = forms.into_iter().find_map(|form| Some((form, scaling_kind(form)?))) else {
            return Ok(String::new());
        };
        let may_scale = architecture.is_grouped() || architecture == Architecture::Sieve;
        let is_known_kind = ["linear", "llama3", "yarn"].contains(&kind);
        let read_elsewhere = ["rope_type", "type", "rope_theta", "partial_rotary_factor"];
        let is_known = |key: &str| read_elsewhere.contains(&key) || SCALING_KEYS.contains(&key);
        let mut keys = scaling.as_object().into_iter().flatten();
        let has_unknown_key = keys.any(|(key, value)| !is_known(key) && !value.is_null());
        if !may_scale || !is_known_kind || has_unknown_key {
            return Err(self.refuse(format!("rotary embedding is scaled: {scaling}")));
        }
        let given = SCALING_KEYS.iter().filter(|key| !scaling[**key].is_null());
        let given: String = given.map(|key| format!(", {key} = {}", scaling[*key])).collect();
        Ok(format!("rope_scaling = {{ rope_type = {kind:?}{given} }}\n"))
    }

    /// The lines of `[attention]` for a class with grouped-query attention, and for each layer whether it is dense. The
    /// list is empty if all layers have the same attention, dense or with a window.
    fn grouped_attention(&self, windows: Windows, num_layers: usize) -> Result<(String, Vec<bool>), CheckpointError> {
        let is_dense: Vec<bool> = match self.value["layer_types"].as_array() {
            _ if windows == Windows::None => Vec::new(),
            _ if windows == Windows::Every => match self.value.get("sliding_window") {
                Some(Value::Null) => Vec::new(),
                // Without the key, the window is the class's default.
                _ => vec![false; num_layers],
            },
            Some(types) => types.iter().map(|kind| kind != "sliding_attention").collect(),
            None if self.value["use_sliding_window"] == Value::Bool(true) => {
                let dense = self.value["max_window_layers"].as_u64().unwrap_or(0) as usize;
                (0..num_layers).map(|layer| layer < dense).collect()
            }
            None => Vec::new(),
        };
        if is_dense.iter().all(|dense| *dense) {
            return Ok(("kind = \"mha\"".to_owned(), Vec::new()));
        }
        let window = match self.value.get("sliding_window") {
            None => USUAL_WINDOW,
            Some(_) => self.integer("sliding_window")?,
        };
        let attention = format!("kind = \"swa\"\nsliding_window = {window}");
        Ok((attention, is_dense))
    }

    /// The lines of `[attention]` for a DeepSeek-V3 model, in the form that Sieve exports.
    fn deepseek_attention(&self, num_layers: usize) -> Result<String, CheckpointError> {
        self.must_be_off("q_lora_rank")?;
        let (v_head_dim, epsilon) = (self.integer("v_head_dim")?, self.number("rms_norm_eps")?);
        let rules = [
            (self.integer("first_k_dense_replace")? >= num_layers, "some layers have experts (first_k_dense_replace)"),
            (self.value["rope_interleave"] == Value::Bool(false), "rotated pairs lie side by side (rope_interleave)"),
            (self.integer("qk_nope_head_dim")? == v_head_dim, "qk_nope_head_dim is not v_head_dim"),
            (epsilon == DEEPSEEK_LATENT_EPS, "rms_norm_eps is not the 1e-6 of its latents"),
        ];
        if let Some((_, problem)) = rules.into_iter().find(|(holds, _)| !holds) {
            return Err(self.refuse(problem));
        }
        let [rank, rope] = ["kv_lora_rank", "qk_rope_head_dim"].map(|key| self.integer(key));
        Ok(format!("kind = \"mla\"\nkv_lora_rank = {}\nqk_rope_head_dim = {}\nqk_norm = false", rank?, rope?))
    }

    /// A pattern of layers in an export of Sieve: `dense_layers` or `shared_layers`.
    fn sieve_layers(&self, key: &str) -> Result<Vec<bool>, CheckpointError> {
        let pattern = match &self.value[key] {
            Value::Null => Some(Vec::new()),
            value => value.as_array().and_then(|pattern| pattern.iter().map(Value::as_bool).collect()),
        };
        pattern.ok_or_else(|| self.bad_value(format!("{key} is {}, not a list of true and false", self.value[key])))
    }
}

/// The items of a list; any other value is one item.
fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice)
}

/// How a rotary embedding is scaled; `None` if it is not.
fn scaling_kind(scaling: &Value) -> Option<&str> {
    let kind = scaling["rope_type"].as_str().or(scaling["type"].as_str());
    kind.filter(|kind| *kind != "default")
}

/// The keys that `[attention]` of a recipe has for a kind, `kind` among them.
fn keys_of_kind(kind: &str) -> Option<Vec<String>> {
    let schema: Value = serde_json::from_str(&json_schema()).expect("sieve-core writes it as JSON");
    let kinds = schema["properties"]["attention"]["oneOf"].as_array()?;
    let properties = kinds.iter().map(|of_kind| &of_kind["properties"]);
    let own = properties.filter(|own| own["kind"]["enum"][0] == kind).find_map(Value::as_object);
    own.map(|own| own.keys().cloned().collect())
}

impl Reader {
    /// The lines of `[attention]` for an export of Sieve, whose keys are the recipe's.
    fn sieve_attention(&self) -> Result<String, CheckpointError> {
        let kind = self.value["attention_kind"].as_str().unwrap_or_default();
        let Some(keys) = keys_of_kind(kind) else {
            let kinds = AttentionKind::ALL.map(AttentionKind::name).join(", ");
            return Err(
                self.bad_value(format!("attention_kind is {}, not one of {kinds}", self.value["attention_kind"]))
            );
        };
        let mut lines = format!("kind = {kind:?}");
        for key in keys {
            let value = match (kind, key.as_str()) {
                ("swa", "sliding_window") => &self.value["window_size"],
                // Older exports do not have the key; their models have no norms.
                ("mla", "qk_norm") if self.value["mla_qk_norm"].is_null() => &Value::Bool(false),
                ("mla", "qk_norm") => &self.value["mla_qk_norm"],
                _ => &self.value[&key],
            };
            match value {
                Value::Null => {}
                // Numbers, strings, booleans and lists of these have the same form in JSON and TOML.
                value @ (Value::Number(_) | Value::Bool(_) | Value::String(_) | Value::Array(_)) => {
                    lines.push_str(&format!("\n{key} = {value}"));
                }
                other => return Err(self.bad_value(format!("{key} is {other}"))),
            }
        }
        Ok(lines)
    }
}

impl HfConfig {
    /// Reads `config.json`. Fails if it has a setting that no recipe has.
    pub(super) fn read(path: &Path) -> Result<Self, CheckpointError> {
        let text = fs::read_to_string(path).map_err(CheckpointError::io("reading", path))?;
        let value = serde_json::from_str(&text).map_err(|error| CheckpointError::not_json(path, &text, &error))?;
        let reader = Reader { path: path.to_owned(), value };
        for key in ["num_experts", "num_local_experts", "alibi", "mlp_bias"] {
            reader.must_be_off(key)?;
        }
        let model_type = reader.value["model_type"].as_str();
        let architecture = Architecture::ALL.into_iter().find(|known| Some(known.class().model_type) == model_type);
        let Some(architecture) = architecture else {
            return Err(reader.refuse(format!("model_type is {}", reader.value["model_type"])));
        };
        let num_layers = reader.integer("num_hidden_layers")?;
        let class = architecture.class();
        let (attention, dense_layers) = match architecture {
            Architecture::Doge => {
                for key in ["is_moe", "sliding_window"] {
                    reader.must_be_off(key)?;
                }
                let window = reader.integer("keep_window_size")?;
                let attention = format!("kind = \"dma\"\nkeep_window_size = {window}");
                (attention, Vec::new())
            }
            Architecture::DeepseekV3 => (reader.deepseek_attention(num_layers)?, Vec::new()),
            Architecture::Sieve => (reader.sieve_attention()?, reader.sieve_layers("dense_layers")?),
            _ => reader.grouped_attention(class.windows, num_layers)?,
        };
        reader.must_be_off("attention_bias")?;
        if reader.value["hidden_act"] != "silu" {
            return Err(reader.refuse(format!("hidden_act is {}", reader.value["hidden_act"])));
        }
        let heads = reader.integer("num_attention_heads")?;
        let hidden_size = reader.integer("hidden_size")?;
        let head_dim = match &reader.value["head_dim"] {
            // In DeepSeek's configuration `head_dim` is the width of the rotary tables.
            _ if architecture == Architecture::DeepseekV3 => reader.integer("v_head_dim")?,
            Value::Null => hidden_size / heads.max(1),
            _ => reader.integer("head_dim")?,
        };
        let vocab_size = reader.integer("vocab_size")?;
        let max_positions = reader.integer("max_position_embeddings")?;
        let mut model = format!(
            "hidden_size = {hidden_size}\nintermediate_size = {}\nnum_hidden_layers = {num_layers}\n\
             num_attention_heads = {heads}\nnum_key_value_heads = {}\nhead_dim = {head_dim}\n\
             vocab_size = {vocab_size}\nrope_theta = {:?}\nrms_norm_eps = {:?}\n\
             max_position_embeddings = {max_positions}\ninitializer_range = {:?}\n",
            reader.integer("intermediate_size")?,
            match reader.value["num_key_value_heads"] {
                Value::Null => heads,
                _ => reader.integer("num_key_value_heads")?,
            },
            reader.rope_theta()?,
            reader.number("rms_norm_eps")?,
            reader.number("initializer_range").unwrap_or(0.02),
        );
        // Exports of Sieve have both keys; older ones do not, and their models have norms and no biases.
        let flag = |key: &str, of_class: bool| match architecture {
            Architecture::Sieve => reader.value[key].as_bool().unwrap_or(of_class),
            _ => of_class,
        };
        let (qk_norm, qkv_bias) = (flag("qk_norm", class.qk_norm), flag("qkv_bias", class.qkv_bias));
        model.push_str(&format!("qk_norm = {qk_norm}\nqkv_bias = {qkv_bias}\n"));
        model.push_str(&reader.rope_scaling(architecture)?);
        let shared_layers = match architecture {
            Architecture::Sieve => reader.sieve_layers("shared_layers")?,
            _ => Vec::new(),
        };
        if dense_layers.contains(&true) || shared_layers.contains(&true) {
            let is_marked = |pattern: &[bool], layer: usize| pattern.get(layer) == Some(&true);
            let name = |layer| match (is_marked(&dense_layers, layer), is_marked(&shared_layers, layer)) {
                (true, _) => "mha",
                (false, true) => "shared",
                (false, false) => "sparse",
            };
            let types: Vec<_> = (0..dense_layers.len().max(shared_layers.len())).map(name).collect();
            model.push_str(&format!("layer_types = {types:?}\n"));
        }
        Ok(Self {
            residual_scale: reader.value["residual_scale"] == Value::Bool(true),
            is_tied: reader.value["tie_word_embeddings"] == Value::Bool(true),
            architecture,
            vocab_size,
            model,
            attention,
            max_positions,
            value: reader.value,
        })
    }

    /// Refuses a value of a [`DERIVED`] key that an export of `shape` would not have. `shape` is the model that the
    /// other keys describe.
    pub(super) fn check_derived(&self, from: &Path, shape: &ModelShape) -> Result<(), CheckpointError> {
        if self.architecture != Architecture::Sieve {
            return Ok(());
        }
        let written = export::config::attention(shape, self.architecture);
        // Programs that rewrite JSON may round numbers.
        let is_close = |(a, b): (f64, f64)| (a - b).abs() <= 1e-6 * b.abs();
        let agree = |(a, b): (&Value, &Value)| a == b || a.as_f64().zip(b.as_f64()).is_some_and(is_close);
        for key in DERIVED {
            let absent = if key == AMPLITUDE { Value::from(1.0) } else { Value::Null };
            let or_absent = |map: Option<&Value>| map.unwrap_or(&absent).clone();
            let (given, wanted) = (or_absent(self.value.get(key)), or_absent(written.get(key)));
            if items(&given).len() != items(&wanted).len() || !items(&given).iter().zip(items(&wanted)).all(agree) {
                let problem = format!("{key} is {given}, and its other keys give {wanted}");
                return Err(CheckpointError::not_importable(&from.join("config.json"), problem, VALUE_HINT));
            }
        }
        Ok(())
    }

    /// Whether the model's attention is of this kind.
    pub(super) fn is_of(&self, kind: AttentionKind) -> bool {
        self.attention.starts_with(&format!("kind = {:?}", kind.name()))
    }

    /// A recipe of the model, with settings of a careful fine-tuning for the user to edit, because configurations of
    /// `transformers` have no training settings.
    pub(super) fn recipe_toml(&self, residual_scale: bool) -> String {
        let seq_len = self.max_positions.min(2048);
        format!(
            "[model]\n{}tie_word_embeddings = {}\nresidual_scale = {residual_scale}\n[attention]\n{}\n\
             [tokenizer]\npath = \"tokenizer.json\"\n[data]\npaths = [\"text.txt\"]\n\
             [training]\nsteps = 1000\nseq_len = {seq_len}\nlocal_batch_size = 1\nglobal_batch_size = 8\n\
             [optimizer]\nlr = 1e-4\n[validation]\ninterval = 200\n[checkpoint]\ninterval = 200\n",
            self.model, self.is_tied, self.attention
        )
    }
}
