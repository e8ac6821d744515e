//! The files in which CubeCL 0.10 keeps compiled kernels: their format, and their repair after a kill.
use cubecl_common::cache::{Cache, CacheOption};
use cubecl_common::compilation_cache::CompilationCache;
use sieve_gpu::KernelError;
use std::ffi::c_char;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// What CubeCL stores under a kernel's key; field names and order are its format.
#[derive(serde::Serialize, serde::Deserialize, Clone, Debug, PartialEq, Eq)]
pub(crate) struct CacheEntry {
    pub(crate) entrypoint_name: String,
    pub(crate) shared_mem_bytes: usize,
    pub(crate) ptx: Vec<c_char>,
}

/// CubeCL's cache of compiled kernels in a folder, by the hash of their source.
pub(crate) type CacheFiles = CompilationCache<u128, CacheEntry>;

/// Opens a folder's cache under the names that cubecl-cuda uses, and creates what is missing.
pub(crate) fn open_files(folder: &Path) -> CacheFiles {
    // Both names are cubecl-cuda's; cubecl-common adds a folder for its version.
    CompilationCache::new("ptx", CacheOption::default().name("cuda").root(folder))
}

/// The folder that CubeCL makes below the one it is given.
pub(crate) fn cubecl_folder(folder: &Path) -> PathBuf {
    folder.join("cuda")
}

/// Rewrites the files without an entry that a killed process left half-written. CubeCL appends: it could not read the
/// entries after half an entry, and every start would compile them again.
pub(crate) fn repair(folder: &Path) -> Result<(), KernelError> {
    let error = |e: io::Error| KernelError::Cache { path: folder.to_owned(), reason: e.to_string() };
    // In the same folder, hence on the same file system: the move below is one rename.
    let old = folder.join("before-repair");
    let _ = fs::remove_dir_all(&old);
    fs::create_dir_all(&old).map_err(error)?;
    match fs::rename(cubecl_folder(folder), cubecl_folder(&old)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return fs::remove_dir_all(&old).map_err(error);
        }
        moved => moved.map_err(error)?,
    }
    // CubeCL's table of contents has one line for each entry that was written to its end. A half-written last line does
    // not keep the lines before it from being read.
    let mut contents: Cache<u128, String> =
        Cache::new("ptx/toc", CacheOption::default().name("cuda").root(old.clone()));
    let mut keys = Vec::new();
    contents.for_each(|key, _chunk| keys.push(*key));
    let readable = open_files(&old);
    let mut fresh = open_files(folder);
    for key in keys {
        if let Some(entry) = readable.get(&key) {
            // A failure here only means that the kernel is compiled again.
            let _ = fresh.insert(key, entry.clone());
        }
    }
    fs::remove_dir_all(&old).map_err(error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn entry(byte: c_char) -> CacheEntry {
        CacheEntry { entrypoint_name: "k".into(), shared_mem_bytes: 7, ptx: vec![byte; 1000] }
    }

    /// The file in which CubeCL keeps entries, below `folder`.
    fn chunk_file(folder: &Path) -> PathBuf {
        let mut open = vec![cubecl_folder(folder)];
        while let Some(path) = open.pop() {
            if path.is_dir() {
                open.extend(fs::read_dir(&path).expect("readable").map(|e| e.expect("readable").path()));
            } else if path.extension().is_some_and(|e| e == "cbor") {
                return path;
            }
        }
        panic!("no chunk file");
    }

    #[test]
    fn half_an_entry_hides_nothing_after_a_repair() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        open_files(folder.path()).insert(1, entry(1)).expect("new");
        // The process is killed in the middle of writing a second entry.
        let whole = fs::read(chunk_file(folder.path())).expect("written");
        let mut file = fs::File::options().append(true).open(chunk_file(folder.path())).expect("there");
        file.write_all(&whole[..whole.len() / 2]).expect("written");

        repair(folder.path()).expect("repaired");
        open_files(folder.path()).insert(2, entry(2)).expect("new");
        let files = open_files(folder.path());
        assert_eq!(files.get(&1), Some(&entry(1)), "what was whole stays");
        assert_eq!(files.get(&2), Some(&entry(2)), "and what comes later is readable");
    }

    #[test]
    fn a_missing_or_whole_cache_needs_no_repair() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        assert_eq!(repair(folder.path()), Ok(()));
        open_files(folder.path()).insert(1, entry(1)).expect("new");
        assert_eq!(repair(folder.path()), Ok(()));
        assert_eq!(open_files(folder.path()).get(&1), Some(&entry(1)));
    }
}
