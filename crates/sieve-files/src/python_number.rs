//! Numbers that Python's `json` writes and JSON does not have.

/// Values of floats for which Python's `json` writes a word, longest first.
const WORDS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

/// The word for a number that a JSON reader met at a line and column of `text`, both from 1 and the column in bytes;
/// `None` if another mistake is there.
pub fn python_number(text: &str, line: usize, column: usize) -> Option<&'static str> {
    let line = text.split('\n').nth(line.checked_sub(1)?)?.as_bytes();
    let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'-';
    // A reader may stop behind the minus sign.
    let before = line.get(..column.checked_sub(1)?.min(line.len()))?;
    let start = before.len() - before.iter().rev().take_while(|byte| is_part(byte)).count();
    let len = line[start..].iter().take_while(|byte| is_part(byte)).count();
    WORDS.into_iter().find(|word| word.as_bytes() == &line[start..start + len])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_found_where_a_reader_stops() {
        // Where serde_json stops.
        for (text, [line, column], found) in [
            ("{\"a\": NaN}", [1, 7], Some("NaN")),
            ("{\"a\": [1,\n -Infinity]}", [2, 3], Some("-Infinity")),
            ("{\"a\":Infinity", [1, 6], Some("Infinity")),
            ("{\"a\": nan}", [1, 9], None),
            ("{\"a\": NaNs}", [1, 7], None),
            ("{\"a\": }", [1, 7], None),
            ("NaN", [1, 1], Some("NaN")),
            ("é NaN", [1, 4], Some("NaN")),
            ("", [1, 0], None),
        ] {
            assert_eq!(python_number(text, line, column), found, "{text}");
        }
        assert_eq!(python_number("NaN", 0, 0), None);
        assert_eq!(python_number("NaN", 9, 9), None);
    }
}
