use sieve_testing::refusal;
use std::cell::RefCell;
use std::path::PathBuf;
use std::time::Duration;

use super::*;

mod chats;
mod few_documents;
mod prompts;
mod resume;
use crate::corpus::CorpusConfig;
use crate::shard::{ShardReader, with_ending};

/// A temporary folder with a corpus (`text`) and its prepared data (`out`), and a tokenizer.
struct Place {
    dir: tempfile::TempDir,
    tokenizer: Tokenizer,
}

impl Place {
    /// A corpus of 200 small files, some with equal contents.
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("text")).unwrap();
        let place = Self { dir, tokenizer: Tokenizer::train_on(["fn main() { Grüße }"].into_iter(), 262).unwrap() };
        for number in 0..200 {
            let text = format!("fn number_{} () {{\n Grüße }}\n", number % 150);
            place.write(&format!("{number:03}.txt"), &text);
        }
        place
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.dir.path().join("text").join(name), text).unwrap();
    }

    fn text(&self) -> CorpusConfig {
        CorpusConfig::text(vec![self.dir.path().join("text").to_str().unwrap().to_owned()])
    }

    fn corpus(&self) -> Corpus {
        Corpus::open(self.text()).unwrap()
    }

    fn out(&self) -> PathBuf {
        self.dir.path().join("out")
    }

    fn config<'a>(&self) -> PrepareConfig<'a> {
        self.holding_out(0.2)
    }

    fn replacing<'a>(&self) -> PrepareConfig<'a> {
        replacing(self.out(), 0.2)
    }

    /// Settings that hold this fraction of the documents out.
    fn holding_out<'a>(&self, fraction: f64) -> PrepareConfig<'a> {
        holding_out(self.out(), fraction)
    }

    fn prepare(&self, config: &PrepareConfig) -> Result<Prepared, DataError> {
        prepare(&[self.corpus()], &self.tokenizer, config, &|_| {})
    }

    fn files(&self) -> Vec<(String, Vec<u8>)> {
        files(&self.out())
    }
}

/// Settings that hold this fraction of the documents out, and refuse another preparation in the folder.
fn holding_out<'a>(dir: PathBuf, fraction: f64) -> PrepareConfig<'a> {
    PrepareConfig {
        dir,
        validation: ValidationSource::Fraction(fraction),
        on_change: OnChange::Refuse,
        base: None,
        known: &[],
    }
}

/// Like [`holding_out`], but another preparation in the folder is replaced.
fn replacing<'a>(dir: PathBuf, fraction: f64) -> PrepareConfig<'a> {
    PrepareConfig { on_change: OnChange::Replace, ..holding_out(dir, fraction) }
}

/// The documents of a shard as text.
fn decoded(tokenizer: &Tokenizer, shard: &ShardReader) -> Vec<String> {
    let decode = |ids: Vec<u32>| tokenizer.decode(&ids).unwrap();
    documents(shard).into_iter().map(decode).collect()
}

/// Names and bytes of a folder's files.
fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(dir).unwrap().map(Result::unwrap);
    let named = entries.map(|entry| (entry.file_name().into_string().unwrap(), entry.path()));
    let mut files = named.map(|(name, path)| (name, fs::read(path).unwrap())).collect::<Vec<_>>();
    files.sort();
    files
}

fn documents(shard: &ShardReader) -> Vec<Vec<u32>> {
    let all = 0..shard.num_documents();
    all.map(|document| shard.document(document).unwrap()).collect()
}

