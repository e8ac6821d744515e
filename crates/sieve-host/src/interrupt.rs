//! SIGINT, SIGTERM and SIGHUP: the first signal asks a run to stop after its step, another one a second later or more
//! ends the process at once.
use crate::environment::LAUNCHED;
use crate::exit::Exit;
use crate::terminal;
use anyhow::{Context, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Signals within this time of the first are the first again: `timeout` sends one to the process and one to its group,
/// and a launcher that dies forwards one and closes its pipe.
const ONE_REQUEST: Duration = Duration::from_secs(1);

/// What a signal asks for.
pub enum Asked {
    /// To stop at the next place where nothing is lost.
    Stop,
    /// The same once more: nothing is to be done.
    Same,
    /// To end at once.
    QuitAtOnce,
}

/// The signals that came.
#[derive(Clone, Default)]
pub struct Signals(Arc<OnceLock<Instant>>);

impl Signals {
    /// What a signal that comes now asks for.
    pub fn count(&self) -> Asked {
        let mut is_first = false;
        let first = self.0.get_or_init(|| {
            is_first = true;
            Instant::now()
        });
        match first.elapsed() {
            _ if is_first => Asked::Stop,
            since if since < ONE_REQUEST => Asked::Same,
            _ => Asked::QuitAtOnce,
        }
    }
}

/// Flags that the signal handler sets and reads.
pub struct Interrupt {
    stop: Arc<AtomicBool>,
    /// Whether there is a training state to save.
    has_state: Arc<AtomicBool>,
}

impl Interrupt {
    /// Installs the signal handler. With `prints`, as on one rank of a run, it prints what happens next.
    pub fn install(prints: bool) -> Result<Self> {
        let this = Self { stop: Arc::new(AtomicBool::new(false)), has_state: Arc::new(AtomicBool::new(false)) };
        let (stop, has_state, signals) = (this.stop.clone(), this.has_state.clone(), Signals::default());
        let ask = move || {
            if !has_state.load(Ordering::Relaxed) {
                if prints {
                    terminal::line("stopped before the first step; nothing is lost, the same command starts again");
                }
                Exit::Interrupted.at_once();
            }
            match signals.count() {
                Asked::Stop => stop.store(true, Ordering::Relaxed),
                Asked::Same => return,
                Asked::QuitAtOnce => Exit::Interrupted.at_once(),
            }
            if prints {
                terminal::line("stopping after this step and writing a checkpoint; once more to quit at once");
            }
        };
        if std::env::var_os(LAUNCHED).is_some() {
            let ask = ask.clone();
            std::thread::spawn(move || {
                // The launcher writes nothing to this pipe. It closes when the launcher dies, and that counts as a
                // signal, since no other process forwards one any more.
                let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
                ask();
            });
        }
        ctrlc::set_handler(ask).context("installing the signal handler")?;
        Ok(this)
    }

    /// From this call on, the first signal asks for a checkpoint by setting the returned flag. Before it, a signal ends
    /// the process, since there is no state to save.
    pub fn keep_state(&self) -> &AtomicBool {
        self.has_state.store(true, Ordering::Relaxed);
        &self.stop
    }
}

/// Blocks SIGHUP if the process was started with it ignored, as `nohup` does. Otherwise the signal handler, which also
/// takes SIGHUP, would stop the run when its terminal closes.
///
/// Call this before starting threads: they inherit the mask of blocked signals.
pub fn respect_nohup() {
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
            // If blocking fails, a hangup stops the run with a checkpoint.
            let _ = hangup.thread_block();
        }
    }
}

/// Ignores SIGXFSZ, so that a write beyond the limit on file sizes (`ulimit -f`) returns an error instead of killing
/// the program.
pub fn have_large_files_refused() {
    #[cfg(unix)]
    {
        use nix::sys::signal::{SigHandler, Signal::SIGXFSZ, signal};
        // SAFETY: no handler runs; the signal is ignored. Where it cannot be, it ends the program as it always did.
        let _ = unsafe { signal(SIGXFSZ, SigHandler::SigIgn) };
    }
}

#[cfg(test)]
mod tests {
    use super::{Asked, Signals};

    #[test]
    fn signals_that_come_together_ask_once() {
        let signals = Signals::default();
        assert!(matches!(signals.count(), Asked::Stop));
        assert!(matches!(signals.clone().count(), Asked::Same));
    }
}
