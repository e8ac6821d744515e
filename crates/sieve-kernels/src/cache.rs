//! The folder of compiled kernels, and the settings CubeCL runs with.
//!
//! Our own kernels are [`Cubins`], which any number of processes share. CubeCL keeps the kernels of Burn's ops in
//! append-only files that only one process may write: each process takes the first folder that no other has locked.
use crate::cache_files::{cubecl_folder, repair};
use cubecl_runtime::config::cache::CacheConfig;
use cubecl_runtime::config::{CubeClRuntimeConfig, RuntimeConfig};
use sieve_gpu::{Cubins, KernelError};
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// File in a cache folder that is locked by the process that writes there. The lock ends with the process.
const LOCK_FILE: &str = "lock";

/// File with the total bytes of CubeCL's files after their last check or repair.
const CHECKED_FILE: &str = "checked-bytes";

/// An opened cache folder. Keep it for the life of the process: dropping it frees the folder for others.
#[derive(Debug)]
pub struct KernelCache {
    folder: PathBuf,
    cubins: Cubins,
    /// Never read; closing the file releases the lock.
    _lock: File,
}

impl KernelCache {
    /// Opens the cache below `root` (`$XDG_CACHE_HOME/sieve`, say) for one architecture and compiler version.
    ///
    /// # Errors
    /// [`KernelError::Cache`] when a folder cannot be made or written.
    pub fn open(root: &Path, arch: &str, nvrtc: impl std::fmt::Display) -> Result<Self, KernelError> {
        let cubins = Cubins::below(root, arch, &nvrtc);
        let shared = root.join(format!("{arch}-nvrtc{nvrtc}"));
        let mut folders = (0..).map(|number| shared.join(format!("burn-{number}")));
        let (folder, lock) = loop {
            let folder = folders.next().expect("numbers do not end");
            fs::create_dir_all(&folder).map_err(|e| cache_error(&folder, e))?;
            if let Some(lock) = lock_folder(&folder)? {
                break (folder, lock);
            }
        };
        repair_if_changed(&folder)?;
        Ok(Self { folder, cubins, _lock: lock })
    }

    /// The folder that CubeCL writes to, locked by this process.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Our own kernels, shared with every process.
    pub fn cubins(&self) -> &Cubins {
        &self.cubins
    }

    /// Configures CubeCL in this process: compiled kernels go to this cache, every other setting has CubeCL's default,
    /// and no `cubecl.toml` is read. Must run before the first CUDA tensor is made.
    ///
    /// # Errors
    /// [`KernelError::Refused`] on a second call.
    pub fn init_runtime(&self) -> Result<(), KernelError> {
        static INITIALISED: AtomicBool = AtomicBool::new(false);
        if INITIALISED.swap(true, Ordering::SeqCst) || CubeClRuntimeConfig::storage().lock().is_some() {
            return Err(KernelError::refused(
                "the CUDA runtime",
                "it is already configured in this process\n  \
                 hint: call KernelCache::init_runtime once, before the first tensor is made",
            ));
        }
        let mut config = CubeClRuntimeConfig::default();
        config.compilation.cache = Some(CacheConfig::File(self.folder.clone()));
        CubeClRuntimeConfig::set(config);
        self.cubins.use_here();
        Ok(())
    }
}

/// Locks a folder; `None` when another process holds the lock.
fn lock_folder(folder: &Path) -> Result<Option<File>, KernelError> {
    let path = folder.join(LOCK_FILE);
    let mut options = File::options();
    let file = options.create(true).truncate(false).write(true).open(&path);
    let file = file.map_err(|e| cache_error(&path, e))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(e)) => Err(cache_error(&path, e)),
    }
}

/// Repairs CubeCL's files if an earlier process added entries, because it may have been killed in the middle of one.
/// A process that compiled nothing left the size as it was, so most starts skip the repair.
fn repair_if_changed(folder: &Path) -> Result<(), KernelError> {
    let record = folder.join(CHECKED_FILE);
    let size = || total_bytes(&cubecl_folder(folder)).map_err(|e| cache_error(folder, e));
    let checked = fs::read_to_string(&record).unwrap_or_default();
    if checked.trim() == size()?.to_string() {
        return Ok(());
    }
    repair(folder)?;
    fs::write(&record, size()?.to_string()).map_err(|e| cache_error(&record, e))
}

/// Bytes of all files below a folder; 0 if there is no such folder.
fn total_bytes(folder: &Path) -> io::Result<u64> {
    let entries = match fs::read_dir(folder) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(0),
        entries => entries?,
    };
    let mut total = 0;
    for entry in entries {
        let entry = entry?;
        let metadata = entry.metadata()?;
        total += if metadata.is_dir() { total_bytes(&entry.path())? } else { metadata.len() };
    }
    Ok(total)
}

fn cache_error(path: &Path, reason: impl ToString) -> KernelError {
    KernelError::Cache { path: path.to_owned(), reason: reason.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache_files::{CacheEntry, open_files};

    #[test]
    fn each_process_has_a_folder_of_its_own_and_the_next_takes_it_again() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let open = || KernelCache::open(root.path(), "sm_90a", "13.0").expect("writable");
        // Locks of std::fs belong to the open file, so a second open in this process meets the same refusal.
        let [first, second] = [open(), open()];
        assert!(first.folder().ends_with("sm_90a-nvrtc13.0/burn-0"));
        assert!(second.folder().ends_with("sm_90a-nvrtc13.0/burn-1"));
        assert_eq!(first.cubins().folder(), second.cubins().folder());
        let freed = first.folder().to_owned();
        drop(first);
        assert_eq!(open().folder(), freed);
        drop(second);
    }

    #[test]
    fn a_cache_with_half_an_entry_is_repaired_once() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let open = || KernelCache::open(root.path(), "sm_80", "12.8").expect("writable");
        let folder = open().folder().to_owned();
        let entry = CacheEntry { entrypoint_name: "k".into(), shared_mem_bytes: 0, ptx: vec![1; 100] };
        open_files(&folder).insert(7, entry.clone()).expect("new");
        let chunk = cubecl_folder(&folder).join("0.10.0/ptx/chunk0.cbor");
        let whole = fs::read(&chunk).expect("written");
        fs::write(&chunk, [&whole[..], &whole[..20]].concat()).expect("written");
        drop(open());
        assert_eq!(fs::read(&chunk).expect("there"), whole, "the torn end is gone");
        let before = fs::metadata(&chunk).and_then(|m| m.modified()).expect("a time");
        drop(open());
        let after = fs::metadata(&chunk).and_then(|m| m.modified()).expect("a time");
        assert_eq!(before, after, "nothing was written since, so nothing is done");
        assert_eq!(open_files(&folder).get(&7), Some(&entry));
    }

    #[test]
    fn architectures_and_compilers_do_not_mix() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let one = KernelCache::open(root.path(), "sm_80", "12.8").expect("writable");
        let other = KernelCache::open(root.path(), "sm_90a", "12.8").expect("writable");
        let newer = KernelCache::open(root.path(), "sm_80", "13.0").expect("writable");
        let folders = [one.folder(), other.folder(), newer.folder()];
        assert!(folders.iter().all(|folder| folder.ends_with("burn-0")), "{folders:?}");
    }

    #[test]
    fn an_unusable_folder_is_named() {
        let root = tempfile::NamedTempFile::new().expect("a temporary file");
        let error = KernelCache::open(root.path(), "sm_80", "12.8").expect_err("a file is no folder");
        assert!(error.to_string().contains("sm_80-nvrtc12.8"), "{error}");
    }
}