#[test]
fn shards_of_another_folder_are_taken_if_they_are_the_same_and_whole() {
    let place = Place::new();
    let first = place.prepare(&place.config()).unwrap();
    let other = |name: &str| place.dir.path().join(name);
    let known = [other("none"), first.dir.clone(), other("second")];
    let into = |name: &str, fraction: f64| {
        let config = PrepareConfig { known: &known, ..replacing(other(name), fraction) };
        place.prepare(&config).unwrap()
    };
    let second = into("second", 0.2);
    assert_eq!((second.reused, second.taken_from.as_ref()), (true, Some(&first.dir)));
    second.verify().unwrap();
    assert_eq!(second.meta, first.meta);
    // Its own folder is none of the others, and it is found there again.
    assert_eq!(into("second", 0.2).taken_from, None);
    // Other settings give other shards.
    let third = into("third", 0.3);
    assert_eq!((third.reused, third.taken_from), (false, None));
    // A folder that lacks a file is passed over, and the next one taken.
    fs::remove_file(first.dir.join("train.bin")).unwrap();
    let fourth = into("fourth", 0.2);
    assert_eq!(fourth.taken_from, Some(second.dir.clone()));
    // What is prepared again in one folder leaves the others as they are.
    let before = files(&fourth.dir);
    into("second", 0.4);
    assert_eq!(files(&fourth.dir), before);
    fourth.verify().unwrap();
    // The files of a folder that was taken from and could not be used do not stay.
    fs::remove_file(fourth.dir.join("validation.docs.json")).unwrap();
    assert!(!into("fifth", 0.2).reused);
}

#[test]
fn every_document_lands_in_one_split_ended_by_eos_with_its_size() {
    let place = Place::new();
    let prepared = place.prepare(&place.config()).unwrap();
    let (train, validation) = (prepared.train().unwrap(), prepared.validation().unwrap());
    let eos = place.tokenizer.eos_id().unwrap();
    let mut texts = Vec::new();
    for ids in documents(&train).into_iter().chain(documents(&validation)) {
        assert_eq!(ids.iter().filter(|&&id| id == eos).count(), 1);
        assert_eq!(ids.last(), Some(&eos));
        texts.push(place.tokenizer.decode(&ids).unwrap());
    }
    texts.sort();
    let corpus = place.corpus();
    let mut wanted = corpus.documents().map(|document| document.unwrap().text).collect::<Vec<_>>();
    wanted.sort();
    assert_eq!(texts, wanted);

    // Equal texts go to the same split.
    let held_out = documents(&validation);
    assert!(documents(&train).iter().all(|document| !held_out.contains(document)));

    let sizes = prepared.validation_sizes().unwrap();
    assert_eq!(sizes.len(), held_out.len());
    for (size, ids) in sizes.iter().zip(&held_out) {
        let text = place.tokenizer.decode(ids).unwrap();
        let num_words = text.split_whitespace().count() as u64;
        assert_eq!((size.num_bytes, size.num_words), (text.len() as u64, num_words));
    }
    let meta = &prepared.meta;
    let sum = |of: fn(&DocumentSize) -> u64| sizes.iter().map(of).sum::<u64>();
    assert_eq!(meta.validation.num_bytes, sum(|size| size.num_bytes));
    assert_eq!(meta.validation.num_words, sum(|size| size.num_words));
    assert_eq!(meta.train.num_documents + meta.validation.num_documents, 200);
    let stored = [train.num_tokens(), validation.num_tokens()];
    assert_eq!([meta.train.num_tokens, meta.validation.num_tokens], stored);
    assert_eq!(meta.report.num_documents, 200);
    let num_held_out = validation.num_documents();
    // Of 200 documents a hash holds out about a fifth.
    assert!((20..60).contains(&num_held_out), "{num_held_out}");
    assert_eq!(Prepared::open(&place.out()).unwrap().meta, prepared.meta);
}

#[test]
fn held_out_documents_stay_held_out_when_text_is_added() {
    let place = Place::new();
    let before = documents(&place.prepare(&place.config()).unwrap().validation().unwrap());
    for number in 0..100 {
        place.write(&format!("more{number}.txt"), &format!("other text {number}"));
    }
    let after = place.prepare(&place.replacing()).unwrap();
    let held_out = documents(&after.validation().unwrap());
    assert!(before.iter().all(|document| held_out.contains(document)));
    assert!(held_out.len() > before.len());
}

