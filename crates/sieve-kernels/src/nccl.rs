//! Reductions, gathers and exchanges over the GPUs of several processes, by NCCL.
//!
//! With [`NcclStream::Own`] NCCL works on a stream of its own. A collective starts once Burn's stream has run what was
//! queued before it, and [`NcclWork::finish`] makes Burn's stream wait for its end; in between both streams run
//! concurrently. Only events of these two streams order them, so a checkpoint's copies on a third stream delay nothing,
//! and the host never waits. One call takes all tensors of a part of the model (the embedding, a block, the output) as
//! an NCCL group.
//!
//! NCCL does not report a rank that died: the collectives of the other ranks then never end, and whoever watches the
//! processes must end them. Errors that NCCL does detect, such as a broken link, are read by [`NcclWatch`].
mod library;
mod replicas;
mod watch;

pub use replicas::{NcclReplicas, NcclSums};
pub use watch::NcclWatch;

use crate::burn_memory::{binding_of, can_mut};
use crate::device_thread::Server;
use crate::lane::{self, address_of, device_queue, on_lane, record_event};
use crate::locked::lock;
use crate::probe::version_text;
use cubecl::device_handle::DeviceHandle;
use cubecl::server::Binding;
use cubecl::stream_id::StreamId;
use cudarc::driver::result as driver;
use cudarc::driver::sys::{CUcontext, CUevent, CUevent_wait_flags, CUstream};
use cudarc::nccl::sys;
use library::{NAME, Nccl, failed};
use sieve_gpu::{CudaTensor, DType, KernelError};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use watch::Marks;

/// Bytes of a group's unique id, which one rank creates and sends to the others so that they can join.
pub(crate) const NCCL_ID_BYTES: usize = 128;

/// This process's rank in a group of GPUs. NCCL's communicator is kept until the process ends.
#[derive(Debug)]
pub struct NcclGroup {
    link: Link,
    rank: usize,
    size: usize,
    /// The first error of queued work that came after its call had returned.
    late_error: Arc<Mutex<Option<String>>>,
    marks: Arc<Marks>,
}

/// The handles with which the device thread queues collectives.
#[derive(Clone, Copy, Debug)]
struct Link {
    nccl: &'static Nccl,
    communicator: sys::ncclComm_t,
    /// NCCL's stream; `None` if collectives are queued on Burn's.
    stream: Option<CUstream>,
    context: CUcontext,
}

// SAFETY: after `join` only the device thread queues work with the handles. `NcclWatch` queries errors, which NCCL
// allows from any thread, and makes the context current on its own thread, which the driver allows.
unsafe impl Send for Link {}
// SAFETY: as above.
unsafe impl Sync for Link {}

/// The stream on which a group's collectives run.
#[derive(Clone, Copy, Debug)]
pub enum NcclStream<'a> {
    /// A stream of the group's own: they run beside Burn's ops.
    Own,
    /// Burn's stream.
    Burns,
    /// The stream of another group: the collectives of both groups run one by one, in the order in which they began.
    Of(&'a NcclGroup),
}

/// What one rank contributes to an all-gather.
#[derive(Clone, Debug)]
pub struct NcclPiece {
    /// This rank's elements of the tensor, contiguous.
    pub piece: CudaTensor,
    /// The contiguous tensor into which the pieces of all ranks are gathered. It is overwritten in place, which all its
    /// clones see, also one in a [`HostCopy`](crate::HostCopy).
    pub whole: CudaTensor,
    /// Each rank's range of elements of the flattened `whole`.
    pub ranges: Vec<Range<usize>>,
}

/// Collectives that were queued and may still run.
pub struct NcclWork {
    results: Vec<CudaTensor>,
    /// The device thread's queue; `None` if there was nothing to do.
    queue: Option<DeviceHandle<Server>>,
    /// Keep the memory until Burn's stream waits for the work. They do not keep Burn's ops from writing to it in place.
    bindings: Vec<Binding>,
    /// Inputs that may have other owners: while they are held here, in-place ops of those owners write to a copy.
    inputs: Vec<CudaTensor>,
    end: Arc<Mutex<Option<End>>>,
    late_error: Arc<Mutex<Option<String>>>,
}

/// The event recorded after the work on NCCL's stream.
#[derive(Debug)]
struct End(CUevent);

// SAFETY: only the device thread records, waits for and destroys the event.
unsafe impl Send for End {}

impl fmt::Debug for NcclWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NcclWork").finish_non_exhaustive()
    }
}

impl NcclGroup {
    /// Checks that the library can be loaded; tried once per process.
    ///
    /// # Errors
    /// [`KernelError::Installation`] when it cannot.
    pub fn require() -> Result<(), KernelError> {
        Nccl::get().map(drop)
    }

