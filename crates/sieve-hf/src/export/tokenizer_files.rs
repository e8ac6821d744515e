//! The tokenizer, and the files that name its special tokens for `transformers`. Chat template, special tokens and
//! generation settings of an imported model are exported again.
use super::ExportOptions;
use super::json_text::to_text;
use crate::{Checkpoint, CheckpointError};
use serde_json::{Map, Value, json};
use sieve_core::Recipe;
use sieve_core::recipe::TokenizerSource;
use sieve_files::{read_text, write_synced};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

const CONFIG: &str = "tokenizer_config.json";
const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// A folder of further chat templates, one file a name; `transformers` makes it for models that have several.
const MORE_TEMPLATES: &str = "additional_chat_templates";
const TEMPLATE_ENDING: &str = "jinja";
pub(crate) const GENERATION: &str = "generation_config.json";
/// Keys of an imported `tokenizer_config.json` that are exported unchanged.
const CARRIED: [&str; 6] =
    ["chat_template", "bos_token", "unk_token", "additional_special_tokens", "extra_special_tokens", "padding_side"];

/// Names and texts of the tokenizer's files; `beside` is the result of [`folder`].
pub(super) fn read(
    checkpoint: &Checkpoint,
    beside: &Path,
    max_seq_len: usize,
    options: &ExportOptions,
) -> Result<Vec<(&'static str, String)>, CheckpointError> {
    let path = checkpoint.tokenizer_path();
    let text = read_text(&path).map_err(CheckpointError::io("reading", &path))?;
    let tokenizer = parsed(&path, &text)?;

    let mut special = Map::new();
    special.insert("eos_token".into(), content(&tokenizer, options.eos_token_id, &path)?);
    if let Some(id) = options.pad_token_id {
        special.insert("pad_token".into(), content(&tokenizer, id, &path)?);
    }
    let mut config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        // What `generate` needs for prompts of different lengths.
        "padding_side": "left",
        "model_max_length": max_seq_len,
        "clean_up_tokenization_spaces": false,
        "added_tokens_decoder": added_tokens_decoder(&tokenizer),
    });
    let all = config.as_object_mut().expect("built as an object above");
    all.extend(special.clone());
    let mut files = Vec::new();
    let imported = object(beside, CONFIG)?;
    let carried = CARRIED.iter().filter_map(|key| imported.get_key_value(*key));
    let carried = carried.filter(|(_, value)| !value.is_null());
    all.extend(carried.map(|(key, value)| (key.clone(), value.clone())));
    if more_templates(beside)?.is_empty() {
        let template = text_of(&beside.join(CHAT_TEMPLATE))?;
        files.extend(template.map(|template| (CHAT_TEMPLATE, template)));
    } else {
        // All in one list, since an export has no folders.

        let named = Templates::read(beside)?.named;
        let list = named.iter().map(|(name, template)| json!({ "name": name, "template": template }));
        all.insert("chat_template".into(), list.collect());
    }
    files.extend([
        ("tokenizer.json", text),
        (CONFIG, to_text(&config)),
        ("special_tokens_map.json", to_text(&Value::Object(special))),
    ]);
    Ok(files)
}

/// The chat templates of a folder of `transformers`.
#[derive(Debug)]
pub(crate) struct Templates {
    /// (name, Jinja program) of each template. A template without a name is called [`DEFAULT`](Self::DEFAULT).
    named: Vec<(String, String)>,
}

impl Templates {
    const DEFAULT: &str = "default";

    /// Reads the templates as `transformers` does: `chat_template.jinja` and `additional_chat_templates/*.jinja`, or
    /// else `chat_template` of `tokenizer_config.json`, which is one text, or several by name.
    ///
    /// # Errors
    /// A file that cannot be read; a `chat_template` of another form.
    pub(crate) fn read(folder: &Path) -> Result<Self, CheckpointError> {
        let default = text_of(&folder.join(CHAT_TEMPLATE))?.map(|text| (Self::DEFAULT.to_owned(), text));
        let named: Vec<_> = default.into_iter().chain(more_templates(folder)?).collect();
        if !named.is_empty() {
            return Ok(Self { named });
        }
        let config = object(folder, CONFIG)?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let named = match config.get("chat_template") {
            None | Some(Value::Null) => Some(Vec::new()),
            Some(Value::String(one)) => Some(vec![(Self::DEFAULT.to_owned(), one.clone())]),
            Some(Value::Array(list)) => {
                list.iter().map(|item| Some((text(&item["name"])?, text(&item["template"])?))).collect()
            }
            Some(Value::Object(all)) => all.iter().map(|(name, item)| Some((name.clone(), text(item)?))).collect(),
            Some(_) => None,
        };
        let problem = "chat_template is neither a string nor a list of names and strings";
        let named = named.ok_or_else(|| CheckpointError::malformed(&folder.join(CONFIG), problem))?;
        Ok(Self { named })
    }

