//! What a run will need, from its recipe alone: parameters, operations, memory, cache, time.
//!
//! Parameters and operations are counted exactly. Memory is counted from the tensors a training step holds at its
//! fullest, without the allocator's slack. Time is an estimate.
//!
//! Which shapes a kernel takes and what it allocates comes from the kernel's own crate: sieve-kernels and sieve-cpu
//! hold those rules beside the launches that keep them.

mod plan;

mod cache;
mod context_parallel;
mod disk;
mod memory;
mod ops;
mod ranks;
mod suggest;
mod time;

pub use cache::{CachePlan, cache_plan};
pub use disk::DiskPlan;
pub use memory::{
    FittingSetting, InferenceSize, MemoryPlan, MemoryVerdict, activation_bytes_per_token, import_memory,
    inference_memory, memory_plan,
};
pub use ops::{OpPlan, check_gpu_attention, gpu_attention_gap, gpu_training_gap, op_plans};
pub use plan::{ASSUMED_MFU, ContextParallelPlan, Plan, StagePlan, Target, ZeroPlan, plan, plan_of_ranks};
pub use ranks::{Ranks, RanksPlan};
pub use suggest::Suggestion;
