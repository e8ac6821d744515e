//! The commands that commands print under `next:` are typed as they are printed, for each kind of run.
use crate::tiny_run::{TinyRun, program, text, words_of};
use crate::words_model;
use std::collections::{BTreeSet, VecDeque};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;

/// A kind of run: what is typed, and what has to be among the commands that follow.
struct Kind {
    name: &'static str,
    /// The `[attention]` lines of `tiny.toml`.
    attention: &'static str,
    /// Shell commands that come first; their lines are not followed.
    before: &'static str,
    /// The shell command whose lines are followed.
    typed: &'static str,
    /// Whether the lines that the followed commands print are followed too.
    goes_on: bool,
    /// Words of the lines, separated by ` | `; none of those after a `!`.
    words: &'static str,
    /// Words of all that the followed commands print.
    printed: &'static str,
}

const DENSE: &str = "kind = \"mha\"";
const SPARSE: &str = "kind = \"dma\"\nkeep_window_size = 8\nrecency = \"none\"\nlocal_window_size = 0";
const TRAIN: &str = "train --recipe tiny.toml --device cpu --set training.steps=4";
/// Makes `hf`, a trained model in the Hugging Face layout.
const EXPORTED: &str = "sieve train --recipe tiny.toml --device cpu --set training.steps=4 --out trunk; \
    sieve export --checkpoint trunk --out hf";
const OF_CHATS: &str = "generate --chat --prompt 'The lazy' | eval ppl --recipe-validation | export | compare | !The '";

