//! Against a server on this machine that answers as the hub does.

use sieve_testing::refusal;
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use parquet::basic::Compression;

use super::*;
use crate::corpus::{Corpus, CorpusConfig};
use crate::test_files::{gzip, write_parquet};

/// Answers `GET`s for the listing and the files of one data set.
struct Server {
    endpoint: String,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    files: HashMap<String, Vec<u8>>,
    /// Answers of a file are broken off after this many bytes, as often as this.
    break_off: Option<(usize, usize)>,
    /// Requests so far: path and the first byte asked for.
    requests: Vec<(String, usize)>,
    is_down: bool,
}

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

impl Server {
    fn new(files: &[(&str, Vec<u8>)]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let files = files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.clone()));
        let state = Arc::new(Mutex::new(State {
            files: files.collect(),
            ..State::default()
        }));
        let shared = Arc::clone(&state);
        // Ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || answer(&stream, &shared));
            }
        });
        Self { endpoint, state }
    }

    fn config(&self, dir: &Path) -> HubConfig {
        HubConfig {
            endpoint: self.endpoint.clone(),
            token: None,
            dir: dir.join("hub"),
        }
    }

    fn requests(&self, part: &str) -> Vec<usize> {
        let state = self.state.lock().unwrap();
        let found = state.requests.iter().filter(|(path, _)| path.contains(part));
        found.map(|(_, first)| *first).collect()
    }
}

/// One request: the client is told to close.
fn answer(stream: &TcpStream, state: &Mutex<State>) -> Option<()> {
    let mut lines = BufReader::new(stream).lines();
    let path = lines.next()?.ok()?.split(' ').nth(1)?.to_owned();
    let mut range = None;
    for line in lines {
        let line = line.ok()?.to_ascii_lowercase();
        if let Some(found) = line.strip_prefix("range: bytes=") {
            let (first, last) = found.split_once('-')?;
            range = Some((first.parse::<usize>().ok()?, last.parse::<usize>().ok()));
        }
        if line.is_empty() {
            break;
        }
    }
    let mut state = state.lock().ok()?;
    state.requests.push((path.clone(), range.map_or(0, |range| range.0)));
    let mut stream = stream;
    let mut send = |status: &str, headers: &str, body: &[u8], len: usize| {
        let head = format!("HTTP/1.1 {status}\r\nContent-Length: {len}\r\nConnection: close\r\n{headers}\r\n");
        let _ = stream.write_all(head.as_bytes());
        let _ = stream.write_all(body);
    };
    if state.is_down {
        send("503 Service Unavailable", "", b"", 0);
        return None;
    }
    let listing_at = |revision: &str| format!("/api/datasets/me/texts/revision/{revision}?blobs=true");
    if path == listing_at("main") || path == listing_at("refs%2Fconvert%2Fparquet") {
        let siblings = state
            .files
            .iter()
            .map(|(name, bytes)| serde_json::json!({"rfilename": name, "size": bytes.len(), "blobId": "x"}));
        let body = serde_json::json!({"sha": COMMIT, "private": false, "siblings": siblings.collect::<Vec<_>>()});
        let body = body.to_string();
        send("200 OK", "", body.as_bytes(), body.len());
        return Some(());
    }
    let name = path
        .strip_prefix(&format!("/datasets/me/texts/resolve/{COMMIT}/"))
        .or_else(|| path.strip_prefix("/some/model/resolve/main/"));
    let Some(bytes) = name.and_then(|name| state.files.get(name)).cloned() else {
        send("404 Not Found", "", b"", 0);
        return None;
    };
    let (first, last) = range.unwrap_or((0, None));
    if first >= bytes.len() {
        send("416 Range Not Satisfiable", "", b"", 0);
        return None;
    }
    let end = last.map_or(bytes.len(), |last| (last + 1).min(bytes.len()));
    let etag = xxh3_64(&bytes);
    let headers = format!(
        "ETag: \"{etag:x}\"\r\nX-Repo-Commit: {COMMIT}\r\nContent-Range: bytes {first}-{}/{}\r\n",
        end - 1,
        bytes.len()
    );
    let body = &bytes[first..end];
    let sent = match &mut state.break_off {
        Some((after, times)) if *times > 0 && body.len() > *after => {
            *times -= 1;
            &body[..*after]
        }
        _ => body,
    };
    send("206 Partial Content", &headers, sent, body.len());
    Some(())
}

fn parquet(texts: &[&str]) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.parquet");
    let rows = texts.iter().map(|text| Some(text.as_bytes())).collect::<Vec<_>>();
    write_parquet(&path, &[&rows], Compression::SNAPPY);
    fs::read(path).unwrap()
}

fn server() -> Server {
    Server::new(&[
        ("README.md", b"# texts".to_vec()),
        ("one/train-00000.parquet", parquet(&["first", "second"])),
        ("one/train-00001.parquet", parquet(&["third"])),
        ("two/train-00000.parquet", parquet(&["other"])),
        ("lines/a.jsonl.gz", gzip(b"{\"text\": \"packed\"}\n")),
    ])
}

