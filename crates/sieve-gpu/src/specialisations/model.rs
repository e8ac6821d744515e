//! The kernels that a model launches beside its attention, those of selectors, and specialisations that only checks
//! launch.
use super::NeededKernels;
use super::calls::{Calls, dense, dma, latent, masked};
use crate::attention::AttentionShape;
use crate::runtime::{DType, KernelFamilies, SumOrder};
use crate::step;

/// Sizes of a model that decide which kernels it launches beside attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSizes {
    /// Columns of the residual stream.
    pub d_model: usize,
    /// Columns of the feed-forward blocks.
    pub d_ff: usize,
    /// Columns of a head that is normed and rotated by itself; `None` in latent attention.
    pub rotated_head_dim: Option<usize>,
}

/// The kernels that the calls of `record` launch on an architecture, by the portable family.
fn of_portable_family(arch: &str, record: impl FnOnce(&mut Calls)) -> NeededKernels {
    let mut calls = Calls::on(arch, KernelFamilies::Portable);
    record(&mut calls);
    calls.into_needed()
}

impl NeededKernels {
    /// The kernels of a training step except attention, and of decoding one token.
    pub fn step(arch: &str, sizes: StepSizes) -> Self {
        Self::step_of(arch, &[sizes], &[1])
    }

    /// The kernels of these models' passes over `num_tokens` tokens, for each number given: a training step's, or as
    /// many tokens decoded at once.
    pub(super) fn step_of(arch: &str, models: &[StepSizes], num_tokens: &[usize]) -> Self {
        of_portable_family(arch, |calls| {
            step::call_with_any_width(calls);
            for sizes in models {
                step::call_on_residual_stream(calls, sizes.d_model, num_tokens);
                step::call_swiglu(calls, sizes.d_ff);
                step::call_swiglu_for_fp8(calls, sizes.d_ff);
                if let Some(head_dim) = sizes.rotated_head_dim {
                    step::call_rotation(calls, head_dim);
                }
            }
        })
    }

    /// Specialisations that no model of usual widths launches: for rows that are not whole 16-byte words, for heads of
    /// these widths, and for DMA's scores with these numbers of KV heads.
    pub fn step_rarely(arch: &str, head_dims: &[usize], kv_heads: &[usize]) -> Self {
        of_portable_family(arch, |calls| {
            let (odd, usual) = (7, 128);
            step::call_swiglu(calls, odd);
            for (width, dtype) in [(odd, DType::BF16), (odd, DType::F32), (usual, DType::F32)] {
                dense::sinks(calls, width, dtype);
            }
            head_dims.iter().for_each(|&head_dim| step::call_rotation(calls, head_dim));
            for &kv_heads in kv_heads {
                dma::scores(calls, &AttentionShape::new(1, 1, [kv_heads; 2], [64; 2]), &[]);
            }
        })
    }

    /// The kernels that rank DMA's keys with these slopes, one for each KV head.
    pub fn dma_ranks(arch: &str, head_dim: usize, slopes: &[f32]) -> Self {
        let shape = AttentionShape::new(1, 1, [slopes.len(); 2], [head_dim; 2]);
        of_portable_family(arch, |calls| dma::scores(calls, &shape, slopes))
    }

    /// The packing kernels of latent attention, forward and backward, for heads of `[head_dim, rope_dim]` columns
    /// without and with rotation.
    pub fn mla_pack(arch: &str, widths: [usize; 2], has_norm: bool) -> Self {
        of_portable_family(arch, |calls| latent::packing(calls, widths, has_norm))
    }

    /// The kernels that decode over latents of `rank` columns, for heads of `[head_dim, rope_dim]` columns without and
    /// with rotation.
    pub fn mla_decode(arch: &str, rank: usize, widths: [usize; 2], has_norm: bool) -> Self {
        of_portable_family(arch, |calls| latent::decoding(calls, rank, widths, has_norm))
    }

    /// The kernels of selectors for heads of these widths, and of the dense attention that their outputs are compared
    /// with. `probed_blocks`: how many keys the blocks have that probes (queries with dense attention) score.
    pub fn sparse(arch: &str, head_dims: &[usize], probed_blocks: &[usize]) -> Self {
        Calls::of_each_family(arch, |calls| {
            for &head_dim in head_dims {
                // Only the widths decide which kernels these are.
                let shape = AttentionShape::new(1, 1, [1, 1], [head_dim; 2]);
                masked::attention(calls, &shape, probed_blocks);
                dense::forward(calls, &shape);
            }
        })
    }

    /// The kernels that compute gradients under masks of tiles, for heads of these widths, in both orders of sums.
    pub fn sparse_gradients(arch: &str, head_dims: &[usize]) -> Self {
        Calls::of_each_family(arch, |calls| {
            for &head_dim in head_dims {
                let shape = AttentionShape::new(1, 1, [1, 1], [head_dim; 2]);
                for sums in [SumOrder::Any, SumOrder::Fixed] {
                    masked::training(calls, &shape, sums);
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::SourceKernel;
    use std::collections::BTreeSet;

    const MODEL: StepSizes = StepSizes { d_model: 1024, d_ff: 3072, rotated_head_dim: Some(128) };

    fn names(needed: &NeededKernels) -> BTreeSet<&'static str> {
        needed.kernels.iter().map(SourceKernel::name).collect()
    }

    #[test]
    fn fp8_is_needed_where_the_device_has_it() {
        for (arch, has_fp8) in [("sm_86", false), ("sm_89", true)] {
            let needed = NeededKernels::step(arch, MODEL);
            assert_eq!(needed.refused, [], "{arch}");
            assert_eq!(names(&needed).contains("fp8_quantise"), has_fp8, "{arch}");
        }
    }

    #[test]
    fn the_widths_of_a_model_decide_its_kernels() {
        let warps = |d_model| {
            let needed = NeededKernels::step("sm_90a", StepSizes { d_model, ..MODEL });
            let mut norms = needed.kernels.into_iter().filter(|kernel| kernel.name() == "rms_norm_backward");
            let (first, rest) = (norms.next().expect("a norm"), norms.count());
            // The gradient alone, with a residual's gradient added, and with the norm's output recomputed too.
            assert_eq!(rest, 2, "{d_model}");
            first.defines().iter().find(|(name, _)| *name == "WARPS_PER_ROW").map(|(_, warps)| warps.clone())
        };
        assert_eq!([256, 1024, 5120].map(warps), ["1", "2", "16"].map(|warps| Some(warps.to_owned())));
        let heads = |rotated_head_dim| {
            let needed = NeededKernels::step("sm_80", StepSizes { rotated_head_dim, ..MODEL });
            names(&needed).contains("qk_norm_rope_forward")
        };
        assert!(heads(Some(96)) && !heads(None));
    }

    #[test]
    fn latents_need_a_kernel_with_lengths_and_one_without() {
        let needed = NeededKernels::mla_decode("sm_86", 512, [128, 64], true);
        assert_eq!(needed.refused, []);
        let with_lengths = |kernel: &&SourceKernel| kernel.defines().iter().any(|(name, _)| *name == "LENGTHS");
        let decoding = needed.kernels.iter().filter(|kernel| kernel.name() == "mla_decode");
        assert_eq!((decoding.clone().count(), decoding.filter(with_lengths).count()), (2, 1));
        assert!(names(&needed).is_superset(&["mla_decode_join", "mla_join_token", "mla_values"].into()));
    }
}
