//! Checks which crate uses which, and that forbidden features are off.
use crate::workspace;
use anyhow::{Context, Result};
use serde_json::Value;

/// The page with the crate map: a table with a row for each crate, and a sentence that lists which uses which.
const PAGE: &str = "ARCHITECTURE.md";

/// Crates that may use all others.
const TOP: &[&str] = &["sieve", TESTS];

/// The crate of tests that cross crates.
const TESTS: &str = "sieve-tests";

/// Crates that must not depend on Burn or CUDA. Crates that launch kernels may use cudarc.
const WITHOUT_BURN: &[&str] = &[
    "sieve-capi",
    "sieve-core",
    "sieve-cpu",
    "sieve-gpu",
    "sieve-data",
    "sieve-comm",
    "sieve-select",
    "sieve-files",
    "sieve-testing",
    "xtask",
];

/// The crates among these that may use cudarc.
const LAUNCHING: &[&str] = &["sieve-gpu", "sieve-capi"];

/// Features of Burn's and CubeCL's crates: `fusion` changes tensor types, `autotune` costs a minute at the first step.
const FORBIDDEN_FEATURES: &[&str] = &["autotune", "fusion"];

/// A crate that programs without a GPU depend on. Without its feature `cuda` none of these crates may be in its tree.
const ON_CPUS: &str = "sieve-hf";
const OF_CUDA: &[&str] = &["cudarc", "burn-cuda", "burn-cubecl", "cubecl", "cubecl-cuda", "sieve-gpu", "sieve-kernels"];

/// The folder of the crates that compare and measure. Nothing of the engine depends on one of them, but the program,
/// which mounts their commands by [`MOUNT`].
const LAB: &str = "/lab/crates/";
const MOUNT: (&str, &str) = ("sieve", "sieve-lab");

/// Checks the dependencies between the workspace's crates, and the features of external ones.
pub(crate) fn check(problems: &mut Vec<String>) -> Result<()> {
    let page = workspace::read(PAGE)?;
    let map = Map::of(&page).with_context(|| format!("{PAGE} has no sentence `Arrows: ..`"))?;
    let packages = workspace::packages("cargo metadata --format-version 1 --no-deps")?;
    let is_lab = |package: &&Value| package["manifest_path"].as_str().is_some_and(|path| path.contains(LAB));
    let lab: Vec<&str> = packages.iter().filter(is_lab).filter_map(|package| package["name"].as_str()).collect();
    for package in &packages {
        let name = package["name"].as_str().unwrap_or_default();
        let uses: Vec<&str> = package["dependencies"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|dependency| dependency["kind"].as_str() != Some("dev"))
            .filter_map(|dependency| dependency["name"].as_str())
            .collect();
        check_package(&map, name, &uses, problems);
        if !is_lab(&package) {
            check_engine(name, &uses, &lab, problems);
        }
    }
    let tree = workspace::output("cargo tree --workspace -e features --prefix none")?;
    check_features(&tree, problems);
    let tree = workspace::output(&format!("cargo tree -p {ON_CPUS} -e normal,build --prefix none"))?;
    check_cpus(&tree, problems);
    Ok(())
}

/// The crate map: all crates, and for each the crates of the workspace that it uses.
struct Map<'a> {
    crates: Vec<&'a str>,
    arrows: Vec<(String, Vec<String>)>,
}

impl<'a> Map<'a> {
    /// Reads the rows "| `sieve-core` | .." and the sentence "Arrows: sieve → all; nn → ops, core; ...".
    fn of(page: &'a str) -> Option<Self> {
        let rows = page.lines().filter_map(|line| line.strip_prefix("| `"));
        let crates = rows.filter_map(|row| Some(row.split_once('`')?.0));
        let long = |name: &str| match name.trim() {
            "xtask" => "xtask".to_owned(),
            short => format!("sieve-{short}"),
        };
        let (_, sentence) = page.split_once("\nArrows: ")?;
        let arrows = sentence.split('.').next()?.split(';').filter_map(|arrow| {
            let (name, uses) = arrow.split_once('→')?;
            Some((long(name), uses.split(',').map(long).collect()))
        });
        Some(Self { crates: crates.collect(), arrows: arrows.collect() })
    }
}

/// Checks a crate that depends on the crates `uses`. Those of the workspace must be exactly the map's arrows, except
/// for the crates of `TOP`. A crate of `WITHOUT_BURN` must use neither Burn nor CubeCL, and cudarc only if it is of
/// `LAUNCHING`.
fn check_package(map: &Map, name: &str, uses: &[&str], problems: &mut Vec<String>) {
    if !TOP.contains(&name) {
        if !map.crates.contains(&name) {
            problems.push(format!("crate {name} is not in the crate map of {PAGE}"));
        }
        let arrows = map.arrows.iter().find(|(known, _)| known == name);
        let allowed = arrows.map_or(&[][..], |(_, allowed)| allowed);
        let ours = uses.iter().filter(|used| used.starts_with("sieve"));
        for dependency in ours.filter(|used| !allowed.iter().any(|arrow| arrow == *used)) {
            problems.push(format!("crate {name} must not use {dependency}: the crate map of {PAGE} has no such arrow"));
        }
        for dependency in allowed.iter().filter(|arrow| !uses.contains(&arrow.as_str())) {
            problems.push(format!("crate {name} does not use {dependency}: take the arrow out of {PAGE}"));
        }
    }
    if WITHOUT_BURN.contains(&name) {
        let is_forbidden = |dependency: &str| {
            if dependency.starts_with("cudarc") {
                !LAUNCHING.contains(&name)
            } else {
                dependency.starts_with("burn") || dependency.starts_with("cube")
            }
        };
        for dependency in uses.iter().filter(|dependency| is_forbidden(dependency)) {
            problems.push(format!("crate {name} must build without Burn and CUDA, but uses {dependency}"));
        }
    }
}

