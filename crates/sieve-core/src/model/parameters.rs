//! Numbers of parameters of each part of a model.

use super::ModelShape;
use crate::kinds::{ParamSpec, Part};

/// Numbers of parameters, by part. The parts are disjoint; [`total`](Self::total) is their sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParameterCounts {
    /// Parameters of the embedding: `vocab_size * d_model`.
    pub embedding: u64,
    /// The output projection, of the embedding's size; 0 when tied to it.
    pub output: u64,
    /// Projections of queries, keys, values and attention output, all layers, with the biases of the first three.
    pub attention: u64,
    /// DMA's A, one entry per KV head, and W_dt, `kv_width * num_kv_heads`, all layers.
    pub mask: u64,
    /// NSA's gates, and its compression of keys and values, all layers.
    pub branches: u64,
    /// MSA's projection of the indexer's queries and key, `d_model * (num_kv_heads + 1) * head_dim`, and the indexer's
    /// two norms over `head_dim`, all layers.
    pub indexer: u64,
    /// Gate, up and down projections, all layers.
    pub mlp: u64,
    /// RMSNorm weights: two per layer over `d_model`; with `qk_norm` two per layer over `head_dim`; one at the end. MLA
    /// has one more over its latent, and its own `qk_norm` decides about the two of heads.
    pub norms: u64,
    /// Learned residual scales: two vectors per layer over `d_model`; 0 without them.
    pub residual_scale: u64,
}

impl ParameterCounts {
    /// All parameters. A tied embedding counts once.
    pub fn total(&self) -> u64 {
        self.embedding + self.output + self.non_embedding()
    }

    /// All but the embedding and the output projection.
    pub fn non_embedding(&self) -> u64 {
        self.attention + self.mask + self.branches + self.indexer + self.mlp + self.norms + self.residual_scale
    }

    /// The number that counts this part.
    fn of(&mut self, part: Part) -> &mut u64 {
        match part {
            Part::Embedding => &mut self.embedding,
            Part::Output => &mut self.output,
            Part::Attention => &mut self.attention,
            Part::Mask => &mut self.mask,
            Part::Branches => &mut self.branches,
            Part::Indexer => &mut self.indexer,
            Part::Mlp => &mut self.mlp,
            Part::Norms => &mut self.norms,
            Part::ResidualScale => &mut self.residual_scale,
        }
    }

    /// Each part with a name, in the order of the forward pass, empty parts left out.
    pub fn by_part(&self) -> Vec<(&'static str, u64)> {
        let parts = [
            ("embedding", self.embedding),
            ("attention", self.attention),
            ("mask", self.mask),
            ("branches", self.branches),
            ("indexer", self.indexer),
            ("mlp", self.mlp),
            ("norms", self.norms),
            ("residual scale", self.residual_scale),
            ("output", self.output),
        ];
        parts.into_iter().filter(|(_, count)| *count > 0).collect()
    }
}

impl ModelShape {
    /// Counts the model's parameters by part.
    pub fn parameters(&self) -> ParameterCounts {
        let mut counts = ParameterCounts::default();
        for spec in [self.embedding(), self.final_norm()].into_iter().chain(self.output()) {
            *counts.of(spec.part) += spec.num_elements();
        }
        for part in self.by_kind() {
            for spec in part.layer_parameters() {
                *counts.of(spec.part) += part.num_layers as u64 * spec.num_elements();
            }
        }
        counts
    }

    /// Every parameter of the model, with its full names, in the order of the forward pass. A tied output projection is
    /// the embedding and not named again.
    pub fn all_parameters(&self) -> Vec<ParamSpec> {
        let mut all = vec![self.embedding()];
        for layer_idx in 0..self.num_layers {
            let of_layer = self.of_layer(layer_idx).layer_parameters();
            all.extend(of_layer.into_iter().map(|spec| spec.in_layer(layer_idx)));
        }
        all.push(self.final_norm());
        all.extend(self.output());
        all
    }

    /// The parameters of one layer of this model's kind, in the order of the forward pass, with names inside a layer.
    pub fn layer_parameters(&self) -> Vec<ParamSpec> {
        let (d_model, d_ff) = (self.d_model, self.d_ff);
        let norm = |name: &str| ParamSpec::vectors(name, name, &[d_model], Part::Norms);
        let mut all = vec![norm("input_layernorm.weight")];
        all.extend(self.attention.as_kind().parameters(self));
        all.push(norm("post_attention_layernorm.weight"));
        let gate_and_up = [("mlp.gate_proj.weight", d_ff), ("mlp.up_proj.weight", d_ff)];
        all.push(ParamSpec::packed("mlp.gate_up_proj.weight", &gate_and_up, d_model, Part::Mlp));
        let down = "mlp.down_proj.weight";
        all.push(ParamSpec::gemm(down, down, [d_model, d_ff], Part::Mlp));
        if self.residual_scale {
            all.extend(self.residual_scales());
        }
        all
    }

