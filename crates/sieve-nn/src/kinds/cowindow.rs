//! CoWindow attention (arXiv:2609.32704): every KV head reads a window, the first tokens and its own band of distances.
use super::{Attention, BuildLayer, KindCache, KindLayer, LayerCache, OTHER_CACHE};
use crate::kv_cache::last;
use crate::layer::{Cached, KindAttention, Rows};
use crate::pass::{LayerContext, PassState};
use crate::{Linear, QkvProjection, RmsNorm, WeightInit, attention_weights};
use burn::module::Module;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use sieve_core::{CowaShape, FarKeys, ModelShape};
use sieve_ops::{
    AttentionLayer, AttentionSpec, ContextParallel, DeviceBackend, KeyCache, RowsOf, SieveBackend, TokenAttention,
    TokenCache, attention_decode, attention_of_last, bounds_of_last, split_heads,
};
use std::ops::Range;

/// Grouped-query attention whose KV heads divide the far past among them.
#[derive(Module, Debug)]
pub struct CoWindowAttention<B: Backend> {
    /// Packed projection to q, k and v, with q/k-norm and RoPE.
    pub qkv: QkvProjection<B>,
    /// Output projection, `[d_model, num_heads * head_dim]`.
    pub o_proj: Linear<B>,
    #[module(skip)]
    cowa: CowaShape,
}

impl BuildLayer for CowaShape {
    fn build<B: Backend>(&self, shape: &ModelShape, init: &mut WeightInit, device: &B::Device) -> Attention<B> {
        let qkv = QkvProjection::new(shape, init, device);
        let o_proj = Linear::new(shape.num_heads * shape.head_dim, shape.d_model, init, device);
        Attention::Bands(CoWindowAttention { qkv, o_proj, cowa: *self })
    }
}

impl<B: Backend> CoWindowAttention<B> {
    /// Sizes of the heads, scale, window and the keys beyond it.
    fn spec(&self) -> AttentionSpec {
        AttentionSpec { far: Some(self.cowa.far_keys()), ..self.qkv.spec(Some(self.cowa.near_window)) }
    }
}

impl<B: SieveBackend> KindAttention<B> for CoWindowAttention<B> {
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
        let own = spec.of_packed_heads(qkv.dims()[2]).of_heads_from(rows.heads.start / spec.group_size());
        (sieve_ops::attention(qkv, rows.documents, own), ())
    }

    fn fill(&self, qkv: Tensor<B::Inner, 4>, (): ()) -> LayerCache<B::Inner> {
        let [_, k, v] = split_heads(qkv, self.spec().num_kv_heads);
        let mut cache = BandCache::empty(&k, self.cowa);
        cache.append([k, v]);
        LayerCache::Bands(cache)
    }

    fn attend_cached(&self, qkv: Tensor<B::Inner, 4>, cached: Cached<'_, '_, B>) -> Tensor<B::Inner, 4> {
        let LayerCache::Bands(cache) = cached.rows.cache else {
            panic!("a layer with bands decodes after a prompt");
        };
        let spec = cached.context.under_policy(self.spec());
        let [q, k, v] = split_heads(qkv, spec.num_kv_heads);
        if k.dims()[1] == 1 {
            cache.append([k, v]);
            return cache.attend_token(&q.squeeze_dim(1), spec.softmax_scale, cached.rows.scratch).unsqueeze_dim(1);
        }
        let o = cache.attend_row([&q, &k, &v], spec);
        cache.append([k, v]);
        o
    }

    fn project_out(&self, o: Tensor<B, 3>, residual: Tensor<B, 3>) -> Tensor<B, 3> {
        self.o_proj.forward_add(o, residual)
    }
}

impl<B: SieveBackend> KindLayer<B> for CoWindowAttention<B> {
    fn layer_op(
        &self,
        norm: &RmsNorm<B>,
        context: &LayerContext<'_, B>,
        state: &mut PassState<B>,
    ) -> Option<(AttentionLayer<B>, AttentionSpec)> {
        Some((self.qkv.layer_op(norm, &self.o_proj, context, state)?, self.spec()))
    }

