//! Decompresses gzip and Zstandard files, recognised by their ending.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use flate2::bufread::GzDecoder;

use crate::error::DataError;

/// The compression of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::corpus) enum Packed {
    Gzip,
    Zstd,
}

impl Packed {
    /// The compression by a file's ending, and the file's name without that ending; `None` and the whole path of a file
    /// that is not compressed.
    pub(in crate::corpus) fn of(path: &Path) -> (Option<Self>, &Path) {
        let ending = path.extension().and_then(OsStr::to_str).unwrap_or_default();
        let packed = match ending.to_ascii_lowercase().as_str() {
            "gz" => Self::Gzip,
            "zst" => Self::Zstd,
            _ => return (None, path),
        };
        let stem = path.file_stem().map_or(path, Path::new);
        (Some(packed), stem)
    }

    /// The compression by a file's first bytes.
    pub(super) fn of_contents(head: &[u8]) -> Option<Self> {
        match head {
            [0x1F, 0x8B, 8, ..] => Some(Self::Gzip),
            [0x28, 0xB5, 0x2F, 0xFD, ..] => Some(Self::Zstd),
            _ => None,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
        }
    }

    pub(super) fn ending(self) -> &'static str {
        match self {
            Self::Gzip => "gz",
            Self::Zstd => "zst",
        }
    }
}

const BUFFER_BYTES: usize = 1 << 18;

/// The largest window of a Zstandard file, as a power of two: the most that `zstd --long=31` writes. The decoder takes
/// as much memory as a file asks for.
const ZSTD_WINDOW_LOG: u32 = 31;

/// The contents of a file, decompressed if its ending is `.gz` or `.zst`. Concatenated archives are read as one file,
/// as `gzip` and `zstd` do.
pub(in crate::corpus) struct Unpacked {
    reader: Box<dyn BufRead + Send>,
    packed: Option<Packed>,
    /// Number of decompressed bytes read so far.
    offset: u64,
    file_bytes: u64,
}

impl Unpacked {
    /// Opens a file, with the decoder of its ending; refuses an empty compressed file.
    pub(in crate::corpus) fn open(path: &Path) -> Result<Self, DataError> {
        let file = sieve_files::open_file(path).map_err(DataError::io("open", path))?;
        let file_bytes = file.metadata().map_err(DataError::io("read", path))?.len();
        let packed = Packed::of(path).0;
        let file = BufReader::with_capacity(BUFFER_BYTES, file);
        let reader: Box<dyn BufRead + Send> = match packed {
            None => Box::new(file),
            Some(Packed::Gzip) => Box::new(BufReader::with_capacity(BUFFER_BYTES, Gzip::new(file))),
            Some(Packed::Zstd) => {
                let decoder = zstd::stream::read::Decoder::with_buffer(file).and_then(|mut decoder| {
                    decoder.window_log_max(ZSTD_WINDOW_LOG)?;
                    Ok(decoder)
                });
                Box::new(BufReader::with_capacity(BUFFER_BYTES, decoder.map_err(DataError::io("unpack", path))?))
            }
        };
        let unpacked = Self { reader, packed, offset: 0, file_bytes };
        // Both decoders accept an empty file as an empty archive, but it is a truncated one.
        match packed {
            Some(_) if file_bytes == 0 => {
                let cut = io::Error::new(io::ErrorKind::UnexpectedEof, "the file is empty");
                Err(unpacked.error(path, cut))
            }
            _ => Ok(unpacked),
        }
    }

    /// Size of the contents in bytes; `None` for a compressed file.
    pub(super) fn known_bytes(&self) -> Option<u64> {
        self.packed.is_none().then_some(self.file_bytes)
    }

    /// The error to return when reading the file fails.
    pub(in crate::corpus) fn error(&self, path: &Path, error: io::Error) -> DataError {
        match self.packed {
            None => DataError::io("read", path)(error),
            Some(packed) => {
                let (offset, packing) = (self.offset, packed.name());
                if error.to_string().contains("not enough memory") {
                    let what = format!("unpacking it takes up to 2 GiB, which the system does not give: {error}");
                    return DataError::file(path, what, "free memory, or unpack it elsewhere: zstd -d --long=31");
                }
                let what = format!("damaged after {offset} bytes of text: {packing}: {error}");
                DataError::file(path, what, "nothing of it was used; fetch or pack the file again")
            }
        }
    }
}

/// The error of a damaged archive; `None` if the file is whole or not compressed. Decompresses all of it, because
/// damage in the middle may first appear as invalid text.
pub(in crate::corpus) fn broken_archive(path: &Path) -> Option<DataError> {
    Packed::of(path).0?;
    let mut reader = match Unpacked::open(path) {
        Ok(reader) => reader,
        Err(error) => return Some(error),
    };
    let copied = io::copy(&mut reader, &mut io::sink());
    copied.err().map(|error| reader.error(path, error))
}

/// The members of a gzip file, one after the other. Zero bytes behind a member are skipped, as `gzip` does: tapes and
/// block devices pad files with them.
struct Gzip<R> {
    /// `None` at the end of the file.
    member: Option<GzDecoder<R>>,
}

impl<R: BufRead> Gzip<R> {
    fn new(file: R) -> Self {
        Self { member: Some(GzDecoder::new(file)) }
    }
}

impl<R: BufRead> Read for Gzip<R> {
    /// Decompresses the members of a gzip file one after another, and skips zeros behind each member.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let Some(member) = &mut self.member else {
                return Ok(0);
            };
            let num_bytes = member.read(buffer)?;
            if num_bytes > 0 || buffer.is_empty() {
                return Ok(num_bytes);
            }
            // The member has ended. Another one follows if a byte other than zero comes before the file's end.
            let mut file = self.member.take().expect("found above").into_inner();
            let has_more = loop {
                let bytes = file.fill_buf()?;
                let num_zeros = bytes.iter().take_while(|byte| **byte == 0).count();
                match (num_zeros, bytes.len()) {
                    (_, 0) => break false,
                    (zeros, all) if zeros < all => {
                        file.consume(zeros);
                        break true;
                    }
                    (zeros, _) => file.consume(zeros),
                }
            };
            self.member = has_more.then(|| GzDecoder::new(file));
        }
    }
}

impl Read for Unpacked {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let num_bytes = self.reader.read(buffer)?;
        self.offset += num_bytes as u64;
        Ok(num_bytes)
    }
}

impl BufRead for Unpacked {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.reader.fill_buf()
    }

    fn consume(&mut self, num_bytes: usize) {
        self.offset += num_bytes as u64;
        self.reader.consume(num_bytes);
    }
}
