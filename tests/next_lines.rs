//! The lines that commands print under `next:` are typed as they are.
use crate::python;
use crate::tiny_run::{TinyRun, succeed, written};
use std::fs;
use std::process::{Command, Stdio};

/// The commands under `next:` in what a program printed.
fn lines(printed: &str) -> Vec<String> {
    let (_, next) = printed
        .split_once("next:\n")
        .unwrap_or_else(|| panic!("no next: in {printed}"));
    let lines = next.lines().take_while(|line| line.starts_with("  "));
    let lines = lines.map(|line| line.trim().to_owned()).collect::<Vec<_>>();
    assert!(!lines.is_empty(), "{printed}");
    lines
}

/// Types a line into a shell in the run's folder. Training and generating print what a model writes.
fn typed(tiny: &TinyRun, line: &str) -> String {
    let mut shell = Command::new("/bin/sh");
    shell
        .args(["-c", line])
        .current_dir(tiny.path(""))
        .env("RAYON_NUM_THREADS", "2")
        .stdin(Stdio::null());
    written(&mut shell)
}

/// Types every line that `printed` suggests, and every line that those suggest; a line of Python where it can be run.
fn follow(tiny: &TinyRun, printed: &str) -> Vec<String> {
    let mut open = lines(printed);
    let mut done = Vec::new();
    while let Some(line) = open.pop() {
        if line.starts_with("python3 ") && python::interpreter("next_lines", "import torch, transformers").is_none() {
            continue;
        }
        let printed = typed(tiny, &line);
        if printed.contains("next:\n") {
            let more = lines(&printed).into_iter();
            open.extend(more.filter(|line| !done.contains(line)));
        }
        done.push(line);
    }
    done
}

#[test]
fn a_run_on_text_suggests_what_works_there() {
    for attention in [
        "kind = \"mha\"",
        "kind = \"nsa\"\ncompress_block_size = 8\ncompress_stride = 4\n\
                      compress = \"mean\"\nselect_block_size = 8\nnum_selected_blocks = 3\nwindow_size = 8",
    ] {
        let tiny = TinyRun::new(attention);
        // With a blank and a quote, as people's folders are called.
        let folder = "it's my run";
        let mut renamed = tiny.sieve("train --recipe tiny.toml --device cpu --set training.steps=4 --out");
        let printed = succeed(renamed.arg(folder));
        let done = follow(&tiny, &printed);
        let prompt = done.iter().find(|line| line.contains("generate")).expect("one");
        // Words of the held-out text, which the recipe names none of.
        assert!(!prompt.contains("fn main"), "{prompt}");
        for word in ["generate --prompt ", "eval ppl --recipe-validation", "export "] {
            assert!(done.iter().any(|line| line.contains(word)), "no {word:?} in {done:?}");
        }
    }
}

#[test]
fn a_synthetic_run_suggests_its_task() {
    let tiny = TinyRun::dma();
    let mqar = "--set tokenizer.numbers=64 --set data.format=mqar --set data.paths=[] --set training.steps=4 --set \
                data.mqar={vocab_size=64,seq_lens=[16],num_pairs=[2],num_samples=[500],num_test_samples=20}";
    let printed = succeed(&mut tiny.train("run", mqar));
    let done = follow(&tiny, &printed);
    assert!(done.iter().any(|line| line.contains("eval mqar")), "{done:?}");
    assert!(
        !done
            .iter()
            .any(|line| line.contains("generate") || line.contains("ppl")),
        "{done:?}"
    );
}

#[test]
fn a_new_recipe_on_one_text_trains() {
    let tiny = TinyRun::dma();
    let text = (0..60).map(|n| fs::read_to_string(tiny.path(&format!("corpus/{n:02}.txt"))));
    let text = text.collect::<Result<String, _>>().expect("a corpus");
    tiny.write("my text.txt", text);
    let smaller = "--set training.steps=4 --set tokenizer.train.vocab_size=280 --set validation.tokens=2048";
    for kind in ["mha", "swa", "dma", "mla", "nsa"] {
        let new = format!("recipe new --kind {kind} --out {kind}.toml {smaller} --data");
        let printed = succeed(tiny.sieve(&new).arg("my text.txt"));
        // The plan, the training, and what the training suggests.
        let done = follow(&tiny, &printed);
        assert!(done.iter().any(|line| line.contains("generate --prompt ")), "{done:?}");
        let log = tiny.read(&format!("out/{kind}/log"));
        assert!(log.contains("sample:\n"), "{log}");
        let written = tiny.read(&format!("{kind}.toml"));
        assert!(written.contains("prompts = [\""), "{written}");
    }
}
