//! `kernels/manifest.toml`, the specialisations that ship, and `kernels/allowances.toml`, what they may spill.
use super::resources::Resources;
use crate::workspace;
use anyhow::{Context, Result, bail};
use serde::Deserialize;
use std::collections::BTreeMap;

/// Most shipped specialisations: with more of them it is hard to know what is tested.
const MAX_SPECIALISATIONS: usize = 260;

/// Both files.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    /// One block for each kernel file.
    #[serde(rename = "kernel")]
    pub(crate) kernels: Vec<Kernel>,
    /// Spills and stack frames that are accepted.
    #[serde(skip)]
    allowances: Allowances,
}

/// The second file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Allowances {
    allow: Vec<Allowance>,
}

/// One kernel file and the forms it ships in.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Kernel {
    /// File below `kernels/`.
    pub(crate) file: String,
    /// Architectures to compile for.
    pub(crate) arch: Vec<String>,
    /// Defines of every variant.
    #[serde(default)]
    pub(crate) defines: BTreeMap<String, Value>,
    /// What differs: one specialisation for each entry.
    #[serde(default)]
    pub(crate) variants: Vec<BTreeMap<String, Value>>,
}

/// Value of a define.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(crate) enum Value {
    /// An integer.
    Integer(i64),
    /// Any other text.
    Text(String),
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Value::Integer(number) => write!(f, "{number}"),
            Value::Text(text) => f.write_str(text),
        }
    }
}

/// An accepted spill or stack frame.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Allowance {
    /// Entry point it is for.
    pub(crate) entry: String,
    /// Only variants with these defines; empty means all.
    #[serde(default)]
    pub(crate) defines: BTreeMap<String, Value>,
    /// Only this architecture; absent means all.
    pub(crate) arch: Option<String>,
    /// Most bytes of spill stores, and of spill loads.
    #[serde(default)]
    pub(crate) spill_bytes: usize,
    /// Most bytes of stack frame.
    #[serde(default)]
    pub(crate) stack_bytes: usize,
    /// Why that is better than not spilling, with the measurement.
    pub(crate) reason: String,
}

/// One kernel file with one set of defines.
#[derive(Debug)]
pub(crate) struct Specialisation<'a> {
    /// The kernel.
    pub(crate) kernel: &'a Kernel,
    /// Its defines, by name.
    pub(crate) defines: BTreeMap<&'a str, &'a Value>,
}

impl Manifest {
    /// Reads and checks both files.
    pub(crate) fn load() -> Result<Self> {
        let [list, allowed] = ["manifest", "allowances"].map(|name| {
            let path = workspace::root().join(format!("kernels/{name}.toml"));
            workspace::read(&path)
        });
        Self::parse(&list?, &allowed?).context("kernels/*.toml")
    }

    fn parse(list: &str, allowed: &str) -> Result<Self> {
        let mut manifest: Self = toml::from_str(list)?;
        manifest.allowances = toml::from_str(allowed)?;
        let count = manifest.specialisations().len();
        if count > MAX_SPECIALISATIONS {
            bail!("{count} specialisations, at most {MAX_SPECIALISATIONS}");
        }
        for allowance in &manifest.allowances.allow {
            if allowance.reason.trim().len() < 20 {
                bail!(
                    "the allowance for {} needs its reason, with a measurement",
                    allowance.entry
                );
            }
        }
        Ok(manifest)
    }

    /// All specialisations, in the file's order.
    pub(crate) fn specialisations(&self) -> Vec<Specialisation<'_>> {
        self.kernels
            .iter()
            .flat_map(Kernel::specialisations)
            .collect()
    }

    /// What a compiled function uses beyond its allowance.
    pub(crate) fn over_allowance(
        &self,
        specialisation: &Specialisation,
        function: &Resources,
        arch: &str,
    ) -> Option<String> {
        let spill = function.spill_store_bytes.max(function.spill_load_bytes);
        let fits = |allowance: &&Allowance| {
            let variant = allowance.defines.iter().all(|(name, value)| {
                specialisation
                    .defines
                    .get(name.as_str())
                    .is_some_and(|have| have.to_string() == value.to_string())
            });
            allowance.entry == function.name
                && variant
                && allowance.arch.as_deref().is_none_or(|only| only == arch)
        };
        let allowance = self.allowances.allow.iter().find(fits);
        let (spill_allowed, stack_allowed) =
            allowance.map_or((0, 0), |a| (a.spill_bytes, a.stack_bytes));
        (spill > spill_allowed || function.stack_bytes > stack_allowed).then(|| {
            format!(
                "{} spills {spill} bytes (allowed {spill_allowed}) and has a stack frame of {} \
                 (allowed {stack_allowed})",
                function.name, function.stack_bytes
            )
        })
    }
}

