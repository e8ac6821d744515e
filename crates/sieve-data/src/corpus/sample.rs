//! A hash of a part of a file, by which a file is recognised as changed whatever its time stamps say.

use std::io::{Read, Result, Seek, SeekFrom};
use std::path::Path;

use xxhash_rust::xxh3::Xxh3;

/// Bytes of each of the three places of a file that are read.
const PLACE_BYTES: u64 = 64 << 10;

/// A hash of a file's first, middle and last 64 KiB; of all its bytes if it has no more. 0 for a file that cannot be
/// read, which is an error where its text is read.
pub(super) fn hash(path: &Path) -> u128 {
    hash_places(path).unwrap_or_default()
}

/// As [`hash`]; an error of the file system is passed on.
fn hash_places(path: &Path) -> Result<u128> {
    let mut file = sieve_files::open_file(path)?;
    let last = file.metadata()?.len().saturating_sub(PLACE_BYTES);
    let mut hash = Xxh3::new();
    let mut bytes = Vec::new();
    let mut end = 0;
    for place in [0, last / 2, last] {
        // Places of a short file overlap, and no byte is read twice.
        let begin = place.max(end);
        end = place + PLACE_BYTES;
        bytes.clear();
        file.seek(SeekFrom::Start(begin))?;
        file.by_ref().take(end - begin).read_to_end(&mut bytes)?;
        hash.update(&bytes);
    }
    Ok(hash.digest128())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_at_the_beginning_middle_or_end_counts_in_a_file_of_any_size() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text");
        let of = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            hash(&path)
        };
        for size in [1, 1 << 10, 100 << 10, 192 << 10, 1 << 20] {
            let mut bytes = vec![b'a'; size];
            let whole = of(&bytes);
            for at in [0, size / 2, size - 1] {
                bytes[at] = b'b';
                assert_ne!(of(&bytes), whole, "byte {at} of {size}");
                bytes[at] = b'a';
            }
            assert_eq!(of(&bytes), whole);
        }
        assert_eq!(hash(&dir.path().join("none")), 0);
    }
}
