//! Models whose layers differ: in their kind of attention, and in whether they choose blocks or share the choice of an
//! earlier layer.

use super::{Attention, ModelShape, RopeLayers, mean_active_keys};
use crate::kinds::{Indexer, LatentSizes};

/// What attention a layer has.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerType {
    /// Its kind with its sizes; `None` for the model's own kind, [`ModelShape::attention`].
    pub other: Option<Attention>,
    /// Whether it reads the blocks that an earlier layer of its kind chose, and chooses none itself.
    pub is_shared: bool,
}

impl LayerType {
    /// A layer of the model's own kind.
    pub const OWN: Self = Self { other: None, is_shared: false };

    /// A layer of the model's own kind that shares an earlier layer's choice.
    pub const SHARED: Self = Self { other: None, is_shared: true };

    /// A layer of another kind than the model's own.
    pub const fn of(attention: Attention) -> Self {
        Self { other: Some(attention), is_shared: false }
    }
}

/// What attention each layer has: a list that is repeated over the layers. With an empty list all layers have the
/// model's own kind.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerPattern(Vec<LayerType>);

impl LayerPattern {
    /// The pattern that repeats `types`, for a model whose own kind is `own`.
    pub fn new(own: Attention, types: impl IntoIterator<Item = LayerType>) -> Self {
        let as_own = |of: LayerType| LayerType { other: of.other.filter(|other| *other != own), ..of };
        let types: Vec<_> = types.into_iter().map(as_own).collect();
        if types.iter().all(|of| *of == LayerType::OWN) { Self::default() } else { Self(types) }
    }

    /// The list that is repeated; empty if all layers are alike.
    pub fn types(&self) -> &[LayerType] {
        &self.0
    }

    /// What layer `layer` (from 0) has.
    fn of(&self, layer: usize) -> LayerType {
        match self.0.len() {
            0 => LayerType::OWN,
            period => self.0[layer % period],
        }
    }
}

impl ModelShape {
    /// The kind of layer `layer` (from 0), with its sizes.
    pub fn attention_of(&self, layer: usize) -> Attention {
        self.layers.of(layer).other.unwrap_or(self.attention)
    }

    /// Whether layer `layer` (from 0) reads the blocks that an earlier layer chose, and chooses none itself.
    pub fn is_shared_layer(&self, layer: usize) -> bool {
        self.layers.of(layer).is_shared
    }

    /// Number of layers that read the blocks that an earlier layer chose.
    pub fn num_shared_layers(&self) -> usize {
        self.num_layers_with(|layer| self.is_shared_layer(layer))
    }

    /// The indexer of the first layer; `None` without one, also where the layer reads an earlier layer's choice.
    pub fn indexer(&self) -> Option<Indexer> {
        self.attention_of(0).as_kind().indexer().filter(|_| !self.is_shared_layer(0))
    }

    /// The latent from which the first layer makes keys and values; `None` for grouped queries.
    pub fn latent(&self) -> Option<LatentSizes> {
        self.attention_of(0).as_kind().latent(self.head_dim)
    }

    /// Width of a query or key in the first layer: that of a value and, where keys are made from a latent, of the
    /// rotated part besides.
    pub fn key_width(&self) -> usize {
        self.head_dim + self.latent().map_or(0, |latent| latent.rope_width)
    }

    /// Whether layer `layer` (from 0) has dense attention.
    pub fn has_dense_attention(&self, layer: usize) -> bool {
        self.attention_of(layer) == Attention::DENSE
    }

    /// Number of layers with [dense attention](Self::has_dense_attention).
    pub fn num_layers_of_dense_attention(&self) -> usize {
        self.num_layers_with(|layer| self.has_dense_attention(layer))
    }

    fn num_layers_with(&self, has: impl Fn(usize) -> bool) -> usize {
        (0..self.num_layers).filter(|&layer| has(layer)).count()
    }

    /// The model with the attention of layer `layer` (from 0) in every layer.
    pub fn of_layer(&self, layer: usize) -> Self {
        let rope_layers = RopeLayers::new(&[self.has_rope(layer)]);
        Self { rope_layers, ..self.with(self.attention_of(layer), self.num_layers, self.is_shared_layer(layer)) }
    }

    /// The model with dense attention in every layer.
    pub fn dense(&self) -> Self {
        let is_shared = false;
        self.with(Attention::DENSE, self.num_layers, is_shared)
    }

    /// The kinds of the layers, each with the number of its layers: the model's own first, others as the pattern names
    /// them.
    pub fn attentions(&self) -> Vec<(Attention, usize)> {
        let mut all = vec![self.attention];
        for other in self.layers.types().iter().filter_map(|of| of.other) {
            if !all.contains(&other) {
                all.push(other);
            }
        }
        let count = |attention| self.num_layers_with(|layer| self.attention_of(layer) == attention);
        let counted = all.into_iter().map(|attention| (attention, count(attention)));
        counted.filter(|(attention, count)| *count > 0 || *attention == self.attention).collect()
    }

    /// The layers grouped by attention, each group as the shape of a model with only these layers. Each of the
    /// [kinds](Self::attentions) has a group of layers that choose for themselves, and one of layers that share an
    /// earlier layer's choice of blocks; a group without layers is left out.
    pub fn by_kind(&self) -> Vec<Self> {
        let mut groups = Vec::new();
        for (attention, all) in self.attentions() {
            let shares = |layer| self.is_shared_layer(layer) && self.attention_of(layer) == attention;
            let num_shared = self.num_layers_with(shares);
            for (num_layers, is_shared) in [(all - num_shared, false), (num_shared, true)] {
                if num_layers > 0 {
                    groups.push(self.with(attention, num_layers, is_shared));
                }
            }
        }
        if groups.is_empty() {
            groups.push(self.clone());
        }
        groups
    }

