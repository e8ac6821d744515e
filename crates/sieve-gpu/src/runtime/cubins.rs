//! The on-disk cache of compiled kernels, `<key>.cubin`. Files are written atomically, so processes can share a folder.
//!
//! Only Burn's own ops are compiled by CubeCL, and only they need the headers of the CUDA toolkit.
use crate::KernelError;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A folder of compiled kernels of one architecture and one compiler version.
#[derive(Debug, Clone)]
pub struct Cubins {
    folder: PathBuf,
}

/// The cache of this process; without one every process compiles its kernels.
static IN_USE: OnceLock<Cubins> = OnceLock::new();

impl Cubins {
    /// The cache below `root` (for example `$XDG_CACHE_HOME/sieve`) for an architecture and compiler version. Its
    /// folder is created with the first file.
    pub fn below(root: &Path, arch: &str, nvrtc: impl std::fmt::Display) -> Self {
        let folder = root.join(format!("{arch}-nvrtc{nvrtc}")).join("cubins");
        Self { folder }
    }

    /// The folder of the cached cubins.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Makes this the cache of the process. Only the first call has an effect.
    pub fn use_here(&self) {
        let _ = IN_USE.set(self.clone());
    }

    /// The cache of the process, if it has one.
    pub fn in_use() -> Option<&'static Self> {
        IN_USE.get()
    }

    /// Whether the folder holds the cubin of a kernel.
    pub fn has(&self, key: u128) -> bool {
        self.path(key).is_file()
    }

    /// A cached cubin; `None` if there is no file, or an empty one.
    pub(crate) fn read(&self, key: u128) -> Option<Vec<u8>> {
        fs::read(self.path(key)).ok().filter(|cubin| !cubin.is_empty())
    }

    /// Writes a compiled kernel, replacing an existing file.
    ///
    /// # Errors
    /// [`KernelError::Cache`] when the folder cannot be created or written.
    pub fn write(&self, key: u128, cubin: &[u8]) -> Result<(), KernelError> {
        let error = |e: std::io::Error| KernelError::Cache { path: self.folder.clone(), reason: e.to_string() };
        fs::create_dir_all(&self.folder).map_err(error)?;
        let mut file = tempfile::NamedTempFile::new_in(&self.folder).map_err(error)?;
        file.write_all(cubin).map_err(error)?;
        file.persist(self.path(key)).map_err(|e| error(e.error))?;
        Ok(())
    }

    fn path(&self, key: u128) -> PathBuf {
        self.folder.join(format!("{key:032x}.cubin"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_cubins_that_were_written_are_found() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let cubins = Cubins::below(root.path(), "sm_80", "13.0");
        assert!(!cubins.has(7) && cubins.read(7).is_none() && !cubins.folder().exists());
        cubins.write(7, &[1, 2, 250]).expect("writable");
        assert_eq!(cubins.read(7), Some(vec![1, 2, 250]));
        cubins.write(7, &[9]).expect("written again");
        assert_eq!(cubins.read(7), Some(vec![9]));
        assert!(cubins.has(7) && !cubins.has(8));
        let files = fs::read_dir(cubins.folder()).expect("there").count();
        assert_eq!(files, 1, "no temporary file stays");
        for (arch, nvrtc) in [("sm_86", "13.0"), ("sm_80", "13.1")] {
            assert!(!Cubins::below(root.path(), arch, nvrtc).has(7), "{arch} {nvrtc}");
        }
    }

    #[test]
    fn an_empty_file_is_no_kernel_and_an_unusable_folder_is_named() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let cubins = Cubins::below(root.path(), "sm_80", "13.0");
        cubins.write(7, &[]).expect("writable");
        assert_eq!(cubins.read(7), None);
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        let error = Cubins::below(file.path(), "sm_80", "13.0").write(7, &[1]).expect_err("a file is no folder");
        assert!(error.to_string().contains("sm_80-nvrtc13.0"), "{error}");
    }
}
