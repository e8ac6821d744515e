//! DMA's own decoding (arXiv:2508.02124): `keep_window_size` slots a KV head. A new key overwrites the slot of the
//! smallest (score, position).
//!
//! A key's score is computed from its value, `z = A softplus(concat_kv(v) W_dt)`; of equal scores the earlier key is
//! evicted, and a new key may itself be the smallest. `exp(z)` (or z) is added to the logit of a kept key. `scores`
//! names a checkpoint of a DMA model, for `A` and `W_dt`; a dense checkpoint has none, and without them `A` is 0 as at
//! the start of DMA's training: all scores tie, which gives a sliding window.
//!
//! This is the published form: a model's `attention.recency` and `local_window_size` are not in the file, so keys rank
//! by z alone.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::path::Path;

use safetensors::{Dtype, SafeTensors};
use sieve_core::DmaBias;
use sieve_cpu::{AttentionShape, dma_scores_forward, rank_key};

use super::cache::{Cache, LayerShape, RowAttention, ascending};
use crate::prelude::*;

settings! {
    /// Settings of the decode method `dma`.
    pub struct DmaConfig {
        /// Keys a query reads, per KV head.
        pub keep_window_size: usize = 2048,
        /// What a score adds to the logits of its key.
        pub bias: DmaBias = DmaBias::Exp,
        /// A `model.safetensors` of a DMA model, for its scores z, without its recency and local window; empty: all
        /// scores are 0.
        pub scores: String = String::new(),
        /// The parsed weights of that file.
        #[serde(skip)]
        pub weights: Option<DmaWeights> = None,
    }
}

/// Weights of the scores of all layers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DmaWeights {
    /// The weights of each layer of the model.
    pub layers: Vec<DmaLayerWeights>,
}

/// Weights of the scores of one layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DmaLayerWeights {
    /// Factor `A` of each KV head's scores, `[num_kv_heads]`.
    pub a: Vec<f32>,
    /// Projection `W_dt`, `[num_kv_heads, num_kv_heads * head_dim]`.
    pub w_dt: Vec<f32>,
}

impl DmaConfig {
    pub(crate) fn check(&self) -> Result<(), SelectError> {
        Rules("dma").positive("keep_window_size", self.keep_window_size)
    }
}

impl DmaWeights {
    /// Reads a checkpoint's or an export's `model.safetensors`: `layers.N.self_attn.{a, dt_proj.weight}`, with or
    /// without `model.` in front; `A` may be upper case.
    ///
    /// # Errors
    /// A file that cannot be read, or lacks one of the tensors.
    pub fn read(path: &Path) -> Result<Self, SelectError> {
        let hint = "name the model.safetensors of a DMA checkpoint, or of its export";
        let problem = |problem: String| SelectError::file(path, hint, problem);
        let bytes = sieve_files::read_file(path).map_err(|error| problem(error.to_string()))?;
        let file = SafeTensors::deserialize(&bytes).map_err(|error| problem(error.to_string()))?;
        let mut weights = Self::default();
        loop {
            let layer = weights.layers.len();
            let find = |names: &[&str]| {
                names.iter().find_map(|name| {
                    ["", "model."]
                        .iter()
                        .find_map(|prefix| file.tensor(&format!("{prefix}layers.{layer}.self_attn.{name}")).ok())
                })
            };
            // The layers end where the file has no more such tensors.
            let (Some(a), Some(w_dt)) = (find(&["a", "A"]), find(&["dt_proj.weight"])) else {
                break;
            };
            let read = |tensor: safetensors::tensor::TensorView<'_>| {
                floats(&tensor).ok_or_else(|| problem(format!("layer {layer}: scores of {:?}", tensor.dtype())))
            };
            weights.layers.push(DmaLayerWeights { a: read(a)?, w_dt: read(w_dt)? });
        }
        if weights.layers.is_empty() {
            return Err(problem("it has no layers.0.self_attn.a".to_owned()));
        }
        Ok(weights)
    }
}

/// Elements of an f32 or bfloat16 tensor; `None` for another type.
pub(crate) fn floats(tensor: &safetensors::tensor::TensorView<'_>) -> Option<Vec<f32>> {
    match tensor.dtype() {
        Dtype::F32 => {
            let words = tensor.data().as_chunks::<4>().0;
            Some(words.iter().map(|b| f32::from_le_bytes(*b)).collect())
        }
        Dtype::BF16 => {
            let halves = tensor.data().as_chunks::<2>().0;
            let wide = |b: &[u8; 2]| half::bf16::from_le_bytes(*b).to_f32();
            Some(halves.iter().map(wide).collect())
        }
        _ => None,
    }
}

