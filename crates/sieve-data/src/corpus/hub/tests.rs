//! Tests with a server on this machine that answers as the hub does.

use sieve_testing::refusal;
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use parquet::basic::Compression;

use super::*;
use crate::corpus::{Corpus, CorpusConfig};
use crate::test_files::{gzip, texts_of as texts, write_parquet};

/// Answers `GET`s for the listing and the files of one data set.
struct Server {
    endpoint: String,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    files: HashMap<String, Vec<u8>>,
    /// `(bytes, times)`: the next `times` answers with more than `bytes` bytes of a file end after `bytes` bytes.
    break_off: Option<(usize, usize)>,
    /// Requests so far: path and first requested byte.
    requests: Vec<(String, usize)>,
    /// `Authorization` headers so far.
    tokens: Vec<String>,
    is_down: bool,
    /// Whether connections are accepted and never answered.
    is_silent: bool,
    /// Statuses and headers of the next answers, for any requests.
    next: Vec<(&'static str, String)>,
    /// Files are sent with a flipped bit, this many times.
    num_flipped: usize,
    /// `ETag` of every file, instead of a hash of it.
    etag: Option<String>,
    /// Size of every file in the listing, instead of its own.
    listed_bytes: Option<u64>,
    /// Whether the listing has SHA-256 checksums, as for large files, instead of Git blob ids.
    is_large: bool,
}

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

impl Server {
    /// Starts a server with these files, by their names in the repository.
    fn new(files: &[(&str, Vec<u8>)]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let files = files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.clone()));
        let state = Arc::new(Mutex::new(State { files: files.collect(), ..State::default() }));
        let shared = Arc::clone(&state);
        // The thread ends with the test's process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || answer(&stream, &shared));
            }
        });
        Self { endpoint, state }
    }

    /// Settings that reach this server, with its files in a folder of `dir`.
    fn config(&self, dir: &Path) -> HubConfig {
        HubConfig {
            endpoint: self.endpoint.clone(),
            token: None,
            certificates: None,
            is_offline: false,
            limits: HubLimits {
                silence: Duration::from_secs(20),
                outage: Duration::from_secs(4),
                first_outage: Duration::from_secs(1),
            },
            see_download: Arc::new(|_| {}),
            dir: dir.join("hub"),
        }
    }

    /// The corpus of a path on this server.
    fn corpus(&self, path: &str, dir: &Path) -> Corpus {
        let mut corpus = corpus(path);
        corpus.connect(&self.config(dir)).unwrap();
        corpus
    }

    fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap());
    }

    /// The first requested byte of each request whose path contains `part`.
    fn requests(&self, part: &str) -> Vec<usize> {
        let state = self.state.lock().unwrap();
        let found = state.requests.iter().filter(|(path, _)| path.contains(part));
        found.map(|(_, first)| *first).collect()
    }
}

