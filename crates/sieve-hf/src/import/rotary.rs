//! The rotary embedding of a `config.json`: its base and its scaling, as transformers 5 reads them from three places.
//!
//! Version 5 takes `rope_scaling` where it is not empty, otherwise `rope_parameters`; the base is in the dictionary,
//! and otherwise beside it. Version 4 takes `rope_scaling` alone, and the base beside it alone. Where the two would
//! compute other frequencies, a note says so.
use super::config::Reader;
use super::keys::{RotaryUse, rotary_use};
use crate::CheckpointError;
use crate::export::Architecture;
use crate::export::config::SCALING;
use serde_json::{Map, Value};

/// The keys of a scaled rotary embedding that a recipe has too, besides `original_max_position_embeddings`.
const NUMBERS: [&str; 6] =
    ["factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"];
/// Keys that may be null: the type's usual value stands in. A 0 counts as null, except in `attention_factor`.
const OPTIONAL: [&str; 5] = ["beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"];
const ORIGINAL: &str = "original_max_position_embeddings";
const THETA: &str = "rope_theta";

/// Base and scaling of rotary frequencies.
pub(super) struct Rotary {
    pub(super) theta: f64,
    /// The line of a recipe's `[model]`; empty if the frequencies are not scaled.
    pub(super) scaling: String,
}

/// A rotary dictionary that is read, and its key in `config.json`.
struct Dictionary<'a> {
    name: &'static str,
    values: &'a Map<String, Value>,
}

impl Reader {
    /// Reads the base and the scaling of the rotary frequencies.
    pub(super) fn rotary(&self) -> Result<Rotary, CheckpointError> {
        let dictionary = self.rotary_dictionary()?;
        let kind = self.rotary_kind(dictionary.as_ref())?;
        let theta = self.theta(dictionary.as_ref(), kind)?;
        self.check_partial(dictionary.as_ref(), kind)?;
        let Some(dictionary) = dictionary else {
            return Ok(Rotary { theta, scaling: String::new() });
        };
        self.check_rotary_keys(&dictionary, kind)?;
        let scaling = match kind {
            "default" => String::new(),
            _ => self.scaling(&dictionary, kind)?,
        };
        Ok(Rotary { theta, scaling })
    }

