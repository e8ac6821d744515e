//! StreamingLLM while decoding: the first and the last tokens, at their own positions or (`reindex`) at their positions
//! in the cache.

use super::cache::{Cache, RowAttention};
use super::rope::rotate;
use crate::prefill::streaming::StreamingConfig;
use crate::prelude::*;
use crate::vector::dot;

/// State of `streamingllm`: none beside the settings.
#[derive(Clone, Debug)]
pub(crate) struct Streaming {
    config: StreamingConfig,
    /// Theta of the rotary embedding, with `reindex`.
    rope_theta: Option<f64>,
}

impl Streaming {
    pub(crate) fn new(config: StreamingConfig) -> Result<Self, SelectError> {
        let rules = Rules("streamingllm");
        let rope_theta = if config.reindex { Some(rules.need_rope_theta(config.rope_theta)?) } else { None };
        Ok(Self { config, rope_theta })
    }

    pub(crate) fn choose(&self, cache: &Cache) -> Vec<Vec<u32>> {
        let local = cache.len.saturating_sub(self.config.n_local);
        let init = self.config.n_init.min(local);
        let list: Vec<u32> = (0..init).chain(local..cache.len).map(|key| key as u32).collect();
        vec![list; cache.shape.num_kv_heads]
    }

    /// Attention of a query head. With `reindex`, distances are those between kept keys.
    pub(crate) fn attend(&self, cache: &Cache, head: usize, q: &[f32], list: &[u32]) -> RowAttention {
        let Some(rope_theta) = self.rope_theta else {
            return cache.attend(head, q, list);
        };
        let kv_head = head / cache.shape.group_size();
        // The local keys are contiguous and keep their distances. The first keys come nearer by the tokens left out.
        let gap = cache.len - list.len();
        let near = rotate(q, -(gap as f64), rope_theta);
        let logits = list
            .iter()
            .map(|&j| {
                let q = if (j as usize) < self.config.n_init { &near } else { q };
                cache.scale() * dot(q, cache.key(kv_head, j as usize))
            })
            .collect();
        cache.weigh(kv_head, logits, list)
    }
}
