//! The kernels of each part of attention, and of all parts of a model's attention.
use super::NeededKernels;
use super::calls::{Calls, blocks, dense, dma, masked};
use crate::KernelError;
use crate::attention::AttentionShape;
use crate::dma::ScoreBias;
use crate::runtime::{DType, Hardware, SumOrder};

/// The properties of a model's attention that decide which kernels it launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionNeeds {
    /// Widths and heads; batch and `seq_len` do not matter.
    pub shape: AttentionShape,
    /// How the model chooses its keys.
    pub keys: NeededKeys,
    /// Whether training sums in a fixed order.
    pub order: SumOrder,
    /// Whether query heads have sinks: one more logit in each softmax, whose value is zero.
    pub has_sinks: bool,
}

/// How a model chooses its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NeededKeys {
    /// Consecutive keys: dense or sliding-window attention.
    Neighbours,
    /// A window of consecutive keys, the first tokens, and a band of distances for each KV head.
    Bands,
    /// DMA; with the form of its bias in decoding.
    Chosen(ScoreBias),
    /// DMA in rows where every key is kept: consecutive keys with a bias.
    AllBiased,
    /// NSA's compressed and selected branches, and other choices of blocks. NSA's window branch takes
    /// [`Neighbours`](Self::Neighbours).
    Blocks,
}

impl AttentionNeeds {
    /// The specialisations of this attention in training and, unless it is latent, in decoding, on a device of `arch`
    /// (`sm_90`). For Hopper these are the kernels of both families. Empty for unsupported architectures. What latent
    /// attention packs and decodes by, and ranks with slopes, are needs of their own ([`NeededKernels`]).
    pub fn kernels(&self, arch: &str) -> NeededKernels {
        let mut parts = vec![Part::Choose, Part::Training(self.order)];
        // Latent attention, whose values are narrower, decodes over latents.
        if self.shape.head_dim == self.shape.head_dim_v {
            parts.push(Part::Decode);
        }
        if self.has_sinks {
            parts.push(Part::Sinks);
        }
        self.kernels_of(arch, &parts)
    }

    /// The kernels that decoding alone launches.
    pub fn decoding(&self, arch: &str) -> NeededKernels {
        if self.has_sinks {
            self.kernels_of(arch, &[Part::Decode, Part::Sinks])
        } else {
            self.kernels_of(arch, &[Part::Decode])
        }
    }

    /// The kernels of passes over whole rows, and of steps, with one order of keys that are chosen one by one, or of
    /// steps by the kernels that attend over chosen blocks in whole rows.
    pub fn in_order(&self, arch: &str) -> NeededKernels {
        self.kernels_of(arch, &[Part::InOrder])
    }

    /// Why a pass of training has no kernel on a device of `arch`; `None` if all have one.
    pub fn gap(&self, arch: &str) -> Option<KernelError> {
        self.kernels_of(arch, &[Part::Training(self.order)]).refused.into_iter().next()
    }

    /// The kernels of some parts, by each family of an architecture.
    fn kernels_of(&self, arch: &str, parts: &[Part]) -> NeededKernels {
        match Hardware::of_arch(arch) {
            Some(_) => Calls::of_each_family(arch, |calls| parts.iter().for_each(|&part| self.call(calls, part))),
            None => NeededKernels::default(),
        }
    }

    /// Calls the launch wrappers of a part.
    pub(super) fn call(&self, calls: &mut Calls, part: Part) {
        let Self { shape, keys, .. } = self;
        match (part, *keys) {
            (Part::Choose, NeededKeys::Chosen(_)) => {
                let slopes = [];
                dma::scores(calls, shape, &slopes);
                dma::choice(calls, shape);
            }
            // No keys are scored; the choice of blocks is among the calls of training.
            (Part::Choose, NeededKeys::Neighbours | NeededKeys::Bands | NeededKeys::AllBiased | NeededKeys::Blocks) => {
            }
            (Part::Forward, NeededKeys::Neighbours) => dense::forward(calls, shape),
            (Part::Forward, NeededKeys::Bands) => dense::far_forward(calls, shape),
            (Part::Forward, NeededKeys::Chosen(_)) => dma::forward(calls, shape),
            // These have no forward pass that is called alone.
            (Part::Forward, NeededKeys::AllBiased | NeededKeys::Blocks) => {}
            (Part::Training(sums), NeededKeys::Neighbours) => dense::training(calls, shape, sums),
            (Part::Training(sums), NeededKeys::Bands) => dense::far_training(calls, shape, sums),
            (Part::Training(sums), NeededKeys::AllBiased) => dense::biased_training(calls, shape, sums),
            (Part::Training(sums), NeededKeys::Chosen(_)) => dma::training(calls, shape, sums),
            (Part::Training(sums), NeededKeys::Blocks) => blocks::training(calls, shape, sums),
            (Part::Decode, NeededKeys::Neighbours) => {
                let has_sinks = false;
                dense::decoding(calls, shape, has_sinks);
            }
            (Part::Decode, NeededKeys::Bands) => {
                let has_sinks = false;
                dense::far_decoding(calls, shape, has_sinks);
            }
            (Part::Decode, NeededKeys::Chosen(bias)) => dma::decoding(calls, shape, bias),
            (Part::Decode, NeededKeys::Blocks) => blocks::decoding(calls, shape),
            (Part::Decode, NeededKeys::AllBiased) => {}
            (Part::InOrder, NeededKeys::Chosen(bias)) => dma::in_order(calls, shape, bias),
            (Part::InOrder, NeededKeys::Blocks) => blocks::in_order(calls, shape),
            (Part::InOrder, _) => {}
            (Part::Sinks, keys) => {
                let has_sinks = true;
                dense::sinks(calls, shape.head_dim_v, DType::BF16);
                match keys {
                    NeededKeys::Bands => dense::far_decoding(calls, shape, has_sinks),
                    _ => dense::decoding(calls, shape, has_sinks),
                }
            }
            (Part::Masked, _) => masked::attention(calls, shape, &[PROBED_BLOCK]),
            (Part::MaskedTraining(sums), _) => masked::training(calls, shape, sums),
        }
    }
}

