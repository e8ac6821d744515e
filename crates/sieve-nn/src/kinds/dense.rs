//! Causal attention with grouped queries, over all earlier keys or a sliding window and keys beyond it, and its cache.
use super::{Attention, BuildLayer, KindCache, KindLayer, LayerCache, OTHER_CACHE};
use crate::attention_weights::{by_key, with_values};
use crate::layer::{Cached, KindAttention, Rows};
use crate::pass::{LayerContext, PassState, on_device};
use crate::{AttentionConfig, Linear, QkvProjection, RmsNorm, WeightInit};
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use sieve_core::kinds::Dense;
use sieve_core::{FarKeys, ModelShape};
use sieve_ops::{
    AttentionLayer, AttentionSpec, ContextParallel, Documents, KeyCache, RowsOf, SelectorCache, SieveBackend,
    TokenAttention, TokenCache, attention_of_last, both_ends, cached_attention, kept_ends, split_heads,
};

/// Grouped-query attention (arXiv:2305.13245): a query sees all earlier keys of its document, or the last
/// `window_size` and those of `far`.
#[derive(Module, Debug)]
pub struct MultiHeadAttention<B: Backend> {
    /// Packed projection to q, k and v, with q/k-norm and RoPE.
    pub qkv: QkvProjection<B>,
    /// Attention sinks, `[num_heads]`: one more logit per query head in each softmax, with a value of zero. `None` in
    /// models without sinks.
    pub sinks: Option<Param<Tensor<B, 1>>>,
    /// Output projection, `[d_model, num_heads * head_dim]`.
    pub o_proj: Linear<B>,
    /// Number of last tokens that a query sees; `None`: all.
    window_size: Option<usize>,
    /// The keys that a query sees beyond its window; `None`: none.
    #[module(skip)]
    far: Option<FarKeys>,
}

impl BuildLayer for Dense {
    fn build<B: Backend>(&self, shape: &ModelShape, init: &mut WeightInit, device: &B::Device) -> Attention<B> {
        let window_size = None;
        Attention::Grouped(MultiHeadAttention::new(shape, window_size, init, device))
    }
}

impl AttentionConfig {
    /// Dense causal attention. Panics when [`validate`](Self::validate) fails.
    pub fn multi_head<B: Backend>(&self, device: &B::Device) -> MultiHeadAttention<B> {
        let (shape, window_size) = (self.shape(sieve_core::Attention::DENSE), None);
        MultiHeadAttention::new(&shape, window_size, &mut self.weights(), device)
    }
}

impl<B: Backend> MultiHeadAttention<B> {
    /// Normal weights and sinks (as gpt-oss draws them) from `init`. A query sees the last `window_size` tokens, its
    /// own included; `None`: all.
    pub fn new(shape: &ModelShape, window_size: Option<usize>, init: &mut WeightInit, device: &B::Device) -> Self {
        Self {
            qkv: QkvProjection::new(shape, init, device),
            sinks: shape.attention_sinks.then(|| init.normal([shape.num_heads], device)),
            o_proj: Linear::new(shape.num_heads * shape.head_dim, shape.d_model, init, device),
            window_size,
            far: None,
        }
    }

    /// The same layer, whose queries see these keys beyond their window, too.
    pub(super) fn with_far(self, far: FarKeys) -> Self {
        Self { far: Some(far), ..self }
    }

    /// Sizes of the heads, scale, window and the keys beyond it.
    pub(crate) fn spec(&self) -> AttentionSpec {
        AttentionSpec { far: self.far, ..self.qkv.spec(self.window_size) }
    }
}

impl<B: SieveBackend> MultiHeadAttention<B> {
    /// The sinks as an operand of ops.
    fn sinks(&self) -> Option<Tensor<B, 1>> {
        self.sinks.as_ref().map(Param::val)
    }
}