    /// The version of NCCL; `None` if it cannot be loaded.
    pub fn version() -> Option<String> {
        Some(version_text(Nccl::get().ok()?.version()? as usize))
    }

    /// The id of a new group, created by one rank and sent to all others.
    ///
    /// # Errors
    /// No library, or one that finds no network.
    pub fn new_id() -> Result<[u8; NCCL_ID_BYTES], KernelError> {
        let nccl = Nccl::get()?;
        let mut id = sys::ncclUniqueId { internal: [0; NCCL_ID_BYTES] };
        // SAFETY: writes one id.
        let result = unsafe { (nccl.get_unique_id)(&mut id) };
        nccl.require("ncclGetUniqueId", result)?;
        Ok(id.internal.map(|byte| byte as u8))
    }

    /// Joins the group of `id` as `rank` of `size` ranks, and waits for all others. Burn must have put a tensor on the
    /// GPU before: the first one creates the CUDA context that NCCL works in.
    ///
    /// # Errors
    /// No library; an id of another length; GPUs that cannot reach each other, or one GPU for two ranks.
    pub fn join(
        device_index: usize,
        id: &[u8],
        [rank, size]: [usize; 2],
        on: NcclStream<'_>,
    ) -> Result<Self, KernelError> {
        let nccl = Nccl::get()?;
        let id: [u8; NCCL_ID_BYTES] = id.try_into().map_err(|_| failed(format!("an id of {} bytes", id.len())))?;
        let id = sys::ncclUniqueId { internal: id.map(|byte| byte as _) };
        let device =
            driver::device::get(device_index as i32).map_err(|error| failed(format!("cuDeviceGet: {error:?}")))?;
        let mut communicator = std::ptr::null_mut();
        // SAFETY: Burn's primary context is retained for the life of the process; NCCL takes the device of the current
        // context, and writes one handle.
        let (stream, joined, context) = unsafe {
            let context = driver::primary_ctx::retain(device)
                .and_then(|context| driver::ctx::set_current(context).map(|()| context))
                .map_err(|error| failed(format!("the primary context: {error:?}")))?;
            let new_stream = || driver::stream::create(driver::stream::StreamKind::NonBlocking);
            let stream = match on {
                NcclStream::Own => new_stream().map(Some),
                NcclStream::Burns => Ok(None),
                NcclStream::Of(other) => Ok(other.link.stream),
            };
            let stream = stream.map_err(|error| failed(format!("cuStreamCreate: {error:?}")))?;
            let joined = (nccl.comm_init_rank)(&mut communicator, size as i32, id, rank as i32);
            (stream, joined, context)
        };
        nccl.require("ncclCommInitRank", joined)?;
        Ok(Self {
            link: Link { nccl, communicator, stream, context },
            rank,
            size,
            late_error: Arc::default(),
            marks: Arc::default(),
        })
    }

    /// This process's rank, and the number of ranks.
    pub fn place(&self) -> [usize; 2] {
        [self.rank, self.size]
    }

    /// A watch that another thread polls for NCCL's errors and the number of completed collectives.
    pub fn watch(&self) -> NcclWatch {
        NcclWatch::new(self.link, self.marks.clone())
    }

    /// Starts to sum f32 tensors over all ranks; each rank passes the same shapes in the same order. A tensor with
    /// ranges of its flattened elements by rank is reduce-scattered: each rank gets the sums of its own range, flat. A
    /// tensor without ranges is all-reduced.
    ///
    /// # Errors
    /// Tensors that are not f32; an error of an earlier call.
    pub fn sum(&self, tensors: Vec<(CudaTensor, Option<Vec<Range<usize>>>)>) -> Result<NcclWork, KernelError> {
        let mut jobs = Vec::with_capacity(tensors.len());
        let (mut results, mut inputs) = (Vec::with_capacity(tensors.len()), Vec::new());
        for (tensor, ranges) in tensors {
            tensor.require_dtype(NAME, "a tensor", DType::F32)?;
            let has_no_other_owner = tensor.is_contiguous() && can_mut(&tensor);
            let from = tensor.contiguous();
            drop(tensor);
            let to = match &ranges {
                Some(ranges) => from.empty_contiguous(&[ranges[self.rank].len()], DType::F32),
                None if has_no_other_owner => from.clone(),
                None => from.empty_contiguous(from.shape(), DType::F32),
            };
            jobs.push(Job {
                from: binding_of(&from),
                to: binding_of(&to),
                count: from.num_elements(),
                work: Work::Sum,
                ranges,
            });
            results.push(to);
            if !has_no_other_owner {
                inputs.push(from);
            }
        }
        self.begin(jobs, results, inputs)
    }

