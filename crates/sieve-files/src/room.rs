//! Measures the free disk space of a folder.
use std::path::Path;

/// Bytes that this user may still write on the disk of `path`, which need not exist yet. `None` if that is not known.
pub fn free_bytes(path: &Path) -> Option<u64> {
    let path = std::path::absolute(path).ok()?;
    let existing = path.ancestors().find(|path| path.exists())?;
    #[cfg(unix)]
    {
        let found = nix::sys::statvfs::statvfs(existing).ok()?;
        // The types are 64 bits wide on Linux and narrower on other systems.
        #[allow(clippy::useless_conversion, reason = "their types differ from system to system")]
        let (blocks, size) = (u64::from(found.blocks_available()), u64::from(found.fragment_size()));
        blocks.checked_mul(size)
    }
    #[cfg(not(unix))]
    {
        let _ = existing;
        None
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_is_not_there_yet_has_the_room_of_the_one_above() {
        let dir = tempfile::tempdir().unwrap();
        let free = free_bytes(&dir.path().join("a/b/c")).unwrap();
        assert!(free > 0 && free < 1 << 60, "{free}");
        assert!(free_bytes(Path::new("a/b")).is_some());
    }
}