/// Answers one request and closes the connection.
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
        if let Some(token) = line.strip_prefix("authorization: ") {
            state.lock().ok()?.tokens.push(token.to_owned());
        }
        if line.is_empty() {
            break;
        }
    }
    if state.lock().ok()?.is_silent {
        std::thread::sleep(Duration::from_secs(60));
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
    if !state.next.is_empty() {
        let (status, headers) = state.next.remove(0);
        send(status, &headers, b"", 0);
        return None;
    }
    let listing_at = |revision: &str| format!("/api/datasets/me/texts/revision/{revision}?blobs=true");
    let listings = [
        listing_at("main"),
        listing_at("refs%2Fconvert%2Fparquet"),
        "/api/models/some/model/revision/main?blobs=true".to_owned(),
    ];
    if listings.contains(&path) {
        let hex = |sum: ring::digest::Digest| {
            let bytes = sum.as_ref().iter();
            bytes.map(|byte| format!("{byte:02x}")).collect::<String>()
        };
        let (is_large, listed_bytes) = (state.is_large, state.listed_bytes);
        let siblings = state.files.iter().map(|(name, bytes)| {
            if is_large {
                let sha256 = hex(ring::digest::digest(&ring::digest::SHA256, bytes));
                let lfs = serde_json::json!({"sha256": sha256, "size": bytes.len(), "pointerSize": 134});
                serde_json::json!({"rfilename": name, "size": bytes.len(), "blobId": "0".repeat(40), "lfs": lfs})
            } else {
                let blob = [format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat();
                let blob = hex(ring::digest::digest(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY, &blob));
                let num_bytes = listed_bytes.unwrap_or(bytes.len() as u64);
                serde_json::json!({"rfilename": name, "size": num_bytes, "blobId": blob})
            }
        });
        let body = serde_json::json!({"sha": COMMIT, "private": false, "siblings": siblings.collect::<Vec<_>>()});
        let body = body.to_string();
        send("200 OK", "", body.as_bytes(), body.len());
        return Some(());
    }
    let name = path
        .strip_prefix(&format!("/datasets/me/texts/resolve/{COMMIT}/"))
        .or_else(|| path.strip_prefix(&format!("/some/model/resolve/{COMMIT}/")))
        .or_else(|| path.strip_prefix("/elsewhere/"));
    let Some(mut bytes) = name.and_then(|name| state.files.get(name)).cloned() else {
        send("404 Not Found", "", b"", 0);
        return None;
    };
    let (first, last) = range.unwrap_or((0, None));
    if first >= bytes.len() {
        send("416 Range Not Satisfiable", "", b"", 0);
        return None;
    }
    let end = last.map_or(bytes.len(), |last| (last + 1).min(bytes.len()));
    let etag = state.etag.clone().unwrap_or_else(|| format!("{:x}", xxh3_64(&bytes)));
    if state.num_flipped > 0 {
        state.num_flipped -= 1;
        bytes[first] ^= 1;
    }
    let headers = format!(
        "ETag: \"{etag}\"\r\nX-Repo-Commit: {COMMIT}\r\nContent-Range: bytes {first}-{}/{}\r\n",
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

#[test]
fn a_data_set_is_read_by_name_folder_and_glob() {
    let (server, dir) = (server(), tempfile::tempdir().unwrap());
    for (path, wanted) in [
        ("hf://datasets/me/texts", vec!["first", "second", "third", "other"]),
        ("hf://datasets/me/texts/one", vec!["first", "second", "third"]),
        ("hf://datasets/me/texts@main/*/train-00000.parquet", vec!["first", "second", "other"]),
        ("hf://datasets/me/texts@refs/convert/parquet/two", vec!["other"]),
    ] {
        assert_eq!(texts(&server.corpus(path, dir.path())).unwrap(), wanted, "{path}");
    }
    let mut lines = Corpus::open(CorpusConfig::jsonl(vec!["hf://datasets/me/texts".into()], "text")).unwrap();
    lines.connect(&server.config(dir.path())).unwrap();
    assert_eq!(texts(&lines).unwrap(), ["packed"]);
    let shown = lines.files()[0].path.to_string_lossy().into_owned();
    assert_eq!(shown, format!("hf://datasets/me/texts@{COMMIT}/lines/a.jsonl.gz"));
    // Each file and each listing was fetched once.
    let begun = server.requests("train-00001").into_iter().filter(|&first| first == 0);
    assert_eq!(begun.count(), 1);
    assert_eq!(server.requests("/api/").len(), 4);
}

#[test]
fn files_that_were_fetched_need_no_network() {
    let (server, dir) = (server(), tempfile::tempdir().unwrap());
    let read = || {
        let mut corpus = corpus("hf://datasets/me/texts/one");
        corpus.connect(&server.config(dir.path()))?;
        texts(&corpus)
    };
    assert_eq!(read().unwrap(), ["first", "second", "third"]);
    server.state.lock().unwrap().is_down = true;
    assert_eq!(read().unwrap(), ["first", "second", "third"]);
    // Another path needs a listing of its own, which must be fetched.
    let mut other = corpus("hf://datasets/me/texts/two");
    refusal(other.connect(&server.config(dir.path())), "data set me/texts at http://127.0.0.1 | 503 | HF_TOKEN");
}

#[test]
fn a_transfer_that_breaks_off_goes_on_where_it_stopped() {
    let (server, dir) = (server(), tempfile::tempdir().unwrap());
    server.state.lock().unwrap().break_off = Some((100, 2));
    let corpus = server.corpus("hf://datasets/me/texts/two", dir.path());
    assert_eq!(texts(&corpus).unwrap(), ["other"]);
    let requests = server.requests("two/train");
    assert!(requests.contains(&100) && requests.contains(&200), "{requests:?}");
    // The second reading uses the fetched file.
    assert_eq!(texts(&corpus).unwrap(), ["other"]);
    assert_eq!(server.requests("two/train"), requests);
}

/// What was seen of downloads: name, fetched bytes and size.
type Seen = Arc<Mutex<Vec<(String, u64, u64)>>>;

/// Settings of a server, and what is seen of downloads with them.
fn seen_config(server: &Server, dir: &Path) -> (HubConfig, Seen) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&seen);
    let see_download: SeeDownload = Arc::new(move |progress: DownloadProgress<'_>| {
        let DownloadProgress { name, num_fetched, num_bytes } = progress;
        kept.lock().unwrap().push((name.to_owned(), num_fetched, num_bytes));
    });
    (HubConfig { see_download, ..server.config(dir) }, seen)
}

