//! Reads the documents of one file: plain text, JSONL or Parquet. A new format implements [`DocumentSource`].

mod document;
mod jsonl;
mod other_format;
mod parquet;
mod parquet_messages;
mod text;
mod unpack;

use std::path::Path;

use super::config::Format;
use crate::error::DataError;
pub(super) use document::DocumentSource;
use document::Holds;
pub(super) use jsonl::JsonLines;
use jsonl::JsonlSource;
pub(super) use other_format::refuse as refuse_other_format;
use parquet::ParquetSource;
pub(super) use parquet::{guarded, several_columns};
use parquet_messages::ParquetMessages;
pub use text::TableAsText;
use text::TextSource;
pub(super) use text::table_of;
pub(super) use unpack::{Packed, broken_archive};

/// Opens a file and reads its documents in this format.
pub(super) fn open(
    format: &Format,
    path: &Path,
    max_document_bytes: Option<u64>,
) -> Result<Box<dyn DocumentSource>, DataError> {
    let max_bytes = max_document_bytes.unwrap_or(u64::MAX);
    let (holds, format) = (Holds::Text, format.of(path));
    // A text file is a document, which may be skipped: its source looks by itself.
    if !matches!(format, Format::Text | Format::ByEnding { .. }) {
        refuse_other_format(path)?;
    }
    Ok(match &format {
        // `Format::of` returns the format that an ending names, never `ByEnding`.
        Format::Text | Format::ByEnding { .. } => {
            Box::new(TextSource { path: path.to_path_buf(), max_bytes, done: false })
        }
        Format::Jsonl { text_column } => Box::new(JsonlSource::open(path, (text_column, holds), max_bytes)?),
        Format::Parquet { text_column } => Box::new(ParquetSource::open(path, text_column, max_bytes)?),
    })
}

/// Opens a file of JSON lines or Parquet whose column holds lists of messages. The text of a document is the JSON of an
/// object: the messages, and the row's values in the columns `beside`, where it has them.
pub(super) fn open_messages(
    format: &Format,
    path: &Path,
    max_document_bytes: Option<u64>,
    beside: Vec<String>,
) -> Result<Box<dyn DocumentSource>, DataError> {
    let max_bytes = max_document_bytes.unwrap_or(u64::MAX);
    refuse_other_format(path)?;
    Ok(match format {
        Format::Parquet { text_column } => Box::new(ParquetMessages::open(path, text_column, max_bytes, &beside)?),
        Format::Jsonl { text_column } | Format::ByEnding { text_column } => {
            Box::new(JsonlSource::open(path, (text_column, Holds::Messages), max_bytes)?.with_columns(beside))
        }
        Format::Text => return open(format, path, max_document_bytes),
    })
}
