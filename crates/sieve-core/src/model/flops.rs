//! Floating-point operations per token.
//!
//! A multiply-add counts as two. GEMMs are counted; norms, softmax, activations, DMA's selection (comparisons) and the
//! optimizer are left out, as is usual for MFU (arXiv:2204.02311, appendix B).
//!
//! - Forward, linear: `2 * (weights of q, k, v, o, gate, up, down, output, and of the attention kind)`. The embedding
//!   is a look-up, and the output projection a GEMM whether tied or not. NSA's compression runs once every
//!   `compress_stride` tokens.
//! - Forward, attention, per layer: `2 * num_heads * (width of a query + width of a value) * keys`, for `Q K^T` and
//!   `P V`, where `keys` is the mean number of keys a query sees, summed over NSA's three branches.
//! - MSA's indexer: forward `2 * num_kv_heads * head_dim` for each key up to the query, whether seen or not; backward
//!   `4 * num_kv_heads * head_dim` for each key that is seen, also in layers that read its choice and have its loss.
//!   QSA has one score per block instead of per key.
//! - Tokens without a label need no output projection; the counts here are for labelled tokens.
//! - Backward: twice the forward (two GEMMs for each one). Scores that a backward kernel recomputes are not counted,
//!   because MFU counts the operations that the mathematics needs.
//!
//! torchtitan counts `seq_len` keys for causal attention; we count the mean over positions, `(seq_len + 1) / 2`, so our
//! MFU is lower.

use super::{Attention, ModelShape};
use crate::recipe::TrainingSection;

/// Forward floating-point operations of one token, mean over the positions of a sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlopsPerToken {
    /// FLOPs of the GEMMs with weights.
    pub linear: f64,
    /// `Q K^T` and `P V` over the keys that are seen.
    pub attention: f64,
    /// Scores of MSA's indexers, over all keys up to the query.
    pub index_scores: f64,
    /// In the backward pass: both GEMMs for the gradient of these scores, over the keys that are seen.
    pub index_gradient: f64,
}

impl FlopsPerToken {
    /// FLOPs of a token's forward pass.
    pub fn forward(&self) -> f64 {
        self.linear + self.attention + self.index_scores
    }

    /// FLOPs of the backward pass: twice the forward pass's FLOPs without the indexers' scores, plus the gradient of
    /// the indexers' loss.
    pub fn backward(&self) -> f64 {
        2.0 * (self.linear + self.attention) + self.index_gradient
    }

    /// FLOPs of a token in training, forward and backward.
    pub fn training(&self) -> f64 {
        self.forward() + self.backward()
    }

    /// FLOPs of a token in a run's steps: of training, or where indexers alone are trained of a forward pass and of
    /// their gradients.
    pub fn in_steps(&self, training: &TrainingSection) -> f64 {
        if training.trains_indexers_alone() { self.forward() + self.index_gradient } else { self.training() }
    }
}

impl ModelShape {
    /// FLOPs per token. A query sees `mean_active_keys` keys on average (measured, or from [`mean_active_keys`] and
    /// [`mean_active_keys_of_documents`]). An indexer scores all `mean_keys` keys of the document up to the query.
    pub fn flops_per_token(&self, mean_active_keys: f64, mean_keys: f64) -> FlopsPerToken {
        let d_model = self.d_model as f64;
        let num_layers = self.num_layers as f64;
        let mlp = 3.0 * d_model * self.d_ff as f64;
        // Multiply-adds of a token: with weights, per key that it sees, and per key that indexers score.
        let mut with_weights = num_layers * mlp + d_model * self.vocab_size as f64;
        let (mut per_key, mut per_scored_key) = (0.0, 0.0);
        // Multiply-adds of indexers' scores of the keys that layers with their loss see.
        let mut learned_and_seen = 0.0;
        let seen = self.keys_seen_by_kind(mean_keys);
        for part in self.by_kind() {
            let (layers, layer) = (part.num_layers as f64, part.attention.as_kind().flops(&part));
            with_weights += layers * layer.weights;
            per_key += layers * layer.per_pair;
            per_scored_key += layers * layer.per_scored_key;
            learned_and_seen += layers * layer.per_learned_key * seen(part.attention) * mean_active_keys;
        }
        FlopsPerToken {
            linear: 2.0 * with_weights,
            attention: per_key * 2.0 * mean_active_keys,
            index_scores: per_scored_key * 2.0 * mean_keys,
            index_gradient: 4.0 * learned_and_seen,
        }
    }

    /// How many keys a query sees in layers of a kind, relative to the mean over all layers, in one document whose
    /// queries have `mean_keys` keys up to them.
    fn keys_seen_by_kind(&self, mean_keys: f64) -> impl Fn(Attention) -> f64 {
        // The mean of 1, 2, … up to `seq_len`.
        let seq_len = (2.0 * mean_keys - 1.0).round().max(1.0) as usize;
        let mean = self.mean_active_keys(seq_len);
        move |attention| mean_active_keys(attention, seq_len) / mean
    }

