//! What somebody meets who has one file of text, or nothing but the program.
use crate::data_commands::{formats, shards};
use crate::tiny_run::{TinyRun, json, number, program, refused, succeed};
use sieve_testing::{cases, says};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// `command` with each of `sets` behind a `--set`.
fn set<'a>(command: &'a mut Command, sets: &[&str]) -> &'a mut Command {
    sets.iter().fold(command, |command, set| command.args(["--set", set]))
}

/// The tiny corpus as one text.
fn one_text(tiny: &TinyRun) -> String {
    let files = (0..60).map(|number| tiny.path(&format!("corpus/{number:02}.txt")));
    files.map(|path| fs::read_to_string(path).expect("text")).collect()
}

#[test]
fn one_text_file_trains_however_short() {
    let tiny = TinyRun::dma();
    let text = one_text(&tiny);
    for (name, num_bytes) in [("long", 1_000_000), ("short", 2_000)] {
        let text = text.repeat(num_bytes / text.len() + 1);
        tiny.write(&format!("{name}.txt"), &text[..num_bytes]);
        let path = format!("data.paths=[\"{name}.txt\"]");
        let printed = succeed(set(&mut tiny.train(name, ""), &[&path]));
        says(
            &printed,
            "data: too few documents (1) to hold whole ones out | the last 10.0 % of the text validate | \
             [validation] paths | next:",
        );
        // A tenth of the short text is some 100 tokens.
        let is_warned = printed.contains("held-out tokens are few");
        assert_eq!(is_warned, name == "short", "{printed}");
        let validations = tiny.metrics(name, "validation");
        let bits = |key: &str| validations[&40][key].as_f64().expect("a number");
        assert!(bits("bits_per_byte") < bits("unigram_bits_per_byte"));
        // The same when the shards are found instead of written.
        let more = ["training.steps=44", "lr_scheduler.decay_ratio=0.25"];
        let more = set(&mut tiny.train(name, "--resume"), &more)
            .args(["--set", &path])
            .output()
            .expect("the program starts");
        let printed = String::from_utf8_lossy(&more.stdout);
        says(&printed, "data: found | too few");
    }
    // The limit of a tree's files is not for a file that is named; in a folder it is too large, by name of the key.
    let limit = ["data.max_document_bytes=65536", "data.skip_invalid=true"];
    let prepare = |out: &str, path: &str| {
        let mut command = tiny.sieve(&format!("data prepare --recipe tiny.toml --data-dir {out}"));
        let path = format!("data.paths=[\"{path}\"]");
        set(
            set(&mut command, &limit),
            &[&path, "tokenizer.path=long/data/tokenizer.json"],
        )
        .output()
        .expect("the program starts")
    };
    assert!(prepare("named", "long.txt").status.success());
    let [named, trained] = ["named", "long/data"].map(|folder| shards(&tiny.path(folder)));
    assert!(named["train.bin"] == trained["train.bin"]);
    let found = prepare("found", "lon?.txt");
    says(
        &String::from_utf8_lossy(&found.stderr),
        "no document in | long.txt | over the limit of 65536 | data.max_document_bytes",
    );
    // Beside a source of many documents the one text is held out of too, and the run says so.
    let rows = (0..400).map(|n| format!("{{\"text\": \"row {n}: {}\"}}\n", &text[n..n + 40].replace('\n', " ")));
    tiny.write("rows.jsonl", rows.collect::<String>());
    let sources = [
        "data.paths=[\"long.txt\",\"rows.jsonl\"]",
        "data.weights=[1,1]",
        "training.steps=4",
    ];
    let printed = succeed(set(&mut tiny.train("mixed", ""), &sources));
    says(
        &printed,
        "data: of sources with too few documents | the end of the text validates | [validation] paths",
    );
    let held_out = tiny.metrics("mixed", "validation")[&0]["num_labels"].clone();
    assert!(held_out.as_u64() > Some(200), "{held_out}");
    let empty = tiny.path("empty.txt");
    fs::write(empty, "").expect("writable");
    tiny.write("letter.txt", "x");
    for (paths, words) in [
        ("data.paths=[\"empty.txt\"]", "no document in | empty.txt (1 blank"),
        (
            "data.paths=[\"letter.txt\"]",
            "the validation split holds no document | [validation] paths",
        ),
    ] {
        let sets = ["tokenizer.path=long/data/tokenizer.json", paths];
        refused(set(&mut tiny.train("bad", ""), &sets), words);
    }
}

