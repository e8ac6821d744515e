//! Expands paths, folders and globs to an ordered list of files.

use sieve_core::ShownPath;
use sieve_files::no_file;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, Metadata};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::config::{CorpusConfig, FileOrder, Format, SourceFile, ending};
use super::hub::{Hub, RemoteFile, is_remote};
use crate::error::DataError;

/// A file that a path of the corpus leads to.
struct Found {
    path: PathBuf,
    /// Path relative to the folder or glob that led to the file.
    relative: PathBuf,
    /// The file on the hub; `None` for a file on this disk.
    remote: Option<RemoteFile>,
    /// Whether a path names this file directly, not by a folder or glob.
    is_named: bool,
}

/// Number of files in folders that are not read, by the ending of their names.
pub(super) type PassedOver = BTreeMap<String, usize>;

/// All files of a corpus. `hub` lists the data sets of the hub that paths name.
pub(super) fn expand(config: &CorpusConfig, hub: Option<&Hub>) -> Result<(Vec<SourceFile>, PassedOver), DataError> {
    if config.paths.is_empty() {
        let hint = "name at least one file, folder or glob";
        return Err(DataError::refused("no data paths are given", hint));
    }
    let mut expansion = Expansion { extensions: &config.extensions, found: Vec::new(), passed_over: PassedOver::new() };
    for pattern in &config.paths {
        let before = expansion.found.len();
        match (is_remote(pattern), hub) {
            (false, _) => expansion.add_local(pattern)?,
            (true, Some(hub)) => expansion.add_remote(pattern, hub)?,
            (true, None) => return Err(DataError::not_connected(pattern)),
        }
        let found = &expansion.found[before..];
        if found.is_empty() {
            let path = Path::new(pattern);
            let searched = if path.is_dir() || is_remote(pattern) {
                format!(" ending in .{}", config.extensions.join(", ."))
            } else if path.is_symlink() {
                ": it is a link whose target is missing".to_owned()
            } else if pattern.contains("://") {
                ": it is an address, and only hf://datasets/OWNER/NAME is fetched".to_owned()
            } else {
                String::new()
            };
            return Err(DataError::NoFiles { pattern: pattern.clone(), searched });
        }
        check_one_kind(pattern, &config.format, found)?;
    }
    let Expansion { mut found, passed_over, .. } = expansion;
    found.sort_by(|a, b| a.path.cmp(&b.path).then_with(|| a.relative.cmp(&b.relative)));
    let mut found = each_once(found);
    if let FileOrder::Hashed { seed } = config.order {
        found.sort_by_cached_key(|file| xxh3_64_with_seed(file.relative.as_os_str().as_encoded_bytes(), seed));
    }
    let files = found.into_iter().map(stat).collect::<Result<_, _>>()?;
    Ok((files, passed_over))
}

/// Removes duplicates: files that several paths or links lead to. A file counts as named if any of its paths names it.
fn each_once(found: Vec<Found>) -> Vec<Found> {
    let mut known = HashMap::<PathBuf, usize>::new();
    let mut files = Vec::<Found>::with_capacity(found.len());
    for file in found {
        let canonical = match file.remote {
            Some(_) => None,
            None => file.path.canonicalize().ok(),
        };
        match known.entry(canonical.unwrap_or_else(|| file.path.clone())) {
            Entry::Occupied(first) => files[*first.get()].is_named |= file.is_named,
            Entry::Vacant(new) => {
                new.insert(files.len());
                files.push(file);
            }
        }
    }
    files
}

/// Refuses a path whose files have several formats by their endings.
fn check_one_kind(pattern: &str, format: &Format, found: &[Found]) -> Result<(), DataError> {
    // Each format with the number of its files and one file as an example.
    let mut kinds: Vec<(Format, usize, &Found)> = Vec::new();
    for file in found {
        let own = format.of(&file.path);
        match kinds.iter_mut().find(|(known, ..)| *known == own) {
            Some((_, count, example)) => {
                *count += 1;
                // The example is the first file by path, because folders are listed in no fixed order.
                if file.path < example.path {
                    *example = file;
                }
            }
            None => kinds.push((own, 1, file)),
        }
    }
    if kinds.len() < 2 {
        return Ok(());
    }
    kinds.sort_by_key(|(_, count, _)| std::cmp::Reverse(*count));
    let in_words = kinds.iter().map(|(format, count, example)| {
        let name = Path::new(example.path.file_name().unwrap_or_default());
        format!("{count} {} ({})", format.name(), name.shown())
    });
    let listed = in_words.collect::<Vec<_>>().join(", ");
    let what = format!("{pattern:?} names files of several formats: {listed}");
    let hint = "say which is meant (format: text, jsonl or parquet), or name the files of one format, for example by \
        a glob";
    Err(DataError::refused(what, hint))
}

/// Refuses pipes and devices, which may have no end or can be read only once.
pub(super) fn require_file(path: &Path) -> Result<Metadata, DataError> {
    let metadata = fs::metadata(path).map_err(DataError::io("read", path))?;
    if let Some(kind) = no_file(metadata.file_type()) {
        let what = format!("{kind}, not a file");
        let hint = "data is read more than once; write it to a file first and name that";
        return Err(DataError::file(path, what, hint));
    }
    Ok(metadata)
}

