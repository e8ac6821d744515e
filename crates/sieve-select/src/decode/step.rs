//! What devices need to know of decode selectors: which keys a decoded token reads, and which keys of a prompt stay.
use sieve_core::{HeavyKeys, TokenKeys};

use super::cache::amount;
use super::quest::QuestConfig;
use crate::prelude::*;
use crate::selector::{Method, Selector};

impl Selector {
    /// Whether every decoded token reads all keys before it in a layer.
    pub fn reads_all(&self, layer: usize) -> bool {
        let is_dense = |quest: &QuestConfig| layer < quest.dense_layers;
        self.is_dense_layer(layer) || matches!(&self.method, Method::Quest(quest) if is_dense(quest))
    }

    /// The keys that the last of `num_keys` tokens reads in a layer. `None` if it reads [all keys](Self::reads_all), if
    /// the method decodes on the host, or if it chooses only once, by [`heavy_keys`](Self::heavy_keys).
    pub fn token_keys(&self, num_keys: usize, layer: usize) -> Option<TokenKeys> {
        if self.reads_all(layer) {
            return None;
        }
        match &self.method {
            Method::Streamingllm(config) if !config.reindex => {
                Some(TokenKeys::Ends { first: config.n_init, last: config.n_local })
            }
            Method::Quest(config) => Some(TokenKeys::Pages { page: config.page, count: config.num_pages(num_keys) }),
            Method::ExactTop(config) => Some(TokenKeys::Largest(amount(config.k, num_keys))),
            _ => None,
        }
    }

    /// Whether [`token_keys`](Self::token_keys) grows with the text: a share of its keys instead of a number.
    pub fn reads_a_share(&self) -> bool {
        match &self.method {
            Method::Quest(config) => config.budget < 1.0,
            Method::ExactTop(config) => config.k < 1.0,
            _ => false,
        }
    }

    /// How a device chooses the keys to keep of a prompt of `shape.num_keys` tokens, for methods that choose once;
    /// later tokens read these and all newer keys. `None` for other methods.
    pub fn heavy_keys(&self, shape: CallShape, layer: usize) -> Option<HeavyKeys> {
        if self.is_dense_layer(layer) {
            return None;
        }
        match &self.method {
            Method::Snapkv(config) => Some(config.heavy_keys(shape)),
            Method::H2o(config) => Some(config.heavy_keys(shape)),
            _ => None,
        }
    }

    /// Whether the method decodes on a device, by [`token_keys`](Self::token_keys) or [`heavy_keys`](Self::heavy_keys):
    /// the kernels of some methods take only some widths of heads.
    pub fn steps_on_device(&self, head_dim: usize) -> bool {
        match &self.method {
            Method::Streamingllm(config) => !config.reindex,
            Method::Dense => true,
            Method::Quest(_) => head_dim.is_multiple_of(32),
            Method::ExactTop(_) => [64, 128].contains(&head_dim),
            Method::Snapkv(_) | Method::H2o(_) => head_dim.is_multiple_of(64),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_that_read_all_keys_choose_none() {
        for (text, dense_layers) in [("quest", 2), ("quest:first_dense_layers=3", 3), ("exact_top", 0)] {
            let selector = Selector::parse(text).expect("valid");
            for layer in 0..5 {
                let reads_all = layer < dense_layers;
                assert_eq!(selector.reads_all(layer), reads_all, "{text} {layer}");
                assert_eq!(selector.token_keys(300, layer).is_none(), reads_all, "{text} {layer}");
            }
        }
    }

    #[test]
    fn a_device_keeps_of_a_prompt_what_the_method_says() {
        let shape = CallShape::new([300, 300], [4, 2], 64);
        let of = |text: &str, layer| {
            let selector = Selector::parse(text).expect("valid");
            selector.heavy_keys(shape, layer)
        };
        for text in ["quest", "streamingllm", "infllm", "meanpool"] {
            assert_eq!(of(text, 0), None, "{text}");
        }
        assert_eq!(of("h2o:first_dense_layers=2", 1), None);
        let kept = |text: &str| {
            let heavy = of(text, 0).expect("a device takes it");
            let selection = heavy.selection;
            (selection.shape.num_queries, selection.keep.by, heavy.last)
        };
        // H2O keeps 30 heavy keys, one more that the next token evicts, and 15 recent keys.
        let h2o = "h2o:heavy=0.1,recent=15";
        assert_eq!(kept(h2o), (300, KeepBlocks::Top(31), 15));
        let slots = of(h2o, 0).and_then(|heavy| heavy.slots);
        let slots = slots.map(|slots| [slots.keep_window_size, slots.local_window_size]);
        assert_eq!(slots, Some([46, 16]));
        let snapkv = "snapkv:capacity=100,window=20";
        assert_eq!(kept(snapkv), (20, KeepBlocks::Top(80), 20));
        // Of a prompt within the capacity all keys are kept.
        assert_eq!(kept("snapkv"), (32, KeepBlocks::Top(300), 0));
        let selector = Selector::parse(h2o).expect("valid");
        assert_eq!([64, 96, 128].map(|width| selector.steps_on_device(width)), [true, false, true]);
    }
}
