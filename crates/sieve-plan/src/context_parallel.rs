//! Context parallelism: which part of a row a rank holds, and what the ranks exchange in each layer.

use sieve_core::kinds::Exchanged;
use sieve_core::model::ModelShape;
use sieve_core::recipe::Recipe;

/// How the ranks share the rows of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowShare {
    /// Ranks that share a row, each with an equal part; 1 without context parallelism.
    pub(crate) degree: usize,
    /// Tokens of a whole row, on all its ranks.
    pub(crate) seq_len: usize,
    /// Rows of a micro-batch.
    pub(crate) batch: usize,
}

/// What the ranks exchange for the attention of one layer.
enum Exchange {
    /// All-to-all: each rank gives its own tokens of all heads, and gets all tokens of its share of the heads.
    Heads,
    /// Each rank sends its last `share` keys to the ranks of later parts of the row. The last rank puts `slots` of
    /// them, the halo, before its own keys.
    Halo { slots: usize, share: usize },
}

impl RowShare {
    pub(crate) fn of(recipe: &Recipe) -> Self {
        Self {
            degree: recipe.parallelism.context_parallel_degree.max(1),
            seq_len: recipe.training.seq_len,
            batch: recipe.training.local_batch_size,
        }
    }

    /// Groups of `ranks` ranks with different rows: ranks that share a row count as one.
    pub(crate) fn groups(&self, ranks: usize) -> usize {
        (ranks / self.degree).max(1)
    }

    /// Micro-batches of a step of `global_batch_size` rows on each of `ranks` ranks.
    pub(crate) fn micro_batches(&self, global_batch_size: usize, ranks: usize) -> usize {
        global_batch_size / self.batch / self.groups(ranks)
    }

    /// Tokens of a micro-batch on one rank.
    pub(crate) fn tokens(&self) -> usize {
        self.batch * self.seq_len / self.degree
    }

    /// The exchange of a layer; `None` without context parallelism. Attention that keeps a bounded number of keys needs
    /// a halo; any other exchanges heads, or needs all earlier keys if the ranks cannot divide the KV heads.
    fn exchange(&self, layer: &ModelShape) -> Option<Exchange> {
        if self.degree < 2 {
            return None;
        }
        let len = self.seq_len / self.degree;
        let reach = match layer.attention.as_kind().halo() {
            Some(halo) => halo.reach,
            None if layer.num_kv_heads.is_multiple_of(self.degree) => return Some(Exchange::Heads),
            // All earlier keys.
            None => self.seq_len,
        };
        Some(Exchange::Halo { slots: reach.min((self.degree - 1) * len), share: reach.min(len) })
    }

    /// The layer's shape with the heads that one rank computes, and the tokens of its rows in attention: all tokens of
    /// a row if heads are exchanged.
    pub(crate) fn attention(&self, layer: &ModelShape) -> (ModelShape, usize) {
        let mut own = layer.clone();
        let degree = match self.exchange(layer) {
            Some(Exchange::Heads) => self.degree,
            _ => 1,
        };
        own.num_heads /= degree;
        own.num_kv_heads /= degree;
        (own, self.seq_len * degree / self.degree)
    }

    /// KV length of this layer on the last context-parallel rank.
    pub(crate) fn attended(&self, layer: &ModelShape) -> usize {
        match self.exchange(layer) {
            Some(Exchange::Halo { slots, .. }) => slots + self.seq_len / self.degree,
            _ => self.seq_len,
        }
    }

    /// Bytes that one layer keeps for its backward pass in addition to the activations of its own tokens.
    pub(crate) fn kept_bytes(&self, layer: &ModelShape, value_bytes: u64) -> u64 {
        let (q, kv) = (layer.q_width() as u64, layer.kv_width() as u64);
        let values = match self.exchange(layer) {
            None => 0,
            Some(Exchange::Heads) => self.kept_values_of_heads(layer),
            // Keeps K and V of the halo, and the outputs of its queries, which are zeros.
            Some(Exchange::Halo { slots, .. }) => (self.batch * slots) as u64 * (2 * kv + q),
        };
        values * value_bytes
    }

    /// Temporary bytes of the exchange in the backward pass of a layer's attention.
    pub(crate) fn temporary_bytes(&self, layer: &ModelShape, value_bytes: u64) -> u64 {
        let (q, kv) = (layer.q_width() as u64, layer.kv_width() as u64);
        let packed = q + 2 * kv;
        let values = match self.exchange(layer) {
            None => 0,
            // The gradient of packed q, k and v as received, and the gradient of o.
            Some(Exchange::Heads) => {
                let Exchanged { split, shared, .. } = layer.attention.as_kind().exchanged(layer);
                self.tokens() as u64 * (split + self.degree as u64 * shared + 2 * q)
            }
            // The rows with their halo, their gradient, and the keys received from all ranks.
            Some(Exchange::Halo { slots, share }) => {
                let received = share * (self.degree - 1);
                self.tokens() as u64 * (packed + q)
                    + (self.batch * slots) as u64 * (2 * packed + q)
                    + (self.batch * received) as u64 * 4 * kv
            }
        };
        values * value_bytes
    }