    /// `None`: the step's kernels read a window, and no band.
    fn for_token_step(&self) -> Option<TokenAttention<B>> {
        None
    }

    fn weights(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>, _state: &PassState<B>) -> Tensor<B, 3> {
        attention_weights::dense(&self.qkv, self.spec(), x, context)
    }
}

/// What later tokens may read: the text's first tokens, and for each KV head the tokens of its band and all that will
/// come into it. So the nearer a head's band is, the fewer tokens it keeps.
#[derive(Clone, Debug)]
pub struct BandCache<B: Backend> {
    /// Keys and values of the first tokens.
    sinks: KeyCache<B>,
    /// Keys and values of the tokens after the first ones: for each KV head the latest, up to its band's end or more.
    later: Vec<KeyCache<B>>,
    cowa: CowaShape,
}

// The axes of the heads and of the tokens in a cache's `[batch, num_kv_heads, tokens, head_dim]`.
const HEAD_AXIS: usize = 1;
const KEY_AXIS: usize = 2;

impl<B: Backend> BandCache<B> {
    /// A cache without a token, for keys like `k`, `[batch, tokens, num_kv_heads, head_dim]`.
    fn empty(k: &Tensor<B, 4>, cowa: CowaShape) -> Self {
        let ([batch, _, kv_heads, head_dim], options) = (k.dims(), (&k.device(), k.dtype()));
        let of_heads = |heads| KeyCache::empty([batch, heads, 1, head_dim], options);
        Self { sinks: of_heads(kv_heads), later: (0..kv_heads).map(|_| of_heads(1)).collect(), cowa }
    }

    fn far(&self) -> FarKeys {
        self.cowa.far_keys()
    }

    /// How many of a text's `tokens` are among its first.
    fn num_sinks(&self, tokens: usize) -> usize {
        self.cowa.sink_tokens.min(tokens)
    }

    /// Adds new tokens, k, v `[batch, new, num_kv_heads, head_dim]`.
    fn append(&mut self, [k, v]: [Tensor<B, 4>; 2]) {
        let (new, far) = (k.dims()[1], self.far());
        let sinks = (far.sink_tokens - self.sinks.len()).min(new);
        if sinks > 0 {
            self.sinks.append(k.clone().narrow(1, 0, sinks), v.clone().narrow(1, 0, sinks));
        }
        for (head, later) in self.later.iter_mut().enumerate().filter(|_| sinks < new) {
            let reach = far.band(head).end;
            let of_head = |x: &Tensor<B, 4>| last(x.clone().narrow(1, sinks, new - sinks).narrow(2, head, 1), reach);
            later.reserve(reach.min(new - sinks), reach);
            later.append(of_head(&k), of_head(&v));
        }
    }

    /// The distances that a head reads, as ranges of its tokens after the first: its band, then the window.
    fn ranges(&self, head: usize) -> [Range<usize>; 2] {
        let len = self.later[head].len();
        let of = |distances: Range<usize>| len.saturating_sub(distances.end)..len.saturating_sub(distances.start);
        [of(self.far().band(head)), of(0..self.cowa.near_window)]
    }

    /// `of` a head's tokens: the first, and those in these ranges of the others.
    fn tokens(
        &self,
        head: usize,
        ranges: impl IntoIterator<Item = Range<usize>>,
        of: impl Fn(&KeyCache<B>) -> Tensor<B, 4>,
    ) -> Tensor<B, 4> {
        let sinks = (!self.sinks.is_empty()).then(|| of(&self.sinks).narrow(HEAD_AXIS, head, 1));
        let ranges = ranges.into_iter().filter(|range| !range.is_empty());
        let later = ranges.map(|range| of(&self.later[head]).narrow(KEY_AXIS, range.start, range.len()));
        Tensor::cat(sinks.into_iter().chain(later).collect(), KEY_AXIS)
    }

    /// Number of keys that a head's last token reads.
    fn num_seen(&self, head: usize) -> usize {
        self.sinks.len() + self.ranges(head).iter().map(ExactSizeIterator::len).sum::<usize>()
    }
}

