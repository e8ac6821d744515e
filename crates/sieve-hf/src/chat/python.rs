//! Values as Python prints them: in a template's text, and as JSON.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// A value as Python prints it, where this Jinja would print it otherwise; `None` for other values.
pub(super) fn printed(value: &Value) -> Option<String> {
    match value.kind() {
        ValueKind::Bool | ValueKind::None | ValueKind::Seq | ValueKind::Map => Some(repr(value)),
        _ => None,
    }
}

/// Python's `repr` of a value.
fn repr(value: &Value) -> String {
    let items = || value.try_iter().into_iter().flatten();
    match value.kind() {
        ValueKind::Bool if value.is_true() => "True".to_owned(),
        ValueKind::Bool => "False".to_owned(),
        ValueKind::None => "None".to_owned(),
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Seq => format!("[{}]", items().map(|item| repr(&item)).collect::<Vec<_>>().join(", ")),
        ValueKind::Map => {
            let pair = |key: Value| {
                let item = value.get_item(&key).unwrap_or_default();
                format!("{}: {}", repr(&key), repr(&item))
            };
            format!("{{{}}}", items().map(pair).collect::<Vec<_>>().join(", "))
        }
        _ => value.to_string(),
    }
}

/// A string in Python's quotation marks.
fn quoted(text: &str) -> String {
    let mark = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut quoted = String::from(mark);
    for c in text.chars() {
        match c {
            '\n' => quoted += "\\n",
            '\r' => quoted += "\\r",
            '\t' => quoted += "\\t",
            '\\' => quoted += "\\\\",
            c if c == mark => quoted.extend(['\\', c]),
            c => quoted.push(c),
        }
    }
    quoted.push(mark);
    quoted
}

/// The filter `tojson` of `transformers`: Python's `json.dumps` without escapes for letters beyond ASCII.
pub(super) fn json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let [ensure_ascii, sort_keys] = ["ensure_ascii", "sort_keys"].map(|name| options.get::<Option<bool>>(name));
    let (ensure_ascii, sort_keys) = (ensure_ascii?, sort_keys?);
    options.assert_all_used()?;
    let separators = match separators.as_deref() {
        Some([item, key]) => [item.clone(), key.clone()],
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "separators are two texts")),
        None if indent.is_some() => [",".to_owned(), ": ".to_owned()],
        None => [", ".to_owned(), ": ".to_owned()],
    };
    let writer = Json { indent, separators, sort_keys: sort_keys == Some(true) };
    let found = serde_json::to_value(value).map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()));
    let mut text = String::new();
    writer.write(&found?, 0, &mut text);
    if ensure_ascii == Some(true) {
        let units =
            |c: char| c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect::<String>();
        text = text.chars().map(|c| if c.is_ascii() { c.to_string() } else { units(c) }).collect();
    }
    Ok(Value::from(text))
}

/// The filter `title` of Jinja: an apostrophe does not begin a word.
pub(super) fn title(text: String) -> String {
    let mut begins = true;
    let mut titled = String::with_capacity(text.len());
    for c in text.chars() {
        match begins {
            true => titled.extend(c.to_uppercase()),
            false => titled.extend(c.to_lowercase()),
        }
        begins = c.is_whitespace() || "-({[<".contains(c);
    }
    titled
}

/// How a value is written as JSON.
struct Json {
    indent: Option<usize>,
    /// Between two items, and between a key and its value.
    separators: [String; 2],
    sort_keys: bool,
}

impl Json {
    /// Appends a value to `text`; `depth` lists or dictionaries hold it.
    fn write(&self, value: &serde_json::Value, depth: usize, text: &mut String) {
        match value {
            serde_json::Value::Array(items) => self.list(['[', ']'], items.iter(), depth, text, |item, text| {
                self.write(item, depth + 1, text);
            }),
            serde_json::Value::Object(object) => {
                let mut pairs: Vec<_> = object.iter().collect();
                if self.sort_keys {
                    pairs.sort_by_key(|(key, _)| *key);
                }
                self.list(['{', '}'], pairs.into_iter(), depth, text, |(key, item), text| {
                    *text += &serde_json::Value::from(key.as_str()).to_string();
                    *text += &self.separators[1];
                    self.write(item, depth + 1, text);
                });
            }
            plain => *text += &plain.to_string(),
        }
    }

    /// Writes items between two brackets, each on a line of its own with `indent`.
    fn list<T>(
        &self,
        [open, close]: [char; 2],
        items: impl ExactSizeIterator<Item = T>,
        depth: usize,
        text: &mut String,
        write: impl Fn(T, &mut String),
    ) {
        let is_empty = items.len() == 0;
        let line = |depth: usize, text: &mut String| {
            if let Some(indent) = self.indent.filter(|_| !is_empty) {
                text.push('\n');
                *text += &" ".repeat(indent * depth);
            }
        };
        text.push(open);
        for (n, item) in items.enumerate() {
            if n > 0 {
                *text += &self.separators[0];
            }
            line(depth + 1, text);
            write(item, text);
        }
        line(depth, text);
        text.push(close);
    }
}
