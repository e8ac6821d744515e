//! Launches of a training step except attention: embedding, norms, rotary position embedding, SwiGLU, loss, optimizer,
//! and sums over tensors. Each has a line here for its file, its public names, and its shipped specialisations.
pub(crate) mod adamw;
pub(crate) mod column_sums;
pub(crate) mod cross_entropy;
pub(crate) mod embedding_backward;
pub(crate) mod embedding_forward;
pub(crate) mod fill_zero;
pub(crate) mod fp8_quantise;
pub(crate) mod likeliest;
pub(crate) mod matrix_vector;
pub(crate) mod qk_norm_rope_backward;
pub(crate) mod qk_norm_rope_forward;
pub(crate) mod residual_add;
pub(crate) mod rms_norm_backward;
pub(crate) mod rms_norm_forward;
pub(crate) mod rows;
pub(crate) mod scale;
pub(crate) mod split_master;
pub(crate) mod sum_of_squares;
pub(crate) mod swiglu_backward;
pub(crate) mod swiglu_forward;

pub use adamw::AdamwTensors;
pub use cross_entropy::{LogitRows, cross_entropy, padded_width};
pub use embedding_backward::embedding_backward;
pub use embedding_forward::embedding_forward;
pub use fill_zero::fill_zero;
pub use fp8_quantise::{Fp8Matrix, Fp8Pair, fp8_quantise, require_fp8};
pub use likeliest::likeliest;
pub use matrix_vector::{Epilogue, MAX_VECTORS, Vectors, matrix_vector};
pub use qk_norm_rope_forward::{QkNormRope, Reuse, rope};
pub use residual_add::residual_add;
pub use rms_norm_backward::{rms_norm_backward, rms_norm_backward_with_output};
pub use rms_norm_forward::rms_norm_forward;
pub use rows::Rows;
pub use scale::scale;
pub use sieve_core::Fp8Format;
pub use split_master::{join_master, split_master};
pub use sum_of_squares::{FixedSum, Term};
pub use swiglu_backward::{swiglu_backward, swiglu_backward_with_amax, swiglu_backward_with_output};
pub use swiglu_forward::{swiglu_forward, swiglu_forward_with_amax};

pub(crate) use column_sums::{COLUMN_SUMS, column_sums};
pub(crate) use fill_zero::{FILL_ZERO, empty_zero};
pub(crate) use fp8_quantise::{AMAX_PARTIALS, with_amax};
pub(crate) use rows::{WORD_ELEMENTS, require_alignment, require_words, vector_width, with_width};

use crate::attention::attention_sinks_kernels;
use crate::dma::{dma_scores_backward_kernel, dma_scores_kernel};
use crate::runtime::SourceKernel;
use crate::specialisations::NeededKernels;
use crate::step::matrix_vector::Form;
use crate::step::rms_norm_backward::NormResidual;

