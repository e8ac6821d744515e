//! The folder of compiled kernels, and the settings CubeCL runs with.
//!
//! Our own kernels are [`Cubins`], which any number of processes share. CubeCL keeps those of Burn's ops in append-only
//! files that only one process may write: the first process of a machine locks the shared folder; others work on a
//! private copy beside it, which goes when they end.
use crate::cache_files::{cubecl_folder, repair};
use cubecl_runtime::config::cache::CacheConfig;
use cubecl_runtime::config::{CubeClRuntimeConfig, RuntimeConfig};
use sieve_gpu::Cubins;
use sieve_gpu::KernelError;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// File in a cache folder whose lock says that a process writes there. The operating system frees it with the process.
const LOCK_FILE: &str = "lock";

/// File with the size that the compiled kernels had when they were last known to be whole.
const CHECKED_FILE: &str = "checked-bytes";

/// File beside the private folders. Who has its lock makes one, or deletes those of processes that are gone.
const PRIVATE_LOCK_FILE: &str = "lock-of-private";

/// Start of the names of private folders.
const PRIVATE_PREFIX: &str = "private-";

/// An opened cache folder. Keep it for the life of the process: dropping it frees the folder for others.
#[derive(Debug)]
pub struct KernelCache {
    folder: PathBuf,
    private: bool,
    cubins: Cubins,
    /// Held, never read: the lock goes with the file.
    _lock: File,
}

impl KernelCache {
    /// Opens the cache below `root` (`$XDG_CACHE_HOME/sieve`, say) for one architecture and compiler version. When
    /// another process has it, opens a private copy instead.
    ///
    /// # Errors
    /// [`KernelError::Cache`] when the folder cannot be made or written.
    pub fn open(root: &Path, arch: &str, nvrtc: impl std::fmt::Display) -> Result<Self, KernelError> {
        let cubins = Cubins::below(root, arch, &nvrtc);
        let shared = root.join(format!("{arch}-nvrtc{nvrtc}"));
        create_folder(&shared)?;
        if let Some(lock) = lock_folder(&shared)? {
            remove_abandoned(&shared);
            repair_if_changed(&shared)?;
            return Ok(Self {
                folder: shared,
                private: false,
                cubins,
                _lock: lock,
            });
        }
        let folder = shared.join(format!("{PRIVATE_PREFIX}{}", std::process::id()));
        let lock = lock_private(&folder, || ())?;
        // Reading while the owner appends is fine: CubeCL skips an entry that ends early.
        copy_folder(&cubecl_folder(&shared), &cubecl_folder(&folder)).map_err(|e| cache_error(&folder, e))?;
        Ok(Self {
            folder,
            private: true,
            cubins,
            _lock: lock,
        })
    }

    /// The folder that CubeCL gets.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// True when another process owns the shared folder and this one works on a copy: what CubeCL compiles is not kept.
    pub fn is_private(&self) -> bool {
        self.private
    }

    /// Our own kernels, shared with every process.
    pub fn cubins(&self) -> &Cubins {
        &self.cubins
    }

    /// Configures this process: kernels in this cache, everything else of CubeCL as it defaults, no `cubecl.toml` read.
    /// Must run before the first CUDA tensor.
    ///
    /// # Errors
    /// [`KernelError::AlreadyInitialised`] on a second call.
    pub fn init_runtime(&self) -> Result<(), KernelError> {
        static INITIALISED: AtomicBool = AtomicBool::new(false);
        if INITIALISED.swap(true, Ordering::SeqCst) || CubeClRuntimeConfig::storage().lock().is_some() {
            return Err(KernelError::AlreadyInitialised);
        }
        let mut config = CubeClRuntimeConfig::default();
        config.compilation.cache = Some(CacheConfig::File(self.folder.clone()));
        CubeClRuntimeConfig::set(config);
        self.cubins.use_here();
        Ok(())
    }
}

