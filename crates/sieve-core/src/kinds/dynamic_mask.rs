//! Dynamic mask attention (DMA, arXiv:2508.02124): a query sees the best-scored keys before it.

use super::dense::{grouped_activations, grouped_flops, grouped_projections, key_and_value, output_projection};
use super::settings::{A_QUARTER_OF_THE_ROW, AttentionPreset, Settings, Sizes, choice, derived, named, number, whole};
use super::sizes::{DmaBias, F32};
use super::{
    Activations, AttentionOp, BackwardCall, Chooses, ConfigKey, Cost, Exchanged, Exported, Halo, HasFacts, KeptCall,
    KeyReads, Kind, KindFacts, Launched, LayerFlops, ParamSpec, Part, Stock, StockClass, times,
};
use crate::keys::{MAX_SEQ_LEN, choices, keys};
use crate::model::{ModelShape, window_pairs};
use crate::recipe::{ModelSection, Rules};
use serde_json::{Value, json};
use toml::Table;

choices! {
    /// What makes later keys of a document rank higher in DMA.
    #[derive(Hash)]
    pub enum DmaRecency {
        /// Nothing: content alone ranks, as published.
        None = "none",
        /// `position / period` with one fixed period per KV head is added to each key's score (as ALiBi's slopes,
        /// arXiv:2108.12409), in the rank and in the logit.
        Slope = "slope",
    }
}

/// Bounds of a period (1 / slope of a KV head's recency), in tokens.
const PERIODS: [f64; 2] = [1.0, 1e9];
const A_PERIOD: &str = "a period is a number of tokens; 64 is usual for the shortest";

keys! {
    /// Dynamic mask attention (arXiv:2508.02124, eq. 3), with two additions that are on by default: recency and a
    /// window that is always seen. `preset = "paper"` is the published form, which has neither.
    ///
    /// `z_j = A softplus(v_j . W_dt)`; `rank_j = z_j + p_j / period` with p_j the position in the document (recency
    /// "slope") or `rank_j = z_j`. A query sees the last `local_window_size` keys and, of the older ones, those with
    /// the largest (rank, position), `keep_window_size` in all. The logit adds `exp(min(rank_j, 60))` or `rank_j`.
    #[derive(Copy)]
    pub struct DmaShape {
        /// Sets the keys below but `keep_window_size` to the form of arXiv:2508.02124: no recency, no local window, the
        /// exponential as bias, A starts at 0. A recipe gives no other values beside it. As an override it replaces
        /// the recipe's values, and `model.layer_types`.
        text preset: Option<AttentionPreset>,
        /// Keys a query keeps, per KV head, the local window's among them.
        #[key(filled(A_QUARTER_OF_THE_ROW), optional, size(MAX_SEQ_LEN))]
        pub keep_window_size: usize,
        /// How a key's rank enters the logit.
        #[key(filled("`\"linear\"` with `recency = \"slope\"`, else `\"exp\"`"), optional)]
        pub bias: DmaBias,
        /// Initial value of every entry of A. At 0 all scores tie, and DMA starts as a sliding window.
        #[key(between(-1000.0, 1000.0, "0.0 starts DMA as a sliding window"))]
        pub a_init: f64 = 0.0,
        /// What makes later keys rank higher.
        #[key(filled("`\"slope\"`; `\"none\"` with `bias = \"exp\"`"), optional)]
        pub recency: DmaRecency,
        /// Tokens over which recency raises a key's rank by 1 in the first KV head. Absent: 64.
        #[key(between(PERIODS[0], PERIODS[1], A_PERIOD))]
        pub shortest_period: Option<f64>,
        /// The same for the last KV head; periods of the heads between are spaced geometrically. Absent: four times
        /// `keep_window_size`.
        #[key(between(PERIODS[0], PERIODS[1], A_PERIOD))]
        pub longest_period: Option<f64>,
        /// Keys every query sees whatever their rank: the last ones, its own included, in tokens; at most
        /// `keep_window_size`.
        #[key(filled("an eighth of `keep_window_size`"), optional)]
        pub local_window_size: usize,
    }
}

