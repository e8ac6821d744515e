//! Two hundred wrong inputs over all commands, in a table: each ends with its exit code, without a panic, and with what
//! is wrong, where, and how to mend it. `wrong_inputs.txt` holds them, a command and below it the code and words of its
//! message.
use crate::tiny_run::{TinyRun, program, text};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// One line of the table, and the line below it.
struct Wrong {
    line: &'static str,
    code: i32,
    words: Vec<&'static str>,
}

fn table() -> Vec<Wrong> {
    let mut lines = include_str!("wrong_inputs.txt")
        .lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty());
    let mut table = Vec::new();
    while let Some(line) = lines.next() {
        let said = lines.next().expect(line).trim();
        let (code, words) = said.split_once(": ").unwrap_or((said, ""));
        table.push(Wrong {
            line,
            code: code.parse().expect(said),
            words: words.split(" | ").filter(|word| !word.is_empty()).collect(),
        });
    }
    table
}

/// The words of a line; those in single quotes hold spaces. `@RUN` is `--device cpu --checkpoint RUN`, and
/// `%` a path of the row's own, where nothing is.
fn words(line: &str, number: usize) -> Vec<String> {
    let line = line.replace('%', &format!("new{number}"));
    let pieces = line.split('\'').enumerate();
    let words = pieces.flat_map(|(number, piece)| match number % 2 {
        1 => vec![piece.to_owned()],
        _ => piece.split_whitespace().map(str::to_owned).collect(),
    });
    let expanded = words.flat_map(|word| match word.strip_prefix('@') {
        Some(run) => ["--device", "cpu", "--checkpoint", run].map(str::to_owned).to_vec(),
        None => vec![word],
    });
    expanded.collect()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("writable");
    for entry in fs::read_dir(from).expect("readable") {
        let path = entry.expect("readable").path();
        let name = path.file_name().expect("named").to_owned();
        fs::copy(&path, to.join(name)).expect("writable");
    }
}

