//! Documentation pages that quote the program's messages and flags: each quoted message and flag exists.
use crate::tiny_run::TinyRun;
use std::fs;
use std::path::{Path, PathBuf};

/// The texts of all Rust files below a folder.
fn sources(folder: &Path) -> String {
    let entries = fs::read_dir(folder).expect("readable");
    let text = |path: PathBuf| match path.extension() {
        _ if path.is_dir() => sources(&path),
        Some(ending) if ending == "rs" => fs::read_to_string(&path).expect("readable"),
        _ => String::new(),
    };
    entries.map(|it| text(it.expect("readable").path())).collect()
}

#[test]
fn troubleshooting_names_messages_that_the_program_prints() {
    // Strings of the sources span several lines: a backslash, the line's end and the next line's indent are removed.
    let crates = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates");
    let lab = concat!(env!("CARGO_MANIFEST_DIR"), "/../lab/crates");
    let all = sources(crates.as_ref()) + &sources(lab.as_ref()) + include_str!("../recipes/dma_80m.toml");
    let lines = all.split("\\\n").map(str::trim_start);
    let sources = lines.collect::<String>().replace("\\\"", "\"");
    let page = include_str!("../docs/troubleshooting.md").replace("\\|", "|");
    let mut num_messages = 0;
    for line in page.lines().filter(|line| line.starts_with("| `")) {
        let cell = line.split(" | ").next().expect("a cell");
        for message in cell.split('`').skip(1).step_by(2) {
            // A page may abbreviate a message by `…`, and its quoted names and numbers may differ. The remaining parts
            // are compared.
            let mut parts = message.split(['…', '"']).collect::<Vec<_>>();
            for other in [" N ", " of M ", " X", " Y ", ": N "] {
                parts = parts.into_iter().flat_map(|part| part.split(other)).collect();
            }
            let longest = parts.into_iter().max_by_key(|part| part.len()).expect("a part").trim();
            let longest = longest.strip_suffix(" 7.x").unwrap_or(longest);
            assert!(longest.len() > 4 && sources.contains(longest), "{message}: {longest:?} is in no source");
            num_messages += 1;
        }
    }
    assert!(num_messages > 25, "{num_messages}");
}

/// The commands that measured the stored rows of a file of lab/rows; none of a page.
fn commands_of_rows(path: &Path, text: &str) -> Vec<String> {
    if path.extension().is_none_or(|ending| ending != "jsonl") {
        return Vec::new();
    }
    let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("a line of JSON"));
    let commands = lines.filter_map(|line| line["command"].as_str().map(|command| command.replace(" && ", "; ")));
    commands.flat_map(|command| command.split("; ").map(str::to_owned).collect::<Vec<_>>()).collect()
}

#[test]
fn commands_on_the_pages_have_the_flags_they_name() {
    let tiny = TinyRun::dma();
    let folders = ["docs", "lab/docs"].map(|name| format!("{}/../{name}", env!("CARGO_MANIFEST_DIR")));
    let entries = folders.iter().flat_map(|folder| fs::read_dir(folder).expect("readable"));
    let pages = entries.map(|it| it.expect("readable").path());
    let mut pages = pages.filter(|path| path.extension().is_some_and(|ending| ending == "md")).collect::<Vec<_>>();
    pages.push(concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md").into());
    let rows = concat!(env!("CARGO_MANIFEST_DIR"), "/../lab/rows");
    pages.extend(fs::read_dir(rows).expect("readable").map(|it| it.expect("readable").path()));
    let mut helps = std::collections::BTreeMap::new();
    let mut num_flags = 0;
    for page in pages {
        let text = fs::read_to_string(&page).expect("readable");
        let stored = commands_of_rows(&page, &text);
        let fenced = text.split("```").skip(1).step_by(2).flat_map(str::lines);
        let inline = text.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
        let code = fenced.chain(inline).chain(stored.iter().map(String::as_str));
        let commands = code.filter_map(|code| code.trim().strip_prefix("sieve "));
        for command in commands {
            let words =
                command.split_whitespace().take_while(|word| word.chars().all(|letter| letter.is_ascii_lowercase()));
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
                output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
            });
            let Some(help) = help else {
                // `eval ppl|needle` stands for two commands; `…` stands for arguments.
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
    assert!(num_flags > 120, "{num_flags}");
}
