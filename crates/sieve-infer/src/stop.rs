//! Finds stop texts in a text that arrives piece by piece.

/// Passes a text on up to the first stop text. An end that may begin a stop text is held back until the next piece.
#[derive(Clone, Debug, Default)]
pub struct StopTexts {
    texts: Vec<String>,
    waiting: String,
}

impl StopTexts {
    /// Stops at the first of `texts`. Empty texts are ignored.
    pub fn new(texts: &[String]) -> Self {
        let texts = texts.iter().filter(|text| !text.is_empty());
        Self { texts: texts.cloned().collect(), waiting: String::new() }
    }

    /// Adds a piece. Returns the text that can be shown now, and whether a stop text follows it.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        self.waiting += piece;
        // Stop texts longer than the waiting text cannot be in it, and a search for a longer text takes more time.
        let texts = self.texts.iter().filter(|text| text.len() <= self.waiting.len());
        let found = texts.filter_map(|text| self.waiting.find(text.as_str()));
        if let Some(at) = found.min() {
            self.waiting.truncate(at);
            return (std::mem::take(&mut self.waiting), true);
        }
        // The text from here on may be the beginning of a stop text.
        let may_begin = |at: &usize| self.texts.iter().any(|text| text.starts_with(&self.waiting[*at..]));
        let shown = self.waiting.char_indices().map(|(at, _)| at).find(may_begin).unwrap_or(self.waiting.len());
        let rest = self.waiting.split_off(shown);
        (std::mem::replace(&mut self.waiting, rest), false)
    }

    /// The text still held back when the text ended.
    pub fn finish(self) -> String {
        self.waiting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(texts: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let texts = texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let mut stop = StopTexts::new(&texts);
        let mut shown = Vec::new();
        for piece in pieces {
            let (text, is_met) = stop.push(piece);
            shown.push(text);
            if is_met {
                return (shown, true);
            }
        }
        shown.push(stop.finish());
        (shown, false)
    }

    #[test]
    fn text_ends_before_the_first_stop_text() {
        let strings = |texts: &[&str]| texts.iter().map(|t| (*t).to_owned()).collect::<Vec<_>>();
        assert_eq!(shown(&[], &["a", "b"]), (strings(&["a", "b", ""]), false));
        assert_eq!(shown(&["END"], &["one E", "N", "D two"]), (strings(&["one ", "", ""]), true));
        // Text that only began like a stop text is shown later, or by `finish` when the text ends.
        assert_eq!(shown(&["END"], &["EN", "EN"]), (strings(&["", "EN", "EN"]), false));
        assert_eq!(shown(&["\n\n", ".", ""], &["a b.c\n\n"]), (strings(&["a b"]), true));
        assert_eq!(shown(&["é!"], &["café", "?"]), (strings(&["caf", "é?", ""]), false));
    }
}
