//! Shards that another folder holds already: the same text, tokenizer and settings are tokenised once.
//!
//! They are taken from the folders of runs beside the new one, as hard links, and so is a tokenizer.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::lock::Lock;
use super::meta::{self, PreparedMeta};
use super::names::VALIDATION_SIZES;
use crate::error::DataError;
use crate::shard::with_ending;
use sieve_files::{AtomicFile, sync_folder};

/// Takes the shards of the first of the folders `known` whose preparation has this fingerprint into `dir`, which holds
/// no finished one. Returns their `meta.json` and that folder; `None` if no folder has them.
///
/// Shards are never changed in place, so `dir` gets links to them, and copies where the file system has no links.
///
/// # Errors
/// `dir` cannot be written to.
pub(super) fn take(
    dir: &Path,
    lock: &Lock,
    known: &[PathBuf],
    fingerprint: &str,
) -> Result<Option<(PreparedMeta, PathBuf)>, DataError> {
    let own = dir.canonicalize().map_err(DataError::io("find", dir))?;
    for other in known.iter().filter(|other| other.canonicalize().is_ok_and(|other| other != own)) {
        let Some(meta) = read_whole(other).filter(|meta| meta.fingerprint == fingerprint) else {
            continue;
        };
        // From here on files of these names are Sieve's, even if some of them are missing.
        lock.mark()?;
        let taken = names(&meta).iter().try_for_each(|name| link_or_copy(&other.join(name), &dir.join(name)));
        // Another process may have replaced the shards meanwhile, file by file.
        if taken.is_ok() && read_whole(other).as_ref() == Some(&meta) && meta.check_files(dir).is_ok() {
            sync_folder(dir)?;
            let mut file = AtomicFile::create(&meta::path(dir))?;
            file.write(&meta.to_json())?;
            file.finish()?.publish()?;
            sync_folder(dir)?;
            return Ok(Some((meta, other.clone())));
        }
        // What was taken of it is replaced by what is prepared instead.
        for name in names(&meta) {
            remove(&dir.join(name))?;
        }
    }
    Ok(None)
}

/// The `meta.json` of a folder whose files are all there.
fn read_whole(dir: &Path) -> Option<PreparedMeta> {
    let meta = PreparedMeta::read(dir).ok()?;
    meta.check_files(dir).ok().map(|()| meta)
}

/// The files of prepared data besides `meta.json`.
fn names(meta: &PreparedMeta) -> Vec<PathBuf> {
    let shards = meta.shards().into_iter().map(|(name, _)| PathBuf::from(name));
    let files = shards.flat_map(|name| [".bin", ".idx"].map(|ending| with_ending(&name, ending)));
    files.chain([PathBuf::from(VALIDATION_SIZES)]).collect()
}

/// Makes the file `to` a second name of `from`, or a copy where that is not possible.
fn link_or_copy(from: &Path, to: &Path) -> Result<(), DataError> {
    // A copy into a file that is there would change the file behind its other name.
    remove(to)?;
    if fs::hard_link(from, to).is_ok() {
        return Ok(());
    }
    fs::copy(from, to).and_then(|_| sieve_files::open_file(to)?.sync_all()).map_err(DataError::io("copy", from))
}

fn remove(path: &Path) -> Result<(), DataError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(DataError::io("remove", path)(error)),
        _ => Ok(()),
    }
}
