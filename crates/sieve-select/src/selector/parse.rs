//! Reads and writes `NAME:key=value,…`; the text of `--help`.

use std::fmt;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Number, Value};
use sieve_core::did_you_mean;

use super::{Common, ENTRIES, Method, Phase, Selector};
use crate::decode::dam::DamMaps;
use crate::decode::dma::DmaWeights;
use crate::error::SelectError;
use crate::gqa::GqaPolicy;
use crate::prefill::delta::DeltaConfig;
use crate::prefill::minference::PatternFile;
use crate::prefill::xattention::read_taus;
use crate::range::Rules;

/// The key and the value of one `key=value`.
pub(super) type Item<'t> = (&'t str, &'t str);

impl Selector {
    /// Reads `NAME:key=value,…`; the files that `minference`, `xattention`,
    /// `dam` and `dma` may name are read too.
    ///
    /// # Errors
    /// An unknown name or key (the nearest is named), a value of another type or outside its range, a missing file.
    pub fn parse(text: &str) -> Result<Self, SelectError> {
        let (name, rest) = text.split_once(':').unwrap_or((text, ""));
        let name = name.trim();
        let mut items = Vec::new();
        for item in rest.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            let Some((key, value)) = item.split_once('=') else {
                return Err(SelectError::form(name, item, "it has no ="));
            };
            items.push((key.trim(), value.trim()));
        }
        if let Some(at) = (1..items.len()).find(|&at| items[..at].iter().any(|item| item.0 == items[at].0)) {
            let (key, value) = items[at];
            return Err(SelectError::form(name, &format!("{key}={value}"), "the key is given twice"));
        }
        let mut selector = Self { method: method_of(name, &mut items)?, common: method_common(name) };
        selector.refuse_others(&items)?;
        selector.common = read(name, &items, fields(&selector.common))?;
        selector.check()?;
        Ok(selector)
    }

    /// Refuses a key that the method does not have or does not use.
    fn refuse_others(&self, items: &[Item<'_>]) -> Result<(), SelectError> {
        let used = self.common_keys();
        let Some((key, _)) = items.iter().find(|item| !used.contains(&item.0)) else {
            return Ok(());
        };
        let (selector, key) = (self.name(), *key);
        let known: Vec<String> = self.all_items().into_iter().map(|item| item.0).collect();
        if known.is_empty() {
            return Rules(selector)
                .fail(format!("{key} is given, and it has no settings"), "leave the colon and what follows out");
        }
        let problem = if common_items(&self.common).any(|item| item.0 == key) {
            format!("{selector} takes no {key}: it would change nothing")
        } else {
            let known: Vec<&str> = known.iter().map(String::as_str).collect();
            format!("{selector} has no key {key:?}{}", did_you_mean(key, &known))
        };
        Err(SelectError::refused(problem, format!("its keys are {}", known.join(", "))))
    }

    /// The same selector with one setting changed.
    ///
    /// # Errors
    /// As [`parse`](Self::parse).
    pub fn with(&self, key: &str, value: &str) -> Result<Self, SelectError> {
        let others = self.all_items().into_iter();
        let others = others.filter(|(other, value)| other != key && !value.is_empty());
        let changed = (key.to_owned(), value.to_owned());
        Self::parse(&text_of_items(self.name(), others.chain([changed])))
    }

    /// Names, keys with defaults, and papers of all methods.
    pub fn help() -> String {
        let mut text = String::from("--selector NAME:key=value,key=value\n");
        for (phase, title) in [(Phase::Prefill, "prefill"), (Phase::Decode, "decode")] {
            text += &format!("\n{title}\n");
            for entry in
                ENTRIES.iter().filter(|e| e.phase == phase || (e.phase == Phase::Both && phase == Phase::Prefill))
            {
                let both = if entry.phase == Phase::Both { " (decode too)" } else { "" };
                text += &format!("  {:15} {}{both}  [{}]\n", entry.name, entry.about, entry.paper);
                let keys = Self::parse(entry.name).map(|selector| text_of_items("", selector.own_items()));
                if let Some((_, keys)) = keys.unwrap_or_default().split_once(':') {
                    text += &format!("  {:15} {keys}\n", "");
                }
            }
        }
        text += "\nall: first_dense_layers=0 (momo, infinitehip: 3; quest has dense_layers too)\n\
                 prefill, and no decode method: min_prefill_tokens=256 (shorter calls are dense), last_dense_rows=0\n\
                 prefill methods that choose by scores: gqa=per_query|union|mean (bfla: union, others: per_query)\n\
                 delta takes the settings of its base as base.key=value\n\
                 by layer: --selector 0-3=dense/4-=bfla:group=64 (dense reads every key; layers count from 0)\n";
        text
    }

    /// All keys of the method with their values, as `--selector` reads them.
    fn own_items(&self) -> Vec<(String, String)> {
        let own = self.method.settings().into_iter().map(|(key, value)| (key, text_of(&value)));
        let base = match &self.method {
            Method::Delta(_, base) => base.all_items(),
            _ => Vec::new(),
        };
        let base = base.into_iter().map(|(key, value)| (format!("base.{key}"), value));
        own.chain(base).collect()
    }

    pub(super) fn all_items(&self) -> Vec<(String, String)> {
        let used = self.common_keys();
        let common = common_items(&self.common).filter(|item| used.contains(&item.0.as_str()));
        self.own_items().into_iter().chain(common).collect()
    }
}

