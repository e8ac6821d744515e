//! The shipped specialisations: a table of the parts of attention that are compiled ahead of time for the usual widths.
//!
//! `cargo xtask kernels` reads this table and compiles its specialisations.
use super::attention::{AttentionNeeds, NeededKeys, Part};
use super::calls::{Calls, dma};
use super::{NeededKernels, StepSizes};
use crate::attention::AttentionShape;
use crate::dma::ScoreBias;
use crate::runtime::{KernelFamilies, SourceKernel, SumOrder};
use KernelFamilies::{All, Portable};
use NeededKeys::{AllBiased, Bands, Blocks, Neighbours};
use Part::{Choose, Decode, Forward, InOrder, Masked, MaskedTraining, Sinks, Training};
use SumOrder::{Any, Fixed};

/// Architectures that CI compiles for: A100, consumer Ampere, Ada, Hopper, data-centre and consumer Blackwell.
const ARCHITECTURES: [&str; 6] = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"];

/// Widths of queries and keys, and of values.
type Widths = &'static [(usize, usize)];
const EVERY: Widths = &[(16, 16), (32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)];
const TRAINED: Widths = &[(32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)];
const USUAL: Widths = &[(64, 64), (128, 128)];
const WIDE: Widths = &[(128, 128)];
const NARROW: Widths = &[(32, 32)];
const OTHER: Widths = &[(32, 32), (96, 96)];
/// In latent attention keys have a rotated part, and values do not.
const LATENT: Widths = &[(192, 128)];

/// Numbers of query heads and KV heads. Only DMA's scores depend on the numbers; most other kernels depend on their
/// ratio at most, and an indexer's gradient in a fixed order on whether there are several KV heads.
type HeadCounts = &'static [(usize, usize)];
const PAIRS: HeadCounts = &[(2, 1)];
const SINGLE: HeadCounts = &[(1, 1)];
const ONE_OR_TWO: HeadCounts = &[(1, 1), (2, 1)];
const SEVERAL: HeadCounts = &[(2, 2), (4, 2)];
const UP_TO_FOUR: HeadCounts = &[(1, 1), (2, 1), (4, 1)];
const MODELS: HeadCounts = &[(8, 4), (16, 8)];

const DMA: NeededKeys = NeededKeys::Chosen(ScoreBias::Exp);

/// The shipped attention kernels: for each row of the table all its parts, at all its widths and numbers of heads, by
/// the portable kernels alone or by Hopper's family.
const SHIPPED: &[(KernelFamilies, NeededKeys, Widths, HeadCounts, &[Part])] = &[
    (Portable, Neighbours, EVERY, PAIRS, &[Forward]),
    (Portable, Neighbours, TRAINED, PAIRS, &[Training(Any)]),
    (Portable, Neighbours, WIDE, PAIRS, &[Training(Fixed), Masked]),
    (Portable, Neighbours, USUAL, PAIRS, &[Decode, Sinks, MaskedTraining(Any), MaskedTraining(Fixed)]),
    (Portable, Bands, USUAL, PAIRS, &[Training(Any)]),
    (Portable, Bands, WIDE, PAIRS, &[Training(Fixed)]),
    (Portable, AllBiased, USUAL, PAIRS, &[Training(Any)]),
    (Portable, DMA, OTHER, PAIRS, &[Forward]),
    (Portable, DMA, USUAL, UP_TO_FOUR, &[Forward]),
    (Portable, DMA, NARROW, PAIRS, &[Training(Any)]),
    (Portable, DMA, USUAL, PAIRS, &[Training(Any), Decode]),
    (Portable, DMA, WIDE, PAIRS, &[Training(Fixed)]),
    (Portable, DMA, WIDE, MODELS, &[Choose]),
    (Portable, Blocks, USUAL, PAIRS, &[Training(Any), Decode]),
    (All, Neighbours, USUAL, PAIRS, &[Decode, Sinks]),
    (All, Neighbours, LATENT, SINGLE, &[Training(Any), Training(Fixed)]),
    (All, Neighbours, USUAL, PAIRS, &[Training(Any), Training(Fixed), Masked]),
    (All, Neighbours, USUAL, PAIRS, &[MaskedTraining(Any), MaskedTraining(Fixed)]),
    (All, Bands, USUAL, PAIRS, &[Training(Any), Training(Fixed)]),
    (All, AllBiased, USUAL, PAIRS, &[Training(Any), Training(Fixed)]),
    (All, DMA, USUAL, ONE_OR_TWO, &[Training(Any), Training(Fixed), InOrder]),
    (All, Blocks, USUAL, SEVERAL, &[Training(Any), Training(Fixed), InOrder]),
];