#[test]
fn the_ending_of_a_file_says_how_it_is_read() {
    let tiny = TinyRun::dma();
    formats(&tiny);
    let lines = one_text(&tiny)
        .lines()
        .map(|line| format!("{}\n", serde_json::json!({ "text": line, "n": 1 })))
        .collect::<String>();
    tiny.write("lines.jsonl", &lines);
    tiny.write("lines.json", &lines);
    tiny.prints("tokenizer train --data corpus --vocab-size 300 --out t.json");
    let prepare = |out: &str, path: &str, format: &[&str]| {
        let path = format!("data.paths={path}");
        let mut command = tiny.sieve(&format!("data prepare --recipe tiny.toml --data-dir {out}"));
        let printed = succeed(set(set(&mut command, &["tokenizer.path=t.json", &path]), format));
        (shards(&tiny.path(out)), printed)
    };
    for (number, (path, format)) in [
        ("[\"lines.jsonl\"]", "jsonl"),
        ("[\"half.jsonl.gz\"]", "jsonl"),
        ("[\"half.parquet\"]", "parquet"),
        ("[\"corpus\"]", "text"),
    ]
    .into_iter()
    .enumerate()
    {
        let format = format!("data.format={format}");
        let (named, _) = prepare(&format!("named{number}"), path, &[&format]);
        let (found, printed) = prepare(&format!("found{number}"), path, &[]);
        assert!(found == named, "{path}: {printed}");
        assert!(!printed.contains("warning"), "{printed}");
    }
    // Each path by its own ending; together they hold what the folder holds.
    let (mixed, _) = prepare("mixed", "[\"half.parquet\",\"half.jsonl.gz\"]", &[]);
    assert_eq!(
        mixed["train.bin"].len(),
        shards(&tiny.path("found3"))["train.bin"].len()
    );
    // A name that says nothing is text, with a word of warning; so is what was named so.
    for (out, path, format) in [
        ("json", "[\"lines.json\"]", &[][..]),
        ("raw", "[\"lines.jsonl\"]", &["data.format=text"]),
    ] {
        let (_, printed) = prepare(out, path, format);
        assert!(printed.contains("warning: lines.json"), "{printed}");
        assert!(printed.contains("data.format = \"jsonl\""), "{printed}");
    }
    tiny.write("corpus/rows.jsonl", &lines);
    for command in [
        "data prepare --recipe tiny.toml --data-dir new --set data.paths=[\"corpus\"]",
        "train --recipe tiny.toml --out new --set data.paths=[\"corpus\"]",
        "tokenizer train --data corpus --vocab-size 300 --out new.json",
    ] {
        let words = "corpus | 60 text (00.txt), 1 jsonl (rows.jsonl) | hint: say which";
        refused(&mut tiny.sieve(command), words);
    }

    let train = "--set training.steps=4 --set tokenizer.path=t.json --set data.paths=[\"lines.jsonl\"]";
    tiny.trained("run", train);
    let measure = |data: &str| {
        let ppl = format!("eval ppl --json --device cpu --checkpoint run --max-tokens 300 --data {data}");
        let printed = tiny.prints(&ppl);
        let json = printed.lines().find(|line| line.starts_with('{')).expect("one object");
        let report: serde_json::Value = serde_json::from_str(json).expect(json);
        (report["num_documents"].as_u64().expect("a number"), printed)
    };
    assert!(measure("lines.jsonl").0 > 1);
    assert!(measure("half.parquet").0 >= 1);
    let plot = "eval ppl --device cpu --checkpoint run --max-tokens 300 --data lines.jsonl --plot";
    tiny.prints(&format!("{plot} loss.svg"));
    let picture = tiny.read("loss.svg");
    says(&picture, "<svg | nats per token | tokens seen, at least");
    tiny.refuses(&format!("{plot} no/loss.svg"), "no folder no");
    let (num_documents, printed) = measure("lines.json");
    assert!(
        num_documents == 1 && printed.contains("warning: lines.json"),
        "{printed}"
    );
    let train = "tokenizer train --data lines.jsonl --vocab-size 270 --out ";
    tiny.prints(&format!("{train} found.json"));
    tiny.prints(&format!("{train} named.json --format jsonl"));
    let [found, named] = ["found.json", "named.json"].map(|name| fs::read(tiny.path(name)));
    assert_eq!(found.expect("written"), named.expect("written"));
}