impl Drop for KernelCache {
    fn drop(&mut self) {
        if self.private {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

fn create_folder(folder: &Path) -> Result<(), KernelError> {
    fs::create_dir_all(folder).map_err(|e| cache_error(folder, e))
}

/// Makes a private folder and locks it. Between the two, when `made` is called, it looks like one of a process that is
/// gone.
fn lock_private(folder: &Path, made: impl FnOnce()) -> Result<File, KernelError> {
    let path = folder.with_file_name(PRIVATE_LOCK_FILE);
    let making = lock_file(&path)?;
    making.lock().map_err(|e| cache_error(&path, e))?;
    // A folder of that name is what a dead process with our number left.
    let _ = fs::remove_dir_all(folder);
    create_folder(folder)?;
    made();
    lock_folder(folder)?.ok_or_else(|| cache_error(folder, "locked by another process"))
}

/// Locks a folder; `None` when another process holds the lock.
fn lock_folder(folder: &Path) -> Result<Option<File>, KernelError> {
    try_lock(&folder.join(LOCK_FILE))
}

/// Locks a file; `None` when another process holds the lock.
fn try_lock(path: &Path) -> Result<Option<File>, KernelError> {
    let file = lock_file(path)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(e)) => Err(cache_error(path, e)),
    }
}

/// A file that is there for its lock.
fn lock_file(path: &Path) -> Result<File, KernelError> {
    let mut options = File::options();
    let file = options.create(true).truncate(false).write(true).open(path);
    file.map_err(|e| cache_error(path, e))
}

/// Deletes private copies whose processes are gone; leaves that to the next start while a process makes its own.
fn remove_abandoned(shared: &Path) {
    let alone = try_lock(&shared.join(PRIVATE_LOCK_FILE));
    let (Ok(Some(_alone)), Ok(entries)) = (alone, fs::read_dir(shared)) else {
        return;
    };
    for entry in entries.flatten() {
        if !entry.file_name().to_string_lossy().starts_with(PRIVATE_PREFIX) {
            continue;
        }
        if let Ok(Some(_lock)) = lock_folder(&entry.path()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Repairs the files when an earlier process wrote to them: it may have been killed in the middle of an entry. A
/// process that compiled nothing changes nothing, so the usual start costs nothing here.
fn repair_if_changed(folder: &Path) -> Result<(), KernelError> {
    let record = folder.join(CHECKED_FILE);
    let size = || total_bytes(&cubecl_folder(folder)).map_err(|e| cache_error(folder, e));
    let checked = fs::read_to_string(&record)
        .ok()
        .and_then(|text| text.trim().parse().ok());
    if checked == Some(size()?) {
        return Ok(());
    }
    repair(folder)?;
    fs::write(&record, size()?.to_string()).map_err(|e| cache_error(&record, e))
}

/// Bytes of all files below a folder that is not there, or is.
fn total_bytes(folder: &Path) -> io::Result<u64> {
    let entries = match fs::read_dir(folder) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(0),
        entries => entries?,
    };
    let mut total = 0;
    for entry in entries {
        let entry = entry?;
        let metadata = entry.metadata()?;
        total += if metadata.is_dir() {
            total_bytes(&entry.path())?
        } else {
            metadata.len()
        };
    }
    Ok(total)
}

/// Copies a folder tree, without CubeCL's own lock files. A missing source is an empty one.
fn copy_folder(from: &Path, to: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(from) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    fs::create_dir_all(to)?;
    for entry in entries {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &target)?;
        } else if entry.path().extension().is_none_or(|e| e != "lock") {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

fn cache_error(path: &Path, reason: impl ToString) -> KernelError {
    KernelError::Cache {
        path: path.to_owned(),
        reason: reason.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache_files::{CacheEntry, open_files};

    #[test]
    fn the_second_user_works_on_a_private_copy() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let first = KernelCache::open(root.path(), "sm_90a", "13.0").expect("writable");
        assert!(!first.is_private());
        let deep = first.folder().join("cuda/0.10.0/ptx");
        fs::create_dir_all(&deep).expect("created");
        fs::write(deep.join("chunk0.cbor"), "compiled").expect("written");
        fs::write(deep.join("toc.json.log.lock"), "").expect("written");

        // Locks of std::fs belong to the open file, so a second open in this process meets the same refusal.
        let second = KernelCache::open(root.path(), "sm_90a", "13.0").expect("writable");
        assert!(second.is_private());
        let copy = second.folder().join("cuda/0.10.0/ptx");
        assert_eq!(
            fs::read_to_string(copy.join("chunk0.cbor")).expect("copied"),
            "compiled"
        );
        assert!(!copy.join("toc.json.log.lock").exists(), "a lock is not content");

        let private = second.folder().to_owned();
        drop(second);
        assert!(!private.exists(), "a private copy goes with its user");
    }

    #[test]
    fn a_dead_process_leaves_nothing_for_long() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let first = KernelCache::open(root.path(), "sm_80", "12.8").expect("writable");
        let abandoned = first.folder().join("private-1");
        fs::create_dir_all(&abandoned).expect("created");
        drop(first);
        let next = KernelCache::open(root.path(), "sm_80", "12.8").expect("writable");
        assert!(!next.is_private() && !abandoned.exists());
    }

    #[test]
    fn a_private_folder_that_is_being_made_is_not_taken_for_an_abandoned_one() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let owner = KernelCache::open(root.path(), "sm_80", "12.8").expect("writable");
        let shared = owner.folder();
        let folder = shared.join("private-7");
        // The owner of the shared folder opens it just now, and tidies up.
        let lock = lock_private(&folder, || remove_abandoned(shared));
        let lock = lock.expect("nobody has deleted it");
        remove_abandoned(shared);
        assert!(folder.exists(), "its process lives");
        drop(lock);
        remove_abandoned(shared);
        assert!(!folder.exists(), "its process is gone");
    }

    #[test]
    fn a_torn_cache_is_repaired_once() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let open = || KernelCache::open(root.path(), "sm_80", "12.8").expect("writable");
        let folder = open().folder().to_owned();
        let entry = CacheEntry {
            entrypoint_name: "k".into(),
            shared_mem_bytes: 0,
            ptx: vec![1; 100],
        };
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
        assert!(!one.is_private() && !other.is_private() && !newer.is_private());
    }

    #[test]
    fn an_unusable_folder_is_named() {
        let root = tempfile::NamedTempFile::new().expect("a temporary file");
        let error = KernelCache::open(root.path(), "sm_80", "12.8").expect_err("a file is no folder");
        assert!(error.to_string().contains("sm_80-nvrtc12.8"), "{error}");
    }
}
