//! Checks every file: the number and the width of its lines, that it is not named mod.rs, and that it names no path of
//! a build machine, no package registry and no issue by its number; and the size of the trained model's folder.
use crate::workspace;
use anyhow::Result;

/// Most lines of a source file.
const MAX_LINES: usize = 800;

/// Files that may have more lines: an export's code, since transformers takes only one file.
const LONGER: &[(&str, usize)] = &[("crates/sieve-hf/src/export/modeling_sieve.py", 894)];

/// Most columns of a line of Rust or CUDA, comments included.
const MAX_COLUMNS: usize = 120;

/// Endings of files to which this limit applies.
const WRAPPED: &[&str] = &[".rs", ".cu", ".cuh"];

/// A comment that begins so, on the line before, allows a longer line and gives the reason.
const LONG_LINE: &str = "// Long line: ";

/// Endings of source files, whose lines are counted.
const SOURCES: &[&str] = &[".rs", ".cu", ".cuh", ".py", ".sh"];

/// Endings of files that are searched for forbidden words.
const TEXTS: &[&str] = &[".rs", ".cu", ".cuh", ".py", ".sh", ".md", ".toml", ".yml", ".yaml", "run"];

/// Paths and addresses of the machines on which files were made. Each is written in two parts, so that this file itself
/// does not contain it.
const FORBIDDEN: &[&str] = &[
    concat!("..", "/shared"),
    concat!("/", "work/"),
    concat!("/", "root/"),
    concat!("index.", "crates.io"),
    concat!("files.", "pythonhosted.org"),
];

/// The program's sources, whose results take their places whole or not at all.
const PROGRAM: [&str; 3] = ["crates/sieve/src/", "crates/sieve-host/src/", "lab/crates/sieve-lab/src/"];

/// Files that read what no person names: what the system tells under /proc, the cache's own files, the emulator's.
const OWN_READS: &[&str] = &[
    "crates/sieve-comm/src/mesh/join.rs",
    "crates/sieve-data/src/mutated.rs",
    "crates/sieve-files/src/atomic_file.rs",
    "crates/sieve-files/src/read.rs",
    "crates/sieve-files/src/write.rs",
    "crates/sieve-gpu/src/runtime/cubins.rs",
    "crates/sieve-host/src/device.rs",
    "crates/sieve-host/src/interrupt.rs",
    "crates/sieve-kernels/src/cache.rs",
    "crates/sieve-testing/src/clock.rs",
    "crates/sieve-train/src/memory.rs",
    "lab/crates/sieve-bench/src/emulator.rs",
];

/// The folders of trained models in the repository, and how large each may be.
const MODELS: &[(&str, u64)] =
    &[("checkpoints/tiny/", 8_000_000), ("checkpoints/tiny8k/", 25_000_000), ("checkpoints/tiny_paper/", 8_000_000)];

/// Checks all files of the repository.
pub(crate) fn check(problems: &mut Vec<String>) -> Result<()> {
    let mut model_bytes = [0; MODELS.len()];
    for file in workspace::files()? {
        if file.ends_with("/mod.rs") {
            problems.push(format!(
                "{file}: name the module's file after it (attention.rs beside attention/), not \
                mod.rs"
            ));
        }
        if is_named_as_a_flag(&file) {
            problems
                .push(format!("{file}: a program that was asked for something wrote it under that name; remove it"));
        }
        if let Some(model) = MODELS.iter().position(|(folder, _)| file.starts_with(folder)) {
            model_bytes[model] += std::fs::metadata(workspace::root().join(&file))?.len();
        }
        let is = |endings: &[&str]| endings.iter().any(|ending| file.ends_with(ending));
        if !is(SOURCES) && !is(TEXTS) {
            continue;
        }
        let Ok(text) = workspace::read(&file) else {
            continue; // The file is not UTF-8.
        };
        let longer = LONGER.iter().find(|(name, _)| *name == file);
        let most = longer.map_or(MAX_LINES, |(_, most)| *most);
        if is(SOURCES) && text.lines().count() > most {
            problems.push(format!("{file}: {} lines, at most {most}; split it by topic", text.lines().count()));
        }
        if is(WRAPPED) {
            problems.extend(long_lines(&text).map(|line| {
                format!(
                    "{file}:{line}: more than {MAX_COLUMNS} columns; wrap it, or say why not before it: `{LONG_LINE}..`"
                )
            }));
        }
        if PROGRAM.iter().any(|folder| file.starts_with(folder)) && !file.ends_with("/tests.rs") {
            problems.extend(
                half_files(&text).map(|line| {
                    format!("{file}:{line}: a full disk leaves half a file here; use OutFile or sieve_files")
                }),
            );
        }
        let is_test = file.ends_with("/tests.rs") || file.contains("/tests/");
        let is_program = file.contains("/src/") && file.ends_with(".rs") && !file.starts_with("crates/xtask/");
        if is_program && !is_test && !OWN_READS.contains(&&*file) {
            problems.extend(
                plain_reads(&text).map(|line| {
                    format!("{file}:{line}: a named pipe is waited for here without an end; use sieve_files")
                }),
            );
        }
        for (index, line) in text.lines().enumerate() {
            if let Some(word) = forbidden_in(line) {
                problems.push(format!("{file}:{}: \"{word}\" does not belong into the repository", index + 1));
            }
        }
    }
    for ((folder, most), bytes) in MODELS.iter().zip(model_bytes) {
        if bytes > *most {
            problems.push(format!("{folder}: {bytes} bytes, at most {most}"));
        }
    }
    Ok(())
}

