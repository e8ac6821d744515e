//! Floating-point operations per token, and the peak rates they are compared with.
//!
//! A multiply-add counts as two. Counted are matrix products; norms, softmax, activations, DMA's selection (comparisons)
//! and the optimizer are left out, as is usual for MFU (arXiv:2204.02311, appendix B).
//!
//! - forward, linear: `2 * (weights of q, k, v, o, gate, up, down, W_dt, output)`; the embedding is a look-up, the output
//!   projection a product whether tied or not
//! - forward, attention, per layer: `4 * num_heads * head_dim * keys`, for `Q K^T` and `P V`, where `keys` is the mean
//!   number of keys a query sees
//! - backward: twice the forward (two products for each one). The scores that a backward kernel computes again are not
//!   counted: MFU counts what the mathematics needs, not what an implementation repeats.
//!
//! torchtitan counts `seq_len` keys for causal attention, twice what a causal mask leaves; ours is the mean over
//! positions, `(seq_len + 1) / 2`, so our MFU is the lower one.

use super::{Attention, ModelShape};

/// Forward floating-point operations of one token, mean over the positions of a sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlopsPerToken {
    /// Products with weights.
    pub linear: f64,
    /// Products of attention over the keys that are seen.
    pub attention: f64,
}

impl FlopsPerToken {
    /// Operations of the forward pass.
    pub fn forward(&self) -> f64 {
        self.linear + self.attention
    }

    /// Operations of the backward pass: twice the forward.
    pub fn backward(&self) -> f64 {
        2.0 * self.forward()
    }

    /// Operations of one training token.
    pub fn training(&self) -> f64 {
        self.forward() + self.backward()
    }
}

impl ModelShape {
    /// Operations per token when a query sees `mean_active_keys` keys on average (measured, or from
    /// [`mean_active_keys`] and [`mean_active_keys_of_documents`]).
    pub fn flops_per_token(&self, mean_active_keys: f64) -> FlopsPerToken {
        let (d_model, q_width, kv_width) = (
            self.d_model as f64,
            self.q_width() as f64,
            self.kv_width() as f64,
        );
        let num_layers = self.num_layers as f64;
        let mask = match self.attention {
            Attention::Dma { .. } => kv_width * self.num_kv_heads as f64,
            Attention::Mha | Attention::Swa { .. } => 0.0,
        };
        let layer = 2.0 * d_model * (q_width + kv_width) + 3.0 * d_model * self.d_ff as f64 + mask;
        FlopsPerToken {
            linear: 2.0 * (num_layers * layer + d_model * self.vocab_size as f64),
            attention: num_layers * 4.0 * q_width * mean_active_keys,
        }
    }

    /// Operations executed per token: attention over the pairs the mask keeps, for one document of `seq_len` tokens.
    pub fn executed_flops_per_token(&self, seq_len: usize) -> FlopsPerToken {
        self.flops_per_token(mean_active_keys(self.attention, seq_len))
    }

    /// Operations per token of the dense equivalent: the same weights, attention over all causal pairs.
    pub fn dense_flops_per_token(&self, seq_len: usize) -> FlopsPerToken {
        self.flops_per_token(mean_active_keys(Attention::Mha, seq_len))
    }
}

/// Mean number of keys a query sees in one document of `seq_len` tokens; 0 for an empty one.
///
/// Query i (from 0) sees `min(i + 1, w)` keys, exactly, in a sliding window of w and in DMA with `keep_window_size` w
/// alike; `w >= seq_len` where there is no window. The mean is `(w / n)(n - (w - 1) / 2)` with `w = min(w, n)`.
pub fn mean_active_keys(attention: Attention, seq_len: usize) -> f64 {
    mean_active_keys_of_documents(attention, [seq_len])
}

/// Mean number of keys a query sees over packed documents of these lengths; 0 without tokens.
pub fn mean_active_keys_of_documents(
    attention: Attention,
    lengths: impl IntoIterator<Item = usize>,
) -> f64 {
    let window = match attention {
        Attention::Mha => usize::MAX,
        Attention::Swa { window_size } => window_size,
        Attention::Dma {
            keep_window_size, ..
        } => keep_window_size,
    };
    let (mut pairs, mut tokens) = (0.0, 0.0);
    for length in lengths {
        let (n, w) = (length as f64, window.min(length) as f64);
        pairs += w * (n - (w - 1.0) / 2.0);
        tokens += n;
    }
    if tokens == 0.0 { 0.0 } else { pairs / tokens }
}

