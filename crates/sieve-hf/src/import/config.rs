//! Converts `config.json` of `transformers` into a recipe, with the meaning that transformers 5 gives it.
use super::keys::{Use, defaults, is_known, use_of};
use super::m3;
use crate::CheckpointError;
use crate::export::config::LAYER_KEYS;
use crate::export::config::{AMPLITUDE, DERIVED, NO_ROPE};
use crate::export::{self, Architecture, DEEPSEEK_LATENT_EPS, Windows, row_tokens};
use serde_json::{Map, Value, json};
use sieve_core::kinds::{FULL_ATTENTION, SLIDING_ATTENTION};
use sieve_core::recipe::{AttentionKind, json_schema};
use sieve_core::{Attention, ModelShape};
use sieve_files::read_text;
use std::cell::RefCell;
use std::path::{Path, PathBuf};

/// The hint for a configuration that no recipe describes: what can be imported.
fn hint() -> String {
    let classes = Architecture::stock().map(|architecture| architecture.class().name).collect::<Vec<_>>().join(", ");
    format!(
        "{classes} and own exports can be imported, all with dense SiLU feed-forward layers, their rotary embedding \
         plain or scaled as linear, llama3 or yarn; DeepSeek-V3 with q_lora_rank null and rope_interleave false"
    )
}
/// The hint for a wrong value of a class that can be imported.
const VALUE_HINT: &str = "correct this value, or take the config.json that was published or exported with the weights";
/// The keys of `config.json` that decide the shapes of tensors.
const SIZES: [&str; 7] = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
];
/// An older name of [`FULL_ATTENTION`].
const OLD_FULL: &str = "attention";

/// A kind of attention with its keys.
#[derive(PartialEq)]
pub(super) struct KindTable {
    kind: AttentionKind,
    /// The other keys, as lines of TOML.
    keys: String,
}

impl KindTable {
    /// The only kind that has the first of the keys, which are names and values.
    pub(super) fn with_keys(keys: &[(&str, String)]) -> Self {
        let has_first = |(_, own): &(AttentionKind, Vec<String>)| own.iter().any(|key| key == keys[0].0);
        let (kind, _) = keys_of_kinds().into_iter().find(has_first).expect("the key of a kind");
        let lines = keys.iter().map(|(key, value)| format!("{key} = {value}"));
        Self { kind, keys: lines.collect::<Vec<_>>().join("\n") }
    }

    /// The lines of the table.
    fn lines(&self) -> String {
        format!("kind = {:?}\n{}\n", self.kind.name(), self.keys)
    }

    /// Dense attention, which has no keys.
    pub(super) fn dense() -> Self {
        Self { kind: Attention::DENSE.kind(), keys: String::new() }
    }

    fn is_dense(&self) -> bool {
        *self == Self::dense()
    }
}

/// The attention of a layer.
#[derive(Clone, Copy)]
enum Layer {
    /// The model's own attention.
    Own,
    Dense,
    /// The layer reads the blocks that an earlier layer chose.
    Shared,
    /// An entry of [`HfConfig::others`].
    Other(usize),
}

/// The part of a `config.json` that a recipe can express.
pub(super) struct HfConfig {
    pub(super) architecture: Architecture,
    pub(super) vocab_size: usize,
    /// Whether the folder is an export of Sieve with residual scales.
    pub(super) residual_scale: bool,
    pub(super) is_tied: bool,
    /// The lines of the recipe's `[model]`, as TOML, without `layer_types`, `residual_scale` and `tie_word_embeddings`.
    model: String,
    /// The model's own kind of attention.
    attention: KindTable,
    /// The kinds of layers that are neither of the model's own kind nor dense.
    others: Vec<KindTable>,
    /// The layer pattern; where it is empty, all layers have the model's own kind.
    layers: Vec<Layer>,
    max_positions: usize,
    /// Tokens of a row in training, if the folder is an export that says it.
    row_tokens: Option<usize>,
    /// The whole of `config.json`.
    value: Value,
    /// What the file says and another program, or another release of `transformers`, would read otherwise.
    pub(super) notes: Vec<String>,
    /// The sizes that the file leaves out, with the class's values; empty if it has all.
    pub(super) assumed: String,
}

