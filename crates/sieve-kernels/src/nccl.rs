//! Reductions and gathers over the GPUs of several processes, by NCCL.
//!
//! NCCL works on a stream of its own: it begins once Burn's stream has run what was queued before, and Burn's stream
//! waits for it where the caller asks for the results, so that both run concurrently in between. Only events of these
//! two streams order them, so a checkpoint's copies on a third stream delay nothing, and the host never waits. One call
//! takes all tensors of a segment as an NCCL group. NCCL does not report a rank that died: its collectives never end,
//! and the watcher of the processes must end this one. Errors that NCCL does detect, such as a broken link, are read by
//! [`NcclWatch`].
mod library;
mod watch;

pub use watch::NcclWatch;

use crate::burn_memory::{binding_of, burn_memory, can_mut};
use crate::lane::{self, Server, address_of, lock, on_lane};
use cubecl::device::Device;
use cubecl::device_handle::DeviceHandle;
use cubecl::server::Binding;
use cubecl::stream_id::StreamId;
use cudarc::driver::result as driver;
use cudarc::driver::sys::{CUcontext, CUevent, CUevent_flags, CUevent_wait_flags, CUstream};
use cudarc::nccl::sys;
use library::Nccl;
use sieve_gpu::{CudaTensor, DType, KernelError};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use watch::Marks;

const NAME: &str = "nccl";

/// Bytes of what rank 0 gives to the others, so that they find each other.
pub(crate) const NCCL_ID_BYTES: usize = 128;

/// This process's part in a group of GPUs. It lasts as long as the process.
#[derive(Debug)]
pub struct NcclGroup {
    link: Link,
    rank: usize,
    /// An error that came after its call had returned.
    late_error: Arc<Mutex<Option<String>>>,
    marks: Arc<Marks>,
}

/// What the device thread works with.
#[derive(Clone, Copy, Debug)]
struct Link {
    nccl: &'static Nccl,
    communicator: sys::ncclComm_t,
    /// NCCL's stream; `None` where it works on Burn's.
    stream: Option<CUstream>,
    context: CUcontext,
}

// SAFETY: after `join` the device thread alone queues work with the handles; `NcclWatch` queries errors, which NCCL
// allows from any thread, and makes the context current on its own thread, which any thread may.
unsafe impl Send for Link {}
// SAFETY: as above.
unsafe impl Sync for Link {}

/// A rank's part of an all-gather.
#[derive(Clone, Debug)]
pub struct NcclPiece {
    /// This rank's piece, contiguous.
    pub piece: CudaTensor,
    /// The contiguous tensor that the pieces are gathered into; overwritten in place for every clone of it, also one
    /// that a [`HostCopy`](crate::HostCopy) holds.
    pub whole: CudaTensor,
    /// Which elements of the flattened whole are whose, by rank.
    pub ranges: Vec<Range<usize>>,
}

/// Work of all ranks that has begun.
pub struct NcclWork {
    results: Vec<CudaTensor>,
    queue: Option<DeviceHandle<Server>>,
    /// They keep the memory until Burn's stream waits for the work, without keeping the next op from writing in place.
    bindings: Vec<Binding>,
    /// What is read and others may hold too: an op of theirs that would write in place writes to a copy meanwhile.
    read: Vec<CudaTensor>,
    end: Arc<Mutex<Option<End>>>,
    late_error: Arc<Mutex<Option<String>>>,
}

/// Recorded behind the work.
#[derive(Debug)]
struct End(CUevent);

// SAFETY: made, waited for and destroyed on the device thread alone.
unsafe impl Send for End {}

impl fmt::Debug for NcclWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NcclWork").finish_non_exhaustive()
    }
}

impl NcclGroup {
    /// Is the library there? Asked once.
    ///
    /// # Errors
    /// [`KernelError::Installation`].
    pub fn require() -> Result<(), KernelError> {
        Nccl::get().map(drop)
    }

    /// The library's version; `None` where it is not there.
    pub fn version() -> Option<String> {
        let version = Nccl::get().ok()?.version()?;
        Some(format!(
            "{}.{}.{}",
            version / 10_000,
            version / 100 % 100,
            version % 100
        ))
    }