    /// Training FLOPs that a token without a label saves: the three GEMMs of its output projection, one forward and two
    /// backward.
    pub fn unlabelled_training_flops(&self) -> f64 {
        3.0 * 2.0 * self.d_model as f64 * self.vocab_size as f64
    }

    /// FLOPs executed per token in one document of `seq_len` tokens, with attention over the pairs that the mask keeps.
    pub fn executed_flops_per_token(&self, seq_len: usize) -> FlopsPerToken {
        let mean_keys = mean_active_keys(Attention::DENSE, seq_len);
        self.flops_per_token(self.mean_active_keys(seq_len), mean_keys)
    }

    /// FLOPs per token of the dense equivalent: the same weights, attention over all causal pairs, no indexer's scores.
    pub fn dense_flops_per_token(&self, seq_len: usize) -> FlopsPerToken {
        let dense = self.flops_per_token(mean_active_keys(Attention::DENSE, seq_len), 0.0);
        FlopsPerToken { index_gradient: 0.0, ..dense }
    }
}

/// Mean number of keys a query sees in one document of `seq_len` tokens; 0 for an empty one.
///
/// Query i (from 0) sees exactly `min(i + 1, w)` keys, both in a sliding window of w and in DMA that keeps w keys;
/// without a window, `w = n`, the number of tokens. The mean is `(w / n)(n - (w - 1) / 2)` with `w = min(w, n)`. NSA's
/// three branches are added; where blocks are chosen, a pooled key counts half
/// ([`BlockChoice::pairs`](crate::BlockChoice::pairs)). The scores of MSA's indexer are counted separately
/// ([`FlopsPerToken`]).
pub fn mean_active_keys(attention: Attention, seq_len: usize) -> f64 {
    mean_active_keys_of_documents(attention, [seq_len])
}

