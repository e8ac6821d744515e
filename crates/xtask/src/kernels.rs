//! `cargo xtask kernels`: compiles the shipped kernels, without a GPU, and prints each one's registers and memory.
mod bound_and_zero;
mod nvcc;
mod resources;
pub(crate) mod shipped;

use crate::tidy::headers;
use crate::workspace;
use anyhow::{Context, Result, bail};
use nvcc::Nvcc;
use rayon::prelude::*;
use shipped::{Shipped, Specialisation};

/// A specialisation to compile for an architecture.
type Job<'a> = (&'a Specialisation, &'a str);

/// Compiles the shipped kernels for all their architectures, or only for one.
pub(crate) fn run(only_arch: Option<&str>) -> Result<()> {
    let shipped = Shipped::load()?;
    let nvcc = Nvcc::find_or_install()?;
    let jobs: Vec<Job> = shipped
        .specialisations
        .iter()
        .flat_map(|s| s.arch.iter().map(move |arch| (s, arch.as_str())))
        .filter(|(_, arch)| only_arch.is_none_or(|only| only == *arch))
        .collect();
    if jobs.is_empty() {
        bail!("nothing to compile: no specialisation names {}", only_arch.unwrap_or("an architecture"));
    }
    let logs = jobs.par_iter().map(|&(specialisation, arch)| nvcc.compile(specialisation, arch));
    report(&shipped, &jobs, &logs.collect::<Vec<_>>())
}

/// Prints a table of what each kernel uses, then the problems; `logs` are nvcc's messages for each of `jobs`.
fn report(shipped: &Shipped, jobs: &[Job], logs: &[Result<String>]) -> Result<()> {
    let mut problems = headers::not_shipped(shipped)?;
    println!(
        "{:7} {:44} {:>9} {:>15} {:>6} {:>7}  defines",
        "arch", "entry point", "registers", "spills st/ld B", "stack", "smem B"
    );
    for (&(specialisation, arch), log) in jobs.iter().zip(logs) {
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
            let spills = format!("{}/{}", function.spill_store_bytes, function.spill_load_bytes);
            println!(
                "{arch:7} {:44} {:>9} {spills:>15} {:>6} {:>7}  {}",
                function.name,
                function.registers,
                function.stack_bytes,
                function.shared_bytes,
                specialisation.text()
            );
            let problem = shipped.over_allowance(specialisation, function, arch);
            problems.extend(problem.map(|problem| format!("{name}: {problem}")));
        }
        problems.extend(resources::warnings(log).map(|line| format!("{name}: {line}")));
    }
    println!("kernels: {} specialisations, {} compilations", shipped.specialisations.len(), jobs.len());
    if problems.is_empty() {
        return Ok(());
    }
    for problem in &problems {
        println!("kernels: {problem}");
    }
    bail!("{} kernel problem(s); a spill needs an entry with its reason in kernels/allowances.toml", problems.len())
}

/// The folder of the kernels' sources.
pub(crate) fn folder() -> std::path::PathBuf {
    workspace::root().join("kernels")
}
