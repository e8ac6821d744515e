//! JSONL: one line is one document.

use std::fmt;
use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::{Map, Value};
use sieve_files::python_number;

use super::document::{
    BYTE_ORDER_MARK, DocumentSource, Holds, chat_of, check_encoding, check_size, check_utf8, nul_byte,
};
use super::unpack::Unpacked;
use crate::error::DataError;

/// The longest line, if documents have no limit.
const MAX_LINE_BYTES: u64 = 256 << 20;
/// With a limit on documents, a line may have six bytes for each byte of text (an escape like `\u0041`), and this many
/// for its other columns.
const OTHER_COLUMNS_BYTES: u64 = 16 << 20;

/// Reads the lines of a file one at a time, without blank ones.
pub(in crate::corpus) struct JsonLines {
    reader: Unpacked,
    path: PathBuf,
    max_line_bytes: u64,
    /// Whether the current line was too long, so that its rest must be skipped.
    skips_rest: bool,
    /// Number of the current line, from 1.
    line: u64,
    /// Offset of the current line in the file, in bytes.
    line_offset: u64,
    /// Offset of the next line in the file, in bytes.
    offset: u64,
    buffer: Vec<u8>,
}

impl JsonLines {
    /// Opens a file whose documents may have `max_bytes`; `u64::MAX` for no limit.
    pub(in crate::corpus) fn open(path: &Path, max_bytes: u64) -> Result<Self, DataError> {
        Ok(Self {
            reader: Unpacked::open(path)?,
            path: path.to_path_buf(),
            max_line_bytes: match max_bytes {
                u64::MAX => MAX_LINE_BYTES,
                max_bytes => max_bytes.saturating_mul(6).saturating_add(OTHER_COLUMNS_BYTES),
            },
            skips_rest: false,
            line: 0,
            line_offset: 0,
            offset: 0,
            buffer: Vec::new(),
        })
    }

    /// Reads the next line that is not blank into the buffer; `None` at the end.
    pub(in crate::corpus) fn advance(&mut self) -> Option<Result<(), DataError>> {
        loop {
            match self.read_line() {
                Ok(0) => return None,
                Ok(num_bytes) => self.line_offset = self.offset - num_bytes,
                Err(error) => return Some(Err(self.reader.error(&self.path, error))),
            }
            self.line += 1;
            if self.buffer.len() as u64 > self.max_line_bytes {
                self.skips_rest = self.buffer.last() != Some(&b'\n');
                self.buffer = Vec::new();
                let what = format!("line {} is longer than {} bytes", self.line, self.max_line_bytes);
                let hint = "raise max_document_bytes, split the document, or allow invalid documents to be skipped";
                return Some(Err(DataError::document(&self.path, what, hint)));
            }
            if !self.buffer[self.mark()..].trim_ascii().is_empty() {
                return Some(Ok(()));
            }
        }
    }

    /// Length in bytes of the byte order mark at the beginning of the current line.
    fn mark(&self) -> usize {
        if self.line == 1 && self.buffer.starts_with(BYTE_ORDER_MARK) { BYTE_ORDER_MARK.len() } else { 0 }
    }

    /// Reads the next line, or the first bytes of one that is too long. Returns the number of bytes, 0 at the end.
    fn read_line(&mut self) -> std::io::Result<u64> {
        // The rest of a line that was too long ends with the next newline.
        while std::mem::take(&mut self.skips_rest) {
            let bytes = self.reader.fill_buf()?;
            let end = bytes.iter().position(|byte| *byte == b'\n');
            let num_bytes = end.map_or(bytes.len(), |end| end + 1);
            self.skips_rest = end.is_none() && num_bytes > 0;
            self.reader.consume(num_bytes);
            self.offset += num_bytes as u64;
        }
        self.buffer.clear();
        let mut line = self.reader.by_ref().take(self.max_line_bytes.saturating_add(1));
        let num_bytes = line.read_until(b'\n', &mut self.buffer)? as u64;
        self.offset += num_bytes;
        Ok(num_bytes)
    }

    /// The current line without a byte order mark and its end.
    pub(in crate::corpus) fn text(&self) -> Result<&str, DataError> {
        if self.line == 1 {
            check_encoding(&self.path, &self.buffer)?;
        }
        let line = check_utf8(&self.path, &self.buffer, self.line_offset);
        let line = line.map_err(|error| self.in_line(error))?;
        // With the line break, the JSON parser would say that a missing bracket is missing on line 2.
        Ok(line[self.mark()..].trim_end_matches(['\r', '\n']))
    }

    /// Adds the number of the current line to an error.
    fn in_line(&self, error: DataError) -> DataError {
        error.in_row(&format!("line {}", self.line))
    }

    /// The error that the current line is not a JSON object, with a hint of its own for NaN and Infinity.
    pub(in crate::corpus) fn bad_json(&self, error: serde_json::Error) -> DataError {
        // The parser was given one line, so its own line number is always 1.
        let line = self.line;
        let (reason, hint) = match python_number(
            &String::from_utf8_lossy(&self.buffer[self.mark()..]),
            1,
            error.column(),
        ) {
            Some(word) => (
                format!("{word} at column {}", error.column()),
                "Python's json writes such words, and JSON has none: write the file with allow_nan=False and null in \
                 their place, or leave such lines out: skip_invalid (eval ppl: --skip-invalid)",
            ),
            None => (
                error.to_string().replace(" at line 1 column ", " at column "),
                "fix the line, or leave such lines out: skip_invalid (eval ppl: --skip-invalid)",
            ),
        };
        DataError::document(&self.path, format!("line {line} is not a JSON object: {reason}"), hint)
    }
}

