//! The kernels of each part of attention, and of all parts of a model's attention.
use super::NeededKernels;
use crate::attention::{
    AttentionShape, BackwardTiling, DecodeForm, DecodeTiling, HopperTiling, KernelFamily, KeySource, QueryPass,
    QueryTiling, SparseKeyReads, attention_backward_convert_added_kernel, attention_backward_convert_kernel,
    attention_backward_join_kernel, attention_backward_prepare_kernel, attention_decode_kernel,
    attention_sinks_kernels, bias_base_kernel, by_tile_lists, has_hopper_form, head_by_head,
    hopper_attention_backward_prepare_kernel, hopper_backward_kernel, hopper_sparse_attention_forward_kernel, sharing,
    sparse_attention_backward_query_kernel, sparse_attention_forward_kernel, sparse_attention_tiling,
    sparse_backward_query_tiling,
};
use crate::dma::{
    ConvertedSums, DMA_LAST_KEPT, ScoreBias, dma_attention_backward_convert_kernel, dma_backward_lists_kernel,
    dma_border_keys_kernels, dma_decode_kernel, dma_lists_kernel, dma_lists_prefix_kernel, dma_scores_backward_kernel,
    dma_scores_kernel, dma_select_kernels, with_whole_keys,
};
use crate::mla::{MLA_VALUES, mla_decode_join_kernel, mla_decode_kernel, mla_join_token_kernel, mla_pack_kernels};
use crate::nsa::{chosen_decode_kernels, nsa_hopper_kernels, nsa_kernels};
use crate::runtime::{SourceKernel, SumOrder};
use crate::select::{select_blocks_kernels, select_cells_kernels};
use crate::step::{COLUMN_SUMS, FILL_ZERO};

/// Keys of a block that probes score in the shipped kernels: MOMO's default. Kernels of other sizes are compiled when
/// they are first launched.
const PROBED_BLOCK: usize = 64;

/// The properties of a model's attention that decide which kernels it launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionNeeds {
    /// Widths and heads; batch and `seq_len` do not matter.
    pub shape: AttentionShape,
    /// How the model chooses its keys.
    pub keys: NeededKeys,
    /// Whether training sums in a fixed order.
    pub order: SumOrder,
    /// Whether query heads have sinks.
    pub has_sinks: bool,
}

/// How a model chooses its keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NeededKeys {
    /// Consecutive keys: dense or sliding-window attention.
    Neighbours,
    /// DMA; with the form of its bias in decoding.
    Chosen(ScoreBias),
    /// DMA in rows where every key is kept: consecutive keys with a bias.
    AllBiased,
    /// NSA's compressed and selected branches. Its window branch takes [`Neighbours`](Self::Neighbours).
    Blocks,
}

impl AttentionNeeds {
    /// All specialisations that a model with this attention launches in training and decoding on a device of `arch`.
    /// For Hopper these are the kernels of both families. Empty for unsupported architectures.
    pub fn kernels(&self, arch: &str) -> NeededKernels {
        let mut list = NeededKernels::default();
        let Some(shared_bytes) = NeededKernels::shared_bytes_of(arch) else {
            return list;
        };
        let source = key_source(self.keys);
        let mut parts = vec![Part::Choose, Part::Forward, Part::Around, Part::Gradients(self.order), Part::Decode];
        if source != KeySource::Dense {
            parts.push(Part::RowSums);
        }
        if self.order == SumOrder::Any {
            parts.push(Part::ConvertDq);
        }
        if self.has_sinks {
            parts.push(Part::Sinks);
        }
        for &part in &parts {
            portable(&mut list, self, part, shared_bytes);
        }
        if arch == "sm_90a" && has_hopper_form(&self.shape, source) {
            for &part in &parts {
                hopper(&mut list, self, part);
            }
        }
        list
    }

    /// The kernels that decoding alone launches.
    pub fn decoding(&self, arch: &str) -> NeededKernels {
        let mut list = NeededKernels::default();
        if let Some(shared_bytes) = NeededKernels::shared_bytes_of(arch) {
            portable(&mut list, self, Part::Decode, shared_bytes);
            if self.has_sinks {
                portable(&mut list, self, Part::Sinks, shared_bytes);
            }
        }
        list
    }
}

