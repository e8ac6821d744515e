//! Methods of Python's texts, lists and dictionaries, without those that change a value, as in the sandbox of jinja2.

use super::checks::is_in_case;
use super::fault::{Fallible, Fault};
use super::filters::{capitalized, lines, no_number, title_case};
use super::lexer::is_space;
use super::printf;
use super::python::slice_places;
use super::render::{Given, Renderer};
use super::value::Value;

const OF_TEXTS: [&str; 40] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "endswith",
    "find",
    "format",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "islower",
    "isnumeric",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "upper",
    "zfill",
];
const OF_LISTS: [&str; 11] =
    ["append", "clear", "copy", "count", "extend", "index", "insert", "pop", "remove", "reverse", "sort"];
const OF_DICTS: [&str; 10] =
    ["clear", "copy", "fromkeys", "get", "items", "keys", "pop", "setdefault", "update", "values"];

/// What numbers have in Python, none of which a chat needs: it is known, and refused where it is used.
const OF_NUMBERS: [&str; 6] = ["bit_length", "conjugate", "denominator", "imag", "numerator", "real"];

impl Renderer<'_> {
    /// Whether a value has a method of this name.
    pub(super) fn has_method(value: &Value, name: &str) -> bool {
        match value {
            Value::Text(_) => OF_TEXTS.contains(&name),
            Value::List(_) => OF_LISTS.contains(&name),
            Value::Tuple(_) | Value::Range(_) => ["count", "index"].contains(&name),
            Value::Dict(_) => OF_DICTS.contains(&name) || name == "popitem",
            Value::Cycler(_) => ["next", "reset"].contains(&name),
            Value::Float(_) => name == "is_integer" || OF_NUMBERS.contains(&name),
            Value::Int(_) | Value::Bool(_) => OF_NUMBERS.contains(&name),
            _ => false,
        }
    }

    /// `value.name(given)`
    ///
    /// # Errors
    /// A method that would change the value, or refuses its arguments.
    pub(super) fn method(&mut self, value: &Value, name: &str, given: Given) -> Fallible<Value> {
        self.budget.steps(1)?;
        match value {
            Value::Text(found) => {
                self.budget.text(found.text.len())?;
                self.text_method(&found.text, name, given)
            }
            Value::Dict(_) => self.dict_method(value, name, given),
            Value::List(_) | Value::Tuple(_) | Value::Range(_) => self.search_list(value, name, given),
            Value::Loop(state) if name == "cycle" => {
                let args = given.args;
                args.get(state.index.get() % args.len().max(1)).cloned().ok_or_else(no_number)
            }
            Value::Loop(state) => {
                let before = state.changed.take();
                let before = before.map_or(Ok(None), |before| Value::list(before, self.budget).map(Some))?;
                let now = Value::list(given.args.clone(), self.budget)?;
                state.changed.replace(Some(given.args));
                Ok(Value::Bool(!before.is_some_and(|before| before.equals(&now, self.budget).unwrap_or(false))))
            }
            Value::Cycler(cycler) => {
                let at = cycler.1.get();
                let next = if name == "next" { (at + 1) % cycler.0.items.len() } else { 0 };
                cycler.1.set(next);
                if name == "next" { Ok(cycler.0.items[at].clone()) } else { Ok(Value::None) }
            }
            Value::Float(number) if name == "is_integer" => Ok(Value::Bool(number.fract() == 0.0)),
            other => Err(Fault::refused(format!("a {} has no method {name}", other.kind()))),
        }
    }

    /// A method of a dictionary; those that would change it are refused, so that a copy is the dictionary itself.
    fn dict_method(&mut self, value: &Value, name: &str, given: Given) -> Fallible<Value> {
        let Value::Dict(dict) = value else {
            return Err(no_number());
        };
        match name {
            "get" => {
                let [key, default] = given.bind(name, ["key", "default"])?;
                let key = key.ok_or_else(|| Fault::refused("get is given no key"))?;
                Ok(dict.get(&key, self.budget)?.cloned().or(default).unwrap_or(Value::None))
            }
            "keys" | "values" | "items" => {
                let [] = given.bind(name, [])?;
                let pairs = dict.pairs.iter();
                let items = match name {
                    "keys" => pairs.map(|(key, _)| Ok(key.clone())).collect::<Fallible<_>>()?,
                    "values" => pairs.map(|(_, value)| Ok(value.clone())).collect::<Fallible<_>>()?,
                    _ => pairs
                        .map(|(key, value)| Value::tuple(vec![key.clone(), value.clone()], self.budget))
                        .collect::<Fallible<Vec<_>>>()?,
                };
                let kind = match name {
                    "keys" => "dict_keys",
                    "values" => "dict_values",
                    _ => "dict_items",
                };
                let Value::List(items) = Value::list(items, self.budget)? else {
                    return Err(no_number());
                };
                Ok(Value::View(kind, items))
            }
            "copy" => {
                let [] = given.bind(name, [])?;
                Ok(value.clone())
            }
            _ => Err(changes(name)),
        }
    }

    /// `count` or `index` of a value in a list, tuple or range, or a copy; methods that would change it are refused.
    fn search_list(&mut self, value: &Value, name: &str, given: Given) -> Fallible<Value> {
        if name == "copy" {
            return Ok(value.clone());
        }
        if !["count", "index"].contains(&name) {
            return Err(changes(name));
        }
        let [wanted] = given.bind(name, ["value"])?;
        let wanted = wanted.ok_or_else(|| Fault::refused(format!("{name} is given no value")))?;
        let mut count = 0;
        for (at, item) in value.items(self.budget)?.iter().enumerate() {
            if item.equals(&wanted, self.budget)? {
                if name == "index" {
                    return Ok(Value::from(at));
                }
                count += 1;
            }
        }
        if name == "index" { Err(Fault::refused("index finds no such item")) } else { Ok(Value::from(count)) }
    }

    fn text_method(&mut self, found: &str, name: &str, given: Given) -> Fallible<Value> {
        self.budget.text(2 * found.len())?;
        if let Some(holds) = is_text(found, name) {
            let [] = given.bind(name, [])?;
            return Ok(Value::Bool(holds));
        }
        let made = match name {
            "upper" => found.to_uppercase(),
            "lower" => found.to_lowercase(),
            "casefold" if found.is_ascii() => found.to_ascii_lowercase(),
            "capitalize" => capitalized(found),
            "title" => python_title(found),
            "swapcase" => {
                let mut swapped = String::with_capacity(found.len());
                for c in found.chars() {
                    if c.is_lowercase() {
                        swapped.extend(c.to_uppercase());
                    } else {
                        swapped.extend(c.to_lowercase());
                    }
                }
                swapped
            }
            "format" => return Ok(Value::made(printf::braces(found, &given, self.budget)?)),
            "split" | "rsplit" | "splitlines" | "partition" | "rpartition" => return self.split(found, name, given),
            "strip" | "lstrip" | "rstrip" => return self.strip(found, name, given),
            "startswith" | "endswith" | "find" | "rfind" | "index" | "rindex" | "count" => {
                return self.search_text(found, name, given);
            }
            "join" => return self.join_texts(found, given),
            "replace" => {
                let [old, new, count] = given.bind(name, ["old", "new", "count"])?;
                let [old, new] = [old, new].map(|text| text.ok_or_else(|| Fault::refused("replace takes two strings")));
                let (old, new) = (old?, new?);
                let count = count.map(|count| count.as_int().ok_or_else(no_number)).transpose()?;
                return self.replaced(found, [string(&old)?, string(&new)?], count);
            }
            "removeprefix" | "removesuffix" => {
                let [part] = given.bind(name, ["part"])?;
                let part = part.as_ref().map_or(Ok(""), string)?;
                let rest = if name == "removeprefix" { found.strip_prefix(part) } else { found.strip_suffix(part) };
                rest.unwrap_or(found).to_owned()
            }
            "ljust" | "rjust" | "center" => {
                let [width, fill] = given.bind(name, ["width", "fillchar"])?;
                let width = width.and_then(|width| width.as_int()).ok_or_else(no_number)?;
                let fill = fill.map_or(Some(' '), |fill| {
                    let mut chars = fill.as_str()?.chars();
                    chars.next().filter(|_| chars.next().is_none())
                });
                return self.padded(found, width, fill.ok_or_else(no_number)?, name);
            }
            "zfill" => {
                let [width] = given.bind(name, ["width"])?;
                let width = width.and_then(|width| width.as_int()).ok_or_else(no_number)?;
                let sign = usize::from(found.starts_with(['-', '+']));
                let digits = self.padded(&found[sign..], width - sign as i128, '0', "rjust")?;
                format!("{}{}", &found[..sign], digits.as_str().unwrap_or_default())
            }
            _ => return Err(Fault::refused(format!("the method {name} is not available for this string"))),
        };
        Ok(Value::made(made))
    }

    /// Cuts the characters of `chars`, or white space without it, from both ends or from the one that `name` says.
    fn strip(&mut self, found: &str, name: &str, given: Given) -> Fallible<Value> {
        let [chars] = given.bind(name, ["chars"])?;
        let chars = match chars {
            None | Some(Value::None) => None,
            Some(chars) => Some(string(&chars)?.to_owned()),
        };
        self.budget.steps(chars.as_ref().map_or(0, |chars| found.len() * chars.len() / 64))?;
        let is_cut = |c: char| chars.as_ref().map_or_else(|| is_space(c), |chars| chars.contains(c));
        let cut = match name {
            "strip" => found.trim_matches(is_cut),
            "lstrip" => found.trim_start_matches(is_cut),
            _ => found.trim_end_matches(is_cut),
        };
        Value::text(cut, self.budget)
    }

    /// The parts of a text: a list between separators, or words without one, lines for `splitlines`, and for
    /// `partition` a tuple of the text before the separator, it, and the text behind it.
    fn split(&mut self, found: &str, name: &str, given: Given) -> Fallible<Value> {
        if name == "splitlines" {
            let [keeps_ends] = given.bind(name, ["keepends"])?;
            return self.texts(lines(found, keeps_ends.is_some_and(|keeps| keeps.is_true())));
        }
        let [separator, most] = given.bind(name, ["sep", "maxsplit"])?;
        let separator = separator.filter(|separator| !matches!(separator, Value::None));
        if let Some(separator) = &separator
            && string(separator)?.is_empty()
        {
            return Err(Fault::refused(format!("{name} is given an empty string")));
        }
        let separator = separator.as_ref().and_then(Value::as_str);
        if name.ends_with("partition") {
            let separator = separator.ok_or_else(no_number)?;
            let split = if name == "partition" { found.split_once(separator) } else { found.rsplit_once(separator) };
            let parts = match split {
                Some((before, after)) => [before, separator, after],
                None if name == "partition" => [found, "", ""],
                None => ["", "", found],
            };
            let parts = parts.iter().map(|part| Value::text(part, self.budget)).collect::<Fallible<_>>()?;
            return Value::tuple(parts, self.budget);
        }
        let most = most.map_or(Some(-1), |most| most.as_int()).ok_or_else(no_number)?;
        let most = usize::try_from(most).unwrap_or(usize::MAX - 1);
        let mut parts = match (separator, name) {
            (Some(separator), "split") => found.splitn(most.saturating_add(1), separator).map(str::to_owned).collect(),
            (Some(separator), _) => {
                let mut parts = found.rsplitn(most.saturating_add(1), separator).map(str::to_owned).collect::<Vec<_>>();
                parts.reverse();
                parts
            }
            (None, "split") => words(found, most),
            (None, _) => {
                let backwards: String = found.chars().rev().collect();
                let backwards = words(&backwards, most);
                backwards.iter().rev().map(|word| word.chars().rev().collect()).collect()
            }
        };
        self.texts(std::mem::take(&mut parts))
    }

    fn texts(&self, parts: Vec<String>) -> Fallible<Value> {
        self.budget.text(parts.iter().map(String::len).sum())?;
        Value::list(parts.into_iter().map(Value::made).collect(), self.budget)
    }

    /// Python's `separator.join(items)`, whose items must be strings.
    fn join_texts(&mut self, separator: &str, given: Given) -> Fallible<Value> {
        let [items] = given.bind("join", ["iterable"])?;
        let mut out = String::new();
        for (n, item) in items.unwrap_or(Value::None).items(self.budget)?.iter().enumerate() {
            let item = string(item)?;
            self.budget.text(item.len() + separator.len())?;
            out += if n > 0 { separator } else { "" };
            out += item;
        }
        Ok(Value::made(out))
    }

    /// Looks for a text in the characters from `start` to `end`; a place is counted in characters from the beginning of
    /// all of `found`.
    fn search_text(&mut self, found: &str, name: &str, given: Given) -> Fallible<Value> {
        let [part, start, end] = given.bind(name, ["sub", "start", "end"])?;
        let part = part.ok_or_else(no_number)?;
        let bounds = [start.unwrap_or(Value::None), end.unwrap_or(Value::None), Value::None];
        let (skipped, within) = if bounds.iter().all(|bound| matches!(bound, Value::None)) {
            (0, found.to_owned())
        } else {
            let chars = found.chars().collect::<Vec<_>>();
            let places = slice_places(&bounds, chars.len())?;
            (places.first().copied().unwrap_or(0), places.iter().map(|at| chars[*at]).collect())
        };
        if name.ends_with("with") {
            let holds = |part: &Value| -> Fallible<bool> {
                let part = string(part)?;
                Ok(if name == "startswith" { within.starts_with(part) } else { within.ends_with(part) })
            };
            let Value::Tuple(parts) = &part else {
                return Ok(Value::Bool(holds(&part)?));
            };
            for part in &parts.items {
                if holds(part)? {
                    return Ok(Value::Bool(true));
                }
            }
            return Ok(Value::Bool(false));
        }
        let part = string(&part)?;
        if name == "count" {
            return Ok(Value::from(within.matches(part).count()));
        }
        let at = if name.starts_with('r') { within.rfind(part) } else { within.find(part) };
        match at.map(|at| skipped + within[..at].chars().count()) {
            Some(at) => Ok(Value::from(at)),
            None if name.ends_with("find") => Ok(Value::Int(-1)),
            None => Err(Fault::refused(format!("{name} does not find this string"))),
        }
    }
}

