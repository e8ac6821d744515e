//! gzip, Zstandard and Parquet.

use parquet::basic::{Compression, GzipLevel, ZstdLevel};
use sieve_testing::{cases, refusal, says};

use super::*;
use crate::test_files::{gzip, quick_dir, write_column, write_parquet, zstd};

const LINES: &str = "{\"text\": \"first\"}\n{\"text\": \"second\"}\n{\"text\": \"third\"}\n";

#[test]
fn packed_files_are_read_as_what_they_hold() {
    let dir = tempfile::tempdir().unwrap();
    let [one, two] = [&LINES.as_bytes()[..18], &LINES.as_bytes()[18..]];
    write(dir.path(), "a.jsonl.gz", gzip(LINES.as_bytes()));
    // Two compressed files, concatenated as `cat` does.
    write(dir.path(), "b.jsonl.gz", [gzip(one), gzip(two)].concat());
    write(dir.path(), "c.jsonl.zst", zstd(LINES.as_bytes()));
    write(dir.path(), "d.jsonl.ZST", [zstd(one), zstd(two)].concat());
    write(dir.path(), "e.jsonl", LINES);
    write(dir.path(), "f.txt.gz", gzip(b"no line"));
    let folder = dir.path().to_str().unwrap().to_owned();
    let found = texts(jsonl(&folder)).unwrap();
    assert_eq!(found, ["first", "second", "third"].repeat(5));
    assert_eq!(texts(text(&folder)).unwrap(), ["no line"]);
    // A glob matches compressed files like any others.
    let globbed = texts(jsonl(&format!("{folder}/*.gz")));
    refusal(globbed, "f.txt.gz: line 1 is not a JSON object");
}

#[test]
fn the_size_limit_holds_for_the_unpacked_text() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), "a.txt.gz", gzip(&[b'x'; 100_000]));
    let config = |max| CorpusConfig {
        max_document_bytes: Some(max),
        // A glob, because the limit does not hold for a file that a path names.
        ..text(&path.replace("a.txt", "?.txt"))
    };
    assert_eq!(texts(config(100_000)).unwrap()[0].len(), 100_000);
    refusal(texts(config(99_999)), "over the limit of 99999");
}

/// Text that compresses badly, so that damage in the middle of the file damages the middle of the text.
fn many_lines() -> String {
    let line = |number: u64| format!("{{\"text\": \"{:x}\"}}\n", number.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    (0..20_000).map(line).collect()
}

#[test]
fn a_packed_file_that_is_cut_or_damaged_is_an_error_also_when_invalid_documents_are_skipped() {
    let dir = tempfile::tempdir().unwrap();
    let lines = many_lines();
    for (name, packing, whole) in
        [("a.jsonl.gz", "gzip", gzip(lines.as_bytes())), ("a.jsonl.zst", "zstd", zstd(lines.as_bytes()))]
    {
        let middle = whole.len() / 2;
        let mut damaged = whole.clone();
        damaged[middle..middle + 64].iter_mut().for_each(|byte| *byte ^= 0x5A);
        for (what, bytes) in [
            ("damaged", damaged),
            ("cut", whole[..middle].to_vec()),
            ("without its end", whole[..whole.len() - 1].to_vec()),
            ("of another kind", b"plain text".to_vec()),
            ("with a tail", [whole.as_slice(), b"tail"].concat()),
            ("empty", Vec::new()),
        ] {
            let path = write(dir.path(), name, bytes);
            for skip_invalid in [true, false] {
                let mut config = jsonl(&path);
                config.skip_invalid = skip_invalid;
                let error = texts(config).expect_err(what).to_string();
                says(&error, &format!("{name} | {packing} | fetch or pack"));
            }
        }
        let path = write(dir.path(), name, whole);
        assert_eq!(texts(jsonl(&path)).unwrap().len(), 20_000);
    }
}

fn parquet(path: String) -> CorpusConfig {
    CorpusConfig::parquet(vec![path], "text")
}

#[test]
fn parquet_gives_a_document_a_row_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let wanted = (0..700).map(|row| format!("text of row {row}")).collect::<Vec<_>>();
    let rows = wanted.iter().map(|text| Some(text.as_bytes())).collect::<Vec<_>>();
    for (number, compression) in (0..).zip([
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::ZSTD(ZstdLevel::default()),
        Compression::GZIP(GzipLevel::default()),
        Compression::LZ4_RAW,
    ]) {
        let path = dir.path().join(format!("{number}.parquet"));
        write_parquet(&path, &[&rows[..300], &[], &rows[300..]], compression);
        let path = path.to_str().unwrap().to_owned();
        assert_eq!(texts(parquet(path.clone())).unwrap(), wanted);
        assert_eq!(texts(CorpusConfig::parquet(vec![path], "meta.note")).unwrap(), wanted);
    }
    let folder = dir.path().to_str().unwrap().to_owned();
    let corpus = Corpus::open(parquet(folder)).unwrap();
    let last = corpus.documents().last().unwrap().unwrap();
    assert_eq!((last.file_idx, last.line), (4, 700));
}

