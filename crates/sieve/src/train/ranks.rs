//! `sieve train` as one of several ranks.
use super::arguments::TrainArgs;
use super::one::run_one;
use anyhow::{Result, bail};
use sieve_comm::World;
use sieve_host::exit::Exit;
use sieve_host::interrupt::Interrupt;
use sieve_host::on_event::OnEvent;
use sieve_host::ranks::joined;

/// What follows the line about a lost rank of a training run.
const RESUME: &str = "\n  hint: the same command with --resume=auto continues from the last checkpoint";

/// Trains as one rank of `world`. Rank 0 prints and runs the command of `--on-event`; other ranks print only errors
/// that rank 0 cannot know. If rank 0 is lost, rank 1 takes over both.
pub(super) fn run(args: &TrainArgs, world: World, events: &OnEvent) -> Result<Exit> {
    let (rank, size) = (world.rank, world.size);
    if !args.sweep.is_empty() {
        if rank > 0 {
            return Ok(Exit::Failed);
        }
        bail!("--sweep works in one process, and these are {size}\n  hint: leave out sieve launch or torchrun");
    }
    // Installed before this rank waits for the others: a launcher that dies has perhaps not started all of them.
    let interrupt = Interrupt::install(rank == 0)?;
    joined(world, args.patience, (events, RESUME), |mesh| run_one(args, Some(mesh), interrupt))
}
