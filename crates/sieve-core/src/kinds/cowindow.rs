//! CoWindow attention (arXiv:2609.32704): all KV heads read a window and the document's first tokens, and divide the
//! far past among them by distance. Nothing is learned or chosen.

use super::dense::{grouped_activations, grouped_flops, grouped_projections, key_and_value, output_projection};
use super::settings::{Settings, Sizes, derived, number, whole};
use super::{
    Activations, AttentionOp, BackwardCall, ConfigKey, Cost, Exchanged, Exported, HasFacts, KeptCall, KeyReads, Kind,
    KindFacts, Launched, LayerFlops, ParamSpec,
};
use crate::FarKeys;
use crate::keys::{MAX_COUNT, MAX_SEQ_LEN, keys};
use crate::model::{ModelShape, window_pairs};
use crate::recipe::{ModelSection, Rules};
use serde_json::{Value, json};
use toml::Table;

keys! {
    /// Sizes of CoWindow attention (arXiv:2609.32704), without a parameter of its own.
    ///
    /// A query sees the latest `near_window` keys, the first `sink_tokens` keys of its document, and the keys at the
    /// distances of its KV head's band. The bands divide the distances from `near_window` to `far_reach` into
    /// `num_bands` of equal width; KV head h has band h. Keys farther away than `far_reach` are seen only among the
    /// first, in longer texts than those of training too.
    #[derive(Copy, Eq, Hash)]
    pub struct CowaShape {
        /// First tokens of the document that every query sees.
        #[key(filled("a 64th of `training.seq_len`, at most 64"), optional, within(0, MAX_SEQ_LEN, "64 is published"))]
        pub sink_tokens: usize,
        /// Latest keys that every query sees, its own included, in tokens.
        #[key(filled("a quarter of `training.seq_len`, at most 1024"), optional, size(MAX_SEQ_LEN))]
        pub near_window: usize,
        /// Distance from a key to the query, in tokens, at which the last band ends.
        #[key(filled("`training.seq_len` less `sink_tokens`"), optional, size(MAX_SEQ_LEN))]
        pub far_reach: usize,
        /// Bands into which the distances from `near_window` to `far_reach` are divided; divides
        /// `model.num_key_value_heads`.
        #[key(filled("`model.num_key_value_heads`"), optional, size(MAX_COUNT))]
        pub num_bands: usize,
    }
}

/// The published sizes, which the paper's kernels take by default.
const MOST_SINK_TOKENS: i64 = 64;
const MOST_NEAR_WINDOW: i64 = 1024;

impl CowaShape {
    /// The keys that a query sees beyond `near_window`, in a layer with all its heads.
    pub fn far_keys(&self) -> FarKeys {
        let Self { sink_tokens, near_window, far_reach, num_bands } = *self;
        FarKeys { sink_tokens, distances: [near_window, far_reach], num_bands, first_band: 0 }
    }
}

impl Settings for CowaShape {
    fn example(_head_dim: usize) -> Self {
        Self { sink_tokens: 64, near_window: 1024, far_reach: 8128, num_bands: 2 }
    }

    fn resolve(attention: &mut Table, sizes: Sizes) {
        let part = |part, most| sizes.part_of_row(part).map(|tokens: i64| tokens.min(most));
        derived(attention, "sink_tokens", || part(64, MOST_SINK_TOKENS));
        derived(attention, "near_window", || part(4, MOST_NEAR_WINDOW));
        derived(attention, "num_bands", || whole(sizes.num_kv_heads?));
        let [sinks, near, bands] = ["sink_tokens", "near_window", "num_bands"].map(|key| number(attention, key));
        derived(attention, "far_reach", || {
            // A row too short for bands of one token at least has them beyond its end.
            let shortest = near?.checked_add(bands?)?;
            Some(whole(sizes.seq_len?)?.checked_sub(sinks?)?.max(shortest))
        });
    }

    fn check(&self, model: Option<&ModelSection>, rules: &mut Rules<'_>) {
        let Self { near_window, far_reach, num_bands, .. } = *self;
        rules.require(
            far_reach >= near_window.saturating_add(num_bands),
            "attention.far_reach",
            format!("is {far_reach}: no room for {num_bands} bands after near_window = {near_window}"),
            "training.seq_len less attention.sink_tokens is usual; or take kind swa",
        );
        if let Some(model) = model {
            let heads = model.num_key_value_heads;
            rules.require(
                num_bands > 0 && heads.is_multiple_of(num_bands),
                "attention.num_bands",
                format!("is {num_bands}, which does not divide num_key_value_heads = {heads}"),
                "leave it out: every KV head then has a band of its own",
            );
        }
    }
}

impl HasFacts for CowaShape {
    const FACTS: KindFacts = KindFacts { is_one_op: true, has_one_order: true, ..KindFacts::GROUPED };
}

impl Kind for CowaShape {
    fn parameters(&self, layer: &ModelShape) -> Vec<ParamSpec> {
        let mut all = grouped_projections(layer);
        all.push(output_projection(layer));
        all
    }

