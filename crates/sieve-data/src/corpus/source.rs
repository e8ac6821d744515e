//! Documents out of one file: plain text, JSONL, Parquet. Another format is another [`DocumentSource`].

mod jsonl;
mod parquet;
mod text;
mod unpack;

use std::path::Path;

use super::Format;
use crate::error::DataError;
pub(super) use jsonl::JsonLines;
use jsonl::JsonlSource;
use parquet::ParquetSource;
pub(super) use parquet::guarded;
use text::TextSource;
pub(super) use text::begins_with_json_lines;
pub(super) use unpack::{Packed, broken_archive};

/// The documents of one file, in order.
///
/// An error for which [`DataError::is_invalid_document`] holds concerns that document alone: the next call gives the
/// next one. After any other error the source is not asked again.
pub(super) trait DocumentSource: Send {
    /// The next document's text and line, or `None` at the end.
    fn next_document(&mut self) -> Option<Result<(String, u64), DataError>>;
}

/// Opens `path` as `format` says.
pub(super) fn open(
    format: &Format,
    path: &Path,
    max_document_bytes: Option<u64>,
) -> Result<Box<dyn DocumentSource>, DataError> {
    let max_bytes = max_document_bytes.unwrap_or(u64::MAX);
    Ok(match &format.of(path) {
        Format::Text | Format::ByEnding { .. } => Box::new(TextSource {
            path: path.to_path_buf(),
            max_bytes,
            done: false,
        }),
        Format::Jsonl { text_column } => Box::new(JsonlSource::open(path, text_column, max_bytes)?),
        Format::Parquet { text_column } => Box::new(ParquetSource::open(path, text_column, max_bytes)?),
    })
}

const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

fn check_size(path: &Path, bytes: u64, max_bytes: u64) -> Result<(), DataError> {
    if bytes > max_bytes {
        return Err(DataError::TooLarge {
            path: path.to_path_buf(),
            bytes,
            max_bytes,
        });
    }
    Ok(())
}

/// Refuses text that says it is UTF-16, little or big endian.
fn check_encoding(path: &Path, bytes: &[u8]) -> Result<(), DataError> {
    let marks: [&[u8]; 2] = [b"\xFF\xFE", b"\xFE\xFF"];
    match marks.iter().any(|mark| bytes.starts_with(mark)) {
        true => Err(DataError::Utf16 {
            path: path.to_path_buf(),
        }),
        false => Ok(()),
    }
}
