//! `sieve train`: trains a model from a recipe.
mod arguments;
mod curve;
mod ending;
mod exporter;
mod lines;
mod log;
mod missing;
mod one;
mod place;
mod profile;
mod ranks;
mod samples;
mod step_bar;
mod sweep;

use anyhow::{Context, Result};
pub(crate) use arguments::TrainArgs;
use one::run_one;
use sieve_comm::World;
use sieve_host::environment::variable;
use sieve_host::exit::Exit;
use sieve_host::hub;
use sieve_host::interrupt::{Interrupt, respect_nohup};
use sieve_host::stopped::{is_unsaved, passes_by_itself, stopped_by};

/// Runs `sieve train`: as one process, as one rank of several, or as a sweep over settings.
pub(crate) fn run(mut args: TrainArgs) -> Result<Exit> {
    args.check();
    respect_nohup();
    args.branch_from = args.branch_from.map(|path| hub::checkpoint(&path).context("--branch-from")).transpose()?;
    let events = args.events();
    match World::from_env(&variable)? {
        Some(world) => ranks::run(&args, world, &events),
        None if !args.sweep.is_empty() => events.ended(sweep::run(args)),
        None => {
            let (prints, mesh) = (true, None);
            let exit = Interrupt::install(prints).and_then(|interrupt| run_one(&args, mesh, interrupt));
            events.ended(stopped_by(is_unsaved, stopped_by(passes_by_itself, exit, prints), prints))
        }
    }
}
