//! Texts with places for values: `'%d' % n`, `'{}'.format(n)`, and the time.

use super::fault::{Budget, Fallible, Fault};
use super::python::{repr, text};
use super::render::Given;
use super::value::Value;
use std::fmt::Write;

/// How a value is written at `%`.
#[derive(Debug, Default)]
struct Spec {
    left: bool,
    sign: bool,
    space: bool,
    zero: bool,
    alternate: bool,
    width: usize,
    precision: Option<usize>,
}

/// Digits behind the point of a number, at most: more are never different.
const MOST_PRECISION: usize = 1000;

/// Python's `format % values`.
///
/// # Errors
/// A format that is none, values that do not fit it, or a text that the budget has not.
pub(super) fn percent(format: &str, values: &Value, budget: &Budget) -> Fallible<String> {
    budget.text(format.len())?;
    let mut out = String::new();
    let args = match values {
        Value::Tuple(items) => items.items.as_slice(),
        one => std::slice::from_ref(one),
    };
    let (mut rest, mut next) = (format, 0);
    while let Some((before, after)) = rest.split_once('%') {
        out += before;
        let (spec, key, kind, after) = spec(after)?;
        rest = after;
        if kind == '%' {
            out.push('%');
            continue;
        }
        let value = match (key, values) {
            (Some(key), Value::Dict(dict)) => {
                dict.get_name(key).ok_or_else(|| Fault::refused(format!("the format's {key:?} is not given")))?
            }
            (Some(_), _) => return Err(Fault::refused("a format with names takes a dictionary")),
            (None, _) => {
                next += 1;
                args.get(next - 1).ok_or_else(|| Fault::refused("a format has more places than values"))?
            }
        };
        budget.text(spec.width.saturating_add(spec.precision.unwrap_or(0)))?;
        let shown = shown(&spec, kind, value, budget)?;
        out += &shown;
    }
    if next < args.len() && !matches!(values, Value::Dict(_)) {
        return Err(Fault::refused("a format has fewer places than values"));
    }
    out += rest;
    Ok(out)
}

type SpecAt<'a> = (Spec, Option<&'a str>, char, &'a str);

/// What is behind a `%`: how to write, a name, the letter, and the rest.
fn spec(mut rest: &str) -> Fallible<SpecAt<'_>> {
    let wrong = || Fault::refused("a format has a % that is not followed by a conversion");
    let mut key = None;
    if let Some(after) = rest.strip_prefix('(') {
        let (found, after) = after.split_once(')').ok_or_else(wrong)?;
        (key, rest) = (Some(found), after);
    }
    let mut spec = Spec::default();
    while let Some(flag) = rest.chars().next().filter(|c| "-+ 0#".contains(*c)) {
        match flag {
            '-' => spec.left = true,
            '+' => spec.sign = true,
            ' ' => spec.space = true,
            '0' => spec.zero = true,
            _ => spec.alternate = true,
        }
        rest = &rest[1..];
    }
    let number = |rest: &mut &str| {
        let len = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let found = rest[..len].parse().unwrap_or(if len > 0 { usize::MAX } else { 0 });
        *rest = &rest[len..];
        found
    };
    spec.width = number(&mut rest);
    if let Some(after) = rest.strip_prefix('.') {
        rest = after;
        spec.precision = Some(number(&mut rest));
    }
    let kind = rest.chars().next().ok_or_else(wrong)?;
    Ok((spec, key, kind, &rest[kind.len_utf8()..]))
}

