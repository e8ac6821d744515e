use sieve_testing::refusal;
use std::fs;
use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::test_files::texts;

mod packed;

fn write(dir: &Path, name: &str, bytes: impl AsRef<[u8]>) -> String {
    let path = dir.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}

fn text(path: &str) -> CorpusConfig {
    CorpusConfig::text(vec![path.to_owned()])
}

fn jsonl(path: &str) -> CorpusConfig {
    CorpusConfig::jsonl(vec![path.to_owned()], "text")
}

#[test]
fn folders_globs_and_files_give_each_file_once_and_sorted() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    for name in "b.txt a.md sub/c.rs sub/deep/d.TXT e.bin .hidden/f.txt g.toml".split(' ') {
        write(root, name, format!("text of {name}"));
    }
    let at = |name: &str| root.join(name).to_str().unwrap().to_owned();
    let mut config = CorpusConfig::text(vec![at(""), at("**/*.txt"), at("g.toml")]);
    let names = |config: &CorpusConfig| -> Vec<_> {
        let corpus = Corpus::open(config.clone()).unwrap();
        corpus.files().iter().map(|file| file.path.clone()).collect()
    };
    let wanted = ["a.md", "b.txt", "g.toml", "sub/c.rs", "sub/deep/d.TXT"].map(|name| root.join(name));
    assert_eq!(names(&config), wanted);
    config.paths.reverse();
    assert_eq!(names(&config), wanted);
    // A glob may match folders, and reads files of any ending.
    assert_eq!(texts(text(&at("s*"))).unwrap().len(), 2);
    assert_eq!(texts(text(&at("*.bin"))).unwrap(), ["text of e.bin"]);
}

/// A link to its own folder is not followed: `**` would run through it 40 times.
#[cfg(unix)]
#[test]
fn a_file_is_read_once_whichever_links_lead_to_it() {
    use std::os::unix::fs::symlink;
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    write(root, "text/a.txt", "a");
    write(root, "text/b/c.txt", "c");
    symlink(root.join("text"), root.join("text/b/loop")).unwrap();
    symlink(root.join("text/a.txt"), root.join("text/d.txt")).unwrap();
    write(root, "other/e.txt", "e");
    symlink(root.join("other"), root.join("text/other")).unwrap();
    let at = |name: &str| root.join(name).to_str().unwrap().to_owned();
    assert_eq!(texts(text(&at("text"))).unwrap(), ["a", "c"]);
    assert_eq!(texts(text(&at("text/**/*.txt"))).unwrap(), ["a", "c"]);
    assert_eq!(texts(text(&at("text/other/*.txt"))).unwrap(), ["e"]);
    // Broken links are left out, of folders and of globs.
    symlink(root.join("gone.txt"), root.join("other/broken.txt")).unwrap();
    for pattern in ["other", "other/*", "other/**/*.txt"] {
        assert_eq!(texts(text(&at(pattern))).unwrap(), ["e"]);
    }
    refusal(Corpus::open(text(&at("other/broken.txt"))), "matches no file: it is a link whose target is missing");
    refusal(Corpus::open(text("https://example.org/a.txt")), "matches no file: it is an address");
    refusal(Corpus::open(text(&at("other/**"))), "** at the end matches only folders | other/**/*");
    let named = CorpusConfig::text(vec![at("text/"), at("text/b/../a.txt")]);
    let corpus = Corpus::open(named).unwrap();
    let is_named = corpus.files().iter().map(|file| file.is_named);
    assert_eq!(is_named.collect::<Vec<_>>(), [true, false]);
}

#[test]
fn the_name_of_a_file_is_not_read_as_a_glob() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), "a[1].txt", "odd name");
    assert_eq!(texts(text(&path)).unwrap(), ["odd name"]);
}

