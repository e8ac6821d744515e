//! The attention kinds and their sizes.

use serde::{Deserialize, Serialize};

/// How a DMA key's score z enters the logit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DmaBias {
    /// `q.k / sqrt(head_dim) + exp(min(z, 60))`
    #[default]
    Exp,
    /// `q.k / sqrt(head_dim) + z`
    Linear,
}

/// Sizes of multi-head latent attention (arXiv:2405.04434, section 2.1), without query compression.
///
/// `c = RMSNorm(x W_DKV)`; per head `k_C = c W_UK` and `v = c W_UV`, both of the model's `head_dim`; one
/// `k_R = RoPE(x W_KR)` for all heads; `q = [x W_QC ; RoPE(x W_QR)]`. Keys and values exist per query head, so
/// `num_kv_heads` equals `num_heads`. No per-head q/k norm.
///
/// Parameters of a layer: W_Q `[num_heads * (head_dim + qk_rope_head_dim), d_model]`, W_DKV and W_KR together
/// `[kv_lora_rank + qk_rope_head_dim, d_model]`, the latent's norm `[kv_lora_rank]`, W_UK and W_UV together
/// `[num_heads * 2 * head_dim, kv_lora_rank]`, W_O `[d_model, num_heads * head_dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MlaShape {
    /// Width of the latent c that keys and values are made from (`d_c`).
    pub kv_lora_rank: usize,
    /// Width of the rotated part of queries and keys (`d_r`); even.
    pub qk_rope_head_dim: usize,
}

/// How NSA makes one key (and one value) of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NsaCompression {
    /// A learned vector per position is added, then `block * head_dim -> compress_hidden_size -> ReLU -> head_dim`.
    #[default]
    Mlp,
    /// The mean over the block.
    Mean,
}

/// Sizes of native sparse attention (arXiv:2502.11089): compressed, selected and window branches, gated.
///
/// Parameters of a layer, besides those of grouped-query attention with its per-head q/k norms: the gate
/// `[num_heads * 3, d_model]` and its bias `[num_heads * 3]`; with `shared_kv = false` two more pairs of key and value
/// projections (the key norm is shared); with `compress = "mlp"`, once for keys and once for values, shared by all
/// heads and without biases: positions `[compress_block_size, head_dim]`, first matrix
/// `[compress_hidden_size, compress_block_size * head_dim]`, second matrix `[head_dim, compress_hidden_size]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NsaShape {
    /// Tokens of a compressed block (l).
    pub compress_block_size: usize,
    /// Tokens between the starts of two compressed blocks (s); divides both block sizes.
    pub compress_stride: usize,
    /// How a block is compressed.
    #[serde(default)]
    pub compress: NsaCompression,
    /// Hidden width of the compression MLP; absent for `compress = "mean"`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compress_hidden_size: Option<usize>,
    /// Tokens of a selected block (l').
    pub select_block_size: usize,
    /// Blocks a query selects per KV head, forced ones included (k).
    pub num_selected_blocks: usize,
    /// Keys of the window branch, in tokens.
    pub window_size: usize,
    /// Whether the three branches read the same keys and values.
    #[serde(default = "default_shared_kv")]
    pub shared_kv: bool,
}

fn default_shared_kv() -> bool {
    true
}

/// Branches of NSA: compressed, selected, window.
pub const NUM_NSA_BRANCHES: usize = 3;

impl NsaShape {
    /// Compressed blocks of a document of `seq_len` tokens: those that lie in it whole.
    pub fn num_compressed_blocks(&self, seq_len: usize) -> usize {
        match seq_len.checked_sub(self.compress_block_size) {
            Some(rest) => rest / self.compress_stride + 1,
            None => 0,
        }
    }

    /// Copies of the key and value projections.
    pub fn num_kv_copies(&self) -> usize {
        if self.shared_kv { 1 } else { NUM_NSA_BRANCHES }
    }

    /// (Query, key) pairs of one query head in a document of `seq_len` tokens, by branch: compressed, selected, window.
    ///
    /// Query t sees the compressed blocks that end at or before t, `num_selected_blocks` blocks up to its own, whole but
    /// for its own, and the window.
    pub fn pairs(&self, seq_len: usize) -> [f64; NUM_NSA_BRANCHES] {
        let n = seq_len as f64;
        let window = self.window_size.min(seq_len) as f64;
        // Block c is seen by the queries from its last token on.
        let blocks = self.num_compressed_blocks(seq_len) as f64;
        let compressed = blocks * (n - self.compress_block_size as f64 + 1.0)
            - self.compress_stride as f64 * blocks * (blocks - 1.0) / 2.0;
        // The first k blocks see everything before them; a later query sees its own block so far and k - 1 whole ones.
        let block = self.select_block_size;
        let all = seq_len.min(block.saturating_mul(self.num_selected_blocks));
        let rest = seq_len - all;
        let (whole, short) = ((rest / block) as f64, (rest % block) as f64);
        let own = whole * (block as f64 * (block as f64 + 1.0) / 2.0) + short * (short + 1.0) / 2.0;
        let others = rest as f64 * ((self.num_selected_blocks - 1) * block) as f64;
        let selected = all as f64 * (all as f64 + 1.0) / 2.0 + own + others;
        [compressed, selected, window * (n - (window - 1.0) / 2.0)]
    }
}

/// The attention of every layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Attention {
    /// Dense causal attention with grouped queries.
    Mha,
    /// Sliding window.
    Swa {
        /// Keys a query sees, itself included, in tokens.
        window_size: usize,
    },
    /// Multi-head latent attention: dense, with a small cache.
    Mla(MlaShape),
    /// Native sparse attention.
    Nsa(NsaShape),
    /// Dynamic mask attention.
    Dma {
        /// Keys a query keeps, per KV head.
        keep_window_size: usize,
        /// How a key's score enters the logit.
        bias: DmaBias,
        /// Initial value of every entry of A.
        a_init: f64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nsa_pairs_equal_the_count_query_by_query() {
        for (l, s, select, k, w) in [(4, 2, 4, 3, 5), (8, 4, 4, 3, 1), (4, 4, 8, 4, 9)] {
            let shape = NsaShape {
                compress_block_size: l,
                compress_stride: s,
                compress: NsaCompression::Mean,
                compress_hidden_size: None,
                select_block_size: select,
                num_selected_blocks: k,
                window_size: w,
                shared_kv: true,
            };
            for seq_len in 0..90usize {
                let mut counted = [0usize; 3];
                for t in 0..seq_len {
                    let blocks = shape.num_compressed_blocks(seq_len);
                    counted[0] += (0..blocks).filter(|c| c * s + l - 1 <= t).count();
                    let own = t / select;
                    let first = (own + 1).saturating_sub(k);
                    counted[1] += (own - first) * select + t % select + 1;
                    counted[2] += (t + 1).min(w);
                }
                assert_eq!(
                    shape.pairs(seq_len),
                    counted.map(|count| count as f64),
                    "{shape:?} {seq_len}"
                );
            }
        }
    }
}
