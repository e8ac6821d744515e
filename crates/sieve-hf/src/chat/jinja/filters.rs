//! Filters of jinja2, and `tojson` of `transformers`.

use super::fault::{Fallible, Fault};
use super::lexer::is_space;
use super::printf;
use super::python::{Json, repr, text};
use super::render::{Given, Renderer};
use super::value::Value;

/// Names of the filters that are here.
pub(super) const FILTERS: [&str; 48] = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "wordcount",
    "pprint",
];

impl Renderer<'_> {
    /// `value | name(given)`
    ///
    /// # Errors
    /// A filter that is not known, or refuses the value or its arguments.
    pub(super) fn filter(&mut self, name: &str, value: Value, given: Given) -> Fallible<Value> {
        self.budget.steps(1)?;
        match name {
            "default" | "d" => {
                let [default, by_truth] = given.bind(name, ["default_value", "boolean"])?;
                let is_missing = value.is_undefined() || by_truth.is_some_and(|by| by.is_true()) && !value.is_true();
                if is_missing { default.map_or_else(|| Value::text("", self.budget), Ok) } else { Ok(value) }
            }
            "abs" | "round" | "int" | "float" => self.number_filter(name, &value, given),
            "attr" => {
                let [attribute] = given.bind(name, ["name"])?;
                match (&value, text(&attribute.unwrap_or(Value::None), self.budget)?) {
                    (Value::Dict(_), name) if !Self::has_method(&value, &name) => {
                        Ok(Value::undefined(format!("a dictionary has no attribute {name}")))
                    }
                    (_, name) => self.attribute(&value, &name),
                }
            }
            "length" | "count" => {
                let [] = given.bind(name, [])?;
                self.length(&value)
            }
            "string" | "safe" => {
                let [] = given.bind(name, [])?;
                if matches!(value, Value::Text(_)) { Ok(value) } else { Ok(Value::made(text(&value, self.budget)?)) }
            }
            "tojson" => self.tojson(&value, given),
            "format" => {
                let format = text(&value, self.budget)?;
                if given.named.is_empty() {
                    let values = Value::tuple(given.args, self.budget)?;
                    return Ok(Value::made(printf::percent(&format, &values, self.budget)?));
                }
                let pairs = given.named.into_iter().map(|(name, value)| Ok((Value::text(&name, self.budget)?, value)));
                let values = Value::dict(pairs.collect::<Fallible<_>>()?, self.budget)?;
                Ok(Value::made(printf::percent(&format, &values, self.budget)?))
            }
            "upper" | "lower" | "capitalize" | "title" | "trim" | "replace" | "indent" | "center" | "truncate"
            | "wordcount" | "escape" | "e" | "forceescape" | "urlencode" => self.text_filter(name, &value, given),
            name if FILTERS.contains(&name) => self.list_filter(name, value, given),
            _ => {
                let name: String = name.chars().take(40).collect();
                Err(Fault::refused(format!("the filter {name} is not known")))
            }
        }
    }

    /// Python's `len`.
    pub(super) fn length(&self, value: &Value) -> Fallible<Value> {
        if let Value::Text(text) = value {
            self.budget.scan(text.text.len())?;
        }
        value.len().map(Value::from).ok_or_else(|| Fault::refused(format!("a {} has no length", value.kind())))
    }

    /// `abs`, `round`, `int` or `float`. For the last two, what is no number becomes the argument `default`, or 0
    /// without it.
    fn number_filter(&mut self, name: &str, value: &Value, given: Given) -> Fallible<Value> {
        match name {
            "abs" => {
                let [] = given.bind(name, [])?;
                match value.defined()? {
                    Value::Float(value) => Ok(Value::Float(value.abs())),
                    other => other.as_int().and_then(i128::checked_abs).map(Value::Int).ok_or_else(no_number),
                }
            }
            "round" => self.round(value, given),
            "int" => {
                let [default, base] = given.bind(name, ["default", "base"])?;
                let base = base.and_then(|base| base.as_int()).unwrap_or(10);
                let base = u32::try_from(base).ok().filter(|base| (2..=36).contains(base)).ok_or_else(no_number)?;
                let of_float = |value: f64| value.is_finite().then(|| value.trunc() as i128);
                let found = match value.defined()? {
                    Value::Text(text) => {
                        self.budget.scan(text.text.len())?;
                        printf::whole_of(&text.text, base).or_else(|| printf::float_of(&text.text).and_then(of_float))
                    }
                    Value::Float(value) => of_float(*value),
                    other => other.as_int(),
                };
                Ok(found.map(Value::Int).or(default).unwrap_or(Value::Int(0)))
            }
            _ => {
                let [default] = given.bind(name, ["default"])?;
                let found = match value.defined()? {
                    Value::Text(text) => {
                        self.budget.scan(text.text.len())?;
                        printf::float_of(&text.text)
                    }
                    other => other.as_float(),
                };
                Ok(found.map(Value::Float).or(default).unwrap_or(Value::Float(0.0)))
            }
        }
    }

    /// Rounds to `precision` digits behind the point, or before it where that is negative: to the nearest, or by
    /// `method` up or down. Only to the nearest a whole number stays one.
    fn round(&mut self, value: &Value, given: Given) -> Fallible<Value> {
        let [precision, method] = given.bind("round", ["precision", "method"])?;
        let precision = precision.map_or(Some(0), |precision| precision.as_int()).ok_or_else(no_number)?;
        let precision = precision.clamp(-400, 400) as i32;
        let number = value.defined()?.as_float().ok_or_else(no_number)?;
        let scale = 10f64.powi(precision);
        match method.as_ref().map_or(Some("common"), Value::as_str) {
            Some("common") => match value.as_int() {
                Some(whole) if precision >= 0 => Ok(Value::Int(whole)),
                Some(_) => Ok(Value::Int(printf::rounded(number, precision) as i128)),
                None => Ok(Value::Float(printf::rounded(number, precision))),
            },
            Some("ceil") => Ok(Value::Float((number * scale).ceil() / scale)),
            Some("floor") => Ok(Value::Float((number * scale).floor() / scale)),
            _ => Err(Fault::refused("round takes the method common, ceil or floor")),
        }
    }

    /// JSON without HTML's escapes, as `transformers` writes it. `indent` is a number of spaces or a text, `separators`
    /// the texts between items and behind a key.
    fn tojson(&mut self, value: &Value, given: Given) -> Fallible<Value> {
        let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
        let [ensure_ascii, indent, separators, sort_keys] = given.bind("tojson", names)?;
        let indent = match indent {
            None | Some(Value::None) => None,
            Some(Value::Text(indent)) => Some(indent.text.clone()),
            Some(count) => {
                let count = count.as_int().ok_or_else(no_number)?.max(0);
                let count = usize::try_from(count).unwrap_or(usize::MAX);
                self.budget.text(count)?;
                Some(" ".repeat(count))
            }
        };
        let separators = match separators {
            None | Some(Value::None) => [if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()],
            Some(two) => match two.items(self.budget)?.as_slice() {
                [Value::Text(item), Value::Text(key)] => [item.text.clone(), key.text.clone()],
                _ => return Err(Fault::refused("separators are two strings")),
            },
        };
        let is_true = |value: Option<Value>| value.is_some_and(|value| value.is_true());
        let (ensure_ascii, sort_keys) = (is_true(ensure_ascii), is_true(sort_keys));
        let writer = Json { indent, separators, sort_keys, ensure_ascii, budget: self.budget };
        let mut out = String::new();
        writer.write(value.defined()?, 0, &mut out)?;
        Ok(Value::made(out))
    }

    /// A filter of a text; any other value is first printed, but `urlencode` refuses it.
    fn text_filter(&mut self, name: &str, value: &Value, given: Given) -> Fallible<Value> {
        let found = text(value, self.budget)?;
        // A letter of another case may take thrice the bytes.
        self.budget.text(3 * found.len())?;
        let made = match name {
            "upper" => found.to_uppercase(),
            "lower" => found.to_lowercase(),
            "capitalize" => capitalized(&found),
            "title" => title(&found),
            "escape" | "e" | "forceescape" => {
                self.budget.text(5 * found.len())?;
                escaped(&found)
            }
            "urlencode" if matches!(value, Value::Text(_)) => percent_encoded(&found),
            "urlencode" => return Err(Fault::refused("urlencode takes a string")),
            "wordcount" => {
                let words = found.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty());
                return Ok(Value::from(words.count()));
            }
            "trim" => {
                let [chars] = given.bind(name, ["chars"])?;
                return match chars {
                    None | Some(Value::None) => Value::text(found.trim_matches(is_space), self.budget),
                    Some(chars) => {
                        let chars = text(&chars, self.budget)?;
                        self.budget.steps(found.len() * chars.len() / 16)?;
                        Value::text(found.trim_matches(|c| chars.contains(c)), self.budget)
                    }
                };
            }
            "replace" => {
                let [old, new, count] = given.bind(name, ["s", "new", "count"])?;
                let (Some(old), Some(new)) = (old, new) else {
                    return Err(Fault::refused("replace takes two strings"));
                };
                let [old, new] = [text(&old, self.budget)?, text(&new, self.budget)?];
                let count = count.filter(|count| !matches!(count, Value::None)).map(|count| count.as_int());
                return self.replaced(&found, [&old, &new], count.flatten());
            }
            "indent" => return self.indent(&found, given),
            "center" => {
                let [width] = given.bind(name, ["width"])?;
                let width = width.map_or(Some(80), |width| width.as_int()).ok_or_else(no_number)?;
                return self.padded(&found, width, ' ', "center");
            }
            _ => return self.truncate(&found, given),
        };
        let [] = given.bind(name, [])?;
        Ok(Value::made(made))
    }

    /// Python's `text.replace(old, new, count)`.
    pub(super) fn replaced(&self, found: &str, [old, new]: [&str; 2], count: Option<i128>) -> Fallible<Value> {
        let most = count.filter(|count| *count >= 0).map_or(usize::MAX, |count| usize::try_from(count).unwrap_or(0));
        self.budget.scan(found.len())?;
        let places = if old.is_empty() { found.chars().count() + 1 } else { found.matches(old).count() };
        self.budget.text(found.len().saturating_add(places.min(most).saturating_mul(new.len())))?;
        self.budget.steps(places.min(most))?;
        Ok(Value::made(found.replacen(old, new, most)))
    }

    /// Puts `width` spaces, or the text `width`, before each line; before the first only with `first`, before empty
    /// ones only with `blank`.
    fn indent(&mut self, found: &str, given: Given) -> Fallible<Value> {
        let [width, first, blank] = given.bind("indent", ["width", "first", "blank"])?;
        let unit = match width {
            Some(Value::Text(unit)) => unit.text.clone(),
            width => {
                let width = width.map_or(Some(4), |width| width.as_int()).ok_or_else(no_number)?;
                let width = usize::try_from(width.max(0)).unwrap_or(usize::MAX);
                self.budget.text(width)?;
                " ".repeat(width)
            }
        };
        let [first, blank] = [first, blank].map(|flag| flag.is_some_and(|flag| flag.is_true()));
        let lines = lines(&format!("{found}\n"), false);
        self.budget.text(found.len().saturating_add(lines.len().saturating_add(1).saturating_mul(unit.len() + 1)))?;
        self.budget.steps(lines.len())?;
        let mut out = String::new();
        for (n, line) in lines.iter().enumerate() {
            if n > 0 {
                out.push('\n');
            }
            if if n == 0 { first } else { blank || !line.is_empty() } {
                out += &unit;
            }
            out += line;
        }
        Ok(Value::made(out))
    }

    /// Cuts a text of more than `length + leeway` characters to `length`, `end` included; at its last space unless
    /// `killwords`.
    fn truncate(&mut self, found: &str, given: Given) -> Fallible<Value> {
        let [length, kills_words, end, leeway] = given.bind("truncate", ["length", "killwords", "end", "leeway"])?;
        let count = |value: Option<Value>, default: i128| match value {
            None | Some(Value::None) => Ok(default as usize),
            Some(value) => value.as_int().and_then(|value| usize::try_from(value).ok()).ok_or_else(no_number),
        };
        let end = end.map_or(Ok("...".to_owned()), |end| text(&end, self.budget))?;
        let (length, leeway) = (count(length, 255)?, count(leeway, 5)?);
        let num_chars = found.chars().count();
        if num_chars <= length.saturating_add(leeway) {
            return Value::text(found, self.budget);
        }
        let kept = length.checked_sub(end.chars().count()).ok_or_else(no_number)?;
        let cut: String = found.chars().take(kept).collect();
        let cut = match cut.rsplit_once(' ') {
            Some((words, _)) if !kills_words.is_some_and(|kills| kills.is_true()) => words.to_owned(),
            _ => cut,
        };
        Ok(Value::made(cut + &end))
    }

    /// A text with `fill` before it, behind it, or on both sides.
    pub(super) fn padded(&self, found: &str, width: i128, fill: char, side: &str) -> Fallible<Value> {
        let width = usize::try_from(width.max(0)).unwrap_or(usize::MAX);
        self.budget.scan(found.len())?;
        let missing = width.saturating_sub(found.chars().count());
        self.budget.text(missing.saturating_mul(fill.len_utf8()).saturating_add(found.len()))?;
        let pad = |count: usize| fill.to_string().repeat(count);
        let before = match side {
            "ljust" => 0,
            "rjust" => missing,
            // Python puts the odd one before the text if the width is odd too.
            _ => missing / 2 + (missing & width & 1),
        };
        Ok(Value::made(format!("{}{found}{}", pad(before), pad(missing - before))))
    }

    /// Python's `repr` for `pprint`, where it takes one line.
    pub(super) fn one_line(&self, value: &Value) -> Fallible<Value> {
        let found = repr(value, self.budget)?;
        if found.chars().count() > 80 {
            return Err(Fault::refused("pprint writes more than one line"));
        }
        Ok(Value::made(found))
    }
}

