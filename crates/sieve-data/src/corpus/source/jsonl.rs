//! JSONL: one line is one document.

use std::fmt;
use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;

use super::unpack::Unpacked;
use super::{BYTE_ORDER_MARK, DocumentSource, check_encoding, check_size};
use crate::error::DataError;

pub(super) struct JsonlSource {
    reader: Unpacked,
    path: PathBuf,
    column: String,
    max_bytes: u64,
    /// The line read last, from 1.
    line: u64,
    /// Offset of the next line in the file.
    offset: u64,
    buffer: Vec<u8>,
}

impl DocumentSource for JsonlSource {
    fn next_document(&mut self) -> Option<Result<(String, u64), DataError>> {
        loop {
            self.buffer.clear();
            let line_offset = self.offset;
            match self.reader.by_ref().read_until(b'\n', &mut self.buffer) {
                Ok(0) => return None,
                Ok(num_bytes) => self.offset += num_bytes as u64,
                Err(error) => return Some(Err(self.reader.error(&self.path, error))),
            }
            self.line += 1;
            let mark = if self.line == 1 && self.buffer.starts_with(BYTE_ORDER_MARK) {
                BYTE_ORDER_MARK.len()
            } else {
                0
            };
            if !self.buffer[mark..].trim_ascii().is_empty() {
                return Some(self.parse(mark, line_offset).map(|text| (text, self.line)));
            }
        }
    }
}

impl JsonlSource {
    pub(super) fn open(path: &Path, column: &str, max_bytes: u64) -> Result<Self, DataError> {
        Ok(Self {
            reader: Unpacked::open(path)?,
            path: path.to_path_buf(),
            column: column.to_owned(),
            max_bytes,
            line: 0,
            offset: 0,
            buffer: Vec::new(),
        })
    }

    fn parse(&self, mark: usize, line_offset: u64) -> Result<String, DataError> {
        let path = || self.path.clone();
        if self.line == 1 {
            check_encoding(&self.path, &self.buffer)?;
        }
        let line = std::str::from_utf8(&self.buffer).map_err(|error| DataError::NotUtf8 {
            path: path(),
            byte_offset: line_offset + error.valid_up_to() as u64,
        })?;
        let line = &line[mark..];
        let bad_json = |error: serde_json::Error| DataError::BadJson {
            path: path(),
            line: self.line,
            // The parser counts lines too, from the start of this one.
            reason: error.to_string().replace(" at line 1 column ", " at column "),
        };
        let mut parser = serde_json::Deserializer::from_str(line);
        let value = Column { name: &self.column }
            .deserialize(&mut parser)
            .map_err(bad_json)?;
        parser.end().map_err(bad_json)?;
        let text = match value {
            Some(Value::String(text)) => text,
            Some(other) => {
                let (column, found) = (self.column.clone(), kind_of(&other));
                return Err(DataError::ColumnNotText {
                    path: path(),
                    line: self.line,
                    column,
                    found,
                });
            }
            None => {
                let found = serde_json::from_str::<serde_json::Map<String, Value>>(line).map_err(bad_json)?;
                let found = found.keys().take(16).cloned().collect();
                return Err(DataError::MissingColumn {
                    path: path(),
                    line: self.line,
                    column: self.column.clone(),
                    found,
                });
            }
        };
        check_size(&self.path, text.len() as u64, self.max_bytes)?;
        if text.contains('\0') {
            return Err(DataError::NulByte {
                path: path(),
                byte_offset: line_offset,
            });
        }
        Ok(text)
    }
}

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

/// Takes one column out of a JSON object and builds nothing for the others. The last of equal names counts.
struct Column<'a> {
    name: &'a str,
}

impl<'de> DeserializeSeed<'de> for Column<'_> {
    type Value = Option<Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Column<'_> {
    type Value = Option<Value>;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = None;
        while let Some(key) = map.next_key::<std::borrow::Cow<'de, str>>()? {
            if key == self.name {
                found = Some(map.next_value()?);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(found)
    }
}
