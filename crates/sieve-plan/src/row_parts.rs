//! Context parallelism: what a process has of a row, and what crosses to the others in each layer.

use sieve_core::model::{Attention, ModelShape};
use sieve_core::recipe::Recipe;

/// How the rows of a recipe are shared out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowShare {
    /// Processes that share a row.
    pub(crate) degree: usize,
    /// Tokens of a row.
    pub(crate) seq_len: usize,
    /// Rows of a micro-batch.
    pub(crate) batch: usize,
}

/// What attention of one layer does with rows in parts.
enum Way {
    /// Tokens are exchanged for heads.
    Heads,
    /// `slots` keys of earlier parts stand before the last part, and each part gives `share` keys.
    Border { slots: usize, share: usize },
}

impl RowShare {
    pub(crate) fn of(recipe: &Recipe) -> Self {
        Self {
            degree: recipe.parallelism.context_parallel_degree.max(1),
            seq_len: recipe.training.seq_len,
            batch: recipe.training.local_batch_size,
        }
    }

    /// Tokens of a micro-batch in one process.
    pub(crate) fn tokens(&self) -> usize {
        self.batch * self.seq_len / self.degree
    }

    fn way(&self, layer: &ModelShape) -> Option<Way> {
        if self.degree < 2 {
            return None;
        }
        let len = self.seq_len / self.degree;
        let reach = match layer.attention {
            Attention::Dma(dma) => dma.keep_window_size,
            Attention::Swa(swa) => swa.sliding_window.saturating_sub(1),
            _ if layer.num_kv_heads.is_multiple_of(self.degree) => return Some(Way::Heads),
            _ => self.seq_len,
        };
        Some(Way::Border {
            slots: reach.min((self.degree - 1) * len),
            share: reach.min(len),
        })
    }

    /// The recipe with rows as long as the tokens that one process has.
    pub(crate) fn recipe_of_part(&self, recipe: &Recipe) -> Recipe {
        let mut part = recipe.clone();
        part.training.seq_len = (self.seq_len / self.degree).max(1);
        part
    }

    /// KV length of this layer on the last context-parallel rank.
    pub(crate) fn attended(&self, layer: &ModelShape) -> usize {
        match self.way(layer) {
            Some(Way::Border { slots, .. }) => slots + self.seq_len / self.degree,
            _ => self.seq_len,
        }
    }

    /// Bytes that one layer keeps for its backward pass beside what its own tokens need.
    pub(crate) fn kept_bytes(&self, layer: &ModelShape, value_bytes: u64) -> u64 {
        let (q, kv) = (layer.q_width() as u64, layer.kv_width() as u64);
        let values = match self.way(layer) {
            None => 0,
            // The output as whole rows of some heads.
            Some(Way::Heads) => self.tokens() as u64 * q,
            // K and V of the border, and outputs of its queries, which are zeros.
            Some(Way::Border { slots, .. }) => (self.batch * slots) as u64 * (2 * kv + q),
        };
        values * value_bytes
    }

    /// Bytes that the backward pass of a layer's attention holds for the exchange.
    pub(crate) fn temporary_bytes(&self, layer: &ModelShape, value_bytes: u64) -> u64 {
        let (q, kv) = (layer.q_width() as u64, layer.kv_width() as u64);
        let packed = q + 2 * kv;
        let values = match self.way(layer) {
            None => 0,
            // The packed gradient as it arrives, and the gradient of o.
            Some(Way::Heads) => self.tokens() as u64 * (packed + 2 * q),
            // The longer rows, their gradient, and all candidates.
            Some(Way::Border { slots, share }) => {
                let all = share * (self.degree - 1);
                self.tokens() as u64 * (packed + q)
                    + (self.batch * slots) as u64 * (2 * packed + q)
                    + (self.batch * all) as u64 * 4 * kv
            }
        };
        values * value_bytes
    }

    /// Bytes that reach the busiest process in one micro-batch, whose forward passes run `1 + recomputed` times.
    pub(crate) fn exchanged_bytes(&self, shape: &ModelShape, value_bytes: u64, recomputed: f64) -> f64 {
        let layers = (0..shape.num_layers).map(|layer_idx| {
            let layer = shape.of_layer(layer_idx);
            let (q, kv) = (layer.q_width() as f64, layer.kv_width() as f64);
            let [forward, backward] = match self.way(&layer) {
                None => [0.0; 2],
                Some(Way::Heads) => {
                    let others = self.tokens() as f64 * (1.0 - 1.0 / self.degree as f64);
                    // q, k, v and o; their gradients, and q, k and v again.
                    [others * (2.0 * q + 2.0 * kv), others * (3.0 * q + 4.0 * kv)]
                }
                Some(Way::Border { slots, share }) => {
                    let parts = match layer.attention {
                        Attention::Dma(_) => self.degree - 1,
                        _ => slots.div_ceil(share.max(1)),
                    };
                    [(self.batch * share * parts) as f64 * 2.0 * kv; 2]
                }
            };
            (1.0 + recomputed) * forward + backward
        });
        value_bytes as f64 * layers.sum::<f64>()
    }

    /// Bytes that copies around the exchange read and write in one micro-batch: what goes to one process in one piece,
    /// and the border before a process's own tokens.
    pub(crate) fn copied_bytes(&self, shape: &ModelShape, value_bytes: u64, recomputed: f64) -> f64 {
        let layers = (0..shape.num_layers).map(|layer_idx| {
            let layer = shape.of_layer(layer_idx);
            let (q, kv) = (layer.q_width() as f64, layer.kv_width() as f64);
            let (own, packed) = (self.tokens() as f64, q + 2.0 * kv);
            let [forward, backward] = match self.way(&layer) {
                None => [0.0; 2],
                // Forward: q, k, v and o. Backward: q, k and v again, their gradients, and do.
                Some(Way::Heads) => [own * (packed + q), own * (2.0 * packed + q)],
                // Forward: the longer rows. Backward: the same again, do behind zeros, and dqkv of the own tokens.
                Some(Way::Border { slots, .. }) => {
                    let longer = own + (self.batch * slots) as f64;
                    [longer * packed, longer * (packed + q) + own * packed]
                }
            };
            (1.0 + recomputed) * forward + backward
        });
        // Each value is read and written.
        2.0 * value_bytes as f64 * layers.sum::<f64>()
    }

    /// How many queries attention computes for each of a process's own; the border's are zeros.
    pub(crate) fn queries_for_each(&self, shape: &ModelShape) -> f64 {
        let own = (self.seq_len / self.degree).max(1) as f64;
        let layers = (0..shape.num_layers).map(|layer_idx| {
            let layer = shape.of_layer(layer_idx);
            match self.way(&layer) {
                Some(Way::Border { slots, .. }) => 1.0 + slots as f64 / own,
                _ => 1.0,
            }
        });
        layers.sum::<f64>() / shape.num_layers.max(1) as f64
    }
}