/// The parsed `config.json`, and its path for errors.
pub(super) struct Reader {
    path: PathBuf,
    pub(super) architecture: Architecture,
    /// The keys of the file.
    given: Map<String, Value>,
    /// The keys of the file, and the class's defaults for the others.
    pub(super) value: Value,
    notes: RefCell<Vec<String>>,
}

impl Reader {
    /// Reads the `text` of the config.json at `path`, whose `model_type` must be of a known class, and adds the class's
    /// defaults for keys that it leaves out.
    fn new(path: &Path, text: &str) -> Result<Self, CheckpointError> {
        let value: Value = serde_json::from_str(text).map_err(|error| CheckpointError::not_json(path, text, &error))?;
        let value = m3::text_model(value);
        if !value.is_object() {
            return Err(CheckpointError::malformed(path, "it is not a JSON object"));
        }
        let model_type = value["model_type"].as_str();
        let known = Architecture::ALL.into_iter().find(|known| Some(known.class().model_type) == model_type);
        let Some(architecture) = known else {
            let keys = value.as_object().into_iter().flatten();
            let unknown = keys.filter(|(key, value)| !is_known(key) && !is_off(value)).map(|(key, _)| key.as_str());
            let unknown = unknown.collect::<Vec<_>>().join(", ");
            let nor = if unknown.is_empty() { "" } else { ", nor its keys " };
            let problem = format!("model_type is {}, which Sieve does not know{nor}{unknown}", value["model_type"]);
            return Err(CheckpointError::not_importable(path, problem, hint()));
        };
        let given = value.as_object().cloned().unwrap_or_default();
        let mut all = defaults(architecture);
        all.extend(given.clone());
        if architecture.is_m3() {
            m3::rename_keys(&mut all);
        }
        Ok(Self { path: path.to_owned(), architecture, given, value: Value::Object(all), notes: RefCell::default() })
    }

    /// Whether the file has the key.
    pub(super) fn is_given(&self, key: &str) -> bool {
        self.given.contains_key(key)
    }

    /// Keeps a note for the user.
    pub(super) fn note(&self, note: String) {
        self.notes.borrow_mut().push(note);
    }

    pub(super) fn refuse(&self, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::not_importable(&self.path, problem.into(), hint())
    }

    pub(super) fn bad_value(&self, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::not_importable(&self.path, problem.into(), VALUE_HINT)
    }

    pub(super) fn integer(&self, key: &str) -> Result<usize, CheckpointError> {
        let number = self.value[key].as_u64();
        number
            .map(|number| number as usize)
            .ok_or_else(|| self.bad_value(format!("{key} is {}, not a whole number", self.value[key])))
    }

    fn number(&self, key: &str) -> Result<f64, CheckpointError> {
        self.value[key].as_f64().ok_or_else(|| self.bad_value(format!("{key} is {}, not a number", self.value[key])))
    }

    /// A switch. Version 4 of `transformers` takes null as false; version 5 refuses it.
    fn flag(&self, key: &str) -> Result<bool, CheckpointError> {
        match &self.value[key] {
            Value::Bool(flag) => Ok(*flag),
            Value::Null => {
                if self.is_given(key) {
                    let note =
                        format!("{key} is null: false is read, as transformers 4 does; transformers 5 refuses it");
                    self.note(note);
                }
                Ok(false)
            }
            other => Err(self.bad_value(format!("{key} is {other}, not true or false"))),
        }
    }

