//! MiniMax-M3's text class in a `config.json`, of `transformers` or of vLLM.
//!
//! A recipe's feed-forward layers compute `up * silu(gate)`, which only exports of Sieve do ([`crate::export::m3`]).
use super::config::{KindTable, Reader};
use crate::CheckpointError;
use crate::export::Architecture;
use crate::export::m3::{LIMIT, SCALE_KEY, SPARSE_ATTENTION, UP_SCALE};
use serde_json::{Map, Value, json};
use sieve_core::kinds::FULL_ATTENTION;

/// The keys of `sparse_attention_config`, by the keys that the class of `transformers` reads them as.
const LEGACY: [(&str, &str); 5] = [
    ("index_n_heads", "sparse_num_index_heads"),
    ("index_head_dim", "sparse_index_dim"),
    ("index_block_size", "sparse_block_size"),
    ("index_topk_blocks", "sparse_topk_blocks"),
    ("index_local_blocks", "sparse_local_block"),
];

/// The text model of a `config.json` for vLLM, which nests it; any other is returned as it is.
pub(super) fn text_model(mut value: Value) -> Value {
    let is_text = value["architectures"] == json!([Architecture::M3Vllm.class().name]);
    if is_text && value["text_config"].is_object() { value["text_config"].take() } else { value }
}

/// Gives the keys that `transformers` renames when it reads a file their other names, and the feed-forward width the
/// name that other classes have.
pub(super) fn rename_keys(all: &mut Map<String, Value>) {
    let sparse = all.get("sparse_attention_config").cloned().unwrap_or_default();
    for (name, legacy) in LEGACY {
        if let Some(value) = sparse.get(legacy) {
            all.insert(name.to_owned(), value.clone());
        }
    }
    let is_on = |mark: &Value| *mark != json!(0) && *mark != json!(false);
    let lists = [
        ("layer_types", sparse.get("sparse_attention_freq"), [FULL_ATTENTION, SPARSE_ATTENTION]),
        ("mlp_layer_types", all.get("moe_layer_freq"), ["dense", "sparse"]),
    ];
    let lists = lists.map(|(key, marks, [off, on])| {
        let marks = marks.and_then(Value::as_array)?;
        let words = marks.iter().map(|mark| if is_on(mark) { on } else { off });
        Some((key, words.collect::<Value>()))
    });
    for (key, words) in lists.into_iter().flatten() {
        if all.get(key).is_none_or(Value::is_null) {
            all.insert(key.to_owned(), words);
        }
    }
    // The class computes SwiGLU by its own keys, whatever the activation is called.
    all.insert("hidden_act".to_owned(), json!("silu"));
    all.insert("intermediate_size".to_owned(), all.get("dense_intermediate_size").cloned().unwrap_or_default());
}

impl Reader {
    /// The own kind, and for each layer whether it is dense, of a model that a recipe can express.
    pub(super) fn m3_attention(&self, num_layers: usize) -> Result<(KindTable, Vec<bool>), CheckpointError> {
        let value = |key: &str| &self.value[key];
        let is = |key: &str, wanted: Value| match value(key) {
            found if found.as_f64().is_some() && found.as_f64() == wanted.as_f64() => Ok(()),
            found if *found == wanted => Ok(()),
            found => Err(self.refuse(format!("{key} is {found}, and a recipe's model has {wanted}"))),
        };
        let experts = value("mlp_layer_types").as_array().is_none_or(|kinds| kinds.iter().any(|kind| kind != "dense"));
        if experts {
            let kinds = value("mlp_layer_types");
            return Err(self.refuse(format!(
                "mlp_layer_types (or moe_layer_freq) is {kinds}: layers with experts, which no recipe has"
            )));
        }
        let is_native = self.architecture == Architecture::M3;
        let (key, wanted) = if is_native { (SCALE_KEY, json!(UP_SCALE)) } else { ("swiglu_beta", json!(0.0)) };
        let is_plain = is(key, wanted).and(is("swiglu_alpha", json!(1.0))).and(is("swiglu_limit", json!(LIMIT)));
        if is_plain.is_err() {
            return Err(self.refuse(format!(
                "its feed-forward layers compute (up + 1) * gate * sigmoid(alpha * gate), clamped to a limit \
                 (swiglu_alpha = {}, swiglu_limit = {}, {key} = {}), and a recipe's compute up * silu(gate); exports \
                 of Sieve have swiglu_alpha = 1.0, swiglu_limit = 1e30 and {key}",
                value("swiglu_alpha"),
                value("swiglu_limit"),
                value(key),
            )));
        }
        is("index_n_heads", value("num_key_value_heads").clone())?;
        is("index_head_dim", value("head_dim").clone())?;
        if !is_native {
            let sparse = value("sparse_attention_config");
            let others = [("sparse_score_type", json!("max")), ("sparse_init_block", json!(0))];
            if let Some((key, _)) = others.iter().find(|(key, wanted)| sparse[*key] != *wanted) {
                return Err(self.refuse(format!("{key} is {}, and a recipe has no key for it", sparse[*key])));
            }
        }
        let kinds = match value("layer_types") {
            Value::Array(kinds) if kinds.len() == num_layers => kinds.clone(),
            Value::Null => vec![json!(FULL_ATTENTION); num_layers],
            other => return Err(self.bad_value(format!("layer_types is {other}, not a list of {num_layers} layers"))),
        };
        let is_dense = kinds.iter().map(|kind| match kind.as_str() {
            Some(FULL_ATTENTION) => Ok(true),
            Some(SPARSE_ATTENTION) => Ok(false),
            _ => Err(self.bad_value(format!("layer_types has {kind}, not {FULL_ATTENTION} or {SPARSE_ATTENTION}"))),
        });
        let is_dense = is_dense.collect::<Result<Vec<bool>, _>>()?;
        if is_dense.iter().all(|dense| *dense) {
            return Ok((KindTable::dense(), Vec::new()));
        }
        let own = KindTable::with_keys(&[
            ("indexer", "\"msa\"".to_owned()),
            ("select_block_size", self.integer("index_block_size")?.to_string()),
            ("num_selected_blocks", self.integer("index_topk_blocks")?.to_string()),
            ("num_local_blocks", self.integer("index_local_blocks")?.to_string()),
        ]);
        Ok((own, if is_dense.contains(&true) { is_dense } else { Vec::new() }))
    }
}