impl NeededKernels {
    /// Most shared memory of a thread block on an architecture, in bytes; `None` for unsupported architectures.
    pub fn shared_bytes_of(arch: &str) -> Option<usize> {
        let kib = match arch {
            "sm_80" => 163,
            "sm_86" | "sm_89" | "sm_120a" => 99,
            "sm_90a" | "sm_100a" => 227,
            _ => return None,
        };
        Some(kib * 1024)
    }

    /// The kernel that ranks DMA's keys with these slopes, one for each KV head.
    pub fn dma_ranks(head_dim: usize, slopes: &[f32]) -> SourceKernel {
        dma_scores_kernel(slopes.len(), head_dim, slopes)
    }

    /// The packing kernels of latent attention, forward and backward: heads of `head_dim` columns and `rope_dim`
    /// rotated columns, with norms over `norm_dim` columns, or without norms where `norm_dim` is 0.
    pub fn mla_pack(head_dim: usize, rope_dim: usize, norm_dim: usize) -> [SourceKernel; 2] {
        mla_pack_kernels(head_dim, rope_dim, norm_dim)
    }

    /// The decoding kernels for latents of `rank` columns and `rope_dim` rotated columns. Keys have norms unless
    /// `norm_dim` is 0.
    pub fn mla_decode(rank: usize, rope_dim: usize, norm_dim: usize, shared_bytes: usize) -> [SourceKernel; 3] {
        let decode = mla_decode_kernel(rank + rope_dim, rank, norm_dim > 0, shared_bytes);
        [decode.clone().define("LENGTHS", 1), decode, mla_decode_join_kernel(rank)]
    }

    /// The kernels that a captured decoding step launches beside the kernels of [`mla_decode`](Self::mla_decode), for
    /// heads of `head_dim` columns and `rope_dim` rotated columns.
    pub fn mla_token(head_dim: usize, rope_dim: usize, norm_dim: usize) -> [SourceKernel; 2] {
        [mla_join_token_kernel(head_dim, rope_dim, norm_dim > 0), MLA_VALUES]
    }
}

fn key_source(keys: NeededKeys) -> KeySource {
    match keys {
        NeededKeys::Neighbours => KeySource::Dense,
        NeededKeys::AllBiased => KeySource::Biased,
        NeededKeys::Chosen(_) | NeededKeys::Blocks => KeySource::Gathered,
    }
}

/// A part of attention that launches kernels of its own.
#[derive(Debug, Clone, Copy)]
pub(super) enum Part {
    /// The choice of keys, and the gradient of the scores by which keys are chosen.
    Choose,
    /// The forward pass: output and log-sum-exp.
    Forward,
    /// Output and log-sum-exp under a selector's mask, and the selection.
    Masked,
    /// Launches around the backward pass: row statistics before it, conversion of dk and dv of key lists after it.
    Around,
    /// Row sums P dP, which the backward pass with a bias needs.
    RowSums,
    /// dq, dk, dv and the bias's gradient.
    Gradients(SumOrder),
    /// dq, dk and dv under a mask of tiles.
    MaskedGradients(SumOrder),
    /// Conversion of the f32 sums of dq, which a pass in any order has.
    ConvertDq,
    /// Attention of one new query, and the merge of its splits.
    Decode,
    /// Sinks: joined to the output, their gradient, and decoding with them.
    Sinks,
}

