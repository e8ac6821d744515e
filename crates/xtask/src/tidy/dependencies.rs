//! Checks external dependencies: their licences and sources, duplicate versions, and dependencies that no file uses.
//! `cargo deny` checks licences, sources and versions too; here they come from `cargo metadata`, so that `cargo deny`
//! need not be installed.
use crate::workspace;
use anyhow::{Context, Result};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Licences that a binary under MIT or Apache-2.0 may contain.
const LICENCES: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "MPL-2.0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Crates of our manifests that the lock file holds in a second version too, and what requires that version.
const SECOND_VERSIONS: &[(&str, &str)] = &[
    ("base64", "tokenizers' spm_precompiled"),
    ("libloading", "graphics crates that are not built"),
    ("rand_distr", "half, for a feature that is not on"),
    ("safetensors", "burn-store"),
    ("thiserror", "sysctl"),
    ("ureq", "torch-sys, which is not built"),
    ("zstd", "zip of crates that are not built"),
];

/// Dependencies that no source file need name, with their crates. sieve-tests depends on proptest only so that
/// `cargo run` and `cargo test` build with the same features.
const NAMED_NOWHERE: &[(&str, &str)] = &[("sieve-tests", "proptest")];

/// A crate with a folder of sources elsewhere: the tests of what lies in the lab alone.
const TESTS_OF_LAB: (&str, &str) = ("sieve-tests", "lab/tests");

/// Through `burn` a crate gets the nodes of the autodiff graph without naming the crate that they come from.
const GRAPH_OF_BURN: &str = concat!("burn::backend::", "autodiff");

/// Checks all packages.
pub(crate) fn check(problems: &mut Vec<String>) -> Result<()> {
    let packages = workspace::packages("cargo metadata --format-version 1")?;
    let (ours, foreign): (Vec<&Value>, Vec<&Value>) = packages.iter().partition(|package| package["source"].is_null());
    let mut versions = BTreeMap::<&str, Vec<&str>>::new();
    for package in foreign {
        let (name, version) = (text(package, "name"), text(package, "version"));
        versions.entry(name).or_default().push(version);
        let licence = text(package, "license");
        if !is_allowed(licence) {
            problems.push(format!(
                "{name} {version} has the licence \"{licence}\", which is not in the list of \
                 crates/xtask/src/tidy/dependencies.rs"
            ));
        }
        let source = text(package, "source");
        if !source.contains("crates.io-index") {
            problems.push(format!("{name} {version} comes from {source}, not from crates.io"));
        }
    }
    let mut named = BTreeSet::new();
    for package in ours {
        let name = text(package, "name");
        let folder = std::path::Path::new(text(package, "manifest_path"));
        let mut sources = sources(folder.parent().context("a manifest is in a folder")?)?;
        if name == TESTS_OF_LAB.0 {
            sources += &self::sources(&workspace::root().join(TESTS_OF_LAB.1))?;
        }
        if sources.contains(GRAPH_OF_BURN) {
            problems.push(format!(
                "crate {name} registers backward passes through {GRAPH_OF_BURN}: name burn_autodiff, and depend on it"
            ));
        }
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let dependency = text(dependency, "name");
            named.insert(dependency);
            let is_named = sources.contains(&dependency.replace('-', "_"));
            if !is_named && !NAMED_NOWHERE.contains(&(name, dependency)) {
                problems.push(format!("crate {name} depends on {dependency}, which no file of it names"));
            }
        }
    }
    check_versions(&versions, &named, problems);
    Ok(())
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

/// The text of all Rust files of a package, in one string.
fn sources(folder: &std::path::Path) -> Result<String> {
    let mut all = String::new();
    let root = workspace::root();
    for file in workspace::files()?.iter().filter(|file| file.ends_with(".rs")) {
        let path = root.join(file);
        if path.starts_with(folder) {
            all.push_str(&workspace::read(&path)?);
        }
    }
    Ok(all)
}

/// Crates of our manifests must occur in one version, except the [`SECOND_VERSIONS`], which must occur in two.
fn check_versions(versions: &BTreeMap<&str, Vec<&str>>, named: &BTreeSet<&str>, problems: &mut Vec<String>) {
    let is_listed = |name: &str| SECOND_VERSIONS.iter().any(|(listed, _)| *listed == name);
    for (name, versions) in versions {
        if versions.len() > 1 && named.contains(name) && !is_listed(name) {
            problems.push(format!("{name} is in the lock file in versions {}", versions.join(" and ")));
        }
    }
    for (name, _) in SECOND_VERSIONS {
        if versions.get(name).is_none_or(|versions| versions.len() < 2) {
            problems.push(format!(
                "{name} is there in one version: take it out of SECOND_VERSIONS (crates/xtask/src/tidy/dependencies.rs)"
            ));
        }
    }
}

/// Whether the allowed licences satisfy an SPDX expression. A slash is an old way to write OR.
fn is_allowed(expression: &str) -> bool {
    let expression = expression.replace('/', " OR ");
    if let Some((before, rest)) = expression.split_once('(') {
        let Some((inside, after)) = rest.split_once(')') else {
            return false;
        };
        // The parenthesis is replaced by a licence that is allowed, or by a word that is none.
        let inside = if is_allowed(inside) { "MIT" } else { "none" };
        return is_allowed(&format!("{before} {inside} {after}"));
    }
    let is_listed = |licence: &str| LICENCES.contains(&licence.trim());
    let mut choices = expression.split(" OR ");
    choices.any(|choice| choice.split(" AND ").all(is_listed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expression_needs_all_of_one_choice() {
        for good in
            ["MIT", "GPL-3.0 OR MIT", "MIT/Apache-2.0", "(MIT OR GPL-3.0) AND Unicode-3.0", "Apache-2.0 AND ISC"]
        {
            assert!(is_allowed(good), "{good}");
        }
        for bad in ["", "GPL-3.0", "MIT AND GPL-3.0", "(GPL-2.0 OR GPL-3.0) AND MIT", "(MIT"] {
            assert!(!is_allowed(bad), "{bad}");
        }
    }
}
