//! Passes in which a callback computes the attention of every dense layer, on the device or on the host.
//!
//! Selectors, which choose the keys that a trained dense model reads, run this way: the model's projections, norms,
//! positions and feed-forward layers are unchanged.
use crate::decoder_layer::scaled;
use crate::{DecoderLayer, KvCache, LayerCache, LayerContext, MultiHeadAttention, PassState, Qwen3};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use sieve_core::CallShape;
use sieve_ops::{AttentionSpec, DeviceBackend, Documents, IGNORE_LABEL, RotaryEmbedding, SieveBackend};
use std::ops::Range;

/// Operands of one document's attention in one layer, on the host. Queries and keys are normed and rotated.
#[derive(Clone, Copy, Debug)]
pub struct HostOperands<'a> {
    /// Index of the layer in the model.
    pub layer: usize,
    /// Number of layers of the model.
    pub num_layers: usize,
    /// Heads, and the document's tokens, which are both queries and keys.
    pub shape: CallShape,
    /// Queries, `[num_tokens, num_heads, head_dim]`.
    pub q: &'a [f32],
    /// Keys, `[num_tokens, num_kv_heads, head_dim]`.
    pub k: &'a [f32],
    /// Values, `[num_tokens, num_kv_heads, head_dim]`.
    pub v: &'a [f32],
}

/// Operands of one document's attention in one layer, on the device. Queries and keys are normed and rotated.
#[derive(Clone, Debug)]
pub struct LayerOperands<B: Backend> {
    /// Index of the layer in the model.
    pub layer: usize,
    /// Number of layers of the model.
    pub num_layers: usize,
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of key and value heads.
    pub num_kv_heads: usize,
    /// `[1, num_tokens, num_heads + 2 * num_kv_heads, head_dim]`.
    pub qkv: Tensor<B, 4>,
}

/// Computes the attention of one document in one layer, `[1, num_tokens, num_heads, head_dim]`, or returns an error
/// that ends the pass.
pub type LayerAttention<'a, B, E> = dyn FnMut(&LayerOperands<B>) -> Result<Tensor<B, 4>, E> + 'a;

/// As [`LayerAttention`] for the next tokens of one text. The callback reads and fills the layer's cache, and gets the
/// buffers that decoding ops share.
pub type CachedLayerAttention<'a, B, E> =
    dyn FnMut(&LayerOperands<B>, &mut LayerCache<B>, &mut Scratch<B>) -> Result<Tensor<B, 4>, E> + 'a;

type Scratch<B> = <B as DeviceBackend>::DecodeScratch;

impl<B: Backend> LayerOperands<B> {
    /// Number of tokens of the document.
    pub fn num_tokens(&self) -> usize {
        self.qkv.dims()[1]
    }

    /// The shape of a call in which these tokens' queries read the first `num_keys` keys of their text.
    pub fn shape(&self, num_keys: usize) -> CallShape {
        let [_, num_tokens, _, head_dim] = self.qkv.dims();
        CallShape::new([num_tokens, num_keys], [self.num_heads, self.num_kv_heads], head_dim)
    }

    /// The dense attention that the callback replaces.
    pub fn spec(&self) -> AttentionSpec {
        let head_dim = self.qkv.dims()[3];
        AttentionSpec::dense([self.num_heads, self.num_kv_heads], head_dim)
    }

    /// Copies the queries to the host.
    pub fn queries(&self) -> Vec<f32> {
        self.heads_on_host(0, self.num_heads)
    }

    /// Copies the keys to the host.
    pub fn keys(&self) -> Vec<f32> {
        self.heads_on_host(self.num_heads, self.num_kv_heads)
    }

    /// Copies heads of the packed tensor to the host.
    fn heads_on_host(&self, first_head: usize, num_heads: usize) -> Vec<f32> {
        let part = self.qkv.clone().narrow(2, first_head, num_heads);
        part.into_data().iter::<f32>().collect()
    }

