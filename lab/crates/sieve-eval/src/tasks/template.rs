//! Templates such as `"Question: {question}\nAnswer:"`, in which `{name}` stands for a column of a row.
use serde_json::Value;
use sieve_data::TableRow;

/// A parsed template: text with places for columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Template(Vec<Part>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Place { column: String, filters: Vec<Filter> },
}

/// A filter of a column, as in `{column|filter}`. Each does the same as an expression in lm-evaluation-harness's
/// templates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Filter {
    Strip,
    StripStart,
    Capitalize,
    UnderscoresToSpaces,
    AllButLastWord,
    LastWord,
    BeforeBlank,
    AfterBlank,
    Wikihow,
}

const FILTERS: [(&str, Filter); 9] = [
    ("strip", Filter::Strip),
    ("strip_start", Filter::StripStart),
    ("capitalize", Filter::Capitalize),
    ("underscores_to_spaces", Filter::UnderscoresToSpaces),
    ("all_but_last_word", Filter::AllButLastWord),
    ("last_word", Filter::LastWord),
    ("before_blank", Filter::BeforeBlank),
    ("after_blank", Filter::AfterBlank),
    ("wikihow", Filter::Wikihow),
];

impl Filter {
    pub(super) fn parse(name: &str) -> Result<Self, String> {
        let found = FILTERS.iter().find(|(known, _)| *known == name);
        found.map(|(_, filter)| *filter).ok_or_else(|| {
            let known: Vec<&str> = FILTERS.iter().map(|(name, _)| *name).collect();
            format!("there is no filter {name:?}\n  hint: the filters are {}", known.join(", "))
        })
    }

    /// The filtered text; an error says what the text lacks.
    pub(super) fn apply(self, text: &str) -> Result<String, String> {
        let blank = || text.split_once('_').ok_or_else(|| format!("has no blank (_) in {text:?}"));
        Ok(match self {
            Self::Strip => text.trim().to_owned(),
            Self::StripStart => text.trim_start().to_owned(),
            Self::Capitalize => {
                let mut chars = text.chars();
                let first = chars.next().into_iter().flat_map(char::to_uppercase);
                first.collect::<String>() + &chars.as_str().to_lowercase()
            }
            Self::UnderscoresToSpaces => text.replace('_', " "),
            Self::AllButLastWord => text.rsplit_once(' ').map_or("", |(before, _)| before).into(),
            Self::LastWord => text.rsplit_once(' ').map_or(text, |(_, last)| last).into(),
            Self::BeforeBlank => blank()?.0.to_owned(),
            Self::AfterBlank => blank()?.1.to_owned(),
            Self::Wikihow => wikihow(text),
        })
    }
}

/// Removes marks of WikiHow's pages from HellaSwag's texts: `[title]`, `[step]` and other brackets on one line.
fn wikihow(text: &str) -> String {
    let text = text.trim().replace(" [title]", ". ");
    let (mut kept, mut rest) = (String::new(), text.as_str());
    while let Some(open) = rest.find('[') {
        let (before, after) = rest.split_at(open);
        kept += before;
        let line = after.lines().next().unwrap_or_default();
        rest = match line.find(']') {
            Some(close) => &after[close + 1..],
            None => {
                kept.push('[');
                &after[1..]
            }
        };
    }
    (kept + rest).replace("  ", " ")
}