    /// The dictionary of rotary settings that is read: the first of the names below whose dictionary has keys; `None`
    /// if neither has.
    fn rotary_dictionary(&self) -> Result<Option<Dictionary<'_>>, CheckpointError> {
        let names: &[&'static str] = match self.architecture {
            // Exports for `modeling_sieve.py` have a key of their own.
            Architecture::Sieve => &[SCALING, "rope_parameters"],
            _ => &["rope_scaling", "rope_parameters"],
        };
        let mut found = Vec::new();
        for &name in names {
            match &self.value[name] {
                Value::Null => {}
                Value::Object(values) if values.is_empty() => {}
                Value::Object(values) => found.push(Dictionary { name, values }),
                other => return Err(self.bad_value(format!("{name} is {other}, not a dictionary"))),
            }
        }
        let is_sieve = self.architecture == Architecture::Sieve;
        if let [read, other] = found.as_slice()
            && read.values != other.values
            && !is_sieve
        {
            let (read, other) = (read.name, other.name);
            self.note(format!("{read} and {other} differ: {read} is read, as transformers does, and {other} is not"));
        }
        Ok(found.into_iter().next())
    }

    /// The type of the rotary embedding.
    fn rotary_kind<'a>(&self, dictionary: Option<&Dictionary<'a>>) -> Result<&'a str, CheckpointError> {
        let Some(Dictionary { name, values }) = dictionary else {
            return Ok("default");
        };
        let kind = match (values.get("rope_type"), values.get("type")) {
            (Some(new), Some(old)) if new != old => {
                return Err(self.bad_value(format!(
                    "rope_type is {new} and type is {old} in {name}: transformers 5 reads the first, transformers 4 \
                     the second"
                )));
            }
            (Some(kind), _) | (None, Some(kind)) => kind,
            (None, None) => return Ok("default"),
        };
        let known = ["default", "linear", "llama3", "yarn"];
        let is_latent = self.architecture == Architecture::DeepseekV3;
        match kind.as_str() {
            Some(kind) if kind == "default" || (known.contains(&kind) && !is_latent) => Ok(kind),
            _ => Err(self.refuse(format!(
                "rope_type is {kind} in {name}, so its rotary embedding is scaled in a way that this recipe cannot have"
            ))),
        }
    }

    /// The base of the frequencies: the dictionary's if it has one, else the key beside it or that key's default. In an
    /// export of Sieve both must agree; for other models a note says where transformers 4 and 5 read different ones.
    fn theta(&self, dictionary: Option<&Dictionary<'_>>, kind: &str) -> Result<f64, CheckpointError> {
        let beside = &self.value[THETA];
        let inside = dictionary.and_then(|dictionary| dictionary.values.get(THETA).map(|theta| (dictionary, theta)));
        let read = inside.map_or(beside, |(_, theta)| theta);
        let Some(theta) = read.as_f64() else {
            let place = inside.map_or(String::new(), |(dictionary, _)| format!(" in {}", dictionary.name));
            return Err(self.bad_value(format!("{THETA} is {read}{place}, not a number")));
        };
        if self.architecture == Architecture::Sieve {
            let agrees = !self.is_given(THETA) || beside.as_f64() == Some(theta);
            return if agrees {
                Ok(theta)
            } else {
                Err(self.bad_value(format!("{THETA} is {theta:?} in a dictionary and {beside} beside it")))
            };
        }
        let is_given = self.is_given(THETA);
        let place = dictionary.map_or("config.json", |dictionary| dictionary.name);
        if beside.as_f64() != Some(theta) {
            let old = if is_given {
                format!("and {beside} beside it")
            } else {
                format!("and absent beside it, where transformers 4 takes {beside}")
            };
            self.note(format!(
                "{THETA} is {theta:?} in {place} {old}: {theta:?} is read, as transformers 5 does; transformers 4 \
                 reads only the key next to it"
            ));
        }
        if place == "rope_parameters" && kind != "default" {
            self.note(format!(
                "rope_parameters scales the rotary embedding ({kind}), as transformers 5 reads it; transformers 4 \
                 reads only rope_scaling and would not scale it"
            ));
        }
        Ok(theta)
    }

    /// Refuses a rotation of parts of the heads.
    fn check_partial(&self, dictionary: Option<&Dictionary<'_>>, kind: &str) -> Result<(), CheckpointError> {
        const PARTIAL: &str = "partial_rotary_factor";
        let whole = |value: &Value| value.as_f64() == Some(1.0);
        let inside = dictionary.and_then(|dictionary| dictionary.values.get(PARTIAL));
        // transformers makes no model from null in a dictionary of another type.
        let is_plain = |value: &Value| whole(value) || (value.is_null() && kind == "default");
        let beside = Some(&self.value[PARTIAL]).filter(|value| !value.is_null());
        let part = inside.filter(|value| !is_plain(value)).or(beside.filter(|value| !whole(value)));
        match part {
            None => Ok(()),
            Some(part) => Err(self.refuse(format!("{PARTIAL} is {part}, and a recipe rotates whole heads"))),
        }
    }

    /// Refuses keys that `transformers` or a recipe does not have; a note names keys that the type does not use.
    fn check_rotary_keys(&self, dictionary: &Dictionary<'_>, kind: &str) -> Result<(), CheckpointError> {
        let name = dictionary.name;
        let mut unused = Vec::new();
        for (key, value) in dictionary.values {
            match rotary_use(key) {
                Some(RotaryUse::Every) => {}
                Some(RotaryUse::Types(types)) if types.contains(&kind) => {}
                Some(RotaryUse::Types(_)) => unused.push(key.as_str()),
                Some(RotaryUse::Refused) | None if value.is_null() => {}
                Some(RotaryUse::Refused) => {
                    return Err(self.refuse(format!(
                        "{key} is {value} in {name}: the rotary embedding is scaled in a way that no recipe has"
                    )));
                }
                None => {
                    return Err(self.bad_value(format!("{name} has {key} = {value}, a key that transformers lacks")));
                }
            }
        }
        if !unused.is_empty() && self.architecture != Architecture::Sieve {
            let unused = unused.join(", ");
            self.note(format!("{name} has {unused}, which rope_type = {kind:?} does not use; transformers neither"));
        }
        match dictionary.values.get("truncate") {
            None | Some(Value::Bool(true)) => Ok(()),
            Some(_) if kind != "yarn" => Ok(()),
            Some(other) => {
                Err(self.refuse(format!("truncate is {other} in {name}, and a recipe rounds the bounds of yarn")))
            }
        }
    }

    /// The line of `[model]` for scaled rotary frequencies. An optional number that is null or 0 counts as absent;
    /// `attention_factor` may be 0.
    fn scaling(&self, dictionary: &Dictionary<'_>, kind: &str) -> Result<String, CheckpointError> {
        let Dictionary { name, values } = dictionary;
        let is_used = |key: &str| match rotary_use(key) {
            Some(RotaryUse::Types(types)) => types.contains(&kind),
            _ => false,
        };
        let number = |key: &str| match values.get(key) {
            None => Ok(None),
            Some(Value::Null) if OPTIONAL.contains(&key) => Ok(None),
            Some(value) if OPTIONAL.contains(&key) && key != "attention_factor" && value.as_f64() == Some(0.0) => {
                Ok(None)
            }
            Some(value) => match value.as_f64() {
                Some(number) => Ok(Some((number, value))),
                None => Err(self.bad_value(format!("{key} is {value} in {name}, not a number"))),
            },
        };
        let mut line = format!("rope_scaling = {{ rope_type = {kind:?}");
        for key in NUMBERS.into_iter().filter(|key| is_used(key)) {
            match number(key)? {
                Some((_, value)) => line.push_str(&format!(", {key} = {value}")),
                None if OPTIONAL.contains(&key) => {}
                // transformers refuses the dictionary, too.
                None => return Err(self.bad_value(format!("{key} is missing in {name}, and {kind} needs it"))),
            }
        }
        // As transformers computes yarn's attention_factor from `mscale` and `mscale_all_dim`.
        if is_used("mscale")
            && number("attention_factor")?.is_none()
            && let (Some((factor, _)), Some((own, _)), Some((all, _))) =
                (number("factor")?, number("mscale")?, number("mscale_all_dim")?)
        {
            let scale = |weight: f64| if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 };
            line.push_str(&format!(", attention_factor = {:?}", scale(own) / scale(all)));
        }
        if is_used(ORIGINAL)
            && let Some(positions) = self.original_positions(dictionary, kind)?
        {
            line.push_str(&format!(", {ORIGINAL} = {positions}"));
        }
        line.push_str(" }\n");
        Ok(line)
    }

    /// The positions of the first training, from the dictionary or beside it; `None` for `max_position_embeddings`.
    fn original_positions(&self, dictionary: &Dictionary<'_>, kind: &str) -> Result<Option<u64>, CheckpointError> {
        let name = dictionary.name;
        let whole = |value: &Value| match value.as_u64() {
            Some(positions) => Ok(positions),
            None => Err(self.bad_value(format!("{ORIGINAL} is {value}, not a whole number"))),
        };
        let inside = dictionary.values.get(ORIGINAL).map(whole).transpose()?;
        let beside = if self.is_given(ORIGINAL) { Some(whole(&self.value[ORIGINAL])?) } else { None };
        match (inside, beside) {
            (Some(inside), Some(beside)) if inside != beside => Err(self.bad_value(format!(
                "{ORIGINAL} is {inside} in {name} and {beside} beside it: transformers 5 reads the second, \
                 transformers 4 the first"
            ))),
            (None, Some(beside)) if Some(beside) != self.value["max_position_embeddings"].as_u64() => {
                if kind == "yarn" {
                    self.note(format!(
                        "{ORIGINAL} is {beside} beside {name}, as transformers 5 reads it; transformers 4 takes \
                         max_position_embeddings"
                    ));
                }
                Ok(Some(beside))
            }
            (inside, beside) => Ok(inside.or(beside)),
        }
    }
}