    /// Whether all layers have the same attention.
    pub fn is_uniform(&self) -> bool {
        self.by_kind().len() == 1
    }

    /// Mean number of keys a query sees in one document of `seq_len` tokens, over all layers.
    pub fn mean_active_keys(&self, seq_len: usize) -> f64 {
        self.mean_over_layers(|attention| mean_active_keys(attention, seq_len))
    }

    /// Mean over all layers of a number that a layer's kind gives.
    pub fn mean_over_layers(&self, number: impl Fn(Attention) -> f64) -> f64 {
        let own = number(self.attention);
        let num_layers = self.num_layers.max(1) as f64;
        let others = self.attentions().into_iter().skip(1);
        others.fold(own, |sum, (other, count)| sum + (number(other) - own) * count as f64 / num_layers)
    }

    /// This model with `num_layers` equal layers; if `is_shared`, they read the blocks that an earlier layer chose.
    fn with(&self, attention: Attention, num_layers: usize, is_shared: bool) -> Self {
        let layers = LayerPattern::new(attention, [LayerType { other: None, is_shared }]);
        Self { attention, num_layers, layers, ..self.clone() }
    }
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
        let dense = Attention::DENSE;
        shape.layers = LayerPattern::new(kind, [LayerType::OWN, LayerType::of(dense), LayerType::OWN]);
        let layers = (0..6).map(|layer| shape.of_layer(layer).attention);
        assert_eq!(layers.collect::<Vec<_>>(), [kind, dense, kind, kind, dense, kind]);
        let kinds = shape.by_kind();
        let found = kinds.iter().map(|part| (part.attention, part.num_layers));
        assert_eq!(found.collect::<Vec<_>>(), [(kind, 4), (dense, 2)]);
        assert_eq!(shape.mean_over_layers(|of| if of == dense { 4.0 } else { 1.0 }), 2.0);
    }

    #[test]
    fn layers_that_share_a_choice_are_a_kind_of_their_own() {
        let mut shape = tiny_dma();
        shape.attention = Attention::Msa(MsaShape::published());
        shape.num_layers = 6;
        let all = shape.parameters();
        let types = [LayerType::OWN, LayerType::SHARED, LayerType::of(Attention::DENSE)];
        shape.layers = LayerPattern::new(shape.attention, types);
        let kinds = shape.by_kind();
        let found = kinds.iter().map(|part| (part.num_layers, part.indexer().is_some()));
        assert_eq!(found.collect::<Vec<_>>(), [(2, true), (2, false), (2, false)]);
        let chooses = (0..6).map(|layer| shape.of_layer(layer).indexer().is_some());
        assert_eq!(chooses.collect::<Vec<_>>(), [true, false, false, true, false, false]);
        // An indexer in two layers of six.
        assert_eq!(shape.parameters().indexer, all.indexer / 3);
        assert_eq!(shape.parameters().attention, all.attention);
    }

    #[test]
    fn layers_of_any_kinds_can_be_mixed() {
        let msa = Attention::Msa(MsaShape::published());
        let (window, shares) = (Attention::swa(5), LayerType { is_shared: true, ..LayerType::of(msa) });
        let mut shape = ModelShape { num_layers: 10, ..tiny_dma() };
        let own = shape.attention;
        let types = [LayerType::of(window), LayerType::of(msa), shares, LayerType::of(own), LayerType::of(window)];
        shape.layers = LayerPattern::new(own, types);
        assert_eq!(shape.attentions(), [(own, 2), (window, 4), (msa, 4)]);
        let found = shape.by_kind();
        let found = found.iter().map(|part| (part.attention, part.num_layers, part.indexer().is_some()));
        assert_eq!(found.collect::<Vec<_>>(), [(own, 2, false), (window, 4, false), (msa, 2, true), (msa, 2, false)]);
        // `tiny_dma` has three layers.
        let a_layer = |attention| ModelShape { attention, ..tiny_dma() }.executed_flops_per_token(40).attention / 3.0;
        let expected = 2.0 * a_layer(own) + 4.0 * a_layer(window) + 4.0 * a_layer(msa);
        assert!((shape.executed_flops_per_token(40).attention - expected).abs() < 1e-9 * expected);
        let counted = shape.parameters().total();
        assert_eq!(counted, shape.all_parameters().iter().map(|spec| spec.num_elements()).sum::<u64>());
        // A layer type that names the model's own kind is the same as `OWN`.
        assert_eq!(LayerPattern::new(own, [LayerType::OWN, LayerType::of(own)]), LayerPattern::default());
    }

    #[test]
    fn counts_of_a_mixed_model_are_means_over_its_layers() {
        let mut shape = tiny_dma();
        let all = |attention| {
            let mut shape = tiny_dma();
            shape.attention = attention;
            shape
        };
        let (own, dense) = (all(shape.attention), all(Attention::DENSE));
        shape.layers =
            LayerPattern::new(shape.attention, [LayerType::OWN, LayerType::OWN, LayerType::of(dense.attention)]);
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
