//! Code that the ops of all families share on a device; it knows no op.
pub(crate) mod autodiff;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod flex;
#[cfg(feature = "cuda")]
pub(crate) mod kernel_calls;
pub(crate) mod paths;

#[cfg(feature = "cuda")]
pub(crate) use cuda::{CudaPrimitive, cast, kernel_of, tensors, writable};
pub(crate) use flex::{
    contiguous, floats, from_vec, ints, is_f32, last_dim, plain, plain_scores, row_behind, unless_f32, with_columns,
    write_block, zeros_like,
};
#[cfg(feature = "cuda")]
pub(crate) use kernel_calls::{kernel_on, kernel_or, kernel_or_refusal, kernel_or_scores};
pub(crate) use paths::scores;
