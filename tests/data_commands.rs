//! `sieve data prepare`, `sieve tokenizer train`, and runs on mixtures, Parquet and MQAR.
use crate::tiny_run::{TinyRun, refused, succeed};
use flate2::write::GzEncoder;
use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use sieve_testing::{cases, parts};
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

fn write_parquet(path: &Path, texts: &[String]) {
    let schema = parse_message_type("message schema { REQUIRED BYTE_ARRAY text (UTF8); }");
    let schema = Arc::new(schema.expect("a schema"));
    let properties = WriterProperties::builder().set_compression(Compression::SNAPPY);
    let properties = Arc::new(properties.build());
    let file = fs::File::create(path).expect("writable");
    let mut writer = SerializedFileWriter::new(file, schema, properties).expect("a writer");
    let values = texts.iter().map(|text| ByteArray::from(text.as_str()));
    let values: Vec<ByteArray> = values.collect();
    let mut group = writer.next_row_group().expect("a row group");
    let mut column = group.next_column().expect("a column").expect("the first");
    let typed = column.typed::<ByteArrayType>();
    typed.write_batch(&values, None, None).expect("values");
    column.close().expect("closed");
    group.close().expect("closed");
    writer.close().expect("closed");
}

/// The tiny corpus three ways: as Parquet, as packed JSON lines, and as it is.
pub(crate) fn formats(tiny: &TinyRun) {
    let files = tiny.names("corpus").into_iter();
    let texts: Vec<String> = files.map(|name| tiny.read(&format!("corpus/{name}"))).collect();
    write_parquet(&tiny.path("half.parquet"), &texts[..30]);
    let packed = fs::File::create(tiny.path("half.jsonl.gz")).expect("writable");
    let mut packed = GzEncoder::new(packed, flate2::Compression::default());
    for text in &texts[30..] {
        let line = serde_json::json!({ "text": text }).to_string();
        writeln!(packed, "{line}").expect("writable");
    }
    packed.finish().expect("writable");
}

pub(crate) fn shards(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).expect("a folder");
    entries
        .map(|entry| entry.expect("readable"))
        .map(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            (name, fs::read(entry.path()).unwrap_or_default())
        })
        .collect()
}

const PREPARE: &str = "data prepare --recipe tiny.toml --data-dir";

#[test]
fn prepared_ahead_is_found_by_the_run() {
    let tiny = TinyRun::dma();
    let first = succeed(tiny.sieve(PREPARE).arg("shards"));
    assert!(first.contains("wrote shards") && first.contains("train:") && first.contains("validation:"));
    let before = shards(&tiny.path("shards"));
    let again = succeed(tiny.sieve(PREPARE).arg("shards"));
    assert!(again.contains("found shards"), "{again}");
    let cache = "--set data.cache_dir=shards --set training.steps=4";
    let run = succeed(&mut tiny.train("run", cache));
    assert!(run.contains("data: found"), "{run}");
    let batch = "data batch --recipe tiny.toml --data-dir shards --step 2 --out b.safetensors";
    tiny.prints(batch);
    assert_eq!(shards(&tiny.path("shards")), before);
    assert!(before.keys().all(|name| !name.ends_with(".tmp")), "{before:?}");
}

#[test]
fn files_of_a_folder_that_are_passed_over_are_counted() {
    let tiny = TinyRun::dma();
    let folder = "--set data.paths=[\"corpus\"] --set training.steps=4";
    let whole = succeed(&mut tiny.train("whole", folder));
    assert!(!whole.contains("passed over"), "{whole}");
    fs::create_dir(tiny.path("corpus/more")).expect("writable");
    for name in ["a.png", "more/b.png", "c.bin", ".hidden", "more/LICENSE"] {
        fs::write(tiny.path("corpus").join(name), "no text").expect("writable");
    }
    let words = "60 files read, 4 passed over: .png, no ending, .bin";
    let run = succeed(&mut tiny.train("run", folder));
    assert!(run.contains(&format!("data: {words}\n")), "{run}");
    let prepared = succeed(tiny.sieve(PREPARE).args(["shards", "--set", "data.paths=[\"corpus\"]"]));
    assert!(prepared.contains(words), "{prepared}");
}

