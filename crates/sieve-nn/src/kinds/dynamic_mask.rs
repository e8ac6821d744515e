//! Dynamic Mask Attention (paper: Trainable Dynamic Mask Sparse Attention), which selects single tokens.
use super::{Attention, BuildLayer, KindCache, KindLayer, LayerCache, OTHER_CACHE};
use crate::attention_weights::{self, by_key, with_values};
use crate::kv_cache::CachedRows;
use crate::layer::{Cached, KindAttention, Rows};
use crate::pass::{LayerContext, LayerOutput, PassState, on_device};
use crate::{AttentionConfig, Linear, QkvProjection, RmsNorm, WeightInit};
use burn::module::{Module, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Numeric, Tensor, TensorKind};
use sieve_core::{DmaBias, DmaShape, DmaWindow, ModelShape};
use sieve_ops::{
    AttentionLayer, AttentionSpec, ContextParallel, DeviceBackend, DmaAttention, DmaCache, DmaLayer, DmaOrder,
    DmaToken, Documents, KeyOrder, PositionOrigin, Recency, RowsOf, SieveBackend, TokenAttention, TokenCache,
    dma_attention_by_rank, dma_cache, dma_decode, dma_ranks, split_heads,
};

/// Every KV head scores each key once, from the token's values. A query sees the `keep_window_size` earlier keys with
/// the highest scores.
#[derive(Module, Debug)]
pub struct DynamicMaskAttention<B: Backend> {
    /// Packed projection to q, k and v, with q/k-norm and RoPE.
    pub qkv: QkvProjection<B>,
    /// Output projection, `[d_model, num_heads * head_dim]`.
    pub o_proj: Linear<B>,
    /// Scores from the values of all KV heads (eq. 3's Δ), `[num_kv_heads, num_kv_heads * head_dim]`.
    pub dt_proj: Linear<B>,
    /// Gate per KV head (eq. 3's A), `[num_kv_heads]`. At 0 all scores are equal, and of equal keys the last are kept:
    /// DMA is then a sliding window.
    pub a: Param<Tensor<B, 1>>,
    #[module(skip)]
    dma: DmaShape,
}

impl BuildLayer for DmaShape {
    fn build<B: Backend>(&self, shape: &ModelShape, init: &mut WeightInit, device: &B::Device) -> Attention<B> {
        Attention::Ranked(DynamicMaskAttention::new(shape, *self, init, device))
    }
}

impl AttentionConfig {
    /// Dynamic mask attention: of a recipe's form with [`DmaShape::new`], of the published one with
    /// [`DmaShape::published`]. Panics when [`validate`](Self::validate) fails or `keep_window_size` is 0.
    pub fn dynamic_mask<B: Backend>(&self, dma: DmaShape, device: &B::Device) -> DynamicMaskAttention<B> {
        assert!(dma.keep_window_size > 0, "a query keeps at least one key");
        let shape = self.shape(sieve_core::Attention::Dma(dma));
        DynamicMaskAttention::new(&shape, dma, &mut self.weights(), device)
    }
}

impl<B: Backend> DynamicMaskAttention<B> {
    /// Normal weights from `init`; A filled with `dma.a_init`.
    pub fn new(shape: &ModelShape, dma: DmaShape, init: &mut WeightInit, device: &B::Device) -> Self {
        let ModelShape { d_model, num_heads, num_kv_heads, head_dim, .. } = *shape;
        Self {
            qkv: QkvProjection::new(shape, init, device),
            o_proj: Linear::new(num_heads * head_dim, d_model, init, device),
            dt_proj: Linear::new(num_kv_heads * head_dim, num_kv_heads, init, device),
            a: init.constant(dma.a_init, [num_kv_heads], device),
            dma,
        }
    }

    pub(crate) fn spec(&self) -> AttentionSpec {
        self.qkv.spec(None)
    }
}

impl<B: SieveBackend> DynamicMaskAttention<B> {
    /// The parameters w_dt and a, which rank keys.
    pub fn dma_layer(&self) -> DmaLayer<B> {
        DmaLayer { w_dt: self.dt_proj.weight.val(), a: self.a.val(), spec: self.dma }
    }

    /// The same parameters, without a graph.
    fn dma_layer_on_device(&self) -> DmaLayer<B::Inner> {
        let DmaLayer { w_dt, a, spec } = self.dma_layer();
        DmaLayer { w_dt: on_device(w_dt), a: on_device(a), spec }
    }