#[test]
fn parquet_rows_without_text_are_named_or_skipped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    for (bad, wanted) in [
        (None, "row 2: column \"text\" is null"),
        (Some(b"\xff".as_slice()), "row 2 is not UTF-8 at its byte 0"),
        (Some(b"a\0b".as_slice()), "row 2 holds a NUL"),
    ] {
        write_parquet(&path, &[&[Some(b"one"), bad, Some(b"three")]], Compression::SNAPPY);
        let mut config = parquet(path.to_str().unwrap().to_owned());
        refusal(texts(config.clone()), &format!("a.parquet | {wanted}"));
        config.skip_invalid = true;
        assert_eq!(texts(config).unwrap(), ["one", "three"]);
    }
}

/// `gzip` ignores zero bytes behind the last member, and between two.
#[test]
fn zeros_that_pad_a_gzip_file_are_no_damage() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (gzip(b"one "), gzip(b"two"));
    let read = |bytes: Vec<u8>| {
        let path = write(dir.path(), "a.txt.gz", bytes);
        texts(CorpusConfig::text(vec![path]))
    };
    for num_zeros in [1, 511, 1 << 19] {
        let zeros = vec![0; num_zeros];
        assert_eq!(read([&one[..], &two, &zeros].concat()).unwrap(), ["one two"]);
        assert_eq!(read([&one[..], &zeros, &two].concat()).unwrap(), ["one two"]);
        let damaged = "a.txt.gz: damaged after 4 bytes of text: gzip";
        refusal(read([&one[..], &zeros, b"x"].concat()), damaged);
        refusal(read([&one[..], &zeros, &two[..9]].concat()), damaged);
        refusal(read([&zeros[..], &one].concat()), "a.txt.gz: damaged after 0 bytes of text: gzip");
    }
}

#[test]
fn two_parquet_columns_of_one_name_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    let schema = parquet::schema::parser::parse_message_type(
        "message schema { REQUIRED BYTE_ARRAY text (UTF8); REQUIRED BYTE_ARRAY body (UTF8); REQUIRED BYTE_ARRAY text \
         (UTF8); }",
    );
    let file = fs::File::create(&path).unwrap();
    let schema = std::sync::Arc::new(schema.unwrap());
    let mut writer = parquet::file::writer::SerializedFileWriter::new(file, schema, Default::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    for text in ["one", "two", "three"] {
        let values = [parquet::data_type::ByteArray::from(text)];
        write_column::<parquet::data_type::ByteArrayType>(&mut group, &values, None, None);
    }
    group.close().unwrap();
    writer.close().unwrap();
    let read = |column: &str| texts(CorpusConfig::parquet(vec![path.to_str().unwrap().to_owned()], column));
    refusal(read("text"), "a.parquet: several columns are named \"text\" | hint:");
    assert_eq!(read("body").unwrap(), ["two"]);
    refusal(crate::read_table(&path), "a.parquet: several columns are named \"text\" | hint:");
}

