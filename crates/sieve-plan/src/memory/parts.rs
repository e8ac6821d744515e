//! Memory at one moment, by part, and whether it fits.

use serde::Serialize;
use sieve_core::Keeping;

use super::verdict::MemoryVerdict;
use crate::Target;

/// Memory of a process on a CPU before it has a model, as measured.
const CPU_PROGRAM_BYTES: u64 = 110 << 20;

/// GPU memory of a process before it has a model: the context and cuBLASLt's workspace.
const GPU_PROGRAM_BYTES: u64 = 700 << 20;

/// GPU memory that NCCL takes, measured on two H200s.
const NCCL_BYTES: u64 = 388 << 20;

/// Memory at a training step's peak.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryPlan {
    /// Memory at the peak, by part, without the program's own.
    #[serde(flatten)]
    pub peak: MemoryParts,
    /// A checkpoint being written by a run on a GPU without room for a copy, in host memory; not in the total.
    pub host_checkpoint_bytes: u64,
    /// Optional activations that fit into the memory, for the trainer (`sieve_train::Hardware::keeping`).
    pub keeping: Keeping,
    /// The program and its libraries: an assumption.
    pub program_bytes: u64,
    /// On a GPU, what the allocator's pages hold beyond the tensors at the fullest point of two steps.
    pub page_bytes: u64,
    /// Memory of all parts, in bytes.
    pub total_bytes: u64,
    /// Name of the point of the step, or of the command, at which memory peaks.
    pub moment: &'static str,
    /// Activations of all blocks by `activation_checkpoint.mode`, to choose with.
    pub activations_by_mode: Vec<(&'static str, u64)>,
    /// Free memory in bytes; 0 if unknown.
    pub available_bytes: u64,
    /// All memory of the GPU in bytes, of which its allocator's pages are parts; `None` for a CPU.
    #[serde(skip)]
    pub(crate) card_bytes: Option<u64>,
    /// Whether the run fits into the free memory.
    pub verdict: MemoryVerdict,
    /// If it may not fit: settings with which it fits surely: with 3 % of the free memory left on a GPU, 10 % on a
    /// CPU.
    pub would_fit: Vec<FittingSetting>,
}

impl MemoryPlan {
    /// (name, bytes) of every part that is not 0, in the order in which a run allocates them.
    pub fn parts(&self) -> Vec<(&'static str, u64)> {
        let parts = [
            ("program", self.program_bytes),
            ("parameters", self.peak.parameter_bytes),
            ("rest of f32 masters", self.peak.master_bytes),
            ("moments", self.peak.moment_bytes),
            ("gathered weights", self.peak.gathered_bytes),
            ("caches", self.peak.cache_bytes),
            ("activations", self.peak.activation_bytes),
            ("workspace", self.peak.workspace_bytes),
            ("gradients", self.peak.gradient_bytes),
            ("checkpoint", self.peak.checkpoint_bytes),
            ("gaps in the allocator's pages", self.page_bytes),
        ];
        parts.into_iter().filter(|(_, bytes)| *bytes > 0).collect()
    }

    /// Whether the run would fit but for its activations and workspace, which grow with the rows.
    pub fn fits_without_rows(&self) -> bool {
        self.leaves_percent(10, self.total_bytes - self.peak.activation_bytes - self.peak.workspace_bytes)
    }

    /// Whether the GPU has room beside the step for a copy of what a checkpoint holds, and a quarter more for training
    /// itself: then [`host_checkpoint_bytes`](Self::host_checkpoint_bytes) are not taken.
    pub fn copies_on_device(&self) -> bool {
        let copy = self.host_checkpoint_bytes;
        self.available_bytes.saturating_sub(self.total_bytes) > copy + copy / 4
    }