/// Mean number of keys a query sees over packed documents of these lengths; 0 without tokens.
pub fn mean_active_keys_of_documents(attention: Attention, lengths: impl IntoIterator<Item = usize>) -> f64 {
    let (mut pairs, mut tokens) = (0.0, 0);
    for length in lengths {
        pairs += attention.as_kind().pairs(length);
        tokens += length;
    }
    if tokens == 0 { 0.0 } else { pairs / tokens as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::test_shapes::{qwen3_0_6b, tiny_dma, tiny_mla, tiny_nsa};
    use crate::model::{DmaShape, LayerPattern, LayerType, MsaShape};

    #[test]
    fn an_indexer_scores_every_key_and_learns_from_those_that_are_read() {
        let mut shape = tiny_dma();
        shape.attention = Attention::Msa(crate::model::MsaShape::published());
        let (layers, width) = (shape.num_layers as f64, shape.kv_width() as f64);
        let flops = shape.flops_per_token(8.0, 20.0);
        assert_eq!(flops.index_scores, layers * 2.0 * width * 20.0);
        assert_eq!(flops.index_gradient, layers * 4.0 * width * 8.0);
        let attention = 3.0 * (flops.linear + flops.attention);
        assert_eq!(flops.training(), attention + flops.index_scores + flops.index_gradient);
        let dense = shape.dense_flops_per_token(40);
        assert_eq!([dense.index_scores, dense.index_gradient], [0.0; 2]);
        shape.attention = Attention::Mha;
        assert_eq!(shape.flops_per_token(8.0, 20.0).index_scores, 0.0);
    }

    fn dma(keep_window_size: usize) -> Attention {
        Attention::Dma(DmaShape::published(keep_window_size))
    }

    #[test]
    fn mean_active_keys_equals_the_count_of_pairs() {
        for seq_len in 1..40usize {
            for window in 1..45usize {
                let pairs = (0..seq_len).map(|query| (query + 1).min(window)).sum::<usize>();
                let expected = pairs as f64 / seq_len as f64;
                for attention in [dma(window), Attention::swa(window)] {
                    let mean = mean_active_keys(attention, seq_len);
                    assert!((mean - expected).abs() < 1e-12, "n {seq_len} w {window}: {mean} is not {expected}");
                }
            }
            assert_eq!(mean_active_keys(Attention::Mha, seq_len), (seq_len as f64 + 1.0) / 2.0);
        }
    }

    #[test]
    fn documents_are_weighted_by_their_tokens() {
        // Lengths 3, 0, 5 with w = 2: pairs 1 + 2 + 2 and 1 + 2 + 2 + 2 + 2, over 8 tokens.
        assert_eq!(mean_active_keys_of_documents(dma(2), [3, 0, 5]), 14.0 / 8.0);
        assert_eq!(mean_active_keys_of_documents(dma(2), []), 0.0);
        assert_eq!(mean_active_keys(Attention::Mha, 0), 0.0);
    }

    #[test]
    fn flops_of_qwen3_0_6b_equal_the_numbers_worked_out_by_hand() {
        // Weights in products: per layer 6,291,456 (q, k, v, o) + 9,437,184 (gate, up, down), 28 layers, and
        // 151,936 * 1024 for the output: 595,984,384, each two operations. Attention: 28 * 4 * 2048 * 1024.5.
        let flops = qwen3_0_6b().executed_flops_per_token(2048);
        assert_eq!(flops.linear, 2.0 * (28.0 * 15_728_640.0 + 155_582_464.0));
        assert_eq!(flops.attention, 234_995_712.0);
        assert_eq!(flops.backward(), 2.0 * flops.forward());
        assert_eq!(flops.training(), 3.0 * (1_191_968_768.0 + 234_995_712.0));
        let spared = qwen3_0_6b().unlabelled_training_flops();
        assert_eq!(spared, 3.0 * 2.0 * 155_582_464.0);
    }

    #[test]
    fn sparse_attention_changes_the_executed_count_alone() {
        // w = 4 at 10 tokens: 1 + 2 + 3 + 7 * 4 = 34 pairs; dense 55. 3 layers, 4 heads of 6.
        let shape = tiny_dma();
        let (executed, dense) = (shape.executed_flops_per_token(10), shape.dense_flops_per_token(10));
        assert_eq!(executed.linear, dense.linear);
        assert_eq!(executed.linear, 2.0 * (3.0 * (864.0 + 720.0 + 24.0) + 600.0));
        assert!((executed.attention - 3.0 * 4.0 * 24.0 * 3.4).abs() < 1e-9);
        assert!((dense.attention - 3.0 * 4.0 * 24.0 * 5.5).abs() < 1e-9);
    }

    #[test]
    fn mla_multiplies_its_latent_and_pays_for_wider_keys() {
        // Weights: 12 x 32 (q) + 12 x 10 (down) + 8 x 48 (up) + 24 x 12 (out) + 720 (MLP). A pair: 4 heads of 8 and of
        // 6.
        let flops = tiny_mla().executed_flops_per_token(9);
        assert_eq!(flops.linear, 2.0 * (3.0 * (384.0 + 120.0 + 384.0 + 288.0 + 720.0) + 600.0));
        assert_eq!(flops.attention, 3.0 * 2.0 * 4.0 * (8.0 + 6.0) * 5.0);
    }

    #[test]
    fn nsa_adds_its_branches_gates_and_compression() {
        // Weights: q, o 576; k, v three times 864; gates 144; compression of 2 KV heads, keys and values, every 2
        // tokens: (5 x 24 + 5 x 6) x 2 x 2 / 2 = 300; MLP 720.
        let flops = tiny_nsa().executed_flops_per_token(20);
        assert_eq!(flops.linear, 2.0 * (3.0 * (576.0 + 864.0 + 144.0 + 300.0 + 720.0) + 600.0));
        // Compressed: 9 blocks, seen by 17, 15, … 1 queries: 81. Window of 7: 21 + 7 x 14. Selected: all of the first
        // 18 (171), then 12 whole keys and 1 and 2 own ones.
        let pairs = 81.0 + (21.0 + 98.0) + (171.0 + 13.0 + 14.0);
        let expected = 3.0 * 4.0 * 24.0 * pairs / 20.0;
        assert!((flops.attention - expected).abs() < 1e-9, "{flops:?}");
    }

    #[test]
    fn an_indexers_gradient_counts_the_keys_of_its_own_layers() {
        let blocks = MsaShape { select_block_size: 4, num_selected_blocks: 2, ..MsaShape::published() };
        let msa = Attention::Msa(blocks);
        let all = ModelShape { attention: msa, num_layers: 4, ..tiny_dma() };
        let types = [Attention::DENSE, Attention::swa(3), Attention::DENSE].map(LayerType::of);
        let types = [LayerType::OWN].into_iter().chain(types);
        let mixed = ModelShape { layers: LayerPattern::new(msa, types), ..all.clone() };
        // Every second layer reads the choice of the one before it, with the indexer's loss or without.
        let shared = |index_loss_of_shared| {
            let attention = Attention::Msa(MsaShape { index_loss_of_shared, ..blocks });
            let layers = LayerPattern::new(attention, [LayerType::OWN, LayerType::SHARED]);
            ModelShape { attention, layers, ..all.clone() }.executed_flops_per_token(40)
        };
        let [with_loss, without] = [true, false].map(shared);
        let [all, mixed] = [all, mixed].map(|shape| shape.executed_flops_per_token(40));
        assert_eq!([with_loss.index_gradient, 2.0 * without.index_gradient], [all.index_gradient; 2]);
        assert_eq!([2.0 * with_loss.index_scores, 2.0 * without.index_scores], [all.index_scores; 2]);
        // One layer of four has an indexer; its gradient does not depend on what the other layers see.
        assert!((4.0 * mixed.index_gradient - all.index_gradient).abs() < 1e-9 * all.index_gradient);
        assert_eq!(4.0 * mixed.index_scores, all.index_scores);
        assert!(mixed.attention > all.attention);
    }
}
