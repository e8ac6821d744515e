//! Rules of the repository that no compiler knows. All violations are listed, not only the first.
mod arrows;
mod dependencies;
mod files;
pub(crate) mod headers;
mod links;
mod ops;

use crate::workspace;
use anyhow::{Result, bail};

/// The files of sieve-kernels that re-export its public names.
const PUBLIC_MODULES: [&str; 2] = ["lib", "step"];

/// Names that sieve-kernels gives to others: those of its root and of its public modules.
fn public_names() -> Result<usize> {
    let mut text = String::new();
    for file in PUBLIC_MODULES {
        text += &workspace::read(format!("crates/sieve-kernels/src/{file}.rs"))?;
    }
    let uses = text.split("pub use ").skip(1).filter_map(|rest| rest.split(';').next());
    Ok(uses
        .map(|path| path.matches(',').count() + usize::from(!path.trim_end().ends_with(",\n}")))
        .sum())
}

/// Runs every rule.
pub(crate) fn run() -> Result<()> {
    let mut problems = Vec::new();
    arrows::check(&mut problems)?;
    dependencies::check(&mut problems)?;
    files::check(&mut problems)?;
    headers::check(&mut problems)?;
    links::check(&mut problems)?;
    ops::check(&mut problems)?;
    if problems.is_empty() {
        println!("tidy: clean; sieve-kernels has {} public names", public_names()?);
        return Ok(());
    }
    for problem in &problems {
        println!("tidy: {problem}");
    }
    bail!("tidy found {} problem(s)", problems.len())
}