/// Attention of a packed tensor, with the layer's sinks where it has any.
fn attend<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    sinks: Option<Tensor<B, 1>>,
    documents: &Documents<B>,
    spec: AttentionSpec,
) -> Tensor<B, 4> {
    match sinks {
        Some(sinks) => sieve_ops::attention_with_sinks(qkv, sinks, documents, spec),
        None => sieve_ops::attention(qkv, documents, spec),
    }
}

impl<B: SieveBackend> KindAttention<B> for MultiHeadAttention<B> {
    type Packed = Tensor<B, 4>;
    type Found = ();

    fn num_heads(&self) -> usize {
        self.spec().num_heads
    }

    fn project(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Tensor<B, 4> {
        self.qkv.forward(x, context)
    }

    fn project_own_heads(&self, x: Tensor<B, 3>, parts: &ContextParallel, rows: &Rows<'_, B>) -> Tensor<B, 4> {
        self.qkv.own_heads(self.project(x, rows.context), parts)
    }

    fn attend(&self, qkv: Tensor<B, 4>, rows: &Rows<'_, B>, _state: &mut PassState<B>) -> (Tensor<B, 4>, ()) {
        let spec = rows.context.under_policy(self.spec());
        let spec = spec.of_packed_heads(qkv.dims()[2]).of_heads_from(rows.heads.start / spec.group_size());
        let sinks = self.sinks().map(|sinks| sinks.narrow(0, rows.heads.start, rows.heads.len()));
        (attend(qkv, sinks, rows.documents, spec), ())
    }

    fn fill(&self, qkv: Tensor<B::Inner, 4>, (): ()) -> LayerCache<B::Inner> {
        let mut cache = LayerCache::Empty;
        cache.keep_recent(&qkv, self.spec());
        cache
    }

    fn attend_cached(&self, qkv: Tensor<B::Inner, 4>, cached: Cached<'_, '_, B>) -> Tensor<B::Inner, 4> {
        attend_recent(cached, qkv, self.sinks().map(on_device), self.spec())
    }

    fn project_out(&self, o: Tensor<B, 3>, residual: Tensor<B, 3>, _context: &LayerContext<'_, B>) -> Tensor<B, 3> {
        self.o_proj.forward_add(o, residual)
    }
}

impl<B: SieveBackend> KindLayer<B> for MultiHeadAttention<B> {
    fn layer_op(
        &self,
        norm: &RmsNorm<B>,
        context: &LayerContext<'_, B>,
        state: &mut PassState<B>,
    ) -> Option<(AttentionLayer<B>, AttentionSpec)> {
        if self.sinks.is_some() {
            return None; // the op has no place for sinks
        }
        Some((self.qkv.layer_op(norm, &self.o_proj, context, state)?, self.spec()))
    }

    fn for_token_step(&self) -> Option<TokenAttention<B>> {
        Some(TokenAttention { sinks: self.sinks(), ..self.qkv.for_token_step(&self.o_proj, self.spec()) })
    }

    fn weights(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>, _state: &PassState<B>) -> Tensor<B, 3> {
        let (qkv, spec) = (self.qkv.forward(x, context), self.spec());
        by_key(&qkv, |one_hot| {
            attend(with_values(&qkv, one_hot, spec.num_kv_heads), self.sinks(), context.documents, spec)
        })
    }

    fn as_grouped(&self) -> Option<&MultiHeadAttention<B>> {
        Some(self)
    }
}

/// The keys that later tokens may read: all keys for dense attention, for a window at least those that `kept` names.
#[derive(Clone, Debug)]
pub struct RecentCache<B: Backend> {
    /// Keys and values of these tokens.
    pub keys: KeyCache<B>,
    /// The keys that stay ([`AttentionSpec::kept_keys`]); `None`: all.
    pub kept: Option<[usize; 2]>,
}

impl<B: Backend> KindCache<B> for RecentCache<B> {
    fn num_keys(&self) -> usize {
        self.kept.map_or(self.keys.len(), |[first, last]| (first + last).min(self.keys.len()))
    }

    fn for_token_step(&mut self) -> Option<TokenCache<'_, B>> {
        Some(TokenCache::Recent(&mut self.keys))
    }

