//! The JSON text of a tokenizer, as the `tokenizers` crate writes it, also where ids have gaps: there the crate would
//! print every missing id to standard output.

use serde::Serialize;
use serde_json::{Map, Value};
use tokenizers::{Model, ModelWrapper, Tokenizer as HfTokenizer};

use super::switch_dropout_off;

/// Ids of tokens lie below this number, the largest that a recipe's `vocab_size` may be, so that arrays as long as the
/// vocabulary fit in memory.
pub(super) const MAX_IDS: usize = 1 << 24;

/// The ids of all tokens, ascending, each once.
///
/// # Errors
/// No token; an id that is too large; two tokens with one id, so that it could be decoded as either.
pub(super) fn ids(inner: &HfTokenizer) -> Result<Vec<u32>, String> {
    let with_added_tokens = true;
    let mut tokens: Vec<(u32, String)> =
        inner.get_vocab(with_added_tokens).into_iter().map(|(token, id)| (id, token)).collect();
    tokens.sort_unstable();
    let Some((largest, token)) = tokens.last() else {
        return Err("its vocabulary is empty".into());
    };
    if *largest as usize >= MAX_IDS {
        return Err(format!("its token {token:?} has the id {largest}, and ids must be below {MAX_IDS}"));
    }
    if let Some([(id, one), (_, other)]) = tokens.array_windows().find(|[one, other]| one.0 == other.0) {
        return Err(format!("its tokens {one:?} and {other:?} have the same id, {id}"));
    }
    Ok(tokens.into_iter().map(|(id, _)| id).collect())
}

/// The JSON of the model of the `tokenizer.json` in `file`, if ids of its vocabulary are missing; `None` if none is.
pub(super) fn model_with_gaps(inner: &HfTokenizer, file: &[u8]) -> Result<Option<Value>, String> {
    let mut tokens: Vec<(String, u32)> = inner.get_model().get_vocab().into_iter().collect();
    tokens.sort_unstable_by_key(|&(_, id)| id);
    if tokens.iter().enumerate().all(|(rank, &(_, id))| rank == id as usize) {
        return Ok(None);
    }
    // The crate writes the model with the numbers 0, 1, 2, … in place of the ids, and the ids are put back.
    let failed = |error: serde_json::Error| error.to_string();
    let mut file: Value = serde_json::from_slice(file).map_err(failed)?;
    let ranks = tokens.iter().enumerate().map(|(rank, (token, _))| (token.clone(), rank.into()));
    file["model"]["vocab"] = Value::Object(ranks.collect());
    let mut model: ModelWrapper = serde_json::from_value(file["model"].take()).map_err(failed)?;
    switch_dropout_off(&mut model);
    let mut model = serde_json::to_value(&model).map_err(failed)?;
    model["vocab"] = Value::Object(tokens.into_iter().map(|(token, id)| (token, id.into())).collect::<Map<_, _>>());
    Ok(Some(model))
}

/// The text of a `tokenizer.json`. `model` is the result of [`model_with_gaps`], `None` if no id is missing.
pub(super) fn json(inner: &HfTokenizer, model: Option<&Value>, is_pretty: bool) -> Result<String, String> {
    let Some(model) = model else {
        return inner.to_string(is_pretty).map_err(|error| error.to_string());
    };
    let parts = Parts {
        version: "1.0",
        truncation: None,
        padding: None,
        added_tokens: inner.get_added_vocabulary(),
        normalizer: inner.get_normalizer(),
        pre_tokenizer: inner.get_pre_tokenizer(),
        post_processor: inner.get_post_processor(),
        decoder: inner.get_decoder(),
        model,
    };
    let text = if is_pretty { serde_json::to_string_pretty(&parts) } else { serde_json::to_string(&parts) };
    text.map_err(|error| error.to_string())
}

/// A `tokenizer.json`, its keys in the order in which the `tokenizers` crate writes them.
#[derive(Serialize)]
struct Parts<'a, Added, Normalizer, PreTokenizer, PostProcessor, Decoder> {
    version: &'static str,
    truncation: Option<()>,
    padding: Option<()>,
    added_tokens: &'a Added,
    normalizer: Option<&'a Normalizer>,
    pre_tokenizer: Option<&'a PreTokenizer>,
    post_processor: Option<&'a PostProcessor>,
    decoder: Option<&'a Decoder>,
    model: &'a Value,
}