const KINDS: [Kind; 16] = [
    Kind {
        name: "text, in a folder with a blank and a quote",
        attention: SPARSE,
        before: "",
        typed: "TRAIN --out \"it's my run\"",
        goes_on: true,
        words: "generate --prompt | eval ppl --recipe-validation | export | compare | python3 | !--chat",
        printed: "bits per byte",
    },
    Kind {
        name: "a synthetic task",
        attention: DENSE,
        before: "",
        typed: "TRAIN --out run --set tokenizer.numbers=64 --set data.format=mqar --set data.paths=[] \
            --set 'data.mqar={vocab_size=64,seq_lens=[16],num_pairs=[2],num_samples=[500],num_test_samples=20}'",
        goes_on: true,
        words: "eval mqar | export | !ppl",
        printed: "",
    },
    Kind {
        name: "chats, from an import of an instruct model",
        attention: DENSE,
        before: "",
        typed: "sieve import --from metaspace --out in/chats --data chats.jsonl --set data.messages_column=messages",
        goes_on: true,
        words: OF_CHATS,
        printed: "loss over answer tokens only | best checkpoint | sample:\n  The lazy\n",
    },
    Kind {
        name: "chats, from a recipe without prompts",
        attention: DENSE,
        before: "",
        typed: "TRAIN --out run --set 'data.paths=[\"chats.jsonl\"]' --set data.messages_column=messages \
            --set tokenizer.path=metaspace/tokenizer.json",
        goes_on: true,
        words: "generate --chat --prompt 'Who are you?' | eval ppl --recipe-validation",
        printed: "loss over answer tokens only",
    },
    Kind {
        name: "questions, from a new recipe",
        attention: DENSE,
        before: "",
        typed: "sieve recipe new --data questions.jsonl --set data.prompt_column=ask --set data.text_column=say \
            --out asked.toml",
        goes_on: true,
        words: "plan --recipe asked.toml | generate --prompt 'who sees number 1?' \
            | eval ppl --recipe-validation | !--chat",
        printed: "loss over answer tokens only | best checkpoint | sample:\n  who sees number 1?",
    },
    Kind {
        name: "an import of a base model",
        attention: DENSE,
        before: EXPORTED,
        typed: "sieve import --from hf --out in/base --data corpus --set training.steps=3",
        goes_on: true,
        words: "plan | train | generate --prompt | eval ppl --recipe-validation | !--chat",
        printed: "sample:",
    },
    Kind {
        name: "an import of a base model without text",
        attention: DENSE,
        before: EXPORTED,
        typed: "sieve import --from hf --out in/base",
        goes_on: true,
        words: "generate --prompt 'The ' --checkpoint in/base/step-0",
        printed: "",
    },
    Kind {
        name: "an import of an instruct model without text",
        attention: DENSE,
        before: "",
        typed: "sieve import --from metaspace --out in/chat",
        goes_on: true,
        words: "generate --chat --prompt 'Who are you?'",
        printed: "",
    },
    Kind {
        name: "an import of a sparse model",
        attention: SPARSE,
        before: EXPORTED,
        typed: "sieve import --from hf --out in/sparse --data corpus --set training.steps=3",
        goes_on: true,
        words: "plan | train | generate --prompt | eval ppl --recipe-validation",
        printed: "attention dma",
    },
    Kind {
        name: "a conversion",
        attention: DENSE,
        before: EXPORTED,
        typed: "sieve import --from hf --attention msa --set attention.select_block_size=8 \
            --set attention.num_selected_blocks=2 --out in/msa --data corpus --set training.steps=10",
        goes_on: true,
        words: "plan | train | generate --prompt | eval ppl --recipe-validation | export",
        printed: "attention msa",
    },
    Kind {
        name: "an export of a chat model",
        attention: DENSE,
        before: "sieve import --from metaspace --out in",
        typed: "sieve export --checkpoint in --out exported",
        goes_on: true,
        words: "generate --chat --prompt 'Who are you?' --checkpoint exported | python3",
        printed: "",
    },
    Kind {
        name: "a sweep",
        attention: SPARSE,
        before: "",
        typed: "TRAIN --out swept --sweep attention.kind=mha,dma",
        goes_on: true,
        words: "compare swept",
        printed: "",
    },
    Kind {
        name: "a new recipe",
        attention: DENSE,
        before: "cat corpus/0*.txt > 'my text.txt'",
        typed: "sieve recipe new --data 'my text.txt' --out new.toml --set training.steps=2 \
            --set tokenizer.train.vocab_size=280 --set validation.tokens=1024",
        goes_on: true,
        words: "plan --recipe new.toml | train --recipe new.toml | generate | export",
        printed: "",
    },
    Kind {
        name: "a tokenizer",
        attention: DENSE,
        before: "",
        typed: "sieve tokenizer train --data corpus --vocab-size 280 --out tokenizer.json; \
            sieve tokenizer train --recipe tiny.toml --out own.json",
        // The lines of new recipes are followed above, where the recipe is small.
        goes_on: false,
        words: "recipe new --data corpus --tokenizer tokenizer.json --out corpus.toml | \
            train --recipe tiny.toml --set tokenizer.path=own.json",
        printed: "",
    },
    Kind {
        name: "prepared data",
        attention: DENSE,
        before: "",
        typed: "sieve data prepare --recipe tiny.toml --set training.steps=4",
        goes_on: true,
        words: "train --recipe tiny.toml --set training.steps=4 | eval ppl --recipe-validation",
        printed: "data: found",
    },
    Kind {
        name: "prepared data elsewhere, beside a run of that name",
        attention: DENSE,
        before: "TRAIN",
        typed: "sieve data prepare --recipe tiny.toml --set training.steps=4 --data-dir 'my data'",
        goes_on: true,
        words: "train --recipe tiny.toml --set training.steps=4 --out out/tiny-2 --set 'data.cache_dir=my data'",
        printed: "took my data from out/tiny/data | data: found",
    },
];

/// The commands that a command printed under `next:`.
fn suggested(printed: &str) -> Vec<String> {
    let (mut lines, mut is_below) = (Vec::new(), false);
    for line in printed.lines() {
        is_below = line == "next:" || is_below && line.starts_with("  ");
        if is_below && line != "next:" {
            lines.push(line.trim_start().to_owned());
        }
    }
    lines
}

