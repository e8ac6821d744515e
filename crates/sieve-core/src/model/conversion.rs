//! How a model's layers of one kind become layers of another: which tensors stay, which are dropped, which are new.

use super::ModelShape;
use crate::kinds::ParamSpec;
use std::collections::BTreeMap;

/// What becomes of each tensor of a model, when its weights begin a model with other attention in some layers.
///
/// A tensor with the same name and sizes is kept, any other is dropped. A new tensor has the value that it has in a new
/// model. So the model computes the same where both kinds read all keys: dense attention, a window as long as the row,
/// chosen blocks that hold it, DMA with `a_init = 0`, `recency = "none"` and a window as long as the row. Sinks that
/// are new or dropped change it: only a logit of minus infinity would not, and it has no gradient.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversion {
    /// Layers whose kind changes: the names of both kinds, and the indices of the layers.
    changes: BTreeMap<[&'static str; 2], Vec<usize>>,
    /// Number of layers that stop rotating queries and keys, and of those that begin to.
    rope: [usize; 2],
    /// Tensors that only the former model has.
    pub dropped: Vec<ParamSpec>,
    /// Tensors that only the new model has.
    pub added: Vec<ParamSpec>,
    /// Attention tensors that keep their values where a layer changes its kind, by their names inside the layer.
    kept: Vec<String>,
}

/// Why a model cannot begin with another model's weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConversionGap {
    /// Kinds of attention between which no tensor can be carried over: a sentence that names them and the reason.
    Kinds(String),
    /// The models differ in a size, or in a part that is not the attention's.
    Size(String),
}

impl Conversion {
    /// How the weights of a model of `from` begin a model of `to`.
    ///
    /// # Errors
    /// Grouped-query attention and latent attention (MLA) with each other; sizes that differ.
    pub fn of(from: &ModelShape, to: &ModelShape) -> Result<Self, ConversionGap> {
        // No model mixes latent attention with other kinds, and its tensors have sizes of their own.
        let [there, here] = [from, to].map(|shape| shape.attention);
        if let Some(why) = there.kind().parted_from(here.kind()) {
            let kinds = format!("attention.kind is {} there, {} here", there.kind().name(), here.kind().name());
            return Err(ConversionGap::Kinds(format!("{kinds}; {why}")));
        }
        if let Some(problem) = other_size(from, to) {
            return Err(ConversionGap::Size(problem));
        }
        let mut conversion = Self::default();
        for layer_idx in 0..from.num_layers {
            let [before, after] = [from, to].map(|shape| shape.of_layer(layer_idx));
            conversion.add_layer(layer_idx, &before, &after)?;
        }
        Ok(conversion)
    }

    /// Adds what becomes of the tensors of one layer, which has the shape `from` before and `to` after. A tensor that
    /// is kept is listed only if it is attention's and the layer's kind changes.
    fn add_layer(&mut self, layer_idx: usize, from: &ModelShape, to: &ModelShape) -> Result<(), ConversionGap> {
        let kinds = [from, to].map(|shape| shape.attention.kind().name());
        let [before, after] = [from, to].map(ModelShape::layer_parameters);
        let find = |all: &[ParamSpec], name: &str| all.iter().find(|spec| spec.ours == name).cloned();
        for spec in &before {
            match find(&after, &spec.ours) {
                None => self.dropped.push(spec.clone().in_layer(layer_idx)),
                Some(now) if now.dims != spec.dims => {
                    let name = spec.clone().in_layer(layer_idx).ours;
                    let (there, here) = (&spec.dims, &now.dims);
                    return Err(ConversionGap::Size(format!("{name} is {there:?} there and {here:?} here")));
                }
                Some(_) if kinds[0] != kinds[1] && spec.ours.starts_with(ATTENTION) => {
                    if !self.kept.contains(&spec.ours) {
                        self.kept.push(spec.ours.clone());
                    }
                }
                Some(_) => {}
            }
        }
        let added = after.into_iter().filter(|spec| find(&before, &spec.ours).is_none());
        self.added.extend(added.map(|spec| spec.in_layer(layer_idx)));
        match [from, to].map(|shape| shape.has_rope(0)) {
            [true, false] => self.rope[0] += 1,
            [false, true] => self.rope[1] += 1,
            _ => {}
        }
        if kinds[0] != kinds[1] {
            self.changes.entry(kinds).or_default().push(layer_idx);
        }
        Ok(())
    }

    /// Whether any layer changes its kind, its positions or its tensors.
    pub fn changes_layers(&self) -> bool {
        !self.changes.is_empty() || self.rope != [0; 2] || !self.dropped.is_empty() || !self.added.is_empty()
    }

    /// Whether the new model has the tensor `name` (as in a checkpoint) and the former one does not.
    pub fn adds(&self, name: &str) -> bool {
        self.added.iter().any(|spec| spec.ours == name)
    }

