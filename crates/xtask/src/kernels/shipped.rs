//! The specialisations that ship, as sieve-kernels lists them, and the spills that `kernels/allowances.toml` allows
//! them.
use super::resources::Resources;
use crate::workspace;
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::collections::BTreeMap;

/// The specialisations that ship, and the spills and stack frames that are allowed.
#[derive(Debug)]
pub(crate) struct Shipped {
    /// In the order of sieve-kernels' list.
    pub(crate) specialisations: Vec<Specialisation>,
    allowances: Vec<Allowance>,
}

/// One kernel file with one set of defines.
#[derive(Debug)]
pub(crate) struct Specialisation {
    /// File below `kernels/`.
    pub(crate) file: String,
    /// Architectures to compile for.
    pub(crate) arch: Vec<String>,
    /// The defines, by name.
    pub(crate) defines: BTreeMap<String, String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Allowances {
    allow: Vec<Allowance>,
}

/// Allows the spills and the stack frame of a kernel.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Allowance {
    /// The kernel's entry point.
    pub(crate) entry: String,
    /// Restricts the allowance to specialisations with these defines; empty allows all.
    #[serde(default)]
    pub(crate) defines: BTreeMap<String, i64>,
    /// Restricts the allowance to this architecture; absent allows all.
    pub(crate) arch: Option<String>,
    /// Allowed bytes of spill stores, and of spill loads.
    #[serde(default)]
    pub(crate) spill_bytes: usize,
    /// Allowed bytes of the stack frame.
    #[serde(default)]
    pub(crate) stack_bytes: usize,
    /// Why this is better than code that does not spill, with a measurement.
    pub(crate) reason: String,
}

impl Shipped {
    /// Runs sieve-kernels' example `shipped`, which prints the list, and reads the allowances.
    pub(crate) fn load() -> Result<Self> {
        let list = workspace::output("cargo run --release --quiet --example shipped")?;
        let allowed = workspace::read("kernels/allowances.toml")?;
        Self::parse(&list, &allowed).context("kernels/allowances.toml")
    }

    /// Each line of `list` is a specialisation: its file, its architectures separated by commas, and a `NAME=value` for
    /// each define.
    fn parse(list: &str, allowed: &str) -> Result<Self> {
        let specialisations: Option<Vec<Specialisation>> = list.lines().map(Specialisation::parse).collect();
        let specialisations = specialisations.context("a line of the list that is not understood")?;
        let Allowances { allow: allowances } = toml::from_str(allowed)?;
        for allowance in &allowances {
            if allowance.reason.trim().len() < 20 {
                bail!("the allowance for {} needs its reason, with a measurement", allowance.entry);
            }
        }
        Ok(Self { specialisations, allowances })
    }

    /// A message if a compiled function uses more than its allowance.
    pub(crate) fn over_allowance(
        &self,
        specialisation: &Specialisation,
        function: &Resources,
        arch: &str,
    ) -> Option<String> {
        let spill = function.spill_store_bytes.max(function.spill_load_bytes);
        let fits = |allowance: &&Allowance| {
            let has_defines = allowance
                .defines
                .iter()
                .all(|(name, value)| specialisation.defines.get(name) == Some(&value.to_string()));
            let is_for_arch = allowance.arch.as_deref().is_none_or(|only| only == arch);
            allowance.entry == function.name && has_defines && is_for_arch
        };
        let allowance = self.allowances.iter().find(fits);
        let (spill_allowed, stack_allowed) = allowance.map_or((0, 0), |a| (a.spill_bytes, a.stack_bytes));
        (spill > spill_allowed || function.stack_bytes > stack_allowed).then(|| {
            format!(
                "{} spills {spill} bytes (allowed {spill_allowed}) and has a stack frame of {} \
                 (allowed {stack_allowed})",
                function.name, function.stack_bytes
            )
        })
    }
}

impl Specialisation {
    /// Reads a line of the list, whose words have one space between them; `None` where one is missing or is no
    /// define.
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        let (file, arch) = (words.next()?, words.next()?);
        let pairs = words.map(|word| word.split_once('='));
        let defines = pairs.map(|pair| pair.map(|(name, value)| (name.to_owned(), value.to_owned())));
        Some(Self {
            file: file.to_owned(),
            arch: arch.split(',').map(str::to_owned).collect(),
            defines: defines.collect::<Option<_>>()?,
        })
    }

    /// All defines as `A=1 B=2`.
    pub(crate) fn text(&self) -> String {
        let pairs = self.defines.iter();
        let pairs: Vec<String> = pairs.map(|(name, value)| format!("{name}={value}")).collect();
        pairs.join(" ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "a.cu sm_80,sm_90a COMMON=1 WIDTH=4\na.cu sm_80,sm_90a TYPE=float COMMON=1\nb.cu sm_90a\n";

    const ALLOWED: &str = r#"
        [[allow]]
        entry = "a"
        arch = "sm_80"
        defines = { WIDTH = 4 }
        spill_bytes = 16
        reason = "0.2 % slower than with one block less a multiprocessor"
    "#;

    #[test]
    fn a_line_is_a_specialisation() {
        let shipped = Shipped::parse(TEXT, ALLOWED).expect("well formed");
        let all = shipped.specialisations.iter();
        let texts: Vec<String> = all.map(Specialisation::text).collect();
        assert_eq!(texts, ["COMMON=1 WIDTH=4", "COMMON=1 TYPE=float", ""]);
        assert_eq!(shipped.specialisations[0].arch, ["sm_80", "sm_90a"]);
        assert_eq!(shipped.specialisations[2].file, "b.cu");
    }

    #[test]
    fn only_the_allowed_spill_passes() {
        let shipped = Shipped::parse(TEXT, ALLOWED).expect("well formed");
        let all = &shipped.specialisations;
        let spilling = |bytes| Resources { name: "a".into(), spill_store_bytes: bytes, ..Resources::default() };
        assert_eq!(shipped.over_allowance(&all[0], &spilling(16), "sm_80"), None);
        assert!(shipped.over_allowance(&all[0], &spilling(20), "sm_80").is_some(), "more than allowed");
        assert!(shipped.over_allowance(&all[0], &spilling(16), "sm_90a").is_some(), "another architecture");
        assert!(shipped.over_allowance(&all[1], &spilling(4), "sm_80").is_some(), "another variant");
        let stack = Resources { name: "a".into(), stack_bytes: 8, ..Resources::default() };
        assert!(shipped.over_allowance(&all[0], &stack, "sm_80").is_some(), "no stack was allowed");
    }

    #[test]
    fn mistakes_are_refused() {
        let refused = |list: &str, allowed: &str| Shipped::parse(list, allowed).is_err();
        assert!(refused("a.cu", ALLOWED), "no architecture");
        assert!(refused("a.cu sm_80 WIDTH", ALLOWED), "no value");
        assert!(refused(TEXT, &format!("{ALLOWED}\nspills = 1")), "unknown key");
        let fine = ALLOWED.replace("0.2 % slower than with one block less a multiprocessor", "fine");
        assert!(refused(TEXT, &fine), "no reason");
    }
}
