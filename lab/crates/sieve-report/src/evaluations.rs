//! Reads a run's `eval` folder: pictures, and JSON results (`sieve eval … --save`).
use crate::ReportError;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Bytes of a result, at most: an evaluation writes no larger file.
const MOST_BYTES: u64 = 16 << 20;
/// JSON arrays of more elements are not shown: they are lists of samples.
const MOST_ROWS: usize = 64;
/// Fields that may name an element of an array; the first one present is used.
const LABELS: [&str; 9] = ["task", "method", "selector", "name", "kind", "length", "tokens", "depth", "position"];

/// The scores in one JSON file of an evaluation.
#[derive(Debug)]
pub(crate) struct Scores {
    /// Name of the JSON file without `.json`.
    pub(crate) file: String,
    /// (path of the number in the JSON, number).
    pub(crate) rows: Vec<(String, f64)>,
    /// (path of an array of bins in the JSON, (first token of a bin, its value)): the loss by tokens seen, say.
    pub(crate) curves: Vec<(String, Vec<(f64, f64)>)>,
}

/// A picture of an evaluation, as a data URI.
#[derive(Debug)]
pub(crate) struct Picture {
    pub(crate) file: String,
    pub(crate) uri: String,
}

/// (name, path) of the files in `folder` with one of these extensions, sorted. Empty if the folder does not exist.
fn files(folder: &Path, endings: &[&str]) -> Result<Vec<(String, PathBuf)>, ReportError> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(ReportError::io(folder))? {
        let path = entry.map_err(ReportError::io(folder))?.path();
        let ending = path.extension().unwrap_or_default().to_string_lossy().into_owned();
        if !endings.contains(&ending.as_str()) || !path.is_file() {
            continue;
        }
        let bytes = path.metadata().map_err(ReportError::io(&path))?.len();
        if bytes > MOST_BYTES {
            let what = format!("{bytes} bytes are more than the {MOST_BYTES} of a result\n  hint: move it elsewhere");
            return Err(ReportError::content(&path, what));
        }
        found.push((path.file_name().unwrap_or_default().to_string_lossy().into_owned(), path));
    }
    found.sort();
    Ok(found)
}

/// The numbers in each JSON file of `folder`; empty if the folder does not exist.
pub(crate) fn scores(folder: &Path) -> Result<Vec<Scores>, ReportError> {
    let mut all = Vec::new();
    for (name, path) in files(folder, &["json"])? {
        let text = sieve_files::read_text(&path).map_err(ReportError::io(&path))?;
        let value: Value = serde_json::from_str(&text).map_err(|error| {
            ReportError::content(&path, format!("no JSON result: {error}\n  hint: write it with `sieve eval … --save`"))
        })?;
        let mut scores =
            Scores { file: name.trim_end_matches(".json").to_owned(), rows: Vec::new(), curves: Vec::new() };
        collect("", &value, &mut scores);
        all.push(scores);
    }
    Ok(all)
}

/// Adds the numbers below `value`, whose path in the JSON is `name`, to `scores`. Texts, booleans and long arrays are
/// left out.
fn collect(name: &str, value: &Value, scores: &mut Scores) {
    let below = |key: &str| {
        if name.is_empty() { key.to_owned() } else { format!("{name} / {key}") }
    };
    match value {
        Value::Number(number) => scores.rows.push((name.to_owned(), number.as_f64().unwrap_or(f64::NAN))),
        Value::Object(fields) => {
            for (key, value) in fields {
                collect(&below(key), value, scores);
            }
        }
        Value::Array(items) if items.len() <= MOST_ROWS => {
            let mut points = Vec::new();
            for (idx, item) in items.iter().enumerate() {
                // A bin with borders is shown as one row instead of one for each of its fields.
                if let Some((from, to, value)) = bin(item) {
                    scores.rows.push((below(&format!("{from} to {}", to - 1.0)), value));
                    points.push((from, value));
                    continue;
                }
                let label = LABELS.iter().find_map(|label| match &item[*label] {
                    Value::String(text) => Some(text.clone()),
                    Value::Number(number) => Some(format!("{label} {number}")),
                    _ => None,
                });
                collect(&below(&label.unwrap_or_else(|| (idx + 1).to_string())), item, scores);
            }
            if points.len() > 1 {
                scores.curves.push((name.to_owned(), points));
            }
        }
        _ => {}
    }
}

/// (first token, token after the last one, value) of a bin: the mean loss by tokens seen, or the accuracy by distance.
/// `None` if `item` is no bin.
fn bin(item: &Value) -> Option<(f64, f64, f64)> {
    let number = |key: &str| item[key].as_f64();
    let value = number("loss").or_else(|| number("accuracy"))?;
    Some((number("from")?, number("to")?, value))
}

/// The PNG and SVG files of `folder`; empty if the folder does not exist.
pub(crate) fn pictures(folder: &Path) -> Result<Vec<Picture>, ReportError> {
    let mut all = Vec::new();
    for (file, path) in files(folder, &["png", "svg"])? {
        let bytes = sieve_files::read_file(&path).map_err(ReportError::io(&path))?;
        let kind = if file.ends_with(".svg") { "svg+xml" } else { "png" };
        let uri = format!("data:image/{kind};base64,{}", STANDARD.encode(bytes));
        all.push(Picture { file, uri });
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn numbers_are_named_by_their_path_in_the_json() {
        let folder = tempfile::tempdir().unwrap();
        let json = r#"{"tasks":[{"task":"piqa","acc":0.5,"rows":[1]},{"task":"arc_easy","acc":0.25}],
            "loss":2.0,"text":"x","by":[{"length":64,"hit":1}],
            "by_position":[{"from":4,"to":8,"num_tokens":3,"loss":1.5},
            {"from":8,"to":16,"num_tokens":3,"loss":1.25}]}"#;
        fs::write(folder.path().join("tasks.json"), json).unwrap();
        fs::write(folder.path().join("notes.txt"), "x").unwrap();
        fs::write(folder.path().join("map.svg"), "<svg/>").unwrap();
        let all = scores(folder.path()).unwrap();
        assert_eq!(all.len(), 1);
        assert_eq!(all[0].file, "tasks");
        let rows: Vec<(&str, f64)> = all[0].rows.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        assert_eq!(
            rows,
            [
                ("tasks / piqa / acc", 0.5),
                ("tasks / piqa / rows / 1", 1.0),
                ("tasks / arc_easy / acc", 0.25),
                ("loss", 2.0),
                ("by / length 64 / length", 64.0),
                ("by / length 64 / hit", 1.0),
                ("by_position / 4 to 7", 1.5),
                ("by_position / 8 to 15", 1.25),
            ]
        );
        assert_eq!(all[0].curves, [("by_position".to_owned(), vec![(4.0, 1.5), (8.0, 1.25)])]);
        let pictures = pictures(folder.path()).unwrap();
        assert_eq!(
            (pictures[0].file.as_str(), pictures[0].uri.as_str()),
            ("map.svg", "data:image/svg+xml;base64,PHN2Zy8+")
        );
        assert!(scores(&folder.path().join("none")).unwrap().is_empty());
    }

    #[test]
    fn a_file_that_is_no_json_is_named() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("ppl.json"), "loss: 2").unwrap();
        let error = scores(folder.path()).unwrap_err().to_string();
        assert!(error.contains("ppl.json") && error.contains("--save"), "{error}");
    }
}
