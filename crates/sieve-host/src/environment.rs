//! Environment variables.

/// Environment variable that `sieve launch` sets for its processes.
pub const LAUNCHED: &str = "SIEVE_LAUNCHED";

/// Environment variable with which NCCL runs on Burn's stream and overlaps nothing, for measurements and debugging.
pub(crate) const NCCL_INLINE: &str = "SIEVE_NCCL_INLINE";

/// The program's variables that are 0 or 1. sieve-cpu reads the first.
pub const SWITCHES: [&str; 2] = ["SIEVE_AMX", NCCL_INLINE];

/// Whether one of the [`SWITCHES`] is on; `None` where it is unset or empty.
///
/// # Errors
/// The value is neither 0 nor 1.
pub fn switch(name: &str) -> anyhow::Result<Option<bool>> {
    match variable(name).as_deref() {
        None | Some("") => Ok(None),
        Some("0") => Ok(Some(false)),
        Some("1") => Ok(Some(true)),
        Some(other) => anyhow::bail!("{name}={other} is neither 0 nor 1\n  hint: give one of them, or leave it out"),
    }
}

/// Value of an environment variable; `None` if it is unset or not UTF-8.
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}