    /// The id of a new group, created by one rank and sent to all others.
    ///
    /// # Errors
    /// No library, or one that finds no network.
    pub fn new_id() -> Result<[u8; NCCL_ID_BYTES], KernelError> {
        let nccl = Nccl::get()?;
        let mut id = sys::ncclUniqueId {
            internal: [0; NCCL_ID_BYTES],
        };
        // SAFETY: writes one id.
        let made = unsafe { (nccl.get_unique_id)(&mut id) };
        nccl.require("ncclGetUniqueId", made)?;
        Ok(id.internal.map(|byte| byte as u8))
    }

    /// Joins the group of `id` as `rank` of `size`, with a GPU on which tensors were made before. Waits for all ranks.
    /// Without `overlaps` NCCL uses Burn's stream, so that nothing overlaps its collectives.
    ///
    /// # Errors
    /// No library; an id of another length; GPUs that cannot reach each other, or one GPU for two ranks.
    pub fn join(device_index: usize, id: &[u8], [rank, size]: [usize; 2], overlaps: bool) -> Result<Self, KernelError> {
        let nccl = Nccl::get()?;
        let id: [u8; NCCL_ID_BYTES] = id
            .try_into()
            .map_err(|_| failed(format!("an id of {} bytes", id.len())))?;
        let id = sys::ncclUniqueId {
            internal: id.map(|byte| byte as _),
        };
        let device =
            driver::device::get(device_index as i32).map_err(|error| failed(format!("cuDeviceGet: {error:?}")))?;
        let mut communicator = std::ptr::null_mut();
        // SAFETY: Burn's primary context is retained for the life of the process; NCCL takes the device of the current
        // context, and writes one handle.
        let (stream, joined, context) = unsafe {
            let context = driver::primary_ctx::retain(device)
                .and_then(|context| driver::ctx::set_current(context).map(|()| context))
                .map_err(|error| failed(format!("the primary context: {error:?}")))?;
            let made = || driver::stream::create(driver::stream::StreamKind::NonBlocking);
            let stream = overlaps.then(made).transpose();
            let stream = stream.map_err(|error| failed(format!("cuStreamCreate: {error:?}")))?;
            let (size, rank) = (size as i32, rank as i32);
            let joined = (nccl.comm_init_rank)(&mut communicator, size, id, rank);
            (stream, joined, context)
        };
        nccl.require("ncclCommInitRank", joined)?;
        Ok(Self {
            link: Link {
                nccl,
                communicator,
                stream,
                context,
            },
            rank,
            late_error: Arc::default(),
            marks: Arc::default(),
        })
    }

    /// Polled by another thread: whether NCCL has had an error, and how many collectives the GPU has completed.
    pub fn watch(&self) -> NcclWatch {
        NcclWatch::new(self.link, self.marks.clone())
    }

    /// Starts summing f32 tensors over all ranks, which pass the same shapes in the same order. A tensor with ranges is
    /// reduce-scattered: a rank gets the flat sums of its own range; any other is all-reduced.
    ///
    /// # Errors
    /// Tensors that are not f32; an error of an earlier call.
    pub fn sum(&self, tensors: Vec<(CudaTensor, Option<Vec<Range<usize>>>)>) -> Result<NcclWork, KernelError> {
        let mut jobs = Vec::with_capacity(tensors.len());
        let (mut results, mut read) = (Vec::with_capacity(tensors.len()), Vec::new());
        for (tensor, ranges) in tensors {
            tensor.require_dtype(NAME, "a tensor", DType::F32)?;
            let is_own = tensor.is_contiguous() && can_mut(&tensor);
            let from = tensor.contiguous();
            drop(tensor);
            let to = match &ranges {
                Some(ranges) => from.empty_contiguous(&[ranges[self.rank].len()], DType::F32),
                None if is_own => from.clone(),
                None => from.empty_contiguous(from.shape(), DType::F32),
            };
            jobs.push(Job {
                bindings: [&from, &to].map(binding_of),
                count: from.num_elements(),
                work: Work::Sum,
                ranges,
            });
            results.push(to);
            if !is_own {
                read.push(from);
            }
        }
        self.begin(jobs, results, read)
    }