/// Checks that a crate of the engine uses none of the lab's.
fn check_engine(name: &str, uses: &[&str], lab: &[&str], problems: &mut Vec<String>) {
    let is_wrong = |used: &&&str| lab.contains(*used) && (name, **used) != MOUNT && name != TESTS;
    for used in uses.iter().filter(is_wrong) {
        problems.push(format!("crate {name} is of the engine and must not use {used}, which is of the lab"));
    }
}

/// Finds forbidden features in what `cargo tree -e features` prints: a line `name feature "feature"` for each feature
/// that is on.
fn check_features(tree: &str, problems: &mut Vec<String>) {
    let mut found: Vec<String> = tree
        .lines()
        .filter_map(|line| {
            let (package, rest) = line.split_once(" feature \"")?;
            let (feature, _) = rest.split_once('"')?;
            let library = ["burn", "cubecl", "cubek"].iter().any(|start| package.starts_with(start));
            (library && FORBIDDEN_FEATURES.contains(&feature)).then(|| {
                format!(
                    "{package} has the feature \"{feature}\" on; every Burn and CubeCL crate needs \
                    default-features = false"
                )
            })
        })
        .collect();
    found.sort();
    found.dedup();
    problems.append(&mut found);
}

/// Finds crates of CUDA in what `cargo tree` prints for [`ON_CPUS`] without features: a line `name version ..` a crate.
fn check_cpus(tree: &str, problems: &mut Vec<String>) {
    let names = tree.lines().filter_map(|line| line.split(' ').next());
    let mut found: Vec<&str> = names.filter(|name| OF_CUDA.contains(name)).collect();
    found.sort_unstable();
    found.dedup();
    problems.extend(found.iter().map(|name| {
        format!("{ON_CPUS} without features depends on {name}; make that dependency part of the feature `cuda`")
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: &str = "| `sieve-nn` | a |\n| `sieve-ops` | b |\n| `sieve-core` | c |\n\nArrows: sieve → all; \
        nn → ops, core;\nops → cuda, core. More.";

    fn problems(name: &str, uses: &[&str]) -> Vec<String> {
        let mut problems = Vec::new();
        let map = Map::of(MAP).expect("a map");
        check_package(&map, name, uses, &mut problems);
        problems
    }

    #[test]
    fn a_crate_must_depend_on_what_the_map_says() {
        assert!(problems("sieve-nn", &["sieve-ops", "sieve-core", "burn"]).is_empty());
        // A dependency that the map lists and the crate no longer has is a mistake as well: here nn on core.
        assert_eq!(problems("sieve-nn", &["sieve-ops"]).len(), 1);
        assert!(problems("sieve-ops", &["sieve-cuda", "sieve-core"]).is_empty());
        let upwards = ["sieve-cuda", "sieve-core", "sieve-nn"];
        assert_eq!(problems("sieve-ops", &upwards).len(), 1);
        assert_eq!(problems("sieve-core", &["burn-flex"]).len(), 1);
        assert_eq!(problems("sieve-new", &[]).len(), 1);
        assert!(problems("sieve", &["sieve-train", "burn"]).is_empty());
    }

    #[test]
    fn only_the_program_mounts_the_lab() {
        let found = |name: &str, uses: &[&str]| {
            let mut problems = Vec::new();
            check_engine(name, uses, &["sieve-lab", "sieve-eval"], &mut problems);
            problems.len()
        };
        assert_eq!(found("sieve", &["sieve-lab", "sieve-train"]), 0);
        assert_eq!(found("sieve", &["sieve-lab", "sieve-eval"]), 1);
        assert_eq!(found("sieve-serve", &["sieve-infer", "sieve-lab"]), 1);
        assert_eq!(found(TESTS, &["sieve-eval"]), 0);
    }

    #[test]
    fn a_crate_of_cuda_in_a_tree_for_cpus_is_named_once() {
        let found = |tree: &str| {
            let mut problems = Vec::new();
            check_cpus(tree, &mut problems);
            problems
        };
        assert!(found("sieve-hf v0.1.0 (/a)\ncubecl-common v0.10.0\nburn v0.21.0").is_empty());
        let problems = found("sieve-hf v0.1.0 (/a)\ncudarc v0.19.0\ncudarc v0.19.0 (*)");
        assert_eq!(problems.len(), 1);
        assert!(problems[0].contains("cudarc"));
    }
}