#[test]
fn the_bytes_of_a_download_are_seen_in_order_and_a_resumed_one_begins_where_it_stopped() {
    let dir = tempfile::tempdir().unwrap();
    // A megabyte takes several reads.
    let line = b"{\"text\": \"a line of text that is long enough to count\"}\n";
    let text = line.repeat((1 << 20) / line.len());
    let size = text.len() as u64;
    let server = Server::new(&[("one/a.jsonl", text), ("one/b.jsonl", line.to_vec())]);
    let half = size / 2;
    server.set(|state| state.break_off = Some((half as usize, 1)));
    let (config, seen) = seen_config(&server, dir.path());
    let mut corpus = Corpus::open(CorpusConfig::jsonl(vec!["hf://datasets/me/texts/one".into()], "text")).unwrap();
    corpus.connect(&config).unwrap();
    assert!(seen.lock().unwrap().is_empty(), "a listing is no download");
    texts(&corpus).unwrap();
    let calls = std::mem::take(&mut *seen.lock().unwrap());
    let of = |name: &str| calls.iter().filter(|call| call.0 == name).cloned().collect::<Vec<_>>();
    let (first, second) = (of("one/a.jsonl"), of("one/b.jsonl"));
    assert_eq!([&first[..], &second[..]].concat(), calls, "one file after the other");
    assert!(first.iter().all(|call| call.2 == size));
    let fetched = first.iter().map(|call| call.1).collect::<Vec<_>>();
    assert!(fetched.is_sorted(), "{fetched:?}");
    // The connection ended at the half: the second request begins there, and says so before its first byte.
    let at_half = fetched.iter().filter(|&&bytes| bytes == half).count();
    assert_eq!((fetched[0], at_half, fetched[fetched.len() - 1]), (0, 2, size), "{fetched:?}");
    assert!(fetched.len() >= 6, "{fetched:?}");
    assert_eq!(server.requests("a.jsonl"), [0, half as usize]);
    let len = line.len() as u64;
    assert_eq!(second.iter().map(|call| (call.1, call.2)).collect::<Vec<_>>(), [(0, len), (len, len)]);
    // What is on this disk is not downloaded again.
    texts(&corpus).unwrap();
    assert!(seen.lock().unwrap().is_empty());
    // A later process finds the part that an earlier one left.
    let path = local_path(&corpus);
    let left = fs::read(&path).unwrap()[..1000].to_vec();
    fs::remove_file(&path).unwrap();
    fs::write(temporary_name(&path), left).unwrap();
    texts(&corpus).unwrap();
    let calls = seen.lock().unwrap();
    assert_eq!((calls[0].1, calls[calls.len() - 1].1), (1000, size));
}

