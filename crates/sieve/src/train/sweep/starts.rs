//! Checks all runs of a sweep before the first step of the first one.
use super::run::Run;
use crate::train::one::Process;
use crate::train::place::check_gpu;
use anyhow::{Context, Result, bail};
use sieve_core::ShownPath;
use sieve_train::{FoundRun, RunFolder, TrainError, check_branch_options};

/// Refuses what would fail later in one of the runs: its folder, its initial weights, its device, its memory.
pub(super) fn check(process: &Process<'_>, runs: &[Run]) -> Result<()> {
    runs.iter().try_for_each(|run| check_one(process, run).with_context(|| run.overrides.join(" ")))?;
    Ok(check_branch_options(runs.iter().map(|run| (&run.request, &run.recipe)), None)?)
}

/// Checks one run, as a process that trains alone.
fn check_one(process: &Process<'_>, run: &Run) -> Result<()> {
    let out = &run.request.out;
    // A single run may also be moved aside (--overwrite), which a sweep does not do.
    if run.request.found == FoundRun::AsStart
        && let Some(found) = RunFolder::found_run(out, &run.recipe.checkpoint.folder)
    {
        let out = out.shown();
        bail!(
            "{out} already holds a run ({found} is there)\n  \
             hint: continue the sweep with --resume, or name another folder with --out"
        );
    }
    let vocab_size = match run.request.check(&run.recipe)? {
        Some(vocab_size) => Ok(vocab_size),
        None => crate::recipe::vocab_size(&run.recipe),
    };
    let shape = run.recipe.model_shape(0)?;
    let device = process.args.device.for_model(&process.found, &run.recipe.shapes_of_stages(&shape));
    check_gpu(&run.recipe, &shape, &device)?;
    TrainError::check_ranks(&run.recipe, 1)?;
    // A tokenizer that cannot be read is reported when the text is prepared.
    if let Ok(vocab_size) = vocab_size {
        process.args.memory.check_training(&run.recipe, vocab_size, &device, process.sharers())?;
    }
    Ok(())
}
