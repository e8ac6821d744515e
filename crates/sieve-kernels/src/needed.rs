//! The specialisations that one model's attention launches, for a build ahead of time.
use crate::attention::backward::{
    attention_backward_convert_kernel, attention_backward_kernel,
    attention_backward_prepare_kernel, attention_backward_query_kernel, attention_row_sums_kernel,
};
use crate::attention::backward_tiling::{BackwardTiling, QueryPass, QueryTiling, SumOrder};
use crate::attention::bias_base::bias_base_kernel;
use crate::attention::decode::attention_decode_kernel;
use crate::attention::forward::attention_forward_kernel;
use crate::attention::heads::AttentionShape;
use crate::attention::hopper_tiling::{
    HopperPass, HopperTiling, has_hopper_form, has_hopper_gradient,
    hopper_attention_backward_prepare_kernel, hopper_backward_kernel,
};
use crate::attention::tiling::{ForwardTiling, KeySource};
use crate::dma::attention_backward::{
    dma_attention_backward_convert_kernel, dma_attention_backward_kernel,
    dma_attention_backward_query_kernel, dma_attention_row_sums_kernel,
};
use crate::dma::attention_forward::dma_attention_forward_kernel;
use crate::dma::decode::dma_decode_kernel;
use crate::dma::lists::dma_lists_kernel;
use crate::dma::scores::{ScoreBias, dma_scores_kernel};
use crate::dma::select::dma_select_kernels;
use crate::error::KernelError;
use crate::nsa::nsa_kernels;
use crate::runtime::source_kernel::SourceKernel;
use crate::step::column_sums::column_sums_kernel;
use crate::step::fill_zero::fill_zero_kernel;

const NAME: &str = "needed_kernels";

/// The attention of a model, as far as it decides which kernels run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionNeeds {
    /// Widths and heads; batch and `seq_len` do not count.
    pub shape: AttentionShape,
    /// Dense and sliding-window attention run the same kernels; DMA has its own.
    pub keys: NeededKeys,
    /// The order of sums that training asks for.
    pub order: SumOrder,
}

/// How a model chooses its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NeededKeys {
    /// Neighbouring keys: all, or a window.
    Neighbours,
    /// DMA's choice; with the form of its bias when decoding.
    Chosen(ScoreBias),
    /// DMA where every key is kept: neighbours with a bias.
    AllBiased,
    /// NSA's compressed and selected branches; its window has [`Neighbours`](Self::Neighbours).
    Blocks,
}

/// Specialisations, and why others cannot be had on a device.
#[derive(Debug, Clone, Default)]
pub struct NeededKernels {
    /// What to compile.
    pub kernels: Vec<SourceKernel>,
    /// Kernels whose tiles do not fit the device's shared memory: calls of these take the reference path there.
    pub refused: Vec<KernelError>,
}

impl NeededKernels {
    /// Adds a kernel, or the reason why there is none.
    pub(crate) fn add(&mut self, kernel: Result<SourceKernel, KernelError>) {
        match kernel {
            Ok(kernel) => self.kernels.push(kernel),
            Err(error) => self.refused.push(error),
        }
    }

    /// Adds all of another list.
    pub fn extend(&mut self, other: Self) {
        self.kernels.extend(other.kernels);
        self.refused.extend(other.refused);
    }

    /// Keeps the first of equal kernels and of equal reasons.
    ///
    /// # Errors
    /// An unresolvable source.
    pub fn deduplicated(self) -> Result<Self, KernelError> {
        let mut keys = std::collections::HashSet::new();
        let mut kernels = Vec::new();
        for kernel in self.kernels {
            if keys.insert(kernel.cache_key()?) {
                kernels.push(kernel);
            }
        }
        let mut refused: Vec<KernelError> = Vec::new();
        for error in self.refused {
            if !refused.contains(&error) {
                refused.push(error);
            }
        }
        Ok(Self { kernels, refused })
    }
}

/// Shared memory that a block may have on an architecture, in bytes; `None` for one that the kernels are not made for.
pub fn shared_bytes_of(arch: &str) -> Option<usize> {
    let kib = match arch {
        "sm_80" => 163,
        "sm_86" | "sm_89" | "sm_120a" => 99,
        "sm_90a" | "sm_100a" => 227,
        _ => return None,
    };
    Some(kib * 1024)
}