    /// The template that is meant where none is named.
    pub(crate) fn default(&self) -> Option<&str> {
        let found = self.named.iter().find(|(name, _)| name == Self::DEFAULT);
        found.map(|(_, text)| text.as_str())
    }

    /// The templates' names, separated by commas.
    pub(crate) fn names(&self) -> String {
        let names: Vec<&str> = self.named.iter().map(|(name, _)| name.as_str()).collect();
        names.join(", ")
    }
}

/// (name, text) of the templates in the folder [`MORE_TEMPLATES`], sorted.
fn more_templates(folder: &Path) -> Result<Vec<(String, String)>, CheckpointError> {
    let folder = folder.join(MORE_TEMPLATES);
    let entries = match fs::read_dir(&folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(CheckpointError::io("reading", &folder))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(CheckpointError::io("reading", &folder))?.path();
        let name = path.file_stem().map(|name| name.to_string_lossy().into_owned());
        if let (Some(name), true) = (name, path.extension().is_some_and(|ending| ending == TEMPLATE_ENDING)) {
            found.extend(text_of(&path)?.map(|text| (name, text)));
        }
    }
    found.sort();
    Ok(found)
}

/// Names (`bos_token`, …) and texts of the special tokens in `tokenizer_config.json`.
pub(crate) fn special_tokens(folder: &Path) -> Result<Map<String, Value>, CheckpointError> {
    let config = object(folder, CONFIG)?;
    let text = |value: &Value| value.as_str().or(value["content"].as_str()).map(str::to_owned);
    let tokens = config.iter().filter(|(name, _)| name.ends_with("_token"));
    Ok(tokens.filter_map(|(name, value)| Some((name.clone(), text(value)?.into()))).collect())
}

/// Copies the files beside a `tokenizer.json` that an export reads: names of special tokens, chat templates.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<(), CheckpointError> {
    for name in [CONFIG, CHAT_TEMPLATE] {
        if let Some(text) = text_of(&from.join(name))? {
            write_synced(&to.join(name), text.as_bytes())?;
        }
    }
    let more = more_templates(from)?;
    let folder = to.join(MORE_TEMPLATES);
    if !more.is_empty() {
        fs::create_dir_all(&folder).map_err(CheckpointError::io("creating", &folder))?;
    }
    for (name, text) in more {
        // A name may have dots.
        write_synced(&folder.join(format!("{name}.{TEMPLATE_ENDING}")), text.as_bytes())?;
    }
    Ok(())
}