/// Adds the portable kernels of one part of attention.
pub(super) fn portable(list: &mut NeededKernels, needs: &AttentionNeeds, part: Part, shared_bytes: usize) {
    let AttentionShape { head_dim, head_dim_v, num_kv_heads, .. } = needs.shape;
    let (shape, source) = (&needs.shape, key_source(needs.keys));
    let query = |op, pass| {
        let tiling = QueryTiling::choose(op, pass, shape, source, shared_bytes);
        tiling.map(|tiling| tiling.kernel(shape, source))
    };
    match part {
        Part::Choose => match needs.keys {
            NeededKeys::Chosen(_) => {
                list.extend_kernels(dma_select_kernels());
                list.extend_kernels(dma_border_keys_kernels());
                list.extend_kernels([
                    dma_lists_kernel(),
                    dma_lists_prefix_kernel(),
                    DMA_LAST_KEPT,
                    dma_scores_kernel(num_kv_heads, head_dim_v, &[]),
                    dma_scores_backward_kernel(num_kv_heads),
                ]);
            }
            NeededKeys::Blocks => {
                list.extend_kernels(nsa_kernels(head_dim));
                list.extend_kernels([COLUMN_SUMS]);
            }
            NeededKeys::Neighbours | NeededKeys::AllBiased => {}
        },
        Part::Forward => {
            if source != KeySource::Dense {
                list.extend_kernels([bias_base_kernel(source)]);
            }
            list.add(query("attention_forward", QueryPass::Output));
        }
        Part::Masked => {
            let tiling = sparse_attention_tiling(shape, shared_bytes);
            if let Ok(tiling) = &tiling {
                list.extend_kernels([sparse_attention_forward_kernel(shape, tiling, PROBED_BLOCK)]);
            }
            list.add(tiling.map(|tiling| sparse_attention_forward_kernel(shape, &tiling, 0)));
            list.extend_kernels(select_blocks_kernels(head_dim, shared_bytes));
        }
        Part::Around => {
            list.extend_kernels([FILL_ZERO, attention_backward_prepare_kernel(head_dim_v)]);
            if source == KeySource::Gathered {
                let convert = |sums| [head_dim, head_dim_v].map(|dim| dma_attention_backward_convert_kernel(dim, sums));
                list.extend_kernels(convert(ConvertedSums::All));
                if has_whole_keys(needs, needs.order) {
                    list.extend_kernels(convert(ConvertedSums::Marked));
                    list.extend_kernels([dma_backward_lists_kernel([head_dim, head_dim_v])]);
                }
            }
        }
        Part::RowSums => list.add(query("attention_backward", QueryPass::RowSums)),
        Part::Gradients(order) => {
            let tiling = BackwardTiling::choose("attention_backward", shape, source, shared_bytes);
            // In a fixed order a pass by query computes dq.
            let with_dq = order == SumOrder::Any;
            for set in BackwardTiling::launches(shape, with_dq) {
                match tiling.clone().map(|tiling| tiling.kernel(shape, source, set, order)) {
                    // Over key lists in a fixed order thread blocks never share a key tile.
                    Ok(kernel) if source.is_gathered() && order == SumOrder::Fixed => list.extend_kernels([kernel]),
                    Ok(kernel) => list.extend_kernels(forms(kernel, has_whole_keys(needs, order))),
                    Err(error) => list.add(Err(error)),
                }
            }
            if !source.is_gathered() {
                list.extend_kernels([head_dim, head_dim_v].map(attention_backward_join_kernel));
            }
            if source == KeySource::Biased {
                list.extend_kernels([COLUMN_SUMS]);
            }
            if order == SumOrder::Fixed {
                list.add(query("attention_backward", QueryPass::Gradient));
            }
        }
        Part::MaskedGradients(order) => {
            let tiling = BackwardTiling::choose("attention_backward", shape, source, shared_bytes);
            for set in BackwardTiling::launches(shape, order == SumOrder::Any) {
                match tiling.clone().map(|tiling| tiling.kernel(shape, source, set, order)) {
                    Ok(kernel) => list.extend_kernels(forms(kernel, false).map(by_tile_lists)),
                    Err(error) => list.add(Err(error)),
                }
            }
            if order == SumOrder::Fixed {
                let tiling = sparse_backward_query_tiling(shape, shared_bytes);
                list.add(tiling.map(|tiling| sparse_attention_backward_query_kernel(shape, &tiling)));
            }
        }
        Part::ConvertDq => list.extend_kernels([attention_backward_convert_kernel(head_dim)]),
        Part::Decode => decode(list, needs, shared_bytes),
        Part::Sinks => {
            let are_bf16 = true;
            list.extend_kernels(attention_sinks_kernels(head_dim_v, are_bf16));
            list.extend_kernels([COLUMN_SUMS]);
            let (tiling, has_sinks) = (DecodeTiling::new([head_dim, head_dim_v], shared_bytes), true);
            let forms = DecodeForm::WITH_SINKS.into_iter().filter(|form| !form.rotates() || head_dim == head_dim_v);
            list.extend_kernels(forms.map(|form| attention_decode_kernel(tiling, form, has_sinks)));
        }
    }
}

