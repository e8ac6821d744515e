//! Where the runs of a sweep start. All of them are checked before the first step of the first one.
use super::Run;
use crate::train::{Session, check_gpu};
use anyhow::{Context, Result, bail};
use sieve_core::ShownPath;
use sieve_hf::Checkpoint;
use sieve_train::{RunFolder, Start, TrainError, check_fit, named_checkpoint};

/// The start of each run, checked: the run's folder, its initial weights, and the memory that it needs.
pub(super) fn of_runs(session: &Session<'_>, runs: &[Run]) -> Result<Vec<Start>> {
    let starts = runs.iter().map(|run| check(session, run).with_context(|| run.overrides.join(" ")));
    let starts = starts.collect::<Result<Vec<_>>>()?;
    session.args.refuse_idle_flags(starts.iter().zip(runs.iter().map(|run| &run.recipe)))?;
    Ok(starts)
}

/// Finds where a run starts, and refuses what would fail later.
fn check(session: &Session<'_>, run: &Run) -> Result<Start> {
    let args = session.args;
    let start = match args.start(&run.out, None)? {
        // With --resume, a run of the sweep that has not started yet starts as a new one.
        Start::Resume | Start::ResumeAlone { .. } if !RunFolder::holds_run(&run.out) => Start::New,
        start => start,
    };
    args.refuse_ignored(&start, &run.recipe, &run.out)?;
    RunFolder::open(&run.out, &run.recipe.checkpoint.folder, &start)?;
    let source = match &start {
        Start::New => named_checkpoint(&run.recipe)?.map(|found| (found.path.clone(), found)),
        Start::BranchFrom(path) => Some((path.clone(), Checkpoint::peek(path)?)),
        _ => None,
    };
    let source = source.map(|(path, found)| (found, path));
    if let Some((found, path)) = &source {
        check_fit(found, &run.recipe, args.branch_options())?;
        let (step, steps) = (found.state.step, run.recipe.training.steps);
        if steps as u64 <= step {
            bail!(
                "{} is at step {step}, and {} ends at step {steps}: nothing would be trained\n  \
                 hint: --set training.steps=N, above {step}",
                path.shown(),
                run.overrides.join(" ")
            );
        }
    }
    let vocab_size = match &source {
        Some((found, _)) => Ok(found.state.vocab_size),
        None => crate::plan::vocab_size(&run.recipe),
    };
    let shape = run.recipe.model_shape(0)?;
    let device = args.device.for_model(&session.found, &run.recipe.shapes_of_stages(&shape));
    check_gpu(&run.recipe, &shape, &device)?;
    TrainError::check_ranks(&run.recipe, 1)?;
    // A tokenizer that cannot be read is reported when the text is prepared.
    if let Ok(vocab_size) = vocab_size {
        args.memory.check_training(&run.recipe, vocab_size, &device, session.sharers())?;
    }
    Ok(start)
}
