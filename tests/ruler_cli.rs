//! `sieve eval ruler` and `sieve data generate` through the program: kinds, selectors, files, and mistakes.
use crate::tiny_run::{TinyRun, json};
use serde_json::Value;
use sieve_testing::says;
use std::fs;

/// Room for the texts in the tiny tokenizer.
const LONGER: &str = "--set model.max_position_embeddings=1024 --set training.steps=4";

const KINDS: [&str; 3] = [
    "kind = \"mha\"",
    "kind = \"dma\"\nkeep_window_size = 16\na_init = 0.5",
    "kind = \"nsa\"\ncompress_block_size = 8\ncompress_stride = 4\ncompress = \"mean\"\nselect_block_size = 8\n\
     num_selected_blocks = 3\nwindow_size = 16",
];

fn trained(attention: &str) -> TinyRun {
    let tiny = TinyRun::new(attention);
    tiny.trained("run", LONGER);
    tiny
}

fn asked(tiny: &TinyRun, more: &str) -> String {
    tiny.prints(&format!("eval ruler --checkpoint run --device cpu {more}"))
}

#[test]
fn ruler_is_asked_of_kinds_with_files_and_a_picture() {
    for attention in KINDS {
        let tiny = trained(attention);
        let what = "--tasks passkey,induce,copy --lengths 1000,900 --samples 3";
        let more = "--json --samples-file s.jsonl --plot p.svg";
        let report = json(&asked(&tiny, &format!("{what} {more}")));
        let tasks = report["methods"][0]["tasks"].as_array().expect("a list");
        let names: Vec<_> = tasks.iter().map(|task| task["task"].as_str()).collect();
        assert_eq!(names, [Some("passkey"), Some("induce"), Some("copy")]);
        let lines = tiny.read("s.jsonl");
        let samples: Vec<Value> = lines.lines().map(json).collect();
        assert_eq!(samples.len(), 3 * 2 * 3);
        for task in tasks {
            let of_task = samples.iter().filter(|one| one["task"] == task["task"]);
            let ranks: Vec<f64> = of_task.map(|one| one["rank"].as_f64().expect("a rank")).collect();
            assert!(ranks.iter().all(|rank| (1.0..=11.0).contains(rank)));
            let mean = ranks.iter().sum::<f64>() / ranks.len() as f64;
            assert!((task["mean_rank"].as_f64().expect("a rank") - mean).abs() < 1e-9);
            let lengths = task["lengths"].as_array().expect("a list");
            assert_eq!(
                (&lengths[0]["length"], &lengths[1]["length"]),
                (&900.into(), &1000.into())
            );
            // The words to copy have no single depth.
            assert_eq!(task["cells"] == Value::Array(Vec::new()), task["task"] == "copy");
        }
        let svg = tiny.read("p.svg");
        assert!(
            svg.ends_with("</svg>\n") && svg.matches("<title>").count() >= 2 * (6 + 2),
            "{svg}"
        );
        // The same question gets the same answer.
        assert_eq!(json(&asked(&tiny, &format!("{what} {more}"))), report);
        let text = asked(&tiny, what);
        says(&text, "passkey | random words");
    }
}

#[test]
fn generated_samples_train_a_model_and_repeat() {
    let tiny = trained(KINDS[0]);
    let tokenizer = fs::read_dir(tiny.path("run/checkpoint")).expect("checkpoints");
    let tokenizer = tokenizer.map(|entry| entry.expect("readable").path().join("tokenizer.json"));
    let tokenizer = tokenizer.into_iter().find(|path| path.is_file()).expect("a tokenizer");
    let generate = |out: &str, seed: usize| {
        let command = format!(
            "data generate --tasks passkey,induce,kv_retrieval --tokenizer {} --samples 30 --min-length 700 \
             --max-length 900 --seed {seed} \
             --out {out}",
            tokenizer.display()
        );
        tiny.prints(&command);
        tiny.read(out)
    };
    let text = generate("a.jsonl", 1);
    assert_eq!(text, generate("b.jsonl", 1));
    assert_ne!(text, generate("c.jsonl", 2));
    let rows: Vec<Value> = text.lines().map(json).collect();
    assert_eq!(rows.len(), 30);
    for row in &rows {
        let part = |name: &str| row[name].as_str().expect("a text").to_owned();
        assert_eq!(part("text"), format!("{} {}", part("prompt"), part("answer")));
        let length = row["length"].as_u64().expect("a number");
        assert!((700..=900).contains(&length) && length != 768);
    }
    let command = format!(
        "--set data.paths=[\"{}\"] --set data.format=\"jsonl\" --set training.steps=4",
        "a.jsonl"
    );
    tiny.trained("again", &command);
}
