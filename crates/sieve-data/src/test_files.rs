//! Files for tests.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use flate2::Compression as GzipLevel;
use flate2::write::GzEncoder;
use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, DataType, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;

use crate::{Corpus, CorpusConfig, DataError};

/// A temporary folder, in memory if the system has one: tests write thousands of small files and fsync often.
pub(crate) fn quick_dir() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() {
        tempfile::tempdir_in(memory).or_else(|_| tempfile::tempdir()).unwrap()
    } else {
        tempfile::tempdir().unwrap()
    }
}

/// The texts of the corpus with these settings.
pub(crate) fn texts(config: CorpusConfig) -> Result<Vec<String>, DataError> {
    texts_of(&Corpus::open(config)?)
}

/// The texts of a corpus.
pub(crate) fn texts_of(corpus: &Corpus) -> Result<Vec<String>, DataError> {
    corpus.documents().map(|document| document.map(|document| document.text)).collect()
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
        write_column::<Int64Type>(&mut group, &ids, None, None);
        // `text`; `meta.note` with the same values; `tags`, whose lists are empty.
        for (values, levels, repetition) in [
            (values.clone(), levels.clone(), None),
            (values, levels, None),
            (Vec::new(), vec![0; texts.len()], Some(vec![0; texts.len()])),
        ] {
            write_column::<ByteArrayType>(&mut group, &values, Some(&levels), repetition.as_deref());
        }
        group.close().unwrap();
    }
    writer.close().unwrap();
}

/// Writes the next column of a row group, with its definition and repetition levels.
pub(crate) fn write_column<T: DataType>(
    group: &mut SerializedRowGroupWriter<'_, impl Write + Send>,
    values: &[T::T],
    levels: Option<&[i16]>,
    repetition: Option<&[i16]>,
) {
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<T>().write_batch(values, levels, repetition).unwrap();
    column.close().unwrap();
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
        write_column::<ByteArrayType>(&mut group, &values.collect::<Vec<_>>(), None, None);
    }
    group.close().unwrap();
    writer.close().unwrap();
}
