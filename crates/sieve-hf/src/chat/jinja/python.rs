//! Values as Python prints them and writes them as JSON.

use super::fault::{Budget, Fallible, Fault};
use super::value::{Value, range_len};
use std::fmt::Write;

/// Bytes that a byte of a text takes at most where it is escaped.
const LONGEST_ESCAPE: usize = 6;

/// Python's `str` of a value: what a template prints of it.
///
/// # Errors
/// A value whose text would be a place in memory, such as a generator.
pub(super) fn text(value: &Value, budget: &Budget) -> Fallible<String> {
    match value {
        Value::Text(text) => {
            budget.text(text.text.len())?;
            Ok(text.text.clone())
        }
        Value::Undefined(_) => Ok(String::new()),
        other => repr(other, budget),
    }
}

/// Python's `repr` of a value.
///
/// # Errors
/// As [`text`].
pub(super) fn repr(value: &Value, budget: &Budget) -> Fallible<String> {
    let mut out = String::new();
    write_repr(value, &mut out, budget)?;
    Ok(out)
}

/// Appends Python's `repr` of a value to `out`, and takes its bytes from the budget.
fn write_repr(value: &Value, out: &mut String, budget: &Budget) -> Fallible<()> {
    let before = out.len();
    match value {
        Value::Undefined(_) => out.push_str("Undefined"),
        Value::None => out.push_str("None"),
        Value::Bool(value) => out.push_str(if *value { "True" } else { "False" }),
        Value::Int(value) => *out += &value.to_string(),
        Value::Float(value) => *out += &float(*value),
        Value::Text(text) => {
            budget.text(text.text.len().saturating_mul(LONGEST_ESCAPE))?;
            quoted(&text.text, out);
            return Ok(());
        }
        Value::List(items) => return write_items(["[", "]"], &items.items, out, budget),
        Value::Tuple(items) if items.items.len() == 1 => return write_items(["(", ",)"], &items.items, out, budget),
        Value::Tuple(items) => return write_items(["(", ")"], &items.items, out, budget),
        Value::View(name, items) => {
            *out += name;
            return write_items(["([", "])"], &items.items, out, budget);
        }
        Value::Dict(dict) => {
            budget.text(2 + 4 * dict.pairs.len())?;
            out.push('{');
            for (n, (key, value)) in dict.pairs.iter().enumerate() {
                out.push_str(if n > 0 { ", " } else { "" });
                write_repr(key, out, budget)?;
                out.push_str(": ");
                write_repr(value, out, budget)?;
            }
            out.push('}');
            return Ok(());
        }
        Value::Range(range) => {
            let [start, end, step] = **range;
            let step = if step == 1 { String::new() } else { format!(", {step}") };
            *out += &format!("range({start}, {end}{step})");
        }
        other => return Err(Fault::refused(format!("a {} has no text of its own", other.kind()))),
    }
    budget.text(out.len() - before)?;
    budget.steps(1)
}

/// Appends the `repr` of each item, with commas between them, inside two brackets; the closing one of a tuple of one
/// begins with a comma.
fn write_items([open, close]: [&str; 2], items: &[Value], out: &mut String, budget: &Budget) -> Fallible<()> {
    budget.text(open.len() + close.len() + 2 * items.len())?;
    budget.steps(1)?;
    out.push_str(open);
    for (n, item) in items.iter().enumerate() {
        out.push_str(if n > 0 { ", " } else { "" });
        write_repr(item, out, budget)?;
    }
    out.push_str(close);
    Ok(())
}

/// A string in Python's quotation marks.
fn quoted(text: &str, out: &mut String) {
    let mark = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(mark);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == mark => out.extend(['\\', c]),
            c if is_printable(c) => out.push(c),
            c => {
                let code = u32::from(c);
                // Writing to a string cannot fail.
                let _ = match code {
                    0..=0xff => write!(out, "\\x{code:02x}"),
                    0x100..=0xffff => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    out.push(mark);
}

/// Whether Python prints a character as it is: `escape_debug` escapes the same ones, once a letter is before them.
fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return (' '..='~').contains(&c);
    }
    let shown: String = format!("a{c}").escape_debug().collect();
    !shown.contains("\\u{")
}

/// Python's `repr` of a float: the shortest digits, with an exponent below 1e-4 and from 1e16.
pub(super) fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if value != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = format!("{value}");
    if plain.contains('.') { plain } else { plain + ".0" }
}

/// How a value is written as JSON.
pub(super) struct Json<'a> {
    pub(super) indent: Option<String>,
    /// Between two items, and between a key and its value.
    pub(super) separators: [String; 2],
    pub(super) sort_keys: bool,
    pub(super) ensure_ascii: bool,
    pub(super) budget: &'a Budget,
}

