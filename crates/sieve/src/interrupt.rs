//! SIGINT and SIGTERM: the first asks a run to stop at the next step, the second ends the process at once.
use crate::terminal;
use anyhow::{Context, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Exit code of a process that a signal ended before it could keep anything, as shells report SIGINT.
const INTERRUPTED: i32 = 130;

/// What signals ask for.
pub(crate) struct Interrupt {
    stop: Arc<AtomicBool>,
    /// Whether there is a state that a checkpoint could keep.
    has_state: Arc<AtomicBool>,
}

impl Interrupt {
    /// Takes SIGINT and SIGTERM over.
    pub(crate) fn install() -> Result<Self> {
        let this = Self {
            stop: Arc::new(AtomicBool::new(false)),
            has_state: Arc::new(AtomicBool::new(false)),
        };
        let (stop, has_state) = (this.stop.clone(), this.has_state.clone());
        ctrlc::set_handler(move || {
            if !has_state.load(Ordering::Relaxed) {
                terminal::line(
                    "stopped before the first step; nothing is lost, the same command starts again",
                );
                std::process::exit(INTERRUPTED);
            }
            if stop.swap(true, Ordering::Relaxed) {
                std::process::exit(INTERRUPTED);
            }
            terminal::line(
                "stopping after this step and writing a checkpoint; once more to quit at once",
            );
        })
        .context("installing the signal handler")?;
        Ok(this)
    }

    /// From here on a signal asks for a checkpoint; until here it ends the process, as there is nothing to keep.
    pub(crate) fn keep_state(&self) -> &AtomicBool {
        self.has_state.store(true, Ordering::Relaxed);
        &self.stop
    }
}
