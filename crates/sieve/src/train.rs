//! `sieve train`: trains a model from a recipe.
mod ending;
mod exporter;
mod extend;
mod lines;
mod log;
mod missing;
mod on_event;
mod profile;
mod ranks;
mod stopped;
mod sweep;
mod useless;

use crate::data::account;
use crate::data::prepare::Watch;
use crate::device::{Device, DeviceChoice};
use crate::exit::Exit;
use crate::interrupt::{Interrupt, respect_nohup};
use crate::out_of_memory::{self, MemoryArgs};
use crate::recipe::RecipeArgs;
use crate::{allocator, room, startup, terminal, text_files};
use anyhow::{Context, Result, anyhow, bail};
use burn::backend::Autodiff;
use burn_cuda::CudaDevice;
use burn_flex::{Flex, FlexDevice};
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use ending::{finish, next_steps, samples, tell_references};
use exporter::{Exporter, MetricsPort};
use extend::extend;
use indicatif::ProgressBar;
use lines::{
    cost_lines, describe, skipped_line, startup_line, step_line, stopped_line, validation_line, whole_step_line,
};
use log::Log;
use on_event::{OnEvent, StallWatch};
use profile::StepProfile;
use sieve_comm::{Mesh, World};
use sieve_core::recipe::TrainingPrecision;
use sieve_core::{Attention, Keeping, ModelShape, Recipe, ShownPath};
use sieve_data::OnChange;
use sieve_hf::Checkpoint;
use sieve_kernels::step::require_fp8;
use sieve_kernels::{Cublaslt, DeviceReport, GpuState};
use sieve_ops::{Cuda, TrainBackend};
use sieve_plan::{check_gpu_attention, gpu_training_gap};
use sieve_train::{
    BranchOptions, DataEvent, DataSource, DeviceMemory, Group, Hardware, MemoryProbe, Origin, Precision, RunFolder,
    Start, TrainError, TrainEvent, TrainSummary, Trainer, TrainingData, WriteLimits, tidy_finished,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use stopped::{is_of_a_disk, is_unsaved, stopped_by};
pub(crate) use useless::useless_settings;

/// Environment variable that `sieve launch` sets for its processes.
pub(crate) const LAUNCHED: &str = "SIEVE_LAUNCHED";

/// Arguments of `sieve train`.
#[derive(Args, Debug)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Output folder; out/ and the recipe's name when absent
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Continue from the latest checkpoint of the output folder; auto: where it holds no run, begin one as without this
    /// flag
    #[arg(
        long,
        value_name = "auto",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "latest"
    )]
    resume: Option<Resume>,
    /// Continue from this checkpoint instead of the latest; one of another run begins a new output folder
    #[arg(long, value_name = "DIR")]
    resume_from: Option<PathBuf>,
    /// Begin a new run with this checkpoint's weights, moments and step, whatever model.initial_weights says; the
    /// recipe may be another one for the same model
    #[arg(long, value_name = "DIR", conflicts_with = "resume_from")]
    branch_from: Option<PathBuf>,
    /// A new run that begins with a checkpoint: leave out trained tensors that its attention has no place for, such as
    /// an indexer
    #[arg(long, conflicts_with = "resume_from")]
    drop: bool,
    /// A new run that begins with a checkpoint: leave out the optimizer's moments; the step stays
    #[arg(long, conflicts_with = "resume_from")]
    fresh_optimizer: bool,
    /// Begin again in a folder that holds a run, which is moved aside: NAME to NAME.1. Nothing is deleted
    #[arg(long, conflicts_with_all = ["resume", "resume_from", "sweep"])]
    overwrite: bool,
    /// Train once for each value, each in a folder of its own, and compare; several keys give all combinations
    #[arg(
        long,
        value_name = "SECTION.KEY=V1,V2,…",
        conflicts_with_all = ["resume_from", "profile"]
    )]
    sweep: Vec<String>,
    /// Train a finished run up to this step, with a learning-rate schedule of their own for the new steps
    #[arg(long, value_name = "STEP", requires = "resume", conflicts_with = "sweep")]
    extend: Option<usize>,
    /// Stop after N steps, with a checkpoint; the learning-rate schedule is the whole run's
    #[arg(long, value_name = "N", conflicts_with = "sweep", value_parser = clap::value_parser!(u64).range(1..))]
    stop_after: Option<u64>,
    /// Print where the GPU's time goes in N steps, kernel by kernel, and continue training
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1000))]
    profile: Option<u64>,
    /// With several processes: seconds without a heartbeat after which one counts as lost
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    patience: u64,
    /// Folder for the last checkpoint of this process when its own place cannot be written, in a subfolder of the run's
    /// own; --resume=auto continues from it where it is the latest
    #[arg(long, value_name = "DIR", conflicts_with = "sweep")]
    checkpoint_fallback: Option<PathBuf>,
    /// Seconds for which the last checkpoint is tried where it cannot be written
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    checkpoint_patience: u64,
    /// Answer GET /metrics with the run's numbers in Prometheus' text form: a port of 127.0.0.1, 0 for a free one
    #[arg(long, value_name = "[HOST:]PORT", conflicts_with = "sweep")]
    metrics_port: Option<MetricsPort>,
    /// Run this with sh when the run ends or nothing happens for long; SIEVE_EVENT is finished, stopped, lost, failed
    /// or stalled, SIEVE_OUT the output folder, SIEVE_MESSAGE the error
    #[arg(long, value_name = "COMMAND", value_parser = NonEmptyStringValueParser::new())]
    on_event: Option<String>,
    #[command(flatten)]
    memory: MemoryArgs,
}