/// Writes every key with its value, which [`Selector::parse`] reads back.
impl fmt::Display for Selector {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let items = self.all_items().into_iter().filter(|(_, value)| !value.is_empty());
        out.write_str(&text_of_items(self.name(), items))
    }
}

/// Reads the method's own keys and takes them out of the list; also reads the files that settings name.
fn method_of(name: &str, items: &mut Vec<Item<'_>>) -> Result<Method, SelectError> {
    let Some(mut method) = Method::read(name, items)? else {
        let names = ENTRIES.iter().map(|entry| entry.name);
        let known: Vec<&'static str> = names.chain(["dense"]).collect();
        let problem = format!("there is no selector {name:?}{}", did_you_mean(name, &known));
        let hint = format!("the selectors are {}", known.join(", "));
        return Err(SelectError::refused(problem, hint));
    };
    match &mut method {
        Method::Xattention(config) if !config.taus.is_empty() => config.head_taus = read_taus(Path::new(&config.taus))?,
        Method::Minference(config) if !config.pattern.is_empty() => {
            config.patterns = PatternFile::read(Path::new(&config.pattern))?;
        }
        Method::Dam(config) if !config.map.is_empty() => config.maps = Some(DamMaps::read(Path::new(&config.map))?),
        Method::Dma(config) if !config.scores.is_empty() => {
            config.weights = Some(DmaWeights::read(Path::new(&config.scores))?);
        }
        _ => {}
    }
    Ok(method)
}

/// Reads delta and its base, whose settings are given as `base.key=value`.
pub(super) fn delta(items: &mut Vec<Item<'_>>) -> Result<Method, SelectError> {
    let (base_items, rest): (Vec<Item<'_>>, Vec<Item<'_>>) =
        items.drain(..).partition(|item| item.0.starts_with("base."));
    *items = rest;
    let config: DeltaConfig = own("delta", items)?;
    let keys: Vec<String> =
        base_items.iter().map(|(key, value)| format!("{}={value}", key.trim_start_matches("base."))).collect();
    let base = Selector::parse(&format!("{}:{}", config.base, keys.join(",")))?;
    let reason = match &base.method {
        Method::Delta(..) | Method::Momo(_) => Some("it corrects itself"),
        _ if base.is_token_by_token() => Some("it processes a prompt token by token"),
        Method::BaAtt(config) if !config.causal => Some("with causal=false it reads later tokens, and probes do not"),
        _ => None,
    };
    if let Some(reason) = reason {
        return Rules("delta").fail(
            format!("base={} cannot be corrected: {reason}", config.base),
            "use a causal prefill method other than momo and delta",
        );
    }
    Ok(Method::Delta(config, Box::new(base)))
}

/// The defaults of the settings that all methods have.
fn method_common(name: &str) -> Common {
    Common {
        min_prefill_tokens: 256,
        first_dense_layers: if matches!(name, "momo" | "infinitehip") { 3 } else { 0 },
        last_dense_rows: 0,
        gqa: if name == "bfla" { GqaPolicy::Union } else { GqaPolicy::PerQuery },
    }
}

/// Reads the fields of a settings struct from `items` and takes them out of the list.
pub(super) fn own<T: Default + Serialize + DeserializeOwned>(
    name: &str,
    items: &mut Vec<Item<'_>>,
) -> Result<T, SelectError> {
    let defaults = fields(&T::default());
    let (mine, rest): (Vec<Item<'_>>, Vec<Item<'_>>) = items.drain(..).partition(|item| defaults.contains_key(item.0));
    *items = rest;
    read(name, &mine, defaults)
}

fn common_items(common: &Common) -> impl Iterator<Item = (String, String)> + use<> {
    fields(common).into_iter().map(|(key, value)| (key, text_of(&value)))
}

/// The keys and values of a settings struct, which is always a JSON object.
pub(super) fn fields(settings: &impl Serialize) -> Map<String, Value> {
    match serde_json::to_value(settings) {
        Ok(Value::Object(map)) => map,
        _ => Map::new(),
    }
}

