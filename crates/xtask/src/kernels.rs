//! `cargo xtask kernels`: compiles what ships, without a GPU, and says what it costs.
mod nvcc;
mod resources;
pub(crate) mod shipped;

use crate::tidy::headers;
use crate::workspace;
use anyhow::{Context, Result, bail};
use nvcc::Nvcc;
use rayon::prelude::*;
use resources::Resources;
use shipped::{Shipped, Specialisation};

/// One compilation's outcome.
struct Compiled<'a> {
    specialisation: &'a Specialisation,
    arch: &'a str,
    log: Result<String>,
}

/// Compiles what ships for all its architectures, or for one.
pub(crate) fn run(only_arch: Option<&str>) -> Result<()> {
    let shipped = Shipped::load()?;
    let nvcc = Nvcc::find_or_install()?;
    let jobs: Vec<(&Specialisation, &str)> = shipped
        .specialisations
        .iter()
        .flat_map(|s| s.arch.iter().map(move |arch| (s, arch.as_str())))
        .filter(|(_, arch)| only_arch.is_none_or(|only| only == *arch))
        .collect();
    if jobs.is_empty() {
        bail!(
            "nothing to compile: no specialisation names {}",
            only_arch.unwrap_or("an architecture")
        );
    }
    let compiled = jobs.par_iter().map(|&(specialisation, arch)| Compiled {
        specialisation,
        arch,
        log: nvcc.compile(specialisation, arch),
    });
    report(&shipped, &compiled.collect::<Vec<_>>())
}

/// Prints the table, then what must not be.
fn report(shipped: &Shipped, results: &[Compiled]) -> Result<()> {
    let mut problems = headers::not_shipped(shipped)?;
    println!(
        "{:7} {:44} {:>9} {:>15} {:>6} {:>7}  defines",
        "arch", "entry point", "registers", "spills st/ld B", "stack", "smem B"
    );
    for Compiled {
        specialisation,
        arch,
        log,
    } in results
    {
        let name = format!("{} [{}] {arch}", specialisation.file, specialisation.text());
        let log = match log {
            Ok(log) => log,
            Err(error) => {
                problems.push(format!("{name}: {error:#}"));
                continue;
            }
        };
        let functions = resources::parse(log).with_context(|| format!("{name}: ptxas printed something unexpected"))?;
        if functions.is_empty() {
            problems.push(format!("{name}: no function was compiled"));
        }
        for function in &functions {
            let Resources {
                registers,
                spill_store_bytes: store,
                spill_load_bytes: load,
                stack_bytes,
                shared_bytes,
                ..
            } = function;
            println!(
                "{arch:7} {:44} {registers:>9} {:>15} {stack_bytes:>6} {shared_bytes:>7}  {}",
                function.name,
                format!("{store}/{load}"),
                specialisation.text()
            );
            problems.extend(
                shipped
                    .over_allowance(specialisation, function, arch)
                    .map(|problem| format!("{name}: {problem}")),
            );
        }
        problems.extend(resources::warnings(log).map(|line| format!("{name}: {line}")));
    }
    println!(
        "kernels: {} specialisations, {} compilations",
        shipped.specialisations.len(),
        results.len()
    );
    if problems.is_empty() {
        return Ok(());
    }
    for problem in &problems {
        println!("kernels: {problem}");
    }
    bail!(
        "{} kernel problem(s); a spill needs an entry with its reason in kernels/allowances.toml",
        problems.len()
    )
}

/// The folder with the kernels.
pub(crate) fn folder() -> std::path::PathBuf {
    workspace::root().join("kernels")
}