/// Runs a line of a shell in the folder, where `sieve` is the program. A line of Python is run where it can be, and
/// else compiled.
fn typed(tiny: &TinyRun, line: &str) -> Output {
    const PYTHON: &str = "real() { command ${SIEVE_PYTHON:-python3} \"$@\"; }; \
        python3() { if real -c 'import torch, transformers' 2> /dev/null; then real \"$@\"; \
        else real -c 'import sys; compile(sys.argv[1], \"next\", \"exec\")' \"$2\"; fi; }";
    let mut path = program().parent().expect("a folder").as_os_str().to_owned();
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap_or_default());
    let line = line.replace("TRAIN", &format!("sieve {TRAIN}"));
    let mut shell = Command::new("sh");
    shell
        .args(["-ec", &format!("{PYTHON}\n{line}")])
        .current_dir(tiny.path(""))
        .env("PATH", path)
        // Two kinds are tried at a time.
        .env("RAYON_NUM_THREADS", "1")
        .stdin(Stdio::null());
    shell.output().expect("sh starts")
}

/// A folder with a text, chats, questions, and an instruct model.
fn folder(attention: &str) -> TinyRun {
    let tiny = TinyRun::new(attention);
    words_model::write(&tiny);
    let answers = ["Paris", "dog jumps", "Be short", "short Paris dog"];
    let chats = (0..60).map(|number| {
        let (ask, say) = (["The lazy", "What?", "The lazy dog"][number % 3], answers[number % 4]);
        let message = |role: &str, content: &str| serde_json::json!({"role": role, "content": content});
        // No two chats are equal.
        let more = vec!["dog"; number].join(" ");
        let chat = [message("user", ask), message("assistant", say), message("user", &more), message("assistant", say)];
        format!("{}\n", serde_json::json!({ "messages": chat }))
    });
    tiny.write("chats.jsonl", chats.collect::<String>());
    let rows = (1..600).map(|number| {
        let ask = format!("who sees number {number}?");
        format!("{}\n", serde_json::json!({ "ask": ask, "say": format!("the cat sees {number}") }))
    });
    tiny.write("questions.jsonl", rows.collect::<String>());
    tiny
}

/// Follows the lines of a kind of run. Returns what is wrong with them.
fn faults(kind: &Kind) -> Vec<String> {
    let tiny = folder(kind.attention);
    let (mut faults, mut seen, mut all) = (Vec::new(), BTreeSet::new(), String::new());
    let mut run = |line: &str| {
        let output = typed(&tiny, line);
        let printed = text(&output);
        if !output.status.success() {
            faults.push(format!("{}: {line}\n{printed}", kind.name));
        }
        all.push_str(&printed);
        suggested(&printed)
    };
    run(kind.before);
    let mut open = VecDeque::from(run(kind.typed));
    while let Some(line) = open.pop_front() {
        if seen.insert(line.clone()) {
            let more = run(&line);
            open.extend(more.into_iter().filter(|_| kind.goes_on));
        }
    }
    let lines = seen.into_iter().collect::<Vec<_>>().join("\n");
    for (place, words) in [(&lines, kind.words), (&all, kind.printed)] {
        let is_there = std::panic::catch_unwind(|| {
            words.is_empty() || {
                words_of(place, words);
                true
            }
        });
        if is_there.is_err() {
            faults.push(format!("{}: not {words:?} in\n{place}", kind.name));
        }
    }
    if lines.is_empty() {
        faults.push(format!("{}: nothing is printed under next:", kind.name));
    }
    faults
}

#[test]
fn each_command_that_is_printed_under_next_runs_as_it_is_printed() {
    let (open, all) = (Mutex::new(KINDS.iter()), Mutex::new(Vec::new()));
    let only = std::env::var("SIEVE_TEST_KIND").ok();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let Some(kind) = open.lock().expect("no panic").next() else {
                        break;
                    };
                    if only.as_ref().is_none_or(|only| kind.name.contains(only)) {
                        all.lock().expect("no panic").extend(faults(kind));
                    }
                }
            });
        }
    });
    let all = all.into_inner().expect("no panic");
    assert!(all.is_empty(), "{}", all.join("\n\n"));
}
