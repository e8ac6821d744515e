use crate::thousands;

/// Formats a number with its noun: `1 document`, `1,234 documents`, `2 micro-batches`.
pub fn counted(count: u64, noun: &str) -> String {
    let ending = match count {
        1 => "",
        _ if noun.ends_with("ch") => "es",
        _ => "s",
    };
    format!("{} {noun}{ending}", thousands(count))
}
