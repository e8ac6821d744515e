//! Arguments of `sieve train`, and what they ask of a run.
use super::exporter::MetricsPort;
use crate::recipe::RecipeArgs;
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use sieve_core::ShownPath;
use sieve_data::is_hub_model;
use sieve_host::device::DeviceChoice;
use sieve_host::on_event::OnEvent;
use sieve_host::out_file::on_this_machine;
use sieve_host::out_of_memory::MemoryArgs;
use sieve_train::{BranchOptions, FoundRun, RunRequest, Start};
use std::path::{Path, PathBuf};

/// Arguments of `sieve train`.
#[derive(Args, Debug)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(super) recipe: RecipeArgs,
    /// Output folder; out/ and the recipe's name when absent
    #[arg(long, value_name = "DIR", value_parser = on_this_machine())]
    pub(super) out: Option<PathBuf>,
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    pub(super) device: DeviceChoice,
    /// Continue from the latest checkpoint of the output folder; auto: if it holds no run, begin one as without this
    /// flag
    #[arg(
        long,
        value_name = "auto",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "latest"
    )]
    pub(super) resume: Option<Resume>,
    /// Continue from this checkpoint instead of the latest; if it belongs to another run, a new output folder is
    /// created
    #[arg(long, value_name = "DIR")]
    pub(super) resume_from: Option<PathBuf>,
    /// Begin a new run with this checkpoint's weights, moments and step, whatever model.initial_weights says; the
    /// recipe may be a different one for the same model. A model on the Hugging Face hub, hf://OWNER/NAME, is imported
    /// first
    #[arg(long, value_name = "DIR", conflicts_with = "resume_from")]
    pub(super) branch_from: Option<PathBuf>,
    /// A new run that begins with a checkpoint: leave out trained tensors that its attention has no place for, such as
    /// an indexer
    #[arg(long, conflicts_with = "resume_from")]
    pub(super) drop: bool,
    /// A new run that begins with a checkpoint: leave out the optimizer's moments; the step stays
    #[arg(long, conflicts_with = "resume_from")]
    pub(super) fresh_optimizer: bool,
    /// Begin again in a folder that holds a run, which is moved aside: NAME to NAME.1. Nothing is deleted
    #[arg(long, conflicts_with_all = ["resume", "resume_from", "sweep"])]
    pub(super) overwrite: bool,
    /// Train once for each value, each in its own folder, and compare; several keys give all combinations
    #[arg(
        long,
        value_name = "SECTION.KEY=V1,V2,…",
        conflicts_with_all = ["resume_from", "profile"]
    )]
    pub(super) sweep: Vec<String>,
    /// Train a finished run up to this step; the new steps get their own learning-rate schedule
    #[arg(long, value_name = "STEP", requires = "resume", conflicts_with = "sweep")]
    pub(super) extend: Option<usize>,
    /// Stop after N steps, with a checkpoint; the learning-rate schedule is the whole run's
    #[arg(long, value_name = "N", conflicts_with = "sweep", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) stop_after: Option<u64>,
    /// Print where the GPU's time goes in N steps, kernel by kernel, and continue training
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub(super) profile: Option<u64>,
    /// With several processes: seconds without a heartbeat after which one counts as lost
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(super) patience: u64,
    /// Folder for the last checkpoint of this process if its usual folder cannot be written, in a subfolder for the
    /// run; --resume=auto continues from it if it is the latest
    #[arg(long, value_name = "DIR", conflicts_with = "sweep", value_parser = on_this_machine())]
    pub(super) checkpoint_fallback: Option<PathBuf>,
    /// Seconds for which the last checkpoint is tried where it cannot be written
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub(super) checkpoint_patience: u64,
    /// Answer GET /metrics with the run's numbers in Prometheus' text form: a port of 127.0.0.1, 0 for a free one
    #[arg(long, value_name = "[HOST:]PORT", conflicts_with = "sweep")]
    pub(super) metrics_port: Option<MetricsPort>,
    /// Run this with sh when the run ends or nothing happens for long; SIEVE_EVENT is finished, stopped, lost, failed
    /// or stalled, SIEVE_OUT the output folder, SIEVE_MESSAGE the error
    #[arg(long, value_name = "COMMAND", value_parser = NonEmptyStringValueParser::new())]
    pub(super) on_event: Option<String>,
    #[command(flatten)]
    pub(super) memory: MemoryArgs,
}

