//! `sieve train` as one of several ranks: how they agree on the recipe, folder, checkpoint and device, how NCCL
//! connects their GPUs, and which rank prints an error.
use super::on_event::{Event, OnEvent};
use super::stopped::{is_of_a_disk, is_unsaved, stopped_by};
use super::{LAUNCHED, TrainArgs, run_one, variable};
use crate::device::{Device, DeviceChoice};
use crate::exit::Exit;
use crate::interrupt::Interrupt;
use crate::terminal;
use anyhow::{Context, Result, anyhow, bail, ensure};
use burn::backend::Autodiff;
use burn::tensor::Tensor;
use burn_cuda::CudaDevice;
use sieve_comm::{CollectiveCounts, CommError, Failure, Loss, Mesh, Pieces, Timeouts, World};
use sieve_core::{Recipe, ShownPath};
use sieve_hf::Checkpoint;
use sieve_kernels::{CudaPrimitive, KernelError, NcclGroup, NcclPiece, NcclWatch, NcclWork, ToBurn, kernel_tensor};
use sieve_ops::Cuda;
use sieve_train::{
    BranchOptions, Collectives, Exchanged, Gathered, Group, Origin, Pending, RunFolder, Start, TrainError,
};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant, SystemTime};

/// Environment variable with which NCCL runs on Burn's stream and overlaps nothing, for measurements and debugging.
const INLINE: &str = "SIEVE_NCCL_INLINE";

/// All ranks must see a file of rank 0 within this many seconds.
const SHARED_SECONDS: u64 = 10;

/// What follows the line about a lost rank of a training run.
const RESUME: &str = "\n  hint: the same command with --resume=auto continues from the last checkpoint";

/// NCCL must connect all GPUs within this time, the same as in PyTorch.
const NCCL_START: Duration = Duration::from_secs(300);
/// After this time a line says that the ranks still wait for NCCL.
const CONNECTING: Duration = Duration::from_secs(20);

/// Work other than a step (such as preparing text) counts as hung after this time without progress.
pub(super) fn long_patience(seconds: u64) -> Duration {
    Duration::from_secs(20 * seconds)
}

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