/// Adds the portable kernels of decoding without sinks.
fn decode(list: &mut NeededKernels, needs: &AttentionNeeds, shared_bytes: usize) {
    let AttentionShape { head_dim, head_dim_v, .. } = needs.shape;
    match needs.keys {
        NeededKeys::Neighbours => {
            let tiling = DecodeTiling::new([head_dim, head_dim_v], shared_bytes);
            let has_sinks = false;
            list.extend_kernels(DecodeForm::PLAIN.map(|form| attention_decode_kernel(tiling, form, has_sinks)));
            // Latent attention, whose heads of values are narrower, rotates in a kernel of its own.
            if head_dim == head_dim_v {
                let rotated = [true, false].map(DecodeForm::rotated);
                list.extend_kernels(rotated.map(|form| attention_decode_kernel(tiling, form, has_sinks)));
            }
        }
        NeededKeys::Chosen(bias) => {
            let tiling = DecodeTiling::new([head_dim, head_dim_v], shared_bytes);
            list.extend_kernels([dma_decode_kernel(tiling, Some(bias))])
        }
        NeededKeys::Blocks => list.extend_kernels(chosen_decode_kernels(head_dim)),
        NeededKeys::AllBiased => {}
    }
}

/// Whether one thread block for each key tile may write gradients of keys, summed in `order`
/// (`dma_backward_lists.cu`).
fn has_whole_keys(needs: &AttentionNeeds, order: SumOrder) -> bool {
    matches!(needs.keys, NeededKeys::Chosen(_)) && order == SumOrder::Any
}

/// Both forms of a backward kernel: with one thread block for each key tile, and with several.
fn forms(kernel: SourceKernel, has_whole_keys: bool) -> [SourceKernel; 2] {
    let alone = kernel.clone();
    let alone = if has_whole_keys { with_whole_keys(alone) } else { alone };
    [alone, sharing(kernel)]
}

impl NeededKernels {
    /// The kernels of selectors for heads of these widths: attention under their masks, attention of probes that also
    /// scores blocks of `probed_blocks` keys, and dense attention.
    pub fn sparse(head_dims: &[usize], probed_blocks: &[usize], shared_bytes: usize, is_hopper: bool) -> NeededKernels {
        let mut list = NeededKernels::default();
        for &head_dim in head_dims {
            // Only the widths decide which kernels these are.
            let shape = AttentionShape::new(1, 1, [1, 1], [head_dim, head_dim]);
            let needs = AttentionNeeds { shape, keys: NeededKeys::Neighbours, order: SumOrder::Any, has_sinks: false };
            portable(&mut list, &needs, Part::Masked, shared_bytes);
            if let Ok(tiling) = sparse_attention_tiling(&shape, shared_bytes) {
                let probes = |&block: &usize| sparse_attention_forward_kernel(&shape, &tiling, block);
                list.extend_kernels(probed_blocks.iter().map(probes));
            }
            if is_hopper && has_hopper_form(&shape, KeySource::Dense) {
                let (reads, tiles) = (SparseKeyReads::Tiles, [128, 128]);
                let probes = |&block: &usize| hopper_sparse_attention_forward_kernel(&shape, reads, tiles, block);
                list.extend_kernels(probed_blocks.iter().map(probes));
                hopper(&mut list, &needs, Part::Masked);
                hopper(&mut list, &needs, Part::Forward);
            } else {
                portable(&mut list, &needs, Part::Forward, shared_bytes);
            }
        }
        list
    }
}