#[test]
fn what_an_evaluation_says_can_be_kept_and_compared() {
    let tiny = TinyRun::dma();
    tiny.trained("run", "--set training.steps=4");
    let ppl = "eval ppl --device cpu --checkpoint run --data corpus --max-tokens 3000";
    let printed = tiny.prints(&format!("{ppl} --json --save"));
    says(&printed, "saved | run/eval/ppl.json");
    let report = json(&printed);
    assert_eq!(json(&tiny.read("run/eval/ppl.json")), report);
    let rolling = &report["lm_eval_rolling"];
    // The first token of a text is predicted and its end is not; the last text is cut, so it has no end.
    let documents = report["num_documents"].as_f64().expect("a number");
    let [ours, theirs] = [&report, rolling].map(|of| number(&of["num_tokens"]));
    assert!(documents > 2.0 && theirs == ours + 1.0, "{report}");
    let nats = -number(&rolling["log_likelihood"]);
    let bits = number(&rolling["bits_per_byte"]) * number(&rolling["num_bytes"]);
    assert!((nats - bits * std::f64::consts::LN_2).abs() < 1e-9 * nats, "{report}");
    assert!((nats / number(&report["nats"]) - 1.0).abs() < 0.2, "{report}");

    let lines = tiny.prints(&format!("{ppl} --by-position --save long"));
    // Bytes and few merges: a word has several tokens.
    says(
        &lines,
        "word perplexity | - | tokens, which this text has in this tokenizer",
    );
    says(&lines, "by lm-evaluation-harness's rolling likelihood | windows of 32");
    let long = json(&tiny.read("run/eval/long.json"));
    assert_eq!((&long["stride"], &report["stride"]), (&32.into(), &16.into()));
    // Predictions that see 16 to 31 tokens are about half of all where windows do not overlap.
    let bins = long["by_position"].as_array().expect("bins");
    let last_but_one = bins.iter().find(|bin| bin["from"] == 16).expect("a bin");
    let share = number(&last_but_one["num_tokens"]) / number(&long["num_tokens"]);
    assert!((0.3..0.6).contains(&share), "{bins:?}");

    let note = "has not been trained on the task";
    assert!(
        tiny.prints("eval mqar --checkpoint run --device cpu --kinds 32:2 --samples 9 --save")
            .contains(note)
    );
    tiny.prints("compare run --out page.html");
    let page = tiny.read("page.html");
    says(
        &page,
        ">long< | >ppl< | >mqar< | >by_position / 16 to 31< | >lm_eval_rolling / bits_per_byte<",
    );
    assert!(!page.contains("/ from<"), "bins are one row each");
    tiny.refuses(&format!("{ppl} --save a/b"), "--save a/b | not a file name | hint: ");
    tiny.prints("export --checkpoint run --out exported");
    let exported = ppl.replace("run", "exported");
    tiny.refuses(
        &format!("{exported} --save"),
        "exported lies in no run folder | --json > FILE",
    );
}

#[test]
fn a_cpu_has_no_peak_to_reach() {
    let tiny = TinyRun::dma();
    let printed = succeed(&mut tiny.train("run", "--stop-after 2 -v"));
    assert!(printed.contains("tflops: ") && !printed.contains("mfu"), "{printed}");
    assert!(!tiny.read("run/metrics.jsonl").contains("mfu"));
    let plan = tiny.prints("plan --recipe tiny.toml");
    says(
        &plan,
        "GFLOP/s of matrix products, measured just now | % of | GFLOP/s in executed operations",
    );
    assert!(!plan.contains("TFLOP/s"), "{plan}");
}