/// Joins the ranks of `world` and does `work`. Rank 0 prints errors and runs the command of `events`; the hint follows
/// the line about a lost rank.
pub(crate) fn joined(
    world: World,
    patience: u64,
    (events, hint): (&OnEvent, &'static str),
    work: impl FnOnce(Arc<Mesh>) -> Result<Exit>,
) -> Result<Exit> {
    let rank = world.rank;
    let late = events.clone();
    let give_up = move |failure: &Failure| {
        tell(rank, failure, (&late, hint));
        end_now(other_lost());
    };
    let timeouts = Timeouts {
        silence: Duration::from_secs(patience),
        still: Duration::from_secs(10 * patience / 3),
        long: long_patience(patience),
        ..Timeouts::default()
    };
    let mesh = match Mesh::join(world, env!("CARGO_PKG_VERSION"), timeouts, give_up) {
        Ok(mesh) => Arc::new(mesh),
        Err(error) if rank == 0 => return events.ended(Err(error.into())),
        Err(error) => return Err(error.into()),
    };
    match stopped_by(is_unsaved, work(mesh.clone()), rank == 0) {
        Ok(exit) => {
            mesh.leave();
            match rank {
                0 => events.ended(Ok(exit)),
                _ => Ok(exit),
            }
        }
        Err(error) => {
            let lost = match (error.downcast_ref(), error.downcast_ref(), mesh.check()) {
                (Some(CommError::Lost(failure)), ..) => Some(failure.clone()),
                (_, Some(TrainError::Comm(CommError::Lost(failure))), _) => Some(failure.clone()),
                // After another rank was lost, errors of this one (such as an aborted communicator) are consequences.
                // But if the other rank ended with an error, both may have the same error, and it is reported.
                (.., Err(CommError::Lost(failure))) if !matches!(failure.loss, Loss::Error(_)) => Some(failure),
                _ => None,
            };
            if let Some(failure) = lost {
                tell(rank, &failure, (events, hint));
                return Ok(other_lost());
            }
            let text = terminal::error_text(&error);
            mesh.fail(text.trim_start_matches("error: "));
            match stopped_by(is_of_a_disk, Err(error), rank == 0) {
                result if rank == 0 => events.ended(result),
                // Rank 0 prints this rank's error.
                result => Ok(result.unwrap_or(Exit::Failed)),
            }
        }
    }
}

/// Exit code of a rank that has lost another one. Under `sieve launch` it is a code of its own, so that the launcher
/// can distinguish a lost rank from a signal to stop.
fn other_lost() -> Exit {
    variable(LAUNCHED).map_or(Exit::StoppedEarly, |_| Exit::OtherLost)
}

/// Ends this process without cleaning up: its GPU may wait for a lost rank, and a normal exit would wait for the GPU.
fn end_now(exit: Exit) -> ! {
    #[cfg(unix)]
    {
        unsafe extern "C" {
            // SAFETY: `_exit` is in every C library, takes any code and does not return.
            safe fn _exit(code: std::ffi::c_int) -> !;
        }
        _exit(exit.code())
    }
    #[cfg(not(unix))]
    {
        let _ = exit;
        std::process::abort()
    }
}

/// Prints why all ranks stop and runs the command of `--on-event`. Only rank 0 does so, or rank 1 if rank 0 failed, and
/// only once.
fn tell(rank: usize, failure: &Failure, (events, hint): (&OnEvent, &str)) {
    static WAS_CALLED: AtomicBool = AtomicBool::new(false);
    if WAS_CALLED.swap(true, Ordering::Relaxed) {
        return;
    }
    let is_printed = match failure.loss {
        // Rank 0 has printed its own error.
        Loss::Error(_) => failure.rank == 0,
        // `sieve launch` prints how its process ended.
        Loss::Ended => variable(LAUNCHED).is_some(),
        Loss::Silent(_) | Loss::Still(_) | Loss::AllStill { .. } => false,
    };
    let printing_rank = usize::from(failure.rank == 0);
    if rank != printing_rank {
        return;
    }
    let (event, hint) = match failure.loss {
        Loss::Error(_) => (Event::Failed, ""),
        _ => (Event::Lost, hint),
    };
    let text = format!("error: {failure}");
    if !is_printed {
        terminal::fault(&format!("{text}{hint}"));
    }
    // Rank 0 has already run the command for its own error.
    if !(event == Event::Failed && failure.rank == 0) {
        events.tell(event, &text);
    }
}

/// The device of a rank: the GPU of its `LOCAL_RANK`. The first rank of each host compiles the recipe's kernels into
/// the cache before the others open it, so that each kernel is compiled once.
pub(super) fn device(choice: DeviceChoice, mesh: &Mesh, recipe: &Recipe) -> Result<Device> {
    let world = mesh.world();
    let choice = own_choice(choice, world)?;
    if world.local_rank > 0 {
        mesh.barrier()?;
        return choice.resolve().map_err(|error| without_gpu(error, world));
    }
    let found = crate::kernels::device_for(choice, recipe)?;
    mesh.barrier()?;
    Ok(found)
}

/// Rewords the error of a rank whose host has fewer GPUs than processes.
fn without_gpu(error: anyhow::Error, world: &World) -> anyhow::Error {
    match error.downcast_ref() {
        Some(KernelError::WrongDevice { wanted, count }) if *count < world.local_size => anyhow!(
            "LOCAL_RANK {wanted} has no GPU: its host has {count}, and {} processes\n  \
             hint: start {count} processes on it, or look at CUDA_VISIBLE_DEVICES",
            world.local_size
        ),
        _ => error,
    }
}

/// The device of this rank: with a GPU, the one of its `LOCAL_RANK`.
pub(crate) fn own_choice(choice: DeviceChoice, world: &World) -> Result<DeviceChoice> {
    // Slurm can make only its own GPU visible to each process; that GPU has index 0.
    let shows_one = variable("CUDA_VISIBLE_DEVICES").is_some_and(|list| !list.contains(','));
    let own = if shows_one { 0 } else { world.local_rank };
    match choice {
        DeviceChoice::Auto if sieve_kernels::CudaReport::probe().is_ok() => Ok(DeviceChoice::Cuda(own)),
        DeviceChoice::Cuda(0) => Ok(DeviceChoice::Cuda(own)),
        DeviceChoice::Cuda(index) if world.local_size > 1 => bail!(
            "--device cuda:{index} would put {} processes of this host on one GPU\n  hint: write --device cuda; each \
             takes the GPU of its LOCAL_RANK",
            world.local_size
        ),
        choice => Ok(choice),
    }
}

/// Fails if the ranks were given different recipes.
pub(super) fn check_recipe(mesh: &Mesh, recipe: &Recipe) -> Result<()> {
    let all = mesh.gather(recipe.to_toml()?.as_bytes())?;
    let first = Recipe::load(&String::from_utf8_lossy(&all[0]), "the recipe of rank 0", &[])?;
    for (rank, text) in all.iter().enumerate().skip(1) {
        let name = format!("the recipe of rank {rank}");
        let other = Recipe::load(&String::from_utf8_lossy(text), &name, &[])?;
        if let Some(change) = first.diff(&other)?.first() {
            bail!(
                "rank {rank} was given another recipe than rank 0: {change}\n  \
                 hint: start all ranks with the same command"
            );
        }
    }
    Ok(())
}

/// Whether the output folder holds a run to resume; rank 0's answer counts.
pub(super) fn resumes(mesh: &Mesh, holds_run: bool) -> Result<bool> {
    Ok(mesh.broadcast(&[u8::from(holds_run)])? == [1])
}

/// Opens the output folder and the checkpoint to start from. Of several ranks, rank 0 finds the checkpoint and sends
/// its path to the others.
pub(super) fn open(
    mesh: Option<&Mesh>,
    out: &Path,
    start: &Start,
    recipe: &Recipe,
    options: BranchOptions,
) -> Result<(RunFolder, Origin)> {
    let name = &recipe.checkpoint.folder;
    let Some(mesh) = mesh else {
        return open_first(out, start, recipe, options);
    };
    if mesh.world().rank == 0 {
        let (folder, origin) = open_first(out, start, recipe, options)?;
        let path = origin.checkpoint.as_ref().map(|found| &found.path);
        let path = path.map(|path| path.canonicalize()).transpose()?;
        let path = path.unwrap_or_default();
        // "1" for a branch, "2" for one without moments, else "0", then the checkpoint's path; no path: the run starts
        // from its seed.
        let how = u8::from(origin.is_branch) + u8::from(origin.fresh_optimizer);
        mesh.broadcast(format!("{how}{}", path.shown()).as_bytes())?;
        return Ok((folder, origin));
    }
    let folder = RunFolder::of_group(out, name);
    let found = String::from_utf8(mesh.broadcast(&[])?)?;
    let origin = match found.split_at(1) {
        (_, "") => Origin::seed(),
        ("0", path) => Origin::find(&folder, &Start::ResumeFrom(path.into()), recipe, options)?,
        (how, path) => {
            // Rank 0 has checked what may be dropped.
            let options = BranchOptions { drops: true, fresh_optimizer: how == "2" };
            Origin::find(&folder, &Start::BranchFrom(path.into()), recipe, options)?
        }
    };
    Ok((folder, origin))
}

/// Like [`open`], in rank 0 or the only process.
fn open_first(out: &Path, start: &Start, recipe: &Recipe, options: BranchOptions) -> Result<(RunFolder, Origin)> {
    if let Start::ResumeFrom(path) | Start::BranchFrom(path) = start {
        // A path without a checkpoint is reported first: the hint about a folder that holds a run, --resume, would
        // continue from another checkpoint.
        Checkpoint::peek(path)?;
    }
    let mut folder = RunFolder::open(out, &recipe.checkpoint.folder, start)?;
    // Looking for the latest checkpoint may rename damaged ones, so it locks the folder first.
    if matches!(start, Start::ResumeAlone { .. }) {
        folder.claim(start)?;
    }
    let origin = Origin::find(&folder, start, recipe, options)?;
    Ok((folder, origin))
}

/// The subfolder of `--checkpoint-fallback` for the run in `out`. It is made from the folder's path, which may differ
/// between hosts, so all ranks use rank 0's.
pub(super) fn fallback_name(mesh: Option<&Mesh>, out: &Path) -> Result<String> {
    let own = RunFolder::fallback_name(out);
    match mesh {
        Some(mesh) => Ok(String::from_utf8(mesh.broadcast(own.as_bytes())?)?),
        None => Ok(own),
    }
}

/// Fails if a rank does not see rank 0's output folder. All ranks write parts of each checkpoint into it.
pub(super) fn check_shared(mesh: &Mesh, out: &Path) -> Result<()> {
    let sign = out.join("shared.tmp");
    let rank = mesh.world().rank;
    let own = format!("{} {:?}", std::process::id(), SystemTime::now());
    if rank == 0 {
        std::fs::write(&sign, &own).with_context(|| format!("writing {}", sign.shown()))?;
    }
    let wanted = mesh.broadcast(own.as_bytes())?;
    // A network file system may show a new file late.
    let deadline = Instant::now() + Duration::from_secs(SHARED_SECONDS);
    let sees = || std::fs::read(&sign).is_ok_and(|found| found == wanted);
    while !sees() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(100));
    }
    let place = out.canonicalize().unwrap_or_else(|_| out.to_owned());
    // `1` or `0` for whether this rank sees the file, then the folder where it looks.
    let answer = format!("{}{}", u8::from(sees()), place.shown());
    let answers = mesh.gather(answer.as_bytes())?;
    if rank == 0 {
        let _ = std::fs::remove_file(&sign);
    }
    let answers = answers.iter().map(|answer| String::from_utf8_lossy(answer));
    let answers = answers.collect::<Vec<_>>();
    match answers.iter().position(|answer| !answer.starts_with('1')) {
        None => Ok(()),
        Some(blind) => bail!(
            "rank {blind} does not see the files of rank 0's run: rank 0 writes to {}, rank {blind} looks in {}\n  \
             hint: give --out a folder that all hosts of the job share, by the same path",
            &answers[0][1..],
            answers[blind].get(1..).unwrap_or_default()
        ),
    }
}

