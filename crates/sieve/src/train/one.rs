//! One run: its session, its lines, and what it writes when it ends.
use super::arguments::TrainArgs;
use super::ending::{curve, finish, next_steps, tell_references};
use super::exporter::Exporter;
use super::lines::{
    cost_lines, describe, skipped_line, startup_line, step_line, stopped_line, validation_line, whole_step_line,
};
use super::log::Log;
use super::place::{check_gpu, on_cpu, on_cuda, state_of};
use super::profile::StepProfile;
use super::samples::Prompts;
use super::step_bar::StepBar;
use super::{missing, samples};
use crate::data::account;
use crate::data::prepare::Watch;
use crate::recipe::useless::{untrained_model, useless_settings};
use crate::{allocator, startup};
use anyhow::{Context, Result, bail};
use burn::backend::Autodiff;
use burn_cuda::CudaDevice;
use burn_flex::Flex;
use sieve_comm::Mesh;
use sieve_core::{Keeping, Recipe, ShownPath};
use sieve_host::device::Device;
use sieve_host::environment::variable;
use sieve_host::exit::Exit;
use sieve_host::gpus;
use sieve_host::interrupt::Interrupt;
use sieve_host::on_event::{OnEvent, StallWatch};
use sieve_host::ranks::long_patience;
use sieve_host::{hub, out_of_memory, room, terminal, text_files};
use sieve_ops::{Cuda, TrainBackend};
use sieve_train::{
    DataEvent, DataSource, Group, Hardware, Opened, RunRequest, Session, TrainError, TrainEvent, TrainSummary, Trainer,
    TrainingData, WriteLimits, check_branch_options, check_recipe,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What all runs of this process (several with `--sweep`) share.
pub(super) struct Process<'a> {
    pub(super) args: &'a TrainArgs,
    pub(super) found: Device,
    interrupt: Interrupt,
    events: OnEvent,
    /// Connections to the other ranks; `None` if this process trains alone.
    mesh: Option<Arc<Mesh>>,
}

impl<'a> Process<'a> {
    /// Opens the device, for this process alone or for a rank of `mesh`.
    pub(super) fn open(
        args: &'a TrainArgs,
        recipe: &Recipe,
        mesh: Option<Arc<Mesh>>,
        interrupt: Interrupt,
    ) -> Result<Self> {
        Ok(Self {
            args,
            found: match &mesh {
                Some(mesh) => gpus::device(args.device, mesh, recipe)?,
                None => sieve_host::kernels_ahead::device_for(args.device, recipe)?,
            },
            interrupt,
            events: args.events(),
            mesh,
        })
    }

    /// `[processes on this host, all processes]`. Those on one host share its memory.
    pub(super) fn sharers(&self) -> [usize; 2] {
        let world = self.mesh.as_ref().map(|mesh| mesh.world());
        world.map_or([1, 1], |world| [world.local_size, world.size])
    }

    /// Whether this process prints and writes files: it trains alone or is rank 0.
    fn prints(&self) -> bool {
        self.mesh.as_ref().is_none_or(|mesh| mesh.world().rank == 0)
    }
}

/// Trains one run, in this process alone or as a rank of `mesh`.
pub(super) fn run_one(args: &TrainArgs, mesh: Option<Arc<Mesh>>, interrupt: Interrupt) -> Result<Exit> {
    let out = args.out_folder();
    let (mut recipe, text) = args.recipe.load_with_text()?;
    let request = args.request(&out);
    request.extend(&mut recipe)?;
    if let Some(mesh) = &mesh {
        check_recipe(mesh, &recipe)?;
    }
    let process = Process::open(args, &recipe, mesh, interrupt)?;
    text.iter().filter(|_| process.prints()).for_each(|line| terminal::status(line));
    if process.prints() {
        useless_settings(&recipe).iter().for_each(|words| terminal::warning(words));
    }
    if let Some(num_steps) = args.profile {
        // Logging a step reads the loss back and so waits for the GPU. No step between the traced ones may be logged.
        recipe.metrics.log_freq = num_steps as usize;
    }
    if args.overwrite
        && process.prints()
        && let Some(aside) = request.move_aside(&recipe)?
    {
        terminal::status(&format!("the run in {} was moved to {}", out.shown(), aside.shown()));
    }
    check_branch_options([(&request, &recipe)], process.mesh.as_deref())?;
    train_on(&process, &request, &recipe)
}