    /// Refuses keys of the file that change logits and that no recipe has; notes those that the class does not have.
    fn check_keys(&self) -> Result<(), CheckpointError> {
        let mut unknown = Vec::new();
        for (key, value) in &self.given {
            match use_of(self.architecture, key) {
                Some(Use::Read | Use::NoEffect(_)) => {}
                Some(Use::On(_)) if *value == Value::Bool(true) => {}
                Some(Use::On(why)) => return Err(self.refuse(format!("{key} is {value}, and {why}"))),
                Some(Use::Off(_)) if is_off(value) => {}
                Some(Use::Off(what)) => {
                    return Err(self.refuse(format!("{key} is {value}, and a recipe has no key for it: {what}")));
                }
                None if is_off(value) || self.architecture == Architecture::Sieve => {}
                None => unknown.push(key.as_str()),
            }
        }
        if !unknown.is_empty() {
            let (class, unknown) = (self.architecture.class().name, unknown.join(", "));
            self.note(format!("config.json has keys that {class} does not have, and no program reads them: {unknown}"));
        }
        Ok(())
    }

    /// Number of KV heads. Null stands for as many as there are query heads.
    fn kv_heads(&self, heads: usize) -> Result<usize, CheckpointError> {
        const KEY: &str = "num_key_value_heads";
        if !self.value[KEY].is_null() {
            return self.integer(KEY);
        }
        if matches!(self.architecture, Architecture::Mistral | Architecture::Ministral) {
            self.note(format!("{KEY} is null: {heads} are read, as transformers 4 does; transformers 5 refuses it"));
        }
        Ok(heads)
    }

    /// Width of a head. A class that lacks the key derives it where the key is absent.
    fn head_dim(&self, heads: usize) -> Result<usize, CheckpointError> {
        let hidden_size = self.integer("hidden_size")?;
        let may_be_null =
            matches!(self.architecture, Architecture::Llama | Architecture::Mistral | Architecture::Sieve);
        if self.architecture == Architecture::Llama && !hidden_size.is_multiple_of(heads.max(1)) {
            self.note(format!(
                "hidden_size = {hidden_size} is not a multiple of num_attention_heads = {heads}: transformers 5 \
                 refuses it, transformers 4 reads it as here"
            ));
        }
        // transformers loads a Mistral's config.json with `layer_types` as MinistralForCausalLM, which needs both keys.
        let taken = match self.architecture {
            Architecture::Mistral if self.is_given("layer_types") => "with layer_types transformers takes ",
            Architecture::Ministral => "this is ",
            _ => "",
        };
        for key in ["head_dim", "sliding_window"].into_iter().filter(|_| !taken.is_empty()) {
            if self.value[key].is_null() {
                return Err(
                    self.bad_value(format!("{taken}MinistralForCausalLM, which needs {key}, and {key} is null"))
                );
            }
        }
        match &self.value["head_dim"] {
            // In DeepSeek's configuration `head_dim` is the width of the rotary tables.
            _ if self.architecture == Architecture::DeepseekV3 => self.integer("v_head_dim"),
            Value::Null if may_be_null || !self.is_given("head_dim") => Ok(hidden_size / heads.max(1)),
            _ => self.integer("head_dim"),
        }
    }

    /// The kinds of the layers, one a layer, if the file names them.
    fn layer_types(&self, num_layers: usize) -> Result<Option<Vec<&str>>, CheckpointError> {
        const KEY: &str = "layer_types";
        let types = match &self.value[KEY] {
            Value::Null => return Ok(None),
            Value::Array(types) => types,
            other => return Err(self.bad_value(format!("{KEY} is {other}, not a list"))),
        };
        if types.len() != num_layers {
            let (named, value) = (types.len(), &self.value[KEY]);
            return Err(self.bad_value(format!("{KEY} names {named} layers of {num_layers}: {value}")));
        }
        let known = types.iter().map(|kind| match kind.as_str() {
            Some(kind @ (FULL_ATTENTION | SLIDING_ATTENTION)) => Ok(kind),
            Some(OLD_FULL) => Ok(FULL_ATTENTION),
            _ => Err(self
                .refuse(format!("{KEY} has {kind}, and a recipe has {FULL_ATTENTION} and {SLIDING_ATTENTION} here"))),
        });
        known.collect::<Result<Vec<_>, _>>().map(Some)
    }