/// Does `work` in rank 0, then in all others, which find its files.
pub(super) fn first_then_others<T>(mesh: Option<&Mesh>, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let Some(mesh) = mesh else {
        return work();
    };
    if mesh.world().rank > 0 {
        mesh.barrier()?;
        return work();
    }
    let made = work()?;
    mesh.barrier()?;
    Ok(made)
}

/// Ranks whose GPUs work together by NCCL, `degree` of them on each row.
pub(crate) fn on_cuda(
    mesh: Arc<Mesh>,
    device: &CudaDevice,
    degree: usize,
    events: &OnEvent,
) -> Result<Group<Autodiff<Cuda>>> {
    // The first tensor makes the context that NCCL works in.
    let one = Tensor::<Cuda, 1>::ones([1], device);
    all_have_nccl(&mesh, NcclGroup::require())?;
    let (rank, size) = (mesh.world().rank, mesh.world().size);
    let (late, late_events) = (mesh.clone(), events.clone());
    let _limit = limit_time(CONNECTING, NCCL_START, move |is_over| match is_over {
        false if rank == 0 => terminal::note(&format!("NCCL connects the GPUs of {size} ranks; still waiting")),
        false => {}
        true => {
            let text = format!(
                "NCCL has not connected the GPUs of {size} ranks within {} s\n  \
                 hint: NCCL_SOCKET_IFNAME=NAME says which network interface the hosts share (ip addr lists them), and \
                 a firewall must let all ports between them through; NCCL_DEBUG=INFO says what NCCL tries",
                NCCL_START.as_secs()
            );
            if rank == 0 {
                terminal::note(&format!("error: {text}"));
            }
            late.fail(&text);
            if rank == 0 {
                late_events.tell(Event::Failed, &text);
            }
            end_now(Exit::Failed);
        }
    })?;
    let overlaps = variable(INLINE).is_none();
    let nccl = Nccl(join(&mesh, device, size, overlaps)?);
    // Tests the group. Without pieces, every rank gets the whole sum.
    let sums = nccl.sum(vec![(one.into_primitive().tensor(), None)])?()?;
    let sums = sums.into_iter().map(|sum| {
        let sum = Tensor::<Cuda, 1>::from_primitive(burn::tensor::TensorPrimitive::Float(sum));
        sum.into_data().iter::<f32>().sum::<f32>()
    });
    let found = sums.sum::<f32>();
    ensure!(
        found == size as f32,
        "the sum of a one of each of {size} ranks is {found} on this GPU\n  \
         hint: NCCL_DEBUG=INFO says how NCCL connects them"
    );
    let links = match degree > 1 && size.is_multiple_of(degree) {
        true => {
            // Attention needs the other ranks' keys at once: nothing could overlap with it.
            let overlaps = false;
            Some(join(&mesh, device, degree, overlaps)?)
        }
        false => None,
    };
    let watches = std::iter::once(nccl.0.watch()).chain(links.iter().map(NcclGroup::watch));
    watch_nccl(&mesh, watches.collect(), events.clone())?;
    let group = Group::new(mesh, Box::new(nccl));
    Ok(match links {
        Some(links) => group.with_rank_group(Arc::new(links)),
        None => group,
    })
}

