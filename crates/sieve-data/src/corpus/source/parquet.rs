//! Parquet: one row is one document, its text in one column. Only that column is read, page by page.

use std::fs::File;
use std::path::{Path, PathBuf};

use parquet::basic::Type as PhysicalType;
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::document::{DocumentSource, Holds, SET_COLUMN, check_size};
use crate::error::DataError;
use crate::guard;

pub(super) struct ParquetSource {
    reader: SerializedFileReader<File>,
    path: PathBuf,
    column: String,
    column_idx: usize,
    /// Definition level of a value that is not null.
    max_level: i16,
    max_bytes: u64,
    next_row_group: usize,
    /// The reader of the current row group; `None` between row groups.
    current: Option<ColumnReaderImpl<ByteArrayType>>,
    /// Rows of the current group that were not read yet.
    rows_left: i64,
    /// Values of the rows read ahead, in reverse order; `None` is null.
    rows: Vec<Option<ByteArray>>,
    /// Number of the row returned last, from 1.
    row: u64,
}

/// Rows decoded at a time. Their values are slices of decompressed pages.
const ROWS_AT_ONCE: usize = 256;

impl ParquetSource {
    /// Opens a file, and checks that it has a text column of this name and all of its rows.
    pub(super) fn open(path: &Path, column: &str, max_bytes: u64) -> Result<Self, DataError> {
        let file = sieve_files::open_file(path).map_err(DataError::io("open", path))?;
        let reader = guarded(path, || SerializedFileReader::new(file))?;
        let groups = reader.metadata().row_groups().iter();
        let num_rows = reader.metadata().file_metadata().num_rows();
        if groups.map(|group| i128::from(group.num_rows())).sum::<i128>() != i128::from(num_rows) {
            let what = format!("its row groups do not hold the {num_rows} rows it names");
            return Err(unreadable(path, &what));
        }
        let schema = reader.metadata().file_metadata().schema_descr_ptr();
        let names = schema.columns().iter().map(|column| column.path().string());
        let Some(column_idx) = names.clone().position(|name| name == column) else {
            let found = names.take(16).collect::<Vec<_>>();
            let what = format!("no column {column:?} (it has {found:?})");
            let hint = Holds::Text.set_column_of(found.iter().map(String::as_str), SET_COLUMN);
            return Err(DataError::file(path, what, hint));
        };
        if names.filter(|name| name == column).count() > 1 {
            return Err(several_columns(path, column));
        }
        let descriptor = schema.column(column_idx);
        let not_text = match (descriptor.physical_type(), descriptor.max_rep_level()) {
            (PhysicalType::BYTE_ARRAY, 0) => None,
            (PhysicalType::BYTE_ARRAY, _) => Some("lists".to_owned()),
            (other, _) => Some(other.to_string()),
        };
        if let Some(found) = not_text {
            let what = format!("column {column:?} holds {found}, not text");
            return Err(DataError::file(path, what, SET_COLUMN));
        }
        Ok(Self {
            reader,
            path: path.to_path_buf(),
            column: column.to_owned(),
            column_idx,
            max_level: descriptor.max_def_level(),
            max_bytes,
            next_row_group: 0,
            current: None,
            rows_left: 0,
            rows: Vec::new(),
            row: 0,
        })
    }