impl Template {
    /// Parses a template. Places are `{column}`, `{group.column}`, `{list.0}`, `{column or other}` and
    /// `{column|filter|filter}`; `{{` and `}}` are literal braces.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let (mut parts, mut literal, mut rest) = (Vec::new(), String::new(), text);
        while let Some(at) = rest.find(['{', '}']) {
            literal += &rest[..at];
            let brace = &rest[at..=at];
            rest = &rest[at + 1..];
            if let Some(after) = rest.strip_prefix(brace) {
                literal += brace;
                rest = after;
                continue;
            }
            let Some((place, after)) = rest.split_once('}').filter(|_| brace == "{") else {
                return Err(format!(
                    "the template {text:?} has a single {brace}\n  \
                     hint: write {{column}} for a place, {brace}{brace} for a brace"
                ));
            };
            rest = after;
            let mut names = place.split('|').map(str::trim);
            let column = names.next().unwrap_or_default().to_owned();
            if column.is_empty() {
                return Err(format!("the template {text:?} has a place without a column"));
            }
            if !literal.is_empty() {
                parts.push(Part::Text(std::mem::take(&mut literal)));
            }
            let filters = names.map(Filter::parse).collect::<Result<_, _>>()?;
            parts.push(Part::Place { column, filters });
        }
        literal += rest;
        if !literal.is_empty() {
            parts.push(Part::Text(literal));
        }
        Ok(Self(parts))
    }

    /// The template's text with the row's columns filled in.
    pub(super) fn render(&self, row: &TableRow) -> Result<String, String> {
        let mut text = String::new();
        for part in &self.0 {
            match part {
                Part::Text(literal) => text += literal,
                Part::Place { column, filters } => {
                    let mut value = text_of(column, look_up(row, column)?)?;
                    for filter in filters {
                        value = filter.apply(&value).map_err(|what| format!("{what}, its column {column:?}"))?;
                    }
                    text += &value;
                }
            }
        }
        Ok(text)
    }
}

/// A column's value. Values inside groups and lists have a path such as `choices.text` or `choices.0`. The path
/// `a or b` stands for column `a`, or for column `b` in a row without `a`.
pub(super) fn look_up<'r>(row: &'r TableRow, column: &str) -> Result<&'r Value, String> {
    if let Some(value) = row.get(column) {
        return Ok(value);
    }
    if let Some((one, other)) = column.split_once(" or ") {
        return look_up(row, one).or_else(|_| look_up(row, other));
    }
    let mut names = column.split('.');
    let first = names.next().and_then(|name| row.get(name));
    let found = names.fold(first, |value, name| match value? {
        Value::Array(items) => items.get(name.parse::<usize>().ok()?),
        other => other.get(name),
    });
    found.ok_or_else(|| {
        let known: Vec<&str> = row.keys().map(String::as_str).take(16).collect();
        format!("has no column {column:?} (it has {})", known.join(", "))
    })
}

/// A column that holds a list of texts.
pub(super) fn texts(row: &TableRow, column: &str) -> Result<Vec<String>, String> {
    match look_up(row, column)? {
        Value::Array(items) => items.iter().map(|item| text_of(column, item)).collect(),
        _ => Err(format!("has no list in its column {column:?}")),
    }
}

/// The value of a column as a template shows it; the error says what the row lacks.
fn text_of(column: &str, value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Number(number) => Ok(number.to_string()),
        Value::Bool(value) => Ok(value.to_string()),
        Value::Null => Err(format!("has nothing (null) in its column {column:?}")),
        _ => Err(format!("has no text in its column {column:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_testing::{cases, refusal};

    fn row() -> TableRow {
        let text = r#"{"q": "an Apple", "c": {"text": ["x", "y"]}, "n": 3, "none": null, "s": "He met _ and left."}"#;
        serde_json::from_str(text).expect("an object")
    }

    #[test]
    fn templates_name_columns_groups_and_lists() {
        let render = |text: &str| Template::parse(text).and_then(|t| t.render(&row()));
        for [template, text] in cases(
            r#"
            Q: {q}?\nA: => Q: an Apple?\nA:
            {c.text.1}{n} {{q}} => y3 {q}
            {q|capitalize}|{q|last_word}|{q|all_but_last_word} => An apple|Apple|an
            {s|before_blank}X{s|after_blank|strip} => He met Xand left.
            plain => plain
        "#,
        ) {
            assert_eq!(render(template).as_deref(), Ok(text));
        }
        for (template, words) in [
            ("{p}", "no column \"p\" (it has q, c, n, none, s)"),
            ("{c.text.2}", "no column"),
            ("{c}", "no text"),
            ("{none}", "null"),
            ("{q|before_blank}", "no blank"),
            ("{q|upper}", "the filters are strip,"),
            ("{q", "single {"),
            ("q}", "single }"),
            ("{}", "without a column"),
        ] {
            refusal(render(template), words);
        }
    }

    #[test]
    fn wikihow_removes_brackets_that_close_on_their_line() {
        let text = " How to [a] sit [title] Take a [step] chair.  [open\n] end ";
        assert_eq!(wikihow(text), "How to sit. Take a chair. [open\n] end");
        assert_eq!(wikihow("x [header] y [title] z"), "x y. z");
    }
}