impl NeededKernels {
    /// The kernels of gradients under masks of tiles, for heads of these widths, in both orders of sums.
    pub fn sparse_gradients(head_dims: &[usize], shared_bytes: usize, is_hopper: bool) -> NeededKernels {
        let mut list = NeededKernels::default();
        for &head_dim in head_dims {
            let shape = AttentionShape::new(1, 1, [1, 1], [head_dim, head_dim]);
            for order in [SumOrder::Any, SumOrder::Fixed] {
                let needs = AttentionNeeds { shape, keys: NeededKeys::Neighbours, order, has_sinks: false };
                for part in [Part::MaskedGradients(order), Part::Around, Part::ConvertDq] {
                    portable(&mut list, &needs, part, shared_bytes);
                    if is_hopper && has_hopper_form(&shape, KeySource::Dense) {
                        hopper(&mut list, &needs, part);
                    }
                }
            }
            list.extend_kernels([attention_backward_join_kernel(head_dim)]);
        }
        list
    }
}

/// Adds a part's kernels of the Hopper family, for shapes that have them.
pub(super) fn hopper(list: &mut NeededKernels, needs: &AttentionNeeds, part: Part) {
    let shape = &needs.shape;
    let source = match needs.keys {
        NeededKeys::Blocks => KeySource::GatheredUnbiased,
        keys => key_source(keys),
    };
    let mut add_pass = |pass| list.extend_kernels([HopperTiling::new(pass, shape, source).kernel()]);
    match part {
        Part::Forward => {
            add_pass(QueryPass::Output);
            // With a bias, short rows store `o_low`; long rows recompute row sums instead.
            if source.has_bias() {
                add_pass(QueryPass::OutputAndOLow);
            }
        }
        Part::Masked => {
            use SparseKeyReads::{Keys, Tiles};
            // How keys are read, the sizes of query and key tiles, and keys of a block of probes.
            let forms = [
                (Keys, [128, 128], 0),
                (Tiles, [128, 128], 0),
                (Tiles, [128, 128], PROBED_BLOCK),
                (Tiles, [128, 64], 0),
                (Tiles, [64, 64], 0),
            ];
            let attention = |(reads, tiles, block)| hopper_sparse_attention_forward_kernel(shape, reads, tiles, block);
            list.extend_kernels(forms.map(attention));
            list.extend_kernels(select_cells_kernels(shape.head_dim, KernelFamily::Hopper));
        }
        Part::Around if source.has_bias() => {
            list.extend_kernels([hopper_attention_backward_prepare_kernel(shape.head_dim_v)]);
        }
        Part::RowSums if source.has_bias() => add_pass(QueryPass::RowSums),
        Part::Choose if needs.keys == NeededKeys::Blocks => list.extend_kernels(nsa_hopper_kernels(shape.head_dim)),
        Part::Gradients(order) => {
            list.extend_kernels([attention_backward_convert_kernel(shape.head_dim)]);
            let kernel = hopper_backward_kernel(shape, source, order);
            if order == SumOrder::Fixed && source == KeySource::Dense {
                list.extend_kernels(forms(kernel.clone(), false).map(head_by_head));
            }
            list.extend_kernels(forms(kernel, has_whole_keys(needs, order)));
        }
        Part::MaskedGradients(order) => {
            let kernel = hopper_backward_kernel(shape, source, order);
            list.extend_kernels(forms(kernel, false).map(by_tile_lists));
            if order == SumOrder::Fixed {
                list.extend_kernels([attention_backward_convert_added_kernel(shape.head_dim)]);
            }
        }
        // Hopper devices run the portable kernels for these parts.
        Part::Around | Part::RowSums | Part::Choose | Part::ConvertDq | Part::Decode | Part::Sinks => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
    fn a_fixed_order_replaces_the_sums_of_dq() {
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
            ] {
                assert!(needed.contains(name), "{arch} {name}");
            }
            assert!(!needed.contains("dma_select") && !needed.contains("attention_forward"));
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
            assert_eq!(added.iter().filter(|name| **name == "attention_decode").count(), 4, "{added:?}");
        }
    }

    #[test]
    fn hopper_gets_both_families_where_it_has_its_own() {
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
    fn what_does_not_fit_is_named_and_the_rest_is_kept() {
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
