//! Chats: what is stored of them, which of their tokens are labels, and what is refused.
use super::*;
use crate::chat::{ChatError, ChatFormat, ChatText};
use crate::loader::{IGNORE_LABEL, Loader, LoaderConfig, Order, Packing};
use crate::test_files::write_column;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use std::sync::Arc;

/// A template that writes a role as a number and a message as it is; an answer ends with `9`, and the column `last` is
/// written behind all. It refuses the message `17`, and its hash is the number in it.
#[derive(Debug)]
struct Numbers(u128);

impl ChatFormat for Numbers {
    fn columns(&self) -> Vec<String> {
        vec!["last".to_owned()]
    }

    fn text(&self, row: &str) -> Result<ChatText, ChatError> {
        let row: serde_json::Value = serde_json::from_str(row).unwrap();
        let mut found = ChatText::default();
        for message in row["messages"].as_array().unwrap() {
            let [role, content] = ["role", "content"].map(|key| message[key].as_str().unwrap());
            if content == "17" {
                let (what, hint) = ("it takes no 17".to_owned(), "leave it out: skip_invalid".to_owned());
                return Err(ChatError { what, hint, is_of_template: false });
            }
            let is_answer = role == "assistant";
            found.text += if is_answer { " 8 " } else { " 7 " };
            let start = found.text.len();
            found.text += content;
            if is_answer {
                found.text += " 9";
                found.answers.push(start..found.text.len());
            }
        }
        found.text += &row.get("last").map(|last| format!(" {}", last.as_str().unwrap())).unwrap_or_default();
        Ok(found)
    }

    fn hash(&self) -> u128 {
        self.0
    }

    fn marks_answers(&self) -> bool {
        true
    }
}

/// (role, content) of each chat's messages.
type Chats<'a> = &'a [&'a [(&'a str, &'a str)]];

const CHATS: Chats = &[
    &[("user", "1 2"), ("assistant", "11"), ("user", "3"), ("assistant", "12 13")],
    &[("assistant", "14"), ("user", "4")],
    &[("system", "5"), ("user", "6"), ("assistant", "15")],
];

/// A temporary folder with chats, and a tokenizer of numbers.
struct Place {
    dir: tempfile::TempDir,
    tokenizer: Tokenizer,
}

impl Place {
    /// The chats as JSON lines, with a column that is not read, and as Parquet.
    fn new(chats: Chats) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let line = |chat: &&[(&str, &str)]| {
            let messages = chat.iter().map(|(role, content)| serde_json::json!({"content": content, "role": role}));
            let messages = messages.collect::<Vec<_>>();
            format!("{}\n", serde_json::json!({"id": 3, "messages": messages}))
        };
        fs::write(dir.path().join("a.jsonl"), chats.iter().map(line).collect::<String>()).unwrap();
        write_parquet(&dir.path().join("a.parquet"), chats);
        Self { dir, tokenizer: Tokenizer::numbers(20).unwrap() }
    }

    fn config(&self, name: &str) -> CorpusConfig {
        CorpusConfig {
            messages_column: Some("messages".to_owned()),
            ..CorpusConfig::by_ending(vec![self.dir.path().join(name).to_str().unwrap().to_owned()], "text")
        }
    }

    fn prepare_with(&self, config: CorpusConfig, template: u128, on_change: OnChange) -> Result<Prepared, DataError> {
        let corpus = Corpus::open(config)?.with_chats(Some(Arc::new(Numbers(template))));
        let to = PrepareConfig { on_change, ..holding_out(self.dir.path().join("out"), 0.05) };
        prepare(&[corpus], &self.tokenizer, &to, &|_| {})
    }

    fn prepare(&self, config: CorpusConfig) -> Result<Prepared, DataError> {
        self.prepare_with(config, 1, OnChange::Replace)
    }
}

/// Writes a column `id` of numbers as texts, and `messages`, a list of groups.
fn write_parquet(path: &Path, chats: Chats) {
    let schema = "message row { required binary id (UTF8); optional group messages (LIST) { repeated group list { \
                  optional group element { optional binary content (UTF8); optional binary role (UTF8); } } } }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let file = fs::File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Default::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let text = |text: &str| ByteArray::from(text.as_bytes().to_vec());
    write_column::<ByteArrayType>(&mut group, &vec![text("3"); chats.len()], None, None);
    let turns = chats.iter().flat_map(|chat| chat.iter());
    let repetition = chats.iter().flat_map(|chat| (0..chat.len()).map(|at| i16::from(at > 0))).collect::<Vec<_>>();
    // The definition level of a value that is not null: four optional or repeated fields lead to it.
    let levels = vec![4; repetition.len()];
    for column in [turns.clone().map(|turn| text(turn.1)).collect::<Vec<_>>(), turns.map(|turn| text(turn.0)).collect()]
    {
        write_column::<ByteArrayType>(&mut group, &column, Some(&levels), Some(&repetition));
    }
    group.close().unwrap();
    writer.close().unwrap();
}

