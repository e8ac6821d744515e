//! How the tokens of a pass lie: in whole rows, as a process's part of each row, in rows that share prompts, or after
//! cached tokens. It is written here once for all kinds.
//!
//! A kind says what its attention is, by [`KindAttention`]: it projects tokens, attends in whole rows, and keeps a
//! cache that later tokens attend to. Where a layer is one op with its norm
//! ([`KindLayer::layer_op`](crate::KindLayer)), that op takes whole rows and parts of rows, and none of this is called.
use crate::kinds::{Forward, LayerCache};
use crate::kv_cache::{CachedRows, LayerCaches};
use crate::pass::{LayerContext, LayerOutput, PassState, from_device, on_device};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use sieve_ops::{ContextParallel, Documents, SieveBackend};
use std::ops::Range;

/// Tensors of tokens, on a backend.
pub(crate) trait PerToken<S: Backend>: Clone {
    /// The same tensors on another backend.
    type On<T: Backend>: PerToken<T, On<T> = Self::On<T>>;

    /// Calls `change` with each tensor, `[batch, tokens, heads, width]`.
    fn change<T: Backend>(self, change: &dyn Fn(Tensor<S, 4>) -> Tensor<T, 4>) -> Self::On<T>;
}

impl<S: Backend> PerToken<S> for Tensor<S, 4> {
    type On<T: Backend> = Tensor<T, 4>;

    fn change<T: Backend>(self, change: &dyn Fn(Self) -> Tensor<T, 4>) -> Tensor<T, 4> {
        change(self)
    }
}

/// The rows in which a kind attends. They are whole: every earlier token of a document is in its row.
pub(crate) struct Rows<'a, B: Backend> {
    /// Document bounds and positions of the rows' tokens.
    pub(crate) documents: &'a Documents<B>,
    /// Where the rows begin in the batch: the key under which [`PassState::last_choice`] stores their choice of blocks.
    pub(crate) first: usize,
    /// Tokens at the beginning of each row whose outputs are not read: they are in a cache.
    pub(crate) cached: usize,
    /// The query heads that the packed tensors have, with their KV heads: all, or this process's share. Kinds with a
    /// parameter per head take these heads' entries of it.
    pub(crate) heads: Range<usize>,
    /// The context of the pass.
    pub(crate) context: &'a LayerContext<'a, B>,
}

impl<'a, B: Backend> Rows<'a, B> {
    /// Rows from the batch's first on, with all query heads.
    fn of_all_heads(documents: &'a Documents<B>, num_heads: usize, context: &'a LayerContext<'a, B>) -> Self {
        Self { documents, first: 0, cached: 0, heads: 0..num_heads, context }
    }
}

/// New tokens' cache, with the context and the state of the pass.
pub(crate) struct Cached<'a, 'c, B: SieveBackend> {
    /// The cache and its rows.
    pub(crate) rows: CachedRows<'c, B::Inner>,
    pub(crate) context: &'a LayerContext<'a, B>,
    pub(crate) state: &'a mut PassState<B>,
}

/// What a kind packs of tokens, without a graph.
pub(crate) type OnDevice<K, B> = <<K as KindAttention<B>>::Packed as PerToken<B>>::On<<B as SieveBackend>::Inner>;

/// The attention of a kind: what its author writes, however tokens lie.
///
/// Outputs `o` are `[batch, tokens, query heads, head_dim]`.
pub(crate) trait KindAttention<B: SieveBackend> {
    /// What attention reads of tokens, most often one packed tensor of queries, keys and values, normed and rotated.
    type Packed: PerToken<B, On<B> = Self::Packed>;
    /// What attention gives beside its output, for [`fill`](Self::fill) and [`report`](Self::report).
    type Found;

    /// Number of query heads.
    fn num_heads(&self) -> usize;

