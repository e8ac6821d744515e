//! JSON as a template sees it.

use super::fault::{Budget, Fallible, Fault};
use super::value::{Dict, Value};
use serde_json::Value as Json;
use std::rc::Rc;

/// A value of JSON for a template.
///
/// # Errors
/// More than the budget has, or lists within each other too deeply.
pub(super) fn value(json: &Json, budget: &Budget) -> Fallible<Value> {
    Ok(match json {
        Json::Null => Value::None,
        Json::Bool(value) => Value::Bool(*value),
        Json::Number(number) => {
            let whole = number.as_i64().map(i128::from).or(number.as_u64().map(i128::from));
            let float = || number.as_f64().map(Value::Float);
            let wrong = || Fault::refused(format!("the number {number} is too large"));
            whole.map(Value::Int).or_else(float).ok_or_else(wrong)?
        }
        Json::String(text) => Value::text(text, budget)?,
        Json::Array(items) => {
            Value::list(items.iter().map(|item| value(item, budget)).collect::<Fallible<_>>()?, budget)?
        }
        Json::Object(pairs) => Value::Dict(Rc::new(dict(pairs, budget)?)),
    })
}

/// A message for a template: a dictionary that knows its number.
///
/// # Errors
/// As [`value`].
pub(super) fn message(json: &Json, number: usize, budget: &Budget) -> Fallible<Value> {
    let Json::Object(pairs) = json else {
        return value(json, budget);
    };
    let mut dict = dict(pairs, budget)?;
    dict.message = Some(number);
    Ok(Value::Dict(Rc::new(dict)))
}

fn dict(pairs: &serde_json::Map<String, Json>, budget: &Budget) -> Fallible<Dict> {
    let pairs = pairs.iter().map(|(key, item)| Ok((Value::text(key, budget)?, value(item, budget)?)));
    Dict::new(pairs.collect::<Fallible<_>>()?, budget)
}
