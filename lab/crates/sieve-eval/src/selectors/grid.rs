//! Reads a grid of selectors from TOML: single selectors, and tables that stand for every combination of their values.
use crate::EvalError;
use serde::Deserialize;
use sieve_select::{LayerSelectors, SelectError};
use toml::{Table, Value};

/// The grids that come with the program: (name, TOML).
pub const READY_GRIDS: [(&str, &str); 6] = [
    ("bfla_table5", include_str!("../../grids/bfla_table5.toml")),
    ("momo_k", include_str!("../../grids/momo_k.toml")),
    ("momo_probes", include_str!("../../grids/momo_probes.toml")),
    ("pbs", include_str!("../../grids/pbs.toml")),
    ("ba_att", include_str!("../../grids/ba_att.toml")),
    ("all", include_str!("../../grids/all.toml")),
];

/// The contents of the TOML file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    selectors: Vec<String>,
    #[serde(default)]
    grid: Vec<Table>,
}

/// The selectors of a grid, in the order of the file, and the errors of combinations that a method's rules forbid.
///
/// # Errors
/// Invalid TOML; an unknown method or key; a table whose combinations are all forbidden.
pub fn selector_grid(file: &str, text: &str) -> Result<(Vec<LayerSelectors>, Vec<SelectError>), EvalError> {
    let wrong = |problem: String| {
        let hint = "write selectors = [\"NAME:key=value\", …], or [[grid]] with selector = \"NAME\" and key = \
            [value, …]";
        EvalError::refused(format!("{file}: {problem}"), hint)
    };
    let form: File = toml::from_str(text).map_err(|error| wrong(error.message().to_owned()))?;
    let (mut found, mut forbidden) = (Vec::new(), Vec::new());
    for text in &form.selectors {
        found.push(LayerSelectors::parse(text)?);
    }
    for table in &form.grid {
        let before = found.len();
        for text in crossed(table).map_err(wrong)? {
            match LayerSelectors::parse(&text) {
                Ok(selectors) => found.push(selectors),
                Err(error @ SelectError::Value { .. }) => forbidden.push(error),
                Err(error) => return Err(error.into()),
            }
        }
        if found.len() == before
            && let Some(error) = forbidden.pop()
        {
            return Err(error.into());
        }
    }
    if found.is_empty() { Err(wrong("it names no selector".to_owned())) } else { Ok((found, forbidden)) }
}

/// Every combination of a table's values, in the form that `--selector` reads. The last key varies fastest.
fn crossed(table: &Table) -> Result<Vec<String>, String> {
    let Some(Value::String(name)) = table.get("selector") else {
        return Err(if table.contains_key("method") {
            "a [[grid]] has method = \"NAME\", a key whose name is selector".to_owned()
        } else {
            "a [[grid]] has no selector = \"NAME\"".to_owned()
        });
    };
    let mut all = vec![String::new()];
    for (key, value) in table.iter().filter(|item| item.0 != "selector") {
        let values = match value {
            Value::Array(values) if values.is_empty() => return Err(format!("{key} of {name} has no value")),
            Value::Array(values) => &values[..],
            one => std::slice::from_ref(one),
        };
        let texts: Vec<String> = values
            .iter()
            .map(|value| written(value).map(|text| format!("{key}={text}")))
            .collect::<Option<_>>()
            .ok_or_else(|| format!("{key} of {name} is not a number, a string, true or false, or a list of these"))?;
        let with = |start: &String| -> Vec<String> {
            let comma = if start.is_empty() { "" } else { "," };
            let of = texts.iter().map(|text| format!("{start}{comma}{text}"));
            of.collect()
        };
        all = all.iter().flat_map(with).collect();
    }
    Ok(all.iter().map(|settings| format!("{name}:{settings}")).collect())
}

/// A value as `--selector` reads it; `None` for a list, a table or a date.
fn written(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Integer(number) => Some(number.to_string()),
        Value::Float(number) => Some(number.to_string()),
        Value::Boolean(truth) => Some(truth.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_crossed_and_what_a_method_forbids_is_left_out() {
        let text = "selectors = [\"0-1=dense/2-=meanpool:tau=0.5\"]\n[[grid]]\nselector = \"momo\"\n\
                    k = [4, 8]\nk_exact = [2, 8]\nscore = \"normalised\"\n[[grid]]\n\
                    selector = \"bfla\"\nkeep_mass = 0.9\n";
        let (found, forbidden) = selector_grid("a.toml", text).expect("a grid");
        let labels: Vec<String> = found.iter().map(LayerSelectors::label).collect();
        let momo = |rest: &str| format!("momo:{rest},score=normalised");
        let wanted = [
            "0-1=dense/2-=meanpool:tau=0.5".to_owned(),
            momo("k=4,k_exact=2"),
            momo("k=8,k_exact=2"),
            momo("k=8"),
            "bfla:keep_mass=0.9".to_owned(),
        ];
        assert_eq!(labels, wanted);
        assert_eq!(forbidden.len(), 1);
        assert!(forbidden[0].to_string().contains("k_exact=8 is more than k=4"));
    }

    #[test]
    fn every_ready_grid_parses_and_names_each_selector_once() {
        for (name, text) in READY_GRIDS {
            let (found, forbidden) = selector_grid(name, text).expect(name);
            assert!(found.len() >= 8, "{name}");
            let labels: Vec<String> = found.iter().map(LayerSelectors::label).collect();
            let is_first = |n: usize| !labels[..n].contains(&labels[n]);
            assert!((0..labels.len()).all(is_first), "{name}: {labels:?}");
            assert!(forbidden.len() < found.len(), "{name}");
        }
    }
}