    /// Copies the operands to the host, calls `attend` there, and copies its output, `[num_tokens, num_heads,
    /// head_dim]`, to the device.
    ///
    /// # Errors
    /// The error of `attend`.
    pub fn on_host<E>(&self, attend: impl FnOnce(HostOperands<'_>) -> Result<Vec<f32>, E>) -> Result<Tensor<B, 4>, E> {
        let shape = self.shape(self.num_tokens());
        let v = self.heads_on_host(self.num_heads + self.num_kv_heads, self.num_kv_heads);
        let o = attend(HostOperands {
            layer: self.layer,
            num_layers: self.num_layers,
            shape,
            q: &self.queries(),
            k: &self.keys(),
            v: &v,
        })?;
        let o = TensorData::new(o, [1, shape.num_queries, shape.num_heads, shape.head_dim]);
        Ok(Tensor::from_data(o, (&self.qkv.device(), self.qkv.dtype())))
    }
}

impl<B: SieveBackend> Qwen3<B> {
    /// As [`hidden`](Self::hidden), with `attend` in place of the attention of dense layers. `attend` is called once
    /// per layer and document, layer by layer. Layers of other kinds keep their attention.
    ///
    /// # Errors
    /// The first error of `attend`.
    pub fn hidden_attending<E>(
        &self,
        ids: Tensor<B, 2, Int>,
        context: &LayerContext<'_, B>,
        attend: &mut LayerAttention<'_, B, E>,
    ) -> Result<Tensor<B, 3>, E> {
        let all_documents = |_: &Range<usize>| true;
        self.hidden_of_documents(ids, context, &all_documents, attend)
    }

    /// As [`hidden_attending`](Self::hidden_attending), but `attend` is called only for the documents that `is_read`
    /// accepts; the attention of others is 0. Documents are ranges of tokens of the concatenated rows.
    fn hidden_of_documents<E>(
        &self,
        ids: Tensor<B, 2, Int>,
        context: &LayerContext<'_, B>,
        is_read: &dyn Fn(&Range<usize>) -> bool,
        attend: &mut LayerAttention<'_, B, E>,
    ) -> Result<Tensor<B, 3>, E> {
        let (documents, mut state) = (documents_of(context.documents), PassState::default());
        self.through_layers(ids, |index, layer, x| {
            let Some(mha) = dense_attention(layer) else {
                let no_caches = None;
                return Ok(layer.forward(x, context, &mut state, no_caches).x);
            };
            layer.forward_attending(mha, x, (context, &mut state), |qkv| {
                let [batch, seq_len, heads, head_dim] = qkv.dims();
                let rows = qkv.reshape([1, batch * seq_len, heads, head_dim]);
                let of = |range: &Range<usize>| rows.clone().narrow(1, range.start, range.len());
                let parts = documents.iter().map(|range| {
                    if is_read(range) {
                        attend(&self.operands(index, mha, of(range)))
                    } else {
                        Ok(of(range).narrow(2, 0, mha.spec().num_heads).zeros_like())
                    }
                });
                let mut parts = parts.collect::<Result<Vec<_>, E>>()?;
                Ok(match parts.len() {
                    1 => parts.remove(0),
                    _ => Tensor::cat(parts, 1),
                })
            })
        })
    }

    /// As [`token_losses`](Self::token_losses), with `attend` in place of the attention of dense layers. `attend` is
    /// not called for documents without a label, such as padding.
    ///
    /// # Errors
    /// The first error of `attend`.
    pub fn token_losses_attending<E>(
        &self,
        ids: Tensor<B, 2, Int>,
        labels: Tensor<B, 2, Int>,
        context: &LayerContext<'_, B>,
        attend: &mut LayerAttention<'_, B, E>,
    ) -> Result<Tensor<B, 2>, E> {
        let all: Vec<i32> = labels.clone().into_data().iter::<i32>().collect();
        let is_read = |range: &Range<usize>| all[range.clone()].iter().any(|&label| label != IGNORE_LABEL);
        let hidden = self.hidden_of_documents(ids, context, &is_read, attend)?;
        Ok(self.token_losses_of(hidden, labels))
    }

