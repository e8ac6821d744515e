//! Verifies checksums of shards: at once, or in the background while a run trains on them.

use sieve_files::open_file;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::Xxh3;

use super::names::hex;
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
            let pause = |took: Duration| {
                std::thread::sleep((PAUSES * took).min(LONGEST_PAUSE));
                !stops.load(Ordering::Relaxed)
            };
            if let Some(problem) = first_problem(files, pause) {
                let _ = found.set(problem);
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
        self.found.get().map_or(Ok(()), |(path, what)| Err(DataError::shard(path, what)))
    }
}

impl Drop for ShardCheck {
    fn drop(&mut self) {
        self.stops.store(true, Ordering::Relaxed);
    }
}

/// Compares the checksums of files with the ones that they must have, without pauses.
///
/// # Errors
/// The first file that has another checksum or cannot be read.
pub(super) fn check_now(files: Vec<(PathBuf, String)>) -> Result<(), DataError> {
    let no_pause = |_took| true;
    first_problem(files, no_pause).map_or(Ok(()), |(path, what)| Err(DataError::shard(&path, what)))
}

/// The first file with another checksum than it must have, and the problem; `None` also if `pause` returned false.
fn first_problem(files: Vec<(PathBuf, String)>, pause: impl Fn(Duration) -> bool) -> Option<(PathBuf, String)> {
    for (path, wanted) in files {
        let what = match hash(&path, &pause) {
            Ok(Some(hash)) if hash != wanted => {
                format!("its bytes are not those that were prepared (XXH3 {hash}, meta.json says {wanted})")
            }
            Ok(Some(_)) => continue,
            Ok(None) => return None,
            Err(error) => format!("it cannot be read to its end: {error}"),
        };
        return Some((path, what));
    }
    None
}

/// XXH3-128 of a file in hexadecimal. `pause` is called with the time that each chunk took; `None` if it returned
/// false.
fn hash(path: &Path, pause: impl Fn(Duration) -> bool) -> std::io::Result<Option<String>> {
    let mut file = open_file(path)?;
    let (mut hash, mut chunk) = (Xxh3::new(), vec![0; CHUNK_BYTES]);
    loop {
        let since = Instant::now();
        let len = file.read(&mut chunk)?;
        hash.update(&chunk[..len]);
        if len == 0 {
            return Ok(Some(hex(hash.digest128())));
        }
        if !pause(since.elapsed()) {
            return Ok(None);
        }
    }
}