/// Files and folders that are wrong in one way each.
fn prepared() -> TinyRun {
    let tiny = TinyRun::new("kind = \"mha\"");
    tiny.trained("dense", "--set training.steps=4");
    let dma = "--set attention.kind=dma --set attention.keep_window_size=8 --set training.steps=4";
    tiny.trained("sparse", dma);
    tiny.prints("export --checkpoint dense --out hf");
    let write = |name: &str, bytes: &[u8]| tiny.write(name, bytes);
    let checkpoint = tiny.path("dense/checkpoint/step-4");
    let damaged = |name: &str, from: &Path, file: &str, change: &dyn Fn(Vec<u8>) -> Vec<u8>| {
        let folder = tiny.path(name);
        copy(from, &folder);
        let path = folder.join(file);
        let bytes = change(fs::read(&path).expect("readable"));
        fs::write(path, bytes).expect("writable");
    };
    let half = |bytes: Vec<u8>| bytes[..bytes.len() / 2].to_vec();
    let flipped = |mut bytes: Vec<u8>| {
        let middle = bytes.len() / 2;
        bytes[middle] ^= 4;
        bytes
    };
    let endless = |mut bytes: Vec<u8>| {
        bytes[..8].fill(0xff);
        bytes
    };
    let empty = |_: Vec<u8>| Vec::new();
    let replaced = |from: &'static str, to: &'static str| {
        move |bytes: Vec<u8>| {
            let text = String::from_utf8(bytes).expect("text");
            assert!(text.contains(from), "{from} in {text}");
            text.replacen(from, to, 1).into_bytes()
        }
    };
    let weights = "model.safetensors";
    damaged("cut", &checkpoint, weights, &half);
    damaged("flipped", &checkpoint, weights, &flipped);
    damaged("endless", &checkpoint, weights, &endless);
    damaged("hollow", &checkpoint, weights, &empty);
    damaged("no_state", &checkpoint, "state.json", &empty);
    damaged("cut_state", &checkpoint, "state.json", &half);
    damaged("edited", &checkpoint, "config.toml", &replaced("seed = 3", "seed = 4"));
    damaged("cut_recipe", &checkpoint, "config.toml", &half);
    damaged("no_tokens", &checkpoint, "tokenizer.json", &|_| b"{}".to_vec());
    damaged(
        "newer",
        &checkpoint,
        "state.json",
        &replaced("\"format_version\":", "\"format_version\": 9"),
    );
    let hf = tiny.path("hf");
    damaged("hf_llama", &hf, "config.json", &replaced("\"qwen3\"", "\"llama\""));
    damaged("hf_broken", &hf, "config.json", &half);
    damaged("hf_list", &hf, "config.json", &|_| b"[]".to_vec());
    damaged(
        "hf_wide",
        &hf,
        "config.json",
        &replaced("\"hidden_size\": 32", "\"hidden_size\": 48"),
    );
    damaged(
        "hf_none",
        &hf,
        "config.json",
        &replaced("\"hidden_size\"", "\"hidden\""),
    );
    damaged("hf_cut", &hf, weights, &half);
    damaged("hf_endless", &hf, weights, &endless);
    damaged("hf_tokens", &hf, "tokenizer.json", &empty);
    let gone = |name: &str, file: &str| {
        copy(&hf, &tiny.path(name));
        fs::remove_file(tiny.path(name).join(file)).expect("it was there");
    };
    gone("hf_no_config", "config.json");
    gone("hf_no_weights", weights);
    gone("hf_no_tokens", "tokenizer.json");

    fs::create_dir(tiny.path("empty")).expect("writable");
    fs::create_dir(tiny.path("taken")).expect("writable");
    for (name, bytes) in [
        ("taken/letter.txt", &b"mine"[..]),
        ("a_file", b"kept"),
        ("broken.toml", b"[model\nhidden_size = 3"),
        ("latin.toml", b"# caf\xe9\n"),
        ("few.toml", b"[training]\nsteps = 3\n"),
        ("blank.txt", b" \n"),
        ("latin.txt", b"caf\xe9 au lait"),
        ("binary.txt", b"\x7fELF\0\x01"),
        ("rows.jsonl", b"{\"text\": \"one\"}\n{\"body\": \"two\"}\n"),
        ("cut.jsonl", b"{\"text\": \"one\"}\n{\"text\": \"tw"),
        ("number.jsonl", b"{\"text\": 5}\n"),
        ("list.jsonl", b"[1, 2]\n"),
        ("none.jsonl", b""),
        ("fake.parquet", b"PAR1 and no more"),
        ("cut.txt.gz", b"\x1f\x8b\x08\0\0\0\0\0\0\x03"),
        ("cut.txt.zst", b"\x28\xb5\x2f\xfd\x04"),
        ("none.json", b""),
        ("list.json", b"[]"),
        ("object.json", b"{}"),
        ("words.txt", b"one two x\n"),
        ("few_words.txt", b"a few words\n"),
        ("piqa.jsonl", b"{\"goal\": \"a\", \"sol1\": \"b\", \"label\": 0}\n"),
        ("piqa_label.jsonl", b"{\"goal\": \"a\", \"sol1\": \"b\", \"sol2\": \"c\", \"label\": 2}\n"),
        // Long line: a row of a file.
        ("arc.jsonl", b"{\"question\": \"a\", \"answerKey\": \"Z\", \"choices\": {\"text\": [\"x\", \"y\"], \"label\": [\"A\", \"B\"]}}\n"),
        // Long line: a row of a file.
        ("arc_unequal.jsonl", b"{\"question\": \"a\", \"answerKey\": \"A\", \"choices\": {\"text\": [\"x\"], \"label\": [\"A\", \"B\"]}}\n"),
        // Long line: a row of a file.
        ("arc_one.jsonl", b"{\"question\": \"a\", \"answerKey\": \"A\", \"choices\": {\"text\": [\"x\"], \"label\": [\"A\"]}}\n"),
        // Long line: a row of a file.
        ("arc_none.jsonl", b"{\"question\": \"a\", \"answerKey\": \"A\", \"choices\": {\"text\": [], \"label\": []}}\n"),
        ("lambada.jsonl", b"{\"text\": \"word\"}\n"),
        ("task_key.toml", b"measure = \"choices\"\nprompt = \"{q}\"\nchoises = [\"a\"]\nlabel = \"0\"\n"),
        ("task_measure.toml", b"measure = \"guess\"\nprompt = \"{q}\"\n"),
        ("task_none.toml", b"measure = \"choices\"\nprompt = \"{q}\"\n"),
        ("task_brace.toml", b"measure = \"continuation\"\nprompt = \"{q\"\ntarget = \"{a}\"\n"),
        ("task_filter.toml", b"measure = \"continuation\"\nprompt = \"{text|shout}\"\ntarget = \"{text}\"\n"),
        ("task_column.toml", b"measure = \"continuation\"\nprompt = \"{q}\"\ntarget = \"{text}\"\n"),
        ("task_score.toml", b"measure = \"generation\"\nprompt = \"{text}\"\nanswers = [\"a\"]\nscore = \"bleu\"\n"),
        ("hotpotqa.jsonl", b"{\"input\": \"a\"}\n"),
        ("squad.json", b"{\"data\": 3}"),
    ] {
        write(name, bytes);
    }
    fs::create_dir(tiny.path("bench")).expect("writable");
    fs::rename(tiny.path("hotpotqa.jsonl"), tiny.path("bench/hotpotqa.jsonl")).expect("writable");
    // A run whose numbers are none.
    fs::create_dir(tiny.path("odd_run")).expect("writable");
    fs::copy(tiny.path("dense/config.toml"), tiny.path("odd_run/config.toml")).expect("writable");
    write(
        "odd_run/metrics.jsonl",
        b"{\"kind\": \"step\", \"step\": \"two\"}\nno JSON\n",
    );
    tiny
}