    /// Starts to gather the pieces of all ranks into each [`NcclPiece::whole`]. The work has no other results.
    ///
    /// # Errors
    /// Tensors with gaps, or of other types than f32 and bf16; an error of an earlier call.
    pub fn gather(&self, tensors: Vec<NcclPiece>) -> Result<NcclWork, KernelError> {
        let mut jobs = Vec::with_capacity(tensors.len());
        let mut inputs = Vec::with_capacity(tensors.len());
        for NcclPiece { piece, whole, ranges } in tensors {
            whole.require_contiguous(NAME, "the whole tensor")?;
            piece.require_contiguous(NAME, "a piece")?;
            piece.require_dtype(NAME, "a piece", whole.dtype())?;
            piece.require_shape(NAME, "a piece", &[ranges[self.rank].len()])?;
            jobs.push(Job {
                from: binding_of(&piece),
                to: binding_of(&whole),
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
            inputs.push(piece);
        }
        self.begin(jobs, Vec::new(), inputs)
    }

    /// Starts to send tensors to other ranks, given with their rank, and to receive a tensor of the given shape from
    /// each rank of `wanted`; the received ones are the work's results, in this order. All have the type of `like`,
    /// which is on this GPU. This rank is in neither list. A rank with two empty lists calls it too, where others
    /// count the group's collectives.
    ///
    /// # Errors
    /// Tensors of other types; an error of an earlier call.
    pub fn start_exchange(
        &self,
        given: Vec<(usize, CudaTensor)>,
        wanted: &[(usize, Vec<usize>)],
        like: &CudaTensor,
    ) -> Result<NcclWork, KernelError> {
        let dtype = like.dtype();
        let job = |tensor: &CudaTensor, work| Job {
            from: binding_of(tensor),
            to: binding_of(tensor),
            count: tensor.num_elements() * dtype.size(),
            work,
            ranges: None,
        };
        // `like` names the GPU where nothing is received.
        let (mut jobs, mut inputs) = (Vec::new(), vec![like.clone()]);
        for (rank, tensor) in given {
            tensor.require_dtype(NAME, "a given tensor", dtype)?;
            let tensor = tensor.contiguous();
            jobs.push(job(&tensor, Work::Send(rank)));
            inputs.push(tensor);
        }
        let received = wanted.iter().map(|(rank, shape)| {
            let tensor = like.empty_contiguous(shape, dtype);
            jobs.push(job(&tensor, Work::Receive(*rank)));
            tensor
        });
        let received = received.collect();
        self.begin(jobs, received, inputs)
    }

    /// Sends tensors to other ranks, given with their rank, and returns one tensor received from each rank of `from`.
    /// All have the shape `shape` and the type of `like`, which is on this GPU. This rank is in neither list.
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
        for (_, tensor) in &given {
            tensor.require_shape(NAME, "a given tensor", shape)?;
        }
        let wanted = from.map(|rank| (rank, shape.to_vec())).collect::<Vec<_>>();
        Ok(self.start_exchange(given, &wanted, like)?.finish())
    }

    /// Sends each rank its slice of the outermost dimension of `tensor`, and returns the slices received, by rank.
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
            from: binding_of(&from),
            to: binding_of(&to),
            count: from.num_elements() * from.dtype().size(),
            work: Work::AllToAll(slices),
            ranges: None,
        };
        self.begin(vec![job], vec![from], Vec::new())?.finish();
        Ok(to)
    }

    /// Queues the jobs on the device thread as one NCCL group, on the GPU of the first result or input. Without either
    /// there are no jobs.
    fn begin(
        &self,
        jobs: Vec<Job<Binding>>,
        results: Vec<CudaTensor>,
        inputs: Vec<CudaTensor>,
    ) -> Result<NcclWork, KernelError> {
        if let Some(reason) = lock(&self.late_error).take() {
            return Err(failed(reason));
        }
        let bindings = jobs.iter().flat_map(|job| [&job.from, &job.to]).cloned().collect();
        let mut work = NcclWork {
            queue: None,
            bindings,
            end: Arc::default(),
            late_error: self.late_error.clone(),
            results,
            inputs,
        };
        let Some(first) = work.results.iter().chain(&work.inputs).next() else {
            return Ok(work);
        };
        let queue = device_queue(first);
        let (link, stream) = (self.link, lane::open(first)?);
        let (end, late_error, marks) = (work.end.clone(), self.late_error.clone(), self.marks.clone());
        queue.submit(move |server| {
            let resolved = jobs.into_iter().map(|job| job.resolve(server, stream));
            let queued = resolved.collect::<Result<Vec<_>, _>>().and_then(|jobs| {
                on_lane(stream, |lane| {
                    // SAFETY: the work's bindings keep the memory until the caller's stream waits for the work.
                    let ended = unsafe { link.queue(lane, &jobs, &marks) }?;
                    *lock(&end) = ended.map(End);
                    Ok(())
                })
            });
            if let Err(reason) = queued {
                lock(&late_error).get_or_insert(reason);
            }
        });
        // Other ranks wait for this one, so the closure must run now instead of with later ops.
        queue.flush_queue();
        work.queue = Some(queue);
        Ok(work)
    }
}