#[test]
fn a_complete_temporary_file_is_renamed_and_not_fetched_again() {
    let (server, dir) = (server(), tempfile::tempdir().unwrap());
    let corpus = server.corpus("hf://datasets/me/texts/two", dir.path());
    let bytes = server.state.lock().unwrap().files["two/train-00000.parquet"].clone();
    let path = local_path(&corpus);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(temporary_name(&path), &bytes).unwrap();
    assert_eq!(texts(&corpus).unwrap(), ["other"]);
    assert!(server.requests("two/train").is_empty());
    // A temporary file with other bytes is fetched again.
    fs::remove_file(&path).unwrap();
    fs::write(temporary_name(&path), vec![7; bytes.len()]).unwrap();
    assert_eq!(texts(&corpus).unwrap(), ["other"]);
    assert_eq!(server.requests("two/train"), [0]);
}

#[test]
fn a_file_that_cannot_be_fetched_is_named_and_earlier_ones_are_kept() {
    let (server, dir) = (server(), tempfile::tempdir().unwrap());
    let corpus = server.corpus("hf://datasets/me/texts/one", dir.path());
    let second = "one/train-00001.parquet";
    let gone = server.state.lock().unwrap().files.remove(second).unwrap();
    let put = |bytes: Vec<u8>| server.set(|state| drop(state.files.insert(second.into(), bytes)));
    let mut documents = corpus.documents();
    assert_eq!(documents.next().unwrap().unwrap().text, "first");
    assert_eq!(documents.next().unwrap().unwrap().text, "second");
    refusal(documents.next().unwrap(), "fetching one/train-00001.parquet | 404");
    // A file whose size is not the listed one is refused.
    put(gone[..gone.len() - 9].to_vec());
    refusal(texts(&corpus), "came with | train-00001");
    put(gone);
    assert_eq!(texts(&corpus).unwrap(), ["first", "second", "third"]);
    assert_eq!(server.requests("train-00000").len(), 1, "once");
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
        base: None,
        known: &[],
    };
    let run = || {
        let mut corpora = ["one", "two"].map(|name| corpus(&format!("hf://datasets/me/texts/{name}")));
        for corpus in &mut corpora {
            corpus.connect(&server.config(dir.path()))?;
        }
        prepare(&corpora, &tokenizer, &config, &|_| {})
    };
    // If a file cannot be fetched, the files before it are kept.
    let second = "one/train-00001.parquet";
    server.corpus("hf://datasets/me/texts/one", dir.path());
    let gone = server.state.lock().unwrap().files.remove(second).unwrap();
    refusal(run(), "fetching one/train-00001.parquet | 404");
    server.set(|state| drop(state.files.insert(second.into(), gone)));
    let prepared = run().unwrap();
    assert_eq!(server.requests("one/train-00000").len(), 1, "once");
    let counts = prepared.meta.sources.iter().map(|source| source.train.num_documents);
    assert_eq!(counts.collect::<Vec<_>>(), [3, 1]);
    assert_eq!(fs::read_dir(dir.path().join("hub/files")).unwrap().count(), 0);
    server.state.lock().unwrap().is_down = true;
    assert!(run().unwrap().reused);
}

#[test]
fn invalid_paths_are_refused_without_a_request() {
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
    refusal(texts(&corpus("hf://datasets/me/texts")), "is on the Hugging Face hub, which is not read here");
}

#[test]
fn missing_repositories_and_invalid_listings_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let server = server();
    let mut missing = corpus("hf://datasets/me/nothing");
    refusal(missing.connect(&server.config(dir.path())), "data set me/nothing | 404");
    let mut empty = corpus("hf://datasets/me/texts/three");
    refusal(empty.connect(&server.config(dir.path())), "matches no file ending in .parquet");
    let config = HubConfig {
        endpoint: "http://127.0.0.1:1".to_owned(),
        token: Some("secret".to_owned()),
        dir: dir.path().join("other"),
        ..server.config(dir.path())
    };
    let refused = corpus("hf://datasets/me/texts").connect(&config);
    let error = refusal(refused, "at http://127.0.0.1:1");
    assert!(!error.contains("secret"), "{error}");
    assert!(!format!("{config:?}").contains("secret"));
    // A listing with invalid names, or names that lead out of the folder, is refused.
    for (name, words) in [
        ("../../x.parquet".to_owned(), "\"../../x.parquet\" leads elsewhere"),
        ("/etc/x.parquet".to_owned(), "leads elsewhere"),
        ("x\0.parquet".to_owned(), "\"x\\0.parquet\" leads elsewhere"),
        ("x".repeat(5000), "xxx\"… of 5000 bytes leads elsewhere"),
    ] {
        server.set(|state| drop(state.files.insert(name.clone(), vec![0])));
        let error = corpus("hf://datasets/me/texts/one").connect(&server.config(&dir.path().join("x")));
        assert!(refusal(error, words).len() < 1000);
        server.set(|state| drop(state.files.remove(&name)));
    }
    // A listing without an end is refused.
    let length = format!("Content-Length: {}\r\n", MAX_ANSWER_BYTES + 1);
    let head = format!("HTTP/1.1 200 OK\r\n{length}\r\n");
    let endless = raw_server(head, MAX_ANSWER_BYTES as usize + 1);
    let config = HubConfig { endpoint: endless, ..server.config(&dir.path().join("y")) };
    refusal(corpus("hf://datasets/me/texts").connect(&config), "longer than 64 MiB");
}

