//! Selections as device steps, so that queries and keys are not copied to the host.

use sieve_core::{BlockSelection, CallShape, KeepBlocks, ProbeCorrection};

use crate::call::{Call, Reads};
use crate::gqa::GqaPolicy;
use crate::mask::CorrectionMode;
use crate::prefill::delta::probe_rows;
use crate::selector::{Method, Selector};

impl Selector {
    /// The selection of a call in a layer as device steps; `None` if the method, or one of its settings, selects on the
    /// host, and for a call that is dense whatever its operands are.
    pub fn block_selection(&self, shape: CallShape, layer: usize, num_layers: usize) -> Option<BlockSelection> {
        if self.is_dense(layer, shape.num_queries) {
            return None;
        }
        let mut selection = match &self.method {
            Method::Delta(config, base) => {
                let mut selection = base.block_selection(shape, layer, num_layers)?;
                selection.add_dense_end(config.tail(shape));
                selection
            }
            method => {
                let call = Call::of_shape(shape).ok()?.in_layer(layer, num_layers);
                let mut selection = method.of_prefill()?.steps(&call, self.common.gqa)?;
                selection.keep.heads_per_list = match self.common.gqa {
                    GqaPolicy::PerQuery => 1,
                    GqaPolicy::Union => shape.group_size(),
                    // Only the host averages scores over the heads of a group.
                    GqaPolicy::Mean => return None,
                };
                selection
            }
        };
        // The kernels keep at least one block, so a selection of none runs on the host.
        if [KeepBlocks::Top(0), KeepBlocks::Share(0.0)].contains(&selection.keep.by) {
            return None;
        }
        let last = self.common.last_dense_rows;
        selection.add_dense_end((last > 0).then(|| shape.num_queries.saturating_sub(last)));
        Some(selection)
    }

    /// Whether a device has kernels for a call's attention and for its correction by probes. Delta has none over a base
    /// that has probes of its own.
    pub fn runs_on_device(&self, shape: CallShape, layer: usize, num_layers: usize) -> bool {
        let corrects = |correction: ProbeCorrection| correction.gamma > 1 && shape.num_queries > correction.gamma;
        let probes_on_device = match &self.method {
            _ if self.is_dense(layer, shape.num_queries) => return true,
            Method::Momo(_) => self.block_selection(shape, layer, num_layers).is_some(),
            Method::Delta(_, base) => {
                base.reads(layer, shape.num_queries) != Reads::Values && base.correction(shape, layer).is_none()
            }
            _ => return true,
        };
        probes_on_device && self.correction(shape, layer).is_none_or(corrects)
    }

    /// How probe rows correct the output of a call; `None` for methods without a correction and for dense calls.
    pub fn correction(&self, shape: CallShape, layer: usize) -> Option<ProbeCorrection> {
        if self.is_dense(layer, shape.num_queries) {
            return None;
        }
        let (gamma, mode) = match &self.method {
            Method::Momo(config) => (config.gamma, config.mode),
            Method::Delta(config, base) if !base.is_dense(layer, shape.num_queries) => (config.gamma, config.mode),
            _ => return None,
        };
        (mode != CorrectionMode::SparseOnly)
            .then_some(ProbeCorrection { gamma, replaces_only: mode == CorrectionMode::Recompute })
    }