    /// The own kind of a class with grouped-query attention, and for each layer whether it is dense. The list is empty
    /// if all layers have the same attention, dense or with a window.
    fn grouped_attention(
        &self,
        windows: Windows,
        num_layers: usize,
    ) -> Result<(KindTable, Vec<bool>), CheckpointError> {
        let types = self.layer_types(num_layers)?;
        let has_switch = self.architecture != Architecture::Ministral;
        let window = match (windows, &self.value["sliding_window"]) {
            (Windows::None, _) | (_, Value::Null) => None,
            (Windows::Named, _) if has_switch && !self.flag("use_sliding_window")? => None,
            _ => Some(self.integer("sliding_window")?),
        };
        let is_dense: Vec<bool> = match (windows, &types) {
            (Windows::Named | Windows::Every, Some(types)) => {
                types.iter().map(|kind| *kind == FULL_ATTENTION).collect()
            }
            // SmolLM3 has its windows in the layers that do not rotate queries and keys.
            (Windows::Named, None) if self.architecture == Architecture::SmolLm3 => {
                let rotates = self.rope_layers(num_layers)?;
                rotates.into_iter().map(|rotates| rotates || window.is_none()).collect()
            }
            (Windows::Named, None) if has_switch => {
                let dense = self.integer("max_window_layers")?;
                (0..num_layers).map(|layer| layer < dense || window.is_none()).collect()
            }
            _ => vec![window.is_none(); num_layers],
        };
        self.note_windows(windows, &is_dense, types.as_deref());
        if is_dense.iter().all(|dense| *dense) {
            return Ok((KindTable::dense(), Vec::new()));
        }
        let Some(window) = window else {
            return Err(self.bad_value(format!(
                "layer_types has {SLIDING_ATTENTION}, but sliding_window is {} and use_sliding_window {}, so that \
                 there is no window",
                self.value["sliding_window"], self.value["use_sliding_window"]
            )));
        };
        Ok((KindTable::with_keys(&[("sliding_window", window.to_string())]), is_dense))
    }

    /// For each layer whether it rotates queries and keys.
    fn rope_layers(&self, num_layers: usize) -> Result<Vec<bool>, CheckpointError> {
        if !self.architecture.class().nope {
            return Ok(vec![true; num_layers]);
        }
        match &self.value[NO_ROPE] {
            Value::Null if self.architecture == Architecture::Sieve => Ok(vec![true; num_layers]),
            // What save_pretrained writes of a model in which every layer rotates.
            Value::Array(marks) if marks.is_empty() && self.architecture == Architecture::Sieve => {
                Ok(vec![true; num_layers])
            }
            Value::Null => match self.integer("no_rope_layer_interval")? {
                0 => Err(self.bad_value("no_rope_layer_interval is 0, and no layer is a multiple of it")),
                interval => Ok((1..=num_layers).map(|number| !number.is_multiple_of(interval)).collect()),
            },
            Value::Array(marks) if marks.len() >= num_layers => {
                let known = marks.iter().take(num_layers).map(|mark| match mark.as_u64() {
                    Some(mark @ 0..=1) => Ok(mark == 1),
                    _ => Err(self.bad_value(format!("{NO_ROPE} has {mark}, neither 0 nor 1"))),
                });
                known.collect()
            }
            Value::Array(marks) => {
                Err(self.bad_value(format!("{NO_ROPE} names {} layers of {num_layers}", marks.len())))
            }
            other => Err(self.bad_value(format!("{NO_ROPE} is {other}, not a list"))),
        }
    }

