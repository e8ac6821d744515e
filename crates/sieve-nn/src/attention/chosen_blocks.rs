//! Attention over blocks that each query chooses by pooled keys, without a parameter of its own: InfLLM-V2
//! (arXiv:2509.24663) and MoBA (arXiv:2502.13189).
use super::LayerContext;
use crate::kv_cache::ChosenCache;
use crate::{LayerCache, LayerCaches, Linear, QkvProjection, WeightInit};
use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use sieve_core::{BlockChoice, ModelShape};
use sieve_ops::{AttentionSpec, DeviceBackend, Documents, SieveBackend};

/// Each query sees the tokens of the blocks that it chooses, under one exact softmax. Its parameters are those of
/// dense attention, so either goes on with the other's weights.
#[derive(Module, Debug)]
pub struct ChosenBlocksAttention<B: Backend> {
    /// Packed projection with q/k-norm and RoPE.
    pub qkv: QkvProjection<B>,
    /// `[d_model, num_heads * head_dim]`.
    pub o_proj: Linear<B>,
    #[module(skip)]
    choice: BlockChoice,
}

impl<B: Backend> ChosenBlocksAttention<B> {
    /// Weights drawn by `init` from a normal distribution.
    pub fn new(shape: &ModelShape, choice: BlockChoice, init: &mut WeightInit, device: &B::Device) -> Self {
        Self {
            qkv: QkvProjection::new(shape, init, device),
            o_proj: Linear::new(shape.num_heads * shape.head_dim, shape.d_model, init, device),
            choice,
        }
    }

    /// How its queries choose.
    pub fn choice(&self) -> BlockChoice {
        self.choice
    }

    pub(crate) fn spec(&self) -> AttentionSpec {
        self.qkv.spec(None)
    }
}

impl<B: SieveBackend> ChosenBlocksAttention<B> {
    /// `residual` plus the attention's output; both `[batch, seq_len, d_model]`.
    pub fn forward(&self, x: Tensor<B, 3>, residual: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Tensor<B, 3> {
        let spec = context.under_policy(self.spec());
        let qkv = self.qkv.forward(x, context);
        let o = context.attend(qkv, |qkv, documents| self.attend(qkv, documents, spec));
        self.o_proj.forward_add(o.flatten(2, 3), residual)
    }

    /// The blocks whose tokens each query reads, `[batch, seq_len, choosers, attended blocks]`, as
    /// [`sieve_ops::choose_key_blocks`] gives them. For measures; [`forward`](Self::forward) chooses the same.
    pub fn block_indices(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Tensor<B, 4, Int> {
        let qkv = self.qkv.forward(x, context);
        sieve_ops::choose_key_blocks(qkv, context.documents, self.spec(), self.choice)
    }

    /// Chooses and attends.
    fn attend(&self, qkv: Tensor<B, 4>, documents: &Documents<B>, spec: AttentionSpec) -> Tensor<B, 4> {
        let chosen = sieve_ops::choose_key_blocks(qkv.clone(), documents, spec, self.choice);
        sieve_ops::chosen_attention(qkv, chosen, documents, spec, self.choice)
    }

    /// The output alone, with a cache; see [`LayerCache`].
    pub fn forward_cached(
        &self,
        x: Tensor<B, 3>,
        context: &LayerContext<'_, B>,
        caches: &mut LayerCaches<'_, B>,
    ) -> Tensor<B, 3>
    where
        B: DeviceBackend,
    {
        let (spec, choice) = (self.spec(), self.choice);
        let qkv = self.qkv.forward(x, context);
        let o = caches.attend(qkv, |cached, qkv| {
            let LayerCache::Chosen(cache) = cached.cache else {
                *cached.cache = LayerCache::Chosen(ChosenCache::of_prompt(&qkv, spec, choice));
                return self.attend(qkv, context.documents, spec);
            };
            let [batch, new, _, _] = qkv.dims();
            if new == 1 {
                return cache.attend(qkv, spec, cached.scratch);
            }
            // Several tokens behind others attend as one row of all keys, with queries of zero, and themselves.
            let row = cache.row(&qkv);
            let earlier = cache.num_tokens();
            cache.append(&qkv, spec);
            let documents = Documents::whole_rows([batch, earlier + new], &row.device());
            self.attend(row, &documents, spec).narrow(1, earlier, new)
        });
        self.o_proj.forward(o.flatten(2, 3))
    }
}
