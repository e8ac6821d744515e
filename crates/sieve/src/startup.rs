//! Before a command: the startup time, and whether `RAYON_NUM_THREADS` is valid.
use anyhow::{Result, bail};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

static BEGAN: OnceLock<Instant> = OnceLock::new();

/// To be called first of all.
pub(crate) fn mark() {
    BEGAN.get_or_init(Instant::now);
}

/// Time since [`mark`] at the first call; later calls come after other work.
pub(crate) fn elapsed_once() -> Option<Duration> {
    static TOLD: AtomicBool = AtomicBool::new(false);
    let is_first = !TOLD.swap(true, Ordering::Relaxed);
    is_first.then(|| BEGAN.get_or_init(Instant::now).elapsed())
}

/// Threads a core, and in all, that may be asked for: more wait for each other and look like a program that hangs.
const MOST_THREADS_A_CORE: usize = 8;
const MOST_THREADS: usize = 64;

/// Refuses a number of threads (`RAYON_NUM_THREADS`) that the thread pool would silently ignore or fail on.
///
/// # Errors
/// The value, and what may be given.
pub(crate) fn check_threads(value: Option<String>) -> Result<()> {
    let Some(value) = value.filter(|value| !value.is_empty()) else {
        return Ok(());
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let most = (MOST_THREADS_A_CORE * cores).max(MOST_THREADS);
    match value.parse::<usize>() {
        // 0 is the pool's own word for all cores.
        Ok(threads) if threads <= most => Ok(()),
        Ok(_) => bail!(
            "RAYON_NUM_THREADS={value} asks for too many threads: this machine has {cores} cores\n  \
             hint: give at most {most}, or leave it out to take all cores"
        ),
        Err(_) => bail!(
            "RAYON_NUM_THREADS={value} is not a number of threads\n  \
             hint: give a whole number, or leave it out to take all {cores} cores"
        ),
    }
}