    /// As [`next_logits`](Self::next_logits) for one text, with `attend` in place of the attention of dense layers.
    ///
    /// # Errors
    /// The first error of `attend`.
    pub fn next_logits_attending<E>(
        &self,
        ids: Tensor<B, 2, Int>,
        cache: &mut KvCache<B>,
        rope: &RotaryEmbedding<B>,
        attend: &mut CachedLayerAttention<'_, B, E>,
    ) -> Result<Tensor<B, 2>, E>
    where
        B: DeviceBackend,
    {
        self.cached_pass(ids, &mut [cache], rope, |index, layer, x, context, state, mut caches| {
            let Some(mha) = dense_attention(layer) else {
                return Ok(layer.forward(x, context, state, Some(&mut caches)).x);
            };
            layer.forward_attending(mha, x, (context, state), |qkv| {
                let (cache, scratch) = caches.single();
                attend(&self.operands(index, mha, qkv), cache, scratch)
            })
        })
    }

    /// What a callback gets for layer `layer`, whose attention is `mha`.
    fn operands(&self, layer: usize, mha: &MultiHeadAttention<B>, qkv: Tensor<B, 4>) -> LayerOperands<B> {
        let spec = mha.spec();
        LayerOperands {
            layer,
            num_layers: self.layers.len(),
            num_heads: spec.num_heads,
            num_kv_heads: spec.num_kv_heads,
            qkv,
        }
    }
}

impl<B: SieveBackend> DecoderLayer<B> {
    /// [`forward`](Self::forward) with `attend` in place of the attention `mha` of this layer. `attend` takes the
    /// packed queries, keys and values and returns `[.., num_heads, head_dim]`.
    fn forward_attending<E>(
        &self,
        mha: &MultiHeadAttention<B>,
        x: Tensor<B, 3>,
        (context, state): (&LayerContext<'_, B>, &mut PassState<B>),
        attend: impl FnOnce(Tensor<B, 4>) -> Result<Tensor<B, 4>, E>,
    ) -> Result<Tensor<B, 3>, E> {
        let [batch, seq_len, _] = x.dims();
        let normed = self.input_layernorm.forward(x.clone());
        let o = attend(mha.qkv.forward(normed, &self.attention_context(context)))?;
        let o = o.reshape([batch as i32, seq_len as i32, -1]);
        let residual = scaled(x, &self.input_residual);
        Ok(self.feed_forward(mha.o_proj.forward_add(o, residual), context, state))
    }
}

/// The layer's attention, if it is dense.
fn dense_attention<B: SieveBackend>(layer: &DecoderLayer<B>) -> Option<&MultiHeadAttention<B>> {
    layer.self_attn.as_layer().as_grouped().filter(|mha| mha.spec().window_size.is_none())
}

/// Documents as ranges of tokens of the concatenated rows.
fn documents_of<B: SieveBackend>(documents: &Documents<B>) -> Vec<Range<usize>> {
    let [_, seq_len] = documents.end.dims();
    let ends: Vec<usize> = documents.end.clone().into_data().iter::<i64>().map(|end| end as usize).collect();
    let mut ranges = Vec::new();
    let mut first = 0;
    while first < ends.len() {
        // `ends` counts from the row's first token.
        let row_start = first / seq_len * seq_len;
        let end = row_start + ends[first];
        ranges.push(first..end);
        first = end;
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, ids, kinds, shape, values};
    use burn_flex::Flex;
    use sieve_cpu::reference::{Key, Rounding, attend};

    /// Dense causal attention by its definition.
    fn by_definition(op: HostOperands<'_>) -> Result<Vec<f32>, ()> {
        let (d, m) = (op.shape.head_dim, op.shape.group_size());
        let mut o = Vec::new();
        for t in 0..op.shape.num_queries {
            for head in 0..op.shape.num_heads {
                let q = &op.q[(t * op.shape.num_heads + head) * d..][..d];
                let at = |j: usize| (j * op.shape.num_kv_heads + head / m) * d;
                let key = |j: usize| {
                    let (k, v) = (&op.k[at(j)..at(j) + d], &op.v[at(j)..at(j) + d]);
                    Key { k, v, bias: 0.0 }
                };
                let keys: Vec<_> = (0..=t).map(key).collect();
                let mut row = vec![0.0; d];
                attend(q, &keys, 1.0 / (d as f64).sqrt(), Rounding::None, &mut row);
                o.extend(row.into_iter().map(|x| x as f32));
            }
        }
        Ok(o)
    }

    #[test]
    fn dense_attention_on_the_host_changes_nothing() {
        for kind in kinds(0.3) {
            let model = Qwen3::<Flex>::new(&shape(kind), 5, &Default::default());
            // Three documents in two rows.
            let (start, end) = ([vec![0; 5], vec![5; 6], vec![0; 11]].concat(), [vec![5; 5], vec![11; 17]].concat());
            let documents = Documents::new(&start, &end, [2, 11], &Default::default());
            let rope = model.rope(11, &Default::default());
            let context = LayerContext::new(&documents, &rope);
            let plain = model.hidden(ids([2, 11], 3), &context);
            let mut calls = 0;
            let hooked = model.hidden_attending(ids([2, 11], 3), &context, &mut |op| {
                calls += 1;
                op.on_host(by_definition)
            });
            let hooked = hooked.expect("it never fails");
            assert_close("hidden", &values(hooked), &values(plain), 1e-4);
            let is_dense = kind == sieve_core::Attention::Mha;
            // Three documents in each of two layers.
            assert_eq!(calls, if is_dense { 6 } else { 0 });
            // Padding is a document without labels, for which the callback is not called.
            let labels = [vec![3; 5], vec![IGNORE_LABEL; 6], vec![4; 11]].concat();
            let labels = Tensor::<Flex, 2, Int>::from_data(TensorData::new(labels, [2, 11]), &Default::default());
            let plain = model.token_losses(ids([2, 11], 3), labels.clone(), &context);
            let mut calls = 0;
            let hooked = model.token_losses_attending(ids([2, 11], 3), labels, &context, &mut |op| {
                calls += 1;
                op.on_host(by_definition)
            });
            assert_close("losses", &values(hooked.expect("it never fails")), &values(plain), 1e-4);
            assert_eq!(calls, if is_dense { 4 } else { 0 });
        }
    }

    #[test]
    fn a_prompt_through_the_callback_fills_the_cache_for_later_tokens() {
        let model = Qwen3::<Flex>::new(&shape(sieve_core::Attention::Mha), 6, &Default::default());
        let rope = model.rope(12, &Default::default());
        let (mut plain, mut hooked) = (KvCache::new(2), KvCache::new(2));
        let first = ids([1, 9], 1);
        let a = model.next_logits(first.clone(), &mut plain, &rope);
        let attend = &mut |op: &LayerOperands<Flex>, cache: &mut LayerCache<Flex>, (): &mut ()| {
            cache.keep_recent(&op.qkv, op.spec());
            op.on_host(by_definition)
        };
        let b = model.next_logits_attending(first, &mut hooked, &rope, attend);
        assert_close("prompt", &values(b.expect("it never fails")), &values(a), 1e-4);
        let a = model.next_logits(ids([1, 1], 2), &mut plain, &rope);
        let b = model.next_logits(ids([1, 1], 2), &mut hooked, &rope);
        assert_close("next", &values(b), &values(a), 1e-4);
        let error = model.next_logits_attending(ids([1, 1], 2), &mut hooked, &rope, &mut |_, _, _| Err("no"));
        assert_eq!(error.err(), Some("no"));
    }
}
