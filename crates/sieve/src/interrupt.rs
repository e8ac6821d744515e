//! SIGINT, SIGTERM and SIGHUP: the first asks a run to stop at the next step, the second ends the process at once.
use crate::exit::Exit;
use crate::terminal;
use crate::train::LAUNCHED;
use anyhow::{Context, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Requests made by signals.
pub(crate) struct Interrupt {
    stop: Arc<AtomicBool>,
    /// Whether there is a state that a checkpoint could keep.
    has_state: Arc<AtomicBool>,
}

impl Interrupt {
    /// Installs handlers for SIGINT and SIGTERM. Of several processes that train together one `tells` what follows.
    pub(crate) fn install(tells: bool) -> Result<Self> {
        let this = Self {
            stop: Arc::new(AtomicBool::new(false)),
            has_state: Arc::new(AtomicBool::new(false)),
        };
        let (stop, has_state) = (this.stop.clone(), this.has_state.clone());
        let ask = move || {
            if !has_state.load(Ordering::Relaxed) {
                if tells {
                    terminal::line("stopped before the first step; nothing is lost, the same command starts again");
                }
                Exit::Interrupted.now();
            }
            if stop.swap(true, Ordering::Relaxed) {
                Exit::Interrupted.now();
            }
            if tells {
                terminal::line("stopping after this step and writing a checkpoint; once more to quit at once");
            }
        };
        if std::env::var_os(LAUNCHED).is_some() {
            let ask = ask.clone();
            std::thread::spawn(move || {
                // Nothing is ever written there: it ends when the launcher does, which then forwards no signal.
                let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
                ask();
            });
        }
        ctrlc::set_handler(ask).context("installing the signal handler")?;
        Ok(this)
    }

    /// From here on a signal asks for a checkpoint; until here it ends the process, as there is nothing to keep.
    pub(crate) fn keep_state(&self) -> &AtomicBool {
        self.has_state.store(true, Ordering::Relaxed);
        &self.stop
    }
}

/// Lets a run started with `nohup` outlive its terminal, whose SIGHUP would stop it like any other signal taken over.
///
/// Call it before any thread is started: threads inherit the blocked signal.
pub(crate) fn respect_nohup() {
    #[cfg(unix)]
    {
        use nix::sys::signal::{SigSet, Signal::SIGHUP};
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let ignored = status
            .lines()
            .find_map(|line| line.strip_prefix("SigIgn:"))
            .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        if ignored.is_some_and(|mask| mask >> (SIGHUP as u64 - 1) & 1 == 1) {
            let mut hangup = SigSet::empty();
            hangup.add(SIGHUP);
            // Where it cannot be blocked, a hangup stops the run with a checkpoint.
            let _ = hangup.thread_block();
        }
    }
}

/// Makes a write beyond the limit on file sizes (`ulimit -f`) an error like any other instead of the program's end.
pub(crate) fn have_large_files_refused() {
    #[cfg(unix)]
    {
        use nix::sys::signal::{SigHandler, Signal::SIGXFSZ, signal};
        // SAFETY: no handler runs; the signal is ignored. Where it cannot be, it ends the program as it always did.
        let _ = unsafe { signal(SIGXFSZ, SigHandler::SigIgn) };
    }
}