    pub(super) fn masked(&self, qkv: Tensor<B, 4>, documents: &Documents<B>, spec: AttentionSpec) -> DmaAttention<B> {
        let found = sieve_ops::dynamic_mask_attention(qkv, self.dma_layer(), documents, spec);
        found.unwrap_or_else(|error| panic!("{error}"))
    }
}

impl<B: SieveBackend> KindAttention<B> for DynamicMaskAttention<B> {
    type Packed = Tensor<B, 4>;
    /// Scores of the keys, and the first query that no longer sees each, both `[batch, num_kv_heads, seq_len]`.
    type Found = (Tensor<B, 3>, Tensor<B, 3, Int>);

    fn num_heads(&self) -> usize {
        self.spec().num_heads
    }

    fn project(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Tensor<B, 4> {
        self.qkv.forward(x, context)
    }

    /// Panics: a key's score is of the values of all KV heads, so heads cannot be divided. In parts of rows DMA is the
    /// one op of [`layer_op`](KindLayer::layer_op), which exchanges keys.
    fn project_own_heads(&self, _x: Tensor<B, 3>, _parts: &ContextParallel, _rows: &Rows<'_, B>) -> Tensor<B, 4> {
        panic!("DMA needs whole rows where it is not one op")
    }

    fn attend(&self, qkv: Tensor<B, 4>, rows: &Rows<'_, B>, _state: &mut PassState<B>) -> (Tensor<B, 4>, Self::Found) {
        let DmaAttention { o, rank, expire } = self.masked(qkv, rows.documents, rows.context.under_policy(self.spec()));
        (o, (rank, expire))
    }

    fn fill(&self, qkv: Tensor<B::Inner, 4>, (rank, expire): Self::Found) -> LayerCache<B::Inner> {
        let expire = Tensor::from_primitive(expire.into_primitive());
        SlotCache::of_prompt(qkv, on_device(rank), expire, self.spec(), self.dma.window())
    }

    fn attend_cached(&self, qkv: Tensor<B::Inner, 4>, cached: Cached<'_, '_, B>) -> Tensor<B::Inner, 4> {
        attend_selected(cached.rows, qkv, &self.dma_layer_on_device(), cached.context.under_policy(self.spec()))
    }

    fn project_out(&self, o: Tensor<B, 3>, residual: Tensor<B, 3>, _context: &LayerContext<'_, B>) -> Tensor<B, 3> {
        self.o_proj.forward_add(o, residual)
    }

    fn report(&self, (rank, expire): Self::Found, output: &mut LayerOutput<B>) {
        output.expire = Some(expire);
        // Only the bias `exp(min(z, 60))` clamps scores; the linear bias is z itself.
        output.clamped_scores = Some(rank).filter(|_| self.clamps_scores());
    }
}

impl<B: SieveBackend> KindLayer<B> for DynamicMaskAttention<B> {
    fn layer_op(
        &self,
        norm: &RmsNorm<B>,
        context: &LayerContext<'_, B>,
        state: &mut PassState<B>,
    ) -> Option<(AttentionLayer<B>, AttentionSpec)> {
        let dma = Some(self.dma_layer());
        let operands = self.qkv.layer_op(norm, &self.o_proj, context, state)?;
        Some((AttentionLayer { dma, ..operands }, self.spec()))
    }

    fn clamps_scores(&self) -> bool {
        self.dma.bias == DmaBias::Exp
    }

    fn for_token_step(&self) -> Option<TokenAttention<B>> {
        let dma = Some(self.dma_layer());
        Some(TokenAttention { dma, ..self.qkv.for_token_step(&self.o_proj, self.spec()) })
    }

    fn weights(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>, _state: &PassState<B>) -> Tensor<B, 3> {
        let (qkv, spec, documents) = (self.qkv.forward(x, context), self.spec(), context.documents);
        // DMA's scores depend on the values, so the mask is computed before one-hot values replace them.
        let chosen = self.masked(qkv.clone(), documents, spec);
        by_key(&qkv, |one_hot| {
            let qkv = with_values(&qkv, one_hot, spec.num_kv_heads);
            let (rank, expire) = (chosen.rank.clone(), chosen.expire.clone());
            let o = sieve_ops::dma_attention(qkv, rank, expire, documents, spec, self.dma.bias);
            o.expect("the mask and the ranks are of this packed tensor")
        })
    }