    /// Starts gathering the pieces of all ranks into `whole`. The returned work has no results of its own.
    ///
    /// # Errors
    /// Tensors with gaps, or of other types than f32 and bf16; an error of an earlier call.
    pub fn gather(&self, tensors: Vec<NcclPiece>) -> Result<NcclWork, KernelError> {
        let mut jobs = Vec::with_capacity(tensors.len());
        let mut read = Vec::with_capacity(tensors.len());
        for NcclPiece { piece, whole, ranges } in tensors {
            whole.require_contiguous(NAME, "the whole tensor")?;
            piece.require_contiguous(NAME, "a piece")?;
            piece.require_dtype(NAME, "a piece", whole.dtype())?;
            piece.require_shape(NAME, "a piece", &[ranges[self.rank].len()])?;
            jobs.push(Job {
                bindings: [&piece, &whole].map(binding_of),
                count: whole.num_elements(),
                work: match whole.dtype() {
                    DType::BF16 => Work::GatherBf16,
                    _ => {
                        whole.require_dtype(NAME, "the whole tensor", DType::F32)?;
                        Work::GatherF32
                    }
                },
                ranges: Some(ranges),
            });
            read.push(piece);
        }
        self.begin(jobs, Vec::new(), read)
    }

    /// Sends tensors of `shape` to other ranks, and returns those received from the ranks of `from`; `like` has their
    /// type and is on this GPU. Neither list contains this rank.
    ///
    /// # Errors
    /// Tensors of other types or shapes; an error of an earlier call.
    pub fn exchange(
        &self,
        given: Vec<(usize, CudaTensor)>,
        from: Range<usize>,
        shape: &[usize],
        like: &CudaTensor,
    ) -> Result<Vec<CudaTensor>, KernelError> {
        let dtype = like.dtype();
        let count = shape.iter().product::<usize>() * dtype.size();
        let job = |tensor: &CudaTensor, work| Job {
            bindings: [tensor, tensor].map(binding_of),
            count,
            work,
            ranges: None,
        };
        let mut jobs = Vec::new();
        for (rank, tensor) in given {
            tensor.require_dtype(NAME, "a given tensor", dtype)?;
            tensor.require_shape(NAME, "a given tensor", shape)?;
            jobs.push(job(&tensor.contiguous(), Work::Send(rank)));
        }
        let found = from.map(|rank| {
            let tensor = like.empty_contiguous(shape, dtype);
            jobs.push(job(&tensor, Work::Receive(rank)));
            tensor
        });
        let found = found.collect();
        if jobs.is_empty() {
            return Ok(found);
        }
        self.begin(jobs, vec![like.clone()], Vec::new())?.finish();
        Ok(found)
    }

    /// Sends each rank a slice of the outermost dimension of `tensor`, and returns the slices received, by rank.
    ///
    /// # Errors
    /// A tensor without a slice for each rank; an error of an earlier call.
    pub fn all_to_all(&self, tensor: &CudaTensor) -> Result<CudaTensor, KernelError> {
        let from = tensor.contiguous();
        let to = from.empty_contiguous(from.shape(), from.dtype());
        let slices = from.shape().first().copied().unwrap_or_default();
        if slices <= self.rank {
            return Err(failed(format!("rank {} of {slices} slices", self.rank)));
        }
        let job = Job {
            bindings: [&from, &to].map(binding_of),
            count: from.num_elements() * from.dtype().size(),
            work: Work::AllToAll(slices),
            ranges: None,
        };
        self.begin(vec![job], vec![from], Vec::new())?.finish();
        Ok(to)
    }

