//! The shipped list as text: `kernels/manifest.toml`, for `cargo xtask kernels`, which knows no Burn.
use super::NeededKernels;
use crate::error::KernelError;
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
///
/// # Errors
/// As [`NeededKernels::shipped`].
pub fn manifest() -> Result<String, KernelError> {
    let mut files: BTreeMap<&str, Vec<SourceKernel>> = BTreeMap::new();
    for kernel in NeededKernels::shipped()? {
        files.entry(kernel.name()).or_default().push(kernel);
    }
    let mut text = HEAD.to_owned();
    for (name, kernels) in files {
        let (first, rest) = kernels.split_first().expect("an entry has a kernel");
        let is_common = |pair: &&Define| rest.iter().all(|kernel| kernel.defines().contains(pair));
        let common: Vec<&Define> = first.defines().iter().filter(is_common).collect();
        // Infallible for a String.
        let _ = write!(
            text,
            "\n[[kernel]]\nfile = \"{name}.cu\"\narch = {:?}\n",
            first.architectures()
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
    Ok(text)
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
        let list = manifest().expect("every tiling fits");
        assert!(
            file == list,
            "kernels/manifest.toml is another list than specialisations/\n  hint: cargo xtask kernels --write"
        );
    }
}
