//! Runs a plan of the C interface on the CPU emulator, for the tests of the Python package: `emulate_plan FOLDER`.
//!
//! The plan is made from FOLDER/request.json. FOLDER/0, FOLDER/1, .. hold the bytes of the plan's inputs. An optional
//! FOLDER/capacity says how many keys the caches hold. Afterwards the program writes every input and output buffer of
//! the plan, by its number, to FOLDER/0, FOLDER/1, ..
#![allow(clippy::print_stderr, reason = "this is a program")]
use sieve_bench::replay_emulated;
use sieve_capi::Plan;
use std::error::Error;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

/// Fails, with the reason, where the folder's plan cannot be made or run.
fn main() -> ExitCode {
    let Some(folder) = std::env::args().nth(1) else {
        eprintln!("usage: emulate_plan FOLDER");
        return ExitCode::FAILURE;
    };
    match replay(Path::new(&folder)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Makes the plan in `folder`, runs it on the inputs there, and writes all buffers but the scratch.
fn replay(folder: &Path) -> Result<(), Box<dyn Error>> {
    let mut plan = Plan::new(&fs::read_to_string(folder.join("request.json"))?)?;
    if let Ok(keys) = fs::read_to_string(folder.join("capacity")) {
        plan = plan.at_capacity(keys.parse()?)?;
    }
    let file = |buffer: usize| folder.join(buffer.to_string());
    let held = (0..plan.num_inputs).map(|input| fs::read(file(input)));
    let held = held.collect::<Result<Vec<_>, _>>()?;
    let after = replay_emulated(Path::new("target/emulator"), &plan.buffers, &held, &plan.steps)?;
    let scratch = plan.buffers.len() - 1;
    for (buffer, bytes) in after[..scratch].iter().enumerate() {
        fs::write(file(buffer), bytes)?;
    }
    Ok(())
}