/// A server that answers every request with `head` and `num_spaces` spaces.
fn raw_server(head: String, num_spaces: usize) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let lines = BufReader::new(&stream).lines().map_while(Result::ok);
            lines.take_while(|line| !line.is_empty()).for_each(drop);
            let _ = (&stream).write_all(head.as_bytes());
            let _ = (&stream).write_all(&vec![b' '; num_spaces]);
        }
    });
    endpoint
}

/// Where the first file of a corpus is stored on this disk once it is fetched.
fn local_path(corpus: &Corpus) -> PathBuf {
    let remote = corpus.files()[0].remote.as_ref().unwrap();
    corpus.hub.as_ref().unwrap().local_path(remote)
}

#[test]
fn a_server_does_not_choose_where_a_file_is_written() {
    let (server, dir) = (server(), tempfile::tempdir().unwrap());
    let victim = dir.path().join("victim");
    fs::write(&victim, "untouched").unwrap();
    for etag in [victim.to_str().unwrap(), "../../../../victim"] {
        server.set(|state| state.etag = Some(etag.to_owned()));
        let corpus = server.corpus("hf://datasets/me/texts/two", dir.path());
        assert_eq!(texts(&corpus).unwrap(), ["other"]);
        assert_eq!(fs::read_to_string(&victim).unwrap(), "untouched");
        let path = local_path(&corpus);
        let is_inside = path.starts_with(dir.path().join("hub/files"));
        assert!(path.is_file() && is_inside, "{path:?}");
        fs::remove_file(path).unwrap();
    }
    let found = fs::read_dir(dir.path()).unwrap().flatten();
    assert_eq!(found.count(), 2, "the hub's folder and the victim");
    let odd = RemoteFile {
        repo: "datasets/a/b".into(),
        commit: COMMIT.into(),
        name: format!("x/…{}.ssh:authorized keys.jsonl.gz", "y".repeat(300)),
        num_bytes: None,
        checksum: None,
    };
    let name = odd.local_name();
    let is_plain = name.ends_with("y.ssh_authorized_keys.jsonl.gz");
    assert!(name.len() < 120 && is_plain, "{name}");
}

#[test]
fn an_access_token_is_not_sent_over_plain_http_or_along_a_redirect() {
    let (server, other, dir) = (server(), server(), tempfile::tempdir().unwrap());
    let config = HubConfig { token: Some("hf_secret".to_owned()), ..server.config(dir.path()) };
    let mut corpus = corpus("hf://datasets/me/texts/two");
    corpus.connect(&config).unwrap();
    let location = format!("Location: {}/elsewhere/two/train-00000.parquet\r\n", other.endpoint);
    server.set(|state| state.next.push(("302 Found", location)));
    assert_eq!(texts(&corpus).unwrap(), ["other"]);
    assert_eq!(other.requests("/elsewhere/").len(), 1);
    for server in [server, other] {
        assert_eq!(server.state.lock().unwrap().tokens, [""; 0]);
    }
}