/// The keys of DMA's form that were given; [`DmaShape::with_form`] chooses what is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DmaForm {
    /// [`DmaShape::bias`]; absent: the rank itself with a slope, else the exponential.
    pub bias: Option<DmaBias>,
    /// [`DmaShape::recency`]; absent: a slope, but none with the exponential as bias.
    pub recency: Option<DmaRecency>,
    /// [`DmaShape::local_window_size`]; absent: an eighth of `keep_window_size`.
    pub local_window_size: Option<usize>,
}

/// Number of keys that DMA keeps for a query: the last ones whatever their rank, and the best-ranked of the older ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaWindow {
    /// Number of keys that a query sees.
    pub keep_window_size: usize,
    /// Number of last keys among them, the query's own included; at most `keep_window_size`.
    pub local_window_size: usize,
}

impl DmaWindow {
    /// Number of keys that are kept for their rank.
    pub fn num_ranked(&self) -> usize {
        self.keep_window_size - self.local_window_size
    }
}

impl From<usize> for DmaWindow {
    /// A DMA window without a local window: all keys are kept for their rank.
    fn from(keep_window_size: usize) -> Self {
        Self { keep_window_size, local_window_size: 0 }
    }
}

impl DmaShape {
    /// Number of keys that a query keeps.
    pub fn window(&self) -> DmaWindow {
        DmaWindow { keep_window_size: self.keep_window_size, local_window_size: self.local_window_size }
    }

    /// The default form, which a recipe of `kind = "dma"` has, too: a recency slope, the rank itself as bias, a local
    /// window of an eighth of `keep_window_size`; A starts at 0.
    pub fn new(keep_window_size: usize) -> Self {
        Self::with_form(keep_window_size, DmaForm::default())
    }

    /// The form that the given keys say, with a recipe's defaults for the others. A starts at 0, and periods are the
    /// default ones.
    pub fn with_form(keep_window_size: usize, form: DmaForm) -> Self {
        // Without a recency slope DMA loses much quality on long rows (lab/docs/results.md).
        let recency = form.recency.unwrap_or(match form.bias {
            Some(DmaBias::Exp) => DmaRecency::None,
            _ => DmaRecency::Slope,
        });
        let bias = form.bias.unwrap_or(match recency {
            DmaRecency::Slope => DmaBias::Linear,
            DmaRecency::None => DmaBias::Exp,
        });
        Self {
            keep_window_size,
            bias,
            a_init: 0.0,
            recency,
            shortest_period: None,
            longest_period: None,
            local_window_size: form.local_window_size.unwrap_or(keep_window_size / 8),
        }
    }

    /// The form of arXiv:2508.02124, a recipe's `preset = "paper"`: no recency, no local window, the exponential as
    /// bias; A starts at 0.
    pub fn published(keep_window_size: usize) -> Self {
        let form = DmaForm { bias: Some(DmaBias::Exp), recency: Some(DmaRecency::None), local_window_size: Some(0) };
        Self::with_form(keep_window_size, form)
    }

    /// Whether a key's rank depends on its content alone, with no recency and no local window, as in arXiv:2508.02124;
    /// whatever `bias` and `a_init` are.
    pub fn ranks_by_content_alone(&self) -> bool {
        self.recency == DmaRecency::None && self.local_window_size == 0
    }

    /// The first and the last KV head's period: tokens over which recency raises a key's rank by 1 (1 / slope).
    pub(crate) fn periods(&self) -> [f64; 2] {
        let last = self.longest_period.unwrap_or(4.0 * self.keep_window_size as f64);
        [self.shortest_period.unwrap_or(SHORTEST_PERIOD), last]
    }

    /// The same layer with another `keep_window_size`; the slopes stay.
    pub fn with_window(self, keep_window_size: usize) -> Self {
        let longest_period = match self.recency {
            // An absent period would follow the new `keep_window_size`.
            DmaRecency::Slope if keep_window_size != self.keep_window_size => Some(self.periods()[1]),
            _ => self.longest_period,
        };
        Self { keep_window_size, longest_period, ..self }
    }

