//! Sieve's CUDA kernels, and one safe function to launch each.
//!
//! The kernels are text under `kernels/`, built into this crate, specialised by `#define`s and compiled by NVRTC at
//! first use (or ahead of time, see [`ahead_of_time`]). They run on Burn's own stream, in order with Burn's operations.
//!
//! Start with [`CudaReport::probe`], which says in one sentence what is missing, then [`KernelCache::open`] and
//! [`KernelCache::init_runtime`], all before the first CUDA tensor of the process. One thread per process touches
//! device tensors.

mod error;
mod runtime;

mod attention;
mod cublaslt;
mod dma;
mod mla;
mod nsa;
mod select;
pub mod step;

mod specialisations;

pub use dma::oracle;
pub use runtime::ahead_of_time;

pub use attention::backward::AttentionGradients;
pub use attention::backward_tiling::SumOrder;
pub use attention::decode::{DecodeStep, KvCache};
pub use attention::decode_scratch::DecodeScratch;
pub use attention::forward::AttentionResult;
pub use attention::heads::{AttentionShape, Qkv};
pub use attention::hopper_tiling::KernelFamily;
pub use attention::sparse_forward::SparseKeyReads;
pub use attention::tiling::KeySource;
pub use cublaslt::{Cublaslt, MatmulOutput, Product, matmul};
pub use dma::border_keys::{dma_border_keys_backward, dma_border_keys_forward, dma_last_kept};
pub use dma::decode::DmaSlots;
pub use dma::lists::KeyLists;
pub use dma::scores::ScoreBias;
pub use dma::scores_backward::ScoresBackward;
pub use dma::select::{Selection, dma_select};
pub use error::{CudaVersion, KernelError};
pub use mla::decode::{LatentKeys, mla_decode};
pub use mla::pack::{MlaNorm, MlaPack, MlaPackGradients};
pub use nsa::{ChoiceLists, nsa_blocks_backward, nsa_gates, nsa_gates_backward, nsa_mean_pool_backward};
pub use runtime::cache::KernelCache;
pub use runtime::cubins::Cubins;
pub use runtime::cuda_tensor::{CudaPrimitive, CudaTensor};
pub use runtime::host_copy::{HostCopy, HostReader};
pub use runtime::kernel_trace::{KernelTrace, TraceResult};
pub use runtime::launch::LaunchCounts;
pub use runtime::layout::contiguous_strides;
pub use runtime::memory_watch::MemoryPeak;
pub use runtime::nccl::{NcclGroup, NcclPiece, NcclWatch, NcclWork};
pub use runtime::probe::{CudaReport, DeviceReport};
pub use runtime::recording::{Hardware, Launch, Recorder, Step};
pub use runtime::source::KernelText;
pub use runtime::source_kernel::SourceKernel;
pub use select::{KeptKeys, LongChoice};
pub use specialisations::{AttentionNeeds, NeededKernels, NeededKeys};