/// Numbers of the lines outside of tests that write a file directly under its name.
fn half_files(text: &str) -> impl Iterator<Item = usize> {
    lines_of_code(text, [concat!("fs::", "write(")])
}

/// Numbers of the lines outside of tests that read whatever stands in the place of a file.
fn plain_reads(text: &str) -> impl Iterator<Item = usize> {
    lines_of_code(text, [concat!("fs::", "read("), concat!("fs::", "read_to_string("), concat!("File", "::open(")])
}

/// Numbers of the lines outside of tests and comments that contain one of these words.
fn lines_of_code<const N: usize>(text: &str, words: [&str; N]) -> impl Iterator<Item = usize> {
    let code = text.split("#[cfg(test)]").next().unwrap_or(text);
    // MappedFile is another type than File.
    let begins = |before: &str| !before.ends_with(char::is_alphanumeric);
    let has_word = move |line: &str| {
        let found = words.iter().any(|word| line.match_indices(word).any(|(at, _)| begins(&line[..at])));
        found && !line.trim_start().starts_with("//")
    };
    code.lines().zip(1..).filter_map(move |(line, number)| has_word(line).then_some(number))
}

/// Numbers of the lines that are too long. Tables in comments and lines with a reason may be longer.
fn long_lines(text: &str) -> impl Iterator<Item = usize> {
    let before = std::iter::once("").chain(text.lines());
    let lines = text.lines().zip(before).zip(1..);
    lines.filter_map(|((line, before), number)| {
        let is_table = line.trim_start().trim_start_matches(['/', '!']).starts_with(" |");
        let has_reason = before.trim_start().starts_with(LONG_LINE);
        (line.chars().count() > MAX_COLUMNS && !is_table && !has_reason).then_some(number)
    })
}

/// The first forbidden word of a line, or reference to an issue by its number.
fn forbidden_in(line: &str) -> Option<String> {
    if let Some(word) = FORBIDDEN.iter().find(|word| line.contains(**word)) {
        return Some((*word).to_owned());
    }
    let lower = line.to_lowercase();
    lower.match_indices("issue").find_map(|(at, word)| {
        let rest = lower[at + word.len()..].trim_start_matches([' ', '#']);
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        (!digits.is_empty()).then(|| format!("issue {digits}"))
    })
}

/// Whether a folder of the path or the file itself is named as a flag is.
fn is_named_as_a_flag(file: &str) -> bool {
    file.split('/').any(|name| name.starts_with('-'))
}

#[cfg(test)]
mod tests {
    use super::{half_files, is_named_as_a_flag, plain_reads};

    #[test]
    fn a_file_that_is_named_as_a_flag_is_found() {
        let found = ["--help", "lab/docs/--out", "-o/a.md", "a-b.md", "b/to-do.md"].map(is_named_as_a_flag);
        assert_eq!(found, [true, true, true, false, false]);
    }

    #[test]
    fn a_file_that_is_written_under_its_name_is_found() {
        let write = concat!("fs::", "write(path, text)?;");
        let text = format!("fn a() {{\n    std::{write}\n    // {write}\n}}\n#[cfg(test)]\nmod tests {{ {write} }}\n");
        assert_eq!(half_files(&text).collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn a_file_that_is_opened_whatever_it_is_is_found() {
        let [read, open] = [concat!("std::fs::", "read(path)?;"), concat!("let file = File", "::open(path)?;")];
        let mapped = concat!("Mapped", "File::open(path)");
        let text = format!(
            "fn a() {{\n    {read}\n    // {read}\n    {open}\n    {mapped}\n}}\n#[cfg(test)]\nmod tests {{ {read} }}\n"
        );
        assert_eq!(plain_reads(&text).collect::<Vec<_>>(), [2, 4]);
    }
}
