//! Corpora with too few documents to hold whole ones out: the end of the text is held out.

use super::*;
use crate::corpus::AlsoHeldOut;
use sieve_testing::refusal;

/// A temporary folder whose files are a corpus each, and a tokenizer.
struct Few {
    dir: tempfile::TempDir,
    tokenizer: Tokenizer,
}

impl Few {
    fn new() -> Self {
        let tokenizer = Tokenizer::train_on(["line of text, Grüße"].into_iter(), 258).unwrap();
        let dir = tempfile::tempdir().unwrap();
        Self { dir, tokenizer }
    }

    fn corpus(&self, name: &str, text: &str) -> Corpus {
        let path = self.dir.path().join(name);
        fs::write(&path, text).unwrap();
        let path = path.to_str().unwrap().to_owned();
        Corpus::open(CorpusConfig::by_ending(vec![path], "text")).unwrap()
    }

    fn prepare(&self, corpora: &[Corpus], fraction: f64) -> Result<Prepared, DataError> {
        let dir = self.dir.path().join(format!("out-{fraction}-{}", corpora.len()));
        prepare(corpora, &self.tokenizer, &replacing(dir, fraction), &|_| {})
    }

    fn texts(&self, shard: &ShardReader) -> Vec<String> {
        decoded(&self.tokenizer, shard)
    }
}

#[test]
fn the_end_of_a_single_text_is_held_out() {
    let few = Few::new();
    let text = (0..20_000).map(|n| format!("line {n} of Grüße\n")).collect::<String>();
    for fraction in [0.05, 0.5, 0.999] {
        let corpus = few.corpus("one.txt", &text);
        let prepared = few.prepare(&[corpus], fraction).unwrap();
        assert!(prepared.meta.is_cut);
        let train = few.texts(&prepared.train().unwrap());
        let held_out = few.texts(&prepared.validation().unwrap());
        assert_eq!((train.len(), held_out.len()), (1, 1));
        assert_eq!(format!("{}{}", train[0], held_out[0]), text);
        let share = held_out[0].len() as f64 / text.len() as f64;
        assert!((share - fraction).abs() < 1e-4, "{share} for {fraction}");
        let sizes = prepared.validation_sizes().unwrap();
        assert_eq!(sizes[0].num_bytes, held_out[0].len() as u64);
    }
}

#[test]
fn documents_before_the_cut_are_trained_on_and_those_behind_it_held_out() {
    let few = Few::new();
    // None of these is held out by its hash. Of their 16 bytes, a hundredth is rounded to 0 and a tenth to 2.
    let lines = ["aaaa", "bbbb", "cccc", "dddd"].map(|text| format!("{{\"text\": \"{text}\"}}\n"));
    let corpus = || few.corpus("few.jsonl", &lines.concat());
    refusal(few.prepare(&[corpus()], 0.01), "[validation] paths");
    let prepared = few.prepare(&[corpus()], 0.1).unwrap();
    assert!(prepared.meta.is_cut);
    assert_eq!(few.texts(&prepared.train().unwrap()), ["aaaa", "bbbb", "cccc", "dd"]);
    assert_eq!(few.texts(&prepared.validation().unwrap()), ["dd"]);
}

#[test]
fn copies_of_held_out_documents_are_counted() {
    let few = Few::new();
    let lines = |texts: &[&str]| texts.iter().map(|text| format!("{{\"text\": \"{text}\"}}\n")).collect::<String>();
    // Of 6 + 10 * 8 bytes the last 9 are held out: the last two documents and a byte of the one before.
    let texts = [vec!["single"], ["aaaa", "bbbb"].repeat(10)].concat();
    let prepared = few.prepare(&[few.corpus("copies.jsonl", &lines(&texts))], 0.1).unwrap();
    assert_eq!(few.texts(&prepared.validation().unwrap()), ["b", "aaaa", "bbbb"]);
    assert_eq!(few.texts(&prepared.train().unwrap()), ["single"]);
    let found = prepared.meta.report.also_held_out;
    assert_eq!(found, AlsoHeldOut { num_documents: 18, num_shortened: 0, num_bytes: 71 });
    // Every document before the cut repeats one behind it.
    let error = few.prepare(&[few.corpus("all.jsonl", &lines(&texts[1..]))], 0.2).unwrap_err().to_string();
    assert!(error.contains("20 in all, and each that is not held out repeats one that is"), "{error}");
    assert!(error.contains("data.deduplicate = true"), "{error}");
}

#[test]
fn each_corpus_of_one_document_in_a_mixture_is_cut() {
    let few = Few::new();
    let corpora = [("a.txt", "0123456789"), ("b.txt", "abcdefghij")];
    let corpora = corpora.map(|(name, text)| few.corpus(name, text));
    let prepared = few.prepare(&corpora, 0.2).unwrap();
    let shards = prepared.train_shards().unwrap();
    let train = shards.iter().flat_map(|shard| few.texts(shard)).collect::<Vec<_>>();
    assert_eq!(train, ["01234567", "abcdefgh"]);
    assert_eq!(few.texts(&prepared.validation().unwrap()), ["89", "ij"]);
}

