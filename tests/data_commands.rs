//! Text files for the sessions of `data`: Parquet and packed JSON lines.
use crate::tiny_run::TinyRun;
use flate2::write::GzEncoder;
use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

fn write_parquet(path: &Path, texts: &[String]) {
    let schema = parse_message_type("message schema { REQUIRED BYTE_ARRAY text (UTF8); }");
    let schema = Arc::new(schema.expect("a schema"));
    let properties = WriterProperties::builder().set_compression(Compression::SNAPPY);
    let properties = Arc::new(properties.build());
    let file = fs::File::create(path).expect("writable");
    let mut writer = SerializedFileWriter::new(file, schema, properties).expect("a writer");
    let values = texts.iter().map(|text| ByteArray::from(text.as_str()));
    let values: Vec<ByteArray> = values.collect();
    let mut group = writer.next_row_group().expect("a row group");
    let mut column = group.next_column().expect("a column").expect("the first");
    let typed = column.typed::<ByteArrayType>();
    typed.write_batch(&values, None, None).expect("values");
    column.close().expect("closed");
    group.close().expect("closed");
    writer.close().expect("closed");
}

/// Writes the tiny corpus as Parquet, as packed JSON lines, and as text files.
pub(crate) fn formats(tiny: &TinyRun) {
    let files = tiny.names("corpus").into_iter();
    let texts: Vec<String> = files.map(|name| tiny.read(&format!("corpus/{name}"))).collect();
    write_parquet(&tiny.path("half.parquet"), &texts[..30]);
    let packed = fs::File::create(tiny.path("half.jsonl.gz")).expect("writable");
    let mut packed = GzEncoder::new(packed, flate2::Compression::default());
    for text in &texts[30..] {
        let line = serde_json::json!({ "text": text }).to_string();
        writeln!(packed, "{line}").expect("writable");
    }
    packed.finish().expect("writable");
}

/// Writes a second text source of two documents.
pub(crate) fn mixture(tiny: &TinyRun) {
    let texts = ["other words. ".repeat(40), "more of them. ".repeat(50)];
    write_parquet(&tiny.path("other.parquet"), &texts);
}
