//! cuBLASLt on CubeCL's device thread: the library's handle, its plans, and a workspace for each stream.
use super::plan::{Operands, Plan, Refusal, WORKSPACE_BYTES};
use super::problem::Problem;
use crate::device_thread::Server;
use crate::lane::on_lane_with;
use crate::step_tape::StepWork;
use cubecl::server::Binding;
use cubecl::stream_id::StreamId;
use cudarc::cublaslt::{result as lt, sys::cublasLtHandle_t};
use cudarc::driver::result as driver;
use cudarc::driver::sys::CUstream;
use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// One GEMM, sent to the device thread. Its bindings keep the buffers alive until it is queued; unlike handles they do
/// not keep the next op from writing in place.
#[derive(Clone)]
pub(super) struct Call {
    pub(super) problem: Problem,
    /// Whether the device is of the one architecture whose algorithms were measured.
    pub(super) is_hopper: bool,
    /// x, w, C and D; then, where x and w are fp8, their scales.
    pub(super) bindings: Vec<Binding>,
    /// `[alpha, beta]` of `D = alpha A B + beta C`.
    pub(super) factors: [f32; 2],
    pub(super) stream: StreamId,
}

/// What the device thread keeps for the life of the process.
struct Library {
    handle: cublasLtHandle_t,
    /// Address of the workspace of [`WORKSPACE_BYTES`] of each CUDA stream. CubeCL has a fixed number of them; stream
    /// ids differ by thread.
    workspaces: HashMap<CUstream, u64>,
    /// The plan of each problem and of the alignments of x, w, C and D in bytes.
    plans: HashMap<(Problem, [u32; 4]), Plan>,
}

thread_local! {
    // Used by device threads only; CubeCL runs one for each device.
    static LIBRARY: RefCell<Option<Library>> = const { RefCell::new(None) };
}

impl Call {
    /// Queues the GEMM on its stream. Runs on the device thread, after [`lane::open`](crate::lane::open) of the stream.
    pub(super) fn run(mut self, server: &mut Server) -> Result<(), Refusal> {
        let (bindings, stream) = (std::mem::take(&mut self.bindings), self.stream);
        // An error of the closure is a text, so the refusal itself is kept here.
        let mut no_algorithm = None;
        let queued = on_lane_with(server, stream, bindings, |lane, pointers| {
            let queued = Library::with(|library| library.queue(&self, lane, pointers));
            queued.map_err(|refusal| {
                let reason = refusal.to_string();
                no_algorithm = matches!(refusal, Refusal::NoAlgorithm(_)).then_some(refusal);
                reason
            })
        });
        queued.map_err(|reason| no_algorithm.unwrap_or(Refusal::Failed(reason)))
    }
}

impl StepWork for Call {
    fn bindings(&self) -> &[Binding] {
        &self.bindings
    }

    /// Queues it on the stream of its first call, which is the step's.
    fn queue_again(&self, server: &mut Server, _: StreamId) -> Result<(), String> {
        self.clone().run(server).map_err(|refusal| refusal.to_string())
    }
}

impl Library {
    /// Runs `action` with this thread's library, which the first call opens.
    fn with<T>(action: impl FnOnce(&mut Library) -> Result<T, Refusal>) -> Result<T, Refusal> {
        LIBRARY.with_borrow_mut(|slot| {
            let library = match slot {
                Some(library) => library,
                None => slot.insert(Self {
                    handle: lt::create_handle().map_err(|e| Refusal::Failed(format!("cublasLtCreate: {e}")))?,
                    workspaces: HashMap::new(),
                    plans: HashMap::new(),
                }),
            };
            action(library)
        })
    }

    /// Queues a GEMM on `stream`. The first GEMM on a stream allocates the stream's workspace, and the first GEMM of a
    /// problem finds the problem's plan.
    fn queue(&mut self, call: &Call, stream: CUstream, pointers: &[u64]) -> Result<(), Refusal> {
        let workspace = match self.workspaces.get(&stream) {
            Some(workspace) => *workspace,
            None => {
                // SAFETY: an allocation on the current context, kept for the life of the process.
                let allocated = unsafe { driver::malloc_sync(WORKSPACE_BYTES) };
                let workspace = allocated.map_err(|e| Refusal::Failed(format!("a workspace of 64 MiB: {e:?}")))?;
                self.workspaces.insert(stream, workspace);
                workspace
            }
        };
        // The first four pointers are x, w, C and D; fp8 operands have their two scales behind them.
        let operands = Operands {
            pointers: std::array::from_fn(|i| pointers[i]),
            scales: [4, 5].map(|i| pointers.get(i).copied().unwrap_or(0)),
            factors: call.factors,
            workspace,
            stream,
        };
        let alignments = operands.pointers.map(alignment);
        if !self.plans.contains_key(&(call.problem, alignments)) {
            let plan = self.find(&call.problem, alignments, call.is_hopper)?;
            self.plans.insert((call.problem, alignments), plan);
        }
        let plan = self.plans.get(&(call.problem, alignments)).expect("inserted above");
        // SAFETY: the wrapper checked the sizes against the tensors, whose addresses these are, on the current context.
        unsafe { plan.launch(self.handle, &operands) }
    }
}

impl Library {
    /// The plan of a problem: with the algorithm of the problem with rounded rows, or with one of its own.
    fn find(&mut self, problem: &Problem, alignments: [u32; 4], is_hopper: bool) -> Result<Plan, Refusal> {
        if let Some(rounded) = problem.with_rounded_rows().filter(|rounded| is_hopper && rounded != problem) {
            let rounded_plan = match self.plans.entry((rounded, alignments)) {
                Entry::Occupied(plan) => plan.into_mut(),
                Entry::Vacant(place) => place.insert(Plan::find(self.handle, &rounded, alignments, is_hopper)?),
            };
            if let Some(plan) = Plan::with_algorithm_of(rounded_plan, self.handle, problem)? {
                return Ok(plan);
            }
        }
        Plan::find(self.handle, problem, alignments, is_hopper)
    }
}

/// Alignment of a pointer in bytes: a power of two, at most 256, because no algorithm requires more.
fn alignment(pointer: u64) -> u32 {
    1 << pointer.trailing_zeros().min(8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignment_is_the_largest_power_of_two_up_to_256() {
        assert_eq!(alignment(0x7f00_0000_0200), 256);
        assert_eq!(alignment(0x7f00_0000_0210), 16);
        assert_eq!(alignment(0x7f00_0000_0202), 2);
        assert_eq!(alignment(0), 256);
    }
}