#[test]
fn the_end_of_a_single_document_is_held_out_beside_a_corpus_of_many() {
    let few = Few::new();
    let row = |n| format!("{{\"text\": \"row {n}\"}}\n");
    let rows = (0..200).map(row).collect::<String>();
    let corpora = [few.corpus("a.txt", "0123456789"), few.corpus("b.jsonl", &rows)];
    let prepared = few.prepare(&corpora, 0.2).unwrap();
    assert!(prepared.meta.is_cut);
    let held_out = few.texts(&prepared.validation().unwrap());
    assert_eq!(held_out[0], "89");
    let shards = prepared.train_shards().unwrap();
    assert_eq!(few.texts(&shards[0]), ["01234567"]);
    // Of the second corpus whole documents are held out, the same as without the first corpus.
    let alone = few.prepare(&corpora[1..], 0.2).unwrap();
    assert_eq!(held_out[1..], few.texts(&alone.validation().unwrap()));
    assert!(!alone.meta.is_cut && (20..60).contains(&(held_out.len() - 1)));
}

#[test]
fn a_corpus_with_enough_documents_is_not_cut() {
    let place = Place::new();
    assert!(!place.prepare(&place.config()).unwrap().meta.is_cut);
    let meta = fs::read_to_string(place.out().join("meta.json")).unwrap();
    assert!(!meta.contains("is_cut"), "{meta}");
}

/// A corpus with enough documents to hold whole ones out is split the same way for good: runs resume on these shards.
#[test]
fn the_split_by_hash_gives_the_same_shards_for_good() {
    let place = Place::new();
    let meta = place.prepare(&place.config()).unwrap().meta;
    let wanted = ["11b25e38365ca88d1f1e649a97d0f3fe", "c2174e893b9113c194fe93ff7dc355ed"];
    assert_eq!([meta.train, meta.validation].map(|split| split.tokens_hash), wanted);
}

/// No text of the validation shard is in a training shard, whichever corpora have the same document.
#[test]
fn text_that_a_cut_holds_out_is_trained_on_nowhere() {
    let few = Few::new();
    let folder = few.dir.path().join("all");
    fs::create_dir(&folder).unwrap();
    let text = |n| format!("{n} {}", (0..40).map(|k| format!("{} ", n * 40 + k)).collect::<String>());
    (0..60).for_each(|n| fs::write(folder.join(format!("{n:02}.txt")), text(n)).unwrap());
    let open = |path: &Path| Corpus::open(CorpusConfig::text(vec![path.to_str().unwrap().to_owned()])).unwrap();
    let all = open(&folder);
    let whole = few.prepare(std::slice::from_ref(&all), 0.2).unwrap();
    let held_out = few.texts(&whole.validation().unwrap());
    let is_held_out = |n: &usize| held_out.contains(&text(*n));
    let numbers = [(0..60).find(is_held_out).unwrap(), (0..60).find(|n| !is_held_out(n)).unwrap()];
    let check = |name: &str, trains: &[Prepared], validates: &Prepared| {
        let train = trains.iter().flat_map(|prepared| prepared.train_shards().unwrap());
        let train = train.flat_map(|shard| few.texts(&shard)).collect::<Vec<_>>();
        for held_out in few.texts(&validates.validation().unwrap()) {
            assert!(!train.iter().any(|text| text.contains(&held_out)), "{name}: {held_out}");
        }
        train
    };
    let mut fates = Vec::new();
    for (number, fate) in numbers.into_iter().zip(["held out by its hash", "trained on"]) {
        let one = open(&folder.join(format!("{number:02}.txt")));
        for (name, corpora) in [("behind", [all.clone(), one.clone()]), ("before", [one.clone(), all.clone()])] {
            let prepared = few.prepare(&corpora, 0.2).unwrap();
            let train = check(&format!("{fate}, {name}"), std::slice::from_ref(&prepared), &prepared);
            assert!(prepared.meta.is_cut && train.len() > 40, "{fate}, {name}");
        }
        // The documents are the run's own text, and then the text of a stage.
        let stage = |base: &Prepared, corpus: &Corpus, name: &str| {
            let config =
                PrepareConfig { base: Some(base), ..replacing(few.dir.path().join(format!("{fate}-{name}")), 0.2) };
            prepare(std::slice::from_ref(corpus), &few.tokenizer, &config, &|_| {})
        };
        let base = prepare(
            std::slice::from_ref(&one),
            &few.tokenizer,
            &replacing(few.dir.path().join(format!("{fate}-base")), 0.2),
            &|_| {},
        );
        let base = base.unwrap();
        let later = stage(&base, &all, "all").unwrap();
        check(&format!("{fate}, stage"), &[base.clone(), later], &base);
        fates.push(stage(&whole, &one, "one").map(|_| ()));
    }
    // No part of a document that is validated on as a whole may be trained on.
    refusal(fates.remove(0), "a stage would train on text that the run validates on | [validation] paths");
    fates.remove(0).unwrap();
    // The same document occurs twice in one corpus: the cut after 6 bytes of the second holds for the first too.
    let twice = Corpus::open(CorpusConfig::by_ending(
        vec![
            few.corpus("0.txt", "0123456789").config().paths[0].clone(),
            few.corpus("1.txt", "0123456789").config().paths[0].clone(),
        ],
        "text",
    ));
    let prepared = few.prepare(&[twice.unwrap()], 0.2).unwrap();
    assert_eq!(few.texts(&prepared.train().unwrap()), ["012345", "012345"]);
    assert_eq!(few.texts(&prepared.validation().unwrap()), ["6789"]);
}
