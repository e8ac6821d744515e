//! Cosine and sine tables of rotary position embeddings.
use crate::SieveBackend;
use crate::tensors::{Float, primitive};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorData};

/// Cosine and sine tables of rotary position embeddings (arXiv:2104.09864), rotate-half convention.
///
/// The angle of channel pair `i` at position `p` is `p` times the pair's frequency, which is `theta^(-2 i / head_dim)`
/// unless a context extension scales it. Angles are computed in f64, the tables are f32.
#[derive(Clone, Debug)]
pub struct RotaryEmbedding<B: Backend> {
    /// Cosines of position times frequency, `[max_positions, head_dim / 2]`.
    pub cos: Tensor<B, 2>,
    /// Sines of position times frequency, `[max_positions, head_dim / 2]`.
    pub sin: Tensor<B, 2>,
}

impl<B: Backend> RotaryEmbedding<B> {
    /// Tables for positions `0..max_positions`.
    pub fn new(head_dim: usize, max_positions: usize, theta: f64, device: &B::Device) -> Self {
        Self::with_dtype(head_dim, max_positions, theta, device, DType::F32)
    }

    /// Like [`new`](Self::new) in another float dtype, for references in f64.
    pub fn with_dtype(head_dim: usize, max_positions: usize, theta: f64, device: &B::Device, dtype: DType) -> Self {
        let frequencies = (0..head_dim / 2).map(|pair| theta.powf(-2.0 * pair as f64 / head_dim as f64));
        Self::of_frequencies((&frequencies.collect::<Vec<_>>(), 1.0), max_positions, device, dtype)
    }

    /// Tables for these frequencies of channel pairs, with cosines and sines times `amplitude`.
    pub fn of_frequencies(
        (frequencies, amplitude): (&[f64], f64),
        max_positions: usize,
        device: &B::Device,
        dtype: DType,
    ) -> Self {
        let half = frequencies.len();
        let angles: Vec<f64> = (0..max_positions * half).map(|n| (n / half) as f64 * frequencies[n % half]).collect();
        let table = |f: fn(f64) -> f64| {
            let values: Vec<f64> = angles.iter().map(|&angle| amplitude * f(angle)).collect();
            let data = TensorData::new(values, [max_positions, half]).convert_dtype(dtype);
            Tensor::from_data(data, (device, dtype))
        };
        Self { cos: table(f64::cos), sin: table(f64::sin) }
    }

    /// Number of positions that the tables hold.
    pub fn max_positions(&self) -> usize {
        self.cos.dims()[0]
    }

    /// The two tables as backend primitives.
    pub fn tables(&self) -> RopeTables<B> {
        RopeTables { cos: primitive(self.cos.clone()), sin: primitive(self.sin.clone()) }
    }
}

/// Cosine and sine tables of rotary position embeddings, each `[max_positions, head_dim / 2]`.
#[derive(Clone, Debug)]
pub struct RopeTables<B: Backend> {
    /// Cosines of position times frequency.
    pub cos: Float<B>,
    /// Sines of position times frequency.
    pub sin: Float<B>,
}

impl<B: SieveBackend> RopeTables<B> {
    /// The tables' values, without their place in a graph.
    pub(crate) fn values(&self) -> RopeTables<B::Inner> {
        RopeTables { cos: B::value(self.cos.clone()), sin: B::value(self.sin.clone()) }
    }
}