fn run(tiny: &TinyRun, wrong: &Wrong, number: usize) -> Option<String> {
    let mut command = Command::new(program());
    command
        .args(words(wrong.line, number))
        .current_dir(tiny.path(""))
        .env("RAYON_NUM_THREADS", "1")
        .env("CUDA_VISIBLE_DEVICES", "")
        .env("HF_ENDPOINT", "http://127.0.0.1:9")
        .env("HF_HOME", tiny.path("hub"))
        .stdin(Stdio::null());
    let output = command.output().expect("the program starts");
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    let mut faults = Vec::new();
    if output.status.code() != Some(wrong.code) {
        faults.push(format!("ends with {:?}", output.status.code()));
    }
    for word in &wrong.words {
        if !message.contains(word) {
            faults.push(format!("does not say {word:?}"));
        }
    }
    for word in ["panicked", "a bug in Sieve", "RUST_BACKTRACE"] {
        if message.contains(word) {
            faults.push(format!("says {word:?}"));
        }
    }
    // A value of the wrong kind is mended by what it is said to be.
    let says_how = [
        "hint:",
        "--help",
        "tip:",
        "wanted ",
        ", outside ",
        "expected ",
        "it must be ",
        "not a finite number",
    ];
    if !message.starts_with("error: ") && !message.contains("\nerror: ") {
        faults.push("names no error".to_owned());
    }
    if !says_how.iter().any(|word| message.contains(word)) {
        faults.push("does not say how to mend it".to_owned());
    }
    let told = format!("sieve {}\n  {}\n{}", wrong.line, faults.join("; "), text(&output));
    (!faults.is_empty()).then_some(told)
}

#[test]
fn two_hundred_wrong_inputs_say_what_where_and_how() {
    let table = table();
    assert!(table.len() >= 200, "{} rows", table.len());
    let tiny = prepared();
    let before = tiny.snapshot("");
    let next = AtomicUsize::new(0);
    let faults = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(wrong) = table.get(number) else {
                        break;
                    };
                    if let Some(fault) = run(&tiny, wrong, number) {
                        faults.lock().expect("no panic").push(fault);
                    }
                }
            });
        }
    });
    let faults = faults.into_inner().expect("no panic");
    assert!(
        faults.is_empty(),
        "{} of {}:\n{}",
        faults.len(),
        table.len(),
        faults.join("\n")
    );
    // What was there is as it was.
    let after = tiny.snapshot("");
    let changed = before.iter().filter(|(path, file)| after.get(*path) != Some(*file));
    let changed: Vec<_> = changed.map(|(path, _)| path).collect();
    assert!(changed.is_empty(), "changed {changed:?}");
}