#[test]
fn a_resumed_run_says_that_its_text_has_changed() {
    let tiny = TinyRun::dma();
    tiny.trained("run", "--set training.steps=4");
    let words = "data: the text files have changed or are gone";
    let goes_on = |steps: usize| {
        let steps = format!("--resume --set training.steps={steps}");
        succeed(&mut tiny.train("run", &steps));
        tiny.read("run/log").matches(words).count()
    };
    assert_eq!(goes_on(8), 0);
    // One file grows, one comes; then all are gone.
    fs::write(tiny.path("corpus/00.txt"), "other words").expect("writable");
    fs::write(tiny.path("corpus/new.txt"), "more words").expect("writable");
    assert_eq!(goes_on(12), 1);
    fs::remove_dir_all(tiny.path("corpus")).expect("removed");
    assert_eq!(goes_on(16), 2);
}

#[test]
fn killed_at_any_moment_and_asked_again_it_writes_the_same_shards() {
    let tiny = TinyRun::dma();
    // Enough text that it takes a moment.
    for copy in 0..20 {
        let text = tiny.read("corpus/29.txt");
        let text: String = (0..40).map(|n| format!("{copy} {n} {text}")).collect();
        tiny.write(&format!("corpus/more{copy}.txt"), text);
    }
    succeed(tiny.sieve(PREPARE).arg("whole"));
    let whole = shards(&tiny.path("whole"));
    let mut num_killed = 0;
    for wait_ms in [5, 20, 40, 70, 100, 140, 200, 300, 450] {
        let mut child = tiny.sieve(PREPARE);
        let child = child.arg("killed").stdout(std::process::Stdio::null());
        let mut child = child.spawn().expect("the program starts");
        std::thread::sleep(Duration::from_millis(wait_ms));
        num_killed += u32::from(child.try_wait().expect("a child").is_none());
        child.kill().expect("killed");
        child.wait().expect("ended");
    }
    assert!(num_killed > 0);
    succeed(tiny.sieve(PREPARE).arg("killed"));
    let mut killed = shards(&tiny.path("killed"));
    let mut whole = whole;
    for files in [&mut killed, &mut whole] {
        // The training of the tokenizer leaves a mark with the time it was made from; the mark is not part of the data.
        files.remove("tokenizer.lock");
    }
    assert_eq!(killed, whole);
}

#[test]
fn parquet_and_packed_lines_give_the_documents_of_the_files() {
    let tiny = TinyRun::dma();
    formats(&tiny);
    let prepare = |name: &str, sets: &[&str]| {
        let mut command = tiny.sieve(PREPARE);
        command.arg(name).args(["--set", "tokenizer.path=t.json"]);
        for set in sets {
            command.args(["--set", set]);
        }
        succeed(&mut command);
        shards(&tiny.path(name))
    };
    let train = "tokenizer train --recipe tiny.toml --out t.json";
    let said = tiny.prints(train);
    assert!(said.contains("wrote t.json: 300 tokens"), "{said}");
    let text = prepare("text", &["data.paths=[\"corpus/[012]?.txt\"]"]);
    let parquet = ["data.format=parquet", "data.paths=[\"*.parquet\"]"];
    let parquet = prepare("parquet", &parquet);
    let text_half = prepare("text_half", &["data.paths=[\"corpus/[345]?.txt\"]"]);
    let lines = ["data.format=jsonl", "data.paths=[\"half.jsonl.gz\"]"];
    let lines = prepare("lines", &lines);
    for (found, wanted) in [(parquet, text), (lines, text_half)] {
        for name in ["train.bin", "train.idx", "validation.bin", "validation.docs.json"] {
            assert!(found[name] == wanted[name], "{name}");
        }
    }
}

/// Makes the run `cut` of the run `whole`, as if it had been killed after this step's checkpoint.
fn cut_back(tiny: &TinyRun, last_step: u64) {
    let copied = std::process::Command::new("cp")
        .args(["-r", "whole", "cut"])
        .current_dir(tiny.path(""))
        .status();
    assert!(copied.expect("cp starts").success());
    for name in tiny.names("cut/checkpoint") {
        let step = name.strip_prefix("step-").and_then(|step| step.parse::<u64>().ok());
        if step.is_some_and(|step| step > last_step) {
            fs::remove_dir_all(tiny.path("cut/checkpoint").join(name)).expect("removable");
        }
    }
    assert!(tiny.path(&format!("cut/checkpoint/step-{last_step}")).exists());
}