#[test]
fn a_parquet_file_without_the_column_says_which_it_has() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    write_parquet(&path, &[&[Some(b"one".as_slice())]], Compression::SNAPPY);
    let path = path.to_str().unwrap().to_owned();
    for [column, wanted] in cases(
        r#"
        body => no column "body" (it has ["id", "text", "meta.note", "tags"])
        id => column "id" holds INT64, not text
        tags => column "tags" holds lists, not text
    "#,
    ) {
        let found = texts(CorpusConfig::parquet(vec![path.clone()], column));
        refusal(found, &format!("a.parquet | {wanted} | data.text_column"));
    }
}

#[test]
fn a_file_that_is_cut_or_not_parquet_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    write_parquet(&path, &[&[Some(b"one".as_slice()); 200]], Compression::SNAPPY);
    let whole = fs::read(&path).unwrap();
    let [cut, half] = [whole.len() - 3, whole.len() / 2].map(|len| &whole[..len]);
    for bytes in [cut, half, b"PAR1", b"", b"text"] {
        let mut config = parquet(write(dir.path(), "a.parquet", bytes));
        config.skip_invalid = true;
        refusal(texts(config), "a.parquet: not a readable Parquet file");
    }
}

/// From its cursor and the hashes seen, a reading that stopped after any file returns the other documents.
#[test]
fn reading_resumes_from_a_cursor_with_the_same_documents() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().to_str().unwrap().to_owned();
    let lines = "{\"text\": \"a\"}\n{\"no\": 1}\n{\"text\": \"b\"}\n\n\
        {\"text\": \"a\"}\n{\"text\": \" \"}\n{\"text\": \"c\"}\n";
    write(dir.path(), "1.jsonl", lines);
    let other = lines.replace(": \"c", ": \"d");
    write(dir.path(), "2.jsonl.gz", gzip(other.as_bytes()));
    write(dir.path(), "3.jsonl", "{\"text\": \"eeee\"}\n{\"text\": \"f\"}\n");
    for max_bytes in [None, Some(6)] {
        let config = CorpusConfig { deduplicate: true, skip_invalid: true, max_bytes, ..jsonl(&folder) };
        let corpus = Corpus::open(config).unwrap();
        let mut whole = corpus.documents();
        let all = whole.by_ref().map(Result::unwrap).collect::<Vec<_>>();
        for stop in 0..=corpus.files().len() {
            let (mut first, mut given) = (corpus.documents(), Vec::new());
            for _ in 0..stop {
                given.extend(std::iter::from_fn(|| first.next_in_file()).map(Result::unwrap));
            }
            let cursor = serde_json::to_string(first.cursor()).unwrap();
            let seen = first.take_newly_seen().into_iter().collect();
            let mut rest = Documents::resume(&corpus, serde_json::from_str(&cursor).unwrap(), seen);
            given.extend(rest.by_ref().map(Result::unwrap));
            assert_eq!(given, all, "stopped after {stop}");
            assert_eq!(rest.report(), whole.report());
        }
    }
}

/// A frame of Zstandard with the window 2^`log`, whose contents are stored as they are (RFC 8878, section 3.1.1).
fn frame_of_window(log: u8, contents: &[u8]) -> Vec<u8> {
    let block = 1 | (contents.len() as u32) << 3;
    [&[0x28, 0xB5, 0x2F, 0xFD, 0, (log - 10) << 3], &block.to_le_bytes()[..3], contents].concat()
}

