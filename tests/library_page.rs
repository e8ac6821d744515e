//! The blocks of docs/library.md are parts of a program that `.ci/library` builds and runs.
use std::fs;
use std::path::Path;

/// The program of the page: as a module of the tests it is compiled with the crates that it calls.
#[allow(dead_code, clippy::print_stdout, reason = "a program of its own")]
#[path = "cpu_crate/src/main.rs"]
mod program;

/// The text of the first block of this language behind `heading`.
fn block<'a>(page: &'a str, heading: &str, language: &str) -> &'a str {
    let (_, section) = page.split_once(heading).expect("the page has the heading");
    let (_, rest) = section.split_once(&format!("```{language}\n")).expect("a block follows");
    rest.split_once("```").expect("the block ends").0
}

#[test]
fn dependencies_and_call_of_the_page_are_those_of_the_program() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read = |path: &str| fs::read_to_string(root.join(path)).expect("the file is there");
    let page = read("docs/library.md");
    let heading = "\n## In your program\n";
    // The program's folder is two levels below the root; a reader's lies beside the checkout.
    let manifest = read("tests/cpu_crate/Cargo.toml").replace("\"../../crates/", "\"../sieve/crates/");
    let dependencies = block(&page, heading, "toml");
    assert!(dependencies.starts_with("[dependencies]\n"), "{dependencies}");
    assert!(manifest.contains(dependencies), "tests/cpu_crate/Cargo.toml has other lines than\n{dependencies}");
    let (_, program) = page.split_once(heading).expect("the page has the heading");
    let call = block(program, "[dependencies]", "rust");
    assert!(call.contains("dynamic_mask") && call.contains("backward()"), "{call}");
    assert!(read("tests/cpu_crate/src/main.rs").contains(call), "the program has other lines than\n{call}");
}

#[test]
fn the_page_shows_lines_of_the_examples() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read = |path: &str| fs::read_to_string(root.join(path)).expect("the file is there");
    let page = read("docs/library.md");
    for (heading, path) in [
        ("\n## An attention kind of your own\n", "crates/sieve-nn/examples/own_attention.rs"),
        ("\n## The kernels from another Burn program\n", "crates/sieve-ops/examples/kernels_in_burn.rs"),
    ] {
        let example = read(path);
        let known: Vec<&str> = example.lines().map(str::trim).collect();
        for line in block(&page, heading, "rust").lines() {
            assert!(known.contains(&line.trim()), "{path} has no line {line}");
        }
    }
}