    /// Notes settings of windows that the class does not read. `is_dense` is what it computes.
    fn note_windows(&self, windows: Windows, is_dense: &[bool], types: Option<&[&str]>) {
        let class = self.architecture.class().name;
        let window = &self.value["sliding_window"];
        if windows == Windows::None && !window.is_null() {
            self.note(format!("{class} has no windows: sliding_window = {window} is not read"));
        }
        let is_off = self.value["use_sliding_window"] == Value::Bool(false);
        if windows == Windows::Every && is_off && is_dense.contains(&false) {
            self.note(format!("{class} does not read use_sliding_window: sliding_window = {window} is read"));
        }
        let has_windows = types.is_some_and(|types| types.contains(&SLIDING_ATTENTION));
        if windows == Windows::None && has_windows {
            self.note(format!("{class} has no windows: layer_types is not read"));
        }
        if windows == Windows::Every && types.is_some() && is_dense.contains(&true) && !window.is_null() {
            self.note(format!(
                "layer_types is read, as AutoModelForCausalLM does, which takes MinistralForCausalLM for it; {class} \
                 has sliding_window = {window} in every layer"
            ));
        }
    }

    /// The attention of a DeepSeek-V3 model, in the form that Sieve exports.
    fn deepseek_attention(&self, num_layers: usize) -> Result<KindTable, CheckpointError> {
        if !self.value["q_lora_rank"].is_null() {
            let rank = &self.value["q_lora_rank"];
            return Err(self.refuse(format!("q_lora_rank is {rank}, and a recipe has no key for it; null is off")));
        }
        let (v_head_dim, epsilon) = (self.integer("v_head_dim")?, self.number("rms_norm_eps")?);
        let rules = [
            (self.integer("first_k_dense_replace")? >= num_layers, "some layers have experts (first_k_dense_replace)"),
            (self.value["rope_interleave"] == Value::Bool(false), "rotated pairs are adjacent (rope_interleave)"),
            (self.integer("qk_nope_head_dim")? == v_head_dim, "qk_nope_head_dim is not v_head_dim"),
            (epsilon == DEEPSEEK_LATENT_EPS, "rms_norm_eps is not the 1e-6 of its latents"),
        ];
        if let Some((_, problem)) = rules.into_iter().find(|(holds, _)| !holds) {
            return Err(self.refuse(problem));
        }
        let [rank, rope] = ["kv_lora_rank", "qk_rope_head_dim"].map(|key| self.integer(key));
        Ok(KindTable::with_keys(&[
            ("kv_lora_rank", rank?.to_string()),
            ("qk_rope_head_dim", rope?.to_string()),
            ("qk_norm", false.to_string()),
        ]))
    }

    /// The sizes that the file leaves out, each with the value that the class gives it.
    fn assumed(&self, heads: usize, head_dim: usize) -> String {
        let absent = SIZES.into_iter().filter(|key| self.given.get(*key).is_none_or(Value::is_null));
        let value = |key: &str| match (key, &self.value[key]) {
            ("num_key_value_heads", Value::Null) => heads.to_string(),
            ("head_dim", Value::Null) => head_dim.to_string(),
            (_, value) => value.to_string(),
        };
        absent.map(|key| format!("{key} = {}", value(key))).collect::<Vec<_>>().join(", ")
    }

    /// The marks of layers in an export of Sieve: `dense_layers` or `shared_layers`.
    fn marked_layers(&self, key: &str) -> Result<Vec<bool>, CheckpointError> {
        let pattern = match &self.value[key] {
            Value::Null => Some(Vec::new()),
            value => value.as_array().and_then(|pattern| pattern.iter().map(Value::as_bool).collect()),
        };
        pattern.ok_or_else(|| self.bad_value(format!("{key} is {}, not a list of true and false", self.value[key])))
    }
}

