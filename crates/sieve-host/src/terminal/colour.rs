//! Colours of the words at which a reader looks first: `error:`, `warning:`, `hint:`, `best`. clap's messages have the
//! same ones.
use crate::environment::variable;
use std::borrow::Cow;
use std::fmt::Write;
use std::sync::OnceLock;

const RED: &str = "\x1b[1;31m";
const YELLOW: &str = "\x1b[1;33m";
const GREEN: &str = "\x1b[32m";
const PLAIN: &str = "\x1b[0m";

/// The word with which a line begins, behind two spaces at most, and its colour.
const BEGINNINGS: [(&str, &str); 4] = [("error:", RED), ("warning:", YELLOW), ("hint:", GREEN), ("best:", GREEN)];
/// How the line of the best row of a table ends.
const BEST: &str = "  best";

/// Whether terminals get colours: unless the environment has `NO_COLOR` (no-color.org), or `TERM` is `dumb`.
fn are_wanted() -> bool {
    static WANTED: OnceLock<bool> = OnceLock::new();
    *WANTED.get_or_init(|| {
        let is_off = variable("NO_COLOR").is_some_and(|value| !value.is_empty());
        !is_off && variable("TERM").is_none_or(|terminal| terminal != "dumb")
    })
}

/// The text for a terminal, in colours if they are wanted.
pub(super) fn coloured(text: Cow<'_, str>) -> Cow<'_, str> {
    if are_wanted() { in_colours(text) } else { text }
}

/// The text with a colour for known words at the beginnings of lines, which may be indented by two spaces, and for the
/// mark of a table's best row.
fn in_colours(text: Cow<'_, str>) -> Cow<'_, str> {
    let has_word = |word: &str| text.contains(word);
    if !BEGINNINGS.iter().any(|(word, _)| has_word(word)) && !has_word(BEST) {
        return text;
    }
    let mut all = String::with_capacity(text.len() + 16);
    for line in text.split_inclusive('\n') {
        let (body, end) = line.strip_suffix('\n').map_or((line, ""), |body| (body, "\n"));
        let inner = body.trim_start_matches(' ');
        let indent = &body[..body.len() - inner.len()];
        let beginning = BEGINNINGS.iter().filter(|_| indent.len() <= 2).find(|(word, _)| inner.starts_with(word));
        let written = match (beginning, body.strip_suffix(BEST)) {
            (Some((word, colour)), _) => write!(all, "{indent}{colour}{word}{PLAIN}{}{end}", &inner[word.len()..]),
            (None, Some(before)) => write!(all, "{before}{GREEN}{BEST}{PLAIN}{end}"),
            (None, None) => write!(all, "{line}"),
        };
        written.expect("a String takes all text");
    }
    Cow::Owned(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_words_of_faults_and_the_best_are_coloured() {
        for (text, expected) in [
            ("error: no\n  hint: yes\n", "\x1b[1;31merror:\x1b[0m no\n  \x1b[32mhint:\x1b[0m yes\n"),
            ("warning: a: error: b", "\x1b[1;33mwarning:\x1b[0m a: error: b"),
            ("lr=1  2.5  best\nbest: out/lr=1\n", "lr=1  2.5\x1b[32m  best\x1b[0m\n\x1b[32mbest:\x1b[0m out/lr=1\n"),
            ("    hint: of a sample\n", "    hint: of a sample\n"),
            ("the best\nno error: here", "the best\nno error: here"),
        ] {
            assert_eq!(in_colours(Cow::Borrowed(text)), expected);
        }
    }
}