#[test]
fn hashed_order_does_not_depend_on_the_folder() {
    let order = |seed| {
        let dir = tempfile::tempdir().unwrap();
        for number in 0..40 {
            write(dir.path(), &format!("{number:02}.txt"), format!("{number}"));
        }
        let mut config = text(dir.path().to_str().unwrap());
        config.order = FileOrder::Hashed { seed };
        texts(config).unwrap()
    };
    assert_eq!(order(1), order(1));
    assert_ne!(order(1), order(2));
    let mut sorted = order(1);
    sorted.sort_by_key(|text| text.parse::<u32>().unwrap());
    assert_eq!(sorted, (0..40).map(|number| number.to_string()).collect::<Vec<_>>());
}

/// Only files are read: a socket cannot be, a device may never end, and a pipe could wait for a writer for ever.
#[cfg(unix)]
#[test]
fn sockets_and_devices_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    write(dir.path(), "a.txt", "a");
    let _listener = std::os::unix::net::UnixListener::bind(at("b.txt")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", at("c.jsonl")).unwrap();
    for (pattern, words) in [
        (at("b.txt"), "b.txt: a socket, not a file"),
        (at(""), "b.txt: a socket, not a file"),
        (at("*.txt"), "b.txt: a socket, not a file"),
        (at("c.jsonl"), "c.jsonl: a device, not a file | write it to a file"),
    ] {
        refusal(Corpus::open(text(&pattern)), words);
    }
    refusal(read_table(Path::new(&at("c.jsonl"))), "c.jsonl: a device, not a file");
    // A socket or device whose ending is not read from folders is no error.
    let config = CorpusConfig { extensions: vec!["md".to_owned()], ..text(&at("")) };
    write(dir.path(), "d.md", "d");
    assert_eq!(texts(config).unwrap(), ["d"]);
}

#[test]
fn a_file_that_vanishes_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), "a.txt", "a");
    for config in [text(&path), jsonl(&path)] {
        write(dir.path(), "a.txt", "a");
        let corpus = Corpus::open(config).unwrap();
        fs::remove_file(&path).unwrap();
        refusal(corpus.documents().collect::<Result<Vec<_>, _>>(), &path);
    }
}

#[test]
fn invalid_text_is_an_error_with_its_offset_or_skipped_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    let latin = write(dir.path(), "1.txt", b"caf\xe9 au lait");
    let nul = write(dir.path(), "2.txt", b"ab\0cd");
    let large = write(dir.path(), "3.txt", "x".repeat(50));
    let wide: [(&str, &[u8], &str); 4] = [
        ("little.utf16", b"\xff\xfea\0", "UTF-16"),
        ("big.utf16", b"\xfe\xff\0a", "UTF-16"),
        ("little.utf32", b"\xff\xfe\0\0a\0\0\0", "UTF-32"),
        ("big.utf32", b"\0\0\xfe\xff\0\0\0a", "UTF-32"),
    ];
    write(dir.path(), "4.txt", " \n\t");
    write(dir.path(), "5.txt", "\u{feff}good");
    let strict = |path: &str| CorpusConfig { max_document_bytes: Some(20), ..text(path) };
    refusal(texts(strict(&latin)), "1.txt: not UTF-8 at byte 3");
    refusal(texts(strict(&nul)), "2.txt: NUL at byte 2");
    for (name, bytes, encoding) in wide {
        let path = &write(dir.path(), name, bytes);
        let words = format!("{path}: {encoding} | iconv -f {encoding} -t UTF-8 {path} | skip_invalid");
        refusal(texts(strict(path)), &words);
        refusal(texts(jsonl(path)), &words);
    }
    // The limit holds for files that a folder or glob finds. A file that a path names is exempt, even if both do.
    let found = large.replace("3.txt", "3.t?t");
    let words = "3.txt: a document of 50 bytes is over the limit of 20\n | data.max_document_bytes | data.skip_invalid";
    refusal(texts(strict(&found)), words);
    assert_eq!(texts(strict(&large)).unwrap(), ["x".repeat(50)]);
    let twice = CorpusConfig { paths: vec![found.clone(), large.clone()], ..strict(&large) };
    assert_eq!(texts(twice.clone()).unwrap(), ["x".repeat(50)]);
    let fingerprint = |paths: &[&String]| {
        let paths = paths.iter().map(|path| (*path).clone()).collect();
        let config = CorpusConfig { paths, ..twice.clone() };
        Corpus::open(config).unwrap().fingerprint()
    };
    assert_ne!(fingerprint(&[&found]), fingerprint(&[&large]));

    let lenient = CorpusConfig { skip_invalid: true, ..strict(dir.path().to_str().unwrap()) };
    let corpus = Corpus::open(lenient).unwrap();
    let mut documents = corpus.documents();
    let wanted = Document { prompt: None, answers: None, text: "good".into(), file_idx: 4, line: 1 };
    assert_eq!(documents.next().unwrap().unwrap(), wanted);
    assert!(documents.next().is_none());
    let report = documents.report();
    assert_eq!((report.num_files, report.num_documents, report.num_bytes), (5, 1, 4));
    assert_eq!((report.num_invalid, report.num_blank), (3, 1));
    assert!(report.first_invalid.as_ref().unwrap().contains("1.txt"));
}

