//! Which crate may use which, and which features must stay off.
use crate::workspace;
use anyhow::{Context, Result};
use serde_json::Value;

/// The crate map: a crate, and the crates of ours that it uses, no more and no fewer, in the order in which
/// ARCHITECTURE.md names them. A new arrow comes with its reason there.
const ARROWS: &[(&str, &[&str])] = &[
    (
        "sieve-train",
        &[
            "sieve-nn",
            "sieve-hf",
            "sieve-data",
            "sieve-ops",
            "sieve-comm",
            "sieve-core",
            "sieve-files",
        ],
    ),
    (
        "sieve-eval",
        &["sieve-nn", "sieve-data", "sieve-select", "sieve-ops", "sieve-core"],
    ),
    (
        "sieve-bench",
        &[
            "sieve-nn",
            "sieve-hf",
            "sieve-select",
            "sieve-ops",
            "sieve-kernels",
            "sieve-cpu",
            "sieve-core",
            "sieve-testing",
        ],
    ),
    ("sieve-plan", &["sieve-kernels", "sieve-cpu", "sieve-core"]),
    ("sieve-report", &["sieve-core"]),
    ("sieve-hf", &["sieve-nn", "sieve-core", "sieve-files"]),
    ("sieve-nn", &["sieve-ops", "sieve-core"]),
    ("sieve-ops", &["sieve-cuda", "sieve-kernels", "sieve-cpu", "sieve-core"]),
    ("sieve-select", &["sieve-cpu", "sieve-core"]),
    ("sieve-kernels", &["sieve-core"]),
    ("sieve-cpu", &["sieve-core"]),
    ("sieve-data", &["sieve-files"]),
    ("sieve-comm", &[]),
    ("sieve-cuda", &[]),
    ("sieve-core", &[]),
    ("sieve-files", &[]),
    ("sieve-testing", &[]),
    ("xtask", &[]),
];

/// The page that shows the map.
const PAGE: &str = "ARCHITECTURE.md";

/// Crates at the top: they may use all others.
const TOP: &[&str] = &["sieve", "sieve-tests"];

/// Crates that must build without the tensor library.
const WITHOUT_BURN: &[&str] = &[
    "sieve-core",
    "sieve-cpu",
    "sieve-data",
    "sieve-comm",
    "sieve-select",
    "sieve-files",
    "sieve-testing",
    "xtask",
];

/// Features of Burn's and CubeCL's crates that change tensor types or cost a minute at the first step.
const FORBIDDEN_FEATURES: &[&str] = &["autotune", "fusion"];

/// Checks the dependencies of the workspace.
pub(crate) fn check(problems: &mut Vec<String>) -> Result<()> {
    let metadata = workspace::output("cargo", &["metadata", "--format-version", "1", "--no-deps"])?;
    let metadata: Value = serde_json::from_str(&metadata).context("cargo metadata printed no JSON")?;
    let packages = metadata["packages"]
        .as_array()
        .context("cargo metadata has no packages")?;
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        let uses: Vec<&str> = package["dependencies"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|dependency| dependency["kind"].as_str() != Some("dev"))
            .filter_map(|dependency| dependency["name"].as_str())
            .collect();
        check_package(name, &uses, problems);
    }
    let page = std::fs::read_to_string(workspace::root().join(PAGE)).with_context(|| format!("reading {PAGE}"))?;
    check_page(&page, problems);
    let tree = workspace::output("cargo", &["tree", "--workspace", "-e", "features", "--prefix", "none"])?;
    check_features(&tree, problems);
    Ok(())
}

fn check_package(name: &str, uses: &[&str], problems: &mut Vec<String>) {
    let ours = |dependency: &&&str| dependency.starts_with("sieve");
    if !TOP.contains(&name) {
        let Some((_, allowed)) = ARROWS.iter().find(|(known, _)| *known == name) else {
            problems.push(format!(
                "crate {name} is not in the crate map (crates/xtask/src/tidy/arrows.rs, \
                ARCHITECTURE.md)"
            ));
            return;
        };
        for dependency in uses.iter().filter(ours) {
            if !allowed.contains(dependency) {
                problems.push(format!(
                    "crate {name} must not use {dependency}: the crate map has no such arrow"
                ));
            }
        }
        for dependency in allowed.iter().filter(|arrow| !uses.contains(arrow)) {
            problems.push(format!(
                "crate {name} does not use {dependency}: take the arrow out of the crate map"
            ));
        }
    }
    if WITHOUT_BURN.contains(&name) {
        for dependency in uses {
            if ["burn", "cube", "cudarc"]
                .iter()
                .any(|start| dependency.starts_with(start))
            {
                problems.push(format!(
                    "crate {name} must build without Burn and CUDA, but uses {dependency}"
                ));
            }
        }
    }
}

