//! Converts a recipe's `[model]`, with Hugging Face's names, into a [`ModelShape`] with Sieve's names.

use super::{Recipe, RecipeError, Stage, TokenizerSource};
use crate::model::{LayerPattern, ModelShape, RopeLayers};

impl Recipe {
    /// The model of this recipe for a tokenizer of `tokenizer_vocab_size` tokens.
    ///
    /// The embedding has `model.vocab_size` rows if the recipe gives that key, which may pad the vocabulary, else one
    /// row per token.
    ///
    /// # Errors
    /// [`RecipeError::VocabularyTooSmall`] when `model.vocab_size` is below the tokenizer's.
    pub fn model_shape(&self, tokenizer_vocab_size: usize) -> Result<ModelShape, RecipeError> {
        let vocab_size = self.model.vocab_size.unwrap_or(tokenizer_vocab_size);
        if vocab_size < tokenizer_vocab_size {
            return Err(RecipeError::VocabularyTooSmall { model: vocab_size, tokenizer: tokenizer_vocab_size });
        }
        let model = &self.model;
        Ok(ModelShape {
            d_model: model.hidden_size,
            d_ff: model.intermediate_size,
            num_layers: model.num_hidden_layers,
            num_heads: model.num_attention_heads,
            num_kv_heads: model.num_key_value_heads,
            head_dim: model.head_dim,
            vocab_size,
            rope_theta: model.rope_theta,
            rms_norm_eps: model.rms_norm_eps,
            tie_word_embeddings: model.tie_word_embeddings,
            max_seq_len: model.max_position_embeddings,
            initializer_range: model.initializer_range,
            residual_scale: model.residual_scale,
            qk_norm: model.qk_norm,
            qkv_bias: model.qkv_bias,
            attention_sinks: model.attention_sinks,
            rope_scaling: model.rope_scaling,
            rope_layers: RopeLayers::new(model.rope_layers.as_deref().unwrap_or_default()),
            attention: self.attention.own,
            layers: self.layer_pattern(),
        })
    }

    /// The model of `stage`, in a run whose model is `of`.
    pub fn shape_at(&self, stage: &Stage, of: &ModelShape) -> ModelShape {
        let alone = self.at_stage(stage);
        let layers = alone.layer_pattern();
        ModelShape { rope_theta: alone.model.rope_theta, attention: alone.attention.own, layers, ..of.clone() }
    }

    /// The model of each stage, in a run whose model is `of`.
    pub fn shapes_of_stages(&self, of: &ModelShape) -> Vec<ModelShape> {
        self.stages().iter().map(|stage| self.shape_at(stage, of)).collect()
    }

    /// The kinds of the layers ([`ModelShape::layers`]) that `model.layer_types` names.
    pub fn layer_pattern(&self) -> LayerPattern {
        self.attention.pattern(self.model.layer_types.as_deref().unwrap_or_default())
    }

    /// Rows of the embedding, if the recipe alone determines them; `None` if they depend on a tokenizer's file.
    pub fn stated_vocab_size(&self) -> Option<usize> {
        match (self.model.vocab_size, self.tokenizer.source()) {
            (Some(rows), _) => Some(rows),
            (None, TokenizerSource::Train(train)) => Some(train.vocab_size),
            (None, TokenizerSource::Numbers(numbers)) => Some(numbers),
            (None, TokenizerSource::Path(_)) => None,
        }
    }
}
