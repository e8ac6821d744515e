//! Corpora with too few documents to hold whole ones out: the end of the text is held out.

use super::*;
use sieve_testing::refusal;

/// One corpus for each file, in a folder of its own.
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
    // None of these is held out by its hash.
    let lines = ["aaaa", "bbbb", "cccc", "dddd"].map(|text| format!("{{\"text\": \"{text}\"}}\n"));
    let corpus = || few.corpus("few.jsonl", &lines.concat());
    refusal(few.prepare(&[corpus()], 0.01), "[validation] paths");
    let prepared = few.prepare(&[corpus()], 0.1).unwrap();
    assert!(prepared.meta.is_cut);
    assert_eq!(few.texts(&prepared.train().unwrap()), ["aaaa", "bbbb", "cccc", "dd"]);
    assert_eq!(few.texts(&prepared.validation().unwrap()), ["dd"]);
}

#[test]
fn each_corpus_of_a_mixture_is_cut_where_none_has_a_document_to_spare() {
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
fn a_corpus_of_one_document_is_held_out_of_beside_one_of_many() {
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
    // Whole documents of the other, as without the first.
    let alone = few.prepare(&corpora[1..], 0.2).unwrap();
    assert_eq!(held_out[1..], few.texts(&alone.validation().unwrap()));
    assert!(!alone.meta.is_cut && (20..60).contains(&(held_out.len() - 1)));
}

#[test]
fn enough_documents_are_not_cut() {
    let place = Place::new();
    assert!(!place.prepare(&place.config()).unwrap().meta.is_cut);
    let meta = fs::read_to_string(place.out().join("meta.json")).unwrap();
    assert!(!meta.contains("is_cut"), "{meta}");
}

// The shards of a corpus that has documents to hold out are those that every earlier version wrote.
#[test]
fn the_split_by_hash_is_as_it_ever_was() {
    let place = Place::new();
    let meta = place.prepare(&place.config()).unwrap().meta;
    let wanted = ["11b25e38365ca88d1f1e649a97d0f3fe", "c2174e893b9113c194fe93ff7dc355ed"];
    assert_eq!([meta.train, meta.validation].map(|split| split.tokens_hash), wanted);
}
