//! Sizes of an attention layer without a model. The file of each kind has the method that builds its layer.
use crate::WeightInit;
use burn::tensor::backend::Backend;
use sieve_core::{Attention, LayerPattern, ModelShape, RopeLayers};
use sieve_ops::RotaryEmbedding;
use thiserror::Error;

/// Sizes and initialisation of one attention layer.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionConfig {
    /// Width of the residual stream.
    pub d_model: usize,
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of one head; even, because RoPE rotates pairs.
    pub head_dim: usize,
    /// Epsilon of the per-head norms; 1e-6 by [`new`](Self::new).
    pub rms_norm_eps: f64,
    /// Standard deviation of the normal initialisation; 0.02 by [`new`](Self::new).
    pub initializer_range: f64,
    /// Base of the rotary frequencies; 10 000 by [`new`](Self::new).
    pub rope_theta: f64,
    /// Seed of the weights; 0 by [`new`](Self::new).
    pub seed: u64,
}

/// The sizes of an attention layer are invalid; its text says how to fix them.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("attention: {0}")]
pub struct AttentionConfigError(String);

impl AttentionConfig {
    /// A configuration with these sizes and the defaults that the fields name.
    pub fn new(d_model: usize, num_heads: usize, num_kv_heads: usize, head_dim: usize) -> Self {
        Self {
            d_model,
            num_heads,
            num_kv_heads,
            head_dim,
            rms_norm_eps: 1e-6,
            initializer_range: 0.02,
            rope_theta: 10_000.0,
            seed: 0,
        }
    }

    /// Checks the sizes.
    ///
    /// # Errors
    /// The first invalid size.
    pub fn validate(&self) -> Result<(), AttentionConfigError> {
        let sizes = [
            ("d_model", self.d_model),
            ("num_heads", self.num_heads),
            ("num_kv_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
        ];
        let (num_heads, num_kv_heads, head_dim) = (self.num_heads, self.num_kv_heads, self.head_dim);
        let problem = if let Some((name, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            format!("{name} is 0\n  hint: give at least 1")
        } else if !num_heads.is_multiple_of(num_kv_heads) {
            format!(
                "num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}\n  \
                 hint: each KV head serves the same number of query heads"
            )
        } else if !head_dim.is_multiple_of(2) {
            format!("head_dim {head_dim} is odd\n  hint: RoPE rotates pairs of channels; give an even number")
        } else {
            return Ok(());
        };
        Err(AttentionConfigError(problem))
    }

    /// RoPE tables for positions `0..max_positions`.
    pub fn rope<B: Backend>(&self, max_positions: usize, device: &B::Device) -> RotaryEmbedding<B> {
        RotaryEmbedding::new(self.head_dim, max_positions, self.rope_theta, device)
    }

    pub(crate) fn weights(&self) -> WeightInit {
        WeightInit::new(self.seed, self.initializer_range)
    }

    /// The shape of a model with this layer's sizes. Fields that attention layers do not read are 0 or empty.
    pub(crate) fn shape(&self, attention: Attention) -> ModelShape {
        if let Err(error) = self.validate() {
            panic!("{error}");
        }
        ModelShape {
            d_model: self.d_model,
            d_ff: 0,
            num_layers: 1,
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            vocab_size: 0,
            rope_theta: self.rope_theta,
            rms_norm_eps: self.rms_norm_eps,
            tie_word_embeddings: true,
            max_seq_len: 0,
            initializer_range: self.initializer_range,
            residual_scale: false,
            qk_norm: true,
            qkv_bias: false,
            attention_sinks: false,
            rope_scaling: None,
            rope_layers: RopeLayers::default(),
            attention,
            layers: LayerPattern::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_sizes_are_refused_by_name() {
        let valid = AttentionConfig::new(64, 4, 2, 16);
        assert_eq!(valid.validate(), Ok(()));
        for (config, message) in [
            (AttentionConfig::new(0, 4, 2, 16), "d_model is 0"),
            (AttentionConfig::new(64, 4, 0, 16), "num_kv_heads is 0"),
            (AttentionConfig::new(64, 4, 3, 16), "num_heads 4 is not a multiple"),
            (AttentionConfig::new(64, 4, 2, 15), "head_dim 15 is odd"),
        ] {
            let error = config.validate().expect_err("an invalid size").to_string();
            assert!(error.contains(message), "{error}");
            assert!(error.contains("hint: "), "{error}");
        }
    }

    #[test]
    #[should_panic(expected = "num_heads 4 is not a multiple of num_kv_heads 3")]
    fn a_layer_of_invalid_sizes_panics_with_the_reason() {
        AttentionConfig::new(64, 4, 3, 16).multi_head::<burn_flex::Flex>(&Default::default());
    }
}
