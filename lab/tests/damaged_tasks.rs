//! Damaged text files that the lab reads: tasks, their rows, questions, and runs to compare, as in `damaged_texts.rs`.
use crate::damaged_texts::{each, each_file, is_read, quick_dir};
use sieve_data::{BpeConfig, Corpus, CorpusConfig, Tokenizer, read_table};
use sieve_eval::{QaData, Task, TaskRows, TaskRun, TaskTexts};
use sieve_report::{Run, page};
use std::fs;

#[test]
fn damaged_tasks_and_their_rows() {
    let dir = quick_dir();
    let letters = dir.path().join("letters.txt");
    fs::write(&letters, "The cat sees the dog.\n".repeat(50)).expect("writable");
    let corpus = CorpusConfig::text(vec![letters.display().to_string()]);
    let corpus = Corpus::open(corpus).expect("a file");
    let bytes = BpeConfig { vocab_size: 258, sample_bytes: 1000 };
    let tokenizer = Tokenizer::train(&corpus, bytes).expect("a tokenizer");
    let run = TaskRun { fewshot: 1, limit: None, truncate: false };
    let path = dir.path().join("rows.jsonl");
    let rows = "{\"question\": \"1 2\", \"answerKey\": \"B\", \
                \"choices\": {\"text\": [\"3\", \"4 5\"], \"label\": [\"A\", \"B\"]}}\n";
    let rows = [rows.to_owned(), rows.replace("1 2", "6"), rows.replace("1 2", "7")];
    fs::write(&path, rows.concat()).expect("writable");
    let read = || -> Result<TaskRows, sieve_data::DataError> {
        let rows = read_table(&path)?;
        Ok(TaskRows { rows, examples: None })
    };
    let data = read().expect("rows");
    let task = "measure = \"choices\"\nprompt = \"Q {question|strip}\"\nchoices = \"choices.text\"\nlabels = \
        \"choices.label\"\n\
                label = \"{answerKey}\"\ndelimiter = \" \"\nfewshot = 1\n";
    each(task, |bytes| {
        let Ok(text) = std::str::from_utf8(bytes) else {
            return false;
        };
        let task = Task::parse("mine.toml", text);
        match task {
            Ok(task) => {
                is_read(TaskTexts::new(&task, &data, run, None, &tokenizer, 4096), &["mine.toml", "tokenizer", "token"])
            }
            Err(error) => is_read(Err::<(), _>(error), &["mine.toml"]),
        }
    });
    let task = Task::parse("mine.toml", task).expect("a task");
    each_file(&path, || match read() {
        Ok(data) => is_read(
            TaskTexts::new(&task, &data, run, None, &tokenizer, 4096),
            &["mine.toml: row", "mine.toml: 1 examples", "token"],
        ),
        Err(error) => is_read(Err::<(), _>(error), &["rows.jsonl"]),
    });
}

#[test]
fn damaged_questions() {
    let squad = "{\"version\": \"v2.0\", \"data\": [{\"title\": \"T\", \
                 \"paragraphs\": [{\"context\": \"The sky is blue.\", \
                 \"qas\": [{\"question\": \"What colour?\", \"id\": \"1\", \"answers\": [{\"text\": \"blue\", \
                 \"answer_start\": 11}], \"is_impossible\": false}]}]}]}";
    let hotpot = "[{\"question\": \"Who?\", \"answer\": \"Ann\", \"context\": [[\"A\", [\"Ann is.\", \" So.\"]], \
                  [\"B\", [\"Bob is.\"]]], \"supporting_facts\": [[\"A\", 0]]}]";
    for text in [squad, hotpot] {
        QaData::parse("qa.json", text).expect("as it is");
        let read = |text: &str| is_read(QaData::parse("qa.json", text), &["qa.json"]);
        each(text, |bytes| std::str::from_utf8(bytes).is_ok_and(read));
    }
}

#[test]
fn damaged_runs_to_compare() {
    let dir = quick_dir();
    let write = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, text).expect("writable");
        path
    };
    fs::create_dir(dir.path().join("eval")).expect("writable");
    let config = write("config.toml", include_str!("../../recipes/quickstart.toml"));
    let step = |step: u64| {
        format!(
            "{{\"kind\":\"step\",\"step\":{step},\"num_steps\":3,\"loss\":2.5,\"lr\":0.001,\"tokens_seen\":{},\
             \"tokens_per_second\":900.0,\"attention\":{{\"density\":0.4}},\"unix_seconds\":1795239913.5}}\n",
            step * 100
        )
    };
    let validation = "{\"kind\":\"validation\",\"step\":2,\"loss\":2.4,\"perplexity\":11.0,\"bits_per_byte\":1.2}\n";
    let metrics = write("metrics.jsonl", &[&step(1), &step(2), validation, &step(3)].concat());
    let scores = write(
        "eval/tasks.json",
        "{\"checkpoint\": \"a\", \"tasks\": [{\"task\": \"piqa\", \"rows\": 20, \"scores\": {\"acc\": 0.5}}]}",
    );
    for path in [config, metrics, scores] {
        let name = path.file_name().expect("named").to_string_lossy().into_owned();
        each_file(&path, || {
            let run = Run::open(dir.path(), Some("run"));
            let is_run = is_read(run.as_ref().map(|_| ()), &[&name]);
            if let Ok(run) = run {
                is_read(page(vec![run], None).map(|_| ()), &["run"]);
            }
            is_run
        });
    }
}
