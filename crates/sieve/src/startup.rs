//! The program's start: measures the startup time, and refuses wrong environment variables that nobody would notice.
use anyhow::{Result, bail};
use sieve_host::environment;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

static BEGAN: OnceLock<Instant> = OnceLock::new();

/// Records the time of the program's start. Call it first.
pub(crate) fn mark() {
    BEGAN.get_or_init(Instant::now);
}

/// The time since [`mark`] at the first call, `None` at later ones: in a sweep, only the first run's startup counts.
pub(crate) fn elapsed_once() -> Option<Duration> {
    static WAS_CALLED: AtomicBool = AtomicBool::new(false);
    let is_first = !WAS_CALLED.swap(true, Ordering::Relaxed);
    is_first.then(|| BEGAN.get_or_init(Instant::now).elapsed())
}

/// Allowed threads for each core. With many more, threads wait for each other and the program seems to hang.
const MOST_THREADS_A_CORE: usize = 8;
/// Threads that are allowed on any machine.
const MOST_THREADS: usize = 64;

/// Refuses variables that the program would take for something else: a number of threads, switches, and an empty token
/// of the processes of one run.
///
/// # Errors
/// A value that cannot be meant.
pub(crate) fn check_variables() -> Result<()> {
    environment::check_texts()?;
    environment::secret("SIEVE_TOKEN")?;
    check_threads(environment::variable("RAYON_NUM_THREADS"))?;
    environment::SWITCHES.iter().try_for_each(|name| environment::switch(name).map(drop))
}

/// Refuses a number of threads (`RAYON_NUM_THREADS`) that the thread pool would silently ignore or fail on.
///
/// # Errors
/// The value is no number, or too large.
fn check_threads(value: Option<String>) -> Result<()> {
    let Some(value) = value.filter(|value| !value.is_empty()) else {
        return Ok(());
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let most = (MOST_THREADS_A_CORE * cores).max(MOST_THREADS);
    match value.parse::<usize>() {
        // rayon takes 0 threads as "all cores".
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