impl NeededKernels {
    /// The kernels of a training step except attention that an architecture can run, for heads of 64 and 128 columns.
    /// Most do not depend on a model's sizes.
    pub fn step(arch: &str) -> Vec<SourceKernel> {
        let (has_gradient, is_bf16, root) = (true, true, true);
        // Elements of a 16-byte access.
        let (bf16_vector, f32_vector) = (8, 4);
        let mut kernels = vec![
            column_sums::COLUMN_SUMS,
            cross_entropy::cross_entropy_kernel(has_gradient),
            cross_entropy::cross_entropy_kernel(!has_gradient),
            embedding_forward::EMBEDDING_FORWARD,
            likeliest::LIKELIEST,
            embedding_backward::EMBEDDING_ORDER,
            embedding_backward::EMBEDDING_BACKWARD,
            embedding_backward::EMBEDDING_CARRY,
            sum_of_squares::sum_partials_kernel(Term::Square, !is_bf16),
            sum_of_squares::sum_partials_kernel(Term::Value, !is_bf16),
            sum_of_squares::finish_sum_kernel(!root),
            sum_of_squares::finish_sum_kernel(root),
            adamw::adamw_kernel(adamw::Master::Alone),
            adamw::adamw_kernel(adamw::Master::BesideLeaf),
            adamw::adamw_kernel(adamw::Master::Split),
            split_master::split_master_kernel(split_master::Direction::Split),
            split_master::split_master_kernel(split_master::Direction::Join),
            residual_add::residual_add_kernel(bf16_vector),
            scale::scale_kernel(is_bf16, bf16_vector),
            scale::scale_kernel(!is_bf16, f32_vector),
            fill_zero::FILL_ZERO,
        ];
        // fp8 needs compute capability 8.9; 8.0 and 8.6 lack it.
        if !["sm_80", "sm_86"].contains(&arch) {
            kernels.extend([
                fp8_quantise::FP8_AMAX,
                fp8_quantise::fp8_quantise_kernel(Fp8Format::E4m3),
                fp8_quantise::fp8_quantise_kernel(Fp8Format::E5m2),
                fp8_quantise::with_amax(swiglu_forward::swiglu_forward_kernel(bf16_vector)),
                fp8_quantise::with_amax(swiglu_backward::swiglu_backward_kernel(bf16_vector)),
            ]);
        }
        kernels.extend(swiglu_kernels(bf16_vector));
        let warps_per_row = [1, 4];
        kernels.extend(warps_per_row.map(rms_norm_forward::rms_norm_forward_kernel));
        for warps_per_row in [2, 4, 8] {
            for residual in [NormResidual::None, NormResidual::Added, NormResidual::AddedWithOutput] {
                kernels.push(rms_norm_backward::rms_norm_backward_kernel(residual, warps_per_row));
            }
        }
        kernels.extend([64, 128].into_iter().flat_map(qk_norm_rope_kernels));
        let (plain, normed, rows) = (0, 1, 1);
        for warps_per_row in [1, 2, 4, 8] {
            for (input, output) in
                [(plain, Form::Stored), (plain, Form::Added), (normed, Form::Stored), (normed, Form::SwiGlu)]
            {
                kernels.push(matrix_vector::matrix_vector_kernel(input, output, rows, warps_per_row));
            }
        }
        kernels
    }

    /// Specialisations that no model of usual widths launches: for rows that are not whole 16-byte words, for heads of
    /// these widths, and for DMA's scores with these numbers of KV heads.
    pub fn step_rarely(head_dims: &[usize], kv_heads: &[usize]) -> Vec<SourceKernel> {
        let vector = 1;
        let mut kernels = swiglu_kernels(vector).to_vec();
        let (odd, usual) = (7, 128);
        for (width, are_bf16) in [(odd, true), (odd, false), (usual, false)] {
            kernels.extend(attention_sinks_kernels(width, are_bf16));
        }
        kernels.extend(head_dims.iter().copied().flat_map(qk_norm_rope_kernels));
        for &kv_heads in kv_heads {
            kernels.extend([dma_scores_kernel(kv_heads, 64, &[]), dma_scores_backward_kernel(kv_heads)]);
        }
        kernels
    }
}

fn swiglu_kernels(vector: usize) -> [SourceKernel; 3] {
    [
        swiglu_forward::swiglu_forward_kernel(vector),
        swiglu_backward::swiglu_backward_kernel(vector),
        swiglu_backward::swiglu_backward_with_output_kernel(vector),
    ]
}

fn qk_norm_rope_kernels(head_dim: usize) -> [SourceKernel; 4] {
    [
        qk_norm_rope_forward::qk_norm_rope_forward_kernel(head_dim),
        qk_norm_rope_forward::rope_kernel(head_dim),
        qk_norm_rope_backward::qk_norm_rope_backward_kernel(head_dim, Reuse::Copy),
        qk_norm_rope_backward::qk_norm_rope_backward_kernel(head_dim, Reuse::InPlace),
    ]
}