/// The shortest list whose repetitions make up `all`.
fn shortest_period(all: &[bool]) -> &[bool] {
    let repeats =
        |period: usize| all.len().is_multiple_of(period) && all.chunks(period).all(|part| part == &all[..period]);
    let period = (1..all.len()).find(|&period| repeats(period)).unwrap_or(all.len());
    &all[..period]
}

/// The items of a list; any other value is one item.
fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice)
}

/// Whether a value switches a key off.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(items) => items.is_empty(),
        Value::Number(_) | Value::String(_) | Value::Bool(true) => false,
    }
}

/// The keys that `[attention]` of a recipe has for each kind, `kind` among them.
fn keys_of_kinds() -> Vec<(AttentionKind, Vec<String>)> {
    let schema: Value = serde_json::from_str(&json_schema()).expect("sieve-core writes it as JSON");
    let kinds = schema["properties"]["attention"]["oneOf"].as_array().into_iter().flatten();
    let keys = kinds.filter_map(|of_kind| {
        let own = of_kind["properties"].as_object()?;
        Some((AttentionKind::named(own["kind"]["enum"][0].as_str()?)?, own.keys().cloned().collect()))
    });
    keys.collect()
}

impl Reader {
    /// The model's own attention, the kinds of layers that are neither own nor dense, and the layer pattern, which is
    /// empty if all layers have the own attention.
    fn attentions(&self, num_layers: usize) -> Result<(KindTable, Vec<KindTable>, Vec<Layer>), CheckpointError> {
        let windows = self.architecture.class().windows;
        let (own, dense) = match self.architecture {
            Architecture::Sieve => {
                let own = self.sieve_attention(&self.value)?;
                let (others, layers) = self.sieve_layers(&own)?;
                return Ok((own, others, layers));
            }
            Architecture::Doge => {
                // Checks the keys of windows, which the class does not have.
                self.grouped_attention(windows, num_layers)?;
                let own = KindTable::with_keys(&[
                    ("keep_window_size", self.integer("keep_window_size")?.to_string()),
                    ("recency", "\"none\"".to_owned()),
                    ("local_window_size", 0.to_string()),
                ]);
                (own, Vec::new())
            }
            Architecture::DeepseekV3 => (self.deepseek_attention(num_layers)?, Vec::new()),
            Architecture::M3 | Architecture::M3Vllm => self.m3_attention(num_layers)?,
            _ => self.grouped_attention(windows, num_layers)?,
        };
        let layers = dense.into_iter().map(|dense| if dense { dense_beside(&own) } else { Layer::Own }).collect();
        Ok((own, Vec::new(), layers))
    }

    /// The own attention of an export of Sieve, or of one of its layers. `of` has the recipe's keys: it is the file
    /// itself, or an entry of its list of layers.
    fn sieve_attention(&self, of: &Value) -> Result<KindTable, CheckpointError> {
        let name = of["attention_kind"].as_str().unwrap_or_default();
        let Some((kind, keys)) = keys_of_kinds().into_iter().find(|(kind, _)| kind.name() == name) else {
            let kinds = AttentionKind::ALL.map(AttentionKind::name).join(", ");
            return Err(self.bad_value(format!("attention_kind is {}, not one of {kinds}", of["attention_kind"])));
        };
        let mut lines = Vec::new();
        for key in keys {
            let there = kind.example().as_kind().config_key(&key);
            match &of[there.name] {
                Value::Null if there.is_needed => {
                    return Err(self.bad_value(format!("attention_kind is {name}, and {} is missing", there.name)));
                }
                Value::Null => {}
                // Numbers, strings, booleans and lists of these have the same form in JSON and TOML.
                value @ (Value::Number(_) | Value::Bool(_) | Value::String(_) | Value::Array(_)) => {
                    lines.push(format!("{key} = {value}"));
                }
                other => return Err(self.bad_value(format!("{key} is {other}"))),
            }
        }
        Ok(KindTable { kind, keys: lines.join("\n") })
    }