    /// The plan of a run on a GPU with what its allocator's pages hold beyond the tensors. `held` runs the step in the
    /// allocator of a GPU of so many bytes.
    pub(super) fn with_pages(self, held: impl FnOnce(u64) -> Option<Held>) -> Self {
        let Some(found) = self.card_bytes.and_then(held) else {
            return self;
        };
        // The plan's tensors are counted at one point of a step, the allocator's one by one: the larger sum counts.
        let gaps = found.held_bytes.saturating_sub(found.tensor_bytes);
        let page_bytes = gaps.max((self.program_bytes + found.held_bytes).saturating_sub(self.total_bytes));
        let total_bytes = self.total_bytes + page_bytes;
        Self { page_bytes, total_bytes, verdict: MemoryVerdict::of(total_bytes, self.available_bytes), ..self }
    }

    /// Whether the run fits also if the plan is off by as much as it has been: on a GPU, whose pages are counted, by 3
    /// %.
    pub(super) fn fits_surely(&self) -> bool {
        let percent = if self.card_bytes.is_some() { 3 } else { 10 };
        self.leaves_percent(percent, self.total_bytes)
    }

    /// Whether so many bytes leave this percentage of the free memory.
    fn leaves_percent(&self, percent: u64, bytes: u64) -> bool {
        bytes <= self.available_bytes / 100 * (100 - percent)
    }
}

/// Memory at one point of a training step or of another command, by part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryParts {
    /// Parameters in the type that the layers compute in; with ZeRO-3 this rank's shard of them.
    pub parameter_bytes: u64,
    /// Bits of the f32 master weights that the parameters lack; with several ranks also a copy of this rank's shard of
    /// the parameters. 0 for f32 parameters in one process.
    pub master_bytes: u64,
    /// Bytes of the optimizer's moments, f32.
    pub moment_bytes: u64,
    /// With ZeRO-3, the weights of segments that are whole at this point.
    pub gathered_bytes: u64,
    /// KV caches of decoded sequences; 0 in training.
    pub cache_bytes: u64,
    /// Bytes of the parameters' gradients, f32.
    pub gradient_bytes: u64,
    /// Bytes of activations, with the recipe's activation checkpointing.
    pub activation_bytes: u64,
    /// Bytes of temporary tensors.
    pub workspace_bytes: u64,
    /// A checkpoint being written, on a CPU.
    pub checkpoint_bytes: u64,
}

impl MemoryParts {
    /// Bytes of all parts, without those of the program itself.
    pub(super) fn total(&self) -> u64 {
        let weights = self.parameter_bytes + self.master_bytes + self.moment_bytes + self.gathered_bytes;
        weights
            + self.cache_bytes
            + self.gradient_bytes
            + self.activation_bytes
            + self.workspace_bytes
            + self.checkpoint_bytes
    }

    /// The plan of a process, one of `ranks`, whose peak has these parts; `moment` names the time of the peak.
    pub(super) fn plan(self, moment: &'static str, target: &Target, ranks: usize) -> MemoryPlan {
        let program_bytes = match target {
            Target::Cpu { .. } => CPU_PROGRAM_BYTES,
            Target::Gpu(_) if ranks > 1 => GPU_PROGRAM_BYTES + NCCL_BYTES,
            Target::Gpu(_) => GPU_PROGRAM_BYTES,
        };
        let total_bytes = program_bytes + self.total();
        let available_bytes = target.memory_bytes();
        MemoryPlan {
            peak: self,
            host_checkpoint_bytes: 0,
            keeping: Keeping::NOTHING,
            program_bytes,
            page_bytes: 0,
            total_bytes,
            moment,
            activations_by_mode: Vec::new(),
            available_bytes,
            card_bytes: match target {
                Target::Cpu { .. } => None,
                Target::Gpu(gpu) => Some(gpu.total_memory_bytes),
            },
            verdict: MemoryVerdict::of(total_bytes, available_bytes),
            would_fit: Vec::new(),
        }
    }
}

/// Bytes of tensors at the fullest point of two steps, and of the memory that the allocator has at its fullest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) tensor_bytes: u64,
    pub(crate) held_bytes: u64,
}

/// A change of the recipe, and the memory with it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FittingSetting {
    /// The change in the form of `--set`. Several are separated by a space.
    pub setting: String,
    /// Bytes that the run needs with this setting.
    pub total_bytes: u64,
}
