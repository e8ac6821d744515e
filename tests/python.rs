//! The scripts of `tests/python`, and an interpreter for them where there is one.
#![allow(clippy::print_stderr, reason = "a test that could not run must say so")]
use std::path::{Path, PathBuf};
use std::process::Command;

/// An interpreter that can run `imports`, or `None` after saying that `test` was skipped.
///
/// `SIEVE_PYTHON` names one, and then it must work; else `python3` is taken where it can import what is needed.
pub(crate) fn interpreter(test: &str, imports: &str) -> Option<PathBuf> {
    let named = std::env::var_os("SIEVE_PYTHON");
    let python = PathBuf::from(named.clone().unwrap_or_else(|| "python3".into()));
    let output = Command::new(&python).args(["-c", imports]).output();
    match output {
        Ok(output) if output.status.success() => Some(python),
        failed => {
            assert!(
                named.is_none(),
                "SIEVE_PYTHON={} cannot `{imports}`: {failed:?}",
                python.display()
            );
            eprintln!("{test}: skipped, python3 cannot `{imports}`; set SIEVE_PYTHON to one that can");
            None
        }
    }
}

/// Runs a script of `tests/python` and returns what it printed.
///
/// Panics with its error output when it fails.
pub(crate) fn run(python: &Path, script: &str, arguments: &[String]) -> String {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("python");
    let output = Command::new(python)
        .arg(folder.join(script))
        .args(arguments)
        // Exports bring code of their own, which transformers copies before it runs.
        .env("HF_MODULES_CACHE", env!("CARGO_TARGET_TMPDIR"))
        .output()
        .expect("the interpreter ran before");
    assert!(
        output.status.success(),
        "{script} failed:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("the scripts print UTF-8")
}

#[test]
fn scripts_without_options_print_their_use_alone() {
    let test = "scripts_without_options_print_their_use_alone";
    for (script, imports) in [
        ("code_lines.py", "import tokenize"),
        ("draw_for_readers.py", "import random"),
        ("masked_attention.py", "import struct"),
        ("dma_expiry.py", "import torch, safetensors"),
        ("transformers_logits.py", "import torch, transformers, safetensors"),
        ("rolling_windows.py", "import lm_eval.utils"),
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
fn the_corpus_comes_back_byte_for_byte_from_its_lock() {
    let test = "the_corpus_comes_back_byte_for_byte_from_its_lock";
    if let Some(python) = interpreter(test, "import hashlib, tarfile") {
        run(&python, "test_make_corpus.py", &[]);
    }
}
