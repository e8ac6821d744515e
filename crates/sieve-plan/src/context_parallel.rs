//! Context parallelism: what a process has of a row, and what crosses to the others in each layer.

use sieve_core::model::{AttentionForm, ModelShape, NUM_NSA_BRANCHES, NsaCompression};
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

    /// Tokens of a micro-batch in one process.
    pub(crate) fn tokens(&self) -> usize {
        self.batch * self.seq_len / self.degree
    }

    fn way(&self, layer: &ModelShape) -> Option<Way> {
        if self.degree < 2 {
            return None;
        }
        let len = self.seq_len / self.degree;
        let form = layer.attention.form();
        let reach = match (form, form.num_kept()) {
            (AttentionForm::Ranked(_), Some(kept)) => kept,
            // A window counts the query's own key.
            (_, Some(window)) => window.saturating_sub(1),
            _ if layer.num_kv_heads.is_multiple_of(self.degree) => return Some(Way::Heads),
            _ => self.seq_len,
        };
        Some(Way::Halo {
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

    /// Attention of one layer as one process computes it: its heads, and the tokens of its rows.
    pub(crate) fn attention(&self, layer: &ModelShape) -> (ModelShape, usize) {
        let mut own = layer.clone();
        let degree = match self.way(layer) {
            Some(Way::Heads) => self.degree,
            _ => 1,
        };
        own.num_heads /= degree;
        own.num_kv_heads /= degree;
        (own, self.seq_len * degree / self.degree)
    }

    /// KV length of this layer on the last context-parallel rank.
    pub(crate) fn attended(&self, layer: &ModelShape) -> usize {
        match self.way(layer) {
            Some(Way::Halo { slots, .. }) => slots + self.seq_len / self.degree,
            _ => self.seq_len,
        }
    }

    /// Bytes that one layer keeps for its backward pass beside what its own tokens need.
    pub(crate) fn kept_bytes(&self, layer: &ModelShape, value_bytes: u64) -> u64 {
        let (q, kv) = (layer.q_width() as u64, layer.kv_width() as u64);
        let values = match self.way(layer) {
            None => 0,
            Some(Way::Heads) => self.kept_values_of_heads(layer),
            // K and V of the border, and outputs of its queries, which are zeros.
            Some(Way::Halo { slots, .. }) => (self.batch * slots) as u64 * (2 * kv + q),
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
            Some(Way::Heads) => {
                let [split, shared] = exchanged_values(layer);
                self.tokens() as u64 * (split + self.degree as u64 * shared + 2 * q)
            }
            // The longer rows, their gradient, and all candidates.
            Some(Way::Halo { slots, share }) => {
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
                    let [split, shared] = exchanged_values(&layer).map(|values| values as f64);
                    let others = self.tokens() as f64 * (1.0 - 1.0 / self.degree as f64);
                    // What is shared goes to every process, and its gradients come from every one.
                    let all = others * (split + q + self.degree as f64 * shared);
                    // A layer that is one op exchanges q, k and v again in its backward pass.
                    let is_one_op = layer.attention.form().is_one_op();
                    let again = if is_one_op { others * split } else { 0.0 };
                    [all, all + again]
                }
                Some(Way::Halo { slots, share }) => {
                    let parts = match layer.attention.form() {
                        AttentionForm::Ranked(_) => self.degree - 1,
                        _ => slots.div_ceil(share.max(1)),
                    };
                    [(self.batch * share * parts) as f64 * 2.0 * kv; 2]
                }
            };
            (1.0 + recomputed) * forward + backward
        });
        value_bytes as f64 * layers.sum::<f64>()
    }

    /// Bytes that copies around the exchange read and write in one micro-batch: slices for each process made
    /// contiguous, and the halo before a process's own tokens.
    pub(crate) fn copied_bytes(&self, shape: &ModelShape, value_bytes: u64, recomputed: f64) -> f64 {
        let layers = (0..shape.num_layers).map(|layer_idx| {
            let layer = shape.of_layer(layer_idx);
            let (q, kv) = (layer.q_width() as f64, layer.kv_width() as f64);
            let (own, packed) = (self.tokens() as f64, q + 2.0 * kv);
            let [forward, backward] = match self.way(&layer) {
                None => [0.0; 2],
                // q, k, v and o; the same again, their gradients, and that of o.
                Some(Way::Heads) => {
                    let [split, shared] = exchanged_values(&layer).map(|values| values as f64);
                    let all = own * (split + q + self.degree as f64 * shared);
                    let is_one_op = layer.attention.form().is_one_op();
                    [all, if is_one_op { all + own * split } else { all }]
                }
                // The longer rows; the same again, the gradient of o behind zeros, and that of the own tokens.
                Some(Way::Halo { slots, .. }) => {
                    let longer = own + (self.batch * slots) as f64;
                    [longer * packed, longer * (packed + q) + own * packed]
                }
            };
            (1.0 + recomputed) * forward + backward
        });
        // Each value is read and written.
        2.0 * value_bytes as f64 * layers.sum::<f64>()
    }

    /// Values that a layer keeps beside what its own tokens need, where tokens are exchanged for heads.
    fn kept_values_of_heads(&self, layer: &ModelShape) -> u64 {
        let (degree, [_, shared]) = (self.degree as u64, exchanged_values(layer));
        // The output as whole rows of some heads; NSA keeps its branches so anyway.
        let outputs = match layer.attention.form() {
            AttentionForm::Branches(_) => 0,
            _ => layer.q_width() as u64,
        };
        // What every process gets of whole rows, in place of the same of its own tokens.
        let own = match layer.attention.form() {
            AttentionForm::Latent(mla) => mla.kv_lora_rank as u64,
            _ => shared,
        };
        self.tokens() as u64 * (outputs + (degree * shared).saturating_sub(own))
    }

    /// How many queries attention computes for each of a process's own; the border's are zeros.
    pub(crate) fn queries_for_each(&self, shape: &ModelShape) -> f64 {
        let own = (self.seq_len / self.degree).max(1) as f64;
        let layers = (0..shape.num_layers).map(|layer_idx| {
            let layer = shape.of_layer(layer_idx);
            match self.way(&layer) {
                Some(Way::Halo { slots, .. }) => 1.0 + slots as f64 / own,
                _ => 1.0,
            }
        });
        layers.sum::<f64>() / shape.num_layers.max(1) as f64
    }
}

