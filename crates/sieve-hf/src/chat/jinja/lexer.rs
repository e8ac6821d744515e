//! Cuts a template into text and tokens, by the options that `transformers` sets: the line break behind a block goes
//! (`trim_blocks`), and so does the white space before it on its line (`lstrip_blocks`).

use super::fault::{Fallible, Fault};

/// A piece of a template, and its line.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Token {
    pub(super) line: u32,
    pub(super) kind: TokenKind,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum TokenKind {
    /// Text between tags.
    Data(String),
    PrintBegin,
    PrintEnd,
    BlockBegin,
    BlockEnd,
    Name(String),
    Text(String),
    Int(i128),
    Float(f64),
    /// An operator or a bracket.
    Sign(&'static str),
    End,
}

/// Operators and brackets, longer ones first.
const SIGNS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<", "=", ".",
    ":", "|", ",", ";",
];

/// White space as Python's regular expressions and `str.strip` have it.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

struct Lexer<'a> {
    text: &'a str,
    at: usize,
    line: u32,
    /// Whether what was read last ended with a line break.
    line_starts: bool,
    tokens: Vec<Token>,
}

/// The pieces of a template.
///
/// # Errors
/// A tag without an end, or a sign that no expression has.
pub(super) fn tokens(template: &str) -> Fallible<Vec<Token>> {
    let text = template.replace("\r\n", "\n").replace('\r', "\n");
    let text = text.strip_suffix('\n').unwrap_or(&text);
    let mut lexer = Lexer { text, at: 0, line: 1, line_starts: true, tokens: Vec::new() };
    while lexer.at < text.len() {
        lexer.next()?;
    }
    lexer.push(TokenKind::End);
    Ok(lexer.tokens)
}

impl<'a> Lexer<'a> {
    fn push(&mut self, kind: TokenKind) {
        self.tokens.push(Token { line: self.line, kind });
    }

