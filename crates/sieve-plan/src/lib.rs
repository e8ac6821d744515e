//! Plans a run from its recipe: parameters, FLOPs, memory, KV cache, disk space and time.
//!
//! Parameters and FLOPs are counted exactly. Memory is the sum of the tensors at a training step's peak, on a GPU with
//! what its allocator holds beyond them. Time is an estimate.
//!
//! sieve-kernels and sieve-cpu say which shapes a kernel takes and what it allocates: these rules are beside the
//! launches.

mod plan;

mod cache;
mod context_parallel;
mod disk;
mod measured;
mod memory;
mod needed_kernels;
mod ops;
mod ranks;
mod suggest;
mod target;
mod time;

pub use cache::{CachePlan, cache_on, cache_plan};
pub use disk::DiskPlan;
pub use memory::{
    FittingSetting, InferenceSize, MemoryParts, MemoryPlan, MemoryVerdict, activation_bytes_per_token, import_memory,
    inference_memory, memory_plan, settings_that_save,
};
pub use needed_kernels::needed_kernels;
pub use ops::{OpPlan, check_gpu_attention, gpu_attention_gap, gpu_training_gap, op_plans};
pub use plan::{ASSUMED_MFU, ContextParallelPlan, Plan, StagePlan, ZeroPlan, plan, plan_of_ranks};
pub use ranks::{Ranks, RanksPlan};
pub use suggest::Suggestion;
pub use target::Target;
