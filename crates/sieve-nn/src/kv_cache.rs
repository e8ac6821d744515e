//! Caches of earlier tokens: the keys and values that the attention can still see, or (MLA on a GPU) the latents that
//! they are computed from. The file of each kind has its layer's cache.
//!
//! Tokens that join a cache together attend as one row: the keys that may still be seen, with queries of zero, and
//! then the tokens. The keys are all earlier ones, a window's last, or DMA's slots by rising position; DMA's mask
//! of that row is the one of the whole text. MLA computes the keys and values of earlier tokens from their latents
//! again; on a CPU it caches keys and values. On a CPU queries of zero are not computed, NSA takes tokens one by one,
//! DMA takes few tokens after many keys one by one, and a token's output has the same bits in any such division.
mod text_rows;

pub use text_rows::TextRows;

use crate::LayerCache;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use sieve_ops::{DeviceBackend, RowsOf};

/// One cache per layer, and the number of tokens processed. A clone copies the buffers.
#[derive(Clone, Debug)]
pub struct KvCache<B: DeviceBackend> {
    /// Caches in the order of the layers.
    pub layers: Vec<LayerCache<B>>,
    /// Tokens processed so far, which is also the position of the next token.
    pub num_tokens: usize,
    pub(crate) scratch: B::DecodeScratch,
    /// The captured decoding step of the last token, which the next token can repeat. Any other pass drops it.
    pub(crate) graph: B::StepGraph,
    /// Rows of the rotary tables of that step.
    pub(crate) rope_rows: usize,
    /// How many of the last passes had a single token per row.
    pub(crate) single_tokens: usize,
}

impl<B: DeviceBackend> KvCache<B> {
    /// An empty cache for a model of `num_layers` layers.
    pub fn new(num_layers: usize) -> Self {
        Self {
            layers: (0..num_layers).map(|_| LayerCache::Empty).collect(),
            num_tokens: 0,
            scratch: Default::default(),
            graph: Default::default(),
            rope_rows: 0,
            single_tokens: 0,
        }
    }

    /// Replaces each row by `rows` copies of it.
    pub fn repeat(&mut self, rows: usize) {
        self.graph = Default::default();
        for layer in &mut self.layers {
            *layer = layer.rows(RowsOf::Copies(rows));
        }
    }

    /// The cache of one layer, for a pass through this layer alone.
    pub fn layer(&mut self, index: usize) -> LayerCaches<'_, B> {
        self.graph = Default::default();
        LayerCaches { caches: vec![&mut self.layers[index]], scratch: &mut self.scratch }
    }
}

/// The caches that a pass reads and extends in one layer: one cache of all rows, or one cache per row.
#[derive(Debug)]
pub struct LayerCaches<'a, B: DeviceBackend> {
    caches: Vec<&'a mut LayerCache<B>>,
    scratch: &'a mut B::DecodeScratch,
}

/// A cache, and the rows of the batch that it holds.
pub(crate) struct CachedRows<'a, B: DeviceBackend> {
    /// The first row, and how many there are.
    pub(crate) rows: [usize; 2],
    pub(crate) cache: &'a mut LayerCache<B>,
    pub(crate) scratch: &'a mut B::DecodeScratch,
}

impl<'a, B: DeviceBackend> LayerCaches<'a, B> {
    /// The caches of layer `index`: one cache of all rows, or one cache per row. Drops their captured steps.
    ///
    /// Panics without a cache.
    pub(crate) fn of_layer(caches: &'a mut [&mut KvCache<B>], index: usize) -> Self {
        let mut first_scratch = None;
        let caches = caches.iter_mut().map(|cache| {
            let KvCache { layers, scratch, graph, .. } = &mut **cache;
            *graph = Default::default();
            first_scratch.get_or_insert(scratch);
            &mut layers[index]
        });
        Self { caches: caches.collect(), scratch: first_scratch.expect("at least one cache") }
    }

    /// The one cache of all rows, and the buffers that decoding ops share.
    ///
    /// Panics where each row has its own cache.
    pub(crate) fn single(&mut self) -> (&mut LayerCache<B>, &mut B::DecodeScratch) {
        let [cache] = &mut self.caches[..] else { panic!("each row has its own cache") };
        (cache, self.scratch)
    }

    /// The one cache of all rows, if it is empty: the pass is then a prompt.
    pub(crate) fn empty(&mut self) -> Option<&mut LayerCache<B>> {
        match &mut self.caches[..] {
            [cache] if cache.is_empty() => Some(cache),
            _ => None,
        }
    }

    /// Calls `each` for every cache, and returns its results in the order of the rows.
    pub(crate) fn each<T>(&mut self, batch: usize, mut each: impl FnMut(CachedRows<'_, B>) -> T) -> Vec<T> {
        let rows_per_cache = match self.caches.len() {
            1 => batch,
            _ => 1,
        };
        assert_eq!(rows_per_cache * self.caches.len(), batch, "one cache, or one per row");
        let caches = self.caches.iter_mut().enumerate();
        let rows = caches.map(|(n, cache)| {
            each(CachedRows { rows: [n * rows_per_cache, rows_per_cache], cache, scratch: self.scratch })
        });
        rows.collect()
    }
}

/// The last `count` tokens of `[batch, tokens, heads, head_dim]`, or all if there are fewer.
pub(crate) fn last<B: Backend>(x: Tensor<B, 4>, count: usize) -> Tensor<B, 4> {
    let len = x.dims()[1];
    if len > count { x.narrow(1, len - count, count) } else { x }
}
