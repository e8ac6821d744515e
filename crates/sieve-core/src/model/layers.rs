//! Models whose layers differ: dense layers, and layers that share the blocks that an earlier layer chose.

use super::{Attention, ModelShape, mean_active_keys};

impl ModelShape {
    /// Whether layer `layer` (from 0) is dense by [`dense_layers`](Self::dense_layers).
    pub fn is_dense_layer(&self, layer: usize) -> bool {
        is_marked(&self.dense_layers, layer)
    }

    /// Whether layer `layer` (from 0) reads the blocks that an earlier layer chose, and chooses none itself.
    pub fn is_shared_layer(&self, layer: usize) -> bool {
        is_marked(&self.shared_layers, layer)
    }

    /// Number of layers that read the blocks that an earlier layer chose.
    pub fn num_shared_layers(&self) -> usize {
        (0..self.num_layers).filter(|&layer| self.is_shared_layer(layer)).count()
    }

    /// Whether the first layer has an indexer.
    pub fn has_indexer(&self) -> bool {
        self.attention.as_kind().has_indexer() && !self.is_shared_layer(0)
    }

    /// Whether the first layer has an indexer that scores blocks by one pooled key each, as QSA's does.
    pub fn has_pooled_indexer(&self) -> bool {
        self.attention.as_kind().has_pooled_indexer() && self.has_indexer()
    }

    /// Number of layers that are dense by [`dense_layers`](Self::dense_layers).
    pub fn num_dense_layers(&self) -> usize {
        (0..self.num_layers).filter(|&layer| self.is_dense_layer(layer)).count()
    }

    /// Whether layer `layer` (from 0) has dense attention: the model's kind is dense, or this layer is.
    pub fn has_dense_attention(&self, layer: usize) -> bool {
        self.attention == Attention::Mha || self.is_dense_layer(layer)
    }

    /// Number of layers with [dense attention](Self::has_dense_attention).
    pub fn num_layers_of_dense_attention(&self) -> usize {
        (0..self.num_layers).filter(|&layer| self.has_dense_attention(layer)).count()
    }

    /// The model with the attention of layer `layer` (from 0) in every layer.
    pub fn of_layer(&self, layer: usize) -> Self {
        let attention = match self.is_dense_layer(layer) {
            true => Attention::Mha,
            false => self.attention,
        };
        self.with(attention, self.num_layers, self.is_shared_layer(layer))
    }

    /// The model with dense attention in every layer.
    pub fn dense(&self) -> Self {
        let is_shared = false;
        self.with(Attention::Mha, self.num_layers, is_shared)
    }

    /// The layers grouped by attention, each group as the shape of a model with only these layers. The groups are: the
    /// model's own kind; layers of that kind that share an earlier choice of blocks, if any; dense layers, if any.
    pub fn by_kind(&self) -> Vec<Self> {
        let (num_dense, num_shared) = (self.num_dense_layers(), self.num_shared_layers());
        let num_own = self.num_layers - num_dense - num_shared;
        let (is_shared, is_not_shared) = (true, false);
        let mut kinds = vec![self.with(self.attention, num_own, is_not_shared)];
        if num_shared > 0 {
            kinds.push(self.with(self.attention, num_shared, is_shared));
        }
        if num_dense > 0 {
            kinds.push(self.with(Attention::Mha, num_dense, is_not_shared));
        }
        kinds
    }

    /// Mean number of keys a query sees in one document of `seq_len` tokens, over all layers.
    pub fn mean_active_keys(&self, seq_len: usize) -> f64 {
        let of = |attention| mean_active_keys(attention, seq_len);
        self.mean_over_layers(of(self.attention), of(Attention::Mha))
    }

    /// Mean over all layers of a number that is `own` in layers of the model's kind and `dense` in dense layers.
    pub fn mean_over_layers(&self, own: f64, dense: f64) -> f64 {
        let all = self.num_layers.max(1) as f64;
        own + (dense - own) * self.num_dense_layers() as f64 / all
    }

    /// This model with `num_layers` equal layers; if `is_shared`, they read the blocks that an earlier layer chose.
    fn with(&self, attention: Attention, num_layers: usize, is_shared: bool) -> Self {
        Self {
            attention,
            num_layers,
            dense_layers: Vec::new(),
            shared_layers: if is_shared { vec![true] } else { Vec::new() },
            ..self.clone()
        }
    }
}

/// Whether a pattern that is repeated over the layers is true for `layer`.
fn is_marked(pattern: &[bool], layer: usize) -> bool {
    !pattern.is_empty() && pattern[layer % pattern.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::MsaShape;
    use crate::model::test_shapes::tiny_dma;

    #[test]
    fn a_pattern_is_repeated_over_the_layers() {
        let mut shape = tiny_dma();
        let kind = shape.attention;
        assert_eq!(shape.by_kind(), [shape.clone()]);
        shape.num_layers = 6;
        shape.dense_layers = vec![false, true, false];
        let layers = (0..6).map(|layer| shape.of_layer(layer).attention);
        let dense = Attention::Mha;
        assert_eq!(layers.collect::<Vec<_>>(), [kind, dense, kind, kind, dense, kind]);
        let kinds = shape.by_kind();
        let found = kinds.iter().map(|part| (part.attention, part.num_layers));
        assert_eq!(found.collect::<Vec<_>>(), [(kind, 4), (dense, 2)]);
        assert_eq!(shape.mean_over_layers(1.0, 4.0), 2.0);
    }

    #[test]
    fn layers_that_share_a_choice_are_a_kind_of_their_own() {
        let mut shape = tiny_dma();
        shape.attention = Attention::Msa(MsaShape::published());
        shape.num_layers = 6;
        let all = shape.parameters();
        shape.dense_layers = vec![false, false, true];
        shape.shared_layers = vec![false, true, false];
        let kinds = shape.by_kind();
        let found = kinds.iter().map(|part| (part.num_layers, part.has_indexer()));
        assert_eq!(found.collect::<Vec<_>>(), [(2, true), (2, false), (2, false)]);
        let chooses = (0..6).map(|layer| shape.of_layer(layer).has_indexer());
        assert_eq!(chooses.collect::<Vec<_>>(), [true, false, false, true, false, false]);
        // An indexer in two layers of six.
        assert_eq!(shape.parameters().indexer, all.indexer / 3);
        assert_eq!(shape.parameters().attention, all.attention);
    }

    #[test]
    fn counts_are_those_of_the_layers_together() {
        let mut shape = tiny_dma();
        let all = |attention| {
            let mut shape = tiny_dma();
            shape.attention = attention;
            shape
        };
        shape.dense_layers = vec![false, false, true];
        let (own, dense) = (all(shape.attention), all(Attention::Mha));
        let mix = |own: u64, dense: u64| (2 * own + dense) / 3;
        let found = shape.parameters();
        assert_eq!(found.attention, mix(own.parameters().attention, dense.parameters().attention));
        assert_eq!(found.mask, mix(own.parameters().mask, 0));
        assert_eq!(found.norms, own.parameters().norms);
        let flops = |shape: &ModelShape| shape.executed_flops_per_token(40);
        let expected = (2.0 * flops(&own).attention + flops(&dense).attention) / 3.0;
        assert!((flops(&shape).attention - expected).abs() < 1e-9 * expected);
        let expected = (2.0 * flops(&own).linear + flops(&dense).linear) / 3.0;
        assert!((flops(&shape).linear - expected).abs() < 1e-9 * expected);
    }
}