#[test]
fn labels_of_chats_are_the_answers_in_packed_rows_and_alone() {
    let place = Place::new(CHATS);
    for name in ["a.jsonl", "a.parquet"] {
        // By their hashes none of the three is held out, so the last bytes are; a chat is not divided.
        let prepared = place.prepare(place.config(name)).unwrap();
        let train = prepared.train().unwrap();
        let expected = [vec![7, 1, 2, 8, 11, 9, 7, 3, 8, 12, 13, 9], vec![8, 14, 9, 7, 4]];
        assert_eq!(documents(&train), expected, "{name}");
        assert_eq!([0, 1].map(|document| train.predicted(document)).concat(), [4..6, 9..12, 1..3]);
        let meta = &prepared.meta;
        assert_eq!((meta.train.num_tokens, meta.train.num_predicted), (17, Some(7)));
        // Bytes of "11 9", "12 13 9" and "14 9".
        assert_eq!((meta.train.num_bytes, meta.validation.num_bytes), (15, 4));
        assert_eq!(meta.chats, Some(ChatsMeta { template_hash: hex(1), marks_answers: true }));
        let config = LoaderConfig {
            seq_len: 8,
            order: Order::Sequential,
            packing: Packing::Concatenated,
            vocab_size: 20,
            pad_id: 0,
        };
        let no = IGNORE_LABEL;
        let train = Arc::new(train);
        let batch = Loader::new(train.clone(), config).unwrap().batch(0, 2).unwrap();
        assert_eq!(batch.tokens, [7, 1, 2, 8, 11, 9, 7, 3, 8, 12, 13, 9, 8, 14, 9, 7]);
        assert_eq!(batch.labels, [no, no, no, 11, 9, no, no, no, 12, 13, 9, no, 14, 9, no, no]);
        assert_eq!(batch.doc_start[8..], [0, 0, 0, 0, 4, 4, 4, 4]);
        let one = LoaderConfig { seq_len: 12, packing: Packing::OneDocumentPerRow, ..config };
        let batch = Loader::new(train.clone(), one).unwrap().batch(0, 2).unwrap();
        assert_eq!(batch.labels[..12], [no, no, no, 11, 9, no, no, no, 12, 13, 9, no]);
        assert_eq!(batch.labels[12..], [14, 9, no, no, no, no, no, no, no, no, no, no]);
        let mut counts = vec![0; 20];
        (11..15).for_each(|token| counts[token] = 1);
        counts[9] = 3;
        assert_eq!(train.token_counts(20).unwrap(), counts);
        assert_eq!(documents(&prepared.validation().unwrap()), [[7, 5, 7, 6, 8, 15, 9]]);
    }
}

#[test]
fn a_moved_bound_of_predicted_tokens_is_found_by_its_checksum() {
    let place = Place::new(CHATS);
    let prepared = place.prepare(place.config("a.jsonl")).unwrap();
    prepared.verify().unwrap();
    // The bound between two neighbouring parts moves by a token: the file is a shard, but not the one that was
    // prepared. The header has 34 bytes, among them the number of sequences; 4-byte lengths and 8-byte pointers follow.
    let path = prepared.dir.join("train.idx");
    let mut idx = fs::read(&path).unwrap();
    let num_sequences = u64::from_le_bytes(idx[18..26].try_into().unwrap()) as usize;
    let pointers = 34 + 4 * num_sequences;
    (idx[34], idx[38]) = (idx[34] + 1, idx[38] - 1);
    idx[pointers + 8] += 2;
    fs::write(&path, idx).unwrap();
    assert_eq!(prepared.train().unwrap().predicted(0)[0], 5..6);
    refusal(prepared.verify(), "train.idx | its bytes are not those that were prepared");
}

#[test]
fn data_of_another_chat_template_is_not_reused() {
    let place = Place::new(CHATS);
    place.prepare(place.config("a.jsonl")).unwrap();
    let again = |template| place.prepare_with(place.config("a.jsonl"), template, OnChange::Refuse);
    assert!(again(1).unwrap().reused);
    refusal(again(2), "the chat template changed");
}