#[test]
fn a_server_that_never_answers_is_given_up() {
    let (server, dir) = (server(), tempfile::tempdir().unwrap());
    let config = HubConfig {
        limits: HubLimits {
            silence: Duration::from_millis(300),
            outage: Duration::from_secs(2),
            first_outage: Duration::from_secs(1),
        },
        ..server.config(dir.path())
    };
    server.set(|state| state.is_silent = true);
    let mut corpus = corpus("hf://datasets/me/texts/two");
    refusal(corpus.connect(&config), "the listing of main: | timeout | given up after");
    server.set(|state| state.is_silent = false);
    corpus.connect(&config).unwrap();
    server.set(|state| state.is_silent = true);
    let words = "fetching two/train-00000.parquet: | timeout | given up after";
    refusal(texts(&corpus), words);
}

#[test]
fn a_pause_that_a_server_asks_for_is_kept() {
    let (server, dir) = (server(), tempfile::tempdir().unwrap());
    let busy = |seconds: u64| ("429 Too Many Requests", format!("Retry-After: {seconds}\r\n"));
    server.set(|state| state.next = vec![busy(1)]);
    let started = std::time::Instant::now();
    let corpus = server.corpus("hf://datasets/me/texts/two", dir.path());
    server.set(|state| state.next = vec![busy(1), ("503 Service Unavailable", String::new())]);
    assert_eq!(texts(&corpus).unwrap(), ["other"]);
    assert!(started.elapsed() >= Duration::from_secs(2), "{:?}", started.elapsed());
    // A run gives up at once if the server requests a longer pause than the limits allow.
    fs::remove_file(local_path(&corpus)).unwrap();
    for seconds in [3600, u64::MAX] {
        server.set(|state| state.next = vec![busy(seconds)]);
        let words = format!("429 Too Many Requests; the server asks to wait for {seconds} s; given up");
        refusal(texts(&corpus), &words);
    }
}

#[test]
fn a_file_with_a_wrong_checksum_is_fetched_again_then_refused() {
    for is_large in [true, false] {
        let (server, dir) = (server(), tempfile::tempdir().unwrap());
        server.set(|state| (state.is_large, state.num_flipped) = (is_large, 1));
        let corpus = server.corpus("hf://datasets/me/texts/two", dir.path());
        assert_eq!(texts(&corpus).unwrap(), ["other"], "fetched again");
        fs::remove_file(local_path(&corpus)).unwrap();
        server.set(|state| state.num_flipped = 9);
        let kind = ["its Git blob id is", "its SHA-256 is"][usize::from(is_large)];
        refusal(texts(&corpus), &format!("{kind} | the listing says"));
        assert!(!local_path(&corpus).exists());
    }
}

#[test]
fn a_file_without_certificates_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("roots.pem");
    let connect = || {
        let config = HubConfig { certificates: Some(path.clone()), ..server().config(dir.path()) };
        corpus("hf://datasets/me/texts").connect(&config)
    };
    refusal(connect(), "roots.pem");
    fs::write(&path, "no certificate").unwrap();
    refusal(connect(), "roots.pem | no certificate in it | SSL_CERT_FILE");
}

#[test]
fn the_tokenizer_of_a_model_is_fetched_once() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(&[("tokenizer.json", b"{\"one\": 1}".to_vec())]);
    let tokenizer = |path| super::hub_tokenizer(path, server.config(dir.path()));
    for path in ["hf://some/model", "hf://some/model@main/tokenizer.json"] {
        assert_eq!(fs::read(tokenizer(path).unwrap()).unwrap(), b"{\"one\": 1}");
    }
    let asked = server.requests("tokenizer.json").len();
    tokenizer("hf://some/model").unwrap();
    assert_eq!(server.requests("tokenizer.json").len(), asked);
    let wrong = "hf://datasets/some/model hf://model hf://some/model@../x hf://some/model/../.. some/model";
    for path in wrong.split(' ') {
        refusal(tokenizer(path), "is not a valid hub path for a tokenizer");
    }
    let gone = tokenizer("hf://some/model/other");
    refusal(gone, "other/tokenizer.json | model some/model at | no such model, or");
    // A file in huggingface_hub's cache needs no network.
    let model = dir.path().join("hub/models--other--model");
    let snapshot = model.join("snapshots").join(COMMIT);
    fs::create_dir_all(model.join("refs")).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    fs::write(model.join("refs/main"), COMMIT).unwrap();
    fs::write(snapshot.join("tokenizer.json"), "{}").unwrap();
    assert_eq!(tokenizer("hf://other/model").unwrap(), snapshot.join("tokenizer.json"));
}

