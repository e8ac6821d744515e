//! Files for tests.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use flate2::Compression as GzipLevel;
use flate2::write::GzEncoder;
use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

use crate::{Corpus, CorpusConfig, DataError};

/// A temporary folder, in memory if the system has one: tests write thousands of small files and fsync often.
pub(crate) fn quick_dir() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    match memory.is_dir() {
        true => tempfile::tempdir_in(memory).or_else(|_| tempfile::tempdir()).unwrap(),
        false => tempfile::tempdir().unwrap(),
    }
}

/// The texts of a corpus.
pub(crate) fn texts(config: CorpusConfig) -> Result<Vec<String>, DataError> {
    let corpus = Corpus::open(config)?;
    let texts = corpus.documents().map(|document| document.map(|document| document.text));
    texts.collect()
}

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), GzipLevel::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

pub(crate) fn zstd(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 3).unwrap();
    encoder.include_checksum(true).unwrap();
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Writes a Parquet file with columns `id`, `text` and `meta.note`, and a row group for each list of texts.
pub(crate) fn write_parquet(path: &Path, groups: &[&[Option<&[u8]>]], compression: Compression) {
    let schema = "message schema { REQUIRED INT64 id; OPTIONAL BYTE_ARRAY text (UTF8); \
                  OPTIONAL GROUP meta { REQUIRED BYTE_ARRAY note (UTF8); } REPEATED BYTE_ARRAY tags (UTF8); }";
    let properties = WriterProperties::builder()
        .set_compression(compression)
        .set_data_page_row_count_limit(50)
        .set_write_batch_size(50)
        .build();
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut writer = SerializedFileWriter::new(File::create(path).unwrap(), schema, Arc::new(properties)).unwrap();
    for texts in groups {
        let levels = texts.iter().map(|text| i16::from(text.is_some())).collect::<Vec<_>>();
        let values = texts.iter().flatten().map(|text| ByteArray::from(text.to_vec()));
        let values = values.collect::<Vec<_>>();
        let mut group = writer.next_row_group().unwrap();
        let ids = (0..texts.len() as i64).collect::<Vec<_>>();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<Int64Type>().write_batch(&ids, None, None).unwrap();
        column.close().unwrap();
        for (values, levels, repetition) in [
            (values.clone(), levels.clone(), None),
            (values, levels, None),
            (Vec::new(), vec![0; texts.len()], Some(vec![0; texts.len()])),
        ] {
            let mut column = group.next_column().unwrap().unwrap();
            column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), repetition.as_deref()).unwrap();
            column.close().unwrap();
        }
        group.close().unwrap();
    }
    writer.close().unwrap();
}

/// Writes a Parquet file with columns of texts in one row group.
pub(crate) fn write_parquet_of(path: &Path, columns: &[(&str, Vec<&str>)], compression: Compression) {
    let field = |(name, _): &(&str, _)| format!("REQUIRED BYTE_ARRAY {name} (UTF8); ");
    let fields = columns.iter().map(field);
    let schema = format!("message schema {{ {} }}", fields.collect::<String>());
    let properties = WriterProperties::builder().set_compression(compression).build();
    let schema = Arc::new(parse_message_type(&schema).unwrap());
    let mut writer = SerializedFileWriter::new(File::create(path).unwrap(), schema, Arc::new(properties)).unwrap();
    let mut group = writer.next_row_group().unwrap();
    for (_, texts) in columns {
        let values = texts.iter().map(|text| ByteArray::from(text.as_bytes().to_vec()));
        let mut column = group.next_column().unwrap().unwrap();
        let values = values.collect::<Vec<_>>();
        column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    writer.close().unwrap();
}