#[test]
fn invalid_chats_are_refused_or_left_out() {
    let place = Place::new(&[CHATS[0], CHATS[1], &[("user", "17"), ("assistant", "1")], CHATS[2]]);
    for (name, row) in [("a.jsonl", "line 3"), ("a.parquet", "row 3")] {
        let words = format!("{name} | {row}: column \"messages\": it takes no 17 | hint: | skip_invalid");
        refusal(place.prepare(place.config(name)), &words);
        let lenient = CorpusConfig { skip_invalid: true, ..place.config(name) };
        let prepared = place.prepare(lenient).unwrap();
        assert_eq!((prepared.meta.report.num_documents, prepared.meta.report.num_invalid), (3, 1));
    }
    let write = |line: &str| fs::write(place.dir.path().join("b.jsonl"), line).unwrap();
    let refused = |line: &str, words: &str| {
        write(line);
        refusal(place.prepare(place.config("b.jsonl")), &format!("b.jsonl | {words} | hint:"));
    };
    refused("{\"text\": \"a\"}", "line 1 has no column \"messages\" (it has [\"text\"]) | data.messages_column");
    refused("{\"messages\": \"a\"}", "line 1: column \"messages\" is a string, not a list of messages");
    fs::write(place.dir.path().join("c.txt"), "1 2").unwrap();
    refusal(place.prepare(place.config("c.txt")), "plain text has no column \"messages\" | messages_column");
    let no_column = CorpusConfig { messages_column: Some("id".to_owned()), ..place.config("a.parquet") };
    refusal(place.prepare(no_column), "column \"id\" holds BYTE_ARRAY, not lists of messages");
    let no_column = CorpusConfig { messages_column: Some("chat".to_owned()), ..place.config("a.parquet") };
    refusal(place.prepare(no_column), "no column \"chat\" (it has [\"id\", \"messages\"])");
    for name in ["a.jsonl", "a.parquet"] {
        let text = CorpusConfig { messages_column: None, ..place.config(name) };
        refusal(
            place.prepare(text),
            "no column \"text\" | hint: chats are for a model with a chat template: sieve import --from",
        );
    }
    // Without a template nothing says what the text is.
    let corpus = Corpus::open(place.config("a.jsonl")).unwrap();
    let to = replacing(place.dir.path().join("out"), 0.05);
    refusal(prepare(&[corpus], &place.tokenizer, &to, &|_| {}), "messages_column: | no chat template");
}

/// What the template names beside the messages is read from the row, in lines and in Parquet.
#[test]
fn columns_that_the_template_names_are_read_beside_the_messages() {
    let place = Place::new(CHATS);
    let answers = ["10", "11", "12", "13", "14", "15"];
    let line = |answer: &&str| {
        let messages = [serde_json::json!({"role": "assistant", "content": answer})];
        format!("{}\n", serde_json::json!({"last": "16", "id": [1], "messages": messages}))
    };
    fs::write(place.dir.path().join("b.jsonl"), answers.iter().map(line).collect::<String>()).unwrap();
    let schema = "message row { required binary last (UTF8); optional group messages (LIST) { repeated group list { \
                  optional group element { optional binary content (UTF8); optional binary role (UTF8); } } } }";
    let path = place.dir.path().join("b.parquet");
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut writer = SerializedFileWriter::new(fs::File::create(&path).unwrap(), schema, Default::default()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let bytes = |text: &str| ByteArray::from(text.as_bytes().to_vec());
    write_column::<ByteArrayType>(&mut group, &vec![bytes("16"); answers.len()], None, None);
    for column in [answers.map(bytes), answers.map(|_| bytes("assistant"))] {
        write_column::<ByteArrayType>(&mut group, &column, Some(&[4; 6]), Some(&[0; 6]));
    }
    group.close().unwrap();
    writer.close().unwrap();
    for name in ["b.jsonl", "b.parquet"] {
        let prepared = place.prepare(place.config(name)).unwrap();
        let mut found = documents(&prepared.train().unwrap());
        found.extend(documents(&prepared.validation().unwrap()));
        found.sort();
        assert_eq!(found, [10, 11, 12, 13, 14, 15].map(|answer| [8, answer, 9, 16]), "{name}");
    }
}

/// A preparation that is stopped after a source file continues with the bounds of answers that it has kept.
#[test]
fn an_interrupted_preparation_ends_with_the_same_bounds() {
    let place = Place::new(CHATS);
    for (file, name) in ["a.jsonl", "b.jsonl", "c.jsonl"].iter().enumerate() {
        let line = |ask: usize| {
            let message = |role: &str, content: String| serde_json::json!({"role": role, "content": content});
            let chat =
                [message("user", format!("{} {}", file + 1, ask + 1)), message("assistant", "11 ".repeat(ask) + "12")];
            format!("{}\n", serde_json::json!({"messages": chat}))
        };
        fs::write(place.dir.path().join(name), (0..9).map(line).collect::<String>()).unwrap();
    }
    // `None` if the preparation is stopped, by a panic in call number `stop` of the progress callback.
    let prepare_in = |out: &str, stop: u32| {
        let corpus = Corpus::open(place.config("*.jsonl")).unwrap().with_chats(Some(Arc::new(Numbers(1))));
        let to = holding_out(place.dir.path().join(out), 0.3);
        let calls = std::cell::Cell::new(0);
        let count = |progress| {
            calls.set(calls.get() + u32::from(progress != Progress::Waiting));
            assert!(calls.get() < stop, "stop here");
        };
        let pace = Pace { batch_bytes: 1, keep_bytes: 1 };
        let run = || prepare_at_pace(&[corpus], &place.tokenizer, &to, &count, pace).unwrap();
        let run = std::panic::AssertUnwindSafe(run);
        std::panic::catch_unwind(run).ok()
    };
    let whole = prepare_in("whole", u32::MAX).unwrap();
    for stop in [5, 7, 9] {
        let out = format!("cut{stop}");
        assert!(prepare_in(&out, stop).is_none());
        let continued = prepare_in(&out, u32::MAX).unwrap();
        assert_eq!(continued.meta, whole.meta, "{stop}");
        continued.verify().unwrap();
    }
    assert!(whole.meta.train.num_predicted.is_some_and(|num_predicted| num_predicted > 10));
}
