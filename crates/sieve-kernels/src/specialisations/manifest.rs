//! The shipped list as text: `kernels/manifest.toml`, for `cargo xtask kernels`, which knows no Burn.
use super::NeededKernels;
use crate::runtime::source_kernel::SourceKernel;
use std::collections::BTreeMap;
use std::fmt::Write;

const HEAD: &str = "\
# The kernel specialisations that ship. Written by `cargo xtask kernels --write` from the list in
# crates/sieve-kernels/src/specialisations; a test compares both. `cargo xtask kernels` compiles each for its
# architectures and fails on warnings, and on spills and stack frames that kernels/allowances.toml does not allow.
#
#   file        below kernels/
#   arch        architectures to compile for
#   defines     defines of every variant
#   variants    one specialisation each: the defines that differ
";

/// Text of `kernels/manifest.toml`.
pub fn manifest() -> String {
    let mut files: BTreeMap<(&str, Vec<&str>), Vec<SourceKernel>> = BTreeMap::new();
    for (kernel, architectures) in NeededKernels::shipped() {
        let block = files.entry((kernel.name(), architectures));
        block.or_default().push(kernel);
    }
    let mut text = HEAD.to_owned();
    for ((name, architectures), kernels) in files {
        let (first, rest) = kernels.split_first().expect("an entry has a kernel");
        let is_common = |pair: &&Define| rest.iter().all(|kernel| kernel.defines().contains(pair));
        let common: Vec<&Define> = first.defines().iter().filter(is_common).collect();
        // Infallible for a String.
        let _ = write!(
            text,
            "\n[[kernel]]\nfile = \"{name}.cu\"\narch = {architectures:?}\n"
        );
        if !common.is_empty() {
            let _ = writeln!(text, "defines = {}", table(&common));
        }
        if !rest.is_empty() {
            text.push_str("variants = [\n");
            for kernel in &kernels {
                let defines = kernel.defines().iter();
                let own: Vec<&Define> = defines.filter(|pair| !common.contains(pair)).collect();
                let _ = writeln!(text, "    {},", table(&own));
            }
            text.push_str("]\n");
        }
    }
    text
}

type Define = (&'static str, String);

/// An inline table; whole numbers stand without quotes.
fn table(defines: &[&Define]) -> String {
    let pairs = defines
        .iter()
        .map(|(name, value)| match value.parse::<i64>() {
            Ok(number) => format!("{name} = {number}"),
            Err(_) => format!("{name} = {value:?}"),
        });
    format!("{{ {} }}", pairs.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_what_the_list_says() {
        let file = include_str!("../../../../kernels/manifest.toml");
        let list = manifest();
        assert!(
            file == list,
            "kernels/manifest.toml is another list than specialisations/\n  hint: cargo xtask kernels --write"
        );
    }
}
