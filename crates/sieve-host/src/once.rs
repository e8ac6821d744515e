//! Lists in which no value may come twice.
use anyhow::{Result, bail};

/// Refuses a value that a flag names twice: what it names would be measured twice, and one row would look like two.
///
/// # Errors
/// Two equal values.
pub fn once(flag: &str, values: &[String]) -> Result<()> {
    let twice = values.iter().enumerate().find(|(at, value)| values[..*at].contains(value));
    if let Some((_, value)) = twice {
        bail!("{flag} names {value} twice\n  hint: once is enough");
    }
    Ok(())
}
