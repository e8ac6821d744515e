//! Reads all rows and columns of a small JSONL or Parquet file, including lists and groups.

use std::path::Path;

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use serde_json::{Map, Value};
use sieve_files::python_number;

use super::config::ending;
use super::files::require_file;
use super::source::{JsonLines, guarded, refuse_other_format, several_columns};
use crate::error::DataError;

/// The columns of a row by name, in the file's order.
pub type TableRow = Map<String, Value>;

/// All rows of a JSONL file (`.jsonl`, `.ndjson`, also compressed as `.gz` or `.zst`), of a list of objects (`.json`)
/// or of a Parquet file. Blank lines are skipped; binary values of Parquet become base64.
///
/// # Errors
/// Another ending; a file that cannot be read, a line that is not a JSON object; a file without rows.
pub fn read_table(path: &Path) -> Result<Vec<TableRow>, DataError> {
    require_file(path)?;
    refuse_other_format(path)?;
    let rows = match ending(path).to_ascii_lowercase().as_str() {
        "jsonl" | "ndjson" => json_rows(path).map_err(DataError::of_table)?,
        "json" => json_list(path)?,
        "parquet" => parquet_rows(path)?,
        _ => {
            let hint = "name it .jsonl (one JSON object a line), .json (a list of objects) or .parquet; .jsonl.gz and \
                .jsonl.zst are read too";
            return Err(DataError::file(path, "neither JSONL nor Parquet by its ending", hint));
        }
    };
    if rows.is_empty() {
        Err(DataError::file(path, "there is no row in it", "name a file with a row a line"))
    } else {
        Ok(rows)
    }
}

/// The rows of a JSONL file.
fn json_rows(path: &Path) -> Result<Vec<TableRow>, DataError> {
    let no_limit = u64::MAX;
    let (mut lines, mut rows) = (JsonLines::open(path, no_limit)?, Vec::new());
    while let Some(line) = lines.advance() {
        line?;
        let row = serde_json::from_str(lines.text()?);
        rows.push(row.map_err(|error| lines.bad_json(error))?);
    }
    Ok(rows)
}

/// The rows of one JSON text that is a list of objects.
fn json_list(path: &Path) -> Result<Vec<TableRow>, DataError> {
    let text = sieve_files::read_text(path).map_err(DataError::io("read", path))?;
    serde_json::from_str(text.trim_start_matches('\u{feff}')).map_err(|error| {
        let reason = match python_number(&text, error.line(), error.column()) {
            Some(word) => format!("{word} at line {} column {}", error.line(), error.column()),
            None => error.to_string(),
        };
        let what = format!("not a list of JSON objects: {reason}");
        DataError::file(path, what, "write [{…}, {…}]; a file with an object a line is named .jsonl")
    })
}

/// The rows of a Parquet file with all of its columns.
fn parquet_rows(path: &Path) -> Result<Vec<TableRow>, DataError> {
    let file = sieve_files::open_file(path).map_err(DataError::io("open", path))?;
    let reader = guarded(path, || SerializedFileReader::new(file))?;
    let fields = reader.metadata().file_metadata().schema().get_fields();
    let mut names = std::collections::HashSet::new();
    if let Some(field) = fields.iter().find(|field| !names.insert(field.name())) {
        return Err(several_columns(path, field.name()));
    }
    guarded(path, || {
        let column = |(name, field): (&String, &Field)| (name.clone(), field.to_json_value());
        let all_columns = None;
        let rows = reader.get_row_iter(all_columns)?;
        rows.map(|row| Ok(row?.get_column_iter().map(column).collect())).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_files::write_column;

    /// Writes a file of this name into a temporary folder, which is removed when the first value is dropped.
    fn written(name: &str, bytes: &[u8]) -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).expect("writable");
        (folder, path)
    }

    #[test]
    fn a_row_has_every_column_lists_and_groups_too() {
        let text = "\u{feff}{\"q\": \"a\", \"c\": {\"text\": [\"x\", \"y\"]}}\n\n{\"q\": \"b\", \"n\": 2}\n";
        let (_folder, path) = written("rows.jsonl", text.as_bytes());
        let rows = read_table(&path).expect("two rows");
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[0]["c"]["text"][1], "y");
        assert_eq!(rows[1]["n"], 2);
    }

    #[test]
    fn a_list_of_objects_gives_a_row_for_each_object() {
        let read = |text: &str| {
            let (_folder, path) = written("data.json", text.as_bytes());
            read_table(&path)
        };
        let rows = read("\u{feff}[\n {\"q\": \"a\"},\n {\"q\": \"b\", \"n\": [2]}]\n").expect("two rows");
        assert_eq!((rows.len(), &rows[0]["q"], &rows[1]["n"][0]), (2, &"a".into(), &2.into()));
        sieve_testing::refusal(read("[{\"q\": NaN}]"), "data.json: not a list of JSON objects: NaN at line 1 | hint:");
        sieve_testing::refusal(
            read("{\"q\": 1}\n{\"q\": 2}\n"),
            "not a list | a file with an object a line is named .jsonl",
        );
        sieve_testing::refusal(read("[]"), "there is no row in it");
    }

    #[test]
    fn parquet_gives_what_json_lines_give() {
        use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
        use parquet::file::writer::SerializedFileWriter;
        use parquet::schema::parser::parse_message_type;
        let schema = "message row { required group choices { required group text (LIST) { repeated group list \
                      { required binary element (UTF8); } } } required int64 label; }";
        let schema = parse_message_type(schema).expect("a schema").into();
        let mut bytes = Vec::new();
        let mut writer = SerializedFileWriter::new(&mut bytes, schema, Default::default()).expect("a writer");
        let mut group = writer.next_row_group().expect("a group");
        let texts = ["x", "y", "z"].map(ByteArray::from);
        write_column::<ByteArrayType>(&mut group, &texts, Some(&[1, 1, 1]), Some(&[0, 1, 0]));
        write_column::<Int64Type>(&mut group, &[1, 0], None, None);
        group.close().expect("whole");
        writer.close().expect("whole");
        let (_folder, path) = written("rows.parquet", &bytes);
        let lines = "{\"choices\":{\"text\":[\"x\",\"y\"]},\"label\":1}\n{\"choices\":{\"text\":[\"z\"]},\
            \"label\":0}\n";
        let (_other, lines) = written("rows.jsonl", lines.as_bytes());
        assert_eq!(read_table(&path).expect("parquet"), read_table(&lines).expect("jsonl"));
    }
}