impl NcclWork {
    /// Makes Burn's stream wait for the work, and returns its results.
    pub fn finish(self) -> Vec<CudaTensor> {
        let Self { results, queue, bindings, inputs, end, late_error } = self;
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
            // The wait is queued: ops that free or write to the memory from here on run after the collective.
            drop(bindings);
        });
        // The closure above is queued: in-place ops from here on are queued behind its wait.
        drop(inputs);
        results
    }
}

/// The work on one tensor; `Buffer` is its binding, or its address on the GPU.
struct Job<Buffer> {
    /// The buffer that the collective reads.
    from: Buffer,
    /// The buffer that the collective writes; it may be `from` itself.
    to: Buffer,
    /// Elements of the whole tensor; bytes where slices or whole tensors are sent and received.
    count: usize,
    work: Work,
    /// The elements of each rank in a reduce-scatter or an all-gather; `None` for other work.
    ranges: Option<Vec<Range<usize>>>,
}

/// What a collective does with its buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Sum,
    GatherF32,
    GatherBf16,
    /// Sends the buffer to this rank.
    Send(usize),
    /// Receives the buffer from this rank.
    Receive(usize),
    /// Sends a slice to each of this number of ranks, and receives one from each.
    AllToAll(usize),
}

impl Job<Binding> {
    /// The same job with its buffers' addresses. Runs on the device thread.
    fn resolve(self, server: &mut Server, stream: StreamId) -> Result<Job<u64>, String> {
        let mut address = |binding| Ok::<_, String>(address_of(server, stream, binding)?.pointer);
        Ok(Job {
            from: address(self.from)?,
            to: address(self.to)?,
            count: self.count,
            work: self.work,
            ranges: self.ranges,
        })
    }
}

impl Link {
    /// Queues all jobs as one group, after what `lane` has queued. Returns the event recorded after the group on NCCL's
    /// stream; `None` if the group was queued on `lane` itself. On NCCL's stream the group also gets a mark in `marks`.
    ///
    /// # Safety
    /// Until the work is waited for, the addresses hold as many values as the ranges and counts say.
    unsafe fn queue(&self, lane: CUstream, jobs: &[Job<u64>], marks: &Marks) -> Result<Option<CUevent>, String> {
        let _not_aborted = marks.hold()?;
        let stream = self.stream.unwrap_or(lane);
        let mut reached = None;
        if self.stream.is_some() {
            wait_for(stream, record_event(lane)?)?;
            reached = Some(record_event(stream)?);
        }
        let nccl = self.nccl;
        // SAFETY: no arguments.
        nccl.check("ncclGroupStart", unsafe { (nccl.group_start)() })?;
        let queued = jobs.iter().try_for_each(|job| {
            // SAFETY: by the caller's promise.
            unsafe { self.queue_one(stream, job) }
        });
        // The group is ended after an error too: left open, it would take in the collectives of the next call.
        // SAFETY: no arguments.
        let ended = nccl.check("ncclGroupEnd", unsafe { (nccl.group_end)() });
        queued.and(ended)?;
        if let Some(reached) = reached {
            marks.push(reached, record_event(stream)?);
        }
        self.stream.map(record_event).transpose()
    }