/// A repository "some/model" with these files. The content of a file is its name.
fn model_server(files: &[&str]) -> Server {
    Server::new(&files.iter().map(|name| (*name, name.as_bytes().to_vec())).collect::<Vec<_>>())
}

/// Fetches a model, and returns the events as text.
fn fetched(path: &str, config: HubConfig) -> Result<(HubModel, Vec<String>), DataError> {
    let mut events = Vec::new();
    let model = hub_model(Path::new(path), config, &|_config| Ok(()), &mut |event| {
        events.push(match event {
            HubModelEvent::Waiting => "waiting".to_owned(),
            HubModelEvent::Fetching { num_files, num_bytes, .. } => format!("{num_files} files, {num_bytes} bytes"),
            HubModelEvent::Fetched { name, .. } => name.to_owned(),
        });
    })?;
    Ok((model, events))
}

/// Names of the files in a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().flatten();
    let mut names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect::<Vec<_>>();
    names.sort();
    names
}

#[test]
fn a_model_is_fetched_once_with_the_files_that_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let own = ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json", "chat_template.jinja"];
    let others = ["modeling_x.py", "pytorch_model.bin", "README.md", "x/model.safetensors", "consolidated.safetensors"];
    let server = model_server(&[own.as_slice(), others.as_slice()].concat());
    let (model, events) = fetched("hf://some/model", server.config(dir.path())).unwrap();
    let mut wanted = own;
    wanted.sort_unstable();
    assert_eq!(
        (names(&model.path), model.name.as_str(), model.commit.as_str()),
        (wanted.map(str::to_owned).to_vec(), "model", COMMIT)
    );
    // config.json came first.
    assert_eq!(events[0], format!("4 files, {} bytes", own[1..].iter().map(|name| name.len()).sum::<usize>()));
    // From then on no network is needed, whatever the path's form.
    server.set(|state| state.is_down = true);
    for path in ["hf://some/model", "hf://some/model@main/"] {
        assert_eq!(fetched(path, server.config(dir.path())).unwrap(), (model.clone(), Vec::new()));
    }
    let offline = HubConfig { is_offline: true, ..server.config(dir.path()) };
    assert_eq!(fetched("hf://some/model", offline.clone()).unwrap().0, model);
    let error = refusal(fetched("hf://some/other", offline), "not on this disk, and HF_HUB_OFFLINE forbids");
    assert!(!error.contains("given up"), "{error}");
    assert!(error.contains("leave HF_HUB_OFFLINE out") && !error.contains("the network"), "{error}");
}