#[test]
fn a_run_that_cannot_learn_is_warned_of() {
    let tiny = TinyRun::dma();
    for (sets, words) in [
        ("--set optimizer.lr=0", "warning: optimizer.lr is 0"),
        ("--set training.seq_len=1", "warning: rows of one token"),
        ("", ""),
    ] {
        let printed = succeed(&mut tiny.train("run", &format!("{sets} --stop-after 1")));
        assert_eq!(printed.contains("warning:"), !words.is_empty(), "{printed}");
        assert!(printed.contains(words), "{printed}");
        fs::remove_dir_all(tiny.path("run")).expect("writable");
    }
}

#[test]
fn rows_left_out_are_told() {
    let tiny = TinyRun::dma();
    let mut lines = (0..400)
        .map(|n| format!("{{\"text\": \"line {n} sees the river\"}}\n"))
        .collect::<String>();
    lines += "{\"text\": \" \"}\n{\"body\": 1}\nno JSON\n{\"text\": 5}\n";
    tiny.write("rows.jsonl", lines);
    let sets = [
        "data.paths=[\"rows.jsonl\"]",
        "data.skip_invalid=true",
        "training.steps=4",
        "tokenizer.train.vocab_size=280",
    ];
    let words = [
        "left out: 1 blank, 0 duplicates, 3 invalid",
        "the first invalid one: rows.jsonl: line 402 has no column \"text\"",
    ];
    let prepare = "data prepare --recipe tiny.toml --data-dir shards";
    for printed in [
        succeed(set(&mut tiny.train("run", ""), &sets)),
        succeed(set(&mut tiny.sieve(prepare), &sets)),
    ] {
        for word in words {
            assert!(printed.contains(word), "no {word:?} in: {printed}");
        }
    }
    let log = tiny.read("run/log");
    assert!(log.contains(words[0]), "{log}");
    let ppl = "eval ppl --checkpoint run --device cpu --data rows.jsonl --context 32";
    tiny.refuses(ppl, "line 402 has no column");
    let printed = tiny.prints(&format!("{ppl} --skip-invalid"));
    for word in words {
        assert!(printed.contains(word), "no {word:?} in: {printed}");
    }
    let corpus = "eval ppl --checkpoint run --device cpu --data corpus --max-tokens 500 --extrapolate";
    let printed = tiny.prints(corpus);
    says(&printed, "behind a context of | \n32  | 1.0000\n64 ");
    refused(
        set(&mut tiny.train("strict", ""), &[sets[0]]),
        "rows.jsonl: line 402 has no column \"text\" (it has [\"body\"])",
    );
}

/// A copy of the program in `folder`, which holds nothing else, with nothing of this machine's environment.
fn copied(folder: &Path) -> Command {
    let copy = folder.join("sieve");
    if !copy.exists() {
        fs::copy(program(), &copy).expect("writable");
    }
    let mut command = Command::new("./sieve");
    command
        .current_dir(folder)
        .env_clear()
        .env("HOME", folder.join("home"))
        .env("RAYON_NUM_THREADS", "2")
        .stdin(Stdio::null());
    command
}