/// Starts a thread that checks NCCL every second. An error of NCCL ends all ranks. The first group's count of
/// collectives is reported to the other ranks. If a rank is lost, NCCL's work is aborted, since this host may be
/// waiting for its GPU, which waits for the lost rank.
fn watch_nccl(mesh: &Arc<Mesh>, mut watches: Vec<NcclWatch>, events: OnEvent) -> Result<()> {
    let mesh = Arc::downgrade(mesh);
    let look = move || {
        while let Some(mesh) = mesh.upgrade() {
            if mesh.check().is_err() {
                return watches.drain(..).for_each(NcclWatch::abort);
            }
            let looked = watches.iter_mut().map(NcclWatch::look).collect::<Result<Vec<_>, _>>();
            match looked {
                Ok(counts) => {
                    let [num_ended, num_reached] = counts.first().copied().unwrap_or_default();
                    mesh.set_collective_counts(CollectiveCounts { num_ended, num_reached });
                }
                // Ranks that have finished close their connections.
                Err(_) if !mesh.is_at_work() => return,
                Err(error) => {
                    let text = error.to_string();
                    // Other ranks send the error to rank 0, which prints it.
                    if mesh.world().rank == 0 && mesh.check().is_ok() {
                        terminal::note(&format!("error: {text}"));
                        events.tell(Event::Failed, &text);
                    }
                    mesh.fail(&text);
                    end_now(other_lost());
                }
            }
            drop(mesh);
            std::thread::sleep(Duration::from_secs(1));
        }
    };
    let thread = std::thread::Builder::new().name("sieve-nccl".to_owned());
    thread.spawn(look).map(drop).context("starting a thread")
}

