//! A run's printed lines, which also go into its `log` file.
use anyhow::{Context, Result};
use sieve_core::{ShownPath, shown_text};
use sieve_host::terminal;
use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;

/// Prints lines and appends them to the run's `log` file. Lines from before [`open`](Self::open) are written then.
pub(super) struct Log {
    /// False on ranks other than 0, which neither print nor write.
    prints: bool,
    /// Whether the run is one of a sweep, which prints a line for each run: the run's own lines are logged, and printed
    /// with `--verbose`.
    of_sweep: bool,
    file: RefCell<Option<File>>,
    early: RefCell<String>,
}

impl Log {
    pub(super) fn new(prints: bool, of_sweep: bool) -> Self {
        Self { prints, of_sweep, file: RefCell::default(), early: RefCell::default() }
    }

    /// Whether this process prints and logs.
    pub(super) fn prints(&self) -> bool {
        self.prints
    }

    /// Opens the log file and writes the earlier lines into it, on rank 0.
    pub(super) fn open(&mut self, path: &Path) -> Result<()> {
        if !self.prints {
            return Ok(());
        }
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .with_context(|| format!("opening {}", path.shown()))?;
        file.write_all(self.early.take().as_bytes()).with_context(|| format!("writing {}", path.shown()))?;
        *self.file.borrow_mut() = Some(file);
        Ok(())
    }

    /// Prints a line and writes it to the log.
    pub(super) fn line(&self, text: &str) {
        self.short(text, text);
    }

    /// Prints a run's result even under `--quiet`, and logs it.
    pub(super) fn result(&self, text: &str) {
        if self.of_sweep { self.line(text) } else { self.always(text) }
    }

    /// Prints a warning even under `--quiet`, and logs it.
    pub(super) fn always(&self, text: &str) {
        if self.prints {
            terminal::line(text);
        }
        self.keep(text);
    }

    /// Prints `short`, or with `--verbose` `whole`, and logs `whole`.
    pub(super) fn short(&self, short: &str, whole: &str) {
        if self.prints && (!self.of_sweep || terminal::is_verbose()) {
            terminal::status(if terminal::is_verbose() { whole } else { short });
        }
        self.keep(whole);
    }

    /// Writes a line to the log without printing it.
    pub(super) fn keep(&self, text: &str) {
        if !self.prints {
            return;
        }
        match self.file.borrow_mut().as_mut() {
            // A line that cannot be logged is dropped: the run should continue.
            Some(file) => drop(writeln!(file, "{}", shown_text(text))),
            None => self.early.borrow_mut().push_str(&format!("{}\n", shown_text(text))),
        }
    }
}
