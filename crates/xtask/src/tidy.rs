//! `cargo xtask tidy`: the rules of the repository that no compiler checks. Lists all violations.
mod arrows;
mod dependencies;
mod files;
pub(crate) mod headers;
mod links;
mod targets;

use anyhow::{Result, bail};

/// Runs every rule.
pub(crate) fn run() -> Result<()> {
    let mut problems = Vec::new();
    arrows::check(&mut problems)?;
    dependencies::check(&mut problems)?;
    files::check(&mut problems)?;
    headers::check(&mut problems)?;
    links::check(&mut problems)?;
    targets::check(&mut problems)?;
    if problems.is_empty() {
        println!("tidy: clean");
        return Ok(());
    }
    for problem in &problems {
        println!("tidy: {problem}");
    }
    bail!("tidy found {} problem(s)", problems.len())
}