/// Values a token that one layer exchanges before its attention: heads divided among the processes, and tensors that
/// every process receives.
fn exchanged_values(layer: &ModelShape) -> [u64; 2] {
    let (q, kv) = (layer.q_width() as u64, layer.kv_width() as u64);
    let (heads, head_dim) = (layer.num_heads as u64, layer.head_dim as u64);
    let packed = q + 2 * kv;
    match layer.attention.form() {
        AttentionForm::Latent(mla) => {
            let (rank, rope) = (mla.kv_lora_rank as u64, mla.qk_rope_head_dim as u64);
            [q + heads * rope, rank + rope]
        }
        // The window's packed tensor, those of the other branches where they are others, and the gates.
        AttentionForm::Branches(nsa) => {
            let is_mean = nsa.compress == NsaCompression::Mean;
            let tensors = match (nsa.shared_kv, is_mean) {
                (true, true) => 1,
                (true, false) => 2,
                (false, _) => NUM_NSA_BRANCHES as u64,
            };
            [tensors * packed + NUM_NSA_BRANCHES as u64 * heads, 0]
        }
        AttentionForm::Blocks(choice) if choice.has_indexer() => [packed + kv, 2 * head_dim],
        AttentionForm::Grouped { .. } | AttentionForm::Ranked(_) | AttentionForm::Blocks(_) => [packed, 0],
    }
}