    fn invalid(&self, what: impl Into<String>) -> Box<Fault> {
        Fault::invalid(what, self.line)
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    /// Moves behind the next `count` bytes.
    fn skip(&mut self, count: usize) {
        let passed = &self.text[self.at..self.at + count];
        self.line += passed.matches('\n').count() as u32;
        if let Some(last) = passed.chars().last() {
            self.line_starts = last == '\n';
        }
        self.at += count;
    }

    /// Text up to the next tag, and that tag.
    fn next(&mut self) -> Fallible<()> {
        let rest = self.rest();
        let begin = rest
            .match_indices('{')
            .map(|(at, _)| at)
            .find(|at| matches!(rest.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#')));
        let Some(begin) = begin else {
            let data = rest.to_owned();
            self.push(TokenKind::Data(data));
            self.skip(self.text.len() - self.at);
            return Ok(());
        };
        let kind = rest.as_bytes()[begin + 1];
        let sign = rest[begin + 2..].chars().next().filter(|c| matches!(c, '-' | '+'));
        self.data(begin, sign, kind != b'{');
        self.skip(begin + 2 + sign.map_or(0, char::len_utf8));
        match kind {
            b'#' => self.comment(),
            b'{' => {
                self.push(TokenKind::PrintBegin);
                self.inside("}}", TokenKind::PrintEnd)
            }
            _ if self.raw_begin().is_some() => self.raw(),
            _ => {
                self.push(TokenKind::BlockBegin);
                self.inside("%}", TokenKind::BlockEnd)
            }
        }
    }

    /// The text before a tag that begins `len` bytes on and has `sign` behind its bracket.
    fn data(&mut self, len: usize, sign: Option<char>, is_block: bool) {
        let mut data = &self.text[self.at..self.at + len];
        if sign == Some('-') {
            data = data.trim_end_matches(is_space);
        } else if sign.is_none() && is_block {
            let line = data.rfind('\n').map_or(0, |at| at + 1);
            if (line > 0 || self.line_starts) && data[line..].chars().all(is_space) {
                data = &data[..line];
            }
        }
        if !data.is_empty() {
            let data = data.to_owned();
            self.push(TokenKind::Data(data));
        }
    }

    /// The number of bytes of a tag's end `mark` here, with the white space that goes with it.
    fn end_of_tag(&self, mark: &str, trims_line: bool) -> Option<usize> {
        let rest = self.rest();
        if let Some(after) = rest.strip_prefix('-').and_then(|rest| rest.strip_prefix(mark)) {
            return Some(rest.len() - after.trim_start_matches(is_space).len());
        }
        if let Some(after) = rest.strip_prefix('+').filter(|_| trims_line).and_then(|rest| rest.strip_prefix(mark)) {
            return Some(rest.len() - after.len());
        }
        let after = rest.strip_prefix(mark)?;
        let line = usize::from(trims_line && after.starts_with('\n'));
        Some(mark.len() + line)
    }

    /// Passes a comment, whose `{#` has been passed, with the white space that goes with its end.
    fn comment(&mut self) -> Fallible<()> {
        let begin = self.line;
        while self.at < self.text.len() {
            if let Some(len) = self.end_of_tag("#}", true) {
                self.skip(len);
                return Ok(());
            }
            let next = self.rest().chars().next().map_or(1, char::len_utf8);
            self.skip(next);
        }
        Err(Fault::invalid("a comment {# has no end", begin))
    }

    /// The number of bytes of ` raw %}` here.
    fn raw_begin(&self) -> Option<usize> {
        let after = self.rest().trim_start_matches(is_space).strip_prefix("raw")?.trim_start_matches(is_space);
        let after = match after.strip_prefix("-%}") {
            Some(after) => after.trim_start_matches(is_space),
            None => after.strip_prefix("%}")?,
        };
        Some(self.rest().len() - after.len())
    }

    /// Text that is no template, up to `{% endraw %}`.
    fn raw(&mut self) -> Fallible<()> {
        let begin = self.line;
        self.skip(self.raw_begin().unwrap_or(0));
        let rest = self.rest();
        for (at, _) in rest.match_indices("{%") {
            let sign = rest[at + 2..].chars().next().filter(|c| matches!(c, '-' | '+'));
            let inside = &rest[at + 2 + sign.map_or(0, char::len_utf8)..];
            let Some(after) = inside.trim_start_matches(is_space).strip_prefix("endraw") else {
                continue;
            };
            let start = self.at + (rest.len() - after.trim_start_matches(is_space).len());
            let here = std::mem::replace(&mut self.at, start);
            let len = self.end_of_tag("%}", true);
            self.at = here;
            if let Some(len) = len {
                self.data(at, sign, true);
                self.skip(start + len - here);
                return Ok(());
            }
        }
        Err(Fault::invalid("{% raw %} has no {% endraw %}", begin))
    }

    /// Tokens up to the end `mark` of a tag.
    fn inside(&mut self, mark: &str, end: TokenKind) -> Fallible<()> {
        let begin = self.line;
        let mut brackets = Vec::new();
        loop {
            if brackets.is_empty()
                && let Some(len) = self.end_of_tag(mark, mark == "%}")
            {
                self.push(end);
                self.skip(len);
                return Ok(());
            }
            let Some(c) = self.rest().chars().next() else {
                return Err(Fault::invalid(format!("a tag has no end {mark}"), begin));
            };
            if is_space(c) {
                self.skip(c.len_utf8());
            } else if c.is_ascii_digit() {
                self.number()?;
            } else if c == '_' || c.is_alphabetic() {
                let rest = self.rest();
                let len = rest.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(rest.len());
                let name = rest[..len].to_owned();
                self.push(TokenKind::Name(name));
                self.skip(len);
            } else if matches!(c, '\'' | '"') {
                self.quoted(c)?;
            } else {
                self.sign(&mut brackets)?;
            }
        }
    }

    /// Takes the longest sign that is here. `brackets` holds the closing brackets that must still come, the innermost
    /// last.
    fn sign(&mut self, brackets: &mut Vec<&'static str>) -> Fallible<()> {
        let Some(sign) = SIGNS.iter().find(|sign| self.rest().starts_with(**sign)) else {
            let c: String = self.rest().chars().take(1).flat_map(char::escape_debug).collect();
            return Err(self.invalid(format!("an expression has the sign {c:?}")));
        };
        match *sign {
            "(" => brackets.push(")"),
            "[" => brackets.push("]"),
            "{" => brackets.push("}"),
            ")" | "]" | "}" if brackets.pop() != Some(*sign) => {
                return Err(self.invalid(format!("{sign} closes no bracket")));
            }
            _ => {}
        }
        self.push(TokenKind::Sign(sign));
        self.skip(sign.len());
        Ok(())
    }

    /// A quoted text with Python's escapes.
    fn quoted(&mut self, quote: char) -> Fallible<()> {
        let mut chars = self.rest().char_indices().skip(1);
        let (mut text, mut end) = (String::new(), None);
        while let Some((at, c)) = chars.next() {
            if c == quote {
                end = Some(at + 1);
                break;
            }
            if c != '\\' {
                text.push(c);
                continue;
            }
            let Some((_, escaped)) = chars.next() else {
                break;
            };
            let digits = match escaped {
                'x' => 2,
                'u' => 4,
                'U' => 8,
                _ => 0,
            };
            match escaped {
                '\n' => {}
                'n' => text.push('\n'),
                't' => text.push('\t'),
                'r' => text.push('\r'),
                'b' => text.push('\x08'),
                'f' => text.push('\x0c'),
                'v' => text.push('\x0b'),
                'a' => text.push('\x07'),
                '0' => text.push('\0'),
                '\\' | '\'' | '"' => text.push(escaped),
                'x' | 'u' | 'U' => {
                    let code: String = chars.by_ref().take(digits).map(|(_, digit)| digit).collect();
                    let code = u32::from_str_radix(&code, 16).ok().filter(|_| code.len() == digits);
                    let found = code.and_then(char::from_u32);
                    text.push(found.ok_or_else(|| self.invalid("a string has an escape that is not a character"))?);
                }
                '1'..='7' | 'N' => return Err(self.invalid(format!("a string has the escape \\{escaped}"))),
                other => text.extend(['\\', other]),
            }
        }
        let end = end.ok_or_else(|| self.invalid("a string has no closing quotation mark"))?;
        self.push(TokenKind::Text(text));
        self.skip(end);
        Ok(())
    }

    /// Takes a number as Python writes it: with `_` between digits, in base 2, 8 or 16 behind `0b`, `0o` or `0x`, or
    /// with a point or an exponent.
    fn number(&mut self) -> Fallible<()> {
        let rest = self.rest();
        let digits = |text: &str, is_digit: fn(char) -> bool| {
            text.find(|c: char| c != '_' && !is_digit(c)).unwrap_or(text.len())
        };
        let lower = rest.get(..2).unwrap_or_default().to_ascii_lowercase();
        let radix = match lower.as_str() {
            "0x" => 16,
            "0o" => 8,
            "0b" => 2,
            _ => 10,
        };
        let (len, kind) = if radix != 10 {
            let len = 2 + digits(&rest[2..], |c| c.is_ascii_hexdigit());
            (len, i128::from_str_radix(&rest[2..len].replace('_', ""), radix).ok().map(TokenKind::Int))
        } else {
            let whole = digits(rest, |c| c.is_ascii_digit());
            let mut len = whole;
            let fraction = rest[len..].strip_prefix('.').map_or(0, |rest| digits(rest, |c| c.is_ascii_digit()));
            if fraction > 0 && !rest[len + 1..].starts_with('_') {
                len += 1 + fraction;
            }
            if let Some(power) = rest[len..].strip_prefix(['e', 'E']) {
                let sign = usize::from(power.starts_with(['+', '-']));
                let count = digits(&power[sign..], |c| c.is_ascii_digit());
                if power[sign..].starts_with(|c: char| c.is_ascii_digit()) {
                    len += 1 + sign + count;
                }
            }
            let plain = rest[..len].replace('_', "");
            let kind = if len == whole {
                plain.parse().ok().map(TokenKind::Int)
            } else {
                plain.parse().ok().map(TokenKind::Float)
            };
            (len, kind)
        };
        let kind = kind.ok_or_else(|| self.invalid("a number is too large or not well formed"))?;
        self.push(kind);
        self.skip(len);
        Ok(())
    }
}