pub(super) fn no_number() -> Box<Fault> {
    Fault::refused("a filter or method takes a number where it has none, or a smaller one")
}

/// Python's `capitalize`.
pub(super) fn capitalized(found: &str) -> String {
    let mut chars = found.chars();
    let first = chars.next().map(title_case).unwrap_or_default();
    first + &chars.as_str().to_lowercase()
}

/// A letter at the beginning of a title: of two letters in one only the first is a capital.
pub(super) fn title_case(c: char) -> String {
    match c {
        'Ǆ' | 'ǅ' | 'ǆ' => "ǅ".to_owned(),
        'Ǉ' | 'ǈ' | 'ǉ' => "ǈ".to_owned(),
        'Ǌ' | 'ǋ' | 'ǌ' => "ǋ".to_owned(),
        'Ǳ' | 'ǲ' | 'ǳ' => "ǲ".to_owned(),
        c => {
            let mut upper = c.to_uppercase();
            let first = upper.next().map(String::from).unwrap_or_default();
            first + &upper.flat_map(char::to_lowercase).collect::<String>()
        }
    }
}

/// The filter `title` of Jinja: an apostrophe does not begin a word.
fn title(found: &str) -> String {
    let mut begins = true;
    let mut titled = String::with_capacity(found.len());
    for c in found.chars() {
        if begins {
            titled.extend(c.to_uppercase());
        } else {
            titled.extend(c.to_lowercase());
        }
        begins = is_space(c) || "-({[<".contains(c);
    }
    titled
}

/// The text with HTML's escapes, as jinja2 writes them.
fn escaped(found: &str) -> String {
    let mut out = String::with_capacity(found.len());
    for c in found.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '\'' => out += "&#39;",
            '"' => out += "&#34;",
            c => out.push(c),
        }
    }
    out
}

fn percent_encoded(found: &str) -> String {
    let is_kept = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-~/".contains(&byte);
    let shown = |byte: u8| if is_kept(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    found.bytes().map(shown).collect()
}

/// Python's `splitlines`.
pub(super) fn lines(found: &str, keeps_ends: bool) -> Vec<String> {
    let (mut lines, mut line) = (Vec::new(), String::new());
    let mut chars = found.chars().peekable();
    while let Some(c) = chars.next() {
        let ends = matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}');
        if !ends || keeps_ends {
            line.push(c);
        }
        if ends {
            if c == '\r' && chars.peek() == Some(&'\n') {
                chars.next();
                if keeps_ends {
                    line.push('\n');
                }
            }
            lines.push(std::mem::take(&mut line));
        }
    }
    if !line.is_empty() {
        lines.push(line);
    }
    lines
}