    fn begin(&self, jobs: Vec<Job>, results: Vec<CudaTensor>, read: Vec<CudaTensor>) -> Result<NcclWork, KernelError> {
        if let Some(reason) = lock(&self.late_error).take() {
            return Err(failed(reason));
        }
        let mut work = NcclWork {
            queue: None,
            bindings: jobs.iter().flat_map(|job| job.bindings.clone()).collect(),
            end: Arc::default(),
            late_error: self.late_error.clone(),
            results,
            read,
        };
        let Some(first) = work.results.iter().chain(&work.read).next() else {
            return Ok(work);
        };
        let queue: DeviceHandle<Server> = DeviceHandle::new(burn_memory(first).device.to_id());
        let (link, rank, stream) = (self.link, self.rank, lane::open(first)?);
        let (end, late_error, marks) = (work.end.clone(), self.late_error.clone(), self.marks.clone());
        queue.submit(move |server| {
            let addresses = jobs.into_iter().map(|job| {
                // The work's own bindings keep the memory.
                let [from, to] = job.bindings.map(|binding| address_of(server, stream, binding));
                let (from, to) = (from?.pointer, to?.pointer);
                let address = Address { from, to };
                Ok((address, job.count, job.work, job.ranges))
            });
            let addresses = addresses.collect::<Result<Vec<_>, String>>();
            let queued = addresses.and_then(|jobs| {
                on_lane(stream, |lane| {
                    // SAFETY: the bindings hold the tensors until the caller's stream waits for the work.
                    let ended = unsafe { link.queue(lane, rank, &jobs, &marks) }?;
                    *lock(&end) = ended.map(End);
                    Ok(())
                })
            });
            if let Err(reason) = queued {
                lock(&late_error).get_or_insert(reason);
            }
        });
        // Other ranks wait for this one: the closure must not wait for ops that come later.
        queue.flush_queue();
        work.queue = Some(queue);
        Ok(work)
    }
}

impl NcclWork {
    /// Makes Burn's stream wait for the work, and gives its results.
    pub fn finish(self) -> Vec<CudaTensor> {
        let Self {
            results,
            queue,
            bindings,
            read,
            end,
            late_error,
        } = self;
        let Some(queue) = queue else {
            return results;
        };
        let stream = StreamId::current();
        queue.submit(move |_| {
            if let Some(End(event)) = lock(&end).take() {
                let waits = on_lane(stream, |lane| wait_for(lane, event));
                if let Err(reason) = waits {
                    lock(&late_error).get_or_insert(reason);
                }
            }
            // What frees or writes the memory from here on comes behind the wait.
            drop(bindings);
        });
        // Behind the wait: what writes there from now on comes after it.
        drop(read);
        results
    }
}

/// A tensor's part in a call.
struct Job {
    /// Read, written.
    bindings: [Binding; 2],
    /// Elements of the whole tensor.
    count: usize,
    work: Work,
    ranges: Option<Vec<Range<usize>>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Sum,
    GatherF32,
    GatherBf16,
    /// To a rank, or from one; counts are of bytes.
    Send(usize),
    Receive(usize),
    /// A slice to each of this number of ranks, and one from each.
    AllToAll(usize),
}

#[derive(Clone, Copy)]
struct Address {
    from: u64,
    to: u64,
}

type Addressed = (Address, usize, Work, Option<Vec<Range<usize>>>);

impl Link {
    /// Queues the work of all tensors as one group, after what `lane` has queued. Returns the event recorded after it,
    /// unless it is on that stream.
    ///
    /// # Safety
    /// The addresses hold as many values as the ranges and counts say, until the work is waited for.
    unsafe fn queue(
        &self,
        lane: CUstream,
        rank: usize,
        jobs: &[Addressed],
        marks: &Marks,
    ) -> Result<Option<CUevent>, String> {
        let _communicator = marks.hold()?;
        let stream = self.stream.unwrap_or(lane);
        let mut reached = None;
        if self.stream.is_some() {
            let before = record(lane)?;
            wait_for(stream, before)?;
            reached = Some(record(stream)?);
        }
        let nccl = self.nccl;
        // SAFETY: no arguments.
        nccl.check("ncclGroupStart", unsafe { (nccl.group_start)() })?;
        let queued = jobs.iter().try_for_each(|job| {
            // SAFETY: see above.
            unsafe { self.queue_one(stream, rank, job) }
        });
        // Also after an error: a group left open would swallow the next one.
        // SAFETY: no arguments.
        let ended = nccl.check("ncclGroupEnd", unsafe { (nccl.group_end)() });
        queued.and(ended)?;
        if let Some(reached) = reached {
            marks.push(reached, record(stream)?);
        }
        match self.stream {
            Some(stream) => record(stream).map(Some),
            None => Ok(None),
        }
    }

