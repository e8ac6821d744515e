//! The kernels around attention, which every model launches: norms, rotary positions, SwiGLU, loss, optimizer,
//! embedding.
//!
//! Most do not depend on a model's sizes; heads of 64 and 128 columns are the usual ones.
use super::NeededKernels;
use crate::runtime::source_kernel::SourceKernel;
use crate::step::adamw::{Master, adamw_kernel};
use crate::step::column_sums::column_sums_kernel;
use crate::step::cross_entropy::cross_entropy_kernel;
use crate::step::embedding_backward::{
    embedding_backward_kernel, embedding_carry_kernel, embedding_order_kernel,
};
use crate::step::embedding_forward::embedding_forward_kernel;
use crate::step::fill_zero::fill_zero_kernel;
use crate::step::fp8_quantise::{Fp8Format, fp8_amax_kernel, fp8_quantise_kernel};
use crate::step::qk_norm_rope_backward::qk_norm_rope_backward_kernel;
use crate::step::qk_norm_rope_forward::{Reuse, qk_norm_rope_forward_kernel};
use crate::step::residual_add::residual_add_kernel;
use crate::step::rms_norm_backward::{
    rms_norm_backward_kernel, rms_norm_backward_with_output_kernel,
};
use crate::step::rms_norm_forward::{NormResidual, rms_norm_forward_kernel};
use crate::step::scale::scale_kernel;
use crate::step::split_master::{Direction, split_master_kernel};
use crate::step::sum_of_squares::{SumResult, Term, finish_sum_kernel, sum_partials_kernel};
use crate::step::swiglu_backward::{swiglu_backward_kernel, swiglu_backward_with_output_kernel};
use crate::step::swiglu_forward::swiglu_forward_kernel;

impl NeededKernels {
    /// Those of every model's step but for attention, as far as an architecture can run them.
    pub fn step(arch: &str) -> Vec<SourceKernel> {
        let mut kernels = vec![
            column_sums_kernel(),
            cross_entropy_kernel(true, true),
            cross_entropy_kernel(false, false),
            embedding_forward_kernel(),
            embedding_order_kernel(),
            embedding_backward_kernel(),
            embedding_carry_kernel(),
            sum_partials_kernel(Term::Square, false),
            sum_partials_kernel(Term::Value, false),
            finish_sum_kernel(SumResult::Total),
            finish_sum_kernel(SumResult::ClippedNorm),
            adamw_kernel(Master::Alone),
            adamw_kernel(Master::BesideLeaf),
            adamw_kernel(Master::Split),
            split_master_kernel(Direction::Split),
            split_master_kernel(Direction::Join),
            residual_add_kernel(true, 8),
            residual_add_kernel(false, 4),
            scale_kernel(true, 8),
            scale_kernel(false, 4),
            fill_zero_kernel(),
        ];
        // Eight-bit floats come with compute capability 8.9.
        if !["sm_80", "sm_86"].contains(&arch) {
            kernels.extend([
                fp8_amax_kernel(),
                fp8_quantise_kernel(Fp8Format::E4m3),
                fp8_quantise_kernel(Fp8Format::E5m2),
            ]);
        }
        for (is_bf16, vector) in [(true, 8), (false, 4)] {
            kernels.push(swiglu_forward_kernel(is_bf16, vector));
            kernels.push(swiglu_backward_kernel(is_bf16, vector));
            kernels.push(swiglu_backward_with_output_kernel(is_bf16, vector));
        }
        for residual in [NormResidual::None, NormResidual::Added] {
            for warps_per_row in [1, 4] {
                kernels.push(rms_norm_forward_kernel(residual, warps_per_row));
            }
            for warps_per_row in [2, 4, 8] {
                kernels.push(rms_norm_backward_kernel(residual, warps_per_row));
            }
        }
        for warps_per_row in [2, 4, 8] {
            kernels.push(rms_norm_backward_with_output_kernel(warps_per_row));
        }
        for head_dim in [64, 128] {
            kernels.push(qk_norm_rope_forward_kernel(head_dim, Reuse::Copy));
            kernels.push(qk_norm_rope_backward_kernel(head_dim, Reuse::Copy));
            kernels.push(qk_norm_rope_backward_kernel(head_dim, Reuse::InPlace));
        }
        kernels
    }
}