#[test]
fn an_unchanged_preparation_is_reused_and_a_changed_one_refused() {
    let place = Place::new();
    assert!(!place.prepare(&place.config()).unwrap().reused);
    let first = place.files();
    assert!(place.prepare(&place.config()).unwrap().reused);

    let refused = |corpus: CorpusConfig, tokenizer: &Tokenizer, config: &PrepareConfig, words: &str| {
        let corpora = [Corpus::open(corpus).unwrap()];
        refusal(prepare(&corpora, tokenizer, config, &|_| {}), words);
    };
    let (own, usual) = (&place.tokenizer, place.config());
    let deduplicated = CorpusConfig { deduplicate: true, ..place.text() };
    refused(deduplicated, own, &usual, "the corpus's settings changed | out");
    let other = Tokenizer::train_on(["other words here"].into_iter(), 260).unwrap();
    refused(place.text(), &other, &usual, "the tokenizer changed");
    let fraction = place.holding_out(0.3);
    refused(place.text(), own, &fraction, "the validation documents changed");
    place.write("000.txt", "changed to another length");
    refused(place.text(), own, &usual, "the source files changed");
    assert_eq!(place.files(), first, "nothing is overwritten");

    let replaced = place.prepare(&place.replacing()).unwrap();
    assert!(!replaced.reused && replaced.meta.train.tokens_hash != meta_of_files(&first).train.tokens_hash);
    assert!(place.prepare(&place.config()).unwrap().reused);
}

/// The contents of the `meta.json` among a folder's files.
fn meta_of_files(files: &[(String, Vec<u8>)]) -> PreparedMeta {
    let (_, bytes) = files.iter().find(|(name, _)| name == "meta.json").unwrap();
    serde_json::from_slice(bytes).unwrap()
}

#[test]
fn a_damaged_or_half_renamed_preparation_is_made_again() {
    let place = Place::new();
    place.prepare(&place.config()).unwrap();
    let whole = place.files();
    assert!(whole.iter().all(|(name, _)| !name.ends_with(".tmp")));
    let damage: [&dyn Fn(&Path); 7] = [
        &|out| fs::remove_file(out.join("train.bin")).unwrap(),
        &|out| fs::write(out.join("validation.idx"), "cut").unwrap(),
        &|out| fs::write(out.join("meta.json"), "{").unwrap(),
        &|out| fs::write(out.join("validation.docs.json"), "{}").unwrap(),
        // Killed after meta.json was removed and train.bin renamed.
        &|out| {
            fs::remove_file(out.join("meta.json")).unwrap();
            fs::write(out.join("train.bin"), "newer").unwrap();
        },
        // Killed while the shard was written.
        &|out| {
            fs::remove_file(out.join("meta.json")).unwrap();
            fs::write(out.join("train.bin.tmp"), "half").unwrap();
            fs::write(out.join("meta.json.tmp"), "half").unwrap();
        },
        &|out| fs::remove_dir_all(out).unwrap(),
    ];
    for (number, damage) in damage.iter().enumerate() {
        damage(&place.out());
        assert!(!place.prepare(&place.config()).unwrap().reused, "damage {number}");
        assert_eq!(place.files(), whole, "damage {number}");
    }
    // A flipped bit leaves the size as it is: only reading the file finds it, as `ReplaceDamaged` does.
    let flipped = place.out().join("train.bin");
    let mut bytes = fs::read(&flipped).unwrap();
    bytes[3] ^= 1;
    fs::write(&flipped, bytes).unwrap();
    let found = place.prepare(&place.config()).unwrap();
    assert!(found.reused && place.prepare(&place.replacing()).unwrap().reused);
    refusal(found.verify(), "train.bin | not those that were prepared | --replace");
    let mending = PrepareConfig { on_change: OnChange::ReplaceDamaged, ..place.config() };
    assert!(!place.prepare(&mending).unwrap().reused && place.prepare(&mending).unwrap().reused);
    assert_eq!(place.files(), whole);
}

#[test]
fn foreign_files_are_left_alone() {
    let place = Place::new();
    fs::create_dir(place.out()).unwrap();
    fs::write(place.out().join("train.bin"), "somebody else's").unwrap();
    refusal(place.prepare(&place.config()), "train.bin without the meta.json");
    assert_eq!(fs::read(place.out().join("train.bin")).unwrap(), b"somebody else's");
    // A second attempt fails too: the lock file that the first one made is empty, not a mark of ownership.
    assert!(place.prepare(&place.config()).is_err());
    assert_eq!(fs::read(place.out().join("train.bin")).unwrap(), b"somebody else's");

    fs::remove_file(place.out().join("train.bin")).unwrap();
    for (content, wanted) in [("{\"format_version\": 9}", "format_version 9"), ("{}", "no format_version"), ("", "EOF")]
    {
        fs::write(place.out().join("meta.json"), content).unwrap();
        refusal(place.prepare(&place.config()), &format!("meta.json | {wanted}"));
        assert!(Prepared::open(&place.out()).is_err());
    }
    assert!(!place.prepare(&place.replacing()).unwrap().reused);
}