/// Larger z are cut to this, so that `exp(z)` stays finite.
const MAX_EXPONENT: f32 = 60.0;

/// State of the decode method `dma` in one layer.
#[derive(Clone, Debug)]
pub(crate) struct Dma {
    config: DmaConfig,
    weights: DmaLayerWeights,
    /// The kept keys per KV head, as a [`rank_key`] of score and position; the next to be evicted is on top.
    slots: Vec<BinaryHeap<Reverse<u64>>>,
    /// Scores z of all keys, `[keys, num_kv_heads]`.
    z: Vec<f32>,
}

impl Dma {
    /// The state before the first token. Without weights all scores are 0; weights of a different shape are refused.
    pub(crate) fn new(config: DmaConfig, shape: LayerShape) -> Result<Self, SelectError> {
        let (heads, width) = (shape.num_kv_heads, shape.num_kv_heads * shape.head_dim);
        let untrained = DmaLayerWeights { a: vec![0.0; heads], w_dt: vec![0.0; heads * width] };
        let weights = match &config.weights {
            None => untrained,
            Some(all) => match all.layers.get(shape.layer) {
                Some(layer) if (layer.a.len(), layer.w_dt.len()) == (heads, heads * width) => layer.clone(),
                found => {
                    return Rules("dma").fail(
                        format!(
                            "the scores of layer {} are of {} KV heads, the model has {heads} of {}",
                            shape.layer,
                            found.map_or(0, |layer| layer.a.len()),
                            shape.head_dim
                        ),
                        "take the scores of a DMA model of the same shape, or leave them out",
                    );
                }
            },
        };
        Ok(Self { config, weights, slots: vec![BinaryHeap::new(); heads], z: Vec::new() })
    }

    /// Scores the cache's keys that have no score yet, in the order of their positions, and evicts.
    pub(crate) fn extend(&mut self, cache: &Cache) {
        let heads = cache.shape.num_kv_heads;
        let width = heads * cache.shape.head_dim;
        for position in self.z.len() / heads..cache.len {
            let z = self.scores(cache, &cache.values[position * width..(position + 1) * width]);
            for (slots, &z) in self.slots.iter_mut().zip(&z) {
                slots.push(Reverse(rank_key(z, position)));
                if slots.len() > self.config.keep_window_size {
                    slots.pop();
                }
            }
            self.z.extend(z);
        }
    }

    /// Scores of a token, `[num_kv_heads]`, bit-equal to training's.
    fn scores(&self, cache: &Cache, v: &[f32]) -> Vec<f32> {
        let (heads, head_dim) = (cache.shape.num_kv_heads, cache.shape.head_dim);
        let mut z = vec![0.0; heads];
        if self.weights.a.iter().all(|&a| a == 0.0) {
            return z;
        }
        let shape = AttentionShape::new(1, 1, [heads; 2], [head_dim; 2]);
        // The function takes a packed [q, k, v] and reads only the values.
        let mut qkv = vec![0.0; 2 * v.len()];
        qkv.extend_from_slice(v);
        dma_scores_forward(shape, &qkv, &self.weights.w_dt, &self.weights.a, &mut z);
        z
    }

    /// The kept positions per KV head, which are the lower 32 bits of a [`rank_key`].
    pub(crate) fn choose(&mut self, cache: &Cache) -> Vec<Vec<u32>> {
        self.extend(cache);
        let positions = |slots: &BinaryHeap<Reverse<u64>>| ascending(slots.iter().map(|key| key.0 as u32 as usize));
        self.slots.iter().map(positions).collect()
    }

    /// Attention of a query head, with each key's bias added to its logit.
    pub(crate) fn attend(&self, cache: &Cache, head: usize, q: &[f32], list: &[u32]) -> RowAttention {
        let kv_head = head / cache.shape.group_size();
        let mut logits = cache.logits(kv_head, q, list);
        for (logit, &key) in logits.iter_mut().zip(list) {
            let z = self.z[key as usize * cache.shape.num_kv_heads + kv_head];
            *logit += match self.config.bias {
                DmaBias::Exp => z.min(MAX_EXPONENT).exp(),
                DmaBias::Linear => z,
            };
        }
        cache.weigh(kv_head, logits, list)
    }
}
