//! Files and folders that cannot be written: the message names the path, and names it once.
use crate::tiny_run::{TinyRun, text};
use std::collections::BTreeSet;
use std::process::Output;

/// A command for each flag that names a file to write, which is its last word.
const FILES: &str = "
compare run --out
data batch --recipe tiny.toml --data-dir run/data --step 1 --out
data generate --tokenizer run/checkpoint/step-2/tokenizer.json --data corpus --tasks niah_single_1 --samples 1 --out
eval attention --checkpoint run --device cpu --data corpus --plot
eval longbench --checkpoint run --device cpu --folder bench --samples
eval mqar --checkpoint run --device cpu --plot
eval needle --checkpoint run --device cpu --data corpus --plot
eval patterns --checkpoint run --device cpu --data corpus --out
eval ppl --checkpoint run --device cpu --data corpus --max-tokens 9 --plot
eval ruler --checkpoint run --device cpu --lengths 400 --plot
eval ruler --checkpoint run --device cpu --lengths 400 --samples-file
eval selectors --checkpoint run --device cpu --data corpus --lengths 31 --plot
eval selectors --checkpoint run --device cpu --data corpus --lengths 31 --scores
eval tasks --checkpoint run --device cpu --data piqa=none.jsonl --samples
info --log-file
kernels bench --json
kernels capture --checkpoint run --device cpu --out
kernels check --device cpu --json
kernels run attention --device cpu --shape batch=1,seq_len=9,heads=2,kv_heads=1,head_dim=16 --out
logits --checkpoint run --device cpu --tokens 1,2 --out
recipe new --data corpus --out
tokenizer train --data corpus --vocab-size 300 --out
";

/// A command for each flag that names a folder to write into, which is its last word.
const FOLDERS: &str = "
data batch --recipe tiny.toml --step 1 --out new --data-dir
data prepare --recipe tiny.toml --data-dir
eval selectors --checkpoint run --device cpu --data corpus --lengths 31 --maps
export --checkpoint run --out
import --from exported --out
kernels build --arch sm_80 --out
man --out
train --recipe tiny.toml --device cpu --out
train --recipe tiny.toml --device cpu --out new --checkpoint-fallback
";

/// Flags that name a file or a folder to read.
const READ: &str = "--branch-from --checkpoint --compare --data --fewshot-data --folder --from --grid --operands
    --prompt-file --qa-1 --qa-2 --recipe --resume-from --text --tokenizer --tokens-file";

/// How often the error of a command names `path`.
fn times_named(output: &Output, path: &str) -> usize {
    let message = String::from_utf8_lossy(&output.stderr);
    let error = message.find("error: ").map_or("", |at| &message[at..]);
    let is_part = |letter: char| letter.is_alphanumeric() || letter == '_';
    // A longer name that begins or ends with this one is another name, but for the name of a temporary file.
    let ends = error.match_indices(path).filter(|(at, _)| !error[at + path.len()..].starts_with(is_part));
    ends.filter(|(at, _)| !error[..*at].ends_with(is_part)).count()
}

#[test]
fn an_error_about_a_file_that_cannot_be_written_names_it_once() {
    let tiny = TinyRun::new("kind = \"mha\"");
    std::fs::create_dir(tiny.path("bench")).expect("the folder is new");
    tiny.write("bench/hotpotqa.jsonl", "{}");
    tiny.prints("train --recipe tiny.toml --device cpu --out run --stop-after 2");
    tiny.prints("export --checkpoint run --out exported");
    tiny.write("a-file", "text");
    // The name fits a file system, and with the ending of a temporary file it does not.
    let long = "n".repeat(250);
    let mut files = vec!["a-file/below", "nowhere/below", "corpus", &long];
    let mut folders = vec!["a-file/below", "a-file"];
    if cfg!(target_os = "linux") {
        // Not even root writes there. The device is full.
        files.extend(["/proc/below", "/dev/full"]);
        folders.push("/proc/below");
    }
    let mut problems = Vec::new();
    for (commands, places) in [(FILES, files), (FOLDERS, folders)] {
        for command in commands.trim().lines() {
            // Evaluations and checks take their time, and are not run until they write.
            let is_long = ["eval", "kernels bench", "kernels check"].iter().any(|long| command.starts_with(long));
            for place in places.iter().filter(|place| !(is_long && **place == "/dev/full")) {
                let output = tiny.sieve(&format!("{command} {place}")).output().expect("the program starts");
                let (named, printed) = (times_named(&output, place), text(&output));
                let flag = command.rsplit(' ').next().expect("a flag");
                let needs_no_name = match named {
                    // Without a compiler there is no kernel to write. Only a file that is replaced has a longer name.
                    0 => {
                        printed.contains("no compiler")
                            || printed.contains(&format!("error: the file of {flag}"))
                            || (*place == long && output.status.success())
                    }
                    _ => false,
                };
                if named != 1 && !needs_no_name {
                    problems.push(format!("{command} {place}: {named} times\n{printed}"));
                }
                for made in [&long, "new"] {
                    let made = tiny.path(made);
                    _ = std::fs::remove_file(&made).or_else(|_| std::fs::remove_dir_all(&made));
                }
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n").replace(&long, "LONG"));
}

/// The names of the commands below `words`, or `words` if there are none; with the help of each.
fn helps(tiny: &TinyRun, words: &str) -> Vec<(String, String)> {
    let help = tiny.prints(&format!("{words} --help"));
    let below = help.split("\nCommands:\n").nth(1).map(|text| text.split("\n\n").next().unwrap_or_default());
    let names = below.into_iter().flat_map(str::lines).filter_map(|line| line.strip_prefix("  "));
    let names = names.filter(|line| !line.starts_with(' ')).filter_map(|line| line.split_whitespace().next());
    let names = names.filter(|name| *name != "help").map(str::to_owned).collect::<Vec<_>>();
    if names.is_empty() {
        vec![(words.to_owned(), help)]
    } else {
        names.iter().flat_map(|name| helps(tiny, format!("{words} {name}").trim())).collect()
    }
}

#[test]
fn each_flag_that_names_a_path_is_known_to_read_or_to_write_it() {
    let tiny = TinyRun::dma();
    let written: BTreeSet<String> = [FILES, FOLDERS]
        .iter()
        .flat_map(|commands| commands.trim().lines())
        .map(|command| {
            let name = command.split(" --").next().expect("a name").split_whitespace().take(2);
            let flag = command.rsplit(' ').next().expect("a flag");
            format!("{} {flag}", name.collect::<Vec<_>>().join(" "))
        })
        .collect();
    for (command, help) in helps(&tiny, "") {
        for line in help.lines() {
            let words = line.split(['<', '>']).collect::<Vec<_>>();
            let Some(flag) = words[0].split_whitespace().find(|word| word.starts_with("--")) else { continue };
            let is_path =
                words.get(1).is_some_and(|value| ["FILE", "DIR", "PATH"].iter().any(|end| value.ends_with(end)));
            if !is_path || flag == "--log-file" || READ.split_whitespace().any(|read| read == flag) {
                continue;
            }
            let is_tested = written.iter().any(|tested| {
                let (name, tested_flag) = tested.rsplit_once(' ').expect("a flag");
                tested_flag == flag && (name == command || name.split(' ').next() == Some(&command))
            });
            assert!(is_tested, "{command} {flag} names a path: add it to FILES, FOLDERS or READ");
        }
    }
}
