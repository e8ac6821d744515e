//! CPU kernels on plain slices: attention under one mask form, norms, loss, optimizer.
//!
//! Everything is row-major and f32, except that weights may be bf16, which some CPUs multiply by x rounded to bf16.
//! Each function splits its work by sizes alone and adds in a fixed order, so its results are bit-identical from run
//! to run and for any number of threads.
//!
//! ```
//! use sieve_cpu::{Documents, Mask, ScaledShape, attention_forward};
//!
//! // One row of 100 tokens, 4 query heads on 2 KV heads of width 32; each query sees the last 16 keys.
//! let shape = ScaledShape::new([1, 100], [4, 2], 32);
//! let qkv = vec![0.1; 100 * shape.token_len()];
//! let (start, end) = (vec![0; 100], vec![100; 100]);
//! let documents = Documents::new(&start, &end);
//! let (mut o, mut lse) = (vec![0.0; 100 * 4 * 32], vec![0.0; 4 * 100]);
//! attention_forward(shape, &qkv, documents, Mask::Window(16), &mut o, &mut lse);
//! assert!((o[0] - 0.1).abs() < 1e-6);
//! ```
//!
//! Slices of the wrong length and impossible sizes are programming errors: functions panic with the name of the
//! operand. Callers check what a user can get wrong.

pub mod activation;
pub mod adamw;
pub mod attention;
pub mod dma_scores;
pub mod draw;
pub mod embedding;
pub mod expire;
pub mod gemm;
pub mod linear;
pub mod linear_cross_entropy;
pub mod nsa;
pub mod qk_norm_rope;
pub mod reduce;
pub mod reference;
pub mod rms_norm;
mod simd;
pub mod softmax;
mod zeros;

pub use adamw::adamw;
pub use attention::decode::{DecodeBias, DecodeKeys, DecodeShape, attention_decode};
pub use attention::listed::{ListedAttention, ListedTile};
pub use attention::sinks::{join_sinks, sinks_backward};
pub use attention::{
    CachedRow, ChosenBlocks, Documents, Mask, ScaledShape, attention_backward, attention_forward, attention_from,
    row_behind_cache,
};
pub use dma_scores::{dma_scores_backward, dma_scores_forward};
pub use draw::{draw, draw_rows};
pub use embedding::{embedding_backward, embedding_forward};
pub use expire::{dma_select, extend_expire, rank_key};
pub use gemm::{Matrix, MatrixMut, Threads, matmul};
pub use linear::{Weight, linear};
pub use linear_cross_entropy::{
    CrossEntropy, linear_cross_entropy, linear_cross_entropy_with_gradients, token_loss, token_losses,
};
pub use nsa::NsaBlocks;
pub use qk_norm_rope::{QkNormRope, qk_norm_rope_backward, qk_norm_rope_forward, rope};
pub use reduce::sum_of_squares;
pub use rms_norm::{rms_norm_backward, rms_norm_forward};
pub use sieve_core::AttentionShape;
pub use softmax::{exp_row, first_of_largest, max_of_row};
pub use zeros::zeros;
