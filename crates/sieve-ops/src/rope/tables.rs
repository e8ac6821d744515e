//! Cosine and sine tables of rotary position embeddings.
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
    /// Tables of the same size that rotate nothing, ones and zeros, for layers without positions (NoPE); `None` in
    /// models without such layers.
    pub still: Option<Box<Self>>,
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
        Self { cos: table(f64::cos), sin: table(f64::sin), still: None }
    }

    /// These tables, and beside them the tables of layers that do not rotate.
    pub fn with_still(self) -> Self {
        let still = Self { cos: self.cos.ones_like(), sin: self.sin.zeros_like(), still: None };
        Self { still: Some(Box::new(still)), ..self }
    }

    /// The tables of a layer that rotates (`rotates`), or of one that does not.
    ///
    /// # Panics
    /// For a layer that does not rotate, without [`with_still`](Self::with_still).
    pub fn of_layer(&self, rotates: bool) -> &Self {
        if rotates {
            self
        } else {
            self.still.as_deref().expect("the tables of a model with NoPE layers are made with_still")
        }
    }

    /// The same tables on another backend or of another type.
    pub fn map<I: Backend>(&self, change: &dyn Fn(Tensor<B, 2>) -> Tensor<I, 2>) -> RotaryEmbedding<I> {
        let still = self.still.as_ref().map(|still| Box::new(still.map(change)));
        RotaryEmbedding { cos: change(self.cos.clone()), sin: change(self.sin.clone()), still }
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
