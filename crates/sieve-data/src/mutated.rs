//! Damaged input of every kind: thousands of files with a few bytes changed, cut, doubled or lost. None may crash the
//! program, and none may be accepted as valid when it is not.

use std::fs;
use std::path::{Path, PathBuf};

use parquet::basic::Compression;
use parquet::file::reader::{FileReader, SerializedFileReader};
use rayon::prelude::*;
use sieve_testing::mutated;

use crate::test_files::{gzip, quick_dir, texts, write_parquet, zstd};
use crate::{Corpus, CorpusConfig, DataError, ShardReader, ShardWriter, Tokenizer};

const NUM_INPUTS: u64 = 10_000;

/// Calls `check` with every mutation of `bytes`, written to a file called `name`, and returns how many of them it
/// accepted.
fn each_mutated(name: &str, bytes: &[u8], check: impl Fn(&Path, &[u8]) -> bool + Sync) -> usize {
    let dir = quick_dir();
    let taken = (0..NUM_INPUTS).into_par_iter().map(|number| {
        let thread = rayon::current_thread_index().unwrap_or(0).to_string();
        let folder = dir.path().join(thread);
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join(name);
        let bytes = mutated(bytes, usize::MAX, number);
        fs::write(&path, &bytes).unwrap();
        check(&path, &bytes)
    });
    let taken = taken.filter(|&taken| taken).count();
    // If all were accepted, the mutations tested nothing.
    assert!(taken < NUM_INPUTS as usize, "every mutation of {name} was taken");
    taken
}

/// As [`each_mutated`], for a function that reads the file: an error must name the file.
fn each_read(name: &str, bytes: &[u8], read: impl Fn(&Path, &[u8]) -> Result<(), DataError> + Sync) -> usize {
    each_mutated(name, bytes, |path, bytes| {
        let read = read(path, bytes);
        read.inspect_err(|error| assert_named(error, path)).is_ok()
    })
}

/// Number of documents of a corpus, blank ones included.
fn count(config: CorpusConfig) -> Result<u64, DataError> {
    let corpus = Corpus::open(config)?;
    let mut documents = corpus.documents();
    while documents.next().transpose()?.is_some() {}
    let report = documents.report();
    Ok(report.num_documents + report.num_blank)
}

fn path_of(path: &Path) -> Vec<String> {
    vec![path.to_str().unwrap().to_owned()]
}

/// Checks that an error names its file.
fn assert_named(error: &DataError, path: &Path) {
    let text = error.to_string();
    let name = path.file_name().unwrap().to_str().unwrap();
    assert!(text.contains(name) || text.contains("no document"), "{text}");
}

/// Twelve lines of JSONL, with escapes in the text and columns that are not read.
fn lines() -> String {
    let line = |number: u32| {
        format!("{{\"id\": {number}, \"text\": \"line {number} \\u00e9 \\\"x\\\"\", \"more\": [1, {{\"text\": 2}}]}}\n")
    };
    (0..12).map(line).collect()
}

/// Accepted texts must equal the texts that serde_json reads from the same bytes.
#[test]
fn damaged_jsonl_is_read_as_it_stands_or_refused() {
    let taken = each_read("a.jsonl", lines().as_bytes(), |path, bytes| {
        let found = texts(CorpusConfig::jsonl(path_of(path), "text"))?;
        let text = std::str::from_utf8(bytes).expect("taken, so UTF-8");
        let wanted = text.trim_start_matches('\u{feff}').lines();
        let wanted = wanted.filter(|line| !line.trim().is_empty());
        let values = wanted.map(serde_json::from_str::<serde_json::Value>);
        let values = match values.collect::<Result<Vec<_>, _>>() {
            Ok(values) => values,
            // serde_json refuses the number as a value, but Sieve does not read this column.
            Err(error) => {
                assert!(error.to_string().contains("number out of range"), "{error}");
                return Ok(());
            }
        };
        let wanted = values.iter().map(|value| value["text"].as_str().expect("taken, so a string"));
        let wanted = wanted.filter(|text| !text.trim().is_empty()).collect::<Vec<_>>();
        assert_eq!(found, wanted);
        Ok(())
    });
    assert!(taken > 100, "{taken}");
}

/// Compressed files hold checksums: accepted text must be the original, or a front part that was compressed by itself.
#[test]
fn damaged_packed_files_are_the_original_or_refused() {
    let text = lines();
    let wanted = texts_of(&text);
    for (name, bytes) in [("a.jsonl.gz", gzip(text.as_bytes())), ("a.jsonl.zst", zstd(text.as_bytes()))] {
        each_read(name, &bytes, |path, _| {
            // The mutation changed the time or name in gzip's header, or doubled a complete part.
            assert_eq!(texts(CorpusConfig::jsonl(path_of(path), "text"))?, wanted);
            Ok(())
        });
    }
}

fn texts_of(lines: &str) -> Vec<String> {
    let values = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    values.map(|value| value["text"].as_str().unwrap().to_owned()).collect()
}

