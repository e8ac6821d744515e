//! How long the program takes until it is at work.
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

static BEGAN: OnceLock<Instant> = OnceLock::new();

/// To be called first of all.
pub(crate) fn mark() {
    BEGAN.get_or_init(Instant::now);
}

/// Time since [`mark`], the first time that this is asked: what begins later begins after other work.
pub(crate) fn elapsed_once() -> Option<Duration> {
    static TOLD: AtomicBool = AtomicBool::new(false);
    let is_first = !TOLD.swap(true, Ordering::Relaxed);
    is_first.then(|| BEGAN.get_or_init(Instant::now).elapsed())
}
