//! One new token of every row, through the whole model in one piece where the device can.
use crate::{Attention, DecoderLayer, KvCache, LayerCache, Qwen3};
use burn::module::Param;
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
        // A text of which one token is asked never pays for keeping its step.
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
                let of_layers = self.layers.iter().zip(layers.iter_mut());
                let step = TokenStep {
                    ids: ids.clone(),
                    position: *num_tokens,
                    embedding: self.embed_tokens.weight.val(),
                    layers: of_layers
                        .map(|(layer, cache)| layer.for_token_step(cache))
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
    /// The block and its cache for a step; `None` of a kind that no step takes.
    fn for_token_step<'a>(&self, cache: &'a mut LayerCache<B>) -> Option<TokenLayer<'a, B>> {
        let (qkv, o_proj, spec, dma) = match &self.self_attn {
            Attention::Grouped(layer) => (&layer.qkv, &layer.o_proj, layer.spec(), None),
            Attention::Dma(layer) => (&layer.qkv, &layer.o_proj, layer.spec(), Some(layer.dma_layer())),
            Attention::Chosen(layer) if layer.chooses_by_keys() => (&layer.qkv, &layer.o_proj, layer.spec(), None),
            _ => return None,
        };
        if self.input_residual.is_some() || self.post_attention_residual.is_some() {
            return None;
        }
        Some(TokenLayer {
            norms: [&self.input_layernorm, &self.post_attention_layernorm].map(|norm| norm.weight.val()),
            qkv: qkv.qkv_proj.weight.val(),
            qkv_bias: qkv.qkv_bias.as_ref().map(Param::val),
            qk_norm: qkv.qk_norm(),
            dma,
            o: o_proj.weight.val(),
            gate_up: self.mlp.gate_up_proj.weight.val(),
            down: self.mlp.down_proj.weight.val(),
            spec,
            cache: cache.for_token_step()?,
        })
    }
}