    /// The layer pattern of an export of Sieve whose own attention is `own`, and the kinds of layers that are neither
    /// `own` nor dense.
    fn sieve_layers(&self, own: &KindTable) -> Result<(Vec<KindTable>, Vec<Layer>), CheckpointError> {
        let [dense, shared] = ["dense_layers", "shared_layers"].map(|key| self.marked_layers(key));
        let (dense, shared) = (dense?, shared?);
        let entries = match &self.value[LAYER_KEYS] {
            Value::Null => &[],
            Value::Array(entries) if entries.iter().all(Value::is_object) => entries.as_slice(),
            other => return Err(self.bad_value(format!("{LAYER_KEYS} is {other}, not a list of objects"))),
        };
        let mut others = Vec::new();
        let of_layer = |layer: usize| -> Result<Layer, CheckpointError> {
            let is_marked = |pattern: &[bool]| pattern.get(layer) == Some(&true);
            let entry = entries.get(layer).filter(|entry| **entry != json!({}));
            let other = entry.map(|entry| self.sieve_attention(entry)).transpose()?;
            Ok(match other {
                _ if is_marked(&dense) => dense_beside(own),
                _ if is_marked(&shared) => Layer::Shared,
                None => Layer::Own,
                Some(other) => Layer::Other(others.iter().position(|known| *known == other).unwrap_or_else(|| {
                    others.push(other);
                    others.len() - 1
                })),
            })
        };
        let num_types = dense.len().max(shared.len()).max(entries.len());
        let layers = (0..num_types).map(of_layer).collect::<Result<_, _>>()?;
        Ok((others, layers))
    }
}

/// A dense layer of a model whose own attention is `own`.
fn dense_beside(own: &KindTable) -> Layer {
    if own.is_dense() { Layer::Own } else { Layer::Dense }
}

/// The most layers that a recipe has.
const MOST_LAYERS: usize = 1 << 14;

impl HfConfig {
    /// Reads `config.json`. Fails if it has a setting that no recipe has.
    pub(super) fn read(path: &Path) -> Result<Self, CheckpointError> {
        let text = read_text(path).map_err(CheckpointError::io("reading", path))?;
        Self::parse(path, &text)
    }