    /// # Safety
    /// As [`queue`](Self::queue).
    unsafe fn queue_one(
        &self,
        stream: CUstream,
        rank: usize,
        (address, count, work, ranges): &Addressed,
    ) -> Result<(), String> {
        let (nccl, comm, stream) = (self.nccl, self.communicator, stream as sys::cudaStream_t);
        let Address { from, to } = *address;
        let (f32s, sum) = (sys::ncclDataType_t::ncclFloat32, sys::ncclRedOp_t::ncclSum);
        let (kind, bytes) = match work {
            Work::GatherBf16 => (sys::ncclDataType_t::ncclBfloat16, 2),
            Work::Sum | Work::GatherF32 => (f32s, 4),
            Work::Send(_) | Work::Receive(_) | Work::AllToAll(_) => (sys::ncclDataType_t::ncclUint8, 1),
        };
        if let Work::AllToAll(ranks) = *work {
            let count = count / ranks;
            for peer in 0..ranks {
                let offset = (peer * count) as u64;
                let (from, to, peer) = ((from + offset) as _, (to + offset) as _, peer as i32);
                // SAFETY: a slice of `count` bytes at each address, one for each rank.
                let moved = unsafe {
                    [
                        (nccl.send)(from, count, kind, peer, comm, stream),
                        (nccl.receive)(to, count, kind, peer, comm, stream),
                    ]
                };
                for moved in moved {
                    nccl.check("ncclSend or ncclRecv", moved)?;
                }
            }
            return Ok(());
        }
        // SAFETY: `count` bytes at the address.
        let moved = unsafe {
            match *work {
                Work::Send(peer) => Some((nccl.send)(from as _, *count, kind, peer as i32, comm, stream)),
                Work::Receive(peer) => Some((nccl.receive)(to as _, *count, kind, peer as i32, comm, stream)),
                _ => None,
            }
        };
        if let Some(moved) = moved {
            return nccl.check("ncclSend or ncclRecv", moved);
        }
        let Some(ranges) = ranges else {
            // SAFETY: `count` values at both addresses.
            let queued = unsafe { (nccl.all_reduce)(from as _, to as _, *count, f32s, sum, comm, stream) };
            return nccl.check("ncclAllReduce", queued);
        };
        let own = ranges[rank].len();
        if ranges.iter().all(|range| range.len() == own) {
            // SAFETY: the whole tensor at one address, a piece at the other.
            let queued = unsafe {
                match work {
                    Work::Sum => (nccl.reduce_scatter)(from as _, to as _, own, f32s, sum, comm, stream),
                    _ => (nccl.all_gather)(from as _, to as _, own, kind, comm, stream),
                }
            };
            return nccl.check("a collective", queued);
        }
        // Pieces of several sizes: to or from each rank on its own, in one group.
        for (root, range) in ranges.iter().enumerate() {
            let (count, offset, root) = (range.len(), bytes * range.start as u64, root as i32);
            // SAFETY: the range lies inside the whole tensor, and each rank's own address holds its piece.
            let queued = unsafe {
                match work {
                    Work::Sum => {
                        let from = (from + offset) as _;
                        (nccl.reduce)(from, to as _, count, f32s, sum, root, comm, stream)
                    }
                    _ => {
                        let to = (to + offset) as _;
                        (nccl.broadcast)(from as _, to, count, kind, root, comm, stream)
                    }
                }
            };
            nccl.check("a collective of one rank", queued)?;
        }
        Ok(())
    }
}

/// What is recorded behind everything that a stream has queued.
fn record(stream: CUstream) -> Result<CUevent, String> {
    let told = |error| format!("an event: {error:?}");
    let event = driver::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING).map_err(told)?;
    // SAFETY: both were made by the driver in the current context.
    unsafe { driver::event::record(event, stream) }.map_err(told)?;
    Ok(event)
}

/// Makes a stream wait for an event, which is not used again.
fn wait_for(stream: CUstream, event: CUevent) -> Result<(), String> {
    let told = |error| format!("waiting for an event: {error:?}");
    let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
    // SAFETY: both were made by the driver in the current context; a wait that is queued outlives the event.
    unsafe {
        driver::stream::wait_event(stream, event, flags).map_err(told)?;
        driver::event::destroy(event).map_err(told)
    }
}

fn failed(reason: String) -> KernelError {
    KernelError::Launch { kernel: NAME, reason }
}