#[test]
fn a_copied_program_trains_in_an_empty_folder() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    fs::create_dir(dir.path().join("home")).expect("writable");
    let sieve = |args: &str| {
        let mut command = copied(dir.path());
        command.args(args.split_whitespace());
        command
    };
    let small = "--set training.steps=30 --set lr_scheduler.warmup_steps=5 --set model.num_hidden_layers=2 \
                 --set validation.tokens=8192 --set generation.max_new_tokens=8";
    let train = format!("train --recipe quickstart.toml --device cpu {small}");
    let printed = succeed(&mut sieve(&train));
    assert!(printed.contains("registry/src/**/*.rs"), "{printed}");
    says(&printed, "so Sieve's own sources and docs are read");
    let metrics = fs::read_to_string(dir.path().join("out/quickstart/metrics.jsonl"));
    let metrics = metrics.expect("metrics.jsonl");
    let last = metrics
        .lines()
        .rfind(|line| line.contains("\"validation\""))
        .expect("one");
    let last: serde_json::Value = serde_json::from_str(last).expect(last);
    let bits = |key: &str| last[key].as_f64().expect("a number");
    assert!(bits("bits_per_byte") < bits("unigram_bits_per_byte"), "{last}");

    // The lines of `next:` are typed as they are.
    let next = printed.split_once("next:\n").expect("next").1;
    let next = next.lines().map(str::trim).collect::<Vec<_>>();
    assert_eq!(next.len(), 3, "{printed}");
    for line in next {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", line]).current_dir(dir.path()).stdin(Stdio::null());
        assert!(line.starts_with("./sieve "), "{line}");
        succeed(&mut shell);
    }

    // The same text again: nothing is written twice, and the shards are found.
    let printed = succeed(&mut sieve("data prepare --recipe quickstart"));
    assert!(printed.contains("found out/quickstart/data"), "{printed}");
    succeed(&mut sieve("plan --recipe mqar_dma"));
    refused(
        &mut sieve("train --recipe quikstart"),
        "inside the program | quickstart.toml",
    );
    // A path that the user names is not replaced by the program's own text.
    let mut misspelt = sieve("train --recipe quickstart --out other --set");
    refused(
        misspelt.arg("data.paths=[\"notes.txt\"]"),
        "\"notes.txt\" matches no file",
    );
    // A variable that is not set is no registry either.
    let mut homeless = sieve("data prepare --recipe quickstart --data-dir again");
    let printed = succeed(homeless.env_remove("HOME"));
    says(&printed, "so Sieve's own sources and docs are read");

    // A recipe beside the user comes before the one inside; where its text is there, the program's own is not read.
    fs::create_dir(dir.path().join("recipes")).expect("writable");
    let registry = dir.path().join("home/.cargo/registry/src/crate");
    fs::create_dir_all(&registry).expect("writable");
    for name in ["lib.rs", "main.rs", "README.md"] {
        fs::write(registry.join(name), "fn some_text() {}\n".repeat(200)).expect("writable");
    }
    let text = include_str!("../recipes/quickstart.toml").replace("2048", "265");
    fs::write(dir.path().join("recipes/quickstart.toml"), text).expect("writable");
    let printed = succeed(&mut sieve("tokenizer train --recipe quickstart --out t.json"));
    says(&printed, "text: 3 files of |  265 tokens");
}

#[test]
fn odd_files_are_told_by_name() {
    let tiny = TinyRun::dma();
    tiny.prints("tokenizer train --data corpus --vocab-size 300 --out t.json");
    tiny.write("binary.txt", [0x7f, b'E', b'L', b'F', 0, 1, 2, 0xff]);
    tiny.write("binary.jsonl", [0xff; 64]);
    tiny.write("empty.jsonl", "");
    tiny.write("empty.parquet", "");
    tiny.write("empty.txt.zst", "");
    tiny.write("rows.jsonl", "{\"body\": \"x\"}\n");
    fs::create_dir(tiny.path("hollow")).expect("writable");
    let pipe = Command::new("mkfifo").arg(tiny.path("pipe.txt")).status();
    assert!(pipe.expect("mkfifo is there").success());
    for [path, words] in cases(
        r#"
        binary.txt => binary.txt: NUL at byte 4
        binary.jsonl => binary.jsonl: not UTF-8 at byte 0
        empty.jsonl => no document in | empty.jsonl
        pipe.txt => pipe.txt: a pipe (FIFO), not a file
        empty.parquet => empty.parquet: not a readable Parquet file
        empty.txt.zst => empty.txt.zst: damaged | the file is empty
        rows.jsonl => rows.jsonl: line 1 has no column "text" (it has ["body"])
        hollow => "hollow" matches no file | "jsonl"
        no/such.txt => "no/such.txt" matches no file
    "#,
    ) {
        let paths = format!("data.paths=[\"{path}\"]");
        let sets = ["tokenizer.path=t.json", &paths];
        refused(set(&mut tiny.train("run", ""), &sets), words);
        refused(
            set(&mut tiny.sieve("data prepare --recipe tiny.toml --data-dir new"), &sets),
            words,
        );
        let tokenizer = format!("tokenizer train --vocab-size 300 --out n.json --data {path}");
        tiny.refuses(&tokenizer, words);
    }
    // One long line is one document like any other.
    let line = one_text(&tiny).replace('\n', " ");
    tiny.write("line.txt", line);
    let sets = ["tokenizer.path=t.json", "data.paths=[\"line.txt\"]", "training.steps=4"];
    succeed(set(&mut tiny.train("line", ""), &sets));
}