/// A value as `%` with the letter `kind` writes it. The precision is the most characters of a text, the fewest digits
/// of a whole number, and digits of a float, 6 without one.
fn shown(spec: &Spec, kind: char, value: &Value, budget: &Budget) -> Fallible<String> {
    let number = || value.as_float().ok_or_else(|| Fault::refused(format!("%{kind} takes a number")));
    let precision = spec.precision.unwrap_or(6).min(MOST_PRECISION);
    let digits = match kind {
        's' | 'r' => {
            let shown = if kind == 's' { text(value, budget)? } else { repr(value, budget)? };
            let cut = spec.precision.map_or(shown.clone(), |most| shown.chars().take(most).collect());
            return Ok(padded(spec, String::new(), cut, false));
        }
        'd' | 'i' | 'u' => match value.as_int() {
            Some(value) => value.to_string(),
            None => (number()?.trunc() as i128).to_string(),
        },
        'x' | 'X' | 'o' => {
            let value = value.as_int().ok_or_else(|| Fault::refused(format!("%{kind} takes a whole number")))?;
            let magnitude = value.unsigned_abs();
            let digits = match kind {
                'x' => format!("{magnitude:x}"),
                'X' => format!("{magnitude:X}"),
                _ => format!("{magnitude:o}"),
            };
            format!("{}{digits}", if value < 0 { "-" } else { "" })
        }
        'f' | 'F' => format!("{:.precision$}", number()?),
        'e' | 'E' => exponential(number()?, precision, kind),
        'g' | 'G' if spec.alternate => return Err(Fault::refused("a format has the flag # before g")),
        'g' | 'G' => general(number()?, precision.max(1), kind),
        'c' => {
            let c = value.as_int().and_then(|code| u32::try_from(code).ok()).and_then(char::from_u32);
            let one = value.as_str().filter(|text| text.chars().count() == 1).map(str::to_owned);
            let c = c.map(String::from).or(one).ok_or_else(|| Fault::refused("%c takes one character"))?;
            return Ok(padded(spec, String::new(), c, false));
        }
        _ => return Err(Fault::refused(format!("%{} is not a conversion", kind.escape_debug()))),
    };
    let (sign, digits) = match digits.strip_prefix('-') {
        Some(digits) => ("-", digits.to_owned()),
        None if spec.sign => ("+", digits),
        None if spec.space => (" ", digits),
        None => ("", digits),
    };
    // Zeros that fill up stand behind the prefix, and the precision does not count it.
    let prefix = if spec.alternate && "xXo".contains(kind) { format!("0{kind}") } else { String::new() };
    let least = spec.precision.filter(|_| "diuxXo".contains(kind)).unwrap_or(0);
    let digits = format!("{}{digits}", "0".repeat(least.saturating_sub(digits.len())));
    Ok(padded(spec, format!("{sign}{prefix}"), digits, spec.zero))
}

/// Fills up to the width of `spec`: behind the digits with its flag `-`, else between sign and digits by zeros, or
/// before both by spaces.
fn padded(spec: &Spec, sign: String, digits: String, with_zeros: bool) -> String {
    let missing = spec.width.saturating_sub(sign.chars().count() + digits.chars().count());
    if spec.left {
        format!("{sign}{digits}{}", " ".repeat(missing))
    } else if with_zeros {
        format!("{sign}{}{digits}", "0".repeat(missing))
    } else {
        format!("{}{sign}{digits}", " ".repeat(missing))
    }
}

/// A number with one digit before the point and an exponent of at least two.
fn exponential(value: f64, precision: usize, kind: char) -> String {
    let shown = format!("{value:.precision$e}");
    let Some((digits, exponent)) = shown.split_once('e') else {
        return shown;
    };
    let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |exponent| ('-', exponent));
    format!("{digits}{}{sign}{exponent:0>2}", if kind.is_uppercase() { 'E' } else { 'e' })
}

/// The shorter of `%e` and `%f`, without zeros at the end.
fn general(value: f64, precision: usize, kind: char) -> String {
    let scientific = format!("{value:.*e}", precision - 1);
    let exponent: i32 = scientific.split_once('e').and_then(|(_, exponent)| exponent.parse().ok()).unwrap_or(0);
    let without_zeros = |digits: &str| {
        let cut = if digits.contains('.') { digits.trim_end_matches('0').trim_end_matches('.') } else { digits };
        cut.to_owned()
    };
    if exponent < -4 || exponent >= precision as i32 {
        let shown = exponential(value, precision - 1, kind);
        let at = shown.find(['e', 'E']).unwrap_or(shown.len());
        return without_zeros(&shown[..at]) + &shown[at..];
    }
    let behind = (precision as i32 - 1 - exponent).max(0) as usize;
    without_zeros(&format!("{value:.behind$}"))
}

