//! Texts as a terminal and a log may show them: without control characters, which could move the cursor, rename the
//! window or begin a line that nobody wrote.

use std::borrow::Cow;
use std::fmt::{Display, Formatter, Result, Write};
use std::path::Path;

/// The text with each control character but newline and tab written as `\x1b`, its code in hexadecimal.
pub fn shown_text(text: &str) -> Cow<'_, str> {
    let is_shown = |char: char| !char.is_control() || char == '\n' || char == '\t';
    if text.chars().all(is_shown) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for char in text.chars() {
        let written = if is_shown(char) { shown.write_char(char) } else { write_code(&mut shown, char) };
        written.expect("a String takes all");
    }
    Cow::Owned(shown)
}

/// Paths for messages.
pub trait ShownPath {
    /// The path on one line: each control character, newline and tab too, is written as `\x0a`, and what is not UTF-8
    /// as U+FFFD. Not a path to open.
    fn shown(&self) -> Shown<'_>;
}

impl ShownPath for Path {
    fn shown(&self) -> Shown<'_> {
        Shown(self.to_string_lossy())
    }
}

/// A path for messages; see [`ShownPath::shown`].
#[derive(Clone, Debug)]
pub struct Shown<'a>(Cow<'a, str>);

impl Display for Shown<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        // Width and fill are those of a string.
        if !self.0.contains(char::is_control) {
            return f.pad(&self.0);
        }
        self.0.chars().try_for_each(|char| if char.is_control() { write_code(f, char) } else { f.write_char(char) })
    }
}

fn write_code(to: &mut impl Write, char: char) -> Result {
    write!(to, "\\x{:02x}", u32::from(char))
}

/// A path as one word of a shell; see [`shell_word`]. With a dash at its beginning it would be read as a flag.
pub fn quoted(path: &Path) -> String {
    let text = path.to_string_lossy();
    if text.starts_with('-') { shell_word(&format!("./{text}")) } else { shell_word(&text) }
}

/// A text as one word of a shell: in single quotes if it has a character that a shell may interpret, and in the form
/// `$'\033'` of bash and zsh if it has control characters.
pub fn shell_word(text: &str) -> String {
    let plain = |x: char| x.is_ascii_alphanumeric() || "/._-+=:,@%".contains(x);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    if !text.contains(char::is_control) {
        return format!("'{}'", text.replace('\'', "'\\''"));
    }
    let escaped = |char: char| match char {
        '\'' | '\\' => format!("\\{char}"),
        // Each byte has exactly three octal digits, so that a digit of the text after them is not read as a fourth.
        char if char.is_control() => char.to_string().bytes().map(|byte| format!("\\{byte:03o}")).collect(),
        char => char.to_string(),
    };
    format!("$'{}'", text.chars().map(escaped).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_written_as_their_codes() {
        for (text, shown) in [
            ("naïve 世界 👩‍🚀\n\tx\\", "naïve 世界 👩‍🚀\n\tx\\"),
            ("\u{1b}]0;title\u{7}\r\u{0}", "\\x1b]0;title\\x07\\x0d\\x00"),
            ("\u{7f}\u{80}\u{9b}2J\u{9f}\u{a0}", "\\x7f\\x80\\x9b2J\\x9f\u{a0}"),
        ] {
            assert_eq!(shown_text(text), shown);
        }
        assert!(matches!(shown_text("a\tb\n"), Cow::Borrowed(_)));
    }

    #[test]
    fn a_path_is_one_line() {
        for (path, shown) in [("runs/a b", "runs/a b"), ("a\n\tloss 1.0\u{1b}[2J", "a\\x0a\\x09loss 1.0\\x1b[2J")] {
            assert_eq!(Path::new(path).shown().to_string(), shown);
        }
        assert_eq!(format!("{:>4}|", Path::new("ab").shown()), "  ab|");
    }

    #[test]
    fn a_path_is_quoted_where_a_shell_would_cut_it() {
        for (path, word) in [
            ("run/checkpoint/step-400", "run/checkpoint/step-400"),
            ("my runs/step-4", "'my runs/step-4'"),
            ("it's $HOME", "'it'\\''s $HOME'"),
            ("-runs/a b", "'./-runs/a b'"),
            ("", "''"),
            ("a\n1'\u{1b}\u{9b}é\\", "$'a\\0121\\'\\033\\302\\233é\\\\'"),
        ] {
            assert_eq!(quoted(Path::new(path)), word);
        }
    }
}