/// Opens the run that `request` asks for, and trains it on the process's device; on the CPU if `--device auto` found a
/// GPU without kernels for its attention.
pub(super) fn train_on(process: &Process<'_>, request: &RunRequest, recipe: &Recipe) -> Result<Exit> {
    // The choice of the device does not depend on the vocabulary, so its size can be 0 here.
    let shape = recipe.model_shape(0)?;
    let device = process.args.device.for_model(&process.found, &recipe.shapes_of_stages(&shape));
    if device == Device::Cpu && process.args.profile.is_some() {
        bail!("--profile traces a GPU, and this run is on the CPU\n  hint: add --device cuda where there is one");
    }
    check_gpu(recipe, &shape, &device)?;
    let log = Log::new(process.prints(), !process.args.sweep.is_empty());
    let session = match Session::open(request, recipe, process.mesh.clone())? {
        Opened::Run(session) => *session,
        Opened::Finished(why) => {
            log.result(&why);
            return Ok(Exit::Done);
        }
    };
    let run = Run { process, session, place: &device, log };
    match &device {
        Device::Cpu => {
            allocator::keep_freed_memory();
            let group = |mesh, _: &_| Ok(Group::on_host(mesh, recipe.parallelism.shard_ranks));
            run.train::<Autodiff<Flex>>(on_cpu, group)
        }
        Device::Cuda(gpu) => {
            let hardware = || on_cuda(gpu, &shape);
            let parallelism = &recipe.parallelism;
            let group = |mesh, device: &CudaDevice| gpus::connected(mesh, device, parallelism, &process.events);
            run.train::<Autodiff<Cuda>>(hardware, group)
        }
    }
}

/// A run that begins, and where its lines go.
struct Run<'a> {
    process: &'a Process<'a>,
    session: Session,
    place: &'a Device,
    log: Log,
}

impl Run<'_> {
    /// Trains on a device of backend `B`: prepares the text, runs the steps, prints the results. Everything that can be
    /// refused is checked before anything is written into the output folder.
    fn train<B: TrainBackend>(
        self,
        hardware: impl FnOnce() -> (Hardware<B>, String),
        group: impl FnOnce(Arc<Mesh>, &B::Device) -> Result<Group<B>>,
    ) -> Result<Exit> {
        let Self { process, mut session, place, mut log } = self;
        let (args, recipe, out) = (process.args, session.recipe().clone(), session.path().to_owned());
        if process.prints() && session.origin().checkpoint.is_none() {
            untrained_model(&recipe).into_iter().for_each(terminal::warning);
        }
        // Memory is checked before text is tokenised, which may take hours.
        let [_, num_ranks] = process.sharers();
        TrainError::check_ranks(&recipe, num_ranks)?;
        let admitted = admit(process, &session, place, &log);
        let keeping = missing::all_at_once(admitted, &recipe, session.origin())?;
        if let Some(dir) = args.checkpoint_fallback.as_ref().filter(|_| process.prints()) {
            let what = || format!("creating {} for --checkpoint-fallback", dir.shown());
            std::fs::create_dir_all(dir).with_context(what)?;
        }
        let known = args.recipe.known_data(session.path());
        let data = session.first_then_others(|session| prepare(session, known, &log))?;
        session.check_shared()?;

        let (mut hardware, mut description) = hardware();
        hardware.keeping = keeping;
        let device = hardware.device.clone();
        let hardware_memory = hardware.memory;
        let begins_with = session.origin().checkpoint.as_ref().map(|c| c.path.clone());
        let log_path = session.log_path();
        let prompts = Prompts::of(&session);
        let mut own_group = None;
        if let Some(mesh) = &process.mesh {
            description = format!("{} processes, each on {description}", mesh.world().size);
            let group = group(mesh.clone(), &device)?;
            tell_health(&group, &hardware, place, &log)?;
            own_group = Some(group);
        }
        let mut trainer = session.trainer::<B>(data, hardware, own_group)?;
        if let Some(num_steps) = args.stop_after {
            trainer.stop_after(num_steps);
        }
        trainer.set_write_limits(WriteLimits {
            last: Duration::from_secs(args.checkpoint_patience),
            ..WriteLimits::default()
        });
        samples::while_training(&log, &prompts, &recipe, &mut trainer, &device)?;
        let exporter = Exporter::default();
        let port = args.metrics_port.as_ref().filter(|_| process.prints());
        let address = port.map(|port| exporter.listen(port)).transpose()?;
        trainer.write_config()?;
        log.open(&log_path)?;
        tell_start(&log, (&recipe, &out), &trainer, &description, begins_with.as_deref());
        if let Some(address) = address {
            log.line(&format!("metrics: http://{address}/metrics"));
        }
        let began = Began { at: Instant::now(), step: trainer.step() };
        let summary = run_steps(&mut trainer, process, &recipe, place, &log, &exporter)?;
        for line in cost_lines(summary.peak_memory, hardware_memory) {
            log.line(&line);
        }
        let asked = (&recipe, &prompts);
        tell_end(process, &log, asked, &mut trainer, &device, &summary, &began)
    }
}

