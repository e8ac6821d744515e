//! Layers without rotary position embedding (NoPE, arXiv:2305.19466), as every fourth of SmolLM3.

use super::ModelShape;

/// Which layers rotate queries and keys: a list that is repeated over the layers. With an empty list all layers do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RopeLayers(Vec<bool>);

impl RopeLayers {
    /// The pattern that repeats `rotates`.
    pub fn new(rotates: &[bool]) -> Self {
        if rotates.contains(&false) { Self(rotates.to_vec()) } else { Self::default() }
    }

    /// Whether every layer rotates.
    pub fn is_every(&self) -> bool {
        self.0.is_empty()
    }

    /// The list that is repeated; empty if every layer rotates.
    pub fn pattern(&self) -> &[bool] {
        &self.0
    }

    /// Whether layer `layer` (from 0) rotates.
    fn of(&self, layer: usize) -> bool {
        match self.0.len() {
            0 => true,
            period => self.0[layer % period],
        }
    }
}

impl ModelShape {
    /// Whether layer `layer` (from 0) rotates its queries and keys.
    pub fn has_rope(&self, layer: usize) -> bool {
        self.rope_layers.of(layer)
    }

    /// Number of layers that do not rotate their queries and keys.
    pub fn num_nope_layers(&self) -> usize {
        (0..self.num_layers).filter(|&layer| !self.has_rope(layer)).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::test_shapes::tiny_dma;

    #[test]
    fn a_pattern_is_repeated_over_the_layers() {
        let rope_layers = RopeLayers::new(&[true, true, false]);
        let shape = ModelShape { num_layers: 6, rope_layers, ..tiny_dma() };
        let found = (0..6).map(|layer| shape.has_rope(layer)).collect::<Vec<_>>();
        assert_eq!(found, [true, true, false, true, true, false]);
        assert_eq!(shape.num_nope_layers(), 2);
        // In the shape of one layer of a model, that layer has index 0 and rotates as in the model.
        assert!(!shape.of_layer(2).has_rope(0) && shape.of_layer(3).has_rope(0));
        assert_eq!(RopeLayers::new(&[true, true]), RopeLayers::default());
    }
}