    /// Bytes that the busiest rank receives in one micro-batch. Forward passes run `1 + recomputed` times.
    pub(crate) fn exchanged_bytes(&self, shape: &ModelShape, value_bytes: u64, recomputed: f64) -> f64 {
        value_bytes as f64 * self.over_layers(shape, recomputed, Self::exchanged)
    }

    /// Bytes that copies for the exchange read and write in one micro-batch: making the slice for each rank contiguous,
    /// and placing the halo before a rank's own tokens.
    pub(crate) fn copied_bytes(&self, shape: &ModelShape, value_bytes: u64, recomputed: f64) -> f64 {
        // Factor 2: each value is read and written.
        2.0 * value_bytes as f64 * self.over_layers(shape, recomputed, Self::copied)
    }

    /// Sum over all layers and passes of `values`, which gives `[forward, backward]` of one layer.
    fn over_layers(&self, shape: &ModelShape, recomputed: f64, values: impl Fn(&Self, &ModelShape) -> [f64; 2]) -> f64 {
        let layers = (0..shape.num_layers).map(|layer_idx| {
            let [forward, backward] = values(self, &shape.of_layer(layer_idx));
            (1.0 + recomputed) * forward + backward
        });
        layers.sum()
    }

    /// Values that the busiest rank receives for one layer: `[forward, backward]`.
    fn exchanged(&self, layer: &ModelShape) -> [f64; 2] {
        let (q, kv) = (layer.q_width() as f64, layer.kv_width() as f64);
        match self.exchange(layer) {
            None => [0.0; 2],
            Some(Exchange::Heads) => {
                let Exchanged { split, shared, again, .. } = layer.attention.as_kind().exchanged(layer);
                let [split, shared, again] = [split, shared, again].map(|values| values as f64);
                let others = self.tokens() as f64 * (1.0 - 1.0 / self.degree as f64);
                // Shared tensors go to every rank, and every rank sends back their gradients.
                let all = others * (split + q + self.degree as f64 * shared);
                [all, all + others * again]
            }
            Some(Exchange::Halo { slots, share }) => {
                // The last rank receives the shares of all others for DMA, else those in the window's reach.
                let parts = match layer.attention.as_kind().halo() {
                    Some(halo) if halo.from_all => self.degree - 1,
                    _ => slots.div_ceil(share.max(1)),
                };
                [(self.batch * share * parts) as f64 * 2.0 * kv; 2]
            }
        }
    }

    /// Values that are copied for the exchange of one layer: `[forward, backward]`.
    fn copied(&self, layer: &ModelShape) -> [f64; 2] {
        let (q, kv) = (layer.q_width() as f64, layer.kv_width() as f64);
        let (own, packed) = (self.tokens() as f64, q + 2.0 * kv);
        match self.exchange(layer) {
            None => [0.0; 2],
            // Forward: q, k, v and o. Backward: their gradients, and in a one-op layer q, k and v again.
            Some(Exchange::Heads) => {
                let Exchanged { split, shared, again, .. } = layer.attention.as_kind().exchanged(layer);
                let [split, shared, again] = [split, shared, again].map(|values| values as f64);
                let all = own * (split + q + self.degree as f64 * shared);
                [all, all + own * again]
            }
            // Forward: the rows with their halo. Backward: these rows again with the gradient of o, which is zero in
            // the halo, and the gradient of the rank's own tokens.
            Some(Exchange::Halo { slots, .. }) => {
                let longer = own + (self.batch * slots) as f64;
                [longer * packed, longer * (packed + q) + own * packed]
            }
        }
    }

    /// Values that a layer with [`Exchange::Heads`] keeps in addition to its own tokens' values.
    fn kept_values_of_heads(&self, layer: &ModelShape) -> u64 {
        let Exchanged { shared, kept_outputs, kept_shared, .. } = layer.attention.as_kind().exchanged(layer);
        // Shared tensors are kept for whole rows.
        self.tokens() as u64 * (kept_outputs + (self.degree as u64 * shared).saturating_sub(kept_shared))
    }

    /// Queries that attention computes for each of a rank's own queries. With a halo there are more: each of its keys
    /// comes with a query of zeros.
    pub(crate) fn queries_for_each(&self, shape: &ModelShape) -> f64 {
        let own = (self.seq_len / self.degree).max(1) as f64;
        let layers = (0..shape.num_layers).map(|layer_idx| {
            let layer = shape.of_layer(layer_idx);
            match self.exchange(&layer) {
                Some(Exchange::Halo { slots, .. }) => 1.0 + slots as f64 / own,
                _ => 1.0,
            }
        });
        layers.sum::<f64>() / shape.num_layers.max(1) as f64
    }
}