/// Says what the run is, what room it takes on the disk, and which checkpoint it begins with.
fn tell_start<B: TrainBackend>(
    log: &Log,
    (recipe, out): (&Recipe, &Path),
    trainer: &Trainer<B>,
    description: &str,
    begins_with: Option<&Path>,
) {
    let model = trainer.model_line();
    log.short(&terminal::model_line(model), &format!("model: {model}"));
    log.line(&describe(recipe, description));
    let (line, warning) = room::lines(recipe, &trainer.shape().parameters(), out);
    log.line(&line);
    warning.iter().for_each(|line| log.always(line));
    if let Some(path) = begins_with {
        let (step, path) = (trainer.step(), path.shown());
        log.line(&format!("continuing at step {step} from {path}"));
    }
}

/// When a process began to train, and after which step.
struct Began {
    at: Instant,
    step: u64,
}

/// Says how training ended: where it stopped, or with its curve, a sample and what to do next.
fn tell_end<B: TrainBackend>(
    process: &Process<'_>,
    log: &Log,
    (recipe, prompts): (&Recipe, &Prompts),
    trainer: &mut Trainer<B>,
    device: &B::Device,
    summary: &TrainSummary,
    began: &Began,
) -> Result<Exit> {
    let args = process.args;
    let num_steps = summary.step - began.step;
    if summary.interrupted {
        tell_references(log);
        log.always(&stopped_line(recipe, summary, args.checkpoint_fallback.as_deref()));
        let is_as_asked = args.stop_after.is_some_and(|asked| num_steps >= asked);
        return Ok(if is_as_asked { Exit::Done } else { Exit::StoppedEarly });
    }
    let seconds = began.at.elapsed().as_secs_f64();
    log.line(&format!("trained {} in {}", terminal::counted(num_steps, "step"), terminal::duration(seconds)));
    curve(log, recipe, trainer.folder());
    finish(log, summary, trainer.shape());
    // Training is complete, so a failed sample, for example of too long a prompt, is no error.
    if process.prints()
        && let Err(error) = samples::at_the_end(log, prompts, recipe, trainer, device)
    {
        log.line(&format!("no sample: {error}"));
    }
    tell_references(log);
    next_steps(log, recipe, summary, trainer.data(), trainer.folder());
    Ok(Exit::Done)
}

/// Compares the devices of all ranks, and says how fast they compute and what is wrong with some.
fn tell_health<B: TrainBackend>(group: &Group<B>, hardware: &Hardware<B>, place: &Device, log: &Log) -> Result<()> {
    let health = group.health(&hardware.device, hardware.precision, &|| state_of(place))?;
    log.line(&health.line);
    health.warnings.iter().for_each(|warning| log.always(warning));
    Ok(())
}

/// Checks that the run fits into the device's memory. Returns which optional activations fit too.
fn admit(process: &Process<'_>, session: &Session, place: &Device, log: &Log) -> Result<Keeping> {
    let recipe = session.recipe();
    let vocab_size = match &session.origin().checkpoint {
        Some(checkpoint) => Ok(checkpoint.state.vocab_size),
        None => crate::recipe::vocab_size(recipe),
    };
    // A tokenizer that cannot be read is reported with the text. Until then the embedding counts with a single row: a
    // run that does not fit so does not fit with any vocabulary.
    let least_rows = 1;
    let admitted = vocab_size.as_ref().copied().unwrap_or(least_rows);
    let admitted = (process.args.memory).check_training(recipe, admitted, place, process.sharers())?;
    if vocab_size.is_err() {
        return Ok(Keeping::default());
    }
    admitted.warnings.iter().for_each(|warning| log.always(warning));
    out_of_memory::advise(admitted.advice);
    Ok(admitted.keeping)
}

/// Trains, with a progress bar, the served metrics, the profile of `--profile`, and a watch for stalls.
fn run_steps<B: TrainBackend>(
    trainer: &mut Trainer<B>,
    process: &Process<'_>,
    recipe: &Recipe,
    place: &Device,
    log: &Log,
    exporter: &Exporter,
) -> Result<TrainSummary> {
    let mut profile = profile(process, place, recipe, trainer)?;
    let (bar, stalls) = if process.prints() {
        (
            StepBar::new(recipe.training.steps as u64, trainer.step()),
            Some(process.events.watch(long_patience(process.args.patience))?),
        )
    } else {
        (StepBar::hidden(), None)
    };
    let result = trainer.run(process.interrupt.keep_state(), &mut |event| {
        bar.see(&event);
        if matches!(event, TrainEvent::Computed(_)) {
            return;
        }
        show(log, &event);
        exporter.see(&event);
        stalls.iter().for_each(StallWatch::restart);
        if let (Some(profile), TrainEvent::Step(report)) = (&mut profile, &event)
            && let Some(table) = profile.after(report)
        {
            log.line(&table);
        }
    });
    drop(stalls);
    bar.clear();
    result.map_err(anyhow::Error::from).inspect_err(|error| log.keep(&terminal::error_text(error)))
}

