//! `cargo xtask kernels`: compiles the shipped kernels, without a GPU, and prints each one's registers and memory.
mod allowances;
mod bound_and_zero;
mod nvrtc;

use crate::tidy::headers;
use allowances::Allowances;
use anyhow::{Context, Result, bail};
use nvrtc::Messages;
use rayon::prelude::*;
use sieve_gpu::ahead_of_time::NamedResources;
use sieve_gpu::{NeededKernels, SourceKernel};

/// A specialisation to compile for an architecture.
type Job<'a> = (&'a SourceKernel, &'a str);

/// Compiles the shipped kernels, from the text that a launch sends, for the named architectures, or for all. `words`
/// are this chore's words, by which it starts itself again.
pub(crate) fn run(only: &[&str], words: &[&str]) -> Result<()> {
    let shipped = NeededKernels::shipped();
    let unknown = only.iter().find(|arch| !shipped.iter().any(|(_, of_kernel)| of_kernel.contains(arch)));
    if let Some(arch) = unknown {
        bail!("nothing to compile: no specialisation names {arch}");
    }
    if nvrtc::started_with_it(words)?.is_some() {
        return Ok(());
    }
    let messages = Messages::of_installed()?;
    let jobs: Vec<Job> = shipped
        .iter()
        .flat_map(|(kernel, architectures)| architectures.iter().map(move |arch| (kernel, *arch)))
        .filter(|(_, arch)| only.is_empty() || only.contains(arch))
        .collect();
    let logs = jobs.par_iter().map(|&(kernel, arch)| messages.of(kernel, arch));
    report(&shipped, &jobs, &logs.collect::<Vec<_>>())
}

/// Prints a table of what each kernel uses, then the problems; `logs` are the compiler's messages for each of `jobs`.
fn report(shipped: &[(SourceKernel, Vec<&str>)], jobs: &[Job], logs: &[Result<String>]) -> Result<()> {
    let allowances = Allowances::load()?;
    let mut problems = headers::not_shipped(shipped)?;
    println!(
        "{:7} {:44} {:>9} {:>15} {:>6} {:>7}  defines",
        "arch", "entry point", "registers", "spills st/ld B", "stack", "smem B"
    );
    for (&(kernel, arch), log) in jobs.iter().zip(logs) {
        let defines: Vec<String> = kernel.defines().iter().map(|(name, value)| format!("{name}={value}")).collect();
        let defines = defines.join(" ");
        let name = format!("{}.cu [{defines}] {arch}", kernel.name());
        let log = match log {
            Ok(log) => log,
            Err(error) => {
                problems.push(format!("{name}: {error:#}"));
                continue;
            }
        };
        let functions =
            NamedResources::of_log(log).with_context(|| format!("{name}: ptxas printed something unexpected"))?;
        if functions.is_empty() {
            problems.push(format!("{name}: no function was compiled"));
        }
        for NamedResources { name: function, resources } in &functions {
            let spills = format!("{}/{}", resources.spill_store_bytes, resources.spill_load_bytes);
            println!(
                "{arch:7} {function:44} {:>9} {spills:>15} {:>6} {:>7}  {defines}",
                resources.registers, resources.stack_bytes, resources.static_shared_bytes,
            );
            let problem = allowances.exceeded_by(kernel.defines(), function, resources, arch);
            problems.extend(problem.map(|problem| format!("{name}: {problem}")));
        }
        problems.extend(nvrtc::warnings(log).map(|line| format!("{name}: {line}")));
    }
    println!("kernels: {} specialisations, {} compilations", shipped.len(), jobs.len());
    if problems.is_empty() {
        return Ok(());
    }
    for problem in &problems {
        println!("kernels: {problem}");
    }
    bail!("{} kernel problem(s); a spill needs an entry with its reason in kernels/allowances.toml", problems.len())
}