    /// Reads the next rows into `rows`; at the end of the file none.
    fn read_rows(&mut self) -> Result<(), DataError> {
        while self.rows.is_empty() {
            let Some(column) = &mut self.current else {
                if self.next_row_group == self.reader.num_row_groups() {
                    return Ok(());
                }
                self.current = Some(self.open_row_group(self.next_row_group)?);
                self.rows_left = self.reader.metadata().row_group(self.next_row_group).num_rows();
                self.next_row_group += 1;
                continue;
            };
            let (mut levels, mut values) = (Vec::new(), Vec::new());
            let path = self.path.clone();
            let read = || column.read_records(ROWS_AT_ONCE, Some(&mut levels), None, &mut values);
            let (num_rows, num_values, _) = guarded(&path, read)?;
            self.rows_left -= num_rows as i64;
            if num_rows == 0 {
                self.current = None;
                match self.rows_left {
                    0 => continue,
                    left => return Err(unreadable(&self.path, &format!("a row group lacks {left} rows"))),
                }
            }
            // A column without nulls (level 0) has no definition levels.
            let mut values = values.into_iter();
            self.rows = match self.max_level {
                0 => values.map(Some).collect(),
                level => levels.iter().map(|&found| if found == level { values.next() } else { None }).collect(),
            };
            let num_found = self.rows.iter().flatten().count();
            if self.rows.len() != num_rows || num_found != num_values {
                let len = self.rows.len();
                let reason =
                    format!("{num_rows} rows hold {num_values} values, but their levels say {num_found} in {len}");
                return Err(unreadable(&self.path, &reason));
            }
            // The next row is taken from the end.
            self.rows.reverse();
        }
        Ok(())
    }

    fn open_row_group(&self, idx: usize) -> Result<ColumnReaderImpl<ByteArrayType>, DataError> {
        let open = || self.reader.get_row_group(idx)?.get_column_reader(self.column_idx);
        match guarded(&self.path, open)? {
            ColumnReader::ByteArrayColumnReader(column) => Ok(column),
            _ => Err(unreadable(&self.path, "a row group has a different schema from the file's")),
        }
    }

    /// The text of the current row; an error if it is null, too large, not UTF-8, or holds a NUL.
    fn text(&self, value: Option<ByteArray>) -> Result<String, DataError> {
        let Some(value) = value else {
            return Err(Holds::Text.not_in_column(&self.path, &format!("row {}", self.row), &self.column, "null"));
        };
        let bytes = value.data();
        let size = check_size(&self.path, bytes.len() as u64, self.max_bytes);
        size.map_err(|error| error.in_row(&format!("row {}", self.row)))?;
        let what = match std::str::from_utf8(bytes) {
            _ if bytes.contains(&0) => "holds a NUL, so it is probably not text".to_owned(),
            Ok(text) => return Ok(text.to_owned()),
            Err(error) => format!("is not UTF-8 at its byte {}", error.valid_up_to()),
        };
        let hint = "leave the row out, or all such rows: skip_invalid (eval ppl: --skip-invalid)";
        Err(DataError::document(&self.path, format!("row {} {what}", self.row), hint))
    }
}

impl DocumentSource for ParquetSource {
    fn next_document(&mut self) -> Option<Result<(String, u64), DataError>> {
        if self.rows.is_empty()
            && let Err(error) = self.read_rows()
        {
            return Some(Err(error));
        }
        let value = self.rows.pop()?;
        self.row += 1;
        Some(self.text(value).map(|text| (text, self.row)))
    }

    fn share_read(&self, _num_bytes: u64) -> f64 {
        self.row as f64 / self.reader.metadata().file_metadata().num_rows().max(1) as f64
    }
}

/// The error of a file with more than one column of a name.
pub(in crate::corpus) fn several_columns(path: &Path, column: &str) -> DataError {
    let what = format!("several columns are named {column:?}");
    DataError::file(path, what, "give each column a name of its own: which is meant cannot be known")
}

/// Calls the Parquet reader, which panics on some damaged files.
pub(in crate::corpus) fn guarded<T>(
    path: &Path,
    work: impl FnOnce() -> Result<T, ParquetError>,
) -> Result<T, DataError> {
    // After an error the reader is not used again, so a panic cannot leave it half changed.
    match guard::guarded(work) {
        Some(result) => result.map_err(|error| unreadable(path, &error.to_string())),
        None => Err(unreadable(path, "its pages contradict one another")),
    }
}

/// The error of a file that is no Parquet, or none that can be read here, with the way out.
fn unreadable(path: &Path, reason: &str) -> DataError {
    let what = format!("not a readable Parquet file: {reason}");
    // The parquet crate's message about a compression that it was built without.
    let hint = if reason.contains("Disabled feature at compile time") {
        "write the file with a different compression: snappy, zstd, gzip, lz4 or none"
    } else {
        "fetch or write the file again"
    };
    DataError::file(path, what, hint)
}