/// What launches ask for when a model with this attention trains and decodes on a device of `arch`: forward, backward,
/// decoding; where the architecture has a family of its own, both that and the portable kernels. Nothing for an
/// architecture that the kernels are not made for.
pub fn needed_kernels(needs: &AttentionNeeds, arch: &str) -> NeededKernels {
    let Some(shared_bytes) = shared_bytes_of(arch) else {
        return NeededKernels::default();
    };
    let mut list = portable(needs, shared_bytes);
    if arch == "sm_90a" && has_hopper_form(&needs.shape, key_source(needs.keys)) {
        hopper(&mut list.kernels, needs);
    }
    list
}

fn key_source(keys: NeededKeys) -> KeySource {
    match keys {
        NeededKeys::Neighbours => KeySource::Dense,
        NeededKeys::AllBiased => KeySource::Biased,
        NeededKeys::Chosen(_) | NeededKeys::Blocks => KeySource::Gathered,
    }
}

fn hopper(kernels: &mut Vec<SourceKernel>, needs: &AttentionNeeds) {
    let (shape, source) = (&needs.shape, key_source(needs.keys));
    let fixed = source == KeySource::Gathered && needs.order == SumOrder::Fixed;
    // With a bias short rows take the form that keeps the lower bits of o, long ones make row sums.
    let passes: &[HopperPass] = match source {
        KeySource::Dense => &[HopperPass::Output],
        KeySource::Biased | KeySource::Gathered => &[
            HopperPass::Output,
            HopperPass::OutputAndRest,
            HopperPass::RowSums,
        ],
    };
    for pass in passes {
        kernels.push(HopperTiling::new(*pass, shape, source).kernel());
    }
    if needs.order == SumOrder::Fixed && has_hopper_gradient(shape, source) {
        kernels.push(HopperTiling::new(HopperPass::Gradient, shape, source).kernel());
    }
    if source != KeySource::Dense {
        kernels.push(hopper_attention_backward_prepare_kernel(shape.head_dim_v));
    }
    for set in BackwardTiling::launches(shape, needs.order) {
        kernels.push(hopper_backward_kernel(shape, source, set, fixed));
    }
}

fn portable(needs: &AttentionNeeds, shared_bytes: usize) -> NeededKernels {
    let AttentionShape {
        head_dim,
        head_dim_v,
        num_kv_heads,
        ..
    } = needs.shape;
    let mut list = NeededKernels::default();
    list.kernels.push(fill_zero_kernel());
    list.kernels
        .push(attention_backward_prepare_kernel(head_dim_v));
    match needs.keys {
        NeededKeys::Neighbours => {
            list.kernels
                .push(attention_decode_kernel(head_dim, head_dim_v, 0));
        }
        NeededKeys::AllBiased => {}
        NeededKeys::Blocks => {
            list.kernels.extend(nsa_kernels(head_dim));
            list.kernels.push(column_sums_kernel());
            list.kernels
                .push(dma_attention_backward_convert_kernel(head_dim));
        }
        NeededKeys::Chosen(bias) => {
            list.kernels.extend(dma_select_kernels());
            list.kernels.push(dma_lists_kernel());
            list.kernels.push(dma_scores_kernel(
                num_kv_heads,
                head_dim_v,
                ScoreBias::Linear,
            ));
            list.kernels
                .push(dma_decode_kernel(head_dim, head_dim_v, bias));
            for width in [head_dim, head_dim_v] {
                list.kernels
                    .push(dma_attention_backward_convert_kernel(width));
            }
        }
    }
    let source = key_source(needs.keys);
    if source != KeySource::Dense {
        list.kernels.push(bias_base_kernel(source));
    }
    let tiling = ForwardTiling::choose(NAME, &needs.shape, source, shared_bytes);
    list.add(tiling.map(|tiling| match source {
        KeySource::Gathered => dma_attention_forward_kernel(&needs.shape, &tiling),
        _ => attention_forward_kernel(&needs.shape, &tiling, source),
    }));
    backward(&mut list, needs, source, shared_bytes);
    list
}

