//! Plain text: one file is one document.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use super::document::{BYTE_ORDER_MARK, DocumentSource, check_encoding, check_size, check_utf8, nul_byte};
use super::other_format::OtherFormat;
use super::unpack::Unpacked;
use crate::corpus::config::ending;
use crate::error::DataError;

pub(super) struct TextSource {
    pub(super) path: PathBuf,
    pub(super) max_bytes: u64,
    pub(super) done: bool,
}

/// Number of bytes at the beginning of a file, unpacked, that are searched for JSON.
const LOOKED_AT_BYTES: u64 = 1 << 20;

/// How a text file holds rows of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableAsText {
    /// Each line is a JSON object, judged by the first two lines.
    JsonLines,
    /// The whole file is a list of JSON objects.
    JsonList,
    /// Values between commas, by the name's ending `.csv`.
    Commas,
    /// Values between tabs, by the name's ending `.tsv`.
    Tabs,
}

/// How a text file holds a table, judged by its name's ending and its first two lines that are not blank; `None` if it
/// holds none or cannot be read.
pub(in crate::corpus) fn table_of(path: &Path) -> Option<TableAsText> {
    match ending(path).to_ascii_lowercase().as_str() {
        "csv" => return Some(TableAsText::Commas),
        "tsv" => return Some(TableAsText::Tabs),
        _ => {}
    }
    let reader = BufReader::new(Unpacked::open(path).ok()?.take(LOOKED_AT_BYTES));
    let lines = reader.lines().map_while(Result::ok);
    let mut lines = lines.filter(|line| !line.trim().is_empty());
    let mut next = || {
        let line = lines.next().unwrap_or_default();
        line.trim_start_matches('\u{feff}').trim().to_owned()
    };
    let is_object = |line: &str| line.starts_with('{') && serde_json::from_str::<serde::de::IgnoredAny>(line).is_ok();
    let first = next();
    let in_list = first.strip_prefix('[').map(str::trim_start);
    match in_list {
        Some("") => next().starts_with('{').then_some(TableAsText::JsonList),
        Some(rest) => rest.starts_with("{\"").then_some(TableAsText::JsonList),
        None => (is_object(&first) && is_object(&next())).then_some(TableAsText::JsonLines),
    }
}

impl DocumentSource for TextSource {
    fn next_document(&mut self) -> Option<Result<(String, u64), DataError>> {
        let first = !std::mem::replace(&mut self.done, true);
        first.then(|| Ok((self.read()?, 1)))
    }

    fn share_read(&self, _num_bytes: u64) -> f64 {
        f64::from(u8::from(self.done))
    }
}

impl TextSource {
    /// The text of the whole file, decompressed and without a byte order mark.
    fn read(&self) -> Result<String, DataError> {
        let path = &self.path;
        let other = |OtherFormat { what, hint }: OtherFormat| {
            let hint = format!("{hint}, or leave such files out: skip_invalid (eval ppl: --skip-invalid)");
            DataError::document(path, what, hint)
        };
        if let Some(found) = OtherFormat::at(path) {
            return Err(other(found));
        }
        let mut reader = Unpacked::open(path)?;
        if let Some(num_bytes) = reader.known_bytes() {
            check_size(path, num_bytes, self.max_bytes)?;
        }
        // Reading one byte more than allowed detects a file that is too large, without decompressing all of it.
        let mut bytes = Vec::new();
        let read = reader.by_ref().take(self.max_bytes.saturating_add(1)).read_to_end(&mut bytes);
        read.map_err(|error| reader.error(path, error))?;
        check_size(path, bytes.len() as u64, self.max_bytes)?;
        if let Some(found) = OtherFormat::of_contents(path, &bytes) {
            return Err(other(found));
        }
        check_encoding(path, &bytes)?;
        if let Some(position) = bytes.iter().position(|&byte| byte == 0) {
            return Err(nul_byte(path, position));
        }
        check_utf8(path, &bytes, 0)?;
        if bytes.starts_with(BYTE_ORDER_MARK) {
            bytes.drain(..BYTE_ORDER_MARK.len());
        }
        Ok(String::from_utf8(bytes).expect("checked above, and the mark is a whole character"))
    }
}
