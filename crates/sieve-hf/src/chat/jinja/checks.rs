//! Tests of jinja2: what stands behind `is`.

use super::fault::{Fallible, Fault};
use super::filters::{FILTERS, no_number};
use super::python::text;
use super::render::{Given, Renderer};
use super::value::Value;
use std::cmp::Ordering;
use std::rc::Rc;

/// Names of the tests that are here.
const TESTS: [&str; 39] = [
    "!=",
    "<",
    "<=",
    "==",
    ">",
    ">=",
    "boolean",
    "callable",
    "defined",
    "divisibleby",
    "eq",
    "equalto",
    "escaped",
    "even",
    "false",
    "filter",
    "float",
    "ge",
    "greaterthan",
    "gt",
    "in",
    "integer",
    "iterable",
    "le",
    "lessthan",
    "lower",
    "lt",
    "mapping",
    "ne",
    "none",
    "number",
    "odd",
    "sameas",
    "sequence",
    "string",
    "test",
    "true",
    "undefined",
    "upper",
];

impl Renderer<'_> {
    /// `value is name(given)`
    ///
    /// # Errors
    /// A test that is not known, or refuses the value.
    pub(super) fn test(&mut self, name: &str, value: &Value, given: Given) -> Fallible<bool> {
        self.budget.steps(1)?;
        if let Some(found) = self.comparison(name, value, &given)? {
            return Ok(found);
        }
        let [] = given.bind(name, [])?;
        Ok(match name {
            "defined" => !value.is_undefined(),
            "undefined" => value.is_undefined(),
            "none" => matches!(value, Value::None),
            "boolean" => matches!(value, Value::Bool(_)),
            "true" => matches!(value, Value::Bool(true)),
            "false" => matches!(value, Value::Bool(false)),
            "integer" => matches!(value, Value::Int(_)),
            "float" => matches!(value, Value::Float(_)),
            "number" => value.as_float().is_some(),
            "string" => matches!(value, Value::Text(_)),
            "mapping" => matches!(value, Value::Dict(_)),
            "iterable" => is_iterable(value),
            "sequence" => is_sequence(value),
            "callable" => is_callable(value),
            "escaped" => false,
            "odd" | "even" => {
                let rest = value.defined()?.as_int().ok_or_else(no_number)?.rem_euclid(2);
                (rest == 1) == (name == "odd")
            }
            "lower" | "upper" => {
                let found = text(value, self.budget)?;
                is_in_case(&found, name == "upper")
            }
            "filter" => value.as_str().is_some_and(|name| FILTERS.contains(&name)),
            "test" => value.as_str().is_some_and(|name| TESTS.contains(&name)),
            _ => {
                let name: String = name.chars().take(40).collect();
                return Err(Fault::refused(format!("the test {name} is not known")));
            }
        })
    }

    /// A test that takes another value.
    fn comparison(&mut self, name: &str, value: &Value, given: &Given) -> Fallible<Option<bool>> {
        let is_known = matches!(name, "divisibleby" | "sameas" | "in")
            || TESTS[..6].contains(&name)
            || ["eq", "equalto", "ne", "lt", "lessthan", "le", "gt", "greaterthan", "ge"].contains(&name);
        if !is_known {
            return Ok(None);
        }
        let [other] = given.args.as_slice() else {
            return Err(Fault::refused(format!("the test {name} takes one value")));
        };
        let order = |renderer: &Self| value.order(other, renderer.budget);
        Ok(Some(match name {
            "eq" | "equalto" | "==" => value.equals(other, self.budget)?,
            "ne" | "!=" => !value.equals(other, self.budget)?,
            "lt" | "lessthan" | "<" => order(self)? == Some(Ordering::Less),
            "gt" | "greaterthan" | ">" => order(self)? == Some(Ordering::Greater),
            "le" | "<=" => order(self)?.is_some_and(Ordering::is_le),
            "ge" | ">=" => order(self)?.is_some_and(Ordering::is_ge),
            "in" => other.contains(value, self.budget)?,
            "sameas" => is_same(value, other)?,
            _ => {
                let [value, other] = [value, other].map(Value::as_int);
                let rest = value.zip(other).and_then(|(value, other)| value.checked_rem(other));
                rest.ok_or_else(no_number)? == 0
            }
        }))
    }
}

fn is_iterable(value: &Value) -> bool {
    let is_list = matches!(value, Value::View(..) | Value::Stream(_) | Value::Loop(_) | Value::Cycler(_));
    is_list || is_sequence(value)
}

/// Whether it has items by their places, as jinja2 sees it: what is not there has none, and counts.
fn is_sequence(value: &Value) -> bool {
    let is_plain = matches!(value, Value::Text(_) | Value::List(_) | Value::Tuple(_) | Value::Range(_));
    is_plain || matches!(value, Value::Dict(_) | Value::Undefined(_))
}

fn is_callable(value: &Value) -> bool {
    let is_function = matches!(value, Value::Function(_) | Value::Macro(_) | Value::Method(_) | Value::Joiner(_));
    is_function || matches!(value, Value::Loop(_) | Value::Undefined(_))
}

/// Python's `is`, where it does not depend on what Python keeps only once.
fn is_same(value: &Value, other: &Value) -> Fallible<bool> {
    Ok(match (value, other) {
        (Value::None, Value::None) => true,
        (Value::Bool(a), Value::Bool(b)) => a == b,
        (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => Rc::ptr_eq(a, b),
        (Value::Dict(a), Value::Dict(b)) => Rc::ptr_eq(a, b),
        (Value::Namespace(a), Value::Namespace(b)) => Rc::ptr_eq(a, b),
        (Value::Text(_), Value::Text(_)) | (Value::Int(_), Value::Int(_)) | (Value::Float(_), Value::Float(_)) => {
            return Err(Fault::refused("sameas does not compare two strings or numbers; == compares them"));
        }
        _ => false,
    })
}

/// Python's `islower` and `isupper`.
pub(super) fn is_in_case(found: &str, is_upper: bool) -> bool {
    let [mut has_any, mut is_all] = [false, true];
    for c in found.chars() {
        let (is_right, is_wrong) =
            if is_upper { (c.is_uppercase(), c.is_lowercase()) } else { (c.is_lowercase(), c.is_uppercase()) };
        has_any |= is_right;
        is_all &= !is_wrong;
    }
    has_any && is_all
}
