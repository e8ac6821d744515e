//! The tokenizer, and the files that name its special tokens for `transformers`; what another tokenizer's files say of
//! chats is carried through.
use super::ExportOptions;
use super::config::to_text;
use crate::{Checkpoint, CheckpointError};
use serde_json::{Map, Value, json};
use sieve_core::recipe::TokenizerSource;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

const CONFIG: &str = "tokenizer_config.json";
const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// Files beside a `tokenizer.json` that an import keeps and an export reads.
pub(crate) const BESIDE: [&str; 2] = [CONFIG, CHAT_TEMPLATE];
/// Keys of `tokenizer_config.json` that are carried through as they are.
const CARRIED: [&str; 6] = [
    "chat_template",
    "bos_token",
    "unk_token",
    "additional_special_tokens",
    "extra_special_tokens",
    "padding_side",
];

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
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": max_seq_len,
        "clean_up_tokenization_spaces": false,
        "added_tokens_decoder": added_tokens_decoder(&tokenizer),
    });
    let all = config.as_object_mut().expect("built as an object above");
    all.extend(special.clone());
    let mut files = Vec::new();
    if let Some((folder, theirs)) = files_beside(checkpoint)? {
        let carried = CARRIED.iter().filter(|key| !theirs[**key].is_null());
        all.extend(carried.map(|key| ((*key).to_owned(), theirs[*key].clone())));
        if let Some(template) = text_of(&folder.join(CHAT_TEMPLATE))? {
            files.push((CHAT_TEMPLATE, template));
        }
    }
    files.extend([
        ("tokenizer.json", text),
        (CONFIG, to_text(&config)),
        ("special_tokens_map.json", to_text(&Value::Object(special))),
    ]);
    Ok(files)
}

/// The folder of the tokenizer file that the recipe names, and the `tokenizer_config.json` in it.
fn files_beside(checkpoint: &Checkpoint) -> Result<Option<(PathBuf, Value)>, CheckpointError> {
    let (recipe, _) = checkpoint.recipe_and_shape()?;
    let TokenizerSource::Path(path) = recipe.tokenizer.source() else {
        return Ok(None);
    };
    let folder = Path::new(path).parent().unwrap_or(Path::new("")).to_owned();
    let path = folder.join(CONFIG);
    let config = text_of(&path)?.map(|text| {
        serde_json::from_str(&text).map_err(|error| CheckpointError::Malformed {
            path,
            problem: error.to_string(),
        })
    });
    Ok(Some((folder, config.transpose()?.unwrap_or(Value::Null))))
}

/// The text of a file that may be absent.
pub(crate) fn text_of(path: &Path) -> Result<Option<String>, CheckpointError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(CheckpointError::io("reading", path)(error)),
    }
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
