//! Numbers of parameters of each part of a model.

use super::{AttentionForm, ModelShape, NUM_NSA_BRANCHES};

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
        let layers = self.num_layers as u64;
        let d_model = self.d_model as u64;
        let embedding = self.vocab_size as u64 * d_model;
        let mut counts = ParameterCounts {
            embedding,
            output: if self.tie_word_embeddings { 0 } else { embedding },
            mlp: layers * 3 * d_model * self.d_ff as u64,
            // Two in each layer and the final one; those inside attention are added below.
            norms: layers * 2 * d_model + d_model,
            residual_scale: if self.residual_scale { layers * 2 * d_model } else { 0 },
            ..ParameterCounts::default()
        };
        for part in self.by_kind() {
            let layers = part.num_layers as u64;
            let of_layer = part.attention_parameters();
            counts.attention += layers * of_layer.attention;
            counts.mask += layers * of_layer.mask;
            counts.branches += layers * of_layer.branches;
            counts.norms += layers * of_layer.norms;
            counts.indexer += layers * of_layer.indexer;
        }
        counts
    }

    /// The parameters of one attention layer of the model's kind; `norms` counts the norms of its heads and latents.
    fn attention_parameters(&self) -> ParameterCounts {
        let d_model = self.d_model as u64;
        let (q_width, kv_width) = (self.q_width() as u64, self.kv_width() as u64);
        let (num_heads, num_kv_heads) = (self.num_heads as u64, self.num_kv_heads as u64);
        let head_dim = self.head_dim as u64;
        let biases = if self.qkv_bias { q_width + 2 * kv_width } else { 0 };
        let grouped = 2 * d_model * (q_width + kv_width) + biases;
        let counts = ParameterCounts {
            attention: grouped,
            norms: if self.qk_norm { 2 * head_dim } else { 0 },
            ..ParameterCounts::default()
        };
        match self.attention.form() {
            AttentionForm::Blocks(_) if self.has_indexer() => {
                ParameterCounts { indexer: d_model * (kv_width + head_dim) + 2 * head_dim, ..counts }
            }
            AttentionForm::Grouped { .. } | AttentionForm::Blocks(_) => counts,
            AttentionForm::Ranked(_) => ParameterCounts { mask: num_kv_heads * (1 + kv_width), ..counts },
            AttentionForm::Latent(mla) => {
                let (rank, rope) = (mla.kv_lora_rank as u64, mla.qk_rope_head_dim as u64);
                let from_x = q_width + num_heads * rope + rank + rope;
                ParameterCounts {
                    attention: d_model * (from_x + q_width) + 2 * rank * q_width,
                    norms: rank + 2 * mla.qk_norm_dim(self.head_dim) as u64,
                    ..counts
                }
            }
            AttentionForm::Branches(nsa) => {
                let more_kv = 2 * (nsa.num_kv_copies() as u64 - 1) * d_model * kv_width;
                let gates = NUM_NSA_BRANCHES as u64 * num_heads * (d_model + 1);
                let block = nsa.compress_block_size as u64 * head_dim;
                // For keys and for values: the positions, and the two matrices of the MLP.
                let compress =
                    nsa.compress_hidden_size.map_or(0, |hidden| 2 * (block + hidden as u64 * (block + head_dim)));
                ParameterCounts { attention: grouped + more_kv, branches: gates + compress, ..counts }
            }
        }
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
