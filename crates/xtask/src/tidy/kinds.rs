//! Checks that only sieve-core's `kinds` says what distinguishes one kind of attention from another: no other place may
//! ask which kind it has.
use crate::workspace;
use anyhow::Result;

/// Where code may name kinds: in their own folders, and in this file, whose list and tests do.
const ROOMS: [&str; 3] = ["crates/sieve-core/src/kinds", "crates/sieve-nn/src/kinds", "crates/xtask/src/tidy/kinds.rs"];

/// Other files that name kinds, and how often each does so at most. They are older than this rule: numbers only fall.
const BEFORE: [(&str, usize); 8] = [
    ("lab/crates/sieve-bench/src/bench/scaling.rs", 5),
    ("lab/crates/sieve-bench/src/latent.rs", 1),
    ("lab/crates/sieve-bench/src/models/fp8.rs", 2),
    ("lab/crates/sieve-bench/src/nsa.rs", 1),
    ("lab/crates/sieve-bench/src/run.rs", 4),
    ("crates/sieve-select/src/decode/dma.rs", 2),
    ("lab/crates/sieve-lab/src/kernels/arguments.rs", 2),
    ("crates/sieve/src/recipe/new.rs", 1),
];

/// The enums of kinds.
const ENUMS: [&str; 2] = ["Attention", "AttentionKind"];

/// Variants of sieve-nn's enum of attention layers, which is called Attention too: they count as kinds.
const FORMS: [&str; 5] = ["Grouped", "Latent", "Branches", "Ranked", "Chosen"];

/// The list of the kinds.
const LIST: &str = include_str!("../../../sieve-core/src/kinds/list.rs");

/// The kinds: a variant of the enums, and the name in recipes. A line of the list is `Variant(Shape) = "name",`.
fn kinds() -> impl Iterator<Item = (&'static str, &'static str)> {
    LIST.lines().filter_map(|line| {
        let (variant, name) = line.trim().split_once(" = \"")?;
        let variant = first_word(variant);
        variant.starts_with(char::is_uppercase).then_some((variant, name.strip_suffix("\",")?))
    })
}

/// Checks all sources of the crates but their tests.
pub(crate) fn check(problems: &mut Vec<String>) -> Result<()> {
    for file in workspace::files()? {
        let is_source = file.contains("crates/") && file.contains("/src/") && file.ends_with(".rs");
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

/// How often a source names a kind: a variant behind one of the [`ENUMS`] or another name for it, a variant in a list
/// of imports, an import of all variants, a kind's name as a text. Comments and unit tests are left out.
fn mentions(text: &str) -> usize {
    let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let lines = code.lines().map(|line| line.split("//").next().unwrap_or_default());
    let code = lines.collect::<Vec<_>>().join("\n");
    let enums = names_of_enums(&code);
    let is_variant = |word: &str| FORMS.contains(&word) || kinds().any(|(variant, _)| variant == word);
    let variants = code.match_indices("::").map(|(at, _)| {
        let owner = last_word(&code[..at]);
        if !enums.contains(&owner) {
            return 0;
        }
        match code[at + 2..].trim_start() {
            rest if rest.starts_with('*') => 1,
            rest if rest.starts_with('{') => {
                let list = rest[1..].split('}').next().unwrap_or_default();
                list.split(',').filter(|item| is_variant(first_word(item.trim()))).count()
            }
            rest => usize::from(is_variant(first_word(rest))),
        }
    });
    let texts = kinds().map(|(_, name)| code.matches(&format!("\"{name}\"")).count());
    variants.sum::<usize>() + texts.sum::<usize>()
}

/// The names under which a source has the [`ENUMS`]: their own, those of `use … as` and `type … =`, and `Self` where a
/// file has methods of one.
fn names_of_enums(code: &str) -> Vec<&str> {
    let mut names = ENUMS.to_vec();
    for name in ENUMS {
        for (at, _) in code.match_indices(name) {
            let (before, after) = (&code[..at], &code[at + name.len()..]);
            // The name found is part of a longer word.
            if !first_word(after).is_empty() || !last_word(before).is_empty() {
                continue;
            }
            if let Some(alias) = after.trim_start().strip_prefix("as ") {
                names.push(first_word(alias.trim_start()));
            }
            // A path may stand before the name.
            let path = before.trim_end_matches(|c: char| is_part_of_word(c) || c == ':');
            if let Some(alias) = path.trim_end().strip_suffix('=')
                && let Some((rest, alias)) = alias.trim_end().rsplit_once(' ')
                && rest.ends_with("type")
            {
                names.push(alias);
            }
            if path.trim_end().ends_with("impl") || path.trim_end().ends_with("for") {
                names.push("Self");
            }
        }
    }
    names
}

fn is_part_of_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The word that a text begins with; empty if it begins with none.
fn first_word(text: &str) -> &str {
    text.split(|c: char| !is_part_of_word(c)).next().unwrap_or_default()
}

/// The word that a text ends with; empty if it ends with none.
fn last_word(text: &str) -> &str {
    text.rsplit(|c: char| !is_part_of_word(c)).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_kinds_is_read() {
        let kinds: Vec<_> = kinds().collect();
        assert_eq!(kinds[0], ("Mha", "mha"));
        assert_eq!(kinds[kinds.len() - 1], ("Msa", "msa"));
        // Each kind is a variant of the list and a file or a name in the dispatch.
        assert_eq!(kinds.len(), LIST.lines().filter(|line| line.ends_with("\",")).count());
    }

    #[test]
    fn kinds_are_found_under_every_name() {
        for (code, count) in [
            ("match attention { Attention::Msa(_) => 1, _ => 0 }", 1),
            ("if matches!(kind, AttentionKind::Nsa | AttentionKind::Msa) {}", 2),
            ("use sieve_core::Attention as Kind;\nif kind == Kind::Dma {}", 1),
            ("use sieve_core::{ModelShape, AttentionKind as K};\nif kind == K::Dma {}", 1),
            ("type A = sieve_core::Attention;\nif let A::Nsa(nsa) = attention {}", 1),
            ("use sieve_core::recipe::AttentionKind::*;\nif kind == Msa {}", 1),
            ("use AttentionKind::{Nsa, Msa as M};", 2),
            ("impl Attention { fn f(self) -> bool { matches!(self, Self::Msa(_)) } }", 1),
            ("if recipe.attention.kind().name() == \"msa\" {}", 1),
            ("match name { \"nsa\" | \"msa\" => 1, _ => 0 }", 2),
            ("if let sieve_nn::Attention::Ranked(layer) = &layer.self_attn {}", 1),
            // Variants of other enums, and longer words.
            ("match part { CheckPart::Nsa => 1, Part::Dma => 2 }", 0),
            ("impl Method { fn f(self) -> bool { matches!(self, Self::Msa(_)) } }", 0),
            ("let x = Rule::MsaLike; let y = Attention::MsaLike;", 0),
            ("let x = MyAttention::Msa;", 0),
            ("let x = \"msa_like\";", 0),
            ("// Attention::Msa\nlet x = MsaShape::published();", 0),
            ("let x = 1;\n#[cfg(test)]\nmod tests {\n Attention::Msa\n}", 0),
        ] {
            assert_eq!(mentions(code), count, "{code}");
        }
    }
}
