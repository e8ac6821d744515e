//! Checks that what a kind of attention is stands in sieve-core's `kinds`, and that no other place asks which kind it
//! is.
use crate::workspace;
use anyhow::Result;

/// Where kinds may be named: their own files, and the one place where a kind becomes a Burn layer.
const ROOMS: [&str; 3] =
    ["crates/sieve-core/src/kinds", "crates/sieve-nn/src/attention.rs", "crates/sieve-nn/src/attention/"];

/// Files from before the rooms that name kinds, or variants of other enums with a kind's name (a part of a check, a
/// method), and how often at most. The numbers only fall.
const BEFORE: [(&str, usize); 31] = [
    ("crates/sieve-bench/src/bench.rs", 2),
    ("crates/sieve-bench/src/build.rs", 2),
    ("crates/sieve-bench/src/capture.rs", 1),
    ("crates/sieve-bench/src/check.rs", 10),
    ("crates/sieve-bench/src/models.rs", 2),
    ("crates/sieve-bench/src/run.rs", 31),
    ("crates/sieve-core/src/model/attention.rs", 3),
    ("crates/sieve-core/src/model/flops.rs", 2),
    ("crates/sieve-core/src/model/layers.rs", 5),
    ("crates/sieve-core/src/recipe/document.rs", 7),
    ("crates/sieve-core/src/recipe/model_names.rs", 2),
    ("crates/sieve-core/src/recipe/resolve.rs", 18),
    ("crates/sieve-core/src/recipe/rules.rs", 1),
    ("crates/sieve-core/src/recipe/rules/attention.rs", 8),
    ("crates/sieve-core/src/recipe/rules/parallelism.rs", 1),
    ("crates/sieve-core/src/recipe/sections.rs", 1),
    ("crates/sieve-core/src/recipe/stages.rs", 9),
    ("crates/sieve-hf/src/import.rs", 4),
    ("crates/sieve-hf/src/import/matrix.rs", 2),
    ("crates/sieve-select/src/decode.rs", 7),
    ("crates/sieve-select/src/selector.rs", 1),
    ("crates/sieve-select/src/selector/methods.rs", 1),
    ("crates/sieve-select/src/selector/parse.rs", 1),
    ("crates/sieve-train/src/attention_statistics.rs", 1),
    ("crates/sieve-train/src/origin/initial.rs", 2),
    ("crates/sieve/src/import.rs", 2),
    ("crates/sieve/src/info.rs", 2),
    ("crates/sieve/src/kernels/arguments.rs", 4),
    ("crates/sieve/src/train/ending.rs", 1),
    ("crates/sieve/src/train/sweep.rs", 2),
    ("crates/sieve/src/train/sweep/starts.rs", 1),
];

/// The kinds, as variants of an enum.
const KINDS: [&str; 8] = ["Mha", "Swa", "Mla", "Nsa", "Dma", "InfllmV2", "Moba", "Msa"];

/// Checks all sources of the crates but their tests.
pub(crate) fn check(problems: &mut Vec<String>) -> Result<()> {
    for file in workspace::files()? {
        let is_source = file.starts_with("crates/") && file.contains("/src/") && file.ends_with(".rs");
        let is_test = file.contains("/tests") || file.ends_with("tests.rs") || file.ends_with("test_shapes.rs");
        let is_room = ROOMS.iter().any(|room| file.starts_with(room));
        if !is_source || is_test || is_room || file.ends_with("testing.rs") {
            continue;
        }
        let found = mentions(&workspace::read(&file)?);
        let allowed = BEFORE.iter().find(|(known, _)| *known == file).map_or(0, |(_, count)| *count);
        if found > allowed {
            problems.push(format!(
                "{file}: names a kind of attention {found} times, at most {allowed}: ask the trait of \
                 crates/sieve-core/src/kinds.rs instead"
            ));
        }
    }
    Ok(())
}

/// How often a source names a kind, comments and unit tests left out.
fn mentions(text: &str) -> usize {
    let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let lines = code.lines().map(|line| line.split("//").next().unwrap_or_default());
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    lines
        .map(|line| {
            let after = line.match_indices("::").map(|(at, _)| &line[at + 2..]);
            let names = after.filter(|rest| {
                let word = rest.split(|c: char| !is_word(c)).next().unwrap_or_default();
                KINDS.contains(&word)
            });
            names.count()
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_found_under_every_name() {
        for (code, count) in [
            ("match attention { Attention::Moba(_) => 1, _ => 0 }", 1),
            ("if matches!(kind, AttentionKind::Moba | AttentionKind::Msa) {}", 2),
            ("if kind == K::Dma {}", 1),
            ("if let A::Nsa(nsa) = attention {}", 1),
            ("// Attention::Moba\nlet x = MobaShape::published();", 0),
            ("let x = Rule::MobaLike;", 0),
            ("let x = 1;\n#[cfg(test)]\nmod tests {\n Attention::Moba\n}", 0),
        ] {
            assert_eq!(mentions(code), count, "{code}");
        }
    }
}