/// The profiler of `--profile`; `None` without the flag, on the CPU, and on ranks other than 0.
fn profile<B: TrainBackend>(
    process: &Process<'_>,
    place: &Device,
    recipe: &Recipe,
    trainer: &Trainer<B>,
) -> Result<Option<StepProfile>> {
    let num_steps = process.args.profile.filter(|_| process.prints());
    let (Some(num_steps), Device::Cuda(gpu)) = (num_steps, place) else {
        return Ok(None);
    };
    let last = process.args.stop_after.map_or(u64::MAX, |steps| trainer.step().saturating_add(steps));
    let steps = trainer.step()..last.min(recipe.training.steps as u64);
    let size = (process.mesh.as_ref()).map_or(1, |mesh| mesh.world().size);
    let sizes = [size, recipe.parallelism.num_shards(size)];
    StepProfile::new(num_steps, steps, trainer.shape(), sizes, &gpu.name).map(Some)
}

/// Prepares the shards and the tokenizer, with a progress bar or lines, or takes them from one of the folders `known`.
/// Locks the output folder once the recipe's text files are found.
fn prepare(session: &mut Session, known: Vec<PathBuf>, log: &Log) -> Result<TrainingData> {
    let around = hub::surroundings();
    let source = session.find_text(&around)?.map(|source| source.looking_in(known));
    for corpus in source.iter().flat_map(DataSource::corpora) {
        if let Some(words) = text_files::table_as_text(corpus) {
            log.always(&format!("warning: {words}"));
        }
        if let Some(words) = text_files::passed_over(corpus) {
            log.line(&format!("data: {words}"));
        }
    }
    let say = |line: &str| log.line(line);
    let has_lines = false;
    let mut watch = Watch::new(["tokenizer: ", "data: "], has_lines, &say);
    let data = session.prepare(source, &around, &mut |event: DataEvent| watch.see(event))?;
    drop(watch);
    let seconds = (data.tokenizer_time + data.prepare_time).as_secs_f64();
    let Some(prepared) = data.prepared() else {
        log.line("data: a synthetic task, generated as it is read");
        return Ok(data);
    };
    let meta = &prepared.meta;
    let (verb, from) = account::taken(prepared);
    log.line(&format!(
        "data: {verb} {} in {}, {} in {}{from} ({}, {seconds:.1} s)",
        terminal::counted(meta.train.num_tokens, "training token"),
        terminal::counted(meta.train.num_documents, "document"),
        terminal::counted(meta.validation.num_tokens, "held-out token"),
        terminal::counted(meta.validation.num_documents, "document"),
        session.data_path(&variable)?.shown(),
    ));
    let (recipe, resumed) = (session.recipe(), session.resumed());
    let has_changed = resumed.is_some() && data.text_has_changed(recipe, &around);
    let lines = account::lines("data: ", &data, has_changed);
    lines.iter().for_each(|line| log.line(line));
    if resumed.is_some() && data.tokenizer_has_changed(recipe, &around) {
        log.line(
            "data: the file of tokenizer.path has changed or is gone; the run continues with the checkpoint's \
             tokenizer",
        );
    }
    let warning = account::too_little_held_out(meta);
    warning.iter().for_each(|line| log.always(line));
    Ok(data)
}

/// Prints and logs an event of the run.
fn show(log: &Log, event: &TrainEvent<'_>) {
    match event {
        TrainEvent::Step(report) => log.short(&step_line(report), &whole_step_line(report)),
        TrainEvent::Skipped(report) => log.always(&skipped_line(report)),
        TrainEvent::Validation(report) => log.line(&validation_line(report)),
        TrainEvent::Checkpoint(path) => log.line(&format!("checkpoint: {}", path.shown())),
        TrainEvent::Sample(step, text) => log.line(&samples::line(&format!("sample at step {step}"), text)),
        TrainEvent::FirstStep => startup::elapsed_once().iter().for_each(|elapsed| log.line(&startup_line(*elapsed))),
        TrainEvent::Notice(text) => log.line(text),
        TrainEvent::Warning(text) => log.always(text),
        // The bar shows it.
        TrainEvent::Computed(_) => {}
    }
}