/// A time limit on work that cannot be interrupted: calls `report(false)` if the work still lasts after `soon`, and
/// `report(true)` after `limit`. Drop the returned sender when the work is done; the watching thread then ends.
fn limit_time(soon: Duration, limit: Duration, report: impl Fn(bool) + Send + 'static) -> Result<Sender<()>> {
    let (work, ended) = channel::<()>();
    let lasts = move |time| ended.recv_timeout(time) == Err(RecvTimeoutError::Timeout);
    let watch = move || {
        if lasts(soon) {
            report(false);
            if lasts(limit.saturating_sub(soon)) {
                report(true);
            }
        }
    };
    let thread = std::thread::Builder::new().name("sieve-limit".to_owned());
    thread.spawn(watch).context("starting a thread")?;
    Ok(work)
}

/// Waits until all ranks have loaded NCCL. If one has not, all fail here instead of waiting for it inside NCCL.
fn all_have_nccl(mesh: &Mesh, own: Result<(), KernelError>) -> Result<()> {
    own?;
    Ok(mesh.barrier()?)
}

/// Joins this rank's NCCL group. Each `size` consecutive ranks form a group.
fn join(mesh: &Mesh, device: &CudaDevice, size: usize, overlaps: bool) -> Result<NcclGroup> {
    let rank = mesh.world().rank;
    let own = match rank % size {
        0 => NcclGroup::new_id()?.to_vec(),
        _ => Vec::new(),
    };
    let ids = mesh.gather(&own)?;
    let (first, place) = (rank - rank % size, [rank % size, size]);
    Ok(NcclGroup::join(device.index, &ids[first], place, overlaps)?)
}

/// The NCCL group of all ranks' GPUs.
struct Nccl(NcclGroup);

impl Nccl {
    fn ranges(&self, pieces: Pieces) -> Vec<Range<usize>> {
        let [_, size] = self.0.place();
        (0..size).map(|rank| pieces.of(rank)).collect()
    }
}