/// What Python's methods `is…` say of a text; `None` for other methods, and for digits beyond ASCII, of which Python
/// has three kinds.
fn is_text(found: &str, name: &str) -> Option<bool> {
    let is_all = |is: fn(char) -> bool| Some(!found.is_empty() && found.chars().all(is));
    match name {
        "isalpha" => is_all(char::is_alphabetic),
        "isalnum" => is_all(char::is_alphanumeric),
        "isdigit" | "isdecimal" | "isnumeric" if found.is_ascii() => is_all(|c| c.is_ascii_digit()),
        "isspace" => is_all(is_space),
        "isascii" => Some(found.is_ascii()),
        "isupper" | "islower" => Some(is_in_case(found, name == "isupper")),
        "istitle" if found.is_ascii() => {
            Some(found.chars().any(|c| c.is_ascii_alphabetic()) && python_title(found) == found)
        }
        _ => None,
    }
}

fn changes(name: &str) -> Box<Fault> {
    Fault::refused(format!("{name} would change a value, and a template may not"))
}

fn string(value: &Value) -> Fallible<&str> {
    value.as_str().ok_or_else(|| Fault::refused(format!("a method of a string is given a {}", value.kind())))
}

/// Words between white space; after `most` splits the rest is one.
fn words(found: &str, most: usize) -> Vec<String> {
    let (mut words, mut rest) = (Vec::new(), found.trim_start_matches(is_space));
    while !rest.is_empty() {
        let end = if words.len() < most { rest.find(is_space).unwrap_or(rest.len()) } else { rest.len() };
        words.push(rest[..end].to_owned());
        rest = rest[end..].trim_start_matches(is_space);
    }
    words
}

/// Python's `title`: each letter behind something that is none is a capital.
fn python_title(found: &str) -> String {
    let mut begins = true;
    let mut titled = String::with_capacity(found.len());
    for c in found.chars() {
        if begins {
            titled += &title_case(c);
        } else {
            titled.extend(c.to_lowercase());
        }
        begins = !c.is_alphabetic();
    }
    titled
}
