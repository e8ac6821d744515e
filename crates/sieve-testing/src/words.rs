//! Checks that messages contain words, and tables of test cases.

/// Panics unless `text` contains each of `words`, which are separated by ` | `.
#[track_caller]
pub fn says(text: &str, words: &str) {
    for word in parts(words) {
        assert!(text.contains(word), "no {word:?} in: {text}");
    }
}

/// Panics unless `result` is an error whose message contains `words` (see [`says`]); returns the message.
#[track_caller]
pub fn refusal<T, E: std::fmt::Display>(result: Result<T, E>, words: &str) -> String {
    let Err(error) = result else {
        panic!("not refused with {words:?}");
    };
    let message = error.to_string();
    says(&message, words);
    message
}

/// Panics unless `work` panics with a message that contains `words` (see [`says`]).
#[track_caller]
pub fn panics<T>(words: &str, work: impl FnOnce() -> T) {
    let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)) else {
        panic!("no panic with {words:?}");
    };
    // The payload is a `String` where the panic has arguments, and a `&str` otherwise.
    let fixed = |panic: Box<dyn std::any::Any + Send>| panic.downcast_ref::<&str>().copied().unwrap_or("").to_owned();
    let message = panic.downcast::<String>().map_or_else(fixed, |text| *text);
    says(&message, words);
}

/// Parses a table of test cases. Each line is a row with ` => ` between columns. A `\` at the end of a line continues
/// the row on the next line, and `\n` in a cell is a line feed. Blank lines and lines that begin with `#` are skipped.
#[track_caller]
pub fn cases<const COLUMNS: usize>(table: &str) -> Vec<[&'static str; COLUMNS]> {
    let table: String = table.split("\\\n").map(str::trim_start).collect();
    let lines = table.lines().map(str::trim);
    let rows = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    let cell = |cell: &str| -> &'static str { cell.trim().replace("\\n", "\n").leak() };
    rows.map(|row| {
        let cells: Vec<_> = format!(" {row} ").split(" => ").map(cell).collect();
        let wrong = |cells| panic!("{COLUMNS} columns: {cells:?}");
        cells.try_into().unwrap_or_else(wrong)
    })
    .collect()
}

/// Splits a cell at ` | `.
#[track_caller]
pub fn parts(cell: &str) -> Vec<&str> {
    assert!(!cell.is_empty(), "a row names no word");
    cell.split(" | ").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_a_row_a_line() {
        let table = "\n  a b => \\\n  c | d e\n  # a remark\n\n  => f\n  g => h\\ni";
        assert_eq!(cases(table), [["a b", "c | d e"], ["", "f"], ["g", "h\ni"]]);
        assert_eq!(parts("c | d e"), ["c", "d e"]);
        std::panic::catch_unwind(|| cases::<3>("a => b")).expect_err("two columns");
        std::panic::catch_unwind(|| parts("")).expect_err("no word");
    }

    #[test]
    fn a_refusal_is_an_error_with_these_words() {
        let refused = |words| refusal(Err::<(), _>("a b"), words);
        assert_eq!(refused("a | b"), "a b");
        std::panic::catch_unwind(|| refused("c")).expect_err("another message");
        std::panic::catch_unwind(|| refusal(Ok::<_, String>(()), "a")).expect_err("no error");
    }

    #[test]
    fn a_panic_has_a_message_with_these_words() {
        panics("a | b", || panic!("a b"));
        panics("1 of 2", || panic!("{} of 2", 1));
        panics("no \"c\"", || panics("c", || panic!("a b")));
        panics("no panic", || panics("a", || ()));
    }

    #[test]
    #[should_panic(expected = "no \"c\" in: a b")]
    fn the_missing_word_is_named() {
        says("a b", "a | c");
    }
}
