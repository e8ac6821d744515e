//! `sieve data prepare`, `sieve tokenizer train`, and runs on mixtures, Parquet and MQAR.
use crate::tiny_run::{TinyRun, refused, succeed};
use flate2::write::GzEncoder;
use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
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

/// Two documents of another source.
pub(crate) fn mixture(tiny: &TinyRun) {
    let texts = ["other words. ".repeat(40), "more of them. ".repeat(50)];
    write_parquet(&tiny.path("other.parquet"), &texts);
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
