//! What a run prints, kept in its `log` file.
use crate::terminal;
use anyhow::{Context, Result};
use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;

/// Terminal lines, kept in `log` too. Lines from before the file is open are written when it is.
pub(super) struct Log {
    /// False in a process that another one speaks for.
    tells: bool,
    file: RefCell<Option<File>>,
    early: RefCell<String>,
}

impl Log {
    pub(super) fn new(tells: bool) -> Self {
        Self {
            tells,
            file: RefCell::default(),
            early: RefCell::default(),
        }
    }

    pub(super) fn open(&mut self, path: &Path) -> Result<()> {
        if !self.tells {
            return Ok(());
        }
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .with_context(|| format!("opening {}", path.display()))?;
        file.write_all(self.early.take().as_bytes())
            .with_context(|| format!("writing {}", path.display()))?;
        *self.file.borrow_mut() = Some(file);
        Ok(())
    }

    /// Prints and keeps.
    pub(super) fn line(&self, text: &str) {
        self.short(text, text);
    }

    /// Prints a line even under `--quiet`, and logs it.
    pub(super) fn always(&self, text: &str) {
        if self.tells {
            terminal::line(text);
        }
        self.keep(text);
    }

    /// Prints a short form and keeps the whole.
    pub(super) fn short(&self, short: &str, whole: &str) {
        if self.tells {
            terminal::status(if terminal::is_verbose() { whole } else { short });
        }
        self.keep(whole);
    }

    /// Keeps without printing.
    pub(super) fn keep(&self, text: &str) {
        if !self.tells {
            return;
        }
        match self.file.borrow_mut().as_mut() {
            // The log repeats the terminal; losing a line of it is no reason to stop a run.
            Some(file) => drop(writeln!(file, "{text}")),
            None => self.early.borrow_mut().push_str(&format!("{text}\n")),
        }
    }
}