/// The arrows as the page writes them, crates without arrows left out.
fn arrow_sentence() -> String {
    let short = |name: &&str| name.trim_start_matches("sieve-").to_owned();
    let arrows = ARROWS.iter().filter(|(_, uses)| !uses.is_empty());
    let arrows = arrows.map(|(name, uses)| {
        let uses: Vec<String> = uses.iter().map(short).collect();
        format!("{} → {}", short(name), uses.join(", "))
    });
    let arrows: Vec<String> = arrows.collect();
    format!("Arrows: sieve → all; {}.", arrows.join("; "))
}

fn check_page(page: &str, problems: &mut Vec<String>) {
    let words: Vec<&str> = page.split_whitespace().collect();
    let sentence = arrow_sentence();
    if !words.join(" ").contains(&sentence) {
        problems.push(format!("{PAGE} does not show the crate map; it should say: {sentence}"));
    }
    for (name, _) in ARROWS {
        if !page.contains(&format!("| `{name}` |")) {
            problems.push(format!("{PAGE} does not say what {name} holds"));
        }
    }
}

/// `cargo tree -e features` prints one line for each feature that is on: `name feature "feature"`.
fn check_features(tree: &str, problems: &mut Vec<String>) {
    let mut found: Vec<String> = tree
        .lines()
        .filter_map(|line| {
            let (package, rest) = line.split_once(" feature \"")?;
            let (feature, _) = rest.split_once('"')?;
            let library = ["burn", "cubecl", "cubek"]
                .iter()
                .any(|start| package.starts_with(start));
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

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(name: &str, uses: &[&str]) -> Vec<String> {
        let mut problems = Vec::new();
        check_package(name, uses, &mut problems);
        problems
    }

    #[test]
    fn arrows_point_one_way() {
        assert!(problems("sieve-nn", &["sieve-ops", "sieve-core", "burn"]).is_empty());
        // An arrow that no code needs is taken out too.
        assert_eq!(problems("sieve-nn", &["sieve-ops"]).len(), 1);
        let upwards = ["sieve-cuda", "sieve-kernels", "sieve-cpu", "sieve-core", "sieve-nn"];
        assert_eq!(problems("sieve-ops", &upwards).len(), 1);
        assert_eq!(problems("sieve-core", &["burn-flex"]).len(), 1);
        assert_eq!(problems("sieve-new", &[]).len(), 1);
        assert!(problems("sieve", &["sieve-train", "burn"]).is_empty());
    }

    #[test]
    fn the_page_shows_every_arrow_and_no_other() {
        let rows = ARROWS.iter().map(|(name, _)| format!("| `{name}` | …"));
        let rows = rows.collect::<Vec<_>>().join("\n");
        let page = format!("{rows}\n{}", arrow_sentence().replace("; ", ";\n"));
        let problems = |page: &str| {
            let mut problems = Vec::new();
            check_page(page, &mut problems);
            problems
        };
        assert!(problems(&page).is_empty(), "{:?}", problems(&page));
        assert_eq!(problems(&page.replace("hf → nn", "hf → nn, data")).len(), 1);
        assert_eq!(problems(&page.replace("| `sieve-hf` |", "")).len(), 1);
    }

    #[test]
    fn a_forbidden_feature_is_named_once() {
        let tree = "burn-cubecl feature \"fusion\"\nburn-cubecl feature \"fusion\" (*)\nburn feature \"std\"\nserde \
            feature \"fusion\"\n";
        let mut problems = Vec::new();
        check_features(tree, &mut problems);
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].starts_with("burn-cubecl has the feature \"fusion\""));
    }
}