/// Values of `--resume`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Resume {
    /// Resume the run in the output folder; without one, begin a run.
    Auto,
    /// Resume the run in the output folder; without one, fail.
    Latest,
}

/// What all runs of this process (several with `--sweep`) share.
struct Session<'a> {
    args: &'a TrainArgs,
    found: Device,
    interrupt: Interrupt,
    events: OnEvent,
    /// Connections to the other ranks; `None` if this process trains alone.
    mesh: Option<Arc<Mesh>>,
}

/// Runs `sieve train`: as one process, as one rank of several, or as a sweep over settings.
pub(crate) fn run(args: TrainArgs) -> Result<Exit> {
    args.check();
    respect_nohup();
    let events = args.events();
    match World::from_env(&variable)? {
        Some(world) => ranks::run(&args, world, &events),
        None if !args.sweep.is_empty() => events.ended(sweep::run(args)),
        None => {
            let (prints, mesh) = (true, None);
            let exit = Interrupt::install(prints).and_then(|interrupt| run_one(&args, mesh, interrupt));
            events.ended(stopped_by(is_unsaved, stopped_by(is_of_a_disk, exit, prints), prints))
        }
    }
}

/// Trains one run, in this process alone or as a rank of `mesh`.
fn run_one(args: &TrainArgs, mesh: Option<Arc<Mesh>>, interrupt: Interrupt) -> Result<Exit> {
    let out = args.out_folder();
    let (mut recipe, text) = args.load_recipe(&args.recipe, &out)?;
    if let Some(steps) = args.extend {
        extend(&mut recipe, &out, steps)?;
    }
    if let Some(mesh) = &mesh {
        ranks::check_recipe(mesh, &recipe)?;
    }
    let session = Session::open(args, &recipe, mesh, interrupt)?;
    text.iter().filter(|_| session.prints()).for_each(|line| terminal::status(line));
    if session.prints() {
        useless_settings(&recipe).iter().for_each(|words| terminal::warning(words));
    }
    if let Some(num_steps) = args.profile {
        // Logging a step reads the loss back and so waits for the GPU. No step between the traced ones may be logged.
        recipe.metrics.log_freq = num_steps as usize;
    }
    if args.overwrite && session.prints() {
        args.move_aside(&out, &recipe)?;
    }
    let start = args.start(&out, session.mesh.as_deref())?;
    args.refuse_ignored(&start, &recipe, &out)?;
    args.refuse_idle_flags([(&start, &recipe)])?;
    train_on(&session, &start, &recipe, &out)
}

impl TrainArgs {
    fn out_folder(&self) -> PathBuf {
        self.out.clone().unwrap_or_else(|| self.recipe.default_out())
    }

    /// The recipe of a run in `out`, and a line about its text. A run that is resumed keeps the attention that it began
    /// with where an earlier version read the recipe so.
    fn load_recipe(&self, source: &RecipeArgs, out: &Path) -> Result<(Recipe, Option<String>)> {
        let (mut recipe, text) = source.load_with_text()?;
        if let Some(begun) = self.attention_of_resumed(out)
            && source.formerly_had(begun)
        {
            recipe.attention.own = begun;
        }
        Ok((recipe, text))
    }

