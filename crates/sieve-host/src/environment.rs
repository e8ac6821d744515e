//! Environment variables.

/// Environment variable that `sieve launch` sets for its processes.
pub const LAUNCHED: &str = "SIEVE_LAUNCHED";

/// Value of an environment variable; `None` if it is unset or not UTF-8.
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}