#[test]
fn jsonl_gives_one_document_a_line() {
    let dir = tempfile::tempdir().unwrap();
    let lines = "\u{feff}{\"id\": 1, \"text\": \"first\\nline\", \"meta\": {\"text\": 5}}\r\n\n  \
        \n{\"t\\u0065xt\": \"h\\u00e9\"}";
    let path = write(dir.path(), "a.jsonl", lines);
    let corpus = Corpus::open(jsonl(&path)).unwrap();
    let documents = corpus.documents().map(|document| document.unwrap());
    let found = documents.map(|document| (document.text, document.line)).collect::<Vec<_>>();
    assert_eq!(found, [("first\nline".to_owned(), 1), ("hé".to_owned(), 4)]);
}

#[test]
fn bad_jsonl_lines_are_named_or_skipped() {
    let dir = tempfile::tempdir().unwrap();
    let cases: [(&[u8], &str); 12] = [
        (b"{\"body\": \"x\"}", "line 2 has no column \"text\" (it has [\"body\"])"),
        (b"{\"text\": 7}", "line 2: column \"text\" is a number"),
        (b"{\"text\": null}", "line 2: column \"text\" is null"),
        (b"{\"text\": \"x\"\n", "line 2 is not a JSON object: EOF while parsing an object at column 12\n"),
        (b"[1, 2]", "line 2 is not a JSON object"),
        (b"{\"text\": \"x\"} {\"text\": \"y\"}", "line 2 is not a JSON object"),
        (b"{\"text\": \"\xff\"}", "line 2: not UTF-8 at byte 27"),
        (b"{\"text\": \"abc\\u0000\"}", "line 2: NUL at byte 3 of the text"),
        (b"{\"text\": \"x\", \"n\": NaN}", "line 2 is not a JSON object: NaN at column 20 | allow_nan=False"),
        (b"{\"text\": \"x\", \"n\": [-Infinity]}", "line 2 is not a JSON object: -Infinity at column"),
        (b"{\"text\": NaN}", "line 2 is not a JSON object: NaN at column 10"),
        (b"{\"text\": \"longer than seven\"}", "line 2: a document of 17 bytes is over the limit of 7"),
    ];
    for (bad, wanted) in cases {
        let bytes = [b"{\"text\": \"good\"}\n".as_slice(), bad, b"\n{\"text\": \"last\"}\n"].concat();
        let path = write(dir.path(), "a.jsonl", bytes);
        let mut config = CorpusConfig { max_document_bytes: Some(7), ..jsonl(&path) };
        refusal(texts(config.clone()), &format!("a.jsonl | {wanted}"));
        config.skip_invalid = true;
        assert_eq!(texts(config).unwrap(), ["good", "last"]);
    }
}

#[test]
fn duplicates_are_dropped_when_asked() {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in [("1.txt", "same"), ("2.txt", "other"), ("3.txt", "same")] {
        write(dir.path(), name, bytes);
    }
    let mut config = text(dir.path().to_str().unwrap());
    assert_eq!(texts(config.clone()).unwrap(), ["same", "other", "same"]);
    config.deduplicate = true;
    assert_eq!(texts(config).unwrap(), ["same", "other"]);
}

