//! Every mistake gets a message that says what, where and how to fix it, and changes no file.
use crate::tiny_run::{TinyRun, refused, succeed};
use sieve_testing::cases;
use std::fs;
use std::process::Command;

/// `sieve train` of the tiny recipe into `run`, with one `--set`.
fn train_with(tiny: &TinyRun, set: &str) -> Command {
    // Not through the second argument, which splits at spaces.
    let mut command = tiny.train("run", "");
    command.args(["--set", set]);
    command
}

/// `sieve train` with overrides that the recipe's rules refuse.
#[test]
fn recipes_are_checked_before_any_work() {
    let tiny = TinyRun::dma();
    for [set, words] in cases(
        r#"
        optimizer.lrr=1e-3 => [optimizer] has no key lrr | did you mean lr?
        optimiser.lr=1e-3 => no section [optimiser] | did you mean optimizer?
        training.steps=many => training.steps | wanted | many
        training.steps=0 => training.steps | is 0
        training.steps=-3 => training.steps | -3
        optimizer.lr=nan => optimizer.lr | NaN
        optimizer.name="Adam" => optimizer.name | AdamW
        model.num_attention_heads=0 => model.num_attention_heads | is 0
        model.num_key_value_heads=3 => model.num_key_value_heads | is 3 | does not divide num_attention_heads = 2
        model.head_dim=15 => model.head_dim | even
        model.vocab_size=100 => model.vocab_size | 100 | 300
        attention.kind=sparse => attention.kind | sparse | "mha"
        optimizer.eps=1e-50 => optimizer.eps | 1e-50 | f32
        model.rms_norm_eps=1e30 => model.rms_norm_eps | 1e30
        attention.sliding_window=8 => attention.sliding_window | dma
        attention.keep_window_size=0 => attention.keep_window_size | is 0
        training.seq_len=100 => training.seq_len | max_position_embeddings
        training.global_batch_size=6 => training.global_batch_size | multiple
        lr_scheduler.decay_ratio=2 => lr_scheduler.decay_ratio | [0, 1]
        checkpoint.folder=../elsewhere => checkpoint.folder
        data.validation_fraction=1.5 => data.validation_fraction
        data.paths=[] => data.paths
        data.format=parkett => data.format | parquet
        tokenizer.train.vocab_size=20 => tokenizer.train.vocab_size | 20
        optimizer.lr => optimizer.lr | section.key=value
        =3 => section.key=value
        lr=3 => lr
        optimizer.lr.x=3 => optimizer.lr
    "#,
    ) {
        tiny.refuse(&mut train_with(&tiny, set), words);
    }
    // All mistakes at once, each with its line.
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
    tiny.write("broken.toml", "[model\nhidden_size = 3");
    tiny.refuses(
        "train --recipe broken.toml --out run",
        "broken.toml is not valid TOML | line 1",
    );
    tiny.write("latin.toml", b"# caf\xe9\n");
    tiny.refuses("train --recipe latin.toml --out run", "latin.toml | UTF-8");
}

#[test]
fn flags_say_what_they_take() {
    let tiny = TinyRun::dma();
    tiny.write("a_file", "kept");
    for [args, words] in cases(
        r#"
        train --recipe tiny.tom => no recipe tiny.tom | quickstart.toml
        train --recipe corpus => corpus is a folder
        train => --recipe
        train --recipe tiny.toml --device gpu => 'gpu' is no device | cuda:N
        train --recipe tiny.toml --device cuda:x => 'cuda:x' is no device
        train --recipe tiny.toml --resum => --resum
        train --recipe tiny.toml --out run --resume => run | no such folder | --out
        train --recipe tiny.toml --out corpus --resume => corpus | no config.toml
        train --recipe tiny.toml --out run --resume-from nowhere => nowhere | no checkpoint
        train --recipe tiny.toml --out run --resume --resume-from x => --resume
        train --recipe tiny.toml --out a_file => a_file is a file | --out
        train --recipe tiny.toml --out a_file --resume => a_file is a file
        train --recipe tiny.toml --out a_file/run => a_file/run
        train --recipe tiny.toml --out /proc/nothing => /proc/nothing
        data batch --recipe tiny.toml --step 0 --out b => --step | 1
        data batch --recipe tiny.toml --step 41 --out b => --step 41 | training.steps = 40
        data batch --recipe tiny.toml --step x --out b => --step | x
        data batch --recipe tiny.toml --step 1 => --out
        data => batch
        trian => trian | train
    "#,
    ) {
        let mut command = tiny.sieve(args);
        if args == "data" {
            // The help itself, on the error output.
            assert!(!command.output().expect("it starts").status.success());
            continue;
        }
        tiny.refuse(&mut command, words);
    }
    if !std::path::Path::new("/dev/nvidiactl").exists() {
        for device in ["cuda", "cuda:0", "cuda:7"] {
            tiny.refuses(
                &format!("train --recipe tiny.toml --device {device}"),
                "cuda | --device cpu",
            );
        }
    }
}