/// Parquet pages have no checksums, so damage may be accepted; an accepted file must have all its rows, as UTF-8.
#[test]
fn damaged_parquet_has_all_its_rows_or_is_refused() {
    let dir = quick_dir();
    let rows = (0..90).map(|row| format!("text of row {row}")).collect::<Vec<_>>();
    let rows = rows.iter().map(|text| Some(text.as_bytes())).collect::<Vec<_>>();
    for compression in [Compression::UNCOMPRESSED, Compression::SNAPPY] {
        let path = dir.path().join("whole.parquet");
        write_parquet(&path, &[&rows[..70], &rows[70..]], compression);
        let bytes = fs::read(&path).unwrap();
        each_read("a.parquet", &bytes, |path, _| {
            let found = count(CorpusConfig::parquet(path_of(path), "text"))?;
            // The number of rows that the file's metadata names.
            let file = fs::File::open(path).unwrap();
            let footer = SerializedFileReader::new(file).unwrap().metadata().clone();
            let groups = footer.row_groups().iter().map(|group| group.num_rows());
            assert_eq!(groups.sum::<i64>(), footer.file_metadata().num_rows());
            assert_eq!(found as i64, footer.file_metadata().num_rows());
            Ok(())
        });
    }
}

/// A shard of 20 documents with two bytes per token.
fn shard(dir: &Path) -> PathBuf {
    let prefix = dir.join("s");
    let mut writer = ShardWriter::create(&prefix, 1000).unwrap();
    for document in 0..20u32 {
        writer.push(&(0..=document).collect::<Vec<_>>()).unwrap();
    }
    writer.finish().unwrap();
    prefix
}

/// Reads the tokens of all documents of a shard.
fn read_all(prefix: &Path) -> Result<Vec<Vec<u32>>, DataError> {
    let shard = ShardReader::open(prefix)?;
    let documents = (0..shard.num_documents()).map(|document| shard.document(document));
    let documents = documents.collect::<Result<Vec<_>, _>>()?;
    let num_tokens = documents.iter().map(Vec::len).sum::<usize>();
    let words = "every token belongs to one document";
    assert_eq!(num_tokens as u64, shard.num_tokens(), "{words}");
    let _ = shard.token_counts(100);
    Ok(documents)
}

/// With an accepted index, the documents together must be the tokens of the .bin file in order, however the index
/// divides them.
#[test]
fn a_damaged_index_divides_all_tokens_or_is_refused() {
    let dir = quick_dir();
    let whole = shard(dir.path());
    let tokens = read_all(&whole).unwrap().concat();
    let bin = fs::read(whole.with_extension("bin")).unwrap();
    let idx = fs::read(whole.with_extension("idx")).unwrap();
    each_read("s.idx", &idx, |path, _| {
        fs::write(path.with_extension("bin"), &bin).unwrap();
        let found = read_all(&path.with_extension(""))?.concat();
        // The dtype is unchanged: as four-byte tokens, the lengths would not fit the .bin file.
        assert_eq!(found, tokens);
        Ok(())
    });
}

/// Any bytes in a .bin file are tokens, so only its length can be checked, against the index.
#[test]
fn damaged_tokens_are_read_as_they_stand_or_refused() {
    let dir = quick_dir();
    let whole = shard(dir.path());
    let bin = fs::read(whole.with_extension("bin")).unwrap();
    let idx = fs::read(whole.with_extension("idx")).unwrap();
    each_mutated("s.bin", &bin, |path, bytes| {
        fs::write(path.with_extension("idx"), &idx).unwrap();
        match read_all(&path.with_extension("")) {
            Err(_) => {
                assert_ne!(bytes.len(), bin.len());
                false
            }
            Ok(documents) => {
                let wanted = bytes.as_chunks().0.iter().map(|&two| u32::from(u16::from_le_bytes(two)));
                assert_eq!(documents.concat(), wanted.collect::<Vec<_>>());
                let shard = ShardReader::open(&path.with_extension("")).unwrap();
                let in_vocabulary = documents.concat().iter().all(|&token| token < 1000);
                assert_eq!(shard.token_counts(1000).is_ok(), in_vocabulary);
                true
            }
        }
    });
}

/// An accepted tokenizer must encode and decode without a panic, with ids below its vocabulary size.
#[test]
fn damaged_tokenizers_work_or_are_refused() {
    let merges = serde_json::json!([["a", "b"], ["ab", "c"], ["Ġ", "a"]]);
    let tokens = ["<|endoftext|>", "a", "b", "c", "Ġ", "ab", "abc", "Ġa"];
    let vocab = tokens.iter().enumerate().map(|(id, token)| ((*token).to_owned(), id.into()));
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{"id": 0, "content": "<|endoftext|>", "single_word": false, "lstrip": false,
                          "rstrip": false, "normalized": false, "special": true}],
        "normalizer": null, "post_processor": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                  "vocab": vocab.collect::<serde_json::Map<_, _>>(), "merges": merges}
    });
    let taken = each_read("tokenizer.json", tokenizer.to_string().as_bytes(), |path, _| {
        let tokenizer = Tokenizer::from_file(path)?;
        for text in ["abc abc a", "", "<|endoftext|>", "é\u{0} b", "cab  \n"] {
            if let Ok(ids) = tokenizer.encode(text) {
                assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
                let _ = tokenizer.decode(&ids);
            }
        }
        let _ = tokenizer.eos_id();
        Ok(())
    });
    assert!(taken > 100, "{taken}");
}
