//! How a model is asked, for the commands that say what to type next.
use crate::terminal;
use crate::text_files::first_words;

/// A message to a chat model of which nothing else is known. The page of an export has the same.
const MESSAGE: &str = "Who are you?";
/// The beginning of a text for a model of which nothing else is known.
const BEGINNING: &str = "The ";
/// Characters of the words that a command has, at most.
const MOST_CHARACTERS: usize = 200;

/// Words to ask a model with.
pub struct Ask {
    /// Whether the words are a message for the model's chat template, not the beginning of a text.
    is_chat: bool,
    words: String,
}

impl Ask {
    /// Asks with `words`; if they hold a control character such as a line break, with the beginning of their first line
    /// that is not blank. Without usable words, asks with `MESSAGE` or `BEGINNING`.
    pub fn with(is_chat: bool, words: Option<&str>) -> Self {
        let words = words.and_then(|words| {
            if words.contains(char::is_control) { first_words(words, MOST_CHARACTERS) } else { Some(words.to_owned()) }
        });
        let usual = if is_chat { MESSAGE } else { BEGINNING };
        Self { is_chat, words: words.unwrap_or_else(|| usual.to_owned()) }
    }

    /// Whether the words are a message for the model's chat template.
    pub fn is_chat(&self) -> bool {
        self.is_chat
    }

    /// The message, or the beginning of a text.
    pub fn words(&self) -> &str {
        &self.words
    }

    /// The command that asks a model, without the model.
    pub fn command(&self) -> String {
        let chat = if self.is_chat { " --chat" } else { "" };
        // With a dash at its beginning a word would be read as a flag.
        let join = if self.words.starts_with('-') { "=" } else { " " };
        format!("generate{chat} --prompt{join}{}", terminal::shell_word(&self.words))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_asks_on_one_line() {
        for (is_chat, words, command) in [
            (true, None, "generate --chat --prompt 'Who are you?'"),
            (false, None, "generate --prompt 'The '"),
            (false, Some("it's"), "generate --prompt 'it'\\''s'"),
            (true, Some("What is 5 plus 7?\nSay it."), "generate --chat --prompt 'What is 5 plus 7?'"),
            (true, Some("\n \n"), "generate --chat --prompt 'Who are you?'"),
            (false, Some("- a list"), "generate --prompt='- a list'"),
            (false, Some(""), "generate --prompt ''"),
        ] {
            assert_eq!(Ask::with(is_chat, words).command(), command);
        }
    }
}
