//! Named pipes in the place of files, and standard output whose reader leaves.
use crate::serve::dense;
use crate::tiny_run::{TinyRun, ended, refused, spawned};
use std::fs;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

/// A copy of a folder in which `file` is a named pipe that nobody writes to.
fn with_pipe(tiny: &TinyRun, from: &str, file: &str) -> String {
    let to = format!("{}_{file}", from.replace('/', "_"));
    fs::create_dir(tiny.path(&to)).expect("a new folder");
    for name in tiny.names(from).iter().filter(|name| *name != file) {
        fs::copy(tiny.path(from).join(name), tiny.path(&to).join(name)).expect("copied");
    }
    let made = Command::new("mkfifo").arg(tiny.path(&to).join(file)).status().expect("it runs");
    assert!(made.success());
    to
}

#[test]
fn a_named_pipe_in_the_place_of_a_model_s_file_is_refused() {
    let tiny = dense();
    tiny.prints("export --checkpoint run --out hf");
    let step = format!("run/{}", tiny.names("run")[0]);
    for (from, files) in [
        (&*step, &["config.toml", "model.safetensors", "state.json", "tokenizer.json"][..]),
        (
            "hf",
            &["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"],
        ),
    ] {
        for file in files {
            let folder = with_pipe(&tiny, from, file);
            let generate = format!("generate --checkpoint {folder} --device cpu --prompt t5 --max-new-tokens 2");
            refused(&mut tiny.sieve(&generate), &format!("{file} | a pipe (FIFO)"));
        }
    }
}

#[test]
fn a_command_that_only_prints_ends_with_its_reader() {
    let tiny = dense();
    // Each takes hours.
    for command in [
        "eval mqar --checkpoint run --kinds 32:4 --samples 1000000000",
        "eval needle --checkpoint run --lengths 64 --depths 50 --needles 1000000 --buffer 50",
        "generate --checkpoint run --prompt t5 --samples 1000000000",
        "kernels check --cases 1000000",
    ] {
        let started = |more: &str| {
            let command = format!("{command} --device cpu {more}");
            spawned(tiny.sieve(&command).stdout(Stdio::piped()).stderr(Stdio::null()))
        };
        let mut child = started("");
        drop(child.stdout.take());
        ended(child, 0);
        // What it prints is in a file, too.
        let mut child = started("--log-file lines.txt");
        drop(child.stdout.take());
        sleep(Duration::from_secs(1));
        assert!(child.try_wait().expect("its state").is_none(), "{command}");
        child.kill().expect("ended");
        child.wait().expect("ended");
    }
}