impl Json<'_> {
    /// Appends a value to `out`; `depth` lists or dictionaries hold it.
    ///
    /// # Errors
    /// A value that JSON has not, or more text than the budget has.
    pub(super) fn write(&self, value: &Value, depth: usize, out: &mut String) -> Fallible<()> {
        self.budget.steps(1)?;
        let before = out.len();
        match value {
            Value::None => out.push_str("null"),
            Value::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
            Value::Int(value) => *out += &value.to_string(),
            Value::Float(value) => *out += &json_float(*value),
            Value::Text(text) => {
                self.budget.text(text.text.len().saturating_mul(LONGEST_ESCAPE))?;
                self.quoted(&text.text, out);
                return Ok(());
            }
            Value::List(items) | Value::Tuple(items) => {
                return self
                    .list(['[', ']'], items.items.iter(), depth, out, |item, out| self.write(item, depth + 1, out));
            }
            Value::Dict(dict) => {
                let mut pairs = dict.pairs.iter().map(|(key, value)| (key, value)).collect::<Vec<_>>();
                if self.sort_keys {
                    if let Some((key, _)) = pairs.iter().find(|(key, _)| key.as_str().is_none()) {
                        return Err(Fault::refused(format!("keys that are sorted are strings, not a {}", key.kind())));
                    }
                    self.budget.steps(8 * pairs.len())?;
                    pairs.sort_by_key(|(key, _)| key.as_str());
                }
                return self.list(['{', '}'], pairs.into_iter(), depth, out, |(key, item), out| {
                    self.key(key, out)?;
                    *out += &self.separators[1];
                    self.write(item, depth + 1, out)
                });
            }
            other => return Err(Fault::refused(format!("a {} is not JSON", other.kind()))),
        }
        self.budget.text(out.len() - before)
    }

    /// Appends a dictionary's key as a JSON string, in which Python also writes null, booleans and numbers.
    fn key(&self, key: &Value, out: &mut String) -> Fallible<()> {
        let text = match key {
            Value::Text(text) => text.text.clone(),
            Value::None => "null".to_owned(),
            Value::Bool(value) => value.to_string(),
            Value::Int(value) => value.to_string(),
            Value::Float(value) => json_float(*value),
            other => return Err(Fault::refused(format!("a {} is not a key of JSON", other.kind()))),
        };
        self.budget.text(text.len().saturating_mul(LONGEST_ESCAPE))?;
        self.quoted(&text, out);
        Ok(())
    }

    /// Writes items between two brackets, each on a line of its own with `indent`.
    fn list<T>(
        &self,
        [open, close]: [char; 2],
        items: impl ExactSizeIterator<Item = T>,
        depth: usize,
        out: &mut String,
        write: impl Fn(T, &mut String) -> Fallible<()>,
    ) -> Fallible<()> {
        let is_empty = items.len() == 0;
        let line = |depth: usize, out: &mut String| -> Fallible<()> {
            if let Some(indent) = self.indent.as_ref().filter(|_| !is_empty) {
                self.budget.text(indent.len().saturating_mul(depth) + 1)?;
                out.push('\n');
                *out += &indent.repeat(depth);
            }
            Ok(())
        };
        out.push(open);
        for (n, item) in items.enumerate() {
            if n > 0 {
                self.budget.text(self.separators[0].len())?;
                *out += &self.separators[0];
            }
            self.budget.text(self.separators[1].len())?;
            line(depth + 1, out)?;
            write(item, out)?;
        }
        line(depth, out)?;
        out.push(close);
        self.budget.text(2)
    }

    /// Appends a JSON string; `ensure_ascii` also escapes what is not printable ASCII, a character above U+FFFF as two
    /// surrogates.
    fn quoted(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\x08' => out.push_str("\\b"),
                '\x0c' => out.push_str("\\f"),
                c if c < ' ' || self.ensure_ascii && c > '~' => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        // Writing to a string cannot fail.
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// A float as Python's JSON has it: its `repr`, but `NaN` and `Infinity`, which JSON itself lacks.
fn json_float(value: f64) -> String {
    if value.is_nan() {
        "NaN".to_owned()
    } else if value.is_infinite() {
        if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned()
    } else {
        float(value)
    }
}

/// The place of an index that may count from the end; `None` beyond the list.
pub(super) fn place(index: i128, len: usize) -> Option<usize> {
    let index = if index < 0 { index + len as i128 } else { index };
    usize::try_from(index).ok().filter(|index| *index < len)
}

/// The places of a slice of `len` items.
///
/// # Errors
/// As [`slice_bounds`].
pub(super) fn slice_places(bounds: &[Value; 3], len: usize) -> Fallible<Vec<usize>> {
    let range = slice_bounds(bounds, len)?;
    Ok((0..range_len(&range) as i128).map(|n| (range[0] + n * range[2]) as usize).collect())
}

/// First place, end and step of a slice of `len` items.
///
/// # Errors
/// A bound that is no whole number, or a step of 0.
pub(super) fn slice_bounds(bounds: &[Value; 3], len: usize) -> Fallible<[i128; 3]> {
    let number = |value: &Value| match value {
        Value::None => Ok(None),
        value => {
            let wrong = || Fault::refused(format!("a slice has a {} as its bound", value.kind()));
            value.defined()?.as_int().map(Some).ok_or_else(wrong)
        }
    };
    let [start, end, step] = [number(&bounds[0])?, number(&bounds[1])?, number(&bounds[2])?];
    let (step, len) = (step.unwrap_or(1), len as i128);
    if step == 0 {
        return Err(Fault::refused("a slice has the step 0"));
    }
    let [least, most] = if step > 0 { [0, len] } else { [-1, len - 1] };
    let bound = |value: Option<i128>, default: i128| {
        value.map_or(default, |value| if value < 0 { value + len } else { value }.clamp(least, most))
    };
    let [from, to] = if step > 0 { [0, len] } else { [len - 1, -1] };
    Ok([bound(start, from), bound(end, to), step.clamp(-len - 1, len + 1)])
}