/// Values of `--resume`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Resume {
    /// Resume the run in the output folder; without one, begin a run.
    Auto,
    /// Resume the run in the output folder; without one, fail.
    Latest,
}

impl TrainArgs {
    /// The run's output folder: `--out`, or the recipe's own.
    pub(super) fn out_folder(&self) -> PathBuf {
        self.out.clone().unwrap_or_else(|| self.recipe.default_out())
    }

    /// The command of `--on-event`.
    pub(super) fn events(&self) -> OnEvent {
        OnEvent::new(self.on_event.clone(), &self.out_folder())
    }

    /// What the flags ask of the run in `out`.
    pub(super) fn request(&self, out: &Path) -> RunRequest {
        let start = match (&self.branch_from, &self.resume_from, self.resume) {
            (Some(path), _, _) => Start::BranchFrom(path.clone()),
            (None, Some(path), _) => Start::ResumeFrom(path.clone()),
            (None, None, Some(Resume::Latest)) => Start::Resume,
            (None, None, _) => Start::New,
        };
        RunRequest {
            out: out.to_owned(),
            start,
            found: match self.resume {
                Some(Resume::Auto) => FoundRun::ResumeAlone,
                _ => FoundRun::AsStart,
            },
            branch: BranchOptions { drops: self.drop, fresh_optimizer: self.fresh_optimizer },
            extend: self.extend,
            fallback: self.checkpoint_fallback.clone(),
            recipe_file: self.recipe.file(),
        }
    }

    /// What the flags ask of one run of a sweep: with `--resume`, a run that has not begun yet begins anew.
    pub(super) fn request_of_sweep(&self, out: &Path) -> RunRequest {
        let request = self.request(out);
        match request.start {
            Start::Resume => RunRequest { start: Start::New, found: FoundRun::Resume, ..request },
            _ => request,
        }
    }

    /// Ends the program if `--resume` is combined with `--branch-from` or `--resume-from`, or if
    /// `--checkpoint-fallback` lies in the output folder.
    pub(super) fn check(&self) {
        let conflict = |text: String| clap::Error::raw(clap::error::ErrorKind::ArgumentConflict, text).exit();
        let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        if let Some(dir) = &self.checkpoint_fallback
            && absolute(dir).starts_with(absolute(&self.out_folder()))
        {
            conflict(format!(
                "--checkpoint-fallback {} is in the output folder, which cannot be written when it is needed\n  \
                 hint: name a folder on another disk\n",
                dir.shown()
            ));
        }
        if let Some(path) = self.resume_from.as_deref().filter(|path| is_hub_model(path)) {
            conflict(format!(
                "--resume-from {} names a model on the Hugging Face hub, not a run to continue\n  \
                 hint: --branch-from begins a new run with it\n",
                path.shown()
            ));
        }
        let of_new_runs = [("--drop", self.drop), ("--fresh-optimizer", self.fresh_optimizer)];
        let given = of_new_runs.into_iter().find(|(_, is_given)| *is_given);
        if let Some((flag, _)) = given.filter(|_| self.resume == Some(Resume::Latest)) {
            conflict(format!(
                "{flag} is for new runs that begin with a checkpoint, and --resume continues a run\n  \
                 hint: --branch-from CHECKPOINT begins one\n"
            ));
        }
        let other = match (&self.branch_from, &self.resume_from) {
            (Some(_), _) => "--branch-from",
            (None, Some(_)) => "--resume-from",
            (None, None) => return,
        };
        if self.resume == Some(Resume::Latest) {
            conflict(format!(
                "--resume and {other} name two places to begin from\n  \
                 hint: --resume=auto continues a run where there is one, else begins as {other} says\n"
            ));
        }
    }
}
