//! The GPUs of several ranks: which one each rank takes, and how NCCL connects them.
use crate::device::{Device, DeviceChoice};
use crate::environment::{LAUNCHED, NCCL_INLINE, switch, variable};
use crate::exit::Exit;
use crate::on_event::{Event, OnEvent};
use crate::terminal;
use anyhow::{Context, Result, anyhow, bail, ensure};
use burn::backend::Autodiff;
use burn::tensor::Tensor;
use burn_cuda::CudaDevice;
use sieve_comm::{CollectiveCounts, Mesh, Pieces, ShardGroup, World};
use sieve_core::Recipe;
use sieve_core::recipe::ParallelismSection;
use sieve_kernels::{
    CudaPrimitive, KernelError, NcclGroup, NcclPiece, NcclReplicas, NcclStream, NcclWatch, NcclWork, ToBurn,
    kernel_tensor,
};
use sieve_ops::Cuda;
use sieve_train::{Collectives, Exchanged, Gathered, Group, Pending, TrainError};
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// NCCL must connect all GPUs within this time, the same as in PyTorch.
const NCCL_START: Duration = Duration::from_secs(300);
/// After this time a line says that the ranks still wait for NCCL.
const CONNECTING: Duration = Duration::from_secs(20);

/// The device of a rank: the GPU of its `LOCAL_RANK`. The first rank of each host compiles the recipe's kernels into
/// the cache before the others open it, so that each kernel is compiled once.
pub fn device(choice: DeviceChoice, mesh: &Mesh, recipe: &Recipe) -> Result<Device> {
    let world = mesh.world();
    let choice = own_choice(choice, world)?;
    if world.local_rank > 0 {
        mesh.barrier()?;
        return choice.resolve().map_err(|error| without_gpu(error, world));
    }
    let found = crate::kernels_ahead::device_for(choice, recipe)?;
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
pub fn own_choice(choice: DeviceChoice, world: &World) -> Result<DeviceChoice> {
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

/// The ranks as a group whose GPUs are connected by NCCL: all of them; those among which `parallelism` divides weights;
/// and those among which it divides a row's tokens.
pub fn connected(
    mesh: Arc<Mesh>,
    device: &CudaDevice,
    parallelism: &ParallelismSection,
    events: &OnEvent,
) -> Result<Group<Autodiff<Cuda>>> {
    // The first tensor makes the context that NCCL works in.
    let one = Tensor::<Cuda, 1>::ones([1], device);
    all_have_nccl(&mesh, NcclGroup::require())?;
    let (rank, size) = (mesh.world().rank, mesh.world().size);
    let _limit = limit_connecting(&mesh, events)?;
    let on = if switch(NCCL_INLINE)? == Some(true) { NcclStream::Burns } else { NcclStream::Own };
    let nccl = Nccl::join(&mesh, device, parallelism.shard_ranks, on)?;
    check_sum(&nccl, one, size)?;
    let degree = parallelism.context_parallel_degree;
    let links = if degree > 1 && size.is_multiple_of(degree) {
        // On Burn's stream: attention needs the other ranks' keys at once, and nothing could overlap with it.
        Some(join(&mesh, device, ShardGroup::new(rank, size, degree).ranks(), NcclStream::Burns)?)
    } else {
        None
    };
    let watches = nccl.groups().chain(&links).map(NcclGroup::watch);
    watch_nccl(&mesh, watches.collect(), events.clone())?;
    let group = Group::new(mesh, Box::new(nccl));
    Ok(match links {
        Some(links) => group.with_rank_group(Arc::new(links)),
        None => group,
    })
}

/// While NCCL connects: says so after [`CONNECTING`], and ends the process with all ranks after [`NCCL_START`].
/// Ends when the result is dropped.
fn limit_connecting(mesh: &Arc<Mesh>, events: &OnEvent) -> Result<Sender<()>> {
    let (rank, size) = (mesh.world().rank, mesh.world().size);
    let (mesh, events) = (mesh.clone(), events.clone());
    limit_time(CONNECTING, NCCL_START, move |is_over| match is_over {
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
            mesh.fail(&text);
            if rank == 0 {
                events.tell(Event::Failed, &text);
            }
            Exit::Failed.at_once();
        }
    })
}

/// Tests that the GPUs are connected: the sum of a one of each rank is the number of ranks.
fn check_sum(nccl: &Nccl, one: Tensor<Cuda, 1>, size: usize) -> Result<()> {
    // Without pieces, every rank gets the whole sum.
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
    Ok(())
}

/// Starts a thread that checks NCCL every second. An error of NCCL ends all ranks. The count of collectives of all
/// groups is reported to the other ranks. If a rank is lost, NCCL's work is aborted, since this host may be
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
                    let sum = |at: usize| counts.iter().map(|count| count[at]).sum();
                    let [num_ended, num_reached] = [sum(0), sum(1)];
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
                    other_lost().at_once();
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

/// Joins the NCCL group of `members`, in this order, of which this rank is one. All ranks call it, for groups of their
/// own; the first of each group makes its id.
fn join(
    mesh: &Mesh,
    device: &CudaDevice,
    members: impl Iterator<Item = usize>,
    on: NcclStream<'_>,
) -> Result<NcclGroup> {
    let (rank, members) = (mesh.world().rank, members.collect::<Vec<_>>());
    let place = members.iter().position(|&member| member == rank).expect("this rank is one of them");
    let own = match place {
        0 => NcclGroup::new_id()?.to_vec(),
        _ => Vec::new(),
    };
    let ids = mesh.gather(&own)?;
    Ok(NcclGroup::join(device.index, &ids[members[0]], [place, members.len()], on)?)
}

/// The NCCL groups of the ranks' GPUs.
struct Nccl {
    all: NcclGroup,
    shards: ShardGroup,
    /// Set where the ranks that divide one copy of the weights are not all ranks.
    replicas: Option<NcclReplicas>,
}

impl Nccl {
    /// Joins the group of all ranks and, where the weights have several copies, that of this rank's copy and that of
    /// the ranks with the same pieces.
    fn join(mesh: &Mesh, device: &CudaDevice, shard_ranks: usize, on: NcclStream<'_>) -> Result<Self> {
        let (rank, size) = (mesh.world().rank, mesh.world().size);
        let shards = ShardGroup::new(rank, size, shard_ranks);
        let all = join(mesh, device, 0..size, on)?;
        let replicas = match shards.num_replicas() {
            1 => None,
            _ => Some(NcclReplicas {
                within: join(mesh, device, shards.ranks(), NcclStream::Of(&all))?,
                across: join(mesh, device, shards.alike(), NcclStream::Of(&all))?,
            }),
        };
        Ok(Self { all, shards, replicas })
    }

    fn groups(&self) -> impl Iterator<Item = &NcclGroup> {
        let replicas = self.replicas.iter().flat_map(|replicas| [&replicas.within, &replicas.across]);
        std::iter::once(&self.all).chain(replicas)
    }

    /// The group of the ranks that divide one copy of the weights.
    fn within(&self) -> &NcclGroup {
        self.replicas.as_ref().map_or(&self.all, |replicas| &replicas.within)
    }

    /// The range that each rank has of a tensor that is divided into `pieces`.
    fn ranges(&self, pieces: Pieces) -> Vec<Range<usize>> {
        (0..self.shards.size()).map(|place| pieces.of(place)).collect()
    }
}

impl Collectives<Autodiff<Cuda>> for Nccl {
    fn shard_group(&self) -> ShardGroup {
        self.shards
    }

    fn sum(&self, tensors: Vec<(CudaPrimitive, Option<Pieces>)>) -> Result<Pending<Autodiff<Cuda>>, TrainError> {
        let tensors = tensors.into_iter().map(|(tensor, pieces)| {
            let ranges = pieces.map(|pieces| self.ranges(pieces));
            (kernel_tensor(tensor), ranges)
        });
        let tensors = tensors.collect();
        match &self.replicas {
            None => pending(self.all.sum(tensors)),
            Some(replicas) => {
                let sums =
                    replicas.sum(&self.all, tensors).map_err(|error| TrainError::Collective(error.to_string()))?;
                Ok(Box::new(move || Ok(sums.finish().into_iter().map(ToBurn::burn).collect())))
            }
        }
    }

    fn gather(&self, tensors: Vec<Gathered<Autodiff<Cuda>>>) -> Result<Pending<Autodiff<Cuda>>, TrainError> {
        let tensors = tensors.into_iter().map(|gathered| NcclPiece {
            piece: kernel_tensor(gathered.piece),
            whole: kernel_tensor(gathered.whole),
            ranges: self.ranges(gathered.pieces),
        });
        pending(self.within().gather(tensors.collect()))
    }

    fn exchange(&self, exchanged: Exchanged<Autodiff<Cuda>>) -> Result<Pending<Autodiff<Cuda>>, TrainError> {
        let Exchanged { given, wanted, like } = exchanged;
        let given = given.into_iter().map(|(rank, tensor)| (rank, kernel_tensor(tensor)));
        let wanted = wanted.into_iter().map(|(rank, count)| (rank, vec![count])).collect::<Vec<_>>();
        pending(self.within().start_exchange(given.collect(), &wanted, &kernel_tensor(like)))
    }
}

/// NCCL's work as the trainer waits for it; its results are tensors of Burn.
fn pending(work: Result<NcclWork, KernelError>) -> Result<Pending<Autodiff<Cuda>>, TrainError> {
    let work = work.map_err(|error| TrainError::Collective(error.to_string()))?;
    Ok(Box::new(move || {
        let results = work.finish().into_iter();
        Ok(results.map(ToBurn::burn).collect())
    }))
}

/// Exit code of a rank that has lost another one. Under `sieve launch` it is a code of its own, so that the launcher
/// can distinguish a lost rank from a signal to stop.
pub fn other_lost() -> Exit {
    variable(LAUNCHED).map_or(Exit::StoppedEarly, |_| Exit::OtherLost)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_comm::Timeouts;

    #[test]
    fn more_processes_than_gpus_are_refused_with_both_numbers() {
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
    fn long_work_is_reported_once_and_again_at_its_limit() {
        let millis = Duration::from_millis;
        let spoken = |work: Duration, limit: Duration| {
            let (sender, receiver) = channel();
            let speak = move |is_over| sender.send(is_over).expect("somebody listens");
            let limit = limit_time(millis(50), limit, speak).expect("a thread");
            std::thread::sleep(work);
            drop(limit);
            receiver.into_iter().collect::<Vec<_>>()
        };
        // `false`: it takes long; `true`: its limit is over.
        assert_eq!(spoken(millis(0), millis(60_000)), [false; 0]);
        assert_eq!(spoken(millis(1000), millis(60_000)), [false]);
        assert_eq!(spoken(millis(2000), millis(100)), [false, true]);
    }

    #[test]
    fn where_a_rank_lacks_nccl_all_ranks_fail_and_name_it() {
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