/// Peak dense bf16 rate of a GPU in FLOP/s (tensor cores, f32 accumulation, no sparsity), by the vendor's data sheet.
///
/// `device_name` is the name the driver gives. `None` for a device that is not in the list; no guess is made.
pub fn peak_bf16_flops(device_name: &str) -> Option<f64> {
    let name = device_name.to_ascii_uppercase();
    let words = name
        .split(|letter: char| !letter.is_ascii_alphanumeric())
        .collect::<Vec<_>>();
    let has = |word: &str| words.contains(&word);
    PEAKS
        .iter()
        .find(|(marks, _)| marks.iter().all(|mark| has(mark)))
        .map(|(_, peak)| *peak)
}

/// Words of a device's name, and its peak; the first row whose words are all there counts.
const PEAKS: &[(&[&str], f64)] = &[
    (&["B200"], 2250e12),
    (&["GH200"], 989e12),
    (&["H200", "NVL"], 835e12),
    (&["H200"], 989e12),
    (&["H100", "NVL"], 835e12),
    (&["H100", "PCIE"], 756e12),
    (&["H100"], 989e12),
    (&["H800", "PCIE"], 756e12),
    (&["H800"], 989e12),
    (&["H20"], 148e12),
    (&["A100"], 312e12),
    (&["A800"], 312e12),
    (&["A30"], 165e12),
    (&["A40"], 149.7e12),
    (&["A10"], 125e12),
    (&["A10G"], 70e12),
    (&["L40S"], 362e12),
    (&["L40"], 181e12),
    (&["L4"], 121e12),
    (&["RTX", "6000", "ADA"], 364.2e12),
    (&["RTX", "A6000"], 154.8e12),
    (&["RTX", "4090"], 165.2e12),
    (&["RTX", "3090", "TI"], 80e12),
    (&["RTX", "3090"], 71e12),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::DmaBias;
    use crate::model::test_shapes::{qwen3_0_6b, tiny_dma};

    fn dma(keep_window_size: usize) -> Attention {
        Attention::Dma {
            keep_window_size,
            bias: DmaBias::Exp,
            a_init: 0.0,
        }
    }

    #[test]
    fn mean_active_keys_equals_the_count_of_pairs() {
        for seq_len in 1..40usize {
            for window in 1..45usize {
                let pairs = (0..seq_len)
                    .map(|query| (query + 1).min(window))
                    .sum::<usize>();
                let expected = pairs as f64 / seq_len as f64;
                for attention in [
                    dma(window),
                    Attention::Swa {
                        window_size: window,
                    },
                ] {
                    let mean = mean_active_keys(attention, seq_len);
                    assert!(
                        (mean - expected).abs() < 1e-12,
                        "n {seq_len} w {window}: {mean} is not {expected}"
                    );
                }
            }
            assert_eq!(
                mean_active_keys(Attention::Mha, seq_len),
                (seq_len as f64 + 1.0) / 2.0
            );
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
    }

    #[test]
    fn sparse_attention_changes_the_executed_count_alone() {
        // w = 4 at 10 tokens: 1 + 2 + 3 + 7 * 4 = 34 pairs; dense 55. 3 layers, 4 heads of 6.
        let shape = tiny_dma();
        let (executed, dense) = (
            shape.executed_flops_per_token(10),
            shape.dense_flops_per_token(10),
        );
        assert_eq!(executed.linear, dense.linear);
        assert_eq!(
            executed.linear,
            2.0 * (3.0 * (864.0 + 720.0 + 24.0) + 600.0)
        );
        assert!((executed.attention - 3.0 * 4.0 * 24.0 * 3.4).abs() < 1e-9);
        assert!((dense.attention - 3.0 * 4.0 * 24.0 * 5.5).abs() < 1e-9);
    }

    #[test]
    fn peaks_are_found_by_the_drivers_names() {
        for (name, peak) in [
            ("NVIDIA H200", Some(989e12)),
            ("NVIDIA H200 NVL", Some(835e12)),
            ("NVIDIA H100 80GB HBM3", Some(989e12)),
            ("NVIDIA H100 PCIe", Some(756e12)),
            ("NVIDIA A100-SXM4-80GB", Some(312e12)),
            ("NVIDIA GeForce RTX 4090", Some(165.2e12)),
            ("NVIDIA GeForce RTX 3090 Ti", Some(80e12)),
            ("NVIDIA RTX 6000 Ada Generation", Some(364.2e12)),
            ("NVIDIA L4", Some(121e12)),
            ("NVIDIA L40S", Some(362e12)),
            ("NVIDIA A10G", Some(70e12)),
            ("Tesla V100-SXM2-16GB", None),
            ("", None),
        ] {
            assert_eq!(peak_bf16_flops(name), peak, "{name}");
        }
    }
}