    fn dense_weights(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Option<Tensor<B, 3>> {
        Some(attention_weights::dense(&self.qkv, self.spec(), x, context))
    }

    fn key_scores(
        &self,
        x: &dyn Fn() -> Tensor<B, 3>,
        context: &LayerContext<'_, B>,
    ) -> Option<Result<Tensor<B::Inner, 3>, String>> {
        let (qkv, no_recency) = (on_device(self.qkv.forward(x(), context)), None);
        let ranks = dma_ranks(qkv, &self.dma_layer_on_device(), self.spec(), no_recency);
        Some(ranks.map_err(|error| error.to_string()))
    }
}

/// The keys that DMA's mask still shows, at most `keep_window_size` per KV head.
#[derive(Clone, Debug)]
pub struct SlotCache<B: Backend> {
    /// Keys, values and scores of the fixed-size cache.
    pub slots: DmaCache<B>,
    /// Position of the next token.
    pub next_position: usize,
}

impl<B: DeviceBackend> SlotCache<B> {
    /// The cache after a prompt: the keys that DMA's mask still shows to the next query.
    fn of_prompt(
        qkv: Tensor<B, 4>,
        rank: Tensor<B, 3>,
        expire: Tensor<B, 3, Int>,
        spec: AttentionSpec,
        window: DmaWindow,
    ) -> LayerCache<B> {
        let next_position = qkv.dims()[1];
        LayerCache::Selected(Self { slots: dma_cache(qkv, (rank, expire), None, spec, window), next_position })
    }
}

impl<B: Backend> KindCache<B> for SlotCache<B> {
    fn num_keys(&self) -> usize {
        self.slots.len()
    }

    fn for_token_step(&mut self) -> Option<TokenCache<'_, B>> {
        Some(TokenCache::Slots(&mut self.slots))
    }

    fn count_token(&mut self) {
        self.slots.count_token();
        self.next_position += 1;
    }

    fn rows(&self, rows: RowsOf) -> LayerCache<B> {
        let next_position = match rows {
            // The text's next token comes after its own tokens, however long the other texts are.
            RowsOf::Text { tokens, .. } => tokens,
            _ => self.next_position,
        };
        LayerCache::Selected(Self { slots: self.slots.rows(rows), next_position })
    }