    /// How much a key's rank grows per token of its position, `[num_kv_heads]`; `None` without recency.
    pub fn slopes(&self, num_kv_heads: usize) -> Option<Vec<f64>> {
        match self.recency {
            DmaRecency::None => None,
            DmaRecency::Slope => {
                let [first, last] = self.periods();
                // A single KV head takes the last period, which is the longest by default.
                let exponent = |head: usize| match num_kv_heads {
                    1 => 1.0,
                    _ => head as f64 / (num_kv_heads - 1) as f64,
                };
                let period = |head| first * (last / first).powf(exponent(head));
                Some((0..num_kv_heads).map(|head| 1.0 / period(head)).collect())
            }
        }
    }
}

/// Default period of the first KV head's slope, in tokens.
const SHORTEST_PERIOD: f64 = 64.0;

impl Settings for DmaShape {
    fn example(_head_dim: usize) -> Self {
        Self::published(1)
    }

    /// Writes out the keys of DMA's form that the text leaves out.
    fn resolve(attention: &mut Table, sizes: Sizes) {
        derived(attention, "keep_window_size", || sizes.part_of_row(4));
        let window = number(attention, "keep_window_size").and_then(|window| usize::try_from(window).ok());
        let given = DmaForm {
            bias: named(attention, "bias"),
            recency: named(attention, "recency"),
            local_window_size: number(attention, "local_window_size").and_then(|local| usize::try_from(local).ok()),
        };
        // A missing window is reported elsewhere; any value serves here.
        let form = DmaShape::with_form(window.unwrap_or(1), given);
        choice(attention, "recency", form.recency);
        choice(attention, "bias", form.bias);
        derived(attention, "local_window_size", || whole(window.map(|_| form.local_window_size)?));
    }

    /// The local window fits into the window; slopes need the linear bias and periods in ascending order.
    fn check(&self, _model: Option<&ModelSection>, rules: &mut Rules<'_>) {
        let window = self.keep_window_size;
        rules.require(
            self.local_window_size <= window,
            "attention.local_window_size",
            format!("is {}, more than keep_window_size = {window}", self.local_window_size),
            format!("{window} keeps only the last {window} keys: a sliding window"),
        );
        let has_slopes = self.recency == DmaRecency::Slope;
        rules.require(
            !has_slopes || self.bias == DmaBias::Linear,
            "attention.bias",
            "is \"exp\", but recency = \"slope\" adds to the logit itself",
            "set attention.bias = \"linear\"",
        );
        for (key, period) in
            [("attention.shortest_period", self.shortest_period), ("attention.longest_period", self.longest_period)]
        {
            rules.require(
                has_slopes || period.is_none(),
                key,
                "needs recency = \"slope\"",
                "set attention.recency = \"slope\", or leave the period out",
            );
        }
        let [first, last] = self.periods();
        let is_default = self.shortest_period.is_none() && self.longest_period.is_none();
        rules.require(
            !has_slopes || is_default || first <= last,
            match self.longest_period {
                Some(_) => "attention.longest_period",
                None => "attention.shortest_period",
            },
            format!(
                "makes periods of {first} tokens for the first KV head and {last} for the last, which are reversed"
            ),
            format!("shortest_period is 64 by default, longest_period four times keep_window_size = {window}"),
        );
    }
}

impl HasFacts for DmaShape {
    const FACTS: KindFacts = KindFacts {
        chooses: Chooses::Keys,
        no_shared_choice: "choose single keys by scores of their own values, not blocks",
        is_one_op: true,
        has_one_order: true,
        ..KindFacts::GROUPED
    };
}

impl Kind for DmaShape {
    fn rank_slopes(&self, num_kv_heads: usize) -> Option<Vec<f64>> {
        self.slopes(num_kv_heads)
    }