#[test]
fn data_that_cannot_be_read_is_named() {
    let tiny = TinyRun::dma();
    fs::create_dir(tiny.path("empty")).expect("writable");
    fs::create_dir(tiny.path("blank")).expect("writable");
    tiny.write("blank/a.txt", "");
    fs::create_dir(tiny.path("short")).expect("writable");
    for name in ["a", "b", "c", "d", "e", "f", "g", "h"] {
        fs::write(tiny.path("short").join(format!("{name}.txt")), name.repeat(3)).expect("writable");
    }
    fs::create_dir(tiny.path("latin")).expect("writable");
    tiny.write("latin/a.txt", b"caf\xe9 au lait");
    tiny.write("lines.jsonl", "{\"text\": \"one\"}\n{\"body\": \"two\"}\n");
    tiny.write("no_tokenizer.json", "{}");

    // Seen before the output folder is made.
    for [set, words] in cases(
        r#"
        data.paths=["nothing/*.txt"] => nothing/*.txt | matches no file
        data.paths=["empty"] => empty | matches no file
        data.paths=["$NO_SUCH_VARIABLE/x"] => NO_SUCH_VARIABLE is not set
        tokenizer.path=no_tokenizer.json => no_tokenizer.json | tokenizer
        tokenizer.path=missing.json => missing.json
        validation.paths=["nothing/*.txt"] => nothing/*.txt
    "#,
    ) {
        tiny.refuse(&mut train_with(&tiny, set), words);
    }
    // Seen while the text is read: the folder has a lock and what was prepared, but no run.
    for (set, words) in [
        ("data.paths=[\"blank\"]", "no document in | blank/"),
        ("data.paths=[\"latin\"]", "latin/a.txt | not UTF-8 at byte 3"),
        ("data.paths=[\"short\"]", "vocab_size | 300"),
    ] {
        refused(&mut train_with(&tiny, set), words);
        let mut left: Vec<_> = fs::read_dir(tiny.path("run"))
            .expect("the folder was taken")
            .map(|entry| entry.expect("readable").file_name())
            .collect();
        left.sort();
        assert_eq!(left, ["data", "run.lock"], "{set}");
    }
    let small = [
        "--set",
        "tokenizer.train.vocab_size=260",
        "--set",
        "data.validation_fraction=0.3",
        "--set",
        "data.paths=[\"short\"]",
    ];
    refused(tiny.train("run", "").args(small), "train.bin | seq_len 32 | hint");
    let jsonl = ["--set", "data.paths=[\"lines.jsonl\"]", "--set", "data.format=jsonl"];
    refused(
        tiny.train("run", "").args(jsonl),
        "lines.jsonl | line 2 | text_column | body",
    );
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
    let generate = |prompt: &str, more: &str| {
        let args = format!("generate --checkpoint run --device cpu {more} --prompt");
        let mut command = tiny.sieve(&args);
        command.arg(prompt);
        command
    };
    tiny.refuse(&mut generate(&long, ""), "64 | prompt");
    let refusals = [
        ("--max-new-tokens 1000", "64"),
        ("--temperature=-1", "temperature"),
        ("--top-p 0", "top"),
    ];
    for (more, words) in refusals {
        tiny.refuse(&mut generate("the cat", more), words);
    }
    let nowhere = "generate --checkpoint corpus --prompt x";
    tiny.refuses(nowhere, "corpus | no checkpoint");
    succeed(&mut generate("the cat", "--max-new-tokens 4"));
}
