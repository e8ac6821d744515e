//! Rules of the repository that no compiler knows. All violations are listed, not only the first.
mod arrows;
mod dependencies;
mod files;
mod headers;
mod links;
mod ops;

use crate::workspace;
use anyhow::{Result, bail};

/// Names that the root of sieve-kernels gives to others.
fn public_names() -> Result<usize> {
    let lib = workspace::read(&workspace::root().join("crates/sieve-kernels/src/lib.rs"))?;
    let uses = lib
        .split("pub use ")
        .skip(1)
        .filter_map(|rest| rest.split(';').next());
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
        println!(
            "tidy: clean; sieve-kernels has {} public names",
            public_names()?
        );
        return Ok(());
    }
    for problem in &problems {
        println!("tidy: {problem}");
    }
    bail!("tidy found {} problem(s)", problems.len())
}