/// Models whose norms have each number of warps a row, with heads of both usual widths.
const STEPS: [StepSizes; 5] = [
    StepSizes { d_model: 512, d_ff: 1536, rotated_head_dim: Some(64) },
    StepSizes { d_model: 1024, d_ff: 3072, rotated_head_dim: Some(128) },
    StepSizes { d_model: 2048, d_ff: 6144, rotated_head_dim: Some(128) },
    StepSizes { d_model: 4096, d_ff: 12288, rotated_head_dim: Some(128) },
    StepSizes { d_model: 5120, d_ff: 17408, rotated_head_dim: Some(128) },
];

/// Tokens that one launch of a GEMV decodes: 3 take the form for 4.
const DECODED_AT_ONCE: [usize; 3] = [1, 2, 4];

impl NeededKernels {
    /// Each shipped specialisation once, with the architectures whose tilings need it.
    pub fn shipped() -> Vec<(SourceKernel, Vec<&'static str>)> {
        let mut all: Vec<(SourceKernel, Vec<&str>)> = Vec::new();
        for arch in ARCHITECTURES {
            for kernel in NeededKernels::shipped_for(arch).kernels {
                match all.iter_mut().find(|(known, _)| known.is_same_code(&kernel)) {
                    Some((_, architectures)) => architectures.push(arch),
                    None => all.push((kernel, vec![arch])),
                }
            }
        }
        all
    }

    /// The shipped specialisations with the tilings of an architecture; for an unknown one the smallest tilings.
    pub fn shipped_for(arch: &str) -> NeededKernels {
        let mut list = NeededKernels::step_of(arch, &STEPS, &DECODED_AT_ONCE);
        // Latent attention with norms of queries and keys, as in the recipes, and without.
        let widths = [128, 64];
        for has_norm in [true, false] {
            list.extend(NeededKernels::mla_pack(arch, widths, has_norm));
        }
        // Latents of the 80M and 200M recipes and of DeepSeek-V2; only DeepSeek-V2's rank of 512 also without norms.
        for (rank, has_norm) in [(192, true), (256, true), (512, true), (512, false)] {
            list.extend(NeededKernels::mla_decode(arch, rank, widths, has_norm));
        }
        // Slopes depend on the recipe; the slopes of eight KV heads are compiled as an example.
        let slopes: [f32; 8] = std::array::from_fn(|head| 1.0 / (64 << head) as f32);
        list.extend(NeededKernels::dma_ranks(arch, 128, &slopes));
        for &(families, keys, widths, heads, parts) in SHIPPED {
            if families == All && arch != "sm_90a" {
                continue;
            }
            let mut calls = Calls::on(arch, families);
            for &(head_dim, head_dim_v) in widths {
                for &(num_heads, num_kv_heads) in heads {
                    let shape = AttentionShape::new(1, 1, [num_heads, num_kv_heads], [head_dim, head_dim_v]);
                    let needs = AttentionNeeds { shape, keys, order: Any, has_sinks: true };
                    parts.iter().for_each(|&part| needs.call(&mut calls, part));
                    if matches!(parts, [Choose]) {
                        dma::scores_with_bias(&mut calls, &shape);
                    }
                }
            }
            list.extend(calls.into_needed());
        }
        list
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::KernelText;
    use std::collections::BTreeSet;

    #[test]
    fn every_shipped_kernel_has_a_key_of_its_own() {
        let kernels = NeededKernels::shipped();
        let keys = kernels.iter().map(|(k, _)| k.code_key().expect("the file exists"));
        assert_eq!(keys.collect::<BTreeSet<u128>>().len(), kernels.len());
    }

    #[test]
    fn every_kernel_is_launched_by_some_call() {
        let shipped = NeededKernels::shipped();
        let launched: BTreeSet<String> = shipped.iter().map(|(kernel, _)| format!("{}.cu", kernel.name())).collect();
        let kernels = KernelText::files().filter(|file| file.ends_with(".cu"));
        let missing: Vec<&str> = kernels.filter(|file| !launched.contains(*file)).collect();
        assert_eq!(missing, [""; 0], "a call of its wrapper belongs to `step.rs` or `specialisations/calls`");
    }

    #[test]
    fn tilings_fit_their_architecture() {
        for arch in ARCHITECTURES {
            let limit = NeededKernels::shared_bytes_of(arch).expect("known");
            let list = NeededKernels::shipped_for(arch);
            for kernel in &list.kernels {
                assert!(kernel.dynamic_shared_bytes() <= limit, "{kernel:?} {arch}");
                assert!(!kernel.name().starts_with("hopper_") || arch == "sm_90a");
            }
            let refused: Vec<String> = list.refused.iter().map(ToString::to_string).collect();
            match limit / 1024 {
                // In 99 KiB the backward pass of heads of 256 columns does not fit.
                99 => assert!(refused.len() == 1 && refused[0].contains("attention_backward"), "{refused:?}"),
                _ => assert_eq!(refused, [""; 0], "{arch}"),
            }
        }
    }
}