/// The values in `map`, overwritten by the given ones.
fn read<T: DeserializeOwned>(name: &str, items: &[Item<'_>], mut map: Map<String, Value>) -> Result<T, SelectError> {
    let wrong = |key, value, problem: String| SelectError::form(name, &format!("{key}={value}"), &problem);
    for &(key, text) in items {
        let default = map.get(key).cloned().unwrap_or(Value::Null);
        let value = value_of(text, &default).map_err(|problem| wrong(key, text, problem))?;
        // One value at a time, so that the message names the faulty key.
        let mut one = map.clone();
        one.insert(key.to_owned(), value.clone());
        if let Err(error) = serde_json::from_value::<T>(Value::Object(one)) {
            return Err(wrong(key, text, error.to_string()));
        }
        map.insert(key.to_owned(), value);
    }
    serde_json::from_value(Value::Object(map)).map_err(|error| wrong("", "", error.to_string()))
}

/// Parses a value as the type of its default. A key whose default is none takes a number or `none`.
fn value_of(text: &str, default: &Value) -> Result<Value, String> {
    let float = |text: &str| {
        let number = text.parse::<f64>().ok().and_then(Number::from_f64);
        number.map(Value::Number).ok_or_else(|| "expected a number".to_owned())
    };
    let whole = |text: &str| text.parse::<u64>().map(Value::from).map_err(|_| "expected a whole number".to_owned());
    match default {
        Value::Number(number) if number.is_f64() => float(text),
        Value::Number(_) => whole(text),
        Value::Bool(_) => text.parse().map(Value::Bool).map_err(|_| "expected true or false".to_owned()),
        Value::Null if text == "none" => Ok(Value::Null),
        Value::Null => whole(text).or_else(|_| float(text)),
        _ => Ok(Value::String(text.to_owned())),
    }
}

/// Writes `NAME:key=value,…`, or only the name if there are no items.
pub(super) fn text_of_items(name: &str, items: impl IntoIterator<Item = (String, String)>) -> String {
    let items: Vec<String> = items.into_iter().map(|(key, value)| format!("{key}={value}")).collect();
    if items.is_empty() { name.to_owned() } else { format!("{name}:{}", items.join(",")) }
}

/// A value as `--selector` reads it.
fn text_of(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => "none".to_owned(),
        // Whole numbers without a fraction: 64, not 64.0.
        Value::Number(number) => number.to_string().trim_end_matches(".0").to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_selector_prints_what_it_reads() {
        for entry in ENTRIES {
            let selector = Selector::parse(entry.name).expect("defaults are valid");
            assert_eq!(selector.name(), entry.name);
            let text = selector.to_string();
            assert_eq!(Selector::parse(&text).expect("what it prints it reads"), selector, "{text}");
        }
    }

    #[test]
    fn values_reach_their_settings() {
        let selector = Selector::parse("pbs:select=xattention, tau=0.8,segment=512,gqa=union").expect("valid");
        let Method::Pbs(config) = &selector.method else {
            panic!("another method");
        };
        assert_eq!((config.tau, config.segment), (0.8, 512));
        assert_eq!(config.select, crate::prefill::pbs::PbsSelect::Xattention);
        assert_eq!(selector.common.gqa, GqaPolicy::Union);
        let selector = Selector::parse("delta:base=a_shape,base.n_local=77,gamma=8").expect("valid");
        assert!(selector.to_string().contains("base.n_local=77"));
        let moved = selector.with("gamma", "4").and_then(|s| s.with("base.n_init", "3")).expect("valid").to_string();
        assert!(moved.contains("gamma=4") && moved.contains("base.n_local=77") && moved.contains("base.n_init=3"));
        assert!(selector.with("gama", "4").is_err());
        let selector = Selector::parse("meanpool:top_k=5").expect("valid");
        assert!(selector.to_string().contains("top_k=5"));
    }

    #[test]
    fn a_key_that_would_change_nothing_is_refused_and_not_printed() {
        for (text, key) in [
            ("quest:gqa=mean", "gqa"),
            ("exact_top:k=5,gqa=union", "gqa"),
            ("h2o:last_dense_rows=400", "last_dense_rows"),
            ("snapkv:min_prefill_tokens=0", "min_prefill_tokens"),
            ("a_shape:gqa=union", "gqa"),
            ("delta:gqa=mean", "gqa"),
            ("minference:gqa=per_query", "gqa"),
            ("streamingllm:reindex=true,last_dense_rows=5", "last_dense_rows"),
        ] {
            let name = text.split(':').next().unwrap_or(text);
            let error = Selector::parse(text).expect_err(text).to_string();
            let wanted = format!("{name} takes no {key}: it would change nothing\n  hint: its keys are ");
            assert!(error.starts_with(&wanted), "{error}");
            let keys = error.trim_start_matches(&wanted).split(", ");
            assert!(keys.clone().count() > 1 && !keys.clone().any(|known| known == key), "{error}");
        }
        // `parse` accepts the common keys that a selector prints, and refuses the others.
        for entry in ENTRIES {
            let printed = Selector::parse(entry.name).expect("defaults").to_string();
            for (key, value) in common_items(&method_common("bfla")) {
                let taken = Selector::parse(&format!("{}:{key}={value}", entry.name));
                let is_printed = printed.split([':', ',']).any(|item| item.starts_with(&format!("{key}=")));
                assert_eq!(taken.is_ok(), is_printed, "{}: {key}", entry.name);
            }
        }
    }

    #[test]
    fn help_lists_every_name_with_its_keys() {
        let help = Selector::help();
        for entry in ENTRIES {
            assert!(help.contains(entry.name) && help.contains(entry.paper), "{}", entry.name);
        }
        assert!(help.contains("tau=0.9"));
    }
}
