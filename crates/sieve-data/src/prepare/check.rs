//! Reading shards while a run trains on them: what they hold must be what was prepared.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::Xxh3;

use super::hex;
use crate::error::DataError;

/// Bytes read between two pauses.
const PIECE_BYTES: usize = 8 << 20;
/// Pauses are this many times as long as the reads before them, since training reads the same disk.
const PAUSES: u32 = 3;
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A thread that reads shards once from their beginning to their end. Dropped, it stops.
#[derive(Debug)]
pub struct ShardCheck {
    found: Arc<OnceLock<(PathBuf, String)>>,
    stops: Arc<AtomicBool>,
}

impl ShardCheck {
    /// Begins to read files, each with the XXH3-128 that it must have, in hexadecimal.
    pub(super) fn start(files: Vec<(PathBuf, String)>) -> Result<Self, DataError> {
        let this = Self {
            found: Arc::default(),
            stops: Arc::default(),
        };
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
        thread
            .spawn(read)
            .map_err(DataError::io("start a thread to read", &first))?;
        Ok(this)
    }

    /// # Errors
    /// A file that holds something else than was prepared, once that is known.
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

/// XXH3-128 of a file in hexadecimal, read with pauses; `None` if it was stopped.
fn hash_slowly(path: &Path, stops: &AtomicBool) -> std::io::Result<Option<String>> {
    let mut file = File::open(path)?;
    let (mut sum, mut piece) = (Xxh3::new(), vec![0; PIECE_BYTES]);
    loop {
        let since = Instant::now();
        let len = file.read(&mut piece)?;
        sum.update(&piece[..len]);
        if len == 0 {
            return Ok(Some(hex(sum.digest128())));
        }
        std::thread::sleep((PAUSES * since.elapsed()).min(LONGEST_PAUSE));
        if stops.load(Ordering::Relaxed) {
            return Ok(None);
        }
    }
}