    fn count_token(&mut self) {
        self.keys.count_token();
    }

    fn rows(&self, rows: RowsOf) -> LayerCache<B> {
        LayerCache::Recent(Self { keys: self.keys.rows(rows, |tokens| [tokens; 2]), kept: self.kept })
    }

    fn put(&mut self, row: usize, text: &LayerCache<B>, tokens: usize) {
        let LayerCache::Recent(text) = text else { panic!("{OTHER_CACHE}") };
        self.keys.put_kept(row, &text.keys, self.kept, tokens);
    }
}

impl<B: Backend> LayerCache<B> {
    /// Replaces the cache of a dense or sliding-window layer by the keys of a prompt.
    pub fn keep_recent(&mut self, qkv: &Tensor<B, 4>, spec: AttentionSpec) {
        let (kept, after) = (spec.kept_keys(), 0);
        let [_, k, v] = split_heads(qkv.clone(), spec.num_kv_heads);
        let ends = kept_ends(qkv.dims()[1], kept, after);
        let seen = |x: Tensor<B, 4>| both_ends(x, ends);
        *self = Self::Recent(RecentCache { keys: KeyCache::new(seen(k), seen(v)), kept });
    }
}

/// Attention over all keys, or a window and keys beyond it, of `new` tokens after cached tokens; returns
/// `[batch, new, num_heads, head_dim]`.
fn attend_recent<B: SieveBackend>(
    Cached { rows: cached, context, state }: Cached<'_, '_, B>,
    qkv: Tensor<B::Inner, 4>,
    sinks: Option<Tensor<B::Inner, 1>>,
    spec: AttentionSpec,
) -> Tensor<B::Inner, 4> {
    let spec = context.under_policy(spec);
    let LayerCache::Recent(RecentCache { keys, .. }) = cached.cache else {
        panic!("a layer of grouped queries decodes after a prompt");
    };
    if qkv.dims()[1] == 1 {
        return cached_attention(keys, qkv, sinks, spec, cached.scratch);
    }
    attend_in_row(keys, qkv, sinks, spec, state)
}

/// Attention of several new tokens in a row of their own, the cached keys that they may see and then the new tokens,
/// which it adds to the cache; returns `[batch, new, num_heads, head_dim]`.
pub(super) fn attend_in_row<B: SieveBackend>(
    keys: &mut KeyCache<B::Inner>,
    qkv: Tensor<B::Inner, 4>,
    sinks: Option<Tensor<B::Inner, 1>>,
    spec: AttentionSpec,
    state: &mut PassState<B>,
) -> Tensor<B::Inner, 4> {
    // A window includes the query's own token, so the first new token sees one cached token fewer.
    let (new, kept, own) = (qkv.dims()[1], spec.kept_keys(), 1);
    let [first, last] = kept_ends(keys.len(), kept, own);
    let row = keys.before(&qkv, [first, last]);
    let bounds = state.rows_behind([row.dims()[0], row.dims()[1]], first + last, &row.device());
    let o = attention_of_last(row, sinks, spec, (first + last, bounds));
    let [_, k, v] = split_heads(qkv, spec.num_kv_heads);
    keys.make_room(new, kept);
    keys.append(k, v);
    o
}

/// The cache of a dense layer under a decode selector.
impl<B: Backend> KindCache<B> for SelectorCache<B> {
    fn num_keys(&self) -> usize {
        self.reads.num_read(self.keys.len())
    }

    fn for_token_step(&mut self) -> Option<TokenCache<'_, B>> {
        self.is_fixed.then_some(TokenCache::Selector(self))
    }

    fn count_token(&mut self) {
        SelectorCache::count_token(self);
    }

    fn rows(&self, _rows: RowsOf) -> LayerCache<B> {
        panic!("a selector's cache has one row")
    }

    fn put(&mut self, _row: usize, _text: &LayerCache<B>, _tokens: usize) {
        panic!("{OTHER_CACHE}")
    }
}
