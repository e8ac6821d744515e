//! One new token of every row, through the whole model in one piece where the device can.
use crate::{DecoderLayer, KvCache, LayerCache, Qwen3};
use burn::tensor::{Int, Tensor};
use sieve_ops::{DeviceBackend, RotaryEmbedding, TokenLayer, TokenStep, repeat_token_step, token_step};

impl<B: DeviceBackend> Qwen3<B> {
    /// Logits of the next token of every row, `[batch, vocab_size]`, and the cache with the tokens `ids`, `[batch, 1]`;
    /// `None` where the layers have to be called one by one.
    pub(crate) fn token_step(
        &self,
        ids: &Tensor<B, 2, Int>,
        cache: &mut KvCache<B>,
        rope: &RotaryEmbedding<B>,
    ) -> Option<Tensor<B, 2>> {
        cache.single_tokens += 1;
        // Generating a single token does not capture a graph.
        if cache.single_tokens == 1 {
            return None;
        }
        // A graph holds the tables that it was captured with.
        let rope_rows = rope.cos.dims()[0];
        if std::mem::replace(&mut cache.rope_rows, rope_rows) != rope_rows {
            cache.graph = Default::default();
        }
        let KvCache {
            layers,
            num_tokens,
            graph,
            ..
        } = cache;
        let logits = match repeat_token_step::<B>(graph, ids, *num_tokens) {
            Some(logits) => logits,
            None => {
                let step = TokenStep {
                    ids: ids.clone(),
                    position: *num_tokens,
                    embedding: self.embed_tokens.weight.val(),
                    layers: self
                        .layers
                        .iter()
                        .map(DecoderLayer::for_token_step)
                        .collect::<Option<_>>()?,
                    caches: layers
                        .iter_mut()
                        .map(LayerCache::for_token_step)
                        .collect::<Option<_>>()?,
                    norm: self.head.norm.weight.val(),
                    output: self.head.weight(&self.embed_tokens),
                    epsilon: self.head.norm.epsilon,
                    rope,
                };
                token_step::<B>(step, graph)?
            }
        };
        *num_tokens += 1;
        layers.iter_mut().for_each(LayerCache::count_token);
        Some(logits)
    }
}

impl<B: DeviceBackend> DecoderLayer<B> {
    /// The block for a step; `None` of a kind that no step takes.
    fn for_token_step(&self) -> Option<TokenLayer<B>> {
        if self.input_residual.is_some() || self.post_attention_residual.is_some() {
            return None;
        }
        Some(TokenLayer {
            norms: [&self.input_layernorm, &self.post_attention_layernorm].map(|norm| norm.weight.val()),
            attention: self.self_attn.for_token_step()?,
            gate_up: self.mlp.gate_up_proj.weight.val(),
            down: self.mlp.down_proj.weight.val(),
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
    fn a_step_takes_every_kind_but_an_indexers_warm_up_and_qsa() {
        for kind in kinds(0.5).into_iter().chain([msa_in_warmup()]) {
            let model = Qwen3::<Flex>::new(&shape(kind), 1, &Default::default());
            let is_qsa = matches!(kind, Attention::Msa(msa) if msa.indexer == IndexScores::Qsa);
            let is_taken = kind.index_warmup() != Some(true) && !is_qsa;
            assert_eq!(model.layers[0].for_token_step().is_some(), is_taken, "{kind:?}");
        }
    }
}
