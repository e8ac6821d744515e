//! Finds a Python interpreter for the scripts in `tests/python`, and runs them.
#![allow(clippy::print_stderr, reason = "a test that could not run must say so")]
use std::path::{Path, PathBuf};
use std::process::Command;

/// A Python interpreter that can run `imports`. Without one, prints that `test` was skipped and returns `None`.
///
/// If `SIEVE_PYTHON` is set, that interpreter must work; otherwise `python3` is tried.
pub(crate) fn interpreter(test: &str, imports: &str) -> Option<PathBuf> {
    let named = std::env::var_os("SIEVE_PYTHON");
    let python = PathBuf::from(named.clone().unwrap_or_else(|| "python3".into()));
    let output = Command::new(&python).args(["-c", imports]).output();
    match output {
        Ok(output) if output.status.success() => Some(python),
        failed => {
            assert!(named.is_none(), "SIEVE_PYTHON={} cannot `{imports}`: {failed:?}", python.display());
            eprintln!("{test}: skipped, python3 cannot `{imports}`; set SIEVE_PYTHON to one that can");
            None
        }
    }
}

/// Runs a script of `tests/python` and returns its standard output.
///
/// Panics with its standard error if it fails.
pub(crate) fn run(python: &Path, script: &str, arguments: &[String]) -> String {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("python");
    let output = Command::new(python)
        .arg(folder.join(script))
        .args(arguments)
        // Exports contain Python code, which transformers copies into this folder before it runs it.
        .env("HF_MODULES_CACHE", env!("CARGO_TARGET_TMPDIR"))
        .output()
        .expect("the interpreter ran before");
    assert!(output.status.success(), "{script} failed:\n{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("the scripts print UTF-8")
}

#[test]
fn scripts_without_options_print_their_use_alone() {
    let test = "scripts_without_options_print_their_use_alone";
    for (script, imports) in [
        ("code_lines.py", "import tokenize"),
        ("draw_for_readers.py", "import random"),
        ("houses.py", "import collections"),
        ("masked_attention.py", "import struct"),
        ("dma_expiry.py", "import torch, safetensors"),
        ("transformers_logits.py", "import torch, transformers, safetensors"),
        ("rolling_windows.py", "import lm_eval.utils"),
        ("vllm_m3.py", "import zipfile"),
    ] {
        let Some(python) = interpreter(test, imports) else {
            continue;
        };
        let folder = tempfile::tempdir().expect("a folder");
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("python").join(script);
        let mut command = Command::new(&python);
        let output = command.arg(path).arg("--help").current_dir(folder.path()).output();
        let output = output.expect("the interpreter ran before");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!said.is_empty() && !said.contains("Traceback"), "{script}: {said}");
        assert_eq!(folder.path().read_dir().expect("readable").count(), 0, "{script}");
    }
}

#[test]
fn lines_of_an_unknown_revision_are_refused_in_a_sentence() {
    let Some(python) = interpreter("lines_of_an_unknown_revision_are_refused_in_a_sentence", "import tokenize") else {
        return;
    };
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("python/code_lines.py");
    let output = Command::new(&python).arg(path).arg("no-such-revision").output().expect("the interpreter ran before");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(said.trim_end(), "there is no revision no-such-revision in this repository");
}

#[test]
fn sinks_are_those_of_gpt_oss() {
    let imports = "import torch, transformers.models.gpt_oss.modeling_gpt_oss";
    if let Some(python) = interpreter("sinks_are_those_of_gpt_oss", imports) {
        run(&python, "test_sinks.py", &[]);
    }
}

#[test]
fn prose_is_counted_as_it_is_read() {
    if let Some(python) = interpreter("prose_is_counted_as_it_is_read", "import unittest") {
        run(&python, "test_prose.py", &[]);
    }
}

#[test]
fn circles_and_long_functions_are_found() {
    if let Some(python) = interpreter("circles_and_long_functions_are_found", "import unittest") {
        run(&python, "test_houses.py", &[]);
    }
}

#[test]
fn readers_are_drawn_three_languages_and_no_tests() {
    if let Some(python) = interpreter("readers_are_drawn_three_languages_and_no_tests", "import unittest") {
        run(&python, "test_draw_for_readers.py", &[]);
    }
}

#[test]
fn stored_faults_are_still_in_the_code() {
    let test = "stored_faults_are_still_in_the_code";
    if let Some(python) = interpreter(test, "import tomllib") {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
        run(&python, "mutants.py", &["check".into(), root.into()]);
    }
}

/// Imports the scripts of a folder, its first argument, that need only Python's standard library and each other.
const IMPORT_ALL: &str = r#"
import ast, importlib, pathlib, sys

folder = pathlib.Path(sys.argv[1])
sys.path.insert(0, str(folder))
scripts = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in folder.glob("*.py")}


def imported(tree):
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0]


def is_plain(name):
    found = imported(scripts[name])
    return all(top in sys.stdlib_module_names or top in scripts and is_plain(top) for top in found)


names = [name for name in scripts if is_plain(name)]
for name in names:
    importlib.import_module(name)
print(len(names))
"#;

#[test]
fn scripts_have_what_other_scripts_import_of_them() {
    let test = "scripts_have_what_other_scripts_import_of_them";
    // The set of Python's own modules is there since 3.10.
    if let Some(python) = interpreter(test, "import sys; sys.stdlib_module_names") {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("python");
        let output = Command::new(&python).args(["-B", "-c", IMPORT_ALL]).arg(folder).output();
        let output = output.expect("the interpreter ran before");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{error}");
        let count = String::from_utf8_lossy(&output.stdout).trim().parse::<usize>();
        assert!(count.is_ok_and(|count| count > 20), "{error}");
    }
}