fn corpus(path: &str) -> Corpus {
    Corpus::open(CorpusConfig::parquet(vec![path.to_owned()], "text")).unwrap()
}

fn texts(corpus: &Corpus) -> Result<Vec<String>, DataError> {
    corpus
        .documents()
        .map(|document| document.map(|document| document.text))
        .collect()
}

#[test]
fn a_data_set_is_read_by_name_folder_and_glob() {
    let (server, dir) = (server(), tempfile::tempdir().unwrap());
    for (path, wanted) in [
        ("hf://datasets/me/texts", vec!["first", "second", "third", "other"]),
        ("hf://datasets/me/texts/one", vec!["first", "second", "third"]),
        (
            "hf://datasets/me/texts@main/*/train-00000.parquet",
            vec!["first", "second", "other"],
        ),
        ("hf://datasets/me/texts@refs/convert/parquet/two", vec!["other"]),
    ] {
        let mut corpus = corpus(path);
        corpus.connect(&server.config(dir.path())).unwrap();
        assert_eq!(texts(&corpus).unwrap(), wanted, "{path}");
    }
    let mut lines = Corpus::open(CorpusConfig::jsonl(vec!["hf://datasets/me/texts".into()], "text")).unwrap();
    lines.connect(&server.config(dir.path())).unwrap();
    assert_eq!(texts(&lines).unwrap(), ["packed"]);
    let shown = lines.files()[0].path.display().to_string();
    assert_eq!(shown, format!("hf://datasets/me/texts@{COMMIT}/lines/a.jsonl.gz"));
    // Each file was fetched once, each listing asked for once.
    assert_eq!(
        server
            .requests("train-00001")
            .iter()
            .filter(|&&first| first == 0)
            .count(),
        2
    );
    assert_eq!(server.requests("/api/").len(), 4);
}

#[test]
fn what_is_there_needs_no_network() {
    let (server, dir) = (server(), tempfile::tempdir().unwrap());
    let read = || {
        let mut corpus = corpus("hf://datasets/me/texts/one");
        corpus.connect(&server.config(dir.path()))?;
        texts(&corpus)
    };
    assert_eq!(read().unwrap(), ["first", "second", "third"]);
    server.state.lock().unwrap().is_down = true;
    assert_eq!(read().unwrap(), ["first", "second", "third"]);
    // Another path is another listing.
    let mut other = corpus("hf://datasets/me/texts/two");
    refusal(
        other.connect(&server.config(dir.path())),
        "data set me/texts at http://127.0.0.1 | 503 | HF_TOKEN",
    );
}

#[test]
fn a_transfer_that_breaks_off_goes_on_where_it_stopped() {
    let (server, dir) = (server(), tempfile::tempdir().unwrap());
    server.state.lock().unwrap().break_off = Some((100, 2));
    let mut corpus = corpus("hf://datasets/me/texts/two");
    corpus.connect(&server.config(dir.path())).unwrap();
    assert_eq!(texts(&corpus).unwrap(), ["other"]);
    let requests = server.requests("two/train");
    assert!(requests.contains(&100) && requests.contains(&200), "{requests:?}");
    // A name that comes a second time is served from the disk.
    assert_eq!(texts(&corpus).unwrap(), ["other"]);
    assert_eq!(server.requests("two/train"), requests);
}

#[test]
fn a_fetched_file_killed_before_it_had_its_name_is_fetched_again() {
    let (server, dir) = (server(), tempfile::tempdir().unwrap());
    let mut corpus = corpus("hf://datasets/me/texts/two");
    corpus.connect(&server.config(dir.path())).unwrap();
    let bytes = server.state.lock().unwrap().files["two/train-00000.parquet"].clone();
    let blobs = dir.path().join("hub/datasets--me--texts/blobs");
    fs::create_dir_all(&blobs).unwrap();
    fs::write(blobs.join(format!("{:x}.part", xxh3_64(&bytes))), &bytes).unwrap();
    assert_eq!(texts(&corpus).unwrap(), ["other"]);
}

#[test]
fn a_file_that_fails_is_told_and_those_before_it_are_kept() {
    let (server, dir) = (server(), tempfile::tempdir().unwrap());
    let mut corpus = corpus("hf://datasets/me/texts/one");
    corpus.connect(&server.config(dir.path())).unwrap();
    let gone = server
        .state
        .lock()
        .unwrap()
        .files
        .remove("one/train-00001.parquet")
        .unwrap();
    let mut documents = corpus.documents();
    assert_eq!(documents.next().unwrap().unwrap().text, "first");
    assert_eq!(documents.next().unwrap().unwrap().text, "second");
    refusal(documents.next().unwrap(), "fetching one/train-00001.parquet | 404");
    // A file of another size than listed is not taken.
    let cut = gone[..gone.len() - 9].to_vec();
    server
        .state
        .lock()
        .unwrap()
        .files
        .insert("one/train-00001.parquet".into(), cut);
    refusal(texts(&corpus), "came with | train-00001");
    server
        .state
        .lock()
        .unwrap()
        .files
        .insert("one/train-00001.parquet".into(), gone);
    assert_eq!(texts(&corpus).unwrap(), ["first", "second", "third"]);
    assert_eq!(
        server.requests("train-00000").len(),
        2,
        "one question for its size, one for its bytes"
    );
}