fn backward(
    list: &mut NeededKernels,
    needs: &AttentionNeeds,
    source: KeySource,
    shared_bytes: usize,
) {
    let shape = &needs.shape;
    match BackwardTiling::choose("attention_backward", shape, source, shared_bytes) {
        Err(error) => return list.refused.push(error),
        Ok(tiling) => {
            for set in BackwardTiling::launches(shape, needs.order) {
                list.kernels.push(match source {
                    KeySource::Gathered => {
                        dma_attention_backward_kernel(shape, &tiling, set, needs.order)
                    }
                    _ => attention_backward_kernel(shape, &tiling, source, set),
                });
            }
        }
    }
    let query = |pass| QueryTiling::choose("attention_backward", pass, shape, source, shared_bytes);
    if source != KeySource::Dense {
        list.add(query(QueryPass::RowSums).map(|tiling| match source {
            KeySource::Gathered => dma_attention_row_sums_kernel(shape, &tiling),
            _ => attention_row_sums_kernel(shape, &tiling, source),
        }));
    }
    match needs.order {
        SumOrder::Any => list
            .kernels
            .push(attention_backward_convert_kernel(shape.head_dim)),
        SumOrder::Fixed => list.add(query(QueryPass::Gradient).map(|tiling| match source {
            KeySource::Gathered => dma_attention_backward_query_kernel(shape, &tiling),
            _ => attention_backward_query_kernel(shape, &tiling, source),
        })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn needs(width: usize, keys: NeededKeys, order: SumOrder) -> AttentionNeeds {
        let shape = AttentionShape {
            batch: 1,
            seq_len: 1,
            num_heads: 4,
            num_kv_heads: 2,
            head_dim: width,
            head_dim_v: width,
        };
        AttentionNeeds { shape, keys, order }
    }

    fn names(needed: &NeededKernels) -> BTreeSet<&'static str> {
        needed.kernels.iter().map(SourceKernel::name).collect()
    }

    #[test]
    fn dense_training_needs_no_dma_kernel() {
        let needed = needed_kernels(&needs(128, NeededKeys::Neighbours, SumOrder::Any), "sm_80");
        let expected = [
            "attention_backward",
            "attention_backward_convert",
            "attention_backward_prepare",
            "attention_decode",
            "attention_forward",
            "fill_zero",
        ];
        assert_eq!(names(&needed), BTreeSet::from(expected));
        assert!(needed.refused.is_empty());
    }

    #[test]
    fn a_fixed_order_replaces_the_sums_of_dq() {
        let dma = NeededKeys::Chosen(ScoreBias::Exp);
        let any = names(&needed_kernels(&needs(64, dma, SumOrder::Any), "sm_80"));
        let fixed = names(&needed_kernels(&needs(64, dma, SumOrder::Fixed), "sm_80"));
        assert!(any.contains("attention_backward_convert"));
        assert!(fixed.contains("dma_attention_backward_query"));
        assert!(!fixed.contains("attention_backward_convert"));
        for name in ["dma_select", "dma_lists", "dma_scores", "dma_decode"] {
            assert!(any.contains(name) && fixed.contains(name), "{name}");
        }
    }

    #[test]
    fn blocks_need_lists_but_no_choice_of_keys() {
        for arch in ["sm_80", "sm_90a"] {
            let needed = names(&needed_kernels(
                &needs(128, NeededKeys::Blocks, SumOrder::Any),
                arch,
            ));
            for name in [
                "nsa_choose",
                "nsa_selected_attention_backward",
                "dma_attention_backward",
                "dma_attention_backward_convert",
                "column_sums",
            ] {
                assert!(needed.contains(name), "{arch} {name}");
            }
            assert!(!needed.contains("dma_select") && !needed.contains("attention_forward"));
        }
    }

    #[test]
    fn hopper_gets_both_families_where_it_has_its_own() {
        let dma = NeededKeys::Chosen(ScoreBias::Exp);
        for (width, expected) in [(128, true), (96, false)] {
            let needed = names(&needed_kernels(&needs(width, dma, SumOrder::Any), "sm_90a"));
            assert!(needed.contains("dma_attention_forward"), "{width}");
            for name in [
                "hopper_dma_attention_forward",
                "hopper_dma_attention_row_sums",
                "hopper_dma_attention_backward",
            ] {
                assert_eq!(needed.contains(name), expected, "{width} {name}");
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_named_and_the_rest_is_kept() {
        let needed = needed_kernels(&needs(256, NeededKeys::Neighbours, SumOrder::Any), "sm_86");
        assert!(names(&needed).contains("attention_forward"));
        let reason = needed
            .refused
            .first()
            .expect("no tile of 256 fits")
            .to_string();
        assert!(
            reason.contains("attention_backward") && reason.contains("shared memory"),
            "{reason}"
        );
        assert_eq!(shared_bytes_of("sm_75"), None);
    }

    #[test]
    fn equal_kernels_are_compiled_once() {
        let mut list = needed_kernels(&needs(64, NeededKeys::Neighbours, SumOrder::Any), "sm_80");
        let once = list.kernels.len();
        list.extend(list.clone());
        let list = list.deduplicated().expect("all sources resolve");
        assert_eq!(list.kernels.len(), once);
    }
}
