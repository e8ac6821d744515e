//! The shipped specialisations: a table of the parts of attention that are compiled ahead of time for the usual widths.
use super::NeededKernels;
use super::attention::{AttentionNeeds, NeededKeys, Part, hopper, portable};
use crate::attention::{AttentionShape, KernelFamily};
use crate::dma::ScoreBias;
use crate::runtime::{SourceKernel, SumOrder};
use KernelFamily::{Hopper, Portable};
use NeededKeys::{AllBiased, Blocks, Neighbours};
use Part::{Around, Choose, ConvertDq, Decode, Forward, Gradients, Masked, MaskedGradients, RowSums, Sinks};
use SumOrder::{Any, Fixed};

/// Architectures that CI compiles for: A100, consumer Ampere, Ada, Hopper, data-centre and consumer Blackwell.
const ARCHITECTURES: [&str; 6] = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"];

/// Widths of queries and keys, and of values.
type Widths = &'static [(usize, usize)];
const ALL: Widths = &[(16, 16), (32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)];
const TRAINED: Widths = &[(32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)];
const USUAL: Widths = &[(64, 64), (128, 128)];
const WIDE: Widths = &[(128, 128)];
const NARROW: Widths = &[(32, 32)];
const OTHER: Widths = &[(32, 32), (96, 96)];
/// In latent attention keys have a rotated part, and values do not.
const LATENT: Widths = &[(192, 128)];

/// Numbers of query heads and KV heads. Only DMA's scores depend on the numbers, all other kernels on their ratio.
type HeadCounts = &'static [(usize, usize)];
const PAIRS: HeadCounts = &[(2, 1)];
const SINGLE: HeadCounts = &[(1, 1)];
const ONE_OR_TWO: HeadCounts = &[(1, 1), (2, 1)];
const UP_TO_FOUR: HeadCounts = &[(1, 1), (2, 1), (4, 1)];
const MODELS: HeadCounts = &[(8, 4), (16, 8)];

const DMA: NeededKeys = NeededKeys::Chosen(ScoreBias::Exp);

/// The shipped attention kernels: for each row of the table all its parts, at all its widths and numbers of heads.
const SHIPPED: &[(KernelFamily, NeededKeys, Widths, HeadCounts, &[Part])] = &[
    (Portable, Neighbours, ALL, PAIRS, &[Forward]),
    (Portable, Neighbours, TRAINED, PAIRS, &[Gradients(Any)]),
    (Portable, Neighbours, WIDE, PAIRS, &[Gradients(Fixed), Masked]),
    (Portable, Neighbours, USUAL, PAIRS, &[Around, ConvertDq, Decode, Sinks]),
    (Portable, Neighbours, USUAL, PAIRS, &[MaskedGradients(Any), MaskedGradients(Fixed)]),
    (Portable, AllBiased, USUAL, PAIRS, &[Forward, RowSums, Gradients(Any)]),
    (Portable, DMA, OTHER, PAIRS, &[Forward]),
    (Portable, DMA, USUAL, UP_TO_FOUR, &[Forward]),
    (Portable, DMA, NARROW, PAIRS, &[Gradients(Any)]),
    (Portable, DMA, USUAL, PAIRS, &[RowSums, Gradients(Any), Around, Decode]),
    (Portable, DMA, WIDE, PAIRS, &[Gradients(Fixed)]),
    (Portable, DMA, WIDE, MODELS, &[Choose]),
    (Portable, Blocks, USUAL, PAIRS, &[Choose, Gradients(Any)]),
    (Hopper, Neighbours, LATENT, SINGLE, &[Forward, Gradients(Any), Gradients(Fixed)]),
    (Hopper, Neighbours, USUAL, PAIRS, &[Forward, Gradients(Any), Gradients(Fixed), Masked]),
    (Hopper, Neighbours, USUAL, PAIRS, &[MaskedGradients(Any), MaskedGradients(Fixed)]),
    (Hopper, AllBiased, USUAL, PAIRS, &[Forward, RowSums, Gradients(Any), Gradients(Fixed), Around]),
    (Hopper, DMA, USUAL, ONE_OR_TWO, &[Forward, RowSums, Gradients(Any), Gradients(Fixed)]),
    (Hopper, Blocks, USUAL, ONE_OR_TWO, &[Forward]),
    (Hopper, Blocks, USUAL, PAIRS, &[Choose, Gradients(Any)]),
];

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
        let shared_bytes = NeededKernels::shared_bytes_of(arch).unwrap_or(99 * 1024);
        let mut list = NeededKernels::default();
        list.extend_kernels(NeededKernels::step(arch));
        // Latent attention with norms of queries and keys, as in the recipes, and without.
        let (head_dim, rope_dim) = (128, 64);
        let norm_dim = head_dim + rope_dim;
        for norm_dim in [norm_dim, 0] {
            list.extend_kernels(NeededKernels::mla_pack(head_dim, rope_dim, norm_dim));
            list.extend_kernels(NeededKernels::mla_token(head_dim, rope_dim, norm_dim));
        }
        // Slopes depend on the recipe; the slopes of eight KV heads are compiled as an example.
        let slopes: [f32; 8] = std::array::from_fn(|head| 1.0 / (64 << head) as f32);
        list.extend_kernels([NeededKernels::dma_ranks(head_dim, &slopes)]);
        // Latents of DeepSeek-V2 and of the 80M and 200M recipes.
        for rank in [192, 256, 512] {
            list.extend_kernels(NeededKernels::mla_decode(rank, rope_dim, norm_dim, shared_bytes));
        }
        for &(family, keys, widths, heads, parts) in SHIPPED {
            if family == Hopper && arch != "sm_90a" {
                continue;
            }
            for &(head_dim, head_dim_v) in widths {
                for &(num_heads, num_kv_heads) in heads {
                    let shape = AttentionShape::new(1, 1, [num_heads, num_kv_heads], [head_dim, head_dim_v]);
                    let needs = AttentionNeeds { shape, keys, order: Any, has_sinks: true };
                    for &part in parts {
                        match family {
                            Portable => portable(&mut list, &needs, part, shared_bytes),
                            Hopper => hopper(&mut list, &needs, part),
                        }
                    }
                }
            }
        }
        list
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_shipped_kernel_has_a_key_of_its_own() {
        let kernels = NeededKernels::shipped();
        let keys = kernels.iter().map(|(k, _)| k.code_key().expect("the file exists"));
        assert_eq!(keys.collect::<BTreeSet<u128>>().len(), kernels.len());
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
                // The backward pass of heads of 256.
                99 => assert!(refused.len() == 1 && refused[0].contains("attention_backward"), "{refused:?}"),
                _ => assert_eq!(refused, [""; 0], "{arch}"),
            }
        }
    }
}
