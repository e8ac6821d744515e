//! The tokenizer, and the two files that name its special tokens for `transformers`.
use super::ExportOptions;
use super::config::to_text;
use crate::{Checkpoint, CheckpointError};
use serde_json::{Map, Value, json};
use std::fs;
use std::path::Path;

/// Names and texts of the tokenizer's files.
pub(super) fn read(
    checkpoint: &Checkpoint,
    max_seq_len: usize,
    options: &ExportOptions,
) -> Result<Vec<(&'static str, String)>, CheckpointError> {
    let path = checkpoint.tokenizer_path();
    let text = fs::read_to_string(&path).map_err(CheckpointError::io("reading", &path))?;
    let tokenizer: Value = serde_json::from_str(&text).map_err(|error| CheckpointError::Malformed {
        path: path.clone(),
        problem: format!("it is no tokenizer.json ({error})"),
    })?;

    let mut special = Map::new();
    special.insert("eos_token".into(), content(&tokenizer, options.eos_token_id, &path)?);
    if let Some(id) = options.pad_token_id {
        special.insert("pad_token".into(), content(&tokenizer, id, &path)?);
    }
    let mut config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_seq_len,
        "clean_up_tokenization_spaces": false,
        "added_tokens_decoder": added_tokens_decoder(&tokenizer),
    });
    let all = config.as_object_mut().expect("built as an object above");
    all.extend(special.clone());
    Ok(vec![
        ("tokenizer.json", text),
        ("tokenizer_config.json", to_text(&config)),
        ("special_tokens_map.json", to_text(&Value::Object(special))),
    ])
}

fn added_tokens(tokenizer: &Value) -> &[Value] {
    tokenizer["added_tokens"].as_array().map_or(&[], |v| v)
}

/// The text of a special token.
fn content(tokenizer: &Value, id: u32, path: &Path) -> Result<Value, CheckpointError> {
    let added = added_tokens(tokenizer).iter().find(|token| token["id"] == id);
    let content = match added {
        Some(token) => token["content"].clone(),
        // A token of the vocabulary itself: an object of text to id, or a list of (text, score).
        None => match &tokenizer["model"]["vocab"] {
            Value::Object(vocab) => vocab
                .iter()
                .find(|(_, found)| **found == id)
                .map_or(Value::Null, |(text, _)| text.as_str().into()),
            list => list[id as usize][0].clone(),
        },
    };
    match content.is_string() {
        true => Ok(content),
        false => Err(CheckpointError::Malformed {
            path: path.to_owned(),
            problem: format!("it has no token {id}"),
        }),
    }
}

/// Added tokens by id, as `tokenizer_config.json` repeats them.
fn added_tokens_decoder(tokenizer: &Value) -> Value {
    let decoder: Map<String, Value> = added_tokens(tokenizer)
        .iter()
        .map(|token| {
            let mut flags = token.clone();
            if let Some(flags) = flags.as_object_mut() {
                flags.shift_remove("id");
            }
            (token["id"].to_string(), flags)
        })
        .collect();
    Value::Object(decoder)
}