#[test]
fn a_preparation_leaves_no_fetched_file_and_is_found_again_without_network() {
    use crate::{OnChange, PrepareConfig, Tokenizer, ValidationSource, prepare};
    let (server, dir) = (server(), tempfile::tempdir().unwrap());
    let tokenizer = Tokenizer::train_on(["first second third other"].into_iter(), 260).unwrap();
    let held = dir.path().join("held.parquet");
    write_parquet(&held, &[&[Some(b"held".as_slice())]], Compression::SNAPPY);
    let held = corpus(held.to_str().unwrap());
    let config = PrepareConfig {
        dir: dir.path().join("out"),
        validation: ValidationSource::Corpus(&held),
        on_change: OnChange::Refuse,
    };
    let run = || {
        let mut corpora = [
            corpus("hf://datasets/me/texts/one"),
            corpus("hf://datasets/me/texts/two"),
        ];
        for corpus in &mut corpora {
            corpus.connect(&server.config(dir.path()))?;
        }
        prepare(&corpora, &tokenizer, &config, &|_| {})
    };
    let prepared = run().unwrap();
    assert_eq!(
        prepared
            .meta
            .sources
            .iter()
            .map(|source| source.train.num_documents)
            .collect::<Vec<_>>(),
        [3, 1]
    );
    let blobs = dir.path().join("hub/datasets--me--texts/blobs");
    assert_eq!(fs::read_dir(blobs).unwrap().count(), 0);
    server.state.lock().unwrap().is_down = true;
    assert!(run().unwrap().reused);
}

#[test]
fn paths_that_are_none_are_refused_before_anything_is_asked() {
    for (path, wanted) in [
        ("hf://models/me/texts", "only data sets"),
        ("hf://datasets/me", "the owner or the name"),
        ("hf://datasets//x", "the owner or the name"),
        ("hf://datasets/me/te xts", "the owner or the name"),
        ("hf://datasets/me/../x", "the owner or the name"),
        ("hf://datasets/me/texts@", "the revision"),
        ("hf://datasets/me/texts@refs/convert", "the revision"),
        ("hf://datasets/me/texts/a***b", "not a valid glob"),
    ] {
        let error = Corpus::open(CorpusConfig::parquet(vec![path.to_owned()], "text"));
        refusal(error, wanted);
    }
    refusal(
        texts(&corpus("hf://datasets/me/texts")),
        "lies on the Hugging Face hub, which is not read here",
    );
}

#[test]
fn answers_that_are_none_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let server = server();
    let mut missing = corpus("hf://datasets/me/nothing");
    refusal(missing.connect(&server.config(dir.path())), "data set me/nothing | 404");
    let mut empty = corpus("hf://datasets/me/texts/three");
    refusal(
        empty.connect(&server.config(dir.path())),
        "matches no file ending in one of [\"parquet\"]",
    );
    let config = HubConfig {
        endpoint: "http://127.0.0.1:1".to_owned(),
        token: Some("secret".to_owned()),
        dir: dir.path().join("other"),
    };
    let error = corpus("hf://datasets/me/texts")
        .connect(&config)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("at http://127.0.0.1:1") && !error.contains("secret"),
        "{error}"
    );
    assert!(!format!("{config:?}").contains("secret"));
    // A listing with names that lead out of the folder is not used.
    server
        .state
        .lock()
        .unwrap()
        .files
        .insert("../../x.parquet".into(), vec![0]);
    let error = corpus("hf://datasets/me/texts/one").connect(&server.config(&dir.path().join("x")));
    refusal(error, "leads elsewhere");
}

#[test]
fn the_tokenizer_of_a_model_is_fetched_once() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(&[("tokenizer.json", b"{\"one\": 1}".to_vec())]);
    for path in ["hf://some/model", "hf://some/model@main/tokenizer.json"] {
        let file = super::hub_tokenizer(path, server.config(dir.path())).unwrap();
        assert_eq!(fs::read(file).unwrap(), b"{\"one\": 1}");
    }
    let asked = server.requests("tokenizer.json").len();
    super::hub_tokenizer("hf://some/model", server.config(dir.path())).unwrap();
    assert_eq!(server.requests("tokenizer.json").len(), asked);
    for path in [
        "hf://datasets/some/model",
        "hf://model",
        "hf://some/model@../x",
        "hf://some/model/../..",
        "some/model",
    ] {
        refusal(
            super::hub_tokenizer(path, server.config(dir.path())),
            "names no tokenizer",
        );
    }
    let gone = super::hub_tokenizer("hf://some/model/other", server.config(dir.path()));
    refusal(gone, "other/tokenizer.json");
}
