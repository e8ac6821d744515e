//! Typed fields of a request's JSON object. A field that the server does not know is refused, not ignored.
use crate::error::{ApiError, shown};
use serde_json::{Map, Value};

/// Fields that change nothing in the answer.
const WITHOUT_EFFECT: [&str; 9] = [
    "user",
    "store",
    "metadata",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "cache_salt",
    "stream_options.include_obfuscation",
];

/// The fields of a request, or of an object in it, that were not read yet.
#[derive(Debug)]
pub(crate) struct Fields {
    fields: Map<String, Value>,
    /// What stands before a name in errors: nothing, or the object's own name and a point.
    path: String,
}

impl Fields {
    /// # Errors
    /// A body that is no JSON object.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let value: Value = serde_json::from_slice(body).map_err(|error| {
            // The message of serde_json has a place and no text of the request.
            ApiError::invalid("", format!("the body is not valid JSON: {error}"))
        })?;
        match value {
            Value::Object(fields) => Ok(Self { fields, path: String::new() }),
            _ => Err(ApiError::invalid("", "the body is not a JSON object")),
        }
    }

    /// The fields of an object inside the request, which errors call `name`.
    ///
    /// # Errors
    /// A value that is not an object.
    pub(crate) fn inside(name: &str, value: Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(fields) => Ok(Self { fields, path: format!("{name}.") }),
            _ => Err(ApiError::invalid(name, format!("{name} is not an object"))),
        }
    }

    /// The name of a field in errors.
    pub(crate) fn full_name(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    /// Whether a field was not read yet.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.fields.contains_key(name)
    }

    /// Takes a field; null counts as absent.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.fields.remove(name).filter(|value| !value.is_null())
    }

    /// The field that `read` understands, `None` if it is absent or null. `wanted` says in an error what it must be.
    fn of_type<T>(
        &mut self,
        name: &str,
        wanted: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        let name = self.full_name(name);
        read(&value).map(Some).ok_or_else(|| ApiError::invalid(&name, format!("{name} is not {wanted}")))
    }

    pub(crate) fn bool(&mut self, name: &str) -> Result<bool, ApiError> {
        Ok(self.of_type(name, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    pub(crate) fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        self.of_type(name, "a string", |value| value.as_str().map(str::to_owned))
    }

    /// A whole number from `least` to `most`; 16.0 is one too.
    pub(crate) fn count(&mut self, name: &str, [least, most]: [u64; 2]) -> Result<Option<usize>, ApiError> {
        let wanted = format!("a whole number from {least} to {most}");
        let read = |value: &Value| whole(value).filter(|count| (i128::from(least)..=i128::from(most)).contains(count));
        Ok(self.of_type(name, &wanted, read)?.map(|count| count as usize))
    }

    /// A number in a range, without its lower end if `is_open`.
    pub(crate) fn number(
        &mut self,
        name: &str,
        [least, most]: [f64; 2],
        is_open: bool,
    ) -> Result<Option<f64>, ApiError> {
        let wanted = if is_open {
            format!("a number above {least} and up to {most}")
        } else {
            format!("a number from {least} to {most}")
        };
        let is_in = |number: &f64| (least..=most).contains(number) && !(is_open && *number == least);
        self.of_type(name, &wanted, |value| value.as_f64().filter(is_in))
    }

    /// A factor: a number above 0.
    pub(crate) fn factor(&mut self, name: &str) -> Result<Option<f64>, ApiError> {
        let read = |value: &Value| value.as_f64().filter(|factor| *factor > 0.0 && factor.is_finite());
        self.of_type(name, "a number above 0", read)
    }

    /// The number of likeliest tokens that are drawn from; `Some(None)` for all, which other servers write 0 or -1.
    pub(crate) fn top_k(&mut self) -> Result<Option<Option<usize>>, ApiError> {
        let most = i128::from(u32::MAX);
        let read = |value: &Value| match whole(value)? {
            -1 | 0 => Some(None),
            count => (1..=most).contains(&count).then_some(Some(count as usize)),
        };
        self.of_type("top_k", &format!("a whole number from 1 to {most}, or 0 or -1 for all tokens"), read)
    }

    /// Any 64-bit integer.
    pub(crate) fn seed(&mut self) -> Result<Option<u64>, ApiError> {
        let fits = |seed: &i128| (i128::from(i64::MIN)..=i128::from(u64::MAX)).contains(seed);
        let read = |value: &Value| whole(value).filter(fits).map(|seed| seed as u64);
        self.of_type("seed", "a whole number of 64 bits", read)
    }

    /// A field that may only have a value that changes nothing, since the server lacks what it asks for.
    pub(crate) fn lacks(&mut self, name: &str, changes_nothing: impl FnOnce(&Value) -> bool) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !changes_nothing(&value) => {
                let name = &self.full_name(name);
                Err(ApiError::invalid(name, format!("this server has no {name}; leave it out")))
            }
            _ => Ok(()),
        }
    }

    /// Refuses fields that were not read, unless they change nothing.
    pub(crate) fn finish(self) -> Result<(), ApiError> {
        let names = self.fields.iter().filter(|(_, value)| !value.is_null()).map(|(name, _)| self.full_name(name));
        match names.into_iter().find(|name| !WITHOUT_EFFECT.contains(&name.as_str())) {
            Some(name) => {
                let shown = shown(&name);
                Err(ApiError::invalid(&shown, format!("this server does not know the field {shown}; leave it out")))
            }
            None => Ok(()),
        }
    }
}

/// A whole number, also one that is written as 16.0, as vLLM takes it. Beyond 2^53 such a number is not exact.
fn whole(value: &Value) -> Option<i128> {
    let exact = value.as_u64().map(i128::from).or(value.as_i64().map(i128::from));
    let is_whole = |number: &f64| number.fract() == 0.0 && number.abs() <= 9_007_199_254_740_992.0;
    exact.or_else(|| value.as_f64().filter(is_whole).map(|number| number as i128))
}
