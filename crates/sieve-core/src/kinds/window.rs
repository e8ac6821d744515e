//! Sliding window: a query sees the latest keys.

use super::dense::{grouped_activations, grouped_flops, grouped_stock, key_and_value};
use super::settings::{A_QUARTER_OF_THE_ROW, Settings, Sizes, derived};
use super::{
    Activations, AttentionOp, BackwardCall, ConfigKey, Cost, Dense, Exchanged, Exported, Halo, HasFacts, KeptCall,
    KeyReads, Kind, KindFacts, Launched, LayerFlops, ParamSpec, Stock,
};
use crate::keys::{MAX_SEQ_LEN, keys};
use crate::model::{ModelShape, window_pairs};
use serde_json::{Value, json};
use toml::Table;

keys! {
    /// Sliding window attention.
    #[derive(Copy, Eq)]
    pub struct SwaShape {
        /// Keys a query sees, itself included, in tokens.
        #[key(filled(A_QUARTER_OF_THE_ROW), optional, size(MAX_SEQ_LEN))]
        pub sliding_window: usize,
    }
}

impl Settings for SwaShape {
    fn example(_head_dim: usize) -> Self {
        Self { sliding_window: 1 }
    }

    fn resolve(attention: &mut Table, sizes: Sizes) {
        derived(attention, "sliding_window", || sizes.part_of_row(4));
    }
}

impl HasFacts for SwaShape {
    const FACTS: KindFacts = KindFacts {
        is_one_op: true,
        takes_sinks: true,
        has_one_order: true,
        stock_layer_type: Some(super::SLIDING_ATTENTION),
        ..KindFacts::GROUPED
    };
}

impl Kind for SwaShape {
    fn parameters(&self, layer: &ModelShape) -> Vec<ParamSpec> {
        Dense.parameters(layer)
    }

    fn window(&self) -> Option<usize> {
        Some(self.sliding_window)
    }

    fn set_window(&mut self, sliding_window: usize) {
        self.sliding_window = sliding_window;
    }

    fn pairs(&self, seq_len: usize) -> f64 {
        window_pairs(self.sliding_window, seq_len)
    }

    fn num_kept(&self) -> Option<usize> {
        Some(self.sliding_window)
    }

    fn label(&self) -> Option<String> {
        Some(format!("window {}", self.sliding_window))
    }

    fn reads_words(&self) -> Option<String> {
        Some(format!("attention.sliding_window is {}", self.sliding_window))
    }
}

impl Cost for SwaShape {
    fn flops(&self, layer: &ModelShape) -> LayerFlops {
        grouped_flops(layer)
    }

    fn activations(&self, call: &KeptCall<'_>) -> Activations {
        grouped_activations(call.layer)
    }

    fn backward_buffers(&self, call: &BackwardCall<'_>) -> u64 {
        call.of_neighbours(0, self.sliding_window)
    }

    fn cache(&self, layer: &ModelShape, seq_len: usize, value_bytes: u64) -> [u64; 2] {
        let kv = key_and_value(layer, value_bytes);
        [kv, kv * self.sliding_window.min(seq_len) as u64]
    }

    fn cache_in_row(&self, layer: &ModelShape, tokens: usize, value_bytes: u64) -> u64 {
        key_and_value(layer, value_bytes) * tokens as u64
    }

    fn halo(&self) -> Option<Halo> {
        // A window includes the query's own key.
        Some(Halo { reach: self.sliding_window.saturating_sub(1), from_all: false })
    }

    fn cached_window(&self) -> Option<usize> {
        Some(self.sliding_window)
    }

    fn exchanged(&self, layer: &ModelShape) -> Exchanged {
        Exchanged::of_one_op(layer)
    }
}

impl Launched for SwaShape {
    fn reads(&self) -> &'static [KeyReads] {
        &[KeyReads::Neighbours]
    }

    fn ops(&self, _layer: &ModelShape) -> &'static [AttentionOp] {
        &[AttentionOp::Attention]
    }
}

impl Exported for SwaShape {
    fn config_keys(&self, _layer: &ModelShape) -> Value {
        json!({ "window_size": self.sliding_window })
    }

    fn config_key<'a>(&self, key: &'a str) -> ConfigKey<'a> {
        match key {
            "sliding_window" => ConfigKey::named("window_size"),
            key => ConfigKey::named(key),
        }
    }

    fn stock(&self, model: &ModelShape) -> Result<Stock, Option<&'static str>> {
        grouped_stock(model)
    }
}
