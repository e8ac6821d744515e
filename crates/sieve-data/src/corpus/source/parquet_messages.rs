//! Parquet with lists of messages: one row is one chat. Only that column is read, and those that the chat template
//! reads beside it.

use std::path::{Path, PathBuf};

use parquet::file::reader::SerializedFileReader;
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use parquet::schema::types::Type;

use super::document::{DocumentSource, Holds, SET_MESSAGES, chat_of, check_size};
use super::parquet::{guarded, several_columns};
use crate::error::DataError;

/// Reads a column row by row.
pub(super) struct ParquetMessages {
    rows: RowIter<'static>,
    path: PathBuf,
    column: String,
    max_bytes: u64,
    num_rows: u64,
    /// Number of the row returned last, from 1.
    row: u64,
}

impl ParquetMessages {
    /// Opens a file and checks that it has one column of this name. The columns `beside` are read if they are there.
    pub(super) fn open(path: &Path, column: &str, max_bytes: u64, beside: &[String]) -> Result<Self, DataError> {
        use parquet::file::reader::FileReader;
        let file = sieve_files::open_file(path).map_err(DataError::io("open", path))?;
        let reader = guarded(path, || SerializedFileReader::new(file))?;
        let num_rows = reader.metadata().file_metadata().num_rows().max(0) as u64;
        let schema = reader.metadata().file_metadata().schema().clone();
        let found = schema.get_fields().iter().filter(|field| field.name() == column).collect::<Vec<_>>();
        let field = match found.as_slice() {
            [field] => (*field).clone(),
            [] => {
                let names = schema.get_fields().iter().map(|field| field.name()).take(16).collect::<Vec<_>>();
                let what = format!("no column {column:?} (it has {names:?})");
                let hint = Holds::Messages.set_column_of(names.into_iter(), SET_MESSAGES);
                return Err(DataError::file(path, what, hint));
            }
            _ => return Err(several_columns(path, column)),
        };
        if field.is_primitive() {
            let what = format!("column {column:?} holds {}, not lists of messages", field.get_physical_type());
            return Err(DataError::file(path, what, SET_MESSAGES));
        }
        let is_beside = |name: &str| name != column && beside.iter().any(|found| found == name);
        let others = schema.get_fields().iter().filter(|field| is_beside(field.name())).cloned();
        let fields = std::iter::once(field).chain(others).collect();
        let rows = guarded(path, || {
            let projection = Type::group_type_builder(schema.name()).with_fields(fields).build()?;
            RowIter::from_file_into(Box::new(reader)).project(Some(projection))
        })?;
        Ok(Self { rows, path: path.to_path_buf(), column: column.to_owned(), max_bytes, num_rows, row: 0 })
    }

    /// The JSON of the chat in a row.
    fn json(&self, row: &Row) -> Result<String, DataError> {
        let name = format!("row {}", self.row);
        let values = row.get_column_iter().map(|(name, field): (_, &Field)| (name.clone(), field.to_json_value()));
        let mut beside = values.collect::<serde_json::Map<_, _>>();
        let json = match beside.shift_remove(&self.column) {
            Some(list @ serde_json::Value::Array(_)) => chat_of(list, beside),
            Some(serde_json::Value::Null) | None => {
                return Err(Holds::Messages.not_in_column(&self.path, &name, &self.column, "null"));
            }
            Some(_) => return Err(Holds::Messages.not_in_column(&self.path, &name, &self.column, "no list")),
        };
        check_size(&self.path, json.len() as u64, self.max_bytes).map_err(|error| error.in_row(&name))?;
        Ok(json)
    }
}

impl DocumentSource for ParquetMessages {
    fn next_document(&mut self) -> Option<Result<(String, u64), DataError>> {
        let rows = &mut self.rows;
        let row = match guarded(&self.path, || rows.next().transpose()) {
            Ok(row) => row?,
            Err(error) => return Some(Err(error)),
        };
        self.row += 1;
        Some(self.json(&row).map(|json| (json, self.row)))
    }

    fn share_read(&self, _num_bytes: u64) -> f64 {
        self.row as f64 / self.num_rows.max(1) as f64
    }
}
