//! Every mistake gets a message that says what, where and how to fix it, and changes no file.
use crate::tiny_run::{TinyRun, refused, succeed};
use std::fs;
use std::process::Command;

/// `sieve train` of the tiny recipe into `run`, with one `--set`.
fn train_with(tiny: &TinyRun, set: &str) -> Command {
    // Not through the second argument, which splits at spaces.
    let mut command = tiny.train("run", "");
    command.args(["--set", set]);
    command
}

#[test]
fn all_mistakes_of_a_recipe_are_told_with_their_lines() {
    let tiny = TinyRun::dma();
    let text = tiny.read("tiny.toml");
    let text = text
        .replace("seed = 3", "sed = 3")
        .replace("tokens = 256", "tokens = \"two\"");
    tiny.write("wrong.toml", &text);
    let line = |key: &str| {
        let number = text.lines().position(|line| line.starts_with(key)).expect(key) + 1;
        format!("line {number}")
    };
    tiny.refuses(
        "train --recipe wrong.toml --out run",
        &format!(
            "wrong.toml | 2 mistakes | {} | did you mean seed? | {}",
            line("sed = "),
            line("tokens = \"two\"")
        ),
    );
}

#[test]
fn data_that_cannot_be_read_leave_no_run() {
    let tiny = TinyRun::dma();
    fs::create_dir(tiny.path("blank")).expect("writable");
    tiny.write("blank/a.txt", "");
    fs::create_dir(tiny.path("short")).expect("writable");
    for name in ["a", "b", "c", "d", "e", "f", "g", "h"] {
        fs::write(tiny.path("short").join(format!("{name}.txt")), name.repeat(3)).expect("writable");
    }
    fs::create_dir(tiny.path("latin")).expect("writable");
    tiny.write("latin/a.txt", b"caf\xe9 au lait");
    tiny.write("lines.jsonl", "{\"text\": \"one\"}\n{\"body\": \"two\"}\n");

    // Seen while the text is read: the folder has a lock and what was prepared, but no run.
    for (set, words) in [
        ("data.paths=[\"blank\"]", "no document in | blank/"),
        ("data.paths=[\"latin\"]", "latin/a.txt | not UTF-8 at byte 3"),
        ("data.paths=[\"short\"]", "vocab_size | 300"),
    ] {
        refused(&mut train_with(&tiny, set), words);
        assert_eq!(tiny.names("run"), ["data", "run.lock"], "{set}");
    }
    let small = "--set tokenizer.train.vocab_size=260 --set data.validation_fraction=0.3 --set data.paths=[\"short\"]";
    refused(&mut tiny.train("run", small), "train.bin | seq_len 32 | hint");
    let jsonl = "--set data.paths=[\"lines.jsonl\"] --set data.format=jsonl";
    let words = "lines.jsonl | line 2 | text_column | body";
    refused(&mut tiny.train("run", jsonl), words);
    // Nothing stands in the way of the run that was meant.
    tiny.trained("run", "--set training.steps=4");
}

#[test]
fn a_vocabulary_that_does_not_fit_is_refused() {
    let tiny = TinyRun::dma();
    tiny.trained("made", "--set training.steps=4");
    let with = |more: &str| {
        format!("train --recipe tiny.toml --device cpu --out run --set tokenizer.path=made/data/tokenizer.json {more}")
    };
    tiny.refuses(
        &with("--set model.vocab_size=299"),
        "model.vocab_size is 299 | 300 tokens | hint",
    );
    tiny.prints(&with("--set model.vocab_size=320 --set training.steps=4"));
}

#[test]
fn a_folder_with_a_run_is_left_alone() {
    let tiny = TinyRun::dma();
    tiny.trained("run", "--set training.steps=4");
    tiny.refuse(&mut tiny.train("run", ""), "run already holds a run | --resume | --out");
    // Another process trains there.
    let lock = fs::File::open(tiny.path("run/run.lock")).expect("written");
    lock.lock().expect("nobody has it");
    let longer = "--resume --set training.steps=8 --set lr_scheduler.decay_ratio=0.25";
    tiny.refuse(&mut tiny.train("run", longer), "another process | run | --out");
}

#[test]
fn a_prompt_must_fit_the_context() {
    let tiny = TinyRun::dma();
    tiny.trained("run", "--set training.steps=4");
    let long = "the cat sees the river. ".repeat(40);
    let generate = || tiny.sieve("generate --checkpoint run --device cpu --max-new-tokens 4 --prompt");
    tiny.refuse(generate().arg(long), "64 | prompt");
    succeed(generate().arg("the cat"));
}