    /// Reads the text of a `config.json`; `path` is for errors.
    pub(super) fn parse(path: &Path, text: &str) -> Result<Self, CheckpointError> {
        let reader = Reader::new(path, text)?;
        reader.check_keys()?;
        let architecture = reader.architecture;
        let num_layers = reader.integer("num_hidden_layers")?;
        // Lists of layers are made below, before a recipe checks the number.
        if num_layers > MOST_LAYERS {
            return Err(reader.bad_value(format!("num_hidden_layers is {num_layers}, above {MOST_LAYERS}")));
        }
        let (attention, others, layers) = reader.attentions(num_layers)?;
        // `silu` and `swish` are two names of one function.
        if reader.value["hidden_act"] != "silu" && reader.value["hidden_act"] != "swish" {
            return Err(reader.refuse(format!("hidden_act is {}", reader.value["hidden_act"])));
        }
        let class = architecture.class();
        let heads = reader.integer("num_attention_heads")?;
        let hidden_size = reader.integer("hidden_size")?;
        let head_dim = reader.head_dim(heads)?;
        let rotary = reader.rotary()?;
        let vocab_size = reader.integer("vocab_size")?;
        let max_positions = reader.integer("max_position_embeddings")?;
        let mut model = format!(
            "hidden_size = {hidden_size}\nintermediate_size = {}\nnum_hidden_layers = {num_layers}\n\
             num_attention_heads = {heads}\nnum_key_value_heads = {}\nhead_dim = {head_dim}\n\
             vocab_size = {vocab_size}\nrope_theta = {:?}\nrms_norm_eps = {:?}\n\
             max_position_embeddings = {max_positions}\ninitializer_range = {:?}\n",
            reader.integer("intermediate_size")?,
            reader.kv_heads(heads)?,
            rotary.theta,
            reader.number("rms_norm_eps")?,
            reader.number("initializer_range")?,
        );
        // Exports of Sieve have keys of their own for what other classes always or never have.
        let flag = |key: &str, of_class: bool| match architecture {
            Architecture::Sieve => reader.value[key].as_bool().unwrap_or(of_class),
            _ => of_class,
        };
        let (qk_norm, qkv_bias) = (flag("qk_norm", class.qk_norm), flag("qkv_bias", class.qkv_bias));
        let attention_sinks = flag("attention_sinks", false);
        model.push_str(&format!("qk_norm = {qk_norm}\nqkv_bias = {qkv_bias}\nattention_sinks = {attention_sinks}\n"));
        model.push_str(&rotary.scaling);
        let rotates = reader.rope_layers(num_layers)?;
        if rotates.contains(&false) {
            model.push_str(&format!("rope_layers = {:?}\n", shortest_period(&rotates)));
        }
        Ok(Self {
            residual_scale: reader.value["residual_scale"] == Value::Bool(true),
            is_tied: reader.flag("tie_word_embeddings")?,
            architecture,
            vocab_size,
            model,
            attention,
            others,
            layers,
            max_positions,
            row_tokens: reader.path.parent().and_then(row_tokens),
            assumed: reader.assumed(heads, head_dim),
            value: reader.value,
            notes: reader.notes.into_inner(),
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

    /// Whether the model's own attention is of this kind.
    pub(super) fn is_of(&self, kind: AttentionKind) -> bool {
        self.attention.kind == kind
    }

    /// The names of the tables `[attention.NAME]` of other kinds, in a recipe whose `attention.kind` becomes `kind`.
    /// The name of a kind stands for the layers of `[attention]` if that has the kind, so these tables have another.
    fn names_of_others(&self, kind: AttentionKind) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for (number, other) in (1..).zip(&self.others) {
            let name = other.kind.name();
            let is_taken = [self.attention.kind, kind].contains(&other.kind) || names.iter().any(|taken| taken == name);
            names.push(if is_taken { format!("{name}_{number}") } else { name.to_owned() });
        }
        names
    }

    /// A recipe of the model, with settings of a careful fine-tuning for the user to edit, because configurations of
    /// `transformers` have no training settings. `kind` is the one that an override gives the layers of the model's own
    /// kind; `None` if there is no such override.
    pub(super) fn recipe_toml(&self, residual_scale: bool, kind: Option<AttentionKind>) -> String {
        let names = self.names_of_others(kind.unwrap_or(self.attention.kind));
        let mut model = self.model.clone();
        if self.layers.iter().any(|layer| !matches!(layer, Layer::Own)) {
            let types = self.layers.iter().map(|layer| match *layer {
                Layer::Own => "sparse",
                Layer::Dense => Attention::DENSE.kind().name(),
                Layer::Shared => "shared",
                Layer::Other(number) => &names[number],
            });
            model.push_str(&format!("layer_types = {:?}\n", types.collect::<Vec<_>>()));
        }
        let mut attention = format!("[attention]\n{}", self.attention.lines());
        for (name, other) in names.iter().zip(&self.others) {
            attention.push_str(&format!("[attention.{name}]\n{}", other.lines()));
        }
        let seq_len = self.max_positions.min(self.row_tokens.unwrap_or(2048));
        format!(
            "[model]\n{model}tie_word_embeddings = {}\nresidual_scale = {residual_scale}\n{attention}\
             [tokenizer]\npath = \"tokenizer.json\"\n[data]\npaths = [\"text.txt\"]\n\
             [training]\nsteps = 1000\nseq_len = {seq_len}\nlocal_batch_size = 1\nglobal_batch_size = 8\n\
             [optimizer]\nlr = 1e-4\n[validation]\ninterval = 200\n[checkpoint]\ninterval = 200\n",
            self.is_tied
        )
    }
}
