//! CPU kernels on plain slices: attention under one mask form, norms, loss, optimizer.
//!
//! Everything is f32 and row-major. Each function splits its work by sizes alone and adds in a fixed order, so a result
//! is bit-identical from run to run and does not depend on the number of threads.
//!
//! Slices of the wrong length and impossible sizes are programming errors and panic with the name of the operand; the
//! callers check what a user can get wrong.

pub mod adamw;
pub mod attention;
pub mod embedding;
pub mod expire;
pub mod gemm;
pub mod linear_cross_entropy;
pub mod qk_norm_rope;
pub mod reduce;
pub mod rms_norm;
mod simd;
pub mod swiglu;
#[cfg(test)]
mod test_data;

pub use adamw::{AdamWStep, adamw_step};
pub use attention::decode::{DecodeShape, decode_attention};
pub use attention::{AttentionShape, Documents, Mask, attention_backward, attention_forward};
pub use embedding::{embedding_backward, embedding_forward};
pub use expire::{MaskStatistics, dma_expire, dma_expire_by_threshold, mask_statistics};
pub use gemm::{Matrix, MatrixMut, Threads, matmul};
pub use linear_cross_entropy::{
    CrossEntropy, linear_cross_entropy, linear_cross_entropy_per_row,
    linear_cross_entropy_with_grad,
};
pub use qk_norm_rope::{QkNormRope, qk_norm_rope_backward, qk_norm_rope_forward};
pub use reduce::sum_of_squares;
pub use rms_norm::{rms_norm_backward, rms_norm_forward};
pub use swiglu::{swiglu_backward, swiglu_forward};