    /// What is done, on one line; `None` if nothing changes.
    pub fn words(&self) -> Option<String> {
        if !self.changes_layers() {
            return None;
        }
        let changes = self.changes.iter().map(|([before, after], layers)| {
            let noun = if layers.len() == 1 { "layer becomes" } else { "layers become" };
            format!("{} {before} {noun} {after}", layers.len())
        });
        let mut parts = changes.collect::<Vec<_>>();
        for (count, what) in self.rope.into_iter().zip(["without", "with"]) {
            match count {
                0 => {}
                1 => parts.push(format!("1 layer goes on {what} RoPE")),
                _ => parts.push(format!("{count} layers go on {what} RoPE")),
            }
        }
        if !self.kept.is_empty() {
            parts.push(format!("kept: {}", self.kept.join(", ")));
        }
        for (what, specs) in [("dropped", &self.dropped), ("new", &self.added)] {
            if !specs.is_empty() {
                parts.push(format!("{what}: {}", names_of(specs)));
            }
        }
        Some(parts.join("; "))
    }
}

/// The beginning of the names of a layer's attention tensors.
const ATTENTION: &str = "self_attn.";

/// The names of tensors inside a layer, each once, with the number of layers that have it.
pub fn names_of(specs: &[ParamSpec]) -> String {
    let mut counts = Vec::<(&str, usize)>::new();
    for spec in specs {
        // `layers.N.` begins the full name of a layer's tensor.
        let name = spec.ours.splitn(3, '.').nth(2).unwrap_or(&spec.ours);
        match counts.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => *count += 1,
            None => counts.push((name, 1)),
        }
    }
    let words = counts.into_iter().map(|(name, count)| match count {
        1 => format!("{name} in 1 layer"),
        count => format!("{name} in {count} layers"),
    });
    words.collect::<Vec<_>>().join(", ")
}

/// The first size, then the first optional part of `[model]` that differs, with both values; `None` if all are equal.
fn other_size(from: &ModelShape, to: &ModelShape) -> Option<String> {
    let parts = |shape: &ModelShape| {
        [
            ("tie_word_embeddings", shape.tie_word_embeddings),
            ("residual_scale", shape.residual_scale),
            ("qk_norm", shape.qk_norm),
            ("qkv_bias", shape.qkv_bias),
        ]
    };
    let size = from.sizes().into_iter().zip(to.sizes()).find(|(there, here)| there != here);
    let size = size.map(|((key, there), (_, here))| format!("{key} is {there} there and {here} here"));
    size.or_else(|| {
        let part = parts(from).into_iter().zip(parts(to)).find(|(there, here)| there != here);
        part.map(|((key, there), (_, here))| format!("model.{key} is {there} there and {here} here"))
    })
}

impl std::fmt::Display for ConversionGap {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Kinds(problem) | Self::Size(problem) => out.write_str(problem),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::AttentionKind;
    use crate::model::test_shapes::{tiny_dma, tiny_nsa};
    use crate::model::{Attention, LayerPattern, LayerType, RopeLayers};

    fn of_kind(kind: AttentionKind) -> ModelShape {
        let attention = match kind {
            // The example of NSA lacks the tensors of an MLP that compresses blocks.
            AttentionKind::Nsa => tiny_nsa().attention,
            kind => kind.example(),
        };
        ModelShape { attention, residual_scale: false, ..tiny_dma() }
    }

    /// Every ordered pair of kinds: the tensors that are dropped and new are the two kinds' own, or the pair is
    /// refused.
    #[test]
    fn every_kind_becomes_every_other_or_is_refused_with_a_reason() {
        use AttentionKind::{Dma, Mla, Msa, Nsa};
        // The tensors that a kind has besides grouped-query attention's, which all kinds but MLA have.
        let own = |kind| match kind {
            Dma => vec!["a", "dt_proj.weight"],
            Msa => vec!["indexer.proj.weight", "indexer.q_norm.weight", "indexer.k_norm.weight"],
            Nsa => {
                let mut all = vec!["compress_kv_proj.weight", "select_kv_proj.weight"];
                all.extend(["k_compress.positions", "k_compress.up_proj.weight", "k_compress.down_proj.weight"]);
                all.extend(["v_compress.positions", "v_compress.up_proj.weight", "v_compress.down_proj.weight"]);
                all.extend(["gate_proj.weight", "gate_bias"]);
                all
            }
            _ => vec![],
        };
        let own = |kind| own(kind).into_iter().map(str::to_owned).collect::<Vec<_>>();
        let names = |specs: &[ParamSpec]| {
            let first = specs.iter().filter_map(|spec| spec.ours.strip_prefix("layers.0.self_attn."));
            first.map(str::to_owned).collect::<Vec<_>>()
        };
        let mut refused = 0;
        for from in AttentionKind::ALL {
            for to in AttentionKind::ALL.into_iter().filter(|to| *to != from) {
                let pair = format!("{} to {}", from.name(), to.name());
                match Conversion::of(&of_kind(from), &of_kind(to)) {
                    Err(ConversionGap::Kinds(problem)) => {
                        assert!(from == Mla || to == Mla, "{pair}: {problem}");
                        assert!(problem.contains("keys and values from a latent"), "{problem}");
                        refused += 1;
                    }
                    Err(gap) => panic!("{pair}: {gap}"),
                    Ok(made) => {
                        assert!(from != Mla && to != Mla, "{pair}");
                        assert_eq!((names(&made.dropped), names(&made.added)), (own(from), own(to)), "{pair}");
                        let words = made.words().expect("another kind");
                        let begin = format!("3 {} layers become {}; kept: self_attn.qkv.", from.name(), to.name());
                        assert!(words.starts_with(&begin), "{words}");
                    }
                }
            }
        }
        // MLA to each of the eight other kinds, and each of these to MLA.
        assert_eq!(refused, 16);
    }