impl<B: DeviceBackend> BandCache<B> {
    /// Attention of one token, which is in the cache, `q` `[batch, num_heads, head_dim]`: over the keys that each KV
    /// head reads, by rising position. Neighbouring heads that read equally many attend together.
    fn attend_token(&self, q: &Tensor<B, 3>, softmax_scale: f64, scratch: &mut B::DecodeScratch) -> Tensor<B, 3> {
        let heads: Vec<usize> = (0..self.later.len()).collect();
        let group = q.dims()[1] / heads.len();
        let runs = heads.chunk_by(|&one, &next| self.num_seen(one) == self.num_seen(next)).map(|run| {
            let gather = |of: fn(&KeyCache<B>) -> Tensor<B, 4>| {
                let keys = run.iter().map(|&head| self.tokens(head, self.ranges(head), of));
                Tensor::cat(keys.collect(), HEAD_AXIS)
            };
            let [k, v] = [gather(|keys| keys.k.tokens()), gather(|keys| keys.v.tokens())];
            let keys = KeyCache::with_capacity(k, v, Some(self.num_seen(run[0])));
            let queries = q.clone().narrow(HEAD_AXIS, run[0] * group, run.len() * group);
            attention_decode(queries, &keys, None, softmax_scale, scratch)
        });
        Tensor::cat(runs.collect(), HEAD_AXIS)
    }

    /// Attention of several new tokens, `[batch, new, heads, head_dim]` each, before they are appended. Each head's
    /// tokens attend in a row of their own: the cached tokens, then the new ones. Where tokens are missing between the
    /// first ones and the others, no query of the row would read them.
    fn attend_row(&self, [q, k, v]: [&Tensor<B, 4>; 3], spec: AttentionSpec) -> Tensor<B, 4> {
        let group = spec.group_size();
        let heads = self.later.iter().enumerate().map(|(head, later)| {
            let parts = [(q, head * group, group), (k, head, 1), (v, head, 1)];
            let qkv = parts.map(|(x, first, count)| x.clone().narrow(2, first, count));
            let all = || std::iter::once(0..later.len());
            let k = self.tokens(head, all(), |keys| keys.k.tokens());
            let v = self.tokens(head, all(), |keys| keys.v.tokens());
            let cached = KeyCache::with_capacity(k, v, None);
            let own = AttentionSpec { num_heads: group, num_kv_heads: 1, ..spec.of_heads_from(head) };
            let earlier = cached.len();
            let row = cached.before(&Tensor::cat(qkv.into(), 2), earlier);
            let bounds = bounds_of_last::<B>([row.dims()[0], row.dims()[1]], earlier, &row.device());
            attention_of_last(row, None, own, (earlier, bounds))
        });
        Tensor::cat(heads.collect(), 2)
    }
}

impl<B: Backend> KindCache<B> for BandCache<B> {
    /// The keys of the head whose band is the farthest, which reads the most keys sooner or later.
    fn num_keys(&self) -> usize {
        let held = self.later.iter().enumerate().map(|(head, later)| later.len().min(self.far().band(head).end));
        self.sinks.len() + held.max().unwrap_or(0)
    }

    fn for_token_step(&mut self) -> Option<TokenCache<'_, B>> {
        None
    }

    fn count_token(&mut self) {
        panic!("no step takes a cache of bands");
    }

    fn rows(&self, rows: RowsOf) -> LayerCache<B> {
        let sinks = self.sinks.rows(rows, |tokens| [self.num_sinks(tokens); 2]);
        let later = self.later.iter().map(|later| later.rows(rows, |tokens| [tokens - self.num_sinks(tokens); 2]));
        LayerCache::Bands(Self { sinks, later: later.collect(), cowa: self.cowa })
    }

    fn put(&mut self, row: usize, text: &LayerCache<B>, tokens: usize) {
        let LayerCache::Bands(text) = text else { panic!("{OTHER_CACHE}") };
        let sinks = self.num_sinks(tokens);
        self.sinks.put(row, &text.sinks, sinks);
        for (later, text) in self.later.iter_mut().zip(&text.later) {
            later.put(row, text, tokens - sinks);
        }
    }
}
