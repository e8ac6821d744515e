//! Documents with prompts: what is stored of them, and which of their tokens are labels.
use super::*;
use crate::corpus::FileOrder;
use crate::loader::{IGNORE_LABEL, Loader, LoaderConfig, Order, Packing};
use crate::test_files::write_parquet_of;
use parquet::basic::Compression;

/// Prompt and text of each document, by the numbers of their tokens; the third prompt is empty.
const ROWS: [(&str, &str); 4] = [("3 2 1", "11 12"), ("4", "13"), ("", "14 15 16"), ("5 <|endoftext|> 6", "17")];

/// A temporary folder with documents that have prompts, as JSONL and as Parquet, and a tokenizer of numbers.
struct Prompted {
    dir: tempfile::TempDir,
    tokenizer: Tokenizer,
}

impl Prompted {
    fn new(rows: &[(&str, &str)]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let line = |(ask, say): &(&str, &str)| format!("{{\"ask\": \"{ask}\", \"say\": \"{say}\"}}\n\n");
        fs::write(dir.path().join("a.jsonl"), rows.iter().map(line).collect::<String>()).unwrap();
        let column = |of: fn(&(&'static str, &'static str)) -> &'static str| ROWS.iter().map(of).collect::<Vec<_>>();
        let columns = [("ask", column(|row| row.0)), ("say", column(|row| row.1))];
        write_parquet_of(&dir.path().join("a.parquet"), &columns, Compression::SNAPPY);
        let tokenizer = Tokenizer::numbers(20).unwrap();
        Self { dir, tokenizer }
    }

    fn config(&self, name: &str) -> CorpusConfig {
        CorpusConfig {
            prompt_column: Some("ask".to_owned()),
            ..CorpusConfig::by_ending(vec![self.dir.path().join(name).to_str().unwrap().to_owned()], "say")
        }
    }

    fn prepare(&self, config: CorpusConfig, fraction: f64) -> Result<Prepared, DataError> {
        let to = replacing(self.dir.path().join("out"), fraction);
        prepare(&[Corpus::open(config)?], &self.tokenizer, &to, &|_| {})
    }
}

#[test]
fn labels_of_prompts_are_ignored_in_packed_rows_as_counted_by_hand() {
    let place = Prompted::new(&ROWS);
    for name in ["a.jsonl", "a.parquet"] {
        // By their hashes none of the four is held out, so the last bytes are; a text after a prompt is not divided.
        let prepared = place.prepare(place.config(name), 0.05).unwrap();
        let train = prepared.train().unwrap();
        let expected = [vec![3, 2, 1, 11, 12, 0], vec![4, 13, 0], vec![14, 15, 16, 0]];
        assert_eq!(documents(&train), expected, "{name}");
        assert_eq!([0, 1, 2].map(|document| train.predicted(document)).concat(), [3..6, 1..3, 0..4]);
        assert_eq!(prepared.meta.train.num_tokens, 13);
        // The bytes of the texts that are predicted: "11 12", "13" and "14 15 16".
        assert_eq!(prepared.meta.train.num_bytes, 15);
        let mut counts = vec![0; 20];
        (11..17).for_each(|token| counts[token] = 1);
        counts[0] = 3;
        assert_eq!(train.token_counts(20).unwrap(), counts);
        let validation = prepared.validation().unwrap();
        // In a prompt, the name of a special token becomes that token.
        assert_eq!(documents(&validation), [[5, 0, 6, 17, 0]]);
        let config = LoaderConfig {
            seq_len: 5,
            order: Order::Sequential,
            packing: Packing::Concatenated,
            vocab_size: 20,
            pad_id: 0,
        };
        let no = IGNORE_LABEL;
        let batch = Loader::new(train.into(), config).unwrap().batch(0, 3).unwrap();
        assert_eq!(batch.tokens, [3, 2, 1, 11, 12, 0, 4, 13, 0, 14, 15, 16, 0, 0, 0]);
        assert_eq!(batch.labels, [no, no, 11, 12, 0, no, 13, 0, no, 15, 16, 0, no, no, no]);
        assert_eq!(batch.num_labels(), 8);
        let one = LoaderConfig { packing: Packing::OneDocumentPerRow, ..config };
        let batch = Loader::new(validation.into(), one).unwrap().batch(0, 1).unwrap();
        assert_eq!(batch.tokens, [5, 0, 6, 17, 0]);
        assert_eq!(batch.labels, [no, no, 17, 0, no]);
    }
}

#[test]
fn equal_texts_after_different_prompts_are_no_duplicates() {
    let place = Prompted::new(&[("1", "7"), ("2", "7"), ("1", "7"), ("3", "8")]);
    let config = CorpusConfig { deduplicate: true, order: FileOrder::Sorted, ..place.config("a.jsonl") };
    let prepared = place.prepare(config, 0.3).unwrap();
    assert_eq!(prepared.meta.report.num_duplicates, 1);
    assert_eq!(prepared.meta.report.num_documents, 3);
}

#[test]
fn missing_prompt_columns_are_refused() {
    let place = Prompted::new(&ROWS);
    let config =
        |column: &str, name: &str| CorpusConfig { prompt_column: Some(column.to_owned()), ..place.config(name) };
    let missing = "no column \"asks\" | prompt_column";
    refusal(place.prepare(config("asks", "a.jsonl"), 0.3), missing);
    refusal(place.prepare(config("asks", "a.parquet"), 0.3), missing);
    fs::write(place.dir.path().join("b.txt"), "1 2").unwrap();
    let words = "b.txt | plain text has no column \"ask\"";
    refusal(place.prepare(config("ask", "b.txt"), 0.3), words);
    // A shard without prompts is refused where documents have prompts.
    let plain = CorpusConfig { prompt_column: None, ..place.config("a.jsonl") };
    let prepared = place.prepare(plain.clone(), 0.3).unwrap();
    refusal(prepared.train().unwrap().with_parts(), "document 0 has 1 sequences");
    let corpora = [plain, place.config("a.jsonl")].map(|config| Corpus::open(config).unwrap());
    let to = holding_out(place.dir.path().join("both"), 0.3);
    let both = prepare(&corpora, &place.tokenizer, &to, &|_| {});
    refusal(both, "prompt_column: some of the corpora have prompts");
}
