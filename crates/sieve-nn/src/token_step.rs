//! One new token of every row, through the whole model in one piece where the device can.
use crate::{DecoderLayer, KvCache, Qwen3, TextRows};
use burn::tensor::{Int, Tensor};
use sieve_ops::{DeviceBackend, RotaryEmbedding, TokenLayer, TokenStep, TokensBefore, repeat_token_step, token_step};

impl<B: DeviceBackend> Qwen3<B> {
    /// Logits of the next token of every row, `[batch, vocab_size]`; adds the tokens `ids`, `[batch, 1]`, to the cache.
    /// `None` where the layers have to be called one by one: in the first pass of a single token, where the device or
    /// the model has no such step, and under a selector that reads a share of the keys.
    pub fn token_step(
        &self,
        ids: &Tensor<B, 2, Int>,
        cache: &mut KvCache<B>,
        rope: &RotaryEmbedding<B>,
    ) -> Option<Tensor<B, 2>> {
        cache.single_tokens += 1;
        // Capturing a graph does not pay for a single token.
        if cache.single_tokens == 1 {
            return None;
        }
        let before = TokensBefore::Same(cache.num_tokens);
        let logits = self.one_call(ids, cache, before, rope)?;
        cache.num_tokens += 1;
        for layer in &mut cache.layers {
            layer.as_cache_mut().expect("token_step takes no empty cache").count_token();
        }
        Some(logits)
    }

    /// Logits of the next token of every row of `texts`, `[num_rows, vocab_size]`; adds the tokens `ids`,
    /// `[num_rows, 1]`, to the texts. The id of a row that is free or kept may be any, and its logits mean nothing.
    /// `None`, with no text changed, where the device or the model needs a call for each layer: each text then goes on
    /// in a cache of its own.
    ///
    /// Panics if a text has as many tokens as a text may have.
    pub fn next_logits_of_texts(
        &self,
        ids: &Tensor<B, 2, Int>,
        texts: &mut TextRows<B>,
        rope: &RotaryEmbedding<B>,
    ) -> Option<Tensor<B, 2>> {
        texts.make_room();
        let lengths = texts.lengths();
        let before = TokensBefore::Each(&lengths);
        let logits = self.one_call(ids, &mut texts.cache, before, rope)?;
        texts.count_tokens();
        Some(logits)
    }

    /// Repeats the captured step, or runs and captures a new one. `None` where the device, a layer or its cache has no
    /// such step, or a model whose weights are gathered for each pass.
    fn one_call(
        &self,
        ids: &Tensor<B, 2, Int>,
        cache: &mut KvCache<B>,
        before: TokensBefore<'_>,
        rope: &RotaryEmbedding<B>,
    ) -> Option<Tensor<B, 2>> {
        // A captured step holds all weights.
        if self.gathers_weights() {
            return None;
        }
        // A graph holds the tables that it was captured with.
        let rope_rows = rope.cos.dims()[0];
        if std::mem::replace(&mut cache.rope_rows, rope_rows) != rope_rows {
            cache.graph = Default::default();
        }
        let KvCache { layers, graph, .. } = cache;
        if let Some(logits) = repeat_token_step::<B>(graph, ids, before) {
            return Some(logits);
        }
        let caches = layers.iter_mut().map(|cache| cache.as_cache_mut()?.for_token_step());
        let caches = caches.collect::<Option<_>>()?;
        let step = TokenStep {
            ids: ids.clone(),
            before,
            embedding: self.embed_tokens.weight.val(),
            layers: self.layers.iter().map(DecoderLayer::for_token_step).collect::<Option<_>>()?,
            caches,
            norm: self.head.norm.weight.val(),
            output: self.head.weight(&self.embed_tokens),
            epsilon: self.head.norm.epsilon,
            rope,
            policy: self.cached,
        };
        token_step::<B>(step, graph)
    }
}

impl<B: DeviceBackend> DecoderLayer<B> {
    /// The block's weights for a decoding step; `None` with residual scales, or an attention that no step supports.
    fn for_token_step(&self) -> Option<TokenLayer<B>> {
        if self.input_residual.is_some() || self.post_attention_residual.is_some() {
            return None;
        }
        Some(TokenLayer {
            norms: [&self.input_layernorm, &self.post_attention_layernorm].map(|norm| norm.weight.val()),
            attention: self.self_attn.as_layer().for_token_step()?,
            gate_up: self.mlp.gate_up_proj.weight.val(),
            down: self.mlp.down_proj.weight.val(),
            rotates: self.rotates,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{kinds, msa_in_warmup, shape};
    use burn_flex::Flex;
    use sieve_core::Attention;
    use sieve_core::model::IndexScores;

    #[test]
    fn every_kind_has_operands_for_a_step_but_an_indexer_in_its_warm_up_and_qsa() {
        for kind in kinds(0.5).into_iter().chain([msa_in_warmup()]) {
            let model = Qwen3::<Flex>::new(&shape(kind), 1, &Default::default());
            let is_qsa = matches!(kind, Attention::Msa(msa) if msa.indexer == IndexScores::Qsa);
            let is_taken = kind.index_warmup() != Some(true) && !is_qsa;
            assert_eq!(model.layers[0].for_token_step().is_some(), is_taken, "{kind:?}");
        }
    }
}