    /// Queues one job of the open group.
    ///
    /// # Safety
    /// The conditions of [`queue`](Self::queue).
    unsafe fn queue_one(&self, stream: CUstream, job: &Job<u64>) -> Result<(), String> {
        let (nccl, comm, stream) = (self.nccl, self.communicator, stream as sys::cudaStream_t);
        let bytes = sys::ncclDataType_t::ncclUint8;
        let &Job { from, to, count, .. } = job;
        let send = |from: u64, count, peer: usize| {
            // SAFETY: `count` bytes at the address, by the caller's promise.
            let result = unsafe { (nccl.send)(from as _, count, bytes, peer as i32, comm, stream) };
            nccl.check("ncclSend", result)
        };
        let receive = |to: u64, count, peer: usize| {
            // SAFETY: room for `count` bytes at the address, by the caller's promise.
            let result = unsafe { (nccl.receive)(to as _, count, bytes, peer as i32, comm, stream) };
            nccl.check("ncclRecv", result)
        };
        match job.work {
            Work::Send(peer) => send(from, count, peer),
            Work::Receive(peer) => receive(to, count, peer),
            Work::AllToAll(num_ranks) => (0..num_ranks).try_for_each(|peer| {
                let slice = count / num_ranks;
                let offset = (peer * slice) as u64;
                send(from + offset, slice, peer)?;
                receive(to + offset, slice, peer)
            }),
            // SAFETY: by the caller's promise.
            Work::Sum => unsafe { self.sum(stream, job) },
            // SAFETY: as above.
            Work::GatherF32 => unsafe { self.gather(stream, job, (sys::ncclDataType_t::ncclFloat32, 4)) },
            // SAFETY: as above.
            Work::GatherBf16 => unsafe { self.gather(stream, job, (sys::ncclDataType_t::ncclBfloat16, 2)) },
        }
    }

    /// All-reduces a tensor, or reduce-scatters it by the job's ranges.
    ///
    /// # Safety
    /// The conditions of [`queue`](Self::queue).
    unsafe fn sum(&self, stream: sys::cudaStream_t, job: &Job<u64>) -> Result<(), String> {
        let (nccl, comm) = (self.nccl, self.communicator);
        let (f32s, sum) = (sys::ncclDataType_t::ncclFloat32, sys::ncclRedOp_t::ncclSum);
        let &Job { from, to, count, .. } = job;
        let Some(ranges) = &job.ranges else {
            // SAFETY: `count` values at both addresses.
            let result = unsafe { (nccl.all_reduce)(from as _, to as _, count, f32s, sum, comm, stream) };
            return nccl.check("ncclAllReduce", result);
        };
        if let Some(len) = common_len(ranges) {
            // SAFETY: the whole tensor at `from`, `len` values at `to`.
            let result = unsafe { (nccl.reduce_scatter)(from as _, to as _, len, f32s, sum, comm, stream) };
            return nccl.check("ncclReduceScatter", result);
        }
        ranges.iter().zip(0..).try_for_each(|(range, root)| {
            let from = from + (size_of::<f32>() * range.start) as u64;
            // SAFETY: the range lies inside the tensor that is read; rank `root` has room for its sums at `to`.
            let result = unsafe { (nccl.reduce)(from as _, to as _, range.len(), f32s, sum, root, comm, stream) };
            nccl.check("ncclReduce", result)
        })
    }

    /// All-gathers a tensor by the job's ranges; its elements are given with their size in bytes.
    ///
    /// # Safety
    /// The conditions of [`queue`](Self::queue).
    unsafe fn gather(
        &self,
        stream: sys::cudaStream_t,
        job: &Job<u64>,
        (dtype, element_bytes): (sys::ncclDataType_t, u64),
    ) -> Result<(), String> {
        let (nccl, comm) = (self.nccl, self.communicator);
        let &Job { from, to, .. } = job;
        let ranges = job.ranges.as_deref().unwrap_or_default();
        if let Some(len) = common_len(ranges) {
            // SAFETY: `len` values at `from`, the whole tensor at `to`.
            let result = unsafe { (nccl.all_gather)(from as _, to as _, len, dtype, comm, stream) };
            return nccl.check("ncclAllGather", result);
        }
        ranges.iter().zip(0..).try_for_each(|(range, root)| {
            let to = to + element_bytes * range.start as u64;
            // SAFETY: rank `root` has its elements at `from`; the range lies inside the tensor that is written.
            let result = unsafe { (nccl.broadcast)(from as _, to as _, range.len(), dtype, root, comm, stream) };
            nccl.check("ncclBroadcast", result)
        })
    }
}

/// The length that all ranges have; `None` if they differ: NCCL's collectives take equal lengths alone.
fn common_len(ranges: &[Range<usize>]) -> Option<usize> {
    let len = ranges.first()?.len();
    ranges.iter().all(|range| range.len() == len).then_some(len)
}

/// Makes a stream wait for an event, and destroys the event.
fn wait_for(stream: CUstream, event: CUevent) -> Result<(), String> {
    let failed = |error| format!("waiting for an event: {error:?}");
    let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
    // SAFETY: stream and event are alive, in the current context; a queued wait outlives its event.
    unsafe {
        driver::stream::wait_event(stream, event, flags).map_err(failed)?;
        driver::event::destroy(event).map_err(failed)
    }
}
