//! Rotary position embedding on the packed tensor, after per-head RMSNorm of queries and keys or without it.
mod autodiff;
mod backend;
mod cuda;
mod flex;
pub(crate) mod reference;
#[cfg(test)]
mod tests;

pub use backend::{QkNormRopeCall, RopeBackend, RopeCall, RopeGradients, RopeTables};

use crate::tensors::{primitive, tensor};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData};

/// Cosine and sine tables of rotary position embeddings (arXiv:2104.09864), rotate-half convention.
///
/// Angle of channel pair `i` at position `p`: `p` times the pair's frequency, `theta^(-2 i / head_dim)` where nothing
/// scales it; computed in f64, stored as f32.
#[derive(Clone, Debug)]
pub struct RotaryEmbedding<B: Backend> {
    /// `[max_positions, head_dim / 2]`.
    pub cos: Tensor<B, 2>,
    /// `[max_positions, head_dim / 2]`.
    pub sin: Tensor<B, 2>,
}

impl<B: Backend> RotaryEmbedding<B> {
    /// Tables for positions `0..max_positions`.
    pub fn new(head_dim: usize, max_positions: usize, theta: f64, device: &B::Device) -> Self {
        Self::with_dtype(head_dim, max_positions, theta, device, DType::F32)
    }

    /// Tables in another float type, for references in f64.
    pub fn with_dtype(head_dim: usize, max_positions: usize, theta: f64, device: &B::Device, dtype: DType) -> Self {
        let frequencies = (0..head_dim / 2).map(|pair| theta.powf(-2.0 * pair as f64 / head_dim as f64));
        Self::of_frequencies((&frequencies.collect::<Vec<_>>(), 1.0), max_positions, device, dtype)
    }

    /// Tables of channel pairs of these frequencies, cosines and sines times a factor.
    pub fn of_frequencies(
        (frequencies, amplitude): (&[f64], f64),
        max_positions: usize,
        device: &B::Device,
        dtype: DType,
    ) -> Self {
        let half = frequencies.len();
        let angles: Vec<f64> = (0..max_positions * half)
            .map(|n| (n / half) as f64 * frequencies[n % half])
            .collect();
        let table = |f: fn(f64) -> f64| {
            let values: Vec<f64> = angles.iter().map(|&angle| amplitude * f(angle)).collect();
            let data = TensorData::new(values, [max_positions, half]).convert_dtype(dtype);
            Tensor::from_data(data, (device, dtype))
        };
        Self {
            cos: table(f64::cos),
            sin: table(f64::sin),
        }
    }

    /// Number of positions the tables hold.
    pub fn max_positions(&self) -> usize {
        self.cos.dims()[0]
    }

    /// The tables as calls of backends take them.
    pub fn tables(&self) -> RopeTables<B> {
        RopeTables {
            cos: primitive(self.cos.clone()),
            sin: primitive(self.sin.clone()),
        }
    }
}

/// Weights of the two per-head norms and what they share.
#[derive(Clone, Debug)]
pub struct QkNorm<B: Backend> {
    /// `[head_dim]`.
    pub q_weight: Tensor<B, 1>,
    /// `[head_dim]`.
    pub k_weight: Tensor<B, 1>,
    /// Added to the mean square.
    pub epsilon: f64,
}

/// Normalises and rotates q and k inside the packed tensor; v passes through.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - positions: `[batch, seq_len]`, each below the tables' length
/// - returns: shape of qkv
pub fn qk_norm_rope<B: RopeBackend>(
    qkv: Tensor<B, 4>,
    norm: QkNorm<B>,
    positions: Tensor<B, 2, Int>,
    rope: &RotaryEmbedding<B>,
    num_kv_heads: usize,
) -> Tensor<B, 4> {
    let call = QkNormRopeCall {
        q_weight: primitive(norm.q_weight),
        k_weight: primitive(norm.k_weight),
        positions: positions.into_primitive(),
        rope: rope.tables(),
        num_kv_heads,
        epsilon: norm.epsilon,
    };
    tensor(B::qk_norm_rope(primitive(qkv), call))
}

/// Rotates q and k inside the packed tensor, without norms; v passes through. Shapes as in [`qk_norm_rope()`].
pub fn rope<B: RopeBackend>(
    qkv: Tensor<B, 4>,
    positions: Tensor<B, 2, Int>,
    rope: &RotaryEmbedding<B>,
    num_kv_heads: usize,
) -> Tensor<B, 4> {
    let call = RopeCall {
        positions: positions.into_primitive(),
        rope: rope.tables(),
        num_kv_heads,
    };
    tensor(B::rope(primitive(qkv), call))
}