impl Collectives<Autodiff<Cuda>> for Nccl {
    fn sum(&self, tensors: Vec<(CudaPrimitive, Option<Pieces>)>) -> Result<Pending<Autodiff<Cuda>>, TrainError> {
        let tensors = tensors.into_iter().map(|(tensor, pieces)| {
            let ranges = pieces.map(|pieces| self.ranges(pieces));
            (kernel_tensor(tensor), ranges)
        });
        pending(self.0.sum(tensors.collect()))
    }

    fn gather(&self, tensors: Vec<Gathered<Autodiff<Cuda>>>) -> Result<Pending<Autodiff<Cuda>>, TrainError> {
        let tensors = tensors.into_iter().map(|gathered| NcclPiece {
            piece: kernel_tensor(gathered.piece),
            whole: kernel_tensor(gathered.whole),
            ranges: self.ranges(gathered.pieces),
        });
        pending(self.0.gather(tensors.collect()))
    }

    fn exchange(&self, exchanged: Exchanged<Autodiff<Cuda>>) -> Result<Pending<Autodiff<Cuda>>, TrainError> {
        let Exchanged { given, wanted, like } = exchanged;
        let given = given.into_iter().map(|(rank, tensor)| (rank, kernel_tensor(tensor)));
        let wanted = wanted.into_iter().map(|(rank, count)| (rank, vec![count])).collect::<Vec<_>>();
        pending(self.0.start_exchange(given.collect(), &wanted, &kernel_tensor(like)))
    }
}

fn pending(work: Result<NcclWork, KernelError>) -> Result<Pending<Autodiff<Cuda>>, TrainError> {
    let work = work.map_err(|error| TrainError::Collective(error.to_string()))?;
    Ok(Box::new(move || {
        let results = work.finish().into_iter();
        Ok(results.map(ToBurn::burn).collect())
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_processes_than_gpus_are_told_in_both_numbers() {
        let world = World { rank: 12, size: 16, ..World::on_this_host(4, 8, 1) };
        let error = |count| without_gpu(KernelError::WrongDevice { wanted: 4, count }.into(), &world);
        let text = error(4).to_string();
        for part in ["LOCAL_RANK 4", "has 4, and 8 processes", "start 4 processes"] {
            assert!(text.contains(part), "{text}");
        }
        // With as many GPUs as processes the error is not reworded.
        assert!(error(8).to_string().contains("there is no device 4"));
    }

    #[test]
    fn work_that_lasts_is_spoken_of_and_has_an_end() {
        let millis = Duration::from_millis;
        let spoken = |work: Duration, limit: Duration| {
            let (sender, receiver) = channel();
            let speak = move |is_over| sender.send(is_over).expect("somebody listens");
            let limit = limit_time(millis(50), limit, speak).expect("a thread");
            std::thread::sleep(work);
            drop(limit);
            receiver.into_iter().collect::<Vec<_>>()
        };
        assert_eq!(spoken(millis(0), millis(60_000)), [false; 0]);
        assert_eq!(spoken(millis(1000), millis(60_000)), [false]);
        assert_eq!(spoken(millis(2000), millis(100)), [false, true]);
    }

    #[test]
    fn a_rank_without_nccl_is_named_to_the_others_and_nobody_waits_for_it() {
        let port = sieve_comm::ReservedPort::take().expect("a port");
        let join = |rank| {
            let world = World::on_this_host(rank, 2, port.number());
            Mesh::join(world, "1", Timeouts::default(), |_| {}).expect("two ranks")
        };
        let first = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mesh = join(1);
                let refused = KernelError::no_nccl("libnccl.so.2: cannot open shared object file");
                let error = all_have_nccl(&mesh, Err(refused));
                // `run` sends an error to the other ranks in the same way.
                mesh.fail(&terminal::error_text(&error.expect_err("it has none")));
            });
            let mesh = join(0);
            let error = all_have_nccl(&mesh, Ok(())).expect_err("rank 1 has none");
            mesh.leave();
            error.to_string()
        });
        for part in ["rank 1 (", "libnccl.so.2: cannot open", "pip install", "LD_LIBRARY_PATH"] {
            assert!(first.contains(part), "{first}");
        }
    }
}