#[test]
fn max_bytes_is_never_passed() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["1.txt", "2.txt", "3.txt"] {
        write(dir.path(), name, format!("four{name}"));
    }
    let read = |max_bytes| {
        let mut config = text(dir.path().to_str().unwrap());
        config.max_bytes = Some(max_bytes);
        texts(config)
    };
    // Each document has 9 bytes.
    for (max_bytes, num_documents) in [(9, 1), (17, 1), (18, 2), (27, 3), (1000, 3)] {
        assert_eq!(read(max_bytes).unwrap().len(), num_documents, "max_bytes {max_bytes}");
    }
    refusal(read(8), "no document in | 1.txt and 2 files more | max_bytes");
}

#[test]
fn a_corpus_without_documents_or_paths_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), "a.txt", "");
    refusal(texts(text(&path)), "a.txt (1 blank | all documents are empty or blank");
    refusal(Corpus::open(CorpusConfig::text(vec![])), "no data paths");
}

#[test]
fn the_fingerprint_changes_with_files_and_settings() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), "a.txt", "a");
    let of = |deduplicate| {
        let mut config = text(&path);
        config.deduplicate = deduplicate;
        Corpus::open(config).unwrap().fingerprint()
    };
    let before = of(false);
    assert_eq!(of(false), before);
    assert_ne!(of(true), before);
    write(dir.path(), "a.txt", "ab");
    assert_ne!(of(false), before);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    // Whatever the bytes, reading ends with documents or an error, never a panic.
    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let dir = tempfile::tempdir().unwrap();
        let path = write(dir.path(), "a.txt", &bytes);
        for skip_invalid in [false, true] {
            for config in [text(&path), jsonl(&path)] {
                let _ = texts(CorpusConfig { skip_invalid, ..config });
            }
        }
    }

    #[test]
    fn jsonl_returns_what_was_written(texts_in in proptest::collection::vec("[^\\x00]{0,40}", 1..10)) {
        let kept = texts_in.iter().filter(|text| !text.trim().is_empty()).cloned().collect::<Vec<_>>();
        prop_assume!(!kept.is_empty());
        let dir = tempfile::tempdir().unwrap();
        let lines = texts_in.iter().map(|text| serde_json::json!({"id": 1, "text": text}).to_string() + "\n");
        let path = write(dir.path(), "a.jsonl", lines.collect::<String>());
        prop_assert_eq!(texts(jsonl(&path)).unwrap(), kept);
    }
}

#[test]
fn another_text_of_equal_size_and_time_is_another_corpus() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), "a.txt", "one");
    let time = fs::metadata(&path).unwrap().modified().unwrap();
    let opened = || Corpus::open(text(&path)).unwrap();
    let first = opened();
    let hash = format!("{:032x}", first.fingerprint());
    // The text of an archive has the time that the archive says; a copy of equal text is the same corpus.
    for (content, is_same) in [("two", false), ("one", true)] {
        write(dir.path(), "a.txt", content);
        fs::File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
        let now = opened();
        assert_eq!(now.listing_hash(), first.listing_hash());
        assert_eq!(now.fingerprint() == first.fingerprint(), is_same, "{content}");
        assert_eq!(now.is_of_hash(&hash), is_same, "{content}");
        // What earlier versions stored is no sample of the text.
        assert!(now.is_of_hash(&format!("{:032x}", first.listing_hash())));
    }
}

#[test]
fn the_ending_names_the_format() {
    let dir = tempfile::tempdir().unwrap();
    let line = "{\"text\": \"of a line\"}\n";
    let lines = write(dir.path(), "a/lines.jsonl", line);
    let more = write(dir.path(), "a/MORE.NDJSON", line.replace('a', "b"));
    let plain = write(dir.path(), "b/notes.rs", line);
    let by_ending = |paths: &[&String]| {
        let paths = paths.iter().map(|path| path.to_string()).collect();
        CorpusConfig::by_ending(paths, "text")
    };
    assert_eq!(texts(by_ending(&[&lines, &more])).unwrap(), ["of b line", "of a line"]);
    // Several paths may have files of different formats.
    assert_eq!(texts(by_ending(&[&lines, &plain])).unwrap(), ["of a line", line]);
    let named = Corpus::open(jsonl(&lines)).unwrap();
    let found = Corpus::open(by_ending(&[&lines])).unwrap();
    assert_eq!(found.config(), named.config());
    assert_eq!(found.fingerprint(), named.fingerprint());

    let folder = dir.path().to_str().unwrap().to_owned();
    for path in [folder.clone(), format!("{folder}/*/*")] {
        let words = format!("{path} | 2 jsonl ( | 1 text (notes.rs) | hint: say which");
        refusal(texts(by_ending(&[&path])), &words);
    }
    let named = text(&format!("{folder}/*/*"));
    assert_eq!(texts(named).unwrap().len(), 3, "a named format wins");
}

