//! Read-only memory maps, the only `unsafe` code of the crate.

use sieve_files::open_file;
use std::ops::Deref;
use std::path::Path;

use memmap2::Mmap;

use crate::error::DataError;

/// A whole file, mapped read-only; derefs to its bytes.
///
/// The file must not be changed in place or truncated while it is mapped. Preparation writes new files and renames
/// them, and a map keeps the old file alive.
#[derive(Debug)]
pub(crate) struct MappedFile {
    /// The mapping; `None` for an empty file, which some systems refuse to map.
    map: Option<Mmap>,
}

impl MappedFile {
    /// Maps a file; refuses what is no file.
    pub(crate) fn open(path: &Path) -> Result<Self, DataError> {
        let file = open_file(path).map_err(DataError::io("open", path))?;
        let metadata = file.metadata().map_err(DataError::io("read", path))?;
        if !metadata.is_file() {
            return Err(DataError::shard(path, "not a file"));
        }
        if metadata.len() == 0 {
            return Ok(Self { map: None });
        }
        // SAFETY: the map is read-only, and by the contract above no process changes or truncates the file while it is
        // mapped.
        let map = unsafe { Mmap::map(&file) }.map_err(DataError::io("map", path))?;
        Ok(Self { map: Some(map) })
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(&[])
    }
}
