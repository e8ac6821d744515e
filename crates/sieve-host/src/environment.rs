//! Environment variables.

/// Environment variable that `sieve launch` sets for its processes.
pub const LAUNCHED: &str = "SIEVE_LAUNCHED";

/// Environment variable with which NCCL runs on Burn's stream and overlaps nothing, for measurements and debugging.
pub(crate) const NCCL_INLINE: &str = "SIEVE_NCCL_INLINE";

/// The program's variables that are 0 or 1. sieve-cpu reads the first.
pub const SWITCHES: [&str; 2] = ["SIEVE_AMX", NCCL_INLINE];

/// Variables whose values are text, besides the [`SWITCHES`]. In one with other bytes [`variable`] would change them.
const TEXTS: [&str; 20] = [
    "RAYON_NUM_THREADS",
    "SIEVE_API_KEY",
    "SIEVE_TOKEN",
    "HF_TOKEN",
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "SSL_CERT_FILE",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PET_NNODES",
    "PET_NODE_RANK",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "JOB_COMPLETION_INDEX",
];

/// Refuses variables that are not text where text is read.
///
/// # Errors
/// Such a variable has other bytes.
pub fn check_texts() -> anyhow::Result<()> {
    TEXTS.iter().chain(&SWITCHES).try_for_each(|name| match std::env::var(name) {
        Err(std::env::VarError::NotUnicode(_)) => {
            anyhow::bail!("{name} is set to bytes that are not UTF-8\n  hint: set it to text, or leave it out")
        }
        _ => Ok(()),
    })
}

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

/// Value of a variable that protects something; `None` where it is unset.
///
/// # Errors
/// The variable is empty, as where a secret could not be read. It counts as a mistake, because nothing would be
/// protected.
pub fn secret(name: &str) -> anyhow::Result<Option<String>> {
    match variable(name) {
        Some(empty) if empty.is_empty() => {
            anyhow::bail!("{name} is set, and it is empty\n  hint: set it to a secret, or leave it out (unset {name})")
        }
        value => Ok(value),
    }
}

/// Value of an environment variable; `None` if it is unset. Bytes that are not UTF-8 become U+FFFD, so that a path of
/// them is not found, where it would be taken as unset.
pub fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}
