//! The structure of an answer, as OpenAI's `response_format` or vLLM's `structured_outputs` names it.
use crate::error::ApiError;
use crate::fields::Fields;
use crate::request::is_false;
use serde_json::Value;
use sieve_infer::{Grammar, Grammars, Structure};

/// Choices of an answer, at most.
const MOST_CHOICES: usize = 1024;
const FORMAT: &str = "response_format";
const OUTPUTS: &str = "structured_outputs";

/// A structure and the field that names it.
#[derive(Debug)]
pub(crate) struct Named {
    param: &'static str,
    structure: Structure,
}

impl Named {
    /// Compiles the structure for the model's vocabulary.
    ///
    /// # Errors
    /// A structure that cannot be used; too many that are in use.
    pub(crate) fn compile(&self, grammars: &Grammars) -> Result<Grammar, ApiError> {
        if !grammars.has_room() {
            return Err(ApiError::too_many_structures());
        }
        let refused =
            |error: sieve_infer::InferError| ApiError::invalid(self.param, format!("{}: {error}", self.param));
        grammars.compile(&self.structure).map_err(refused)
    }
}

/// Reads both fields; `None` if an answer may be any text.
///
/// # Errors
/// A structure that is wrong or not served, or more than one.
pub(crate) fn read(fields: &mut Fields) -> Result<Option<Named>, ApiError> {
    let format = fields.take(FORMAT).map(response_format).transpose()?.flatten();
    let outputs = fields.take(OUTPUTS).map(structured_outputs).transpose()?.flatten();
    if format.is_some() && outputs.is_some() {
        let message = "an answer has one structure: leave out response_format or structured_outputs";
        return Err(ApiError::invalid(OUTPUTS, message));
    }
    let named = |param| move |structure| Named { param, structure };
    Ok(format.map(named(FORMAT)).or(outputs.map(named(OUTPUTS))))
}

/// `{"type": "text"}`, `{"type": "json_object"}`, or `{"type": "json_schema", "json_schema": {…}}`.
fn response_format(value: Value) -> Result<Option<Structure>, ApiError> {
    let mut format = Fields::inside(FORMAT, value)?;
    let structure = match format.string("type")?.as_deref() {
        Some("text") => None,
        Some("json_object") => Some(Structure::JsonObject),
        Some("json_schema") => {
            let name = "response_format.json_schema";
            let missing = || ApiError::invalid(name, format!("{name} is missing"));
            let mut inside = Fields::inside(name, format.take("json_schema").ok_or_else(missing)?)?;
            // They say how OpenAI's models are to read the schema. Here all follow it.
            inside.string("name")?;
            inside.string("description")?;
            inside.bool("strict")?;
            let missing =
                || ApiError::invalid(name, format!("{name}.schema is missing: the JSON schema of the answer"));
            let schema = inside.take("schema").ok_or_else(missing)?;
            inside.finish()?;
            Some(Structure::Schema(schema))
        }
        _ => {
            let message = "response_format.type is not \"text\", \"json_object\" or \"json_schema\"";
            return Err(ApiError::invalid("response_format.type", message));
        }
    };
    format.finish()?;
    Ok(structure)
}

/// One of `json`, `regex`, `choice` and `json_object`.
fn structured_outputs(value: Value) -> Result<Option<Structure>, ApiError> {
    let mut outputs = Fields::inside(OUTPUTS, value)?;
    let mut found = Vec::new();
    if let Some(schema) = outputs.take("json") {
        let parsed = match schema {
            Value::String(text) => serde_json::from_str(&text).map_err(|error| {
                let name = "structured_outputs.json";
                ApiError::invalid(name, format!("{name} is not valid JSON: {error}"))
            })?,
            schema => schema,
        };
        found.push(Structure::Schema(parsed));
    }
    found.extend(outputs.string("regex")?.map(Structure::Regex));
    if let Some(choices) = outputs.take("choice") {
        found.push(Structure::Choice(texts(choices)?));
    }
    if outputs.bool("json_object")? {
        found.push(Structure::JsonObject);
    }
    for name in ["grammar", "structural_tag", "whitespace_pattern"] {
        outputs.lacks(name, |_| false)?;
    }
    for name in ["disable_fallback", "disable_any_whitespace", "disable_additional_properties"] {
        outputs.lacks(name, is_false)?;
    }
    outputs.finish()?;
    if found.len() != 1 {
        let message = "structured_outputs has not exactly one of json, regex, choice and json_object";
        return Err(ApiError::invalid(OUTPUTS, message));
    }
    Ok(found.pop())
}

/// The texts of `choice`, a list.
fn texts(value: Value) -> Result<Vec<String>, ApiError> {
    let texts = value.as_array().and_then(|texts| texts.iter().map(|text| text.as_str().map(str::to_owned)).collect());
    let is_right = |texts: &Vec<String>| (1..=MOST_CHOICES).contains(&texts.len()) && !texts.contains(&String::new());
    texts.filter(is_right).ok_or_else(|| {
        let name = "structured_outputs.choice";
        let message = format!("{name} is not a list of 1 to {MOST_CHOICES} strings, none of them empty");
        ApiError::invalid(name, message)
    })
}