#[test]
fn a_run_on_a_weighted_mixture_resumes_exactly() {
    let tiny = TinyRun::dma();
    formats(&tiny);
    write_parquet(
        &tiny.path("other.parquet"),
        &["other words. ".repeat(40), "more of them. ".repeat(50)],
    );
    let sets = "--set data.format=parquet --set data.paths=[\"half.parquet\",\"other.parquet\"] \
                --set data.weights=[0.75,0.25] --set data.validation_fraction=0.3";
    tiny.trained("whole", sets);
    cut_back(&tiny, 32);
    succeed(&mut tiny.train("cut", &format!("{sets} --resume")));
    tiny.assert_same_end("cut", "whole");
    assert!(tiny.path("whole/data/train-001.idx").exists());
    // Other weights are other data.
    let other = sets.replace("0.75,0.25", "0.5,0.5");
    let mut command = tiny.train("cut", &format!("{other} --resume --set training.steps=60"));
    refused(&mut command, "data.weights");
}

#[test]
fn a_run_on_answers_to_prompts_resumes_exactly() {
    let tiny = TinyRun::dma();
    let line = |number: usize| {
        let ask = format!("what is {number} and {}", number + 1);
        serde_json::json!({ "ask": ask, "say": format!("it is {}", 2 * number + 1) }).to_string() + "\n"
    };
    tiny.write("rows.jsonl", (0..400).map(line).collect::<String>());
    let sets = "--set data.paths=[\"rows.jsonl\"] --set data.text_column=say --set data.prompt_column=ask \
                --set data.validation_fraction=0.1";
    tiny.trained("whole", sets);
    cut_back(&tiny, 32);
    succeed(&mut tiny.train("cut", &format!("{sets} --resume")));
    tiny.assert_same_end("cut", "whole");
    // Bytes of the answers alone are validated on: "it is 1" has 7.
    let meta = tiny.json("whole/data/meta.json");
    let validation = &meta["validation"];
    let [documents, bytes] = ["num_documents", "num_bytes"].map(|key| validation[key].as_u64().expect("a count"));
    assert!((7 * documents..=9 * documents).contains(&bytes), "{validation}");
    tiny.prints(&format!(
        "data batch --recipe tiny.toml --data-dir whole/data --step 1 --out b.safetensors {sets}"
    ));
    let file = sieve_hf::TensorFile::open(&tiny.path("b.safetensors")).expect("a file");
    let labels = file.any_tensor("labels").expect("written").convert::<i32>();
    let labels: Vec<i32> = labels.to_vec().expect("converted");
    let share = labels.iter().filter(|label| **label >= 0).count() as f64 / labels.len() as f64;
    // An answer and its end are less than half of a document's tokens.
    assert!((0.05..0.6).contains(&share), "{share}");
    let mut other = tiny.train("cut", &format!("{sets} --resume --set data.prompt_column=say"));
    refused(&mut other, "data.prompt_column");
    let mut of_text = tiny.train("text", "--set data.prompt_column=ask");
    refused(&mut of_text, "00.txt: plain text has no column \"ask\"");
}

const MQAR: &str = "--set tokenizer.numbers=64 --set training.one_document_per_row=false --set \
    data.validation_fraction=0.5";

/// `tiny.toml` with a synthetic task for its text.
fn mqar_recipe(tiny: &TinyRun) {
    let recipe = tiny.read("tiny.toml");
    let data = "format = \"mqar\"\nmqar \
        = { vocab_size = 64, seq_lens = [32, 16], num_pairs = [4, 2], num_samples = [500, 100], num_test_samples = 20 \
        }";
    let recipe = recipe.replace("paths = [\"corpus/*.txt\"]", data);
    tiny.write("tiny.toml", recipe);
}

#[test]
fn a_run_on_mqar_needs_no_files_and_resumes_exactly() {
    let tiny = TinyRun::dma();
    mqar_recipe(&tiny);
    fs::remove_dir_all(tiny.path("corpus")).expect("the corpus goes");
    tiny.trained("whole", MQAR);
    let first = &tiny.metrics("whole", "validation")[&0]["loss"];
    let loss = first.as_f64().expect("a loss");
    assert!((loss - 64f64.ln()).abs() < 0.3, "{loss}");
    cut_back(&tiny, 32);
    succeed(&mut tiny.train("cut", &format!("{MQAR} --resume")));
    tiny.assert_same_end("cut", "whole");
    let batch = format!("data batch --recipe tiny.toml --step 1 --out b.safetensors {MQAR}");
    tiny.prints(&batch);
    let prepare = format!("data prepare --recipe tiny.toml {MQAR}");
    tiny.refuses(&prepare, "mqar | nothing to prepare");
    // Continuing a line of numbers.
    let mut generate = tiny.sieve("generate --checkpoint whole/checkpoint/step-40");
    succeed(generate.args(["--prompt", "5 40 5", "--max-new-tokens", "2"]));
}

