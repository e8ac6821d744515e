//! Where the runs of a sweep start. All of them are checked before the first step of the first one, and the weights are
//! imported where a run has another kind of attention than the checkpoint that it begins with.
use super::Run;
use crate::terminal;
use crate::train::{Session, check_gpu};
use anyhow::{Context, Result, bail};
use burn_flex::{Flex, FlexDevice};
use sieve_core::ShownPath;
use sieve_hf::{Checkpoint, refit};
use sieve_train::{RunFolder, Start, TrainError, check_fit, named_checkpoint, needs_import};
use std::fs;
use std::path::PathBuf;

/// Folder of the imported weights, in the folder of the run that begins with them.
const IMPORTED: &str = "initial";
const KIND: &str = "attention.kind=";

/// The start of one run.
struct Plan {
    start: Start,
    /// The checkpoint that a new run begins with, and its path as the user gave it.
    source: Option<(Checkpoint, PathBuf)>,
    /// Whether the run has another kind of attention than that checkpoint.
    needs_import: bool,
}

impl Plan {
    /// Whether the run begins with the weights alone, in a sweep in which another run does. Of runs that are compared,
    /// none begins with moments and steps that another one lacks.
    fn imports(&self) -> bool {
        self.needs_import || self.source.iter().any(|(source, _)| source.state.step > 0 || source.has_optimizer())
    }
}

/// The start of each run, checked: the run's folder, its initial weights, and the memory that it needs.
pub(super) fn of_runs(session: &Session<'_>, runs: &mut [Run]) -> Result<Vec<Start>> {
    let mut plans = Vec::new();
    for run in runs.iter_mut() {
        let plan = check(session, run).with_context(|| run.overrides.join(" "))?;
        plans.push(plan);
    }
    let has_imports = plans.iter().any(|plan| plan.needs_import);
    for (plan, run) in plans.iter().zip(runs.iter()) {
        let begins_at_zero = has_imports && plan.imports();
        let Some((source, path)) = plan.source.as_ref().filter(|_| !begins_at_zero) else {
            continue;
        };
        let (step, steps) = (source.state.step, run.recipe.training.steps);
        if steps as u64 <= step {
            bail!(
                "{} is at step {step}, and {} ends at step {steps}: nothing would be trained\n  \
                 hint: --set training.steps=N, above {step}",
                path.shown(),
                run.overrides.join(" ")
            );
        }
    }
    let mut made = Vec::new();
    for (plan, run) in plans.iter_mut().zip(runs.iter()).filter(|(plan, _)| has_imports && plan.imports()) {
        made.push(run.out.join(IMPORTED));
        let imported = import(plan, run).with_context(|| run.overrides.join(" "));
        plan.start = imported.inspect_err(|_| made.iter().for_each(remove))?;
    }
    Ok(plans.into_iter().map(|plan| plan.start).collect())
}

/// Finds where a run starts, and refuses what would fail later.
fn check(session: &Session<'_>, run: &mut Run) -> Result<Plan> {
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
    let is_of_kinds = args.sweep.iter().any(|sweep| sweep.trim_start().starts_with(KIND));
    // No other kind's weights become latent attention's, as `check_fit` says.
    let may_import = is_of_kinds && !run.recipe.attention.as_kind().is_latent();
    let needs_import = match &source {
        Some((found, _)) => may_import && needs_import(found, &run.recipe)?,
        None => false,
    };
    if let Some((found, _)) = source.as_ref().filter(|_| !needs_import) {
        check_fit(found, &run.recipe)?;
    }
    if matches!(start, Start::Resume | Start::ResumeAlone { .. }) && run.out.join(IMPORTED).is_dir() {
        // The run began with the imported weights, and not with those that the recipe names.
        run.recipe.model.initial_weights = None;
    }
    let vocab_size = match &source {
        Some((found, _)) => Ok(found.state.vocab_size),
        None => crate::plan::vocab_size(&run.recipe),
    };
    let shape = run.recipe.model_shape(0)?;
    let device = args.device.for_model(&session.found, &shape);
    check_gpu(&run.recipe, &shape, &device)?;
    TrainError::check_ranks(&run.recipe, 1)?;
    // A tokenizer that cannot be read is reported when the text is prepared.
    if let Ok(vocab_size) = vocab_size {
        args.memory.check_training(&run.recipe, vocab_size, &device, session.sharers())?;
    }
    Ok(Plan { start, source, needs_import })
}

/// Imports the weights that a run begins with for its kind of attention. Returns the start from them.
fn import(plan: &Plan, run: &Run) -> Result<Start> {
    let Some((source, _)) = &plan.source else {
        return Ok(plan.start.clone());
    };
    let report = refit::<Flex>(&source.path, &run.recipe, &run.out.join(IMPORTED), &FlexDevice)?;
    let new = match report.added.as_slice() {
        [] => "no parameter is new".to_owned(),
        [first, ..] => format!("{} parameters are new: {first}, …", report.added.len()),
    };
    terminal::line(&format!(
        "{}: begins at step 0 with the weights of {}, imported for attention {} as {}; {new}",
        run.overrides.join(" "),
        source.path.shown(),
        run.recipe.attention.kind().name(),
        report.path.shown()
    ));
    Ok(Start::BranchFrom(report.path))
}

/// Removes imported weights of a run that does not begin, and the folders around them in which nothing else is.
fn remove(imported: &PathBuf) {
    let _ = fs::remove_dir_all(imported);
    for folder in imported.ancestors().skip(1).take(2) {
        let _ = fs::remove_dir(folder);
    }
}