impl Kernel {
    fn specialisations(&self) -> Vec<Specialisation<'_>> {
        let common = || self.defines.iter().map(|(k, v)| (k.as_str(), v));
        if self.variants.is_empty() {
            return vec![Specialisation {
                kernel: self,
                defines: common().collect(),
            }];
        }
        self.variants
            .iter()
            .map(|variant| Specialisation {
                kernel: self,
                // Later pairs win, so a variant overrides what is common.
                defines: common()
                    .chain(variant.iter().map(|(k, v)| (k.as_str(), v)))
                    .collect(),
            })
            .collect()
    }

    /// Names of all defines that some specialisation sets.
    pub(crate) fn define_names(&self) -> Vec<&str> {
        self.defines
            .keys()
            .chain(self.variants.iter().flat_map(BTreeMap::keys))
            .map(String::as_str)
            .collect()
    }
}

impl Specialisation<'_> {
    /// The defines that distinguish it from other specialisations of its file.
    pub(crate) fn variant_text(&self) -> String {
        let common = &self.kernel.defines;
        let differs = |name: &str, value: &Value| {
            common.get(name).map(ToString::to_string) != Some(value.to_string())
        };
        let pairs: Vec<String> = self
            .defines
            .iter()
            .filter(|(name, value)| differs(name, value))
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        pairs.join(" ")
    }

    /// All defines as `A=1 B=2`.
    pub(crate) fn text(&self) -> String {
        let pairs: Vec<String> = self
            .defines
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        pairs.join(" ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
        [[kernel]]
        file = "a.cu"
        arch = ["sm_80", "sm_90a"]
        defines = { COMMON = 1, WIDTH = 8 }
        variants = [{ WIDTH = 4 }, { TYPE = "float" }]
        [[kernel]]
        file = "b.cu"
        arch = ["sm_90a"]
    "#;

    const ALLOWED: &str = r#"
        [[allow]]
        entry = "a"
        arch = "sm_80"
        defines = { WIDTH = 4 }
        spill_bytes = 16
        reason = "0.2 % slower than with one block less a multiprocessor"
    "#;

    #[test]
    fn variants_override_the_common_defines() {
        let manifest = Manifest::parse(TEXT, ALLOWED).expect("well formed");
        let texts: Vec<String> = manifest
            .specialisations()
            .iter()
            .map(Specialisation::text)
            .collect();
        assert_eq!(
            texts,
            ["COMMON=1 WIDTH=4", "COMMON=1 TYPE=float WIDTH=8", ""]
        );
    }

    #[test]
    fn only_the_allowed_spill_passes() {
        let manifest = Manifest::parse(TEXT, ALLOWED).expect("well formed");
        let all = manifest.specialisations();
        let spilling = |bytes| Resources {
            name: "a".into(),
            spill_store_bytes: bytes,
            ..Resources::default()
        };
        assert_eq!(
            manifest.over_allowance(&all[0], &spilling(16), "sm_80"),
            None
        );
        assert!(
            manifest
                .over_allowance(&all[0], &spilling(20), "sm_80")
                .is_some(),
            "more than allowed"
        );
        assert!(
            manifest
                .over_allowance(&all[0], &spilling(16), "sm_90a")
                .is_some(),
            "another architecture"
        );
        assert!(
            manifest
                .over_allowance(&all[1], &spilling(4), "sm_80")
                .is_some(),
            "another variant"
        );
        let stack = Resources {
            name: "a".into(),
            stack_bytes: 8,
            ..Resources::default()
        };
        assert!(
            manifest.over_allowance(&all[0], &stack, "sm_80").is_some(),
            "no stack was allowed"
        );
    }

    #[test]
    fn mistakes_in_the_file_are_refused() {
        let refused = |list: &str, allowed: &str| Manifest::parse(list, allowed).is_err();
        assert!(
            refused("[[kernel]]\nfile = 'a.cu'\nvariant = []", ALLOWED),
            "unknown key"
        );
        let fine = ALLOWED.replace(
            "0.2 % slower than with one block less a multiprocessor",
            "fine",
        );
        assert!(refused(TEXT, &fine), "no reason");
        let many = format!(
            "[[kernel]]\nfile = 'a.cu'\narch = []\nvariants = [{}]",
            "{ A = 1 },".repeat(MAX_SPECIALISATIONS + 1)
        );
        assert!(refused(&many, ALLOWED), "one too many");
    }
}
