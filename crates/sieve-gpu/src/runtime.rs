//! From a kernel's text to a finished launch: sources, tensors, compilation, recorded launches. No file here names a
//! particular kernel.
pub mod ahead_of_time;
pub(crate) mod checks;
pub(crate) mod compiled;
pub(crate) mod cubins;
pub(crate) mod cuda_tensor;
pub(crate) mod dtype;
pub(crate) mod hardware;
pub(crate) mod layout;
pub(crate) mod map_layout;
pub(crate) mod operands;
pub(crate) mod params;
#[cfg(test)]
mod params_text;
pub(crate) mod recording;
pub(crate) mod source;
pub(crate) mod source_kernel;

pub(crate) use ahead_of_time::compile_with_nvrtc;
pub(crate) use checks::{require, require_float, require_non_empty, uniform_rows};
pub(crate) use cubins::Cubins;
pub(crate) use cuda_tensor::{CudaTensor, Fill, Memory};
pub(crate) use dtype::DType;
pub(crate) use hardware::Hardware;
pub(crate) use layout::{contiguous_strides, ranges, required_elements, row_layout, strides_are_contiguous};
pub(crate) use map_layout::MapLayout;
pub(crate) use operands::{operand, operands};
pub(crate) use params::{
    AdamwParams, AttentionParams, NsaImportanceParams, NsaPlaceParams, NsaSelectedAttentionForwardParams, Params,
    TokenParams, params, words_for,
};
pub(crate) use sieve_core::{Arrivals, KernelFamilies, KernelPolicy, SumOrder};
pub(crate) use source::{KernelText, assemble_file, assemble_text};
pub(crate) use source_kernel::{LaunchRequest, SourceKernel, TileMap};
