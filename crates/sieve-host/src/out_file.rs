//! Files that a command writes at its end, whole or not at all; pipes and devices in place.
use anyhow::{Result, bail};
use clap::builder::{PathBufValueParser, TryMapValueParser, TypedValueParser, ValueParserFactory};
use sieve_core::ShownPath;
use sieve_files::{FileError, check_replaceable, is_pipe_or_device, replace, write_synced};
use std::fmt;
use std::ops::Deref;
use std::path::{Path, PathBuf};

/// The path of a file to write, as a flag gives it: `--out`, `--plot`. That it can be written is checked as soon as the
/// flags are read, before any work.
#[derive(Clone, Debug)]
pub struct OutFile(PathBuf);

/// Reads the path of a folder or a file to write, which is on this machine.
pub fn on_this_machine() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| check_is_here(&path).map(|()| path))
}

/// Fails for the address of a bucket or of the hub: without a word it would become a folder `s3:` here.
fn check_is_here(path: &Path) -> Result<(), CannotWrite> {
    let text = path.to_string_lossy();
    let Some((scheme, _)) = text.split_once("://") else {
        return Ok(());
    };
    let is_scheme = scheme.starts_with(|first: char| first.is_ascii_alphabetic())
        && scheme.chars().all(|letter| letter.is_ascii_alphanumeric() || "+.-".contains(letter));
    if !is_scheme {
        Ok(())
    } else {
        Err(CannotWrite(format!(
            "{scheme}:// names another machine, and files are written on this one\n  \
         hint: name a path here, and copy or mount: rclone, hf upload, s3fs"
        )))
    }
}

impl OutFile {
    /// Fails if the file could not be replaced. Tries it by making and removing the temporary file. The message follows
    /// one that names the path.
    fn new(path: PathBuf) -> Result<Self, CannotWrite> {
        check_is_here(&path)?;
        let is_named_as_folder = path.as_os_str().to_string_lossy().ends_with(std::path::is_separator);
        if is_named_as_folder || path.is_dir() {
            return Err(CannotWrite("it is a folder\n  hint: name a file in it".to_owned()));
        }
        if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty() && !parent.is_dir()) {
            return Err(CannotWrite(format!("there is no folder {}\n  hint: make it first", parent.shown())));
        }
        check_replaceable(&path)
            .map_err(|FileError { source, .. }| CannotWrite(format!("it cannot be written: {source}")))?;
        Ok(Self(path))
    }

    /// Fails if a file or a link is there: for commands that replace none, before their work.
    pub fn check_new(&self) -> Result<()> {
        if self.symlink_metadata().is_ok() && !is_pipe_or_device(self) {
            bail!("{} already exists\n  hint: name another file with --out, or remove this one", self.shown());
        }
        Ok(())
    }

    /// Writes the file: `write` writes and syncs it under the name that it gets.
    pub fn write<T, E: From<FileError>>(&self, write: impl FnOnce(&Path) -> Result<T, E>) -> Result<T, E> {
        replace(self, write)
    }

    /// As [`Self::write`], and fails if a file came there meanwhile.
    pub fn write_new<T>(&self, write: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
        replace(self, |partial| {
            let written = write(partial)?;
            self.check_new()?;
            Ok(written)
        })
    }

    /// Writes a text to a new file.
    pub fn write_new_text(&self, text: &str) -> Result<()> {
        self.write_new(|partial| Ok(write_synced(partial, text.as_bytes())?))
    }

    /// Writes a text.
    pub fn write_text(&self, text: &str) -> Result<()> {
        write_text(self, text)
    }
}

impl Deref for OutFile {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

/// The path of a picture to write, as every flag that draws one gives it. Pictures are SVG, so a file's name ends with
/// `.svg`; a pipe or a device has any name.
#[derive(Clone, Debug)]
pub struct PictureFile(OutFile);

impl PictureFile {
    /// Refuses what [`OutFile`] refuses, and a name without the ending `.svg`, unless it is that of a pipe or a device.
    fn new(path: PathBuf) -> Result<Self, CannotWrite> {
        let file = OutFile::new(path)?;
        let is_svg = file.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("svg"));
        if !is_svg && !is_pipe_or_device(&file) {
            let named = file.with_extension("svg");
            let name = named.file_name().unwrap_or_default().to_string_lossy().into_owned();
            return Err(CannotWrite(format!(
                "a picture is written as SVG\n  hint: name it {}, and convert it to the format you want",
                Path::new(&name).shown()
            )));
        }
        Ok(Self(file))
    }
}

impl Deref for PictureFile {
    type Target = OutFile;

    fn deref(&self) -> &OutFile {
        &self.0
    }
}

impl ValueParserFactory for PictureFile {
    type Parser = TryMapValueParser<PathBufValueParser, fn(PathBuf) -> Result<Self, CannotWrite>>;

    fn value_parser() -> Self::Parser {
        PathBufValueParser::new().try_map(Self::new)
    }
}

/// Why a file cannot be written, without its path.
#[derive(Debug)]
pub struct CannotWrite(String);

impl fmt::Display for CannotWrite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for CannotWrite {}

impl ValueParserFactory for OutFile {
    type Parser = TryMapValueParser<PathBufValueParser, fn(PathBuf) -> Result<Self, CannotWrite>>;

    fn value_parser() -> Self::Parser {
        PathBufValueParser::new().try_map(Self::new)
    }
}

/// Writes a text to `path`: a file whole or not at all, a pipe or a device in place.
pub fn write_text(path: &Path, text: &str) -> Result<()> {
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
        let bad = [("", "a folder"), ("new/", "a folder"), ("no/where.json", "no folder"), ("a.json/x", "no folder")];
        for (bad, words) in bad {
            assert!(new(bad).expect_err(bad).to_string().contains(words));
        }
    }

    #[test]
    fn the_address_of_another_machine_is_no_path() {
        for path in ["s3://bucket/run", "hf://me/model", "gs://b", "https://host/x", "file:///x"] {
            let error = check_is_here(Path::new(path)).expect_err(path).to_string();
            assert!(error.contains("another machine"), "{error}");
        }
        for path in ["run", "C:/x", "a b://c", "./s3:/x", "://x", "/a/s3:x"] {
            check_is_here(Path::new(path)).expect(path);
        }
    }

    #[test]
    fn a_picture_has_the_ending_of_its_format() {
        let folder = tempfile::tempdir().expect("a folder");
        let new = |name: &str| PictureFile::new(folder.path().join(name)).map(|_| ());
        for name in ["a.svg", "a.b.SVG"] {
            new(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        for name in ["a.png", "a.pdf", "a.svg.gz", "a.svgz", "a", "a.html", "svg"] {
            let error = new(name).expect_err(name).to_string();
            assert!(error.starts_with("a picture is written as SVG\n  hint: name it "), "{error}");
        }
        if cfg!(target_os = "linux") {
            PictureFile::new("/dev/null".into()).expect("a device has no ending");
        }
    }

    #[test]
    fn a_new_file_takes_the_place_of_none_that_came_meanwhile() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a.json");
        let [first, second] = [0, 1].map(|_| OutFile::new(path.clone()).expect("new"));
        first.write_new_text("first").expect("nothing is there");
        second.write_new_text("second").expect_err("the first one is there");
        assert_eq!(std::fs::read(&path).expect("there"), b"first");
        assert_eq!(std::fs::read_dir(folder.path()).expect("there").count(), 1);
    }
}