    /// The two vectors that scale a layer's residual inputs, whether the model has them or not: Doge always does.
    pub fn residual_scales(&self) -> [ParamSpec; 2] {
        ["input_residual", "post_attention_residual"]
            .map(|name| ParamSpec::vectors(name, name, &[self.d_model], Part::ResidualScale))
    }

    fn embedding(&self) -> ParamSpec {
        let (ours, theirs) = ("embed_tokens.weight", "model.embed_tokens.weight");
        ParamSpec::gemm(ours, theirs, [self.vocab_size, self.d_model], Part::Embedding)
    }

    fn final_norm(&self) -> ParamSpec {
        ParamSpec::vectors("head.norm.weight", "model.norm.weight", &[self.d_model], Part::Norms)
    }

    fn output(&self) -> Option<ParamSpec> {
        let dims = [self.vocab_size, self.d_model];
        let untied = !self.tie_word_embeddings;
        untied.then(|| ParamSpec::gemm("head.lm_head.weight", "lm_head.weight", dims, Part::Output))
    }
}

#[cfg(test)]
mod tests {
    use crate::model::Attention;
    use crate::model::test_shapes::{qwen3_0_6b, tiny_dma, tiny_mla, tiny_nsa};

    #[test]
    fn qwen3_0_6b_has_its_published_counts() {
        // Its model card: 0.6B parameters, 0.44B without the embedding. Exactly, from the checkpoint's tensor shapes:
        // per layer 2 * 1024 * 2048 (q, o) + 2 * 1024 * 1024 (k, v) + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128 =
        // 15,730,944.
        let counts = qwen3_0_6b().parameters();
        assert_eq!(counts.non_embedding(), 28 * 15_730_944 + 1024);
        assert_eq!(counts.total(), 596_049_920);
        assert_eq!(counts.output, 0);
    }

    #[test]
    fn every_part_of_a_tiny_dma_model_is_counted() {
        // d_model 12, d_ff 20, 3 layers, 4 heads, 2 KV heads, head_dim 6, 50 tokens, untied, residual scales.
        let counts = tiny_dma().parameters();
        assert_eq!(counts.embedding, 600);
        assert_eq!(counts.output, 600);
        assert_eq!(counts.attention, 3 * (12 * 24 + 12 * 12 + 12 * 12 + 24 * 12));
        assert_eq!(counts.mask, 3 * (2 + 12 * 2));
        assert_eq!(counts.mlp, 3 * 3 * 12 * 20);
        assert_eq!(counts.norms, 3 * (12 + 12 + 6 + 6) + 12);
        assert_eq!(counts.residual_scale, 3 * 2 * 12);
        assert_eq!(counts.total(), counts.by_part().iter().map(|(_, count)| count).sum::<u64>());
    }

    #[test]
    fn every_part_of_a_tiny_mla_model_is_counted() {
        // d_model 12, 4 heads of 6, latent 8, rotated 2: q 12 x 4 x (6 + 2), down 12 x (8 + 2), up 8 x 4 x (6 + 6),
        // out 24 x 12.
        let counts = tiny_mla().parameters();
        assert_eq!(counts.attention, 3 * (12 * 32 + 12 * 10 + 8 * 48 + 24 * 12));
        assert_eq!((counts.mask, counts.branches), (0, 0));
        assert_eq!(counts.norms, 3 * (12 + 12 + 8 + 2 * (6 + 2)) + 12);
        let mut shape = tiny_mla();
        let Attention::Mla(mla) = &mut shape.attention else { panic!("not MLA") };
        mla.qk_norm = false;
        assert_eq!(shape.parameters().norms, 3 * (12 + 12 + 8) + 12);
    }

    #[test]
    fn every_part_of_a_tiny_nsa_model_is_counted() {
        // q and o 12 x 24 each, three pairs of k and v 12 x 12; gates 12 numbers from 12, with bias; per keys and
        // values positions 4 x 6, matrices 5 x 24 and 6 x 5.
        let mut shape = tiny_nsa();
        let counts = shape.parameters();
        assert_eq!(counts.attention, 3 * (2 * 12 * 24 + 6 * 12 * 12));
        assert_eq!(counts.branches, 3 * (12 * 12 + 12 + 2 * (24 + 120 + 30)));
        assert_eq!(counts.norms, 3 * (12 + 12 + 6 + 6) + 12);
        let Attention::Nsa(nsa) = &mut shape.attention else { panic!("not NSA") };
        nsa.shared_kv = true;
        nsa.compress_hidden_size = None;
        let counts = shape.parameters();
        assert_eq!(counts.attention, 3 * (2 * 12 * 24 + 2 * 12 * 12));
        assert_eq!(counts.branches, 3 * (12 * 12 + 12));
    }
}