    fn put(&mut self, row: usize, text: &LayerCache<B>, _tokens: usize) {
        let LayerCache::Selected(text) = text else { panic!("{OTHER_CACHE}") };
        self.slots.put(row, &text.slots);
    }
}

/// Cached keys for each new token from which on a host takes the tokens one by one. A row with all of the keys has a
/// query for each of them, so that its work grows with their square; one by one, the keys are read again for each
/// token.
const KEYS_OF_A_TOKEN: usize = 8;

/// Whether `new` tokens after `cached` keys attend one by one.
fn attend_one_by_one<B: DeviceBackend>(new: usize, cached: usize) -> bool {
    new == 1 || (B::ON_HOST && KEYS_OF_A_TOKEN * new <= cached)
}

/// Calls `attend` with each token of a packed tensor, `[batch, 1, heads, head_dim]`, and joins what it returns.
fn each_token<B: Backend>(qkv: Tensor<B, 4>, mut attend: impl FnMut(Tensor<B, 4>) -> Tensor<B, 4>) -> Tensor<B, 4> {
    match qkv.dims()[1] {
        1 => attend(qkv),
        _ => Tensor::cat(qkv.split(1, 1).into_iter().map(attend).collect(), 1),
    }
}

/// DMA of `new` tokens; returns `[batch, new, num_heads, head_dim]`. Several new tokens attend in a row of their
/// own: the keys in the slots, then the new tokens. The mask of this row equals the mask of the whole text, because
/// a key's rank does not depend on the query and an evicted key never returns.
fn attend_selected<B: DeviceBackend>(
    cached: CachedRows<'_, B>,
    qkv: Tensor<B, 4>,
    layer: &DmaLayer<B>,
    spec: AttentionSpec,
) -> Tensor<B, 4> {
    let dma = layer.spec;
    let LayerCache::Selected(SlotCache { slots: cache, next_position }) = cached.cache else {
        panic!("a DMA layer decodes after a prompt");
    };
    let [batch, new, _, _] = qkv.dims();
    let (first, device) = (*next_position, qkv.device());
    *next_position += new;
    let recency = dma.slopes(spec.num_kv_heads).map(|slopes| Recency {
        slopes,
        origin: PositionOrigin::At { position: first, shape: [batch, new], device: device.clone() },
    });
    let rank = dma_ranks(qkv.clone(), layer, spec, recency).unwrap_or_else(|error| panic!("{error}"));
    if attend_one_by_one::<B>(new, cache.len()) {
        let mut ranks = rank.split(1, 2).into_iter().zip(first..);
        return each_token(qkv, |qkv| {
            let (rank, position) = ranks.next().expect("a rank of each token");
            let one_token = |x: Tensor<B, 4>| x.squeeze_dim::<3>(1).into_primitive().tensor();
            let [q, k, v] = split_heads(qkv, spec.num_kv_heads).map(one_token);
            let (rank, policy) = (rank.squeeze_dim::<2>(2).into_primitive().tensor(), spec.policy);
            let token = DmaToken { q, k, v, rank, position, policy };
            let o = dma_decode(cache, token, spec.softmax_scale, dma.bias, cached.scratch);
            o.unwrap_or_else(|error| panic!("{error}")).unsqueeze_dim(1)
        });
    }
    cache.sort();
    let earlier = cache.len();
    let rank = Tensor::cat(vec![cache.rank.tokens(), rank], 2);
    let row = cache.keys.before(&qkv, [0, earlier]);
    let positions = positions(first, [batch, spec.num_kv_heads, new], &device);
    let positions = Tensor::cat(vec![cache.positions.tokens(), positions], 2);
    // By epochs, tokens of no text, a document of their own, stand before the row, so that an epoch of the text is one
    // of the row.
    let before = match spec.policy.keys {
        KeyOrder::Epochs => (first - earlier) % KeyOrder::EPOCH,
        KeyOrder::Leaving => 0,
    };
    let documents = behind(before, [batch, earlier + new], &device);
    let order = match spec.policy.keys {
        KeyOrder::Epochs => DmaOrder::EpochsBehind {
            positions: after_zeros(before, positions.clone(), 2).into_primitive(),
            first_query: before + earlier,
            first_position: first,
        },
        KeyOrder::Leaving => DmaOrder::Of(KeyOrder::Leaving),
    };
    let (padded, ranks) = (after_zeros(before, row.clone(), 1), after_zeros(before, rank.clone(), 2));
    let found = dma_attention_by_rank(padded, ranks, &documents, spec, dma, order);
    let DmaAttention { o, expire, .. } = found.unwrap_or_else(|error| panic!("{error}"));
    let expire = if before == 0 { expire } else { expire.narrow(2, before, earlier + new) - before as i32 };
    *cache = dma_cache(row, (rank, expire), Some(positions), spec, dma.window());
    o.narrow(1, before + earlier, new)
}

/// A tensor with `count` zeros before its tokens, which are axis `dim`.
fn after_zeros<B: Backend, const D: usize, K: TensorKind<B> + Numeric<B>>(
    count: usize,
    tokens: Tensor<B, D, K>,
    dim: usize,
) -> Tensor<B, D, K> {
    if count == 0 {
        return tokens;
    }
    let mut shape = tokens.dims();
    shape[dim] = count;
    Tensor::cat(vec![Tensor::zeros(shape, (&tokens.device(), tokens.dtype())), tokens], dim)
}

/// The documents of rows of `tokens` tokens behind `before` others, a document of their own.
fn behind<B: Backend>(before: usize, [batch, tokens]: [usize; 2], device: &B::Device) -> Documents<B> {
    if before == 0 {
        return Documents::whole_rows([batch, tokens], device);
    }
    let len = before + tokens;
    let bounds = |of: fn(bool, [usize; 2]) -> usize| -> Vec<u32> {
        (0..batch * len).map(|token| of(token % len < before, [before, len]) as u32).collect()
    };
    let start = bounds(|is_before, [before, _]| if is_before { 0 } else { before });
    let end = bounds(|is_before, [before, len]| if is_before { before } else { len });
    Documents::new(&start, &end, [batch, len], device)
}

/// Positions `first..`, the same for each row and head, in a tensor of this shape, `[batch, heads, tokens]`.
fn positions<B: Backend>(first: usize, shape: [usize; 3], device: &B::Device) -> Tensor<B, 3, Int> {
    let first = first as i64;
    let positions = Tensor::<B, 1, Int>::arange(first..first + shape[2] as i64, device);
    positions.unsqueeze::<3>().expand(shape)
}