    /// Pairs of query and key that the probe rows of a call's correction read in each head, in addition to the kept
    /// pairs; 0 without a correction.
    pub fn probe_pairs(&self, shape: CallShape, layer: usize) -> u64 {
        let Some(correction) = self.correction(shape, layer) else {
            return 0;
        };
        probe_rows(shape, correction.gamma).into_iter().map(|row| (shape.context() + row + 1) as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefill::minference::Pattern;
    use sieve_core::BlockScores;

    #[test]
    fn probes_read_every_earlier_key_of_each_sixteenth_row() {
        let (shape, layer) = (CallShape::new([512, 512], [4, 2], 64), 0);
        let pairs = |text: &str| Selector::parse(text).expect("valid").probe_pairs(shape, layer);
        // Rows 0, 16, .. 496 read 1, 17, .. 497 keys.
        assert_eq!(pairs("momo:first_dense_layers=0,k=2,k_exact=1"), (0..32).map(|at| 16 * at + 1).sum::<u64>());
        assert_eq!(pairs("bfla"), 0);
    }

    #[test]
    fn a_device_selects_only_where_it_has_all_steps() {
        let shape = CallShape::new([300, 428], [4, 2], 64);
        let selection = |text: &str| {
            let selector = Selector::parse(text).expect("valid");
            selector.block_selection(shape, 0, 2)
        };
        for text in [
            "bfla:pooling=center",
            "meanpool:gqa=mean",
            "xattention:mode=random",
            "meanpool:min_prefill_tokens=301",
            "flexprefill:min_budget=428",
            "vertical_slash:gqa=union",
            "pbs:permute=both",
            "pbs:segment=512",
            "pbs:perm=query",
            "ba_att:segment=256,sort=q,gqa=union",
            "ba_att:segment=256,sparsity=1",
            "momo:k=129,topk=exact",
            "momo:k=200,k_exact=129",
            "momo:score=normalised",
            "infinitehip",
            "quest",
        ] {
            assert_eq!(selection(text), None, "{text}");
        }
        let of = |text| selection(text).expect("a device takes it");
        // A tenth of the 2^24 hashes, rounded up.
        assert_eq!(of("bfla:stride=16,prob=0.1").keep.rescue.limit, 1_677_722);
        let segments = ["pbs:permute=none", "pbs:perm=query,permute=none", "ba_att:segment=256,sort=none"];
        for text in segments {
            let layout = of(text).layout();
            assert!(of(text).order.is_some() && layout.places.key_order.is_empty(), "{text}");
        }
        let places = of("ba_att:segment=256,sort=q").layout().places;
        assert_eq!([places.key_order.len(), places.query_order.len()], [0, 4 * 300]);
        for (text, chosen) in [("momo:topk=exact", [128, 128]), ("momo:k=64,k_exact=64", [64, 64])] {
            let scores = selection(&format!("{text},first_dense_layers=0")).map(|s| s.scores.by);
            let is_expected = matches!(scores, Some(BlockScores::Probes { chosen: found, .. }) if found == chosen);
            assert!(is_expected, "{text}: {scores:?}");
        }
        // MInference: heads that follow each other with one pattern share a rule; a-shape is the host's.
        let mut mixed = Selector::parse("minference").expect("valid");
        let mut rules_of = |patterns: [Pattern; 4]| {
            let Method::Minference(config) = &mut mixed.method else { unreachable!("parsed above") };
            config.patterns.layers = vec![patterns.map(Some).to_vec()];
            let selection = mixed.block_selection(shape, 0, 2)?;
            Some(selection.head_rules.into_iter().map(|rule| rule.heads).collect::<Vec<_>>())
        };
        let [eighth, best] = [Pattern::BlockSparseEighth, Pattern::BlockSparse { topk: 3 }];
        let local = Pattern::AShape { n_init: 1, n_local: 9 };
        assert_eq!(rules_of([best, eighth, eighth, best]), Some(vec![0..1, 1..3, 3..4]));
        assert_eq!(rules_of([best, eighth, local, best]), None);
        let bfla = of("bfla:last_dense_rows=7");
        let keep = &bfla.keep;
        assert_eq!((keep.heads_per_list, keep.tile, keep.first_tiles), (2, 64, 1));
        assert_eq!(keep.dense_rows, vec![293..300; 1]);
        // XAttention's blocks end at multiples of the block size; other methods' blocks begin at the call's first row.
        let offsets = ["xattention:block=64", "xattention:block=256,stride=16", "meanpool"];
        assert_eq!(offsets.map(|text| of(text).scores.offset), [0, 128, 0]);
    }
}