    #[test]
    fn layers_change_one_by_one() {
        let dense = of_kind(AttentionKind::Mha);
        let msa = AttentionKind::Msa.example();
        let types = [LayerType::OWN, LayerType::of(msa), LayerType::of(Attention::swa(4))];
        let mixed = ModelShape { layers: LayerPattern::new(Attention::DENSE, types), ..dense.clone() };
        let made = Conversion::of(&dense, &mixed).expect("the same sizes");
        let words = made.words().expect("it changes");
        assert!(words.starts_with("1 mha layer becomes msa; 1 mha layer becomes swa; kept: self_attn.qkv."), "{words}");
        assert!(words.ends_with("self_attn.indexer.k_norm.weight in 1 layer"), "{words}");
        assert!(made.adds("layers.1.self_attn.indexer.proj.weight"));
        assert_eq!(Conversion::of(&mixed, &mixed).map(|made| made.words()), Ok(None));
        // A layer that shares an earlier choice has no indexer.
        let all = ModelShape { attention: msa, ..dense.clone() };
        let shared = ModelShape { layers: LayerPattern::new(msa, [LayerType::OWN, LayerType::SHARED]), ..all.clone() };
        let made = Conversion::of(&all, &shared).expect("the same sizes");
        assert_eq!(made.dropped.len(), 3);
        assert!(made.words().expect("it drops").starts_with("dropped: self_attn.indexer.proj.weight in 1 layer"));
    }

    #[test]
    fn layers_that_begin_or_stop_rotating_are_counted() {
        let all = of_kind(AttentionKind::Mha);
        let two = RopeLayers::new(&[true, false, false]);
        let some = ModelShape { rope_layers: two, ..all.clone() };
        let words = |from, to| Conversion::of(from, to).expect("the same sizes").words();
        assert_eq!(words(&all, &some).as_deref(), Some("2 layers go on without RoPE"));
        assert_eq!(words(&some, &all).as_deref(), Some("2 layers go on with RoPE"));
        assert_eq!(words(&some, &some), None);
    }

    #[test]
    fn sinks_are_kept_added_and_dropped_by_name() {
        let dense = of_kind(AttentionKind::Mha);
        let with_sinks = ModelShape { attention_sinks: true, ..dense.clone() };
        let window = ModelShape { attention: Attention::swa(4), ..with_sinks.clone() };
        let words = |from: &ModelShape, to: &ModelShape| {
            let made = Conversion::of(from, to).expect("the same sizes");
            made.words().expect("it changes")
        };
        assert_eq!(words(&dense, &with_sinks), "new: self_attn.sinks in 3 layers");
        assert_eq!(words(&with_sinks, &of_kind(AttentionKind::Mha)), "dropped: self_attn.sinks in 3 layers");
        let kept = words(&with_sinks, &window);
        assert!(kept.contains("self_attn.sinks") && !kept.contains("new") && !kept.contains("dropped"), "{kept}");
        let blocks = words(&window, &of_kind(AttentionKind::InfllmV2));
        assert!(blocks.ends_with("dropped: self_attn.sinks in 3 layers"), "{blocks}");
    }

    #[test]
    fn sizes_that_differ_are_named() {
        let dense = of_kind(AttentionKind::Mha);
        let refused = |to: ModelShape, word: &str| {
            let gap = Conversion::of(&dense, &to).expect_err(word);
            assert!(matches!(&gap, ConversionGap::Size(problem) if problem.contains(word)), "{gap}");
        };
        refused(ModelShape { d_ff: 24, ..dense.clone() }, "intermediate_size is 20 there and 24 here");
        refused(ModelShape { residual_scale: true, ..dense.clone() }, "model.residual_scale is false there");
        let nsa = of_kind(AttentionKind::Nsa);
        let Attention::Nsa(mut other) = nsa.attention else { panic!("not NSA") };
        other.compress_block_size *= 2;
        let to = ModelShape { attention: Attention::Nsa(other), ..nsa.clone() };
        let gap = Conversion::of(&nsa, &to).expect_err("another block");
        assert!(gap.to_string().contains("layers.0.self_attn.k_compress.positions is"), "{gap}");
    }
}
