//! Dynamic mask attention (DMA, arXiv:2508.02124): a query sees the best-scored keys before it.

use super::dense::{
    dense_pairs_rate, grouped_activations, grouped_flops, grouped_projections, key_and_value, output_projection,
};
use super::sizes::F32;
use super::{
    Activations, AttentionOp, BackwardCall, Halo, KeptCall, KeyReads, Kind, LayerFlops, ParamSpec, Part, Stock,
    StockClass, times,
};
use crate::model::{DmaBias, DmaRecency, DmaShape, ModelShape, window_pairs};
use serde_json::{Value, json};

/// Share of the peak that attention over gathered keys reaches.
const GATHERED_PAIRS: f64 = 0.52;

impl Kind for DmaShape {
    fn parameters(&self, layer: &ModelShape) -> Vec<ParamSpec> {
        let num_kv_heads = layer.num_kv_heads;
        let w_dt = "self_attn.dt_proj.weight";
        let mut all = grouped_projections(layer);
        all.push(ParamSpec::vectors("self_attn.a", "self_attn.A", &[num_kv_heads], Part::Mask));
        all.push(ParamSpec::gemm(w_dt, w_dt, [num_kv_heads, layer.kv_width()], Part::Mask).in_f32());
        all.push(output_projection(layer));
        all
    }

    fn pairs(&self, seq_len: usize) -> f64 {
        window_pairs(self.keep_window_size, seq_len)
    }

    fn flops(&self, layer: &ModelShape) -> LayerFlops {
        let grouped = grouped_flops(layer);
        // W_dt is `[num_kv_heads, kv_width]`.
        LayerFlops { weights: grouped.weights + (layer.kv_width() * layer.num_kv_heads) as f64, ..grouped }
    }

    fn num_kept(&self) -> Option<usize> {
        Some(self.keep_window_size)
    }

    fn is_one_op(&self) -> bool {
        true
    }

    fn label(&self) -> Option<String> {
        let kept = self.keep_window_size;
        Some(match self.local_window_size {
            0 => format!("keeps {kept}"),
            local => format!("keeps {kept}, the last {local} always"),
        })
    }

    fn chooses(&self) -> bool {
        true
    }

    fn no_shared_choice(&self) -> &'static str {
        "choose single keys by scores of their own values, not blocks"
    }

    fn reads_words(&self) -> Option<String> {
        Some(format!("attention.keep_window_size is {}", self.keep_window_size))
    }

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

    fn reads(&self) -> &'static [KeyReads] {
        match self.bias {
            DmaBias::Exp => &[KeyReads::Listed(DmaBias::Exp)],
            DmaBias::Linear => &[KeyReads::Listed(DmaBias::Linear)],
        }
    }

    fn ops(&self, _layer: &ModelShape) -> &'static [AttentionOp] {
        &[AttentionOp::DmaScores, AttentionOp::DmaSelection, AttentionOp::DmaAttention]
    }

    fn pairs_rate(&self, seq_len: usize) -> f64 {
        if self.keep_window_size < seq_len { GATHERED_PAIRS } else { dense_pairs_rate(seq_len) }
    }

    fn extra_traffic(&self, layer: &ModelShape) -> f64 {
        // Scores, and f32 sums of dk and dv.
        18.0 * layer.kv_width() as f64
    }

    /// Beside a dense layer's also each key's score z (f32) and expire (i32: the first query that no longer sees the
    /// key), key lists and `o_low`.
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

    fn backward_buffers(&self, call: &BackwardCall<'_>) -> u64 {
        let (layer, seq_len) = (call.layer, call.seq_len);
        if self.keep_window_size >= seq_len {
            return call.of_neighbours(0, seq_len);
        }
        let (q, kv) = (layer.q_width() as u64, layer.kv_width() as u64);
        let rows = call.num_rows as u64 * call.sizes.dq_sum_queries(seq_len);
        // A free order has lists of its own, and a mark for each key.
        let lists = call.sizes.key_list_bytes(layer, seq_len, self.keep_window_size);
        let marks = F32 * layer.num_kv_heads as u64;
        call.row_stats() + times(rows, F32 * q) + times(call.tokens(), 2 * F32 * kv + lists + marks)
    }

    fn cache(&self, layer: &ModelShape, seq_len: usize, value_bytes: u64) -> [u64; 2] {
        // For each KV head an f32 score and an i32 position: 8 bytes.
        let key = key_and_value(layer, value_bytes) + 8 * layer.num_kv_heads as u64;
        [key, key * self.keep_window_size.min(seq_len) as u64]
    }

    fn halo(&self) -> Option<Halo> {
        Some(Halo { reach: self.keep_window_size, from_all: true })
    }

    fn config_keys(&self, layer: &ModelShape) -> Value {
        let mut keys = json!(self);
        let slopes = self.slopes(layer.num_kv_heads);
        let periods = slopes.map(|slopes| slopes.iter().map(|slope| 1.0 / slope).collect::<Vec<_>>());
        keys["periods"] = json!(periods);
        keys
    }

    /// Doge has neither recency nor a local window, and its bias is the exponential of the score.
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
