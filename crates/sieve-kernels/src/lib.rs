//! Sieve's CUDA kernels, and one safe function to launch each.
//!
//! The kernels are text under `kernels/`, built into this crate, specialised by `#define`s and compiled by NVRTC at first
//! use (or ahead of time, see [`ahead_of_time`]). They run on Burn's own stream, in order with Burn's operations.
//!
//! Start with [`probe()`], which says in one sentence what is missing, then [`KernelCache::open`] and [`init_runtime`],
//! all before the first CUDA tensor of the process. One thread per process touches device tensors.

mod checks;
mod error;
mod layout;

mod cuda_tensor;
mod source;
mod source_kernel;

pub mod ahead_of_time;
mod cache;
mod cache_files;
mod probe;

pub mod oracle;

mod attention_backward_tiling;
mod attention_tiling;
mod heads;

mod attention_backward;
mod attention_decode;
mod attention_forward;
mod decode_scratch;
mod dma_attention_backward;
mod dma_attention_forward;
mod dma_decode;
mod dma_lists;
mod dma_scores;
mod dma_select;

mod cublaslt;
mod fill_zero;
mod needed;
mod shipped;
mod swiglu_backward;
mod swiglu_forward;

pub use attention_backward::{
    AttentionGradients, attention_backward, attention_backward_convert_kernel,
    attention_backward_kernel, attention_backward_prepare_kernel, attention_backward_query_kernel,
    attention_row_sums_kernel,
};
pub use attention_backward_tiling::{
    BackwardTiling, GradientSet, QueryPass, QueryTiling, SumOrder,
};
pub use attention_decode::{
    DecodeStep, KvCache, attention_decode, attention_decode_cached, attention_decode_kernel,
};
pub use attention_forward::{AttentionResult, attention_forward, attention_forward_kernel};
pub use attention_tiling::{ForwardTiling, KeySource};
pub use cache::{KernelCache, init_runtime};
pub use cublaslt::{
    AlgorithmSearch, MatmulOutput, Product, matmul, matmul_is_inline, matmul_nn, matmul_nt,
    matmul_tn, require_cublaslt, set_algorithm_search,
};
pub use cuda_tensor::{CudaPrimitive, CudaTensor};
pub use decode_scratch::DecodeScratch;
pub use dma_attention_backward::{
    dma_attention_backward, dma_attention_backward_convert_kernel, dma_attention_backward_kernel,
    dma_attention_backward_query_kernel, dma_attention_row_sums_kernel,
};
pub use dma_attention_forward::{dma_attention_forward, dma_attention_forward_kernel};
pub use dma_decode::{DmaSlots, dma_decode, dma_decode_kernel};
pub use dma_lists::{
    KeyLists, TILE_QUERIES, dma_lists, dma_lists_kernel, dma_lists_prefix_kernel, list_capacity,
    selection_of_expire,
};
pub use dma_scores::{ScoreBias, Scores, dma_scores, dma_scores_kernel};
pub use dma_select::{Selection, dma_select, dma_select_kernels};
pub use error::{CudaVersion, KernelError};
pub use fill_zero::{fill_zero, fill_zero_kernel};
pub use heads::{AttentionShape, Heads, Qkv};
pub use layout::{RowLayout, contiguous_strides, row_layout, strides_are_contiguous};
pub use needed::{AttentionNeeds, NeededKernels, NeededKeys, needed_kernels, shared_bytes_of};
pub use probe::{CudaReport, DeviceReport, memory_bytes, probe};
pub use shipped::{shipped_kernels, shipped_kernels_for};
pub use source::{KernelText, kernel_file, kernel_files};
pub use source_kernel::SourceKernel;
pub use swiglu_backward::{swiglu_backward, swiglu_backward_kernel};
pub use swiglu_forward::{swiglu_forward, swiglu_forward_kernel};