#[test]
fn text_files_that_hold_tables_are_recognised() {
    use TableAsText::{Commas, JsonLines as Lines, JsonList as List, Tabs};
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes, expected) in [
        ("rows.json", "{\"text\": \"a\"}\n\n {\"text\": \"b\"}\n", Some(Lines)),
        ("rows.jsonl", "{\"text\": \"a\"}\n{\"text\": \"b\"}\n", Some(Lines)),
        ("marked.txt", "\u{feff}{\"a\": 1}\r\n{\"b\": 2}\r\n", Some(Lines)),
        ("object.json", "{\n  \"text\": \"a\"\n}\n", None),
        ("one.json", "{\"text\": \"a\"}\n", None),
        ("list.json", "[1]\n[2]\n", None),
        ("rows-in-list.json", "[{\"text\": \"a\"}, {\"text\": \"b\"}]", Some(List)),
        ("lines-in-list.json", "\u{feff}[\n  {\n    \"text\": \"a\"\n  }\n]\n", Some(List)),
        ("code.rs", "{ let a = 1; }\n{ let b = 2; }\n", None),
        ("rows.csv", "text\na\n", Some(Commas)),
        ("rows.TSV", "text\ta\n", Some(Tabs)),
        ("commas.txt", "a,b\nc,d\n", None),
    ] {
        let path = write(dir.path(), name, bytes);
        let corpus = Corpus::open(text(&path)).unwrap();
        assert_eq!(corpus.table_as_text().map(|found| found.1), expected, "{name}");
        assert_eq!(Corpus::open(jsonl(&path)).unwrap().table_as_text(), None);
    }
}

#[test]
fn sizes_that_a_listing_names_do_not_overflow() {
    let file =
        |num_bytes| SourceFile { path: "hf://a.gz".into(), num_bytes, modified_ns: 0, remote: None, is_named: false };
    let corpus = Corpus {
        config: text("hf://a.gz"),
        files: vec![file(u64::MAX / 2), file(u64::MAX / 2)],
        passed_over: PassedOver::new(),
        chats: None,
        hub: None,
        fingerprint: Default::default(),
    };
    assert_eq!(corpus.max_text_bytes(), u64::MAX);
}

#[test]
fn in_tables_only_the_text_and_the_prompt_count_as_text_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let row = format!(
        "{{\"q\": \"{}\", \"text\": \"{}\", \"id\": \"{}\"}}\n",
        "q".repeat(20),
        "a".repeat(30),
        "i".repeat(99)
    );
    let short = write(dir.path(), "short.jsonl", row.repeat(10));
    let long = write(dir.path(), "long.jsonl", row.repeat(20_000));
    let note = write(dir.path(), "note.txt", "x".repeat(1000));
    let text_bytes = |config| Corpus::open(config).unwrap().text_bytes();
    let short_jsonl = jsonl(&short);
    assert_eq!(text_bytes(short_jsonl.clone()), 300);
    assert_eq!(text_bytes(CorpusConfig { prompt_column: Some("q".to_owned()), ..short_jsonl.clone() }), 500);
    assert_eq!(text_bytes(CorpusConfig { max_bytes: Some(120), ..short_jsonl }), 120);
    // 20,000 texts of 30 bytes, and the note.
    let long_and_note = CorpusConfig::by_ending(vec![long, note], "text");
    assert!(text_bytes(long_and_note).abs_diff(601_000) < 10);
}