pub(super) struct JsonlSource {
    lines: JsonLines,
    column: String,
    holds: Holds,
    /// Columns beside the messages that are read where a line has them.
    beside: Vec<String>,
    max_bytes: u64,
}

impl DocumentSource for JsonlSource {
    fn next_document(&mut self) -> Option<Result<(String, u64), DataError>> {
        let line = self.lines.advance()?;
        Some(line.and_then(|()| Ok((self.parse()?, self.lines.line))))
    }

    fn share_read(&self, num_bytes: u64) -> f64 {
        (self.lines.offset as f64 / num_bytes.max(1) as f64).min(1.0)
    }
}

impl JsonlSource {
    pub(super) fn open(path: &Path, (column, holds): (&str, Holds), max_bytes: u64) -> Result<Self, DataError> {
        let (lines, column) = (JsonLines::open(path, max_bytes)?, column.to_owned());
        Ok(Self { lines, column, holds, beside: Vec::new(), max_bytes })
    }

    /// Reads these columns too, beside the messages.
    pub(super) fn with_columns(self, beside: Vec<String>) -> Self {
        Self { beside, ..self }
    }

    /// The text in the current line's column; an error if it is missing, not a string, too large, or holds a NUL.
    fn parse(&self) -> Result<String, DataError> {
        let lines = &self.lines;
        let line = lines.text()?;
        let (path, number, column) = (&lines.path, lines.line, &self.column);
        let mut parser = serde_json::Deserializer::from_str(line);
        let value = Columns { name: &self.column, beside: &self.beside }.deserialize(&mut parser);
        let (value, beside) = value.map_err(|error| lines.bad_json(error))?;
        parser.end().map_err(|error| lines.bad_json(error))?;
        let text = match value {
            Some(list @ Value::Array(_)) if self.holds == Holds::Messages => chat_of(list, beside),
            Some(Value::String(text)) if self.holds == Holds::Text => text,
            Some(other) => {
                return Err(self.holds.not_in_column(path, &format!("line {number}"), column, kind_of(&other)));
            }
            None => {
                let found = serde_json::from_str::<serde_json::Map<String, Value>>(line);
                let found = found.map_err(|error| lines.bad_json(error))?;
                let found = found.keys().take(16).collect::<Vec<_>>();
                let what = format!("line {number} has no column {column:?} (it has {found:?})");
                let columns = found.iter().map(|column| column.as_str());
                let hint = self.holds.set_column_of(columns, self.holds.set_column_or_skip());
                return Err(DataError::document(path, what, hint));
            }
        };
        check_size(path, text.len() as u64, self.max_bytes).map_err(|error| lines.in_line(error))?;
        if let Some(position) = text.find('\0') {
            return Err(lines.in_line(nul_byte(path, position)));
        }
        Ok(text)
    }
}

/// What JSON calls this value, for an error's sentence.
fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// Deserialises a column of a JSON object, and those beside it that are asked for, and skips the others. The last of
/// several columns with one name counts.
struct Columns<'a> {
    name: &'a str,
    beside: &'a [String],
}

impl<'de> DeserializeSeed<'de> for Columns<'_> {
    type Value = (Option<Value>, Map<String, Value>);

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Columns<'_> {
    type Value = (Option<Value>, Map<String, Value>);

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut found, mut beside) = (None, Map::new());
        while let Some(key) = map.next_key::<std::borrow::Cow<'de, str>>()? {
            if key == self.name {
                found = Some(map.next_value()?);
            } else if self.beside.iter().any(|name| *name == key) {
                beside.insert(key.into_owned(), map.next_value()?);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok((found, beside))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_files::zstd;
    use sieve_testing::refusal;

    /// A line that decompresses to more bytes than allowed is read up to the limit, and then the next line is read.
    #[test]
    fn a_line_that_is_too_long_takes_no_memory_and_the_next_one_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bomb.jsonl.zst");
        let long = format!("{{\"text\": \"{}\"}}\n", "x".repeat(64 << 20));
        std::fs::write(&path, zstd(format!("{long}{{\"text\": \"next\"}}\n").as_bytes())).unwrap();
        let mut source = JsonlSource::open(&path, ("text", Holds::Text), 1 << 16).unwrap();
        // The limit of a line: six times 65,536 bytes, and 16 MiB.
        let error = source.next_document().unwrap();
        assert!(error.as_ref().is_err_and(DataError::is_invalid_document));
        refusal(error, "bomb.jsonl.zst | line 1 | longer than 17170432 bytes | max_document_bytes");
        assert!(
            source.lines.reader.fill_buf().unwrap().len() > 1 && source.lines.offset < 1 << 25,
            "{}",
            source.lines.offset
        );
        assert_eq!(source.next_document().unwrap().unwrap(), ("next".to_owned(), 2));
        // The buffer of the long line was freed.
        assert_eq!(source.lines.buffer.capacity() >> 20, 0);
        assert!(source.next_document().is_none());
        // A line below its own limit can hold a document above the document's limit.
        std::fs::write(&path, zstd(format!("{{\"text\": \"{}\"}}", "x".repeat(1 << 17)).as_bytes())).unwrap();
        let mut source = JsonlSource::open(&path, ("text", Holds::Text), 1 << 16).unwrap();
        refusal(source.next_document().unwrap(), "131072 bytes is over the limit of 65536");
    }
}
