//! Commands that cannot fit into memory, each under a limit of address space, so that a failure costs the machine
//! nothing.
use crate::tiny_run::{TinyRun, refused, succeed};
use std::process::Command;

/// Address space of the program in these tests, in KiB: enough for every tiny run.
const LIMIT_KIB: usize = 6_000_000;

/// The program under the limit.
fn limited(run: &TinyRun, args: &str) -> Command {
    let command = run.sieve(args);
    let mut shell = Command::new("sh");
    shell
        .arg("-c")
        .arg(format!("ulimit -v {LIMIT_KIB} && exec \"$0\" \"$@\""))
        .arg(command.get_program())
        .args(command.get_args())
        .stdin(std::process::Stdio::null());
    if let Some(folder) = command.get_current_dir() {
        shell.current_dir(folder);
    }
    for (name, value) in command.get_envs() {
        shell.env(name, value.unwrap_or_default());
    }
    shell
}

const MANY_ROWS: &str = "--set training.local_batch_size=1000000 --set training.global_batch_size=1000000";
const WIDE: &str = "--set model.hidden_size=1000000";

#[test]
fn a_run_that_cannot_fit_is_refused_before_anything_is_written() {
    let run = TinyRun::dma();
    for (settings, part, hint) in [
        (
            MANY_ROWS,
            "activations ",
            "it would fit with training.local_batch_size=",
        ),
        (WIDE, "moments ", "the weights and the optimizer's state are too large"),
    ] {
        let train = format!("train --recipe tiny.toml --device cpu --out out {settings}");
        refused(
            &mut limited(&run, &train),
            &format!("this run does not fit: it needs  |  GiB available | {part} | {hint} | --ignore-memory"),
        );
        assert!(!run.path("out").exists(), "{settings}");
    }
}

#[test]
fn processes_on_one_host_share_its_memory() {
    let run = TinyRun::dma();
    let rows = "--set training.local_batch_size=24000 --set training.global_batch_size=96000";
    // One of them fits.
    let plan = succeed(&mut limited(&run, &format!("plan --recipe tiny.toml {rows}")));
    let line = plan.lines().find(|line| line.starts_with("memory"));
    assert!(line.is_some_and(|line| line.contains(": fits")), "{plan}");
    let train = format!("train --recipe tiny.toml --device cpu --out out {rows}");
    let message = refused(
        &mut limited(&run, &format!("launch --nproc 4 -- {train}")),
        "this run does not fit: it needs  | --ignore-memory",
    );
    assert_eq!(message.matches("error:").count(), 1, "{message}");
    assert!(!run.path("out").exists());
}

#[test]
fn plan_and_train_say_the_same_of_memory() {
    let run = TinyRun::dma();
    let plan = succeed(&mut limited(&run, &format!("plan --recipe tiny.toml {MANY_ROWS}")));
    let line = plan.lines().find(|line| line.starts_with("memory"));
    let line = line.unwrap_or_else(|| panic!("no memory in {plan}"));
    assert!(line.contains("does not fit"), "{line}");
    let needed = line.split_whitespace().nth(1).expect("a number");
    let (_, moment) = line.rsplit_once("; ").expect("a moment");
    let train = format!("train --recipe tiny.toml --device cpu --out out {MANY_ROWS}");
    refused(
        &mut limited(&run, &train),
        &format!("does not fit: it needs {needed} GiB of  | {moment}"),
    );
}

/// A run whose checkpoint says another size in its recipe: 16 GiB of weights, which its file does not have.
fn too_wide() -> TinyRun {
    let run = TinyRun::dma();
    run.trained("out", "");
    let config = run.path("out/checkpoint/step-40/config.toml");
    let text = std::fs::read_to_string(&config).expect("a recipe");
    let wide = text.replace("hidden_size = 32", "hidden_size = 1000000");
    assert_ne!(text, wide);
    std::fs::write(&config, wide).expect("writable");
    run
}

#[test]
fn lengths_of_0_are_refused_before_their_memory_is_planned() {
    let run = too_wide();
    for command in [
        "needle --lengths 0,400",
        "selectors --data corpus/00.txt --lengths 0",
        "patterns --data corpus/00.txt --length 0 --out patterns.json",
    ] {
        refused(
            &mut limited(&run, &format!("eval {command} --checkpoint out --device cpu")),
            "must be positive | hint: ",
        );
    }
}

#[test]
fn a_checkpoint_that_cannot_be_held_is_not_read() {
    let run = too_wide();
    run.write("rows.jsonl", "{\"text\": \"the fox\"}");
    for command in [
        "generate --checkpoint out --prompt the --device cpu",
        "eval ppl --checkpoint out --data corpus/00.txt --device cpu",
        "eval tasks --checkpoint out --data lambada_openai=rows.jsonl --device cpu",
        "logits --checkpoint out --tokens 1,2,3 --out logits.safetensors --device cpu",
    ] {
        refused(
            &mut limited(&run, command),
            "this model does not fit: it needs  | parameters  | --ignore-memory",
        );
        // Told to go on, the command comes to read the file and finds it changed.
        refused(
            &mut limited(&run, &format!("{command} --ignore-memory")),
            "warning: this model does not fit | config.toml | checksum",
        );
    }
}