/// Keys of a block that probes score in the shipped kernels: MOMO's default. Kernels of other sizes are compiled when
/// they are first launched.
const PROBED_BLOCK: usize = 64;

/// A part of attention whose launch wrappers are called together.
#[derive(Debug, Clone, Copy)]
pub(super) enum Part {
    /// Scores of keys, the choice of keys, and the scores' gradient.
    Choose,
    /// Forward passes.
    Forward,
    /// Forward and backward passes in an order of sums, and everything between them.
    Training(SumOrder),
    /// Attention of new tokens.
    Decode,
    /// Whole rows and new tokens with one order of keys that are chosen, one by one or in blocks.
    InOrder,
    /// Sinks: joined to the output, their gradient, and decoding with them.
    Sinks,
    /// Selections, attention under their masks, and decoding under selectors.
    Masked,
    /// Forward and backward passes under a mask of tiles.
    MaskedTraining(SumOrder),
}

impl NeededKernels {
    /// Most shared memory of a thread block on an architecture, in bytes; `None` for unsupported architectures.
    pub fn shared_bytes_of(arch: &str) -> Option<usize> {
        Hardware::of_arch(arch).map(|hardware| hardware.max_shared_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::SourceKernel;
    use std::collections::BTreeSet;

    fn needs(width: usize, keys: NeededKeys, order: SumOrder) -> AttentionNeeds {
        let shape = AttentionShape::new(1, 1, [4, 2], [width, width]);
        AttentionNeeds { shape, keys, order, has_sinks: false }
    }

    fn names(needed: &NeededKernels) -> BTreeSet<&'static str> {
        needed.kernels.iter().map(SourceKernel::name).collect()
    }

    #[test]
    fn dense_training_needs_no_dma_kernel() {
        let needed = needs(128, NeededKeys::Neighbours, SumOrder::Any).kernels("sm_80");
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
    fn in_a_fixed_order_a_pass_by_query_computes_dq() {
        let dma = NeededKeys::Chosen(ScoreBias::Exp);
        let any = names(&needs(64, dma, SumOrder::Any).kernels("sm_80"));
        let fixed = names(&needs(64, dma, SumOrder::Fixed).kernels("sm_80"));
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
            let needed = names(&needs(128, NeededKeys::Blocks, SumOrder::Any).kernels(arch));
            for name in [
                "nsa_choose",
                "nsa_selected_attention_backward",
                "dma_attention_backward",
                "dma_attention_backward_convert",
                "column_sums",
                "nsa_local_blocks",
                "attention_backward_prepare",
            ] {
                assert!(needed.contains(name), "{arch} {name}");
            }
            assert!(!needed.contains("dma_select") && !needed.contains("dma_scores"));
            let hopper = needed.contains("hopper_nsa_selected_attention_backward");
            assert_eq!(hopper, arch == "sm_90a");
        }
    }

    #[test]
    fn sinks_need_kernels_of_their_own() {
        let without = needs(128, NeededKeys::Neighbours, SumOrder::Any);
        let with = AttentionNeeds { has_sinks: true, ..without };
        for arch in ["sm_80", "sm_90a"] {
            let (more, plain) = (with.kernels(arch), without.kernels(arch));
            let added = more.kernels.iter().filter(|k| !plain.kernels.iter().any(|known| known.is_same_code(k)));
            let added: Vec<_> = added.map(SourceKernel::name).collect();
            for name in ["attention_sinks_forward", "attention_sinks_backward"] {
                assert!(added.contains(&name), "{added:?}");
            }
            // The token is cached, appended, rotated and appended, or normed, rotated and appended.
            assert_eq!(added.iter().filter(|name| **name == "attention_decode").count(), 4, "{added:?}");
        }
    }

    #[test]
    fn hopper_needs_both_families_at_widths_that_have_hopper_kernels() {
        let dma = NeededKeys::Chosen(ScoreBias::Exp);
        for (width, expected) in [(128, true), (96, false)] {
            let needed = names(&needs(width, dma, SumOrder::Any).kernels("sm_90a"));
            assert!(needed.contains("dma_attention_forward"), "{width}");
            for name in
                ["hopper_dma_attention_forward", "hopper_dma_attention_row_sums", "hopper_dma_attention_backward"]
            {
                assert_eq!(needed.contains(name), expected, "{width} {name}");
            }
        }
    }

    #[test]
    fn a_pass_that_does_not_fit_is_refused_by_name_and_others_are_kept() {
        let needed = needs(256, NeededKeys::Neighbours, SumOrder::Any).kernels("sm_86");
        assert!(names(&needed).contains("attention_forward"));
        let reason = needed.refused.first().expect("no tile of 256 fits").to_string();
        assert!(reason.contains("attention_backward") && reason.contains("shared memory"), "{reason}");
        assert_eq!(NeededKernels::shared_bytes_of("sm_75"), None);
    }

    #[test]
    fn equal_kernels_are_compiled_once() {
        let mut list = needs(64, NeededKeys::Neighbours, SumOrder::Any).kernels("sm_80");
        let once = list.kernels.len();
        list.extend(list.clone());
        assert_eq!(list.kernels.len(), once);
    }
}