/// Python's `format.format(...)`, without attributes, items and widths.
///
/// # Errors
/// A format that is more than this, or values that do not fit it.
pub(super) fn braces(format: &str, given: &Given, budget: &Budget) -> Fallible<String> {
    budget.text(format.len())?;
    let (mut out, mut rest, mut next) = (String::new(), format, 0);
    while let Some(at) = rest.find(['{', '}']) {
        out += &rest[..at];
        let brace = &rest[at..at + 1];
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix(brace) {
            out += brace;
            rest = after;
            continue;
        }
        let (inside, after) = rest
            .split_once('}')
            .filter(|_| brace == "{")
            .ok_or_else(|| Fault::refused("a string for format has an unmatched bracket"))?;
        rest = after;
        let (field, spec) = inside.split_once(':').unwrap_or((inside, ""));
        let value = if field.is_empty() {
            next += 1;
            given.args.get(next - 1)
        } else if let Ok(index) = field.parse::<usize>() {
            given.args.get(index)
        } else {
            given.named.iter().find(|(name, _)| name == field).map(|(_, value)| value)
        };
        let value = value.ok_or_else(|| Fault::refused(format!("format is not given its {field:?}")))?;
        out += &formatted(spec, value, budget)?;
    }
    Ok(out + rest)
}

/// A value in a form of `str.format`: empty, `.2f` and the like for a number, `d` for a whole one, `s` for a text.
fn formatted(spec: &str, value: &Value, budget: &Budget) -> Fallible<String> {
    let fixed = spec.strip_prefix('.').and_then(|spec| spec.strip_suffix('f')).and_then(|digits| digits.parse().ok());
    match (fixed, value.as_float(), value) {
        _ if spec.is_empty() => text(value, budget),
        (Some(precision), Some(number), Value::Int(_) | Value::Float(_)) if precision <= MOST_PRECISION => {
            Ok(format!("{number:.precision$}"))
        }
        (.., Value::Int(number)) if spec == "d" => Ok(number.to_string()),
        (.., Value::Text(_)) if spec == "s" => text(value, budget),
        _ => Err(Fault::refused(format!("a string for format has the width or form {spec:?}"))),
    }
}

/// Python's `round(value, precision)`.
pub(super) fn rounded(value: f64, precision: i32) -> f64 {
    if !value.is_finite() || precision > 300 {
        return value;
    }
    if precision >= 0 {
        return exact(value, precision as usize).parse().unwrap_or(value);
    }
    let unit = 10f64.powi(-precision);
    if unit.is_infinite() { 0.0 * value } else { exact(value / unit, 0).parse::<f64>().unwrap_or(value) * unit }
}

/// The digits of a float; where two are equally near, the even one.
fn exact(value: f64, precision: usize) -> String {
    format!("{value:.precision$}")
}

/// The time in this form.
///
/// # Errors
/// A form that is none.
pub(super) fn time_now(format: &str) -> Fallible<String> {
    let mut out = String::new();
    write!(out, "{}", chrono::Local::now().format(format))
        .map_err(|_| Fault::refused(format!("{format:?} is not a time format")))?;
    Ok(out)
}

/// A whole number from a text, as Python's `int` reads it.
pub(super) fn whole_of(text: &str, base: u32) -> Option<i128> {
    let text = text.trim_matches(super::lexer::is_space);
    let (sign, digits) = match text.strip_prefix(['-', '+']) {
        Some(digits) if text.starts_with('-') => ("-", digits),
        Some(digits) => ("", digits),
        None => ("", text),
    };
    let lower = digits.get(..2).unwrap_or_default().to_ascii_lowercase();
    let digits = match (base, lower.as_str()) {
        (16, "0x") | (8, "0o") | (2, "0b") => &digits[2..],
        _ => digits,
    };
    let is_well_formed =
        digits.starts_with(|c: char| c.is_ascii_alphanumeric()) && !digits.ends_with('_') && !digits.contains("__");
    let digits = digits.replace('_', "");
    is_well_formed.then(|| i128::from_str_radix(&format!("{sign}{digits}"), base).ok()).flatten()
}

/// A number from a text, as Python's `float` reads it.
pub(super) fn float_of(text: &str) -> Option<f64> {
    let text = text.trim_matches(super::lexer::is_space);
    let is_number = text.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c));
    let word = text.trim_start_matches(['+', '-']).to_ascii_lowercase();
    if !is_number && !["inf", "infinity", "nan"].contains(&word.as_str()) {
        return None;
    }
    text.replace('_', "").parse().ok()
}