#[test]
fn zstandard_windows_of_up_to_two_gib_are_read() {
    let dir = quick_dir();
    for log in 10..=31 {
        let path = write(dir.path(), "long.jsonl.zst", frame_of_window(log, LINES.as_bytes()));
        let [packed, plain] = [path, write(dir.path(), "plain.jsonl", LINES)].map(|path| texts(jsonl(&path)).unwrap());
        assert_eq!(packed, plain, "{log}");
    }
    let path = write(dir.path(), "long.jsonl.zst", frame_of_window(32, LINES.as_bytes()));
    refusal(texts(jsonl(&path)), "damaged after 0 bytes of text: zstd");
}

#[test]
fn a_file_in_another_format_is_named_with_its_way_out() {
    let dir = quick_dir();
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n".to_vec();
    let mut tar = vec![0; 1024];
    tar[..5].copy_from_slice(b"a.txt");
    tar[257..262].copy_from_slice(b"ustar");
    let stream = b"\xFF\xFF\xFF\xFF\x78\0\0\0\x10\0\0\0".to_vec();
    let lfs = "it is a pointer of Git LFS | git lfs pull";
    let good = write(dir.path(), "good.md", "good");
    for (ending, bytes, words) in [
        ("parquet", pointer.clone(), lfs),
        ("jsonl", pointer.clone(), lfs),
        ("jsonl.gz", pointer.clone(), lfs),
        ("jsonl.zst", pointer.clone(), lfs),
        ("txt", pointer, lfs),
        ("jsonl.xz", b"\xFD7zXZ\0\0\x04".to_vec(), "it is packed with xz | xz -dc | zstd >"),
        ("jsonl.bz2", b"BZh91AY&SY\x12".to_vec(), "it is packed with bzip2 | bzip2 -dc"),
        ("jsonl", b"BZh91AY&SY\x12".to_vec(), "it is packed with bzip2 | bzip2 -dc"),
        ("txt.lz4", b"\x04\x22\x4D\x18\x64".to_vec(), "it is packed with lz4 | lz4 -dc"),
        ("zip", b"PK\x03\x04\x14\0".to_vec(), "it is a zip archive | unzip"),
        ("jsonl", b"PK\x03\x04\x14\0".to_vec(), "it is a zip archive | unzip"),
        ("tar", tar.clone(), "it is a tar archive | tar -xf"),
        ("tar.gz", gzip(&tar), "it is a tar archive | tar -xf"),
        ("arrow", b"ARROW1\0\0\xFF\xFF\xFF\xFF".to_vec(), "it is a file of Arrow | pyarrow.feather"),
        ("arrow", stream, "it is a stream of Arrow | datasets.Dataset.from_file"),
        ("jsonl", gzip(b"{}"), "it is packed with gzip, and its name does not end in .gz | mv"),
        ("txt", zstd(b"words"), "it is packed with zstd, and its name does not end in .zst | mv"),
        ("jsonl.gz", zstd(b"{}"), "it is packed with zstd, and its name does not end in .zst | mv"),
    ] {
        let path = write(dir.path(), &format!("file.{ending}"), bytes);
        let by_ending = || CorpusConfig::by_ending(vec![path.clone()], "text");
        refusal(texts(by_ending()), &format!("{path}: {words}"));
        // A file of text is a document, and can be left out as one; a table is a file.
        let paths = vec![path.clone(), good.clone()];
        let left_out = texts(CorpusConfig { skip_invalid: true, paths, ..by_ending() });
        let is_table = ["jsonl", "parquet"].iter().any(|table| ending.starts_with(table)) && !ending.ends_with("xz");
        let is_table = is_table && !ending.ends_with("bz2");
        assert_eq!(left_out.ok(), (!is_table).then(|| vec!["good".to_owned()]), "{ending}");
    }
    // Text that begins with the letters of a mark is text.
    for text in ["BZh is a beginning", "PK and more", "ARROW1 is a name", "version https://example.org"] {
        let path = write(dir.path(), "plain.txt", text);
        assert_eq!(texts(CorpusConfig::by_ending(vec![path], "text")).unwrap(), [text]);
    }
}