    /// The attention of the run that this command resumes; `None` if it resumes none, or the run cannot be read, which
    /// [`Origin::find`](sieve_train::Origin::find) reports.
    fn attention_of_resumed(&self, out: &Path) -> Option<Attention> {
        let recipe = match (&self.resume_from, self.resume) {
            (Some(path), _) => Checkpoint::peek(path).ok()?.recipe_and_shape().ok()?.0,
            (None, Some(_)) => {
                let text = std::fs::read_to_string(out.join("config.toml")).ok()?;
                Recipe::load(&text, "config.toml", &[]).ok()?
            }
            (None, None) => return None,
        };
        Some(recipe.attention.own)
    }

    /// How a new run takes over a checkpoint's state.
    fn branch_options(&self) -> BranchOptions {
        BranchOptions { drops: self.drop, fresh_optimizer: self.fresh_optimizer }
    }

    /// Refuses flags that say how a run begins with a checkpoint, where all these runs begin with random weights.
    fn refuse_idle_flags<'a>(&self, runs: impl IntoIterator<Item = (&'a Start, &'a Recipe)>) -> Result<()> {
        let of_branches = [("--drop", self.drop), ("--fresh-optimizer", self.fresh_optimizer)];
        let Some((flag, _)) = of_branches.into_iter().find(|(_, is_given)| *is_given) else {
            return Ok(());
        };
        let is_random =
            |start: &Start, recipe: &Recipe| *start == Start::New && recipe.model.initial_folder().is_none();
        if runs.into_iter().all(|(start, recipe)| is_random(start, recipe)) {
            bail!(
                "{flag} is for runs that begin with a checkpoint, and this one begins with random weights\n  \
                 hint: --branch-from CHECKPOINT or model.initial_weights names one; else leave {flag} out"
            );
        }
        Ok(())
    }

    fn events(&self) -> OnEvent {
        OnEvent::new(self.on_event.clone(), &self.out_folder())
    }

    /// With `--overwrite`, moves the run in the output folder aside.
    fn move_aside(&self, out: &Path, recipe: &Recipe) -> Result<()> {
        let canonical = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        if let Some(path) = self.branch_from.as_ref().filter(|path| canonical(path).starts_with(canonical(out))) {
            bail!(
                "--branch-from {} lies in the folder that --overwrite moves aside\n  hint: name another --out",
                path.shown()
            );
        }
        if let Some(aside) = RunFolder::move_aside(out, &recipe.checkpoint.folder)? {
            terminal::status(&format!("the run in {} was moved to {}", out.shown(), aside.shown()));
        }
        Ok(())
    }

    /// Where the run starts, by the flags and, with `--resume=auto`, by what the output folder holds.
    fn start(&self, out: &Path, mesh: Option<&Mesh>) -> Result<Start> {
        if self.resume == Some(Resume::Auto) {
            let holds_run = RunFolder::holds_run(out);
            let resumes = match mesh {
                Some(mesh) => ranks::resumes(mesh, holds_run)?,
                None => holds_run,
            };
            if resumes {
                let fallback = self.checkpoint_fallback.as_ref();
                let fallback = fallback.map(|dir| dir.join(RunFolder::fallback_name(out)));
                return Ok(Start::ResumeAlone { fallback });
            }
        }
        Ok(match (&self.branch_from, &self.resume_from, self.resume) {
            (Some(path), _, _) => Start::BranchFrom(path.clone()),
            (None, Some(path), _) => Start::ResumeFrom(path.clone()),
            (None, None, Some(Resume::Latest)) => Start::Resume,
            (None, None, _) => Start::New,
        })
    }

    /// Refuses a new run whose recipe gives no initial weights and lies beside a checkpoint of its model.
    fn refuse_ignored(&self, start: &Start, recipe: &Recipe, out: &Path) -> Result<()> {
        let is_new = *start == Start::New;
        match is_new.then(|| self.recipe.ignored_checkpoint(recipe, out)).flatten() {
            Some(problem) => bail!("{problem}"),
            None => Ok(()),
        }
    }

    /// Ends the program if `--resume` is combined with `--branch-from` or `--resume-from`, or if
    /// `--checkpoint-fallback` lies in the output folder.
    fn check(&self) {
        let conflict = |text: String| clap::Error::raw(clap::error::ErrorKind::ArgumentConflict, text).exit();
        let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        if let Some(dir) = &self.checkpoint_fallback
            && absolute(dir).starts_with(absolute(&self.out_folder()))
        {
            conflict(format!(
                "--checkpoint-fallback {} lies in the output folder, which cannot be written when it is needed\n  \
                 hint: name a folder on another disk\n",
                dir.shown()
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

impl<'a> Session<'a> {
    /// Opens the device, for this process alone or for a rank of `mesh`.
    fn open(args: &'a TrainArgs, recipe: &Recipe, mesh: Option<Arc<Mesh>>, interrupt: Interrupt) -> Result<Self> {
        Ok(Self {
            args,
            found: match &mesh {
                Some(mesh) => ranks::device(args.device, mesh, recipe)?,
                None => crate::kernels::device_for(args.device, recipe)?,
            },
            interrupt,
            events: args.events(),
            mesh,
        })
    }

    /// `[processes on this host, all processes]`. Those on one host share its memory.
    fn sharers(&self) -> [usize; 2] {
        let world = self.mesh.as_ref().map(|mesh| mesh.world());
        world.map_or([1, 1], |world| [world.local_size, world.size])
    }

    /// Whether this process prints and writes files: it trains alone or is rank 0.
    fn prints(&self) -> bool {
        self.mesh.as_ref().is_none_or(|mesh| mesh.world().rank == 0)
    }
}

/// Trains `recipe` on the session's device; on the CPU if `--device auto` found a GPU without kernels for its
/// attention.
fn train_on(session: &Session<'_>, start: &Start, recipe: &Recipe, out: &Path) -> Result<Exit> {
    // The choice of the device does not depend on the vocabulary, so its size can be 0 here.
    let shape = recipe.model_shape(0)?;
    let device = session.args.device.for_model(&session.found, &recipe.shapes_of_stages(&shape));
    match &device {
        Device::Cpu if session.args.profile.is_some() => {
            bail!("--profile traces a GPU, and this run is on the CPU\n  hint: add --device cuda")
        }
        Device::Cpu => {
            allocator::keep_freed_memory();
            let group = |mesh, _: &_| Ok(Group::on_host(mesh));
            train::<Autodiff<Flex>>((start, out), recipe, session, &device, on_cpu, group)
        }
        Device::Cuda(gpu) => {
            check_gpu(recipe, &shape, &device)?;
            let hardware = || on_cuda(gpu, &shape);
            let degree = recipe.parallelism.context_parallel_degree;
            let group = |mesh, device: &CudaDevice| ranks::on_cuda(mesh, device, degree, &session.events);
            train::<Autodiff<Cuda>>((start, out), recipe, session, &device, hardware, group)
        }
    }
}

/// Refuses a recipe that the GPU cannot train; a CPU trains all.
fn check_gpu(recipe: &Recipe, shape: &ModelShape, device: &Device) -> Result<()> {
    let Device::Cuda(gpu) = device else {
        return Ok(());
    };
    check_gpu_attention(recipe, shape, &gpu.arch())?;
    check_gpu_fp8(recipe, gpu)
}

/// Refuses `training.precision = "fp8"` where the GPU or cuBLASLt cannot run fp8 GEMMs.
fn check_gpu_fp8(recipe: &Recipe, gpu: &DeviceReport) -> Result<()> {
    if recipe.training.precision != TrainingPrecision::Fp8 {
        return Ok(());
    }
    let (name, major, minor) = (&gpu.name, gpu.major, gpu.minor);
    let able = require_fp8((major, minor)).and_then(|()| Cublaslt::require());
    able.map_err(|error| {
        anyhow!(
            "training.precision = \"fp8\" on {name}, compute capability {major}.{minor}: {error}\n  \
             hint: --set training.precision=bf16"
        )
    })
}

/// The hardware of a CPU for the trainer, and its description for the log.
fn on_cpu() -> (Hardware<Autodiff<Flex>>, String) {
    // There is no peak_flops for a CPU: no data sheet has one, and a measured one is too low if the machine was busy.
    let hardware = Hardware {
        device: FlexDevice,
        precision: Precision::F32,
        peak_flops: None,
        memory: MemoryProbe::Process,
        keeping: Keeping::default(),
    };
    let description = format!("the CPU, {} threads", crate::device::num_threads());
    (hardware, description)
}

/// The hardware of a GPU for the trainer, and its description for the log.
fn on_cuda(gpu: &DeviceReport, shape: &ModelShape) -> (Hardware<Autodiff<Cuda>>, String) {
    let peak = sieve_core::model::peak_bf16_flops(&gpu.name);
    let hardware = Hardware {
        device: CudaDevice::new(gpu.index),
        precision: Precision::Bf16,
        peak_flops: peak,
        memory: MemoryProbe::Device(DeviceMemory {
            index: gpu.index,
            now: crate::device::cuda_memory,
            watch: sieve_kernels::MemoryPeak::watch,
            unwatch: sieve_kernels::MemoryPeak::unwatch,
            peak: sieve_kernels::MemoryPeak::seen,
        }),
        keeping: Keeping::default(),
    };
    let peak = peak.map_or("unknown peak".to_owned(), |peak| format!("{:.0} TFLOP/s peak", peak / 1e12));
    let attention = attention_path(shape, &gpu.arch());
    let description = format!("cuda:{} ({}, {peak}), {attention}", gpu.index, gpu.name);
    (hardware, description)
}

/// Clocks, errors and temperature of this process's GPU; `None` on the CPU.
fn state_of(place: &Device) -> Option<GpuState> {
    match place {
        Device::Cpu => None,
        Device::Cuda(gpu) => GpuState::of(gpu.index),
    }
}

/// Words for the path that a model's attention takes on a GPU.
fn attention_path(shape: &ModelShape, arch: &str) -> &'static str {
    match gpu_training_gap(shape, arch) {
        None => "attention by kernels",
        Some(_) => "attention by its plain-Burn reference",
    }
}

/// Trains on a device of backend `B`: opens the output folder, prepares the text, runs the steps, prints the results.
/// Everything that can be refused is checked before anything is written into the output folder.
fn train<B: TrainBackend>(
    (start, out): (&Start, &Path),
    recipe: &Recipe,
    session: &Session<'_>,
    place: &Device,
    hardware: impl FnOnce() -> (Hardware<B>, String),
    group: impl FnOnce(Arc<Mesh>, &B::Device) -> Result<Group<B>>,
) -> Result<Exit> {
    let (mut folder, origin) = ranks::open(session.mesh.as_deref(), out, start, recipe, session.args.branch_options())?;
    let recipe = &origin.own_recipe(recipe)?;
    let mut log = Log::new(session.prints(), !session.args.sweep.is_empty());
    if is_finished(&mut folder, start, &origin, recipe, out, &log)? {
        return Ok(Exit::Done);
    }
    // Memory is checked before text is tokenised, which may take hours.
    let [_, num_ranks] = session.sharers();
    TrainError::check_ranks(recipe, num_ranks)?;
    let keeping = missing::all_at_once(admit(session, recipe, &origin, place, &log), recipe, &origin)?;
    if let Some(dir) = session.args.checkpoint_fallback.as_ref().filter(|_| session.prints()) {
        let what = || format!("creating {} for --checkpoint-fallback", dir.shown());
        std::fs::create_dir_all(dir).with_context(what)?;
    }
    let data =
        ranks::first_then_others(session.mesh.as_deref(), || prepare(recipe, &mut folder, start, &origin, &log))?;
    if let Some(mesh) = &session.mesh {
        ranks::check_shared(mesh, out)?;
    }

    let (mut hardware, mut description) = hardware();
    hardware.keeping = keeping;
    let device = hardware.device.clone();
    let hardware_memory = hardware.memory;
    let resumed = origin.checkpoint.as_ref().map(|c| c.path.clone());
    let log_path = folder.log_path();
    let mut own_group = None;
    if let Some(mesh) = &session.mesh {
        let size = mesh.world().size;
        description = format!("{size} processes, each on {description}");
        let group = group(mesh.clone(), &device)?;
        let health = group.health(&device, hardware.precision, &|| state_of(place))?;
        log.line(&health.line);
        health.warnings.iter().for_each(|warning| log.always(warning));
        own_group = Some(group);
    }
    let mut trainer = Trainer::<B>::new(recipe.clone(), data, folder, origin, hardware, own_group)?;
    if let Some(num_steps) = session.args.stop_after {
        trainer.stop_after(num_steps);
    }
    let fallback_name = ranks::fallback_name(session.mesh.as_deref(), out)?;
    if let Some(dir) = &session.args.checkpoint_fallback {
        trainer.set_fallback(dir.join(fallback_name));
    }
    trainer.set_write_limits(WriteLimits {
        last: Duration::from_secs(session.args.checkpoint_patience),
        ..WriteLimits::default()
    });
    let exporter = Exporter::default();
    let port = session.args.metrics_port.as_ref().filter(|_| session.prints());
    let address = port.map(|port| exporter.listen(port)).transpose()?;
    trainer.write_config()?;
    log.open(&log_path)?;
    log.line(&describe(recipe, &trainer, &description));
    let (line, warning) = room::lines(recipe, &trainer.shape().parameters(), out);
    log.line(&line);
    warning.iter().for_each(|line| log.always(line));
    if let Some(path) = resumed {
        let (step, path) = (trainer.step(), path.shown());
        log.line(&format!("continuing at step {step} from {path}"));
    }
    if let Some(address) = address {
        log.line(&format!("metrics: http://{address}/metrics"));
    }
    let started = Instant::now();
    let first_step = trainer.step();
    let summary = run_steps(&mut trainer, session, recipe, place, &log, &exporter)?;
    for line in cost_lines(summary.peak_memory, hardware_memory) {
        log.line(&line);
    }
    if summary.interrupted {
        tell_references(&log);
        log.always(&stopped_line(recipe, &summary, session.args.checkpoint_fallback.as_deref()));
        let is_as_asked = (session.args.stop_after).is_some_and(|n| summary.step - first_step >= n);
        return Ok(match is_as_asked {
            true => Exit::Done,
            false => Exit::StoppedEarly,
        });
    }
    log.line(&format!(
        "trained {} in {}",
        terminal::counted(summary.step - first_step, "step"),
        terminal::duration(started.elapsed().as_secs_f64())
    ));
    finish(&log, &summary, trainer.shape());
    // Training is complete, so a failed sample, for example of too long a prompt, is no error.
    if session.prints()
        && let Err(error) = samples(&log, recipe, &mut trainer, &device)
    {
        log.line(&format!("no sample: {error}"));
    }
    tell_references(&log);
    next_steps(&log, recipe, &summary, trainer.data(), out);
    Ok(Exit::Done)
}

/// Whether the checkpoint to continue from has all of the run's steps. If so, prints that and how to train further. A
/// new run that begins with such a checkpoint is refused.
fn is_finished(
    folder: &mut RunFolder,
    start: &Start,
    origin: &Origin,
    recipe: &Recipe,
    out: &Path,
    log: &Log,
) -> Result<bool> {
    let Some(checkpoint) = &origin.checkpoint else {
        return Ok(false);
    };
    if origin.step() < recipe.training.steps as u64 {
        return Ok(false);
    }
    if origin.is_branch || matches!(start, Start::ResumeFrom(_)) && !RunFolder::holds_run(out) {
        let (path, step) = (checkpoint.path.shown(), origin.step());
        bail!(
            "{path} is at step {step}, and the recipe ends at step {}: nothing would be trained\n  \
             hint: --set training.steps=N, above {step}",
            recipe.training.steps
        );
    }
    let (saved, _) = checkpoint.recipe_and_shape()?;
    let steps = saved.training.steps;
    if origin.step() < steps as u64 {
        let (path, step, now) = (checkpoint.path.shown(), origin.step(), recipe.training.steps);
        if saved.lr_scheduler.after_step > 0 {
            bail!(
                "{path} is at step {step} of a run that was extended to {steps}, and the recipe has {now} steps\n  \
                 hint: --resume --extend {steps} continues it"
            );
        }
        log.result(&format!(
            "nothing to do: {path} is at step {step} of {steps}, and training.steps is {now} here\n  \
             to continue: leave training.steps out, or set it to {steps}"
        ));
        return Ok(true);
    }
    if matches!(start, Start::Resume | Start::ResumeAlone { .. }) && log.prints() {
        // A kill right after the last checkpoint was written leaves older ones to delete.
        folder.claim(start)?;
        tidy_finished(folder, recipe)?;
    }
    let (path, step, steps) = (checkpoint.path.shown(), origin.step(), recipe.training.steps);
    let has = match step > steps as u64 {
        true => format!("is at step {step}, beyond training.steps = {steps}"),
        false => format!("has all {steps} steps"),
    };
    log.result(&format!(
        "nothing to do: {path} {has}\n  \
         to continue: --resume --extend {}, with a learning-rate schedule of its own for the new steps",
        2 * step
    ));
    Ok(true)
}

/// Checks that the run fits into the device's memory. Returns which optional activations fit too.
fn admit(session: &Session<'_>, recipe: &Recipe, origin: &Origin, place: &Device, log: &Log) -> Result<Keeping> {
    let vocab_size = match &origin.checkpoint {
        Some(checkpoint) => Ok(checkpoint.state.vocab_size),
        None => crate::plan::vocab_size(recipe),
    };
    // A tokenizer that cannot be read is reported with the text. What does not fit with a single token fits with none.
    let least_rows = 1;
    let admitted = vocab_size.as_ref().copied().unwrap_or(least_rows);
    let admitted = (session.args.memory).check_training(recipe, admitted, place, session.sharers())?;
    if vocab_size.is_err() {
        return Ok(Keeping::default());
    }
    admitted.warning.iter().for_each(|warning| log.always(warning));
    out_of_memory::advise(admitted.advice);
    Ok(admitted.keeping)
}

/// Trains, with a progress bar, the served metrics, the profile of `--profile`, and a watch for stalls.
fn run_steps<B: TrainBackend>(
    trainer: &mut Trainer<B>,
    session: &Session<'_>,
    recipe: &Recipe,
    place: &Device,
    log: &Log,
    exporter: &Exporter,
) -> Result<TrainSummary> {
    let mut profile = profile(session, place, recipe, trainer)?;
    let (bar, stalls) = match session.prints() {
        true => (
            terminal::progress_bar(recipe.training.steps as u64, "{bar:30} {pos}/{len} steps  {msg}"),
            Some(session.events.watch(ranks::long_patience(session.args.patience))?),
        ),
        false => (ProgressBar::hidden(), None),
    };
    bar.set_position(trainer.step());
    let result = trainer.run(session.interrupt.keep_state(), &mut |event| {
        show(log, &bar, &event);
        exporter.see(&event);
        stalls.iter().for_each(StallWatch::restart);
        if let (Some(profile), TrainEvent::Step(report)) = (&mut profile, &event)
            && let Some(table) = profile.after(report)
        {
            bar.suspend(|| log.line(&table));
        }
    });
    drop(stalls);
    bar.finish_and_clear();
    result.map_err(anyhow::Error::from).inspect_err(|error| log.keep(&terminal::error_text(error)))
}

/// The profiler of `--profile`; `None` without the flag, on the CPU, and on ranks other than 0.
fn profile<B: TrainBackend>(
    session: &Session<'_>,
    place: &Device,
    recipe: &Recipe,
    trainer: &Trainer<B>,
) -> Result<Option<StepProfile>> {
    let num_steps = session.args.profile.filter(|_| session.prints());
    let (Some(num_steps), Device::Cuda(gpu)) = (num_steps, place) else {
        return Ok(None);
    };
    let training = &recipe.training;
    let steps = trainer.step()..training.steps as u64;
    let size = (session.mesh.as_ref()).map_or(1, |mesh| mesh.world().size);
    let tokens = training.global_batch_size * training.seq_len / size;
    StepProfile::new(num_steps, steps, trainer.shape(), tokens, &gpu.name).map(Some)
}

/// Prepares the shards and the tokenizer, with a progress bar or lines. Locks the output folder (`claim`) once the
/// recipe's text files are found.
fn prepare(recipe: &Recipe, folder: &mut RunFolder, start: &Start, origin: &Origin, log: &Log) -> Result<TrainingData> {
    let (dir, on_change) = match &recipe.data.cache_dir {
        // Other runs may be reading the shards in a shared folder.
        Some(dir) => (PathBuf::from(sieve_core::paths::expand(dir, &variable)?), OnChange::Refuse),
        None => (folder.data_path(), OnChange::Replace),
    };
    let source = match &origin.checkpoint {
        Some(_) if !origin.is_branch => None,
        found => Some(DataSource::with_tokenizer_of(found.as_ref(), recipe, &variable)?),
    };
    folder.claim(start)?;
    for corpus in source.iter().flat_map(DataSource::corpora) {
        if let Some(words) = text_files::json_as_text(corpus) {
            log.always(&format!("warning: {words}"));
        }
        if let Some(words) = text_files::passed_over(corpus) {
            log.line(&format!("data: {words}"));
        }
    }
    let say = |line: &str| log.line(line);
    let has_lines = false;
    let mut watch = Watch::new(["tokenizer: ", "data: "], has_lines, &say);
    let mut observe = |event: DataEvent| watch.see(event);
    let mut data = match (source, &origin.checkpoint) {
        (None, Some(checkpoint)) => TrainingData::resume(recipe, &dir, checkpoint, &variable, &mut observe),
        (Some(source), _) => source.prepare(recipe, &dir, on_change, &mut observe),
        (None, None) => unreachable!("without a checkpoint the files were listed above"),
    }?;
    let resumed = origin.checkpoint.as_ref().filter(|_| !origin.is_branch);
    let place = (dir.as_path(), on_change);
    data.prepare_stages(recipe, place, resumed, &variable, &mut observe)?;
    drop(watch);
    let seconds = (data.tokenizer_time + data.prepare_time).as_secs_f64();
    let Some(prepared) = data.prepared() else {
        log.line("data: a synthetic task, generated as it is read");
        return Ok(data);
    };
    let meta = &prepared.meta;
    let verb = if prepared.reused { "found" } else { "wrote" };
    log.line(&format!(
        "data: {verb} {} in {}, {} in {} ({}, {seconds:.1} s)",
        terminal::counted(meta.train.num_tokens, "training token"),
        terminal::counted(meta.train.num_documents, "document"),
        terminal::counted(meta.validation.num_tokens, "held-out token"),
        terminal::counted(meta.validation.num_documents, "document"),
        dir.shown(),
    ));
    let has_changed = resumed.is_some() && data.text_has_changed(recipe, &variable);
    let lines = account::lines("data: ", &data, has_changed);
    lines.iter().for_each(|line| log.line(line));
    if resumed.is_some() && data.tokenizer_has_changed(recipe, &variable) {
        log.line(
            "data: the file of tokenizer.path has changed or is gone; the run continues with the checkpoint's \
             tokenizer",
        );
    }
    let warning = account::too_little_held_out(meta);
    warning.iter().for_each(|line| log.always(line));
    Ok(data)
}

/// Value of an environment variable; `None` if it is unset or not UTF-8.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Prints and logs an event of the run, and moves the progress bar.
fn show(log: &Log, bar: &ProgressBar, event: &TrainEvent<'_>) {
    bar.suspend(|| match event {
        TrainEvent::Step(report) => log.short(&step_line(report), &whole_step_line(report)),
        TrainEvent::Skipped(report) => log.always(&skipped_line(report)),
        TrainEvent::Validation(report) => log.line(&validation_line(report)),
        TrainEvent::Checkpoint(path) => log.line(&format!("checkpoint: {}", path.shown())),
        TrainEvent::FirstStep => startup::elapsed_once().iter().for_each(|elapsed| log.line(&startup_line(*elapsed))),
        TrainEvent::Notice(text) => log.line(text),
        TrainEvent::Warning(text) => log.always(text),
    });
    if let TrainEvent::Step(report) = event {
        bar.set_position(report.step);
        bar.set_message(format!("{} left", terminal::duration(report.eta_seconds)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_of_attention_is_named() {
        let path = |recipe: &str| {
            let recipe = Recipe::load(recipe, "a recipe", &[]).expect("a shipped recipe");
            attention_path(&recipe.model_shape(50_277).expect("a shape"), "sm_90a")
        };
        let mla = path(include_str!("../../../recipes/mla_80m.toml"));
        let nsa = path(include_str!("../../../recipes/nsa_80m.toml"));
        assert_eq!([mla, nsa], ["attention by kernels"; 2]);
        // Its heads are 32 wide, which NSA's kernels do not take.
        let narrow = path(include_str!("../../../recipes/mqar_nsa.toml"));
        assert!(narrow.contains("reference"), "{narrow}");
    }
}
