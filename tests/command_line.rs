//! What holds for every command: how much is printed, where to, and what the program says of itself.
use crate::tiny_run::{TinyRun, json, number, piped, refused, spawned, text};
use sieve_testing::{cases, says};
use std::fs;
use std::path::PathBuf;
use std::process::Command;

fn stdout(command: &mut Command) -> String {
    let output = command.output().expect("the program starts");
    assert!(output.status.success(), "{}", text(&output));
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[test]
fn the_page_of_the_command_line_names_every_variable() {
    let page = include_str!("../docs/command-line.md");
    let mut found = Vec::new();
    for (path, text) in sources().filter(|(path, _)| !path.ends_with("build.rs")) {
        for call in ["variable(\"", "env::var(\"", "env::var_os(\""] {
            let names = text.split(call).skip(1).filter_map(|rest| rest.split('"').next());
            found.extend(names.map(|name| (name.to_owned(), path.clone())));
        }
    }
    assert!(found.iter().any(|(name, _)| name == "HF_TOKEN"), "{found:?}");
    let own = [
        "SIEVE_TEST_",
        "UPDATE_GOLDEN",
        "CARGO",
        "PYTHON",
        "PATH",
        "OUT_DIR",
        "X",
    ];
    for (name, path) in found {
        let is_of_builds = own.iter().any(|start| name.starts_with(start)) || path.to_string_lossy().contains("xtask");
        assert!(
            is_of_builds || page.contains(&format!("`{name}`")),
            "{name}, read by {}, is not on docs/command-line.md",
            path.display()
        );
    }
    for code in ["| 0 |", "| 1 |", "| 2 |", "| 75 |", "| 130 |"] {
        assert!(page.contains(code), "{code}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn results_that_cannot_be_written_are_an_error() {
    let tiny = TinyRun::dma();
    tiny.trained("run", "--set training.steps=8");
    let full = || fs::OpenOptions::new().write(true).open("/dev/full").expect("there");
    for command in [
        "--help",
        "--version",
        "train --help",
        "info",
        "recipe new",
        "recipe show quickstart",
        "recipe keys",
        "plan --recipe tiny.toml",
        "completions bash",
        "compare run",
        "data prepare --recipe tiny.toml --data-dir prepared",
        "generate --checkpoint run --device cpu --prompt the --max-new-tokens 2",
        "eval ppl --checkpoint run --device cpu --recipe-validation --json",
        "export --checkpoint run --out exported",
    ] {
        let mut command = tiny.sieve(command);
        let output = command.stdout(full()).output().expect("the program starts");
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{command:?}: {message}");
        let said = "standard output could not be written: No space left on device";
        assert_eq!(message.matches(said).count(), 1, "{command:?}: {message}");
        assert!(message.contains("hint: "), "{command:?}: {message}");
        // A reader that goes away has read what it wanted.
        let mut child = spawned(&mut command);
        drop(child.stdout.take());
        let output = child.wait_with_output().expect("it ends");
        let message = String::from_utf8_lossy(&output.stderr);
        let is_repeated = message.contains("holds");
        assert!(output.status.success() || is_repeated, "{command:?}: {message}");
    }
    assert!(tiny.path("exported/model.safetensors").is_file());

    // A run keeps its steps, and its own log has its lines.
    let mut train = tiny.train("lost", "--set training.steps=8");
    let output = train.stdout(full()).output().expect("the program starts");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    says(
        &text(&output),
        "standard output could not be written | its lines in its own log",
    );
    tiny.assert_same_at("lost", "run", 8);
    assert!(tiny.read("lost/log").contains("step:     8 "));
    // A log file is output too.
    let mut train = tiny.train("stopped", "--stop-after 2 --log-file /dev/full");
    let output = train.output().expect("the program starts");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    says(&text(&output), "the file of --log-file could not be written");
}

#[test]
fn generate_takes_files_samples_and_stops() {
    let tiny = TinyRun::new("kind = \"mha\"");
    tiny.trained("run", "--set training.steps=20");
    let of_run = "generate --device cpu --checkpoint run --max-new-tokens 20 --temperature 1.5";
    let prompted = |words: &str, prompt: &str| stdout(tiny.sieve(words).args(["--prompt", prompt]));
    let the_cat = |more: &str| prompted(&format!("{of_run} {more}"), "the cat");
    let direct = prompted(of_run, "the cat sees");
    tiny.write("prompt.txt", "the cat sees");
    let of_file = format!("{of_run} --prompt-file prompt.txt");
    assert_eq!(stdout(&mut tiny.sieve(&of_file)), direct);
    for dash in ["--prompt -", "--prompt-file -"] {
        let output = piped(&mut tiny.sieve(&format!("{of_run} {dash}")), "the cat sees");
        assert_eq!(String::from_utf8_lossy(&output.stdout), direct, "{dash}");
    }

    // Three samples are those of three seeds.
    let three = the_cat("--samples 3 --seed 4");
    for seed in 4..7 {
        let one = the_cat(&format!("--seed {seed}"));
        assert!(three.contains(&format!("seed {seed}\n{one}")), "{three}");
    }
    // More than grow together: the last of them are of the seeds that they would have, and come after the first.
    let short = of_run.replace("tokens 20", "tokens 2");
    let many = prompted(&format!("{short} --samples 130"), "the cat");
    assert_eq!(many.matches("--- sample ").count(), 130);
    let one = prompted(&format!("{short} --seed 129"), "the cat");
    assert!(many.ends_with(&format!("sample 130 of 130, seed 129\n{one}")), "{many}");
    // One likeliest token is greedy, whatever the temperature.
    let greedy = prompted(&of_run.replace("1.5", "0"), "the cat");
    assert_eq!(greedy, the_cat("--top-k 1"));
    let rest = greedy.trim_end().strip_prefix("the cat").expect("the prompt first");
    let middle = rest.chars().skip(6).take(3).collect::<String>();
    let mut cut = tiny.sieve(&format!("{of_run} --top-k 1 --prompt"));
    let cut = stdout(cut.args(["the cat", "--stop", &middle]));
    let wanted = &rest[..rest.find(&middle).expect("in it")];
    assert_eq!(cut, format!("the cat{wanted}\n"));

    let printed = the_cat("--json --samples 2");
    let lines = printed.lines().map(json).collect::<Vec<_>>();
    assert_eq!((lines.len(), &lines[1]["seed"]), (2, &1.into()));
    assert!(number(&lines[0]["tokens_per_second"]) > 0.0, "{printed}");
    // A short prompt leaves a selector nothing to leave out, and that is said.
    let mut quest = tiny.sieve(&format!("{of_run} --selector quest --prompt"));
    let quest = quest.arg("the cat").output().expect("the program starts");
    let said = String::from_utf8_lossy(&quest.stderr);
    says(&said, "warning: quest left nothing out |  a second;");
    for [threads, words] in cases(
        "
        9999 => RAYON_NUM_THREADS=9999 asks for too many threads | hint: give at most
        abc => RAYON_NUM_THREADS=abc is not a number of threads
    ",
    ) {
        let mut command = tiny.sieve(of_run);
        refused(command.args(["--prompt", "x"]).env("RAYON_NUM_THREADS", threads), words);
    }
}

/// All Rust files of the crates, with their texts.
fn sources() -> impl Iterator<Item = (PathBuf, String)> {
    let mut open = vec![PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../crates"))];
    let files = std::iter::from_fn(move || {
        let path = open.pop()?;
        if path.is_dir() {
            let entries = fs::read_dir(&path).expect("readable");
            open.extend(entries.map(|it| it.expect("readable").path()));
        }
        Some(path)
    });
    let rust = files.filter(|path| path.extension().is_some_and(|ending| ending == "rs"));
    rust.map(|path| {
        let text = fs::read_to_string(&path).expect("readable");
        (path, text)
    })
}

#[test]
fn troubleshooting_names_messages_that_the_program_prints() {
    // Without what the compiler takes for the end of a line in a string.
    let all = sources().map(|(_, text)| text).collect::<String>() + include_str!("../recipes/dma_80m.toml");
    let lines = all.split("\\\n").map(str::trim_start);
    let sources = lines.collect::<String>().replace("\\\"", "\"");
    let page = include_str!("../docs/troubleshooting.md").replace("\\|", "|");
    let mut num_messages = 0;
    for line in page.lines().filter(|line| line.starts_with("| `")) {
        let cell = line.split(" | ").next().expect("a cell");
        for message in cell.split('`').skip(1).step_by(2) {
            // Names, numbers and what is left out differ.
            let mut parts = message.split(['…', '"']).collect::<Vec<_>>();
            for other in [" N ", " of M ", " X", " Y ", ": N "] {
                parts = parts.into_iter().flat_map(|part| part.split(other)).collect();
            }
            let longest = parts.into_iter().max_by_key(|part| part.len()).expect("a part").trim();
            let longest = longest.strip_suffix(" 7.x").unwrap_or(longest);
            assert!(
                longest.len() > 4 && sources.contains(longest),
                "{message}: {longest:?} is in no source"
            );
            num_messages += 1;
        }
    }
    assert!(num_messages > 25, "{num_messages}");
}

#[test]
fn commands_on_the_pages_have_the_flags_they_name() {
    let tiny = TinyRun::dma();
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs");
    let pages = fs::read_dir(docs)
        .expect("readable")
        .map(|it| it.expect("readable").path());
    let mut pages = pages
        .filter(|path| path.extension().is_some_and(|ending| ending == "md"))
        .collect::<Vec<_>>();
    pages.push(concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md").into());
    let mut helps = std::collections::BTreeMap::new();
    let mut num_flags = 0;
    for page in pages {
        let text = fs::read_to_string(&page).expect("readable");
        let fenced = text.split("```").skip(1).step_by(2).flat_map(str::lines);
        let inline = text.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
        let commands = fenced
            .chain(inline)
            .filter_map(|code| code.trim().strip_prefix("sieve "));
        for command in commands {
            let words = command
                .split_whitespace()
                .take_while(|word| word.chars().all(|letter| letter.is_ascii_lowercase()));
            let mut words = words.map(str::to_owned).collect::<Vec<_>>();
            let is_group =
                ["eval", "data", "recipe", "tokenizer", "kernels"].contains(&words.first().map_or("", |word| word));
            words.truncate(if is_group { 2 } else { 1 });
            let mut names = command.split_whitespace().take(2);
            if words.is_empty() || names.any(|name| name.contains('|')) {
                continue;
            }
            let help = helps.entry(words.clone()).or_insert_with(|| {
                let mut command = tiny.sieve(&format!("{} --help", words.join(" ")));
                let output = command.output().expect("it starts");
                output
                    .status
                    .success()
                    .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
            });
            let Some(help) = help else {
                // A command with `|` between its names.
                assert!(command.contains(['|', '…']), "{}: sieve {command}", page.display());
                continue;
            };
            let end = [" -- ", "   "].into_iter().filter_map(|mark| command.find(mark)).min();
            let own = &command[..end.unwrap_or(command.len())];
            let flags = own.split(|letter: char| letter.is_whitespace() || "[]()=`',;:".contains(letter));
            for flag in flags.filter(|word| word.starts_with("--") && word.len() > 2) {
                let mut ends = [" ", "\n", "[="].into_iter();
                let is_there = ends.any(|end| help.contains(&format!("{flag}{end}")));
                assert!(
                    is_there || flag == "--help" || flag == "--version",
                    "{}: sieve {command}: no {flag}",
                    page.display()
                );
                num_flags += 1;
            }
        }
    }
    assert!(num_flags > 60, "{num_flags}");
}