    fn parameters(&self, layer: &ModelShape) -> Vec<ParamSpec> {
        let num_kv_heads = layer.num_kv_heads;
        let w_dt = "self_attn.dt_proj.weight";
        let mut all = grouped_projections(layer);
        all.push(ParamSpec::vectors("self_attn.a", "self_attn.A", &[num_kv_heads], Part::Mask));
        all.push(ParamSpec::gemm(w_dt, w_dt, [num_kv_heads, layer.kv_width()], Part::Mask).in_f32());
        all.push(output_projection(layer));
        all
    }

    fn window(&self) -> Option<usize> {
        Some(self.keep_window_size)
    }

    fn set_window(&mut self, window: usize) {
        *self = self.with_window(window);
    }

    fn local_window(&self) -> usize {
        self.local_window_size
    }

    fn pairs(&self, seq_len: usize) -> f64 {
        window_pairs(self.keep_window_size, seq_len)
    }

    fn num_kept(&self) -> Option<usize> {
        Some(self.keep_window_size)
    }

    fn label(&self) -> Option<String> {
        let kept = self.keep_window_size;
        Some(match self.local_window_size {
            0 => format!("keeps {kept}"),
            local => format!("keeps {kept}, the last {local} always"),
        })
    }

    fn reads_words(&self) -> Option<String> {
        Some(format!("attention.keep_window_size is {}", self.keep_window_size))
    }

    /// `published form`, or else the recency, the bias, and the first value of A unless it is 0.
    fn form_words(&self, layer: &ModelShape) -> Vec<String> {
        if *self == DmaShape::published(self.keep_window_size) {
            return vec!["published form".to_owned()];
        }
        let recency = match (self.recency, self.periods()) {
            (DmaRecency::None, _) => "no slope".to_owned(),
            // A single KV head has the last period.
            (DmaRecency::Slope, [_, last]) if layer.num_kv_heads == 1 => format!("slope {last}"),
            (DmaRecency::Slope, [first, last]) => format!("slope {first} to {last}"),
        };
        let bias = match self.bias {
            DmaBias::Exp => "bias exp",
            DmaBias::Linear => "bias linear",
        };
        let a_init = (self.a_init != 0.0).then(|| format!("A from {}", self.a_init));
        [recency, bias.to_owned()].into_iter().chain(a_init).collect()
    }
}

impl Cost for DmaShape {
    fn flops(&self, layer: &ModelShape) -> LayerFlops {
        let grouped = grouped_flops(layer);
        // W_dt is `[num_kv_heads, kv_width]`.
        LayerFlops { weights: grouped.weights + (layer.kv_width() * layer.num_kv_heads) as f64, ..grouped }
    }

    fn extra_traffic(&self, layer: &ModelShape) -> f64 {
        // Scores, and f32 sums of dk and dv.
        18.0 * layer.kv_width() as f64
    }

    /// In addition to a dense layer's: each key's score z (f32) and expire (i32: the first query that no longer sees
    /// the key), the key lists, and `o_low`, the low 16 bits of the f32 output.
    fn activations(&self, call: &KeptCall<'_>) -> Activations {
        let (layer, seq_len) = (call.layer, call.seq_len);
        let grouped = grouped_activations(layer);
        let o_low = match call.sizes {
            Some(sizes) if sizes.keeps_o_low(layer, seq_len, call.o_low) => layer.q_width() as u64,
            _ => 0,
        };
        let lists = match call.sizes {
            Some(sizes) if self.keep_window_size < seq_len => {
                sizes.key_list_bytes(layer, seq_len, self.keep_window_size)
            }
            _ => 0,
        };
        Activations {
            values: grouped.values + o_low,
            bytes: grouped.bytes + 2 * F32 * layer.num_kv_heads as u64 + lists,
        }
    }

