//! Tests of the scripts in lab/experiments, which `python.rs` runs.
use crate::python::{interpreter, run};
use std::path::Path;

#[test]
fn the_corpus_comes_back_byte_for_byte_from_its_lock() {
    let test = "the_corpus_comes_back_byte_for_byte_from_its_lock";
    if let Some(python) = interpreter(test, "import hashlib, tarfile") {
        run(&python, "../../lab/experiments/test_make_corpus.py", &[]);
    }
}

#[test]
fn pages_show_the_stored_rows() {
    if let Some(python) = interpreter("pages_show_the_stored_rows", "import unittest") {
        run(&python, "../../lab/experiments/test_tables.py", &[]);
    }
}

#[test]
fn what_a_cpu_measures_of_the_papers_is_as_stored() {
    let Some(python) = interpreter("what_a_cpu_measures_of_the_papers_is_as_stored", "import json, subprocess") else {
        return;
    };
    let program = crate::tiny_run::program().display().to_string();
    let said = run(&python, "../../lab/experiments/papers_cpu.py", &["--sieve".into(), program, "--check".into()]);
    assert!(said.trim_end().ends_with("cells are as stored"), "{said}");
}

#[test]
fn the_race_of_table_4_goes_on_where_it_was_cut_off() {
    let test = "the_race_of_table_4_goes_on_where_it_was_cut_off";
    if let Some(python) = interpreter(test, "import tomllib") {
        let program = crate::tiny_run::program().display().to_string();
        run(&python, "../../lab/experiments/table4/test_race.py", &[program]);
    }
}

#[test]
fn readme_and_the_board_show_the_stored_runs() {
    let Some(python) = interpreter("readme_and_the_board_show_the_stored_runs", "import json") else {
        return;
    };
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let made = tempfile::tempdir().expect("a folder");
    let pages = ["README.md", "docs/front.svg", "lab/docs/board.md", "lab/docs/board.svg"];
    let copies = pages.map(|page| made.path().join(Path::new(page).file_name().expect("a name")));
    for (page, copy) in pages.iter().zip(&copies) {
        std::fs::copy(format!("{root}/{page}"), copy).expect("copied");
    }
    let [readme, front, board, drawn] = copies.each_ref().map(|copy| copy.display().to_string());
    let rows = format!("{root}/lab/rows");
    let words = ["--out", &rows, "--front", &readme, &front, "--fill", &board, "--draw", &drawn];
    run(&python, "../../lab/experiments/board.py", &words.map(String::from));
    for (page, copy) in pages.iter().zip(&copies) {
        let [stored, made] =
            [Path::new(root).join(page), copy.clone()].map(|path| std::fs::read(path).expect("readable"));
        assert!(stored == made, "{page} is not what lab/experiments/board.py makes of lab/rows/board.jsonl");
    }
}
