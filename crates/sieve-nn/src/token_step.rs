//! One new token of every row, through the whole model in one piece where the device can.
use crate::{Attention, DecoderLayer, KvCache, LayerCache, Qwen3};
use burn::module::Param;
use burn::tensor::{Int, Tensor};
use sieve_ops::{
    AttentionSpec, DeviceBackend, QkNorm, RotaryEmbedding, TokenExtra, TokenLayer, TokenStep, repeat_token_step,
    token_step,
};

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
        let (mut dma, mut extra) = (None, TokenExtra::None);
        let (qkv, o_proj, spec) = match &self.self_attn {
            Attention::Grouped(layer) => (&layer.qkv, &layer.o_proj, layer.spec()),
            Attention::Dma(layer) => {
                dma = Some(layer.dma_layer());
                (&layer.qkv, &layer.o_proj, layer.spec())
            }
            Attention::Chosen(layer) if layer.shares() || layer.is_warmup() => return None,
            Attention::Chosen(layer) => {
                if let Some(indexer) = &layer.indexer {
                    let (proj, norm) = (indexer.proj.weight.val(), indexer.qk_norm());
                    extra = TokenExtra::Indexer { proj, norm };
                }
                (&layer.qkv, &layer.o_proj, layer.spec())
            }
            Attention::Nsa(layer) => {
                extra = TokenExtra::Branches(layer.for_token_step());
                (&layer.qkv, &layer.o_proj, layer.spec())
            }
            Attention::Mla(layer) => {
                let (extra, spec) = layer.for_token_step();
                let (q, o) = (layer.q_proj.weight.val(), layer.o_proj.weight.val());
                return Some(self.token_layer([q, o], None, layer.qk_norm(), spec, extra));
            }
        };
        let weights = [qkv.qkv_proj.weight.val(), o_proj.weight.val()];
        let bias = qkv.qkv_bias.as_ref().map(Param::val);
        let layer = self.token_layer(weights, bias, qkv.qk_norm(), spec, extra);
        Some(TokenLayer { dma, ..layer })
    }

    /// A block whose attention has these weights as its first and last projections.
    fn token_layer(
        &self,
        [qkv, o]: [Tensor<B, 2>; 2],
        qkv_bias: Option<Tensor<B, 1>>,
        qk_norm: Option<QkNorm<B>>,
        spec: AttentionSpec,
        extra: TokenExtra<B>,
    ) -> TokenLayer<B> {
        TokenLayer {
            norms: [&self.input_layernorm, &self.post_attention_layernorm].map(|norm| norm.weight.val()),
            qkv,
            qkv_bias,
            qk_norm,
            dma: None,
            extra,
            o,
            gate_up: self.mlp.gate_up_proj.weight.val(),
            down: self.mlp.down_proj.weight.val(),
            spec,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{kinds, msa_in_warmup, shape};
    use burn_flex::Flex;

    #[test]
    fn a_step_takes_every_kind_but_an_indexers_warm_up() {
        for kind in kinds(0.5).into_iter().chain([msa_in_warmup()]) {
            let model = Qwen3::<Flex>::new(&shape(kind), 1, &Default::default());
            let is_taken = kind.index_warmup() != Some(true);
            assert_eq!(model.layers[0].for_token_step().is_some(), is_taken, "{kind:?}");
        }
    }
}
