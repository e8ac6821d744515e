//! Sieve's CUDA kernels, with a safe function to launch each. The crate depends on neither Burn nor CubeCL.
//!
//! The sources under `kernels/` are embedded in this crate as text, specialised by `#define`s, and compiled by NVRTC
//! without headers of the CUDA toolkit, at first use or ahead of time ([`ahead_of_time`]). The trait [`Memory`] stands
//! for a GPU: sieve-kernels implements it with Burn's allocator and stream, and [`Recorder`] writes launches down.
//!
//! Each family of launches has a folder: `attention`, `dma`, `mla`, `nsa`, `select`, `step`. `runtime` has what
//! every launch uses: kernel texts, tensors, machine code, records. `specialisations` lists what is compiled ahead
//! of time. Public names are listed here and in `step.rs`.

mod error;
mod runtime;

mod attention;
mod dma;
mod mla;
mod nsa;
mod select;
pub mod step;

mod specialisations;

pub use dma::oracle;
pub use runtime::ahead_of_time;

pub use attention::TileLists;
pub use attention::backward::AttentionGradients;
pub use attention::decode::{DecodeStep, KvCache, TokenRotation};
pub use attention::decode_scratch::{DecodeScratch, WARP_KEYS};
pub use attention::far::sink_sum_bytes;
pub use attention::forward::AttentionResult;
pub use attention::heads::{HEAD_DIM_STEP, Heads, MAX_HEAD_DIM, Qkv, supports_head_dim};
pub use attention::hopper_tiling::KernelFamily;
pub use attention::query_shares::key_part_bytes;
pub use attention::sparse_forward::SparseKeyReads;
pub use attention::tiling::KeySource;
pub use dma::decode::DmaSlots;
pub use dma::halo_keys::{dma_halo_keys_backward, dma_halo_keys_forward, dma_last_kept};
pub use dma::lists::KeyLists;
pub use dma::ordered::{AfterCache, MOST_ORDERED, TokenKeyLists};
pub use dma::scores::{PositionOrigin, Recency, ScoreBias};
pub use dma::scores_backward::ScoresBackward;
pub use dma::select::{Selection, dma_select};
pub use error::{CudaVersion, KernelError};
pub use mla::decode::{LatentKeys, LatentToken, mla_decode};
pub use mla::pack::{MlaNorm, MlaPack, MlaPackGradients};
pub use nsa::{
    AttendedBlocks, BlocksWithLocal, ChoiceLists, IndexGradient, IndexedToken, NsaToken, PackedGradient, PooledStep,
    SelectedAttention, SelectedBlocks, choose_by_scores, nsa_blocks, nsa_blocks_backward, nsa_gates,
    nsa_gates_backward, nsa_mean_pool, nsa_mean_pool_backward, require_chosen_decode,
};
pub use runtime::checks::{require_non_empty, uniform_rows};
pub use runtime::compiled::{DeviceLaunch, LoadedKernel, on_device};
pub use runtime::cubins::Cubins;
pub use runtime::cuda_tensor::{CudaTensor, Fill, Memory};
pub use runtime::dtype::DType;
pub use runtime::hardware::Hardware;
pub use runtime::layout::contiguous_strides;
pub use runtime::map_layout::MapLayout;
pub use runtime::operands::operand;
pub use runtime::recording::{BufferView, Launch, MapData, Recorder, Step, recorded_at};
pub use runtime::source::KernelText;
pub use runtime::source_kernel::{LaunchRequest, SourceKernel, TileMap};
pub use select::{Amount, KeptKeys, LongChoice, SelectorStep};
pub use sieve_core::{Arrivals, AttentionShape, KernelFamilies, KernelPolicy, KeyOrder, SumOrder};
pub use specialisations::{AttentionNeeds, NeededKernels, NeededKeys, StepSizes};
