//! Files that a command writes at its end, whole or not at all.
use anyhow::{Result, bail};
use clap::builder::{PathBufValueParser, TryMapValueParser, TypedValueParser, ValueParserFactory};
use sieve_core::ShownPath;
use sieve_files::{FileError, check_replaceable, replace, write_synced};
use std::ops::Deref;
use std::path::{Path, PathBuf};

/// The path of a file to write, as a flag gives it: `--out`, `--plot`. That it can be written is checked as soon as the
/// flags are read, before any work.
#[derive(Clone, Debug)]
pub(crate) struct OutFile(PathBuf);

impl OutFile {
    /// Fails if the file could not be replaced. Tries it by making and removing the temporary file. The message follows
    /// one that names the path.
    fn new(path: PathBuf) -> Result<Self, String> {
        if path.is_dir() {
            return Err("it is a folder\n  hint: name a file in it".to_owned());
        }
        if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty() && !parent.is_dir()) {
            return Err(format!("there is no folder {}\n  hint: make it first", parent.shown()));
        }
        check_replaceable(&path).map_err(|FileError { source, .. }| format!("it cannot be written: {source}"))?;
        Ok(Self(path))
    }

    /// Fails if a file is there: for commands that replace none.
    pub(crate) fn check_new(&self) -> Result<()> {
        if self.is_file() {
            bail!("{} is there already\n  hint: name another file with --out, or remove this one", self.shown());
        }
        Ok(())
    }

    /// Writes the file: `write` writes and syncs it under the name that it gets.
    pub(crate) fn write<T, E: From<FileError>>(&self, write: impl FnOnce(&Path) -> Result<T, E>) -> Result<T, E> {
        replace(self, write)
    }

    /// Writes a text.
    pub(crate) fn write_text(&self, text: &str) -> Result<()> {
        write_text(self, text)
    }
}

impl Deref for OutFile {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl ValueParserFactory for OutFile {
    type Parser = TryMapValueParser<PathBufValueParser, fn(PathBuf) -> Result<Self, String>>;

    fn value_parser() -> Self::Parser {
        PathBufValueParser::new().try_map(Self::new)
    }
}

/// Writes a file of text whose path the program has chosen, whole or not at all.
pub(crate) fn write_text(path: &Path, text: &str) -> Result<()> {
    Ok(replace(path, |partial| write_synced(partial, text.as_bytes()))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_checked_when_it_is_read_and_nothing_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let new = |name: &str| OutFile::new(folder.path().join(name));
        let file = new("a.json").expect("new");
        assert_eq!(std::fs::read_dir(folder.path()).expect("there").count(), 0);
        file.check_new().expect("new");
        file.write_text("one").expect("writable");
        new("a.json").expect("replaceable").check_new().expect_err("there");
        for (bad, words) in [("", "a folder"), ("no/where.json", "no folder"), ("a.json/x", "no folder")] {
            assert!(new(bad).expect_err(bad).contains(words));
        }
    }
}