    /// Projects x, `[batch, tokens, d_model]`, after the layer's norm.
    fn project(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Self::Packed;

    /// [`project`](Self::project) for new tokens after cached ones. A kind whose
    /// [`attend_cached`](Self::attend_cached) reads only a part of `Packed` may leave the rest out.
    fn project_cached(&self, x: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Self::Packed {
        self.project(x, context)
    }

    /// [`project`](Self::project) with context parallelism: x is this process's part of each row, and the result has
    /// whole `rows` of this process's share of the heads.
    fn project_own_heads(&self, x: Tensor<B, 3>, parts: &ContextParallel, rows: &Rows<'_, B>) -> Self::Packed;

    /// Attention of the tokens of whole rows to each other.
    fn attend(&self, packed: Self::Packed, rows: &Rows<'_, B>, state: &mut PassState<B>)
    -> (Tensor<B, 4>, Self::Found);

    /// The cache after a prompt, from its tokens and what [`attend`](Self::attend) found for them.
    fn fill(&self, packed: OnDevice<Self, B>, found: Self::Found) -> LayerCache<B::Inner>;

    /// Attention of one or several new tokens to the cached ones and to each other; adds them to the cache. What is
    /// read from a cache gets no gradient.
    fn attend_cached(&self, packed: OnDevice<Self, B>, cached: Cached<'_, '_, B>) -> Tensor<B::Inner, 4>;

    /// The output projection of `o`, `[batch, tokens, num_heads * head_dim]`, plus `residual`.
    fn project_out(&self, o: Tensor<B, 3>, residual: Tensor<B, 3>, context: &LayerContext<'_, B>) -> Tensor<B, 3>;

    /// Adds what [`attend`](Self::attend) found for the pass's own tokens to the layer's output.
    fn report(&self, _found: Self::Found, _output: &mut LayerOutput<B>) {}
}

impl<B: SieveBackend, K: KindAttention<B>> Forward<B> for K {
    fn forward(
        &self,
        x: Tensor<B, 3>,
        residual: Tensor<B, 3>,
        context: &LayerContext<'_, B>,
        state: &mut PassState<B>,
        caches: Option<&mut LayerCaches<'_, B::Inner>>,
    ) -> LayerOutput<B> {
        let num_heads = self.num_heads();
        let all_heads = |documents| Rows::of_all_heads(documents, num_heads, context);
        let (o, found) = match (caches, context.parts, context.shared) {
            (Some(caches), _, _) => (with_caches(self, x, context, state, caches), None),
            (None, Some(parts), _) => {
                let documents = parts.whole_rows(&x.device());
                let rows = Rows { heads: parts.own_heads(num_heads), ..all_heads(&documents) };
                let (o, found) = self.attend(self.project_own_heads(x, parts, &rows), &rows, state);
                (parts.to_tokens(o, num_heads), Some(found))
            }
            (None, None, Some(shared)) => {
                let packed = self.project(x, context).change(&|x| shared.repeat(x));
                // What is found is about rows in which prompts are repeated, and not about the pass's own tokens.
                let (o, _) = self.attend(packed, &all_heads(shared.documents()), state);
                (shared.once(o), None)
            }
            (None, None, None) => {
                let (o, found) = self.attend(self.project(x, context), &all_heads(context.documents), state);
                (o, Some(found))
            }
        };
        let mut output = LayerOutput::of(self.project_out(o.flatten(2, 3), residual, context));
        if let Some(found) = found {
            self.report(found, &mut output);
        }
        output
    }
}

/// Attention of a prompt, which fills the empty cache, or of new tokens after the cached ones.
fn with_caches<B: SieveBackend, K: KindAttention<B>>(
    kind: &K,
    x: Tensor<B, 3>,
    context: &LayerContext<'_, B>,
    state: &mut PassState<B>,
    caches: &mut LayerCaches<'_, B::Inner>,
) -> Tensor<B, 4> {
    if let Some(cache) = caches.empty() {
        let packed = kind.project(x, context);
        let rows = Rows::of_all_heads(context.documents, kind.num_heads(), context);
        let (o, found) = kind.attend(packed.clone(), &rows, state);
        *cache = kind.fill(packed.change(&|x| on_device(x)), found);
        return o;
    }
    let batch = x.dims()[0];
    let packed = kind.project_cached(x, context).change(&|x| on_device(x));
    let mut outputs = caches.each(batch, |rows| {
        let [first, count] = rows.rows;
        let all = packed.clone();
        let of_rows = if count == batch { all } else { all.change(&|x| x.narrow(0, first, count)) };
        kind.attend_cached(of_rows, Cached { rows, context, state })
    });
    from_device(if outputs.len() == 1 { outputs.remove(0) } else { Tensor::cat(outputs, 0) })
}
