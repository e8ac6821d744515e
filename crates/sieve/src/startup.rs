//! How long the program takes until it is at work.
use std::sync::OnceLock;
use std::time::{Duration, Instant};

static BEGAN: OnceLock<Instant> = OnceLock::new();

/// To be called first of all.
pub(crate) fn mark() {
    BEGAN.get_or_init(Instant::now);
}

/// Time since [`mark`].
pub(crate) fn elapsed() -> Duration {
    BEGAN.get_or_init(Instant::now).elapsed()
}
