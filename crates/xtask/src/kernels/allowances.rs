//! The spills that `kernels/allowances.toml` allows a shipped kernel.
use crate::workspace;
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use sieve_gpu::ahead_of_time::KernelResources;
use std::collections::BTreeMap;

/// All allowances; the first that fits a function counts.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Allowances {
    allow: Vec<Allowance>,
}

/// Allows the spills and the stack frame of a kernel.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Allowance {
    /// The kernel's entry point.
    entry: String,
    /// Restricts the allowance to specialisations with these defines; empty allows all.
    #[serde(default)]
    defines: BTreeMap<String, i64>,
    /// Restricts the allowance to this architecture; absent allows all.
    arch: Option<String>,
    /// Allowed bytes of spill stores, and of spill loads.
    #[serde(default)]
    spill_bytes: usize,
    /// Allowed bytes of the stack frame.
    #[serde(default)]
    stack_bytes: usize,
    /// Why this is better than code that does not spill, with a measurement.
    reason: String,
}

impl Allowances {
    /// Reads the file.
    pub(crate) fn load() -> Result<Self> {
        let file = "kernels/allowances.toml";
        Self::parse(&workspace::read(file)?).context(file)
    }

    /// Reads the text of the file.
    fn parse(text: &str) -> Result<Self> {
        let all: Self = toml::from_str(text)?;
        for allowance in &all.allow {
            if allowance.reason.trim().len() < 20 {
                bail!("the allowance for {} needs its reason, with a measurement", allowance.entry);
            }
        }
        Ok(all)
    }

    /// A message if a function of the specialisation with these defines uses more than its allowance.
    pub(crate) fn exceeded_by(
        &self,
        defines: &[(&str, String)],
        function: &str,
        used: &KernelResources,
        arch: &str,
    ) -> Option<String> {
        let spill = used.spill_store_bytes.max(used.spill_load_bytes);
        let has = |(name, value): (&String, &i64)| {
            defines.iter().any(|(defined, as_what)| defined == name && *as_what == value.to_string())
        };
        let fits = |allowance: &&Allowance| {
            let is_for_arch = allowance.arch.as_deref().is_none_or(|only| only == arch);
            allowance.entry == function && allowance.defines.iter().all(has) && is_for_arch
        };
        let allowance = self.allow.iter().find(fits);
        let (spill_allowed, stack_allowed) = allowance.map_or((0, 0), |a| (a.spill_bytes, a.stack_bytes));
        (spill > spill_allowed || used.stack_bytes > stack_allowed).then(|| {
            format!(
                "{function} spills {spill} bytes (allowed {spill_allowed}) and has a stack frame of {} \
                 (allowed {stack_allowed})",
                used.stack_bytes
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALLOWED: &str = r#"
        [[allow]]
        entry = "a"
        arch = "sm_80"
        defines = { WIDTH = 4 }
        spill_bytes = 16
        reason = "0.2 % slower than with one block less a multiprocessor"
    "#;

    #[test]
    fn only_the_allowed_spill_passes() {
        let allowances = Allowances::parse(ALLOWED).expect("well formed");
        let wide = [("COMMON", "1".to_owned()), ("WIDTH", "4".to_owned())];
        let other = [("TYPE", "float".to_owned()), ("COMMON", "1".to_owned())];
        let spilling = |bytes| KernelResources { spill_store_bytes: bytes, ..KernelResources::default() };
        let exceeded = |defines: &[(&str, String)], bytes, arch| {
            allowances.exceeded_by(defines, "a", &spilling(bytes), arch).is_some()
        };
        assert!(!exceeded(&wide, 16, "sm_80"));
        assert!(exceeded(&wide, 20, "sm_80"), "more than allowed");
        assert!(exceeded(&wide, 16, "sm_90a"), "another architecture");
        assert!(exceeded(&other, 4, "sm_80"), "another variant");
        assert!(allowances.exceeded_by(&wide, "b", &spilling(4), "sm_80").is_some(), "another function");
        let stack = KernelResources { stack_bytes: 8, ..KernelResources::default() };
        assert!(allowances.exceeded_by(&wide, "a", &stack, "sm_80").is_some(), "no stack was allowed");
    }

    #[test]
    fn mistakes_are_refused() {
        let refused = |allowed: &str| Allowances::parse(allowed).is_err();
        assert!(refused(&format!("{ALLOWED}\nspills = 1")), "unknown key");
        let fine = ALLOWED.replace("0.2 % slower than with one block less a multiprocessor", "fine");
        assert!(refused(&fine), "no reason");
    }
}