#[test]
fn bad_data_is_told_and_changes_nothing() {
    let tiny = TinyRun::dma();
    formats(&tiny);
    let whole = fs::read(tiny.path("half.jsonl.gz")).expect("packed");
    let mut damaged = whole.clone();
    let middle = damaged.len() / 2;
    damaged[middle..middle + 40].iter_mut().for_each(|byte| *byte ^= 0x3C);
    tiny.write("damaged.jsonl.gz", damaged);
    tiny.write("cut.jsonl.gz", &whole[..middle]);
    tiny.write("none.parquet", "no parquet");
    tiny.write("two.toml", fs::read(tiny.path("tiny.toml")).expect("readable"));
    for [sets, words] in cases(
        r#"
        data.format=parquet | data.paths=["half.parquet"] | data.text_column=body => \
            half.parquet | no column "body" | ["text"] | text_column
        data.format=parquet | data.paths=["none.parquet"] => none.parquet | not a readable Parquet file
        data.format=jsonl | data.paths=["damaged.jsonl.gz"] => damaged.jsonl.gz | damaged after | gzip | fetch or pack
        data.format=jsonl | data.paths=["cut.jsonl.gz"] => cut.jsonl.gz | damaged after | gzip
        data.format=parquet | data.paths=["hf://datasets/me/texts"] => \
            data set me/texts at http://127.0.0.1:1 | HF_TOKEN | check the name
        data.format=parquet | data.paths=["hf://datasets/me"] => hf://datasets/me | OWNER/NAME
    "#,
    ) {
        let mut command = tiny.sieve(PREPARE);
        command.arg("new").env("HF_ENDPOINT", "http://127.0.0.1:1");
        for set in &parts(sets) {
            command.args(["--set", set]);
        }
        refused(&mut command, words);
        assert!(!tiny.path("new/meta.json").exists());
    }
    // Shards of another tokenizer, or of other text, stay.
    succeed(tiny.sieve(PREPARE).arg("shards"));
    let before = shards(&tiny.path("shards"));
    let train = "tokenizer train --data corpus --vocab-size 280 --out other.json";
    tiny.prints(train);
    for [set, words] in cases(
        r#"
        tokenizer.path=other.json => shards | the tokenizer changed
        data.max_bytes=50000 => shards | other files or with other settings
        data.validation_fraction=0.2 => shards | the validation documents changed
    "#,
    ) {
        refused(tiny.sieve(PREPARE).args(["shards", "--set", set]), words);
        let run = format!("--set data.cache_dir=shards --set {set}");
        refused(&mut tiny.train("run", &run), words);
        assert_eq!(shards(&tiny.path("shards")), before, "{set}");
    }
    let replaced = ["shards", "--replace", "--set", "tokenizer.path=other.json"];
    succeed(tiny.sieve(PREPARE).args(replaced));
    assert_ne!(shards(&tiny.path("shards"))["train.bin"], before["train.bin"]);
}

#[test]
fn bad_tokenizer_commands_are_refused() {
    let tiny = TinyRun::dma();
    tiny.refuses_each(
        "tokenizer train",
        r#"
        --out t.json => --recipe
        --data corpus --out t.json => --vocab-size is missing
        --data corpus --vocab-size 257 --out t.json => vocab_size | 258
        --data nothing --vocab-size 300 --out t.json => nothing | matches no file
        --data corpus --vocab-size 300 --out corpus => --out corpus is a folder
        --data corpus --vocab-size 300 --out no/t.json => no/t.json
        --data corpus --vocab-size 60000 --out t.json => gives only | lower vocab_size
        --data corpus --recipe tiny.toml --out t.json => cannot be used with
        --data corpus --format csv --vocab-size 300 --out t.json => csv | parquet
    "#,
    );
}