/// Adds size and modification time to a file that was found; refuses what is not a file.
fn stat(found: Found) -> Result<SourceFile, DataError> {
    let Found { path, remote, is_named, .. } = found;
    if let Some(remote) = remote {
        // The path holds the commit, which distinguishes versions without a modification time.
        return Ok(SourceFile { path, num_bytes: remote.num_bytes(), modified_ns: 0, remote: Some(remote), is_named });
    }
    let metadata = require_file(&path)?;
    let modified = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    let modified_ns = modified.map_or(0, |age| u64::try_from(age.as_nanos()).unwrap_or(u64::MAX));
    Ok(SourceFile { path, num_bytes: metadata.len(), modified_ns, remote: None, is_named })
}

/// Collects the files that paths lead to.
struct Expansion<'a> {
    /// Endings of the files that are read in folders.
    extensions: &'a [String],
    found: Vec<Found>,
    passed_over: PassedOver,
}

impl Expansion<'_> {
    /// Adds the files on the Hub that `pattern` leads to; none of them counts as named (`is_named`).
    fn add_remote(&mut self, pattern: &str, hub: &Hub) -> Result<(), DataError> {
        let files = hub.list(pattern, &|path| has_extension(path, self.extensions))?;
        self.found.extend(files.into_iter().map(|file| Found {
            path: file.display_path(),
            relative: PathBuf::from(&file.name),
            remote: Some(file),
            is_named: false,
        }));
        Ok(())
    }

    /// Adds the files on this disk that a file name, folder or glob leads to. Only a file that the path names itself
    /// counts as named (`is_named`); such a file may exceed the limit on documents.
    fn add_local(&mut self, pattern: &str) -> Result<(), DataError> {
        let path = Path::new(pattern);
        // A path that exists is no glob, even with a `[` in its name.
        if path.is_dir() {
            return self.add_folder(path, path);
        }
        if path.exists() {
            let is_named = true;
            self.add_file(path, path.parent().unwrap_or(Path::new("")), is_named);
            return Ok(());
        }
        let options = glob::MatchOptions { require_literal_leading_dot: true, ..Default::default() };
        let matches = glob::glob_with(pattern, options).map_err(|error| DataError::glob(pattern, &error))?;
        let base = literal_base(path);
        let is_named = false;
        for entry in matches {
            let found = entry.map_err(|error| {
                let unread = error.path().to_path_buf();
                DataError::io("list", &unread)(error.into())
            })?;
            // As in folders, broken links are left out. Links to folders may form a loop.
            if !found.exists() || (pattern.contains("**") && is_below_link(&found, &base)) {
                continue;
            }
            if found.is_dir() { self.add_folder(&found, &base)? } else { self.add_file(&found, &base, is_named) }
        }
        Ok(())
    }

    /// Adds the files below `folder` that have one of the endings, and counts the others. `base` is the folder that the
    /// path of the corpus names, or where its glob begins.
    fn add_folder(&mut self, folder: &Path, base: &Path) -> Result<(), DataError> {
        for entry in fs::read_dir(folder).map_err(DataError::io("list", folder))? {
            let entry = entry.map_err(DataError::io("list", folder))?;
            let path = entry.path();
            if entry.file_name().as_encoded_bytes().starts_with(b".") {
                continue;
            }
            let kind = entry.file_type().map_err(DataError::io("read", &path))?;
            if kind.is_dir() {
                self.add_folder(&path, base)?;
            } else if path.is_dir() || !path.exists() {
                // Links to folders and broken links are left out.
            } else if has_extension(&path, self.extensions) {
                let is_named = false;
                self.add_file(&path, base, is_named);
            } else {
                *self.passed_over.entry(ending(&path).to_owned()).or_default() += 1;
            }
        }
        Ok(())
    }

    /// Adds a file of this disk that was found under `base`; `is_named` if a path names the file directly.
    fn add_file(&mut self, path: &Path, base: &Path, is_named: bool) {
        self.found.push(Found {
            path: path.to_path_buf(),
            relative: path.strip_prefix(base).unwrap_or(path).to_path_buf(),
            remote: None,
            is_named,
        });
    }
}

/// Whether `path`, or a folder between it and `base`, is a link to a folder.
fn is_below_link(path: &Path, base: &Path) -> bool {
    let mut folders = path.ancestors().take_while(|folder| *folder != base && folder.starts_with(base));
    folders.any(|folder| folder.is_symlink() && folder.is_dir())
}

/// The part of a glob before its first wildcard.
fn literal_base(pattern: &Path) -> PathBuf {
    pattern
        .components()
        .take_while(|part| !part.as_os_str().as_encoded_bytes().iter().any(|byte| b"*?[".contains(byte)))
        .collect()
}

fn has_extension(path: &Path, extensions: &[String]) -> bool {
    let ending = ending(path);
    extensions.iter().any(|wanted| wanted.eq_ignore_ascii_case(ending))
}
