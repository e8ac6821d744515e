//! Embeds the recipes, and some of this project's own text as training data, into the program: the tables `RECIPES` and
//! `OWN_TEXT` of (name, text).
#![allow(clippy::disallowed_methods, reason = "paths of this repository")]
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// Files and folders, relative to the repository, that are embedded as training text.
const OWN_TEXT: [&str; 6] =
    ["README.md", "ARCHITECTURE.md", "docs", "crates/sieve-nn/src", "crates/sieve-cpu/src", "crates/sieve-core/src"];
/// Bytes of embedded training text, at most: enough for a small model, little beside the program's size.
const OWN_TEXT_BYTES: usize = 900_000;
/// Files of more bytes are not embedded: `sieve train quickstart` on this folder leaves them out too.
const FILE_BYTES: usize = 65_536;

/// Of the training text it takes file by file in the order of [`OWN_TEXT`], without those that are too long or no
/// longer fit.
fn main() {
    let manifest = env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let root = PathBuf::from(manifest).join("../..");
    let mut recipes = Vec::new();
    for folder in [root.join("recipes"), root.join("lab/recipes")] {
        collect(&folder, &folder, &["toml"], &mut recipes);
    }
    recipes.sort();
    let mut text = Vec::new();
    for name in OWN_TEXT {
        collect(&root, &root.join(name), &["rs", "md"], &mut text);
    }
    let mut bytes_left = OWN_TEXT_BYTES;
    text.retain(|(_, text)| match bytes_left.checked_sub(text.len()) {
        Some(left) if text.len() <= FILE_BYTES => {
            bytes_left = left;
            true
        }
        _ => false,
    });
    println!("cargo:rustc-env=SIEVE_COMMIT={}", commit(&root));
    let tables = [table("RECIPES", &recipes), table("OWN_TEXT", &text)];
    fs::write(out.join("shipped.rs"), tables.concat()).expect("OUT_DIR is writable");
}

/// The commit that is checked out; `unknown` where this is no checkout.
fn commit(root: &Path) -> String {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").current_dir(root).args(arguments).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_owned())
    };
    // Git adds a line to this file at each commit and each checkout, so cargo runs this script again.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo:rerun-if-changed={}", root.join(log).display());
    }
    git(&["rev-parse", "--short=10", "HEAD"]).unwrap_or("unknown".to_owned())
}

/// A Rust static of (name, text). It holds the texts themselves, not `include_str!`, so that all are from the moment
/// this script ran, even while files are being edited.
fn table(name: &str, files: &[(String, String)]) -> String {
    let rows = files.iter().map(|(name, text)| format!("    ({name:?}, {text:?}),\n"));
    let rows = rows.collect::<String>();
    format!("static {name}: &[(&str, &str)] = &[\n{rows}];\n")
}

/// Adds the files at or below `path` whose extension is one of `endings` to `files`, sorted by name. A file's name is
/// its path relative to `root`, with forward slashes.
fn collect(root: &Path, path: &Path, endings: &[&str], files: &mut Vec<(String, String)>) {
    println!("cargo:rerun-if-changed={}", path.display());
    if path.is_dir() {
        let entries = fs::read_dir(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let paths = entries.map(|entry| entry.expect("the folder is readable").path());
        let mut paths = paths.collect::<Vec<_>>();
        paths.sort();
        for path in paths {
            collect(root, &path, endings, files);
        }
    } else if path.extension().is_some_and(|e| endings.iter().any(|&ending| e == ending)) {
        let relative = path.strip_prefix(root).expect("found below root");
        let name = relative.to_string_lossy().replace('\\', "/");
        let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        files.push((name, text));
    }
}
