//! The lines that commands print under `next:` are typed as they are.
use crate::python;
use crate::tiny_run::{TinyRun, piped, succeed, written};
use sieve_testing::says;
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
    tiny.refuses("recipe new --out dma.toml", "dma.toml is there already | --out");
    tiny.refuses(
        "recipe new --set training.stepz=3",
        "training.stepz | did you mean steps?",
    );
    tiny.refuses_each(
        "recipe",
        "
        new --size 2b => 2b
        new --kind gla => gla
        show nothing => nothing
        nw => nw
    ",
    );
}

#[test]
fn recipes_of_every_size_and_kind_are_planned() {
    let tiny = TinyRun::dma();
    for size in ["10m", "30m", "80m", "1p7b"] {
        for kind in ["mha", "swa", "dma", "mla", "nsa"] {
            let name = format!("{kind}_{size}.toml");
            // A text that is not there yet: a recipe for one that is fits it.
            let new = format!("recipe new --size {size} --kind {kind} --data later.txt --out {name}");
            let printed = tiny.prints(&new);
            assert!(
                lines(&printed)[1].ends_with(&format!("train --recipe {name}")),
                "{printed}"
            );
            let planned = tiny.prints(&format!("plan --recipe {name} --gpu h200"));
            assert!(planned.contains(&format!("attention {kind}")), "{planned}");
        }
    }
}

#[test]
fn a_new_recipe_fits_its_text_and_its_context() {
    let tiny = TinyRun::dma();
    tiny.write(
        "notes.txt",
        "the cat sees the river and the dog follows seven stones\n".repeat(11_000),
    );
    let both = |args: &str| {
        let output = tiny.sieve(args).output().expect("the program starts");
        assert!(output.status.success(), "{args}");
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    };
    let [recipe, said] = both("recipe new --data notes.txt");
    assert!(recipe.contains("\nsteps = 400\n"), "{recipe}");
    assert_eq!(said, "");
    // Two thirds of a megabyte is fifteen epochs of a third of the steps of 10m, and no text for 80m.
    let [recipe, said] = both("recipe new --size 10m --data notes.txt");
    assert!(recipe.contains("\nsteps = 401\n"), "{recipe}");
    says(
        &said,
        "the text has about 205.3K tokens: 401 steps read it about 16 times",
    );
    tiny.refuses(
        "recipe new --size 80m --data notes.txt --out no.toml",
        "601.56 KiB of text are too little for --size 80m, which takes 2.34 MiB or more | --set training.steps=N",
    );
    let [recipe, said] = both("recipe new --size 80m --data notes.txt --set training.steps=800");
    assert!(recipe.contains("\nsteps = 800\n"), "{recipe}");
    says(&said, "800 steps read it about 511 times");
    for (size, tokens) in [("1m", "2,048"), ("80m", "131,072")] {
        let new = format!("recipe new --size {size} --context 512 --data later.txt --out {size}.toml");
        tiny.prints(&new);
        let planned = tiny.prints(&format!("plan --recipe {size}.toml"));
        says(&planned, &format!("steps of {tokens} tokens, rows of 512"));
    }
    tiny.refuses(
        "recipe new --size 1p7b --context 512",
        "--context is for recipes without [[stage]]",
    );
    // What is read often is said before it is tokenised, too.
    tiny.prints("recipe new --data notes.txt --out often.toml");
    let often = "more than 4 times teaches less each time";
    let planned = tiny.prints("plan --recipe often.toml");
    assert!(!planned.contains(often), "{planned}");
    says(
        &planned,
        "text       not tokenised yet, read about 4.0 times by its size",
    );
    let planned = tiny.prints("plan --recipe often.toml --set training.steps=500");
    says(&planned, &format!("read about 5.0 times by its size | {often}"));
}

#[test]
fn a_recipe_comes_through_a_pipe() {
    let tiny = TinyRun::dma();
    for name in ["-", "/dev/stdin"] {
        let output = piped(
            &mut tiny.sieve(&format!("plan --recipe {name}")),
            &tiny.read("tiny.toml"),
        );
        let printed = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{name}: {printed}");
        says(&printed, "attention dma");
    }
    tiny.refuses("plan --recipe -", "the standard input is not a valid recipe");
    tiny.refuses(
        "plan --recipe /dev/zero",
        "/dev/zero is not a recipe: it is longer than",
    );
}

#[test]
fn recipes_are_shown_as_written_and_explained() {
    let tiny = TinyRun::dma();
    let all = tiny.prints("recipe show");
    says(&all, "quickstart.toml | mqar_dma.toml");
    let text = tiny.prints("recipe show quickstart");
    assert_eq!(text, include_str!("../recipes/quickstart.toml"));
    let explained = tiny.prints("recipe show tiny --all --set optimizer.lr=7e-4");
    says(&explained, "lr = 0.0007 | # Highest learning rate. | # beta1 = 0.9");
    tiny.write("again.toml", explained);
    tiny.prints("plan --recipe again");
}
