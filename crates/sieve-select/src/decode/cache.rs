//! What every decode method reads: the keys and values of a layer so far, and how keys are counted and attended.

use sieve_core::HeavyKeys;

use crate::prelude::*;
use crate::vector::dot;

/// Head counts and head width of one attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerShape {
    /// Number of query heads, a multiple of `num_kv_heads`.
    pub num_heads: usize,
    /// Number of key and value heads.
    pub num_kv_heads: usize,
    /// Columns of a head.
    pub head_dim: usize,
    /// Index of the layer in the model.
    pub layer: usize,
}

/// All keys and values of one layer so far.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    pub(crate) shape: LayerShape,
    pub(crate) keys: Vec<f32>,
    pub(crate) values: Vec<f32>,
    pub(crate) len: usize,
}

/// Attention of one query head over a list of keys: output `[head_dim]` and probabilities `[keys of the list]`.
pub(crate) struct RowAttention {
    pub(crate) o: Vec<f32>,
    pub(crate) p: Vec<f32>,
}

impl LayerShape {
    /// The sizes in the order of the fields.
    pub const fn new([num_heads, num_kv_heads]: [usize; 2], head_dim: usize, layer: usize) -> Self {
        Self { num_heads, num_kv_heads, head_dim, layer }
    }

    pub(super) fn call(&self, num_queries: usize, num_keys: usize) -> CallShape {
        CallShape::new([num_queries, num_keys], [self.num_heads, self.num_kv_heads], self.head_dim)
    }

    pub(crate) fn group_size(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }
}

impl Cache {
    pub(crate) fn key(&self, kv_head: usize, key: usize) -> &[f32] {
        let at = (key * self.shape.num_kv_heads + kv_head) * self.shape.head_dim;
        &self.keys[at..at + self.shape.head_dim]
    }

    pub(crate) fn value(&self, kv_head: usize, key: usize) -> &[f32] {
        let at = (key * self.shape.num_kv_heads + kv_head) * self.shape.head_dim;
        &self.values[at..at + self.shape.head_dim]
    }

    pub(crate) fn scale(&self) -> f32 {
        1.0 / (self.shape.head_dim as f32).sqrt()
    }

    /// Logits of a query over a list.
    pub(crate) fn logits(&self, kv_head: usize, q: &[f32], list: &[u32]) -> Vec<f32> {
        list.iter().map(|&j| self.scale() * dot(q, self.key(kv_head, j as usize))).collect()
    }

    /// Attention of a query head over a list.
    pub(crate) fn attend(&self, head: usize, q: &[f32], list: &[u32]) -> RowAttention {
        let kv_head = head / self.shape.group_size();
        self.weigh(kv_head, self.logits(kv_head, q, list), list)
    }

    /// Replaces the logits over a list, given in `p`, by their softmax, and sums the values weighted by it.
    pub(crate) fn weigh(&self, kv_head: usize, mut p: Vec<f32>, list: &[u32]) -> RowAttention {
        let max = p.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0;
        for p in &mut p {
            *p = (*p - max).exp();
            sum += *p;
        }
        let mut o = vec![0.0; self.shape.head_dim];
        for (p, &j) in p.iter_mut().zip(list) {
            *p /= sum;
            for (o, &v) in o.iter_mut().zip(self.value(kv_head, j as usize)) {
                *o += *p * v;
            }
        }
        RowAttention { o, p }
    }
}

/// A setting that is a share of `tokens` if below 1, else a number of tokens. At least 1.
pub(crate) fn amount(value: f64, tokens: usize) -> usize {
    let amount = if value < 1.0 { value * tokens as f64 } else { value };
    // No text has 2^29 tokens, and the sum of two amounts fits an i32.
    (amount.round() as usize).clamp(1, 1 << 29)
}

/// Key positions in ascending order, without duplicates.
pub(crate) fn ascending(keys: impl Iterator<Item = usize>) -> Vec<u32> {
    let mut keys: Vec<u32> = keys.map(|key| key as u32).collect();
    keys.sort_unstable();
    keys.dedup();
    keys
}

/// The selection of `num_kept` keys of a prompt: its `num_last` last keys, and the earlier keys with the most attention
/// from its last `num_queries` queries. A prompt of at most `num_kept` keys keeps all.
pub(crate) fn most_attended(shape: CallShape, num_queries: usize, [num_kept, num_last]: [usize; 2]) -> HeavyKeys {
    let num_keys = shape.num_keys;
    let shape = CallShape { num_queries: num_queries.min(num_keys), ..shape };
    let [num_ranked, last] = if num_keys <= num_kept { [num_keys, 0] } else { [num_kept - num_last, num_last] };
    let block = 1;
    HeavyKeys {
        selection: BlockSelection::new(shape, block, BlockScores::Logits, KeepBlocks::Top(num_ranked)),
        last,
        width: 1,
        by_largest: false,
        slots: None,
    }
}