    /// Row statistics, f32 sums of dq, dk and dv, and key lists with a mark for each key.
    fn backward_buffers(&self, call: &BackwardCall<'_>) -> u64 {
        let (layer, seq_len) = (call.layer, call.seq_len);
        if self.keep_window_size >= seq_len {
            // Every key is kept, so a query reads what dense attention reads.
            return call.of_neighbours(0, seq_len);
        }
        let (q, kv) = (layer.q_width() as u64, layer.kv_width() as u64);
        let queries_with_sums = call.num_rows as u64 * call.sizes.dq_sum_queries(seq_len);
        // If the order of sums is free (`SumOrder::Any`), the backward pass makes key lists of its own, and a mark for
        // each key.
        let lists = call.sizes.key_list_bytes(layer, seq_len, self.keep_window_size);
        let marks = F32 * layer.num_kv_heads as u64;
        let (dq_sums, dk_and_dv_sums) = (times(queries_with_sums, F32 * q), times(call.tokens(), 2 * F32 * kv));
        call.row_stats() + dq_sums + dk_and_dv_sums + times(call.tokens(), lists + marks)
    }

    fn cache(&self, layer: &ModelShape, seq_len: usize, value_bytes: u64) -> [u64; 2] {
        // For each KV head an f32 score and an i32 position: 8 bytes.
        let key = key_and_value(layer, value_bytes) + 8 * layer.num_kv_heads as u64;
        [key, key * self.keep_window_size.min(seq_len) as u64]
    }

    fn halo(&self) -> Option<Halo> {
        Some(Halo { reach: self.keep_window_size, from_all: true })
    }

    fn exchanged(&self, layer: &ModelShape) -> Exchanged {
        Exchanged::of_one_op(layer)
    }
}

impl Launched for DmaShape {
    fn reads(&self) -> &'static [KeyReads] {
        match self.bias {
            DmaBias::Exp => &[KeyReads::Listed(DmaBias::Exp)],
            DmaBias::Linear => &[KeyReads::Listed(DmaBias::Linear)],
        }
    }

    fn ops(&self, _layer: &ModelShape) -> &'static [AttentionOp] {
        &[AttentionOp::DmaScores, AttentionOp::DmaSelection, AttentionOp::DmaAttention]
    }
}

impl Exported for DmaShape {
    fn config_keys(&self, layer: &ModelShape) -> Value {
        let mut keys = json!(self);
        let slopes = self.slopes(layer.num_kv_heads);
        let periods = slopes.map(|slopes| slopes.iter().map(|slope| 1.0 / slope).collect::<Vec<_>>());
        keys["periods"] = json!(periods);
        keys
    }

    fn config_key<'a>(&self, key: &'a str) -> ConfigKey<'a> {
        // A recipe's defaults for these depend on each other: an export says all of them.
        ConfigKey { name: key, is_needed: ["bias", "recency", "local_window_size"].contains(&key) }
    }

    /// transformers computes DMA in its class Doge alone: without recency and local window, with the exponential of the
    /// score as bias. The error for other models is `None`.
    fn stock(&self, model: &ModelShape) -> Result<Stock, Option<&'static str>> {
        let is_doge =
            self.ranks_by_content_alone() && self.bias == DmaBias::Exp && model.is_uniform() && model.is_like_qwen3();
        if !is_doge {
            return Err(None);
        }
        let keys = json!({
            "keep_window_size": self.keep_window_size,
            "sliding_window": null,
            "hidden_dropout": 0.0,
            "mlp_bias": false,
            "is_moe": false,
        });
        Ok(Stock { class: StockClass::Doge, keys })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_spaced_geometrically_between_two_periods() {
        let dma = DmaShape::published(1024);
        assert_eq!(dma.slopes(3), None);
        let slope = DmaShape { recency: DmaRecency::Slope, ..dma };
        let periods = |dma: DmaShape, heads| -> Vec<i64> {
            let slopes = dma.slopes(heads).expect("recency");
            slopes.iter().map(|slope| (1.0 / slope).round() as i64).collect()
        };
        assert_eq!(periods(slope, 3), [64, 512, 4096]);
        assert_eq!(periods(slope, 1), [4096]);
        let given = DmaShape { shortest_period: Some(10.0), longest_period: Some(1000.0), ..slope };
        assert_eq!(periods(given, 3), [10, 100, 1000]);
        // A stage with another window keeps the slopes.
        assert_eq!(slope.with_window(64).slopes(3), slope.slopes(3));
        // With the window that it has, the shape stays as it is: its periods are not written out as given.
        assert_eq!(slope.with_window(1024), slope);
    }
}