/// The regular expression with which Qwen2's tokenizer splits a text into words.
const QWEN2_WORDS: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Whether the `tokenizer.json` among `files` normalises and splits texts as Qwen2's own does: transformers 5 uses the
/// latter regardless of `tokenizer_config.json`.
pub(super) fn splits_as_qwen2(files: &[(&'static str, String)]) -> bool {
    let text = files.iter().find(|(name, _)| *name == "tokenizer.json").map(|(_, text)| text);
    let tokenizer: Value = text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    let words = &tokenizer["pre_tokenizer"]["pretokenizers"][0];
    tokenizer["normalizer"]["type"] == "NFC"
        && words["behavior"] == "Isolated"
        && words["pattern"]["Regex"] == QWEN2_WORDS
}

/// The folder with the files that an import copied beside its tokenizer: the checkpoint itself if it has them,
/// otherwise the folder of the tokenizer file that the recipe names, if it names one.
pub(crate) fn folder(checkpoint: &Path, recipe: &Recipe) -> PathBuf {
    match recipe.tokenizer.source() {
        TokenizerSource::Path(path) if !checkpoint.join(GENERATION).is_file() => {
            Path::new(path).parent().unwrap_or(Path::new("")).to_owned()
        }
        _ => checkpoint.to_owned(),
    }
}

/// The end tokens of `generation_config.json`, if `eos_id` is one of them.
pub(crate) fn ends(source: &Map<String, Value>, eos_id: u32) -> Option<&Value> {
    let eos = json!(eos_id);
    source.get("eos_token_id").filter(|theirs| match theirs {
        Value::Array(all) => all.contains(&eos),
        one => **one == eos,
    })
}

/// The JSON object in the file `name` of a folder; empty if there is no such file.
pub(crate) fn object(folder: &Path, name: &str) -> Result<Map<String, Value>, CheckpointError> {
    let path = folder.join(name);
    match json_of(&path)? {
        Some(Value::Object(found)) => Ok(found),
        Some(_) => Err(CheckpointError::malformed(&path, "it is not a JSON object")),
        None => Ok(Map::new()),
    }
}

/// The contents of a JSON file; `None` if there is no such file.
fn json_of(path: &Path) -> Result<Option<Value>, CheckpointError> {
    text_of(path)?.map(|text| parsed(path, &text)).transpose()
}

fn parsed(path: &Path, text: &str) -> Result<Value, CheckpointError> {
    serde_json::from_str(text).map_err(|error| CheckpointError::not_json(path, text, &error))
}

/// The text of a file; `None` if there is no such file.
pub(crate) fn text_of(path: &Path) -> Result<Option<String>, CheckpointError> {
    match read_text(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(CheckpointError::io("reading", path)(error)),
    }
}

/// `generation_config.json` of a folder of `transformers`; missing ids of special tokens are taken from `config.json`.
pub(crate) fn generation(from: &Path) -> Result<Map<String, Value>, CheckpointError> {
    let mut all = object(from, GENERATION)?;
    let config = object(from, "config.json")?;
    for key in ["bos_token_id", "eos_token_id", "pad_token_id"] {
        if all.get(key).is_none_or(Value::is_null)
            && let Some(id) = config.get(key).filter(|id| !id.is_null())
        {
            all.insert(key.to_owned(), id.clone());
        }
        let ids = all.get(key).unwrap_or(&Value::Null);
        let is_id = |id: &Value| id.is_u64();
        if !(ids.is_null() || is_id(ids) || ids.as_array().is_some_and(|ids| ids.iter().all(is_id))) {
            let what = format!("{key} is {ids}, neither a token's number nor a list of numbers");
            return Err(CheckpointError::malformed(&from.join(GENERATION), what));
        }
    }
    Ok(all)
}

/// The end-of-document token of a folder of `transformers`: the name in `tokenizer_config.json`, otherwise the first
/// end token of `generation_config.json`; `None` if both are missing or unknown to the tokenizer.
pub(crate) fn eos_token(from: &Path) -> Result<Option<String>, CheckpointError> {
    let path = from.join("tokenizer.json");
    let Some(tokenizer) = json_of(&path)? else {
        return Ok(None);
    };
    let config = object(from, CONFIG)?;
    let name = config.get("eos_token").and_then(|name| name.as_str().or(name["content"].as_str()));
    if let Some(name) = name
        && has_token(&tokenizer, name)
    {
        return Ok(Some(name.to_owned()));
    }
    let ids = generation(from)?;
    let first = ids.get("eos_token_id").and_then(|id| id.as_u64().or(id[0].as_u64()));
    let found = first.and_then(|id| content(&tokenizer, id as u32, &path).ok());
    Ok(found.and_then(|name| name.as_str().map(str::to_owned)))
}

/// Whether the token is an added one or in the vocabulary: an object from text to id, or a list of (text, score).
fn has_token(tokenizer: &Value, name: &str) -> bool {
    added_tokens(tokenizer).iter().any(|token| token["content"] == name)
        || match &tokenizer["model"]["vocab"] {
            Value::Object(vocab) => vocab.contains_key(name),
            list => list.as_array().into_iter().flatten().any(|pair| pair[0] == name),
        }
}

fn added_tokens(tokenizer: &Value) -> &[Value] {
    tokenizer["added_tokens"].as_array().map_or(&[], |v| v)
}

/// The text of the special token with this id.
fn content(tokenizer: &Value, id: u32, path: &Path) -> Result<Value, CheckpointError> {
    let added = added_tokens(tokenizer).iter().find(|token| token["id"] == id);
    let content = match added {
        Some(token) => token["content"].clone(),
        // Looks in the vocabulary, which is an object from text to id, or a list of (text, score).
        None => match &tokenizer["model"]["vocab"] {
            Value::Object(vocab) => {
                vocab.iter().find(|(_, found)| **found == id).map_or(Value::Null, |(text, _)| text.as_str().into())
            }
            list => list[id as usize][0].clone(),
        },
    };
    if content.is_string() {
        Ok(content)
    } else {
        Err(CheckpointError::malformed(path, format!("it has no token {id}")))
    }
}

/// Added tokens by id, as `tokenizer_config.json` lists them.
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
