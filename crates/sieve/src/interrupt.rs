//! SIGINT and SIGTERM: the first asks a run to stop at the next step, the second ends the process at once.
use anyhow::{Context, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Exit code of a process that a second signal ended, as shells report SIGINT.
const INTERRUPTED: i32 = 130;

/// A flag that the first signal sets.
pub(crate) fn stop_flag() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::Relaxed) {
            std::process::exit(INTERRUPTED);
        }
        crate::terminal::line(
            "stopping after this step and writing a checkpoint; once more to quit at once",
        );
    })
    .context("installing the signal handler")?;
    Ok(stop)
}
