//! What every crate's errors say of input that does not fit: what is wrong, and how to fix it.
use std::borrow::Cow;

/// A refusal, which the errors of several crates carry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}\n  hint: {hint}")]
pub struct Refusal {
    /// What is wrong, and where.
    pub what: String,
    /// How to fix it.
    pub hint: Cow<'static, str>,
}

impl Refusal {
    /// A refusal with these words.
    pub fn new(what: impl Into<String>, hint: impl Into<Cow<'static, str>>) -> Self {
        Self { what: what.into(), hint: hint.into() }
    }

    /// The refusal that an error's text says; `hint` is for a text without one.
    pub fn of_text(text: &str, hint: &'static str) -> Self {
        match text.split_once("\n  hint: ") {
            Some((what, hint)) => Self::new(what, hint.to_owned()),
            None => Self::new(text, hint),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Refusal;

    #[test]
    fn a_refusal_is_read_back_from_its_text() {
        let refusal = Refusal::new("no such file", "name another");
        assert_eq!(refusal.to_string(), "no such file\n  hint: name another");
        assert_eq!(Refusal::of_text(&refusal.to_string(), "unused"), refusal);
        assert_eq!(Refusal::of_text("no such file", "name another"), refusal);
    }
}
