//! Verifies checksums of shards in the background, while a run trains on them.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::Xxh3;

use super::hex;
use crate::error::DataError;

/// Number of bytes read between two pauses.
const CHUNK_BYTES: usize = 8 << 20;
/// A pause is this many times as long as the read before it, because training reads from the same disk.
const PAUSES: u32 = 3;
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A thread that reads every shard once and compares its checksum. The thread stops when this is dropped.
#[derive(Debug)]
pub struct ShardCheck {
    /// The first file with a problem, and the problem; empty while none is found.
    found: Arc<OnceLock<(PathBuf, String)>>,
    stops: Arc<AtomicBool>,
}

impl ShardCheck {
    /// Starts the thread. Each file comes with the XXH3-128 that it must have, in hexadecimal.
    pub(super) fn start(files: Vec<(PathBuf, String)>) -> Result<Self, DataError> {
        let this = Self { found: Arc::default(), stops: Arc::default() };
        let (found, stops) = (this.found.clone(), this.stops.clone());
        let first = files.first().map_or_else(PathBuf::new, |(path, _)| path.clone());
        let read = move || {
            for (path, wanted) in files {
                let what = match hash_slowly(&path, &stops) {
                    Ok(Some(hash)) if hash != wanted => {
                        format!("its bytes are not those that were prepared (XXH3 {hash}, meta.json says {wanted})")
                    }
                    Ok(Some(_)) => continue,
                    Ok(None) => return,
                    Err(error) => format!("it cannot be read to its end: {error}"),
                };
                let _ = found.set((path, what));
                return;
            }
        };
        let thread = std::thread::Builder::new().name("sieve-shard-check".to_owned());
        thread.spawn(read).map_err(DataError::io("start a thread to read", &first))?;
        Ok(this)
    }

    /// The result so far; `Ok` also while files are still being read.
    ///
    /// # Errors
    /// A file has another checksum or cannot be read.
    pub fn result(&self) -> Result<(), DataError> {
        match self.found.get().cloned() {
            None => Ok(()),
            Some((path, what)) => Err(DataError::shard(&path, what)),
        }
    }
}

impl Drop for ShardCheck {
    fn drop(&mut self) {
        self.stops.store(true, Ordering::Relaxed);
    }
}

/// XXH3-128 of a file in hexadecimal, read with pauses; `None` if `stops` was set.
fn hash_slowly(path: &Path, stops: &AtomicBool) -> std::io::Result<Option<String>> {
    let mut file = File::open(path)?;
    let (mut hash, mut chunk) = (Xxh3::new(), vec![0; CHUNK_BYTES]);
    loop {
        let since = Instant::now();
        let len = file.read(&mut chunk)?;
        hash.update(&chunk[..len]);
        if len == 0 {
            return Ok(Some(hex(hash.digest128())));
        }
        std::thread::sleep((PAUSES * since.elapsed()).min(LONGEST_PAUSE));
        if stops.load(Ordering::Relaxed) {
            return Ok(None);
        }
    }
}