    fn pairs(&self, seq_len: usize) -> f64 {
        let far = self.far_keys();
        let rest = seq_len - self.sink_tokens.min(seq_len);
        // Behind the first tokens there are as many pairs as in a document that begins there.
        let nearer = |distance: usize| window_pairs(distance, rest);
        let of_sinks = window_pairs(seq_len, seq_len) - nearer(rest);
        let of_bands: f64 = (0..self.num_bands).map(|at| nearer(far.band(at).end) - nearer(far.band(at).start)).sum();
        of_sinks + nearer(self.near_window) + of_bands / self.num_bands as f64
    }

    fn num_kept(&self) -> Option<usize> {
        Some(self.sink_tokens + self.far_reach)
    }

    fn label(&self) -> Option<String> {
        let bands = if self.num_bands == 1 { "1 band".to_owned() } else { format!("{} bands", self.num_bands) };
        Some(format!("window {}, {bands} to {}", self.near_window, self.far_reach))
    }

    fn form_words(&self, _layer: &ModelShape) -> Vec<String> {
        vec![format!("the first {} tokens", self.sink_tokens)]
    }

    fn reads_words(&self) -> Option<String> {
        let Self { sink_tokens, near_window, far_reach, num_bands } = self;
        let bands = if *num_bands == 1 { "in one band" } else { "in bands" };
        Some(format!(
            "attention.near_window is {near_window}, attention.sink_tokens {sink_tokens}, and each KV head reads up to \
             {far_reach} tokens back {bands}"
        ))
    }
}

impl Cost for CowaShape {
    fn flops(&self, layer: &ModelShape) -> LayerFlops {
        grouped_flops(layer)
    }

    fn activations(&self, call: &KeptCall<'_>) -> Activations {
        grouped_activations(call.layer)
    }

    fn backward_buffers(&self, call: &BackwardCall<'_>) -> u64 {
        call.of_bands(self.sink_tokens)
    }

    fn cache(&self, layer: &ModelShape, seq_len: usize, value_bytes: u64) -> [u64; 2] {
        // A key that leaves the window comes back with a band. All heads keep it until the last band has passed.
        let kept = (self.sink_tokens + self.far_reach).min(seq_len);
        let kv = key_and_value(layer, value_bytes);
        [kv, kv * kept as u64]
    }

    fn cache_in_row(&self, layer: &ModelShape, tokens: usize, value_bytes: u64) -> u64 {
        key_and_value(layer, value_bytes) * tokens as u64
    }

    fn exchanged(&self, layer: &ModelShape) -> Exchanged {
        Exchanged::of_one_op(layer)
    }
}

impl Launched for CowaShape {
    fn reads(&self) -> &'static [KeyReads] {
        &[KeyReads::Bands]
    }

    fn ops(&self, _layer: &ModelShape) -> &'static [AttentionOp] {
        &[AttentionOp::Attention]
    }
}

impl Exported for CowaShape {
    fn config_keys(&self, _layer: &ModelShape) -> Value {
        let Self { sink_tokens, near_window, far_reach, num_bands } = *self;
        json!({
            "sink_tokens": sink_tokens,
            "near_window": near_window,
            "far_reach": far_reach,
            "num_bands": num_bands,
        })
    }

    fn config_key<'a>(&self, key: &'a str) -> ConfigKey<'a> {
        // A model with other bands would read other keys: no default would do. The name of the kind is elsewhere.
        ConfigKey { name: key, is_needed: key != "kind" }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Attention;
    use crate::model::test_shapes::tiny_dma;

    const SHAPE: CowaShape = CowaShape { sink_tokens: 2, near_window: 4, far_reach: 15, num_bands: 3 };

    #[test]
    fn pairs_are_counted_as_the_mask_says() {
        for shape in [SHAPE, CowaShape { sink_tokens: 0, ..SHAPE }, CowaShape { near_window: 40, ..SHAPE }] {
            for seq_len in [1, 2, 3, 7, 17, 40] {
                let sees = |band: &std::ops::Range<usize>, i: usize, j: usize| {
                    j < shape.sink_tokens || i - j < shape.near_window || band.contains(&(i - j))
                };
                let of_band = |band: std::ops::Range<usize>| {
                    (0..seq_len).flat_map(|i| (0..=i).map(move |j| (i, j))).filter(|&(i, j)| sees(&band, i, j)).count()
                };
                let all: usize = (0..3).map(|band| of_band(shape.far_keys().band(band))).sum();
                assert_eq!(shape.pairs(seq_len), all as f64 / 3.0, "{shape:?} {seq_len}");
            }
        }
        assert!(Attention::Cowa(SHAPE).covers_rows(4) && !Attention::Cowa(SHAPE).covers_rows(7));
    }

    #[test]
    fn a_cache_keeps_what_will_come_into_the_band() {
        let layer = ModelShape { num_kv_heads: 3, num_heads: 3, head_dim: 8, ..tiny_dma() };
        let tokens = |seq_len| SHAPE.cache(&layer, seq_len, 2)[1] / (2 * 8 * 2);
        // The last band ends at a distance of 15, and there are two first tokens.
        assert_eq!([1, 9, 17, 1000].map(tokens), [3, 27, 3 * 17, 3 * 17]);
    }
}