#[test]
fn a_broken_transfer_of_a_model_is_resumed_and_shards_are_those_of_the_index() {
    let dir = tempfile::tempdir().unwrap();
    let server = model_server(&[
        "x/config.json",
        "x/tokenizer.json",
        "x/b.safetensors",
        "x/unused.safetensors",
        "x/p/q.safetensors",
    ]);
    let index =
        br#"{"weight_map": {"one": "a.safetensors", "two": "b.safetensors", "three": "p/q.safetensors"}}"#.to_vec();
    server.set(|state| {
        state.files.insert("x/model.safetensors.index.json".to_owned(), index);
        state.files.insert("x/a.safetensors".to_owned(), vec![7; 1000]);
        state.is_large = true;
        state.break_off = Some((600, 1));
    });
    let (model, _) = fetched("hf://some/model/x", server.config(dir.path())).unwrap();
    assert_eq!(server.requests("a.safetensors"), [0, 600]);
    assert_eq!(fs::read(model.path.join("a.safetensors")).unwrap(), vec![7; 1000]);
    let shards =
        ["a.safetensors", "b.safetensors", "config.json", "model.safetensors.index.json", "p", "tokenizer.json"];
    assert_eq!(names(&model.path), shards);
    assert_eq!(fs::read(model.path.join("p/q.safetensors")).unwrap(), b"x/p/q.safetensors");
    // An index that leads out of the folder, or to a file that is not there, is refused.
    for (name, words) in [
        ("../../a.safetensors", "which is not a safetensors file in its folder"),
        ("c.safetensors", "has no c.safetensors"),
    ] {
        let index = format!(r#"{{"weight_map": {{"one": {name:?}}}}}"#);
        server.set(|state| drop(state.files.insert("x/model.safetensors.index.json".to_owned(), index.into_bytes())));
        refusal(fetched("hf://some/model/x", server.config(&dir.path().join("other"))), words);
        fs::remove_dir_all(dir.path().join("other")).unwrap();
    }
}

#[test]
fn models_that_cannot_be_fetched_are_refused_in_a_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |files: &[&str], words: &str| {
        let (server, dir) = (model_server(files), tempfile::tempdir().unwrap());
        refusal(fetched("hf://some/model", server.config(dir.path())), words)
    };
    let convert = "from transformers import AutoModelForCausalLM, AutoTokenizer | from_pretrained(\"some/model\").save";
    refused(&["README.md"], "model some/model at commit 0123 | has no config.json");
    refused(&["config.json", "model.safetensors"], &format!("has no tokenizer.json | {convert}"));
    refused(&["config.json", "tokenizer.json", "pytorch_model.bin"], &format!("are pickles | {convert}"));
    refused(&["config.json", "tokenizer.json", "model.gguf"], "has no model.safetensors | GGUF");
    let server = model_server(&["config.json", "tokenizer.json", "model.safetensors"]);
    for (status, code, words) in [
        ("401 Unauthorized", "RepoNotFound", "model some/model at | the listing of main: there is none of this name"),
        ("404 Not Found", "RevisionNotFound", "the listing of main: there is no such revision"),
        ("403 Forbidden", "GatedRepo", "it is gated: | HF_TOKEN"),
        ("418 I'm a teapot", "Unknown", "http status 418"),
    ] {
        server.set(|state| state.next = vec![(status, format!("X-Error-Code: {code}\r\n"))]);
        refusal(fetched("hf://some/model", server.config(dir.path())), words);
    }
    for wrong in [
        "hf://datasets/some/model",
        "hf://model",
        "hf://some/model@../x",
        "hf://some/model/../..",
        "hf://some/model//x",
    ] {
        refusal(fetched(wrong, server.config(dir.path())), "is not a valid hub path for a model | hf://OWNER/NAME");
    }
    // Three files of 2^60 bytes each.
    server.set(|state| state.listed_bytes = Some(1 << 60));
    let error =
        refusal(fetched("hf://some/model", server.config(dir.path())), "takes 3221225472.00 GiB more, and | HF_HOME");
    assert!(error.contains("are free in"), "{error}");
    assert!(server.requests("config.json").is_empty(), "nothing was fetched");
    let nowhere = HubConfig { endpoint: "http://127.0.0.1:1".to_owned(), ..server.config(&dir.path().join("x")) };
    refusal(
        fetched("hf://some/model", nowhere),
        "at http://127.0.0.1:1: the listing of main: | given up | the network",
    );
}

#[test]
fn a_model_that_is_whole_in_the_python_cache_is_read_there() {
    let dir = tempfile::tempdir().unwrap();
    let server = model_server(&[]);
    let model = dir.path().join("hub/models--some--model");
    let snapshot = model.join("snapshots").join(COMMIT);
    fs::create_dir_all(model.join("refs")).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    fs::write(model.join("refs/main"), COMMIT).unwrap();
    for name in ["config.json", "tokenizer.json"] {
        fs::write(snapshot.join(name), "{}").unwrap();
    }
    // Without weights it is not whole, and the hub is asked.
    refusal(fetched("hf://some/model", server.config(dir.path())), "has no config.json");
    fs::write(snapshot.join("model.safetensors"), "").unwrap();
    let (found, events) = fetched("hf://some/model", server.config(dir.path())).unwrap();
    assert_eq!((found.path, found.commit.as_str(), events.len()), (snapshot, COMMIT, 0));
}