#[test]
fn a_replacement_that_fails_keeps_the_earlier_preparation() {
    let place = Place::new();
    place.prepare(&place.config()).unwrap();
    let first = place.files();
    fs::write(place.dir.path().join("text/zzz.txt"), b"bad \xff").unwrap();
    refusal(place.prepare(&place.replacing()), "zzz.txt: not UTF-8 at byte 4");
    assert_eq!(place.files(), first);
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_reported_and_leaves_no_files() {
    let place = Place::new();
    fs::create_dir(place.out()).unwrap();
    for name in ["train.bin.tmp", "validation.idx.tmp", "meta.json.tmp"] {
        std::os::unix::fs::symlink("/dev/full", place.out().join(name)).unwrap();
        let words = format!("cannot write | {name} | No space left");
        refusal(place.prepare(&place.config()), &words);
        let left = place.files();
        assert!(left.iter().all(|(name, _)| name == LOCK), "{left:?}");
    }
    assert!(!place.prepare(&place.config()).unwrap().reused);
}

#[test]
fn a_corpus_that_is_held_out_as_a_whole_is_refused() {
    let place = Place::new();
    let corpus = place.corpus();
    let config = PrepareConfig { validation: ValidationSource::Corpus(&corpus), ..place.config() };
    let words = "the train split holds no document: 200 in all, each of them among [validation] paths | different text";
    refusal(place.prepare(&config), words);
}

#[test]
fn documents_of_the_validation_corpus_are_not_trained_on() {
    let place = Place::new();
    let path = place.dir.path().join("held.jsonl");
    let lines = "{\"text\": \"fn number_7 () {\\n Grüße }\\n\"}\n{\"text\": \"fresh words\"}\n";
    fs::write(&path, lines).unwrap();
    let held = Corpus::open(CorpusConfig::jsonl(vec![path.to_str().unwrap().into()], "text")).unwrap();
    let config = PrepareConfig { validation: ValidationSource::Corpus(&held), ..place.config() };
    let prepared = place.prepare(&config).unwrap();
    let (train, validation) = (prepared.train().unwrap(), prepared.validation().unwrap());
    assert_eq!(validation.num_documents(), 2);
    // The text of file 7 occurs twice among the 200 files: in 7 and 157.
    assert_eq!(train.num_documents(), 198);
    let held_out = documents(&validation);
    assert!(documents(&train).iter().all(|document| !held_out.contains(document)));
    assert_eq!(prepared.meta.validation_report.unwrap().num_documents, 2);
    assert!(place.prepare(&config).unwrap().reused);
}

#[test]
fn bad_settings_and_empty_splits_are_refused() {
    let place = Place::new();
    for fraction in [0.0, 1.0, -0.5, f64::NAN] {
        refusal(place.prepare(&place.holding_out(fraction)), "validation_fraction");
    }
    for (fraction, words) in [
        (1e-9, "the validation split holds no document: 200 in all"),
        (1.0 - 1e-12, "the train split holds no document"),
    ] {
        refusal(place.prepare(&place.holding_out(fraction)), words);
    }
    let nowhere = holding_out("/proc/nowhere".into(), 0.2);
    refusal(place.prepare(&nowhere), "/proc/nowhere");
    let left = place.files();
    assert!(left.iter().all(|(name, _)| name == LOCK), "{left:?}");
}

#[test]
fn the_last_progress_has_all_bytes_and_documents() {
    let place = Place::new();
    let calls = RefCell::new(Vec::new());
    let note = |progress| calls.borrow_mut().push(progress);
    prepare(&[place.corpus()], &place.tokenizer, &place.config(), &note).unwrap();
    let calls = calls.into_inner();
    let Progress::Tokenising { bytes_done, bytes_total, num_documents, .. } = calls[calls.len() - 2] else {
        panic!("{calls:?}");
    };
    assert_eq!((bytes_done, num_documents), (bytes_total, 200));
    assert_eq!(calls.last(), Some(&Progress::Writing));
}

#[test]
fn of_three_preparations_at_once_one_does_the_work() {
    let place = Place::new();
    let reused = std::thread::scope(|scope| {
        let threads = [0, 1, 2].map(|_| scope.spawn(|| place.prepare(&place.config()).unwrap().reused));
        threads.map(|thread| thread.join().unwrap())
    });
    assert_eq!(reused.iter().filter(|&&reused| !reused).count(), 1, "{reused:?}");
}

const KILL_DIR: &str = "SIEVE_TEST_KILL_DIR";
/// A file that the child writes after each preparation.
const AT_WORK: &str = "at_work";

/// The child of the next test: prepares the same folder in two ways, in turn, until it is killed.
#[test]
#[ignore = "a part of killed_at_any_moment_it_leaves_nothing_half_valid"]
fn prepare_for_ever() {
    let Some(dir) = std::env::var_os(KILL_DIR).map(PathBuf::from) else {
        return;
    };
    let corpus = Corpus::open(CorpusConfig::text(vec![dir.join("text").to_str().unwrap().to_owned()])).unwrap();
    let tokenizer = Tokenizer::from_file(&dir.join("tokenizer.json")).unwrap();
    for fraction in [0.2, 0.3].into_iter().cycle() {
        let config = replacing(dir.join("out"), fraction);
        prepare(std::slice::from_ref(&corpus), &tokenizer, &config, &|_| {}).unwrap();
        fs::write(dir.join(AT_WORK), "").unwrap();
    }
}

#[test]
fn killed_at_any_moment_it_leaves_nothing_half_valid() {
    let place = Place::new();
    place.tokenizer.save(&place.dir.path().join("tokenizer.json")).unwrap();
    place.prepare(&place.config()).unwrap();
    let whole = place.files();
    let (mut num_whole, mut num_partial) = (0, 0);
    for moment in 0..16u64 {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "prepare::tests::prepare_for_ever"])
            .env(KILL_DIR, place.dir.path())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        // Waits until the child prepares, because its start takes longer than a preparation.
        while !place.dir.path().join(AT_WORK).exists() {
            assert!(child.try_wait().unwrap().is_none(), "the child ended by itself");
            std::thread::sleep(Duration::from_millis(1));
        }
        if moment % 2 == 0 {
            // Moments that are spread over 20 ms, by a prime.
            std::thread::sleep(Duration::from_micros(moment * 7_919 % 20_000));
        } else {
            // Waits for the time between the first and the last rename, which is too short to be hit by chance.
            while place.out().join("meta.json").exists() {
                assert!(child.try_wait().unwrap().is_none(), "the child ended by itself");
            }
        }
        child.kill().unwrap();
        assert!(!child.wait().unwrap().success());
        fs::remove_file(place.dir.path().join(AT_WORK)).unwrap();
        // If there is a meta.json, the folder holds exactly the files that it describes.
        if place.out().join("meta.json").exists() {
            num_whole += 1;
            let prepared = Prepared::open(&place.out()).unwrap();
            for (shard, split) in [
                (prepared.train().unwrap(), &prepared.meta.train),
                (prepared.validation().unwrap(), &prepared.meta.validation),
            ] {
                let bin = fs::read(with_ending(shard.prefix(), ".bin")).unwrap();
                assert_eq!(hex(xxhash_rust::xxh3::xxh3_128(&bin)), split.tokens_hash);
                let counts = (split.num_documents, split.num_tokens);
                assert_eq!((shard.num_documents(), shard.num_tokens()), counts);
            }
            let num_sizes = prepared.validation_sizes().unwrap().len() as u64;
            assert_eq!(num_sizes, prepared.meta.validation.num_documents);
        } else {
            num_partial += 1;
            assert!(Prepared::open(&place.out()).is_err());
        }
    }
    let counts = [num_whole, num_partial];
    assert!(!counts.contains(&0), "whole, partial: {counts:?}");
    place.prepare(&place.replacing()).unwrap();
    assert_eq!(place.files(), whole);
}
