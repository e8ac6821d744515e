//! Numbers in a short form, such as `4k`, which no setting takes: the unit may be 1000 or 1024.

/// Letters of units, each with the power of 1000 or 1024 that it stands for.
const UNITS: [(char, u32); 4] = [('k', 1), ('m', 2), ('g', 3), ('b', 3)];

/// The numbers that a short form may stand for, in words: `4000, or 4096`; `None` for any other text.
///
/// ```
/// assert_eq!(sieve_core::number_of_short_form("4k").as_deref(), Some("4000, or 4096"));
/// assert_eq!(sieve_core::number_of_short_form("1e3").as_deref(), Some("1000"));
/// assert_eq!(sieve_core::number_of_short_form("1_000").as_deref(), Some("1000"));
/// assert_eq!(sieve_core::number_of_short_form("four"), None);
/// ```
pub fn number_of_short_form(text: &str) -> Option<String> {
    let text = text.trim().to_lowercase().replace(['_', ' '], "");
    if !text.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    let unit = UNITS.iter().find(|(letter, _)| text.ends_with(*letter));
    let number: f64 = text.trim_end_matches(|c: char| c.is_ascii_alphabetic()).parse().ok()?;
    let whole = |number: f64| (number.fract() == 0.0 && number < 1e15).then(|| format!("{number:.0}"));
    match unit {
        Some((letter, power)) if text.matches(char::is_alphabetic).count() == 1 => {
            let [round, binary] = [1000.0f64, 1024.0].map(|base| whole(number * base.powi(*power as i32)));
            // `b` stands for a billion, which has no power of two beside it; `k` may mean 1000 or 1024.
            match (round?, binary.filter(|_| *letter != 'b')) {
                (round, Some(binary)) => Some(format!("{round}, or {binary}")),
                (round, None) => Some(round),
            }
        }
        Some(_) => None,
        None => whole(text.parse().ok()?),
    }
}
