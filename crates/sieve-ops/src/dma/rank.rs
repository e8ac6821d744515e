//! What ranks the keys: their scores, plus recency.
use crate::tensors::{Float, primitive, tensor};
use burn::tensor::backend::Backend;
use burn::tensor::ops::IntTensor;
use burn::tensor::{Int, Tensor, TensorData};

/// Scores plus what recency adds: `z_j + slope p_j`, p_j the key's position in its document.
///
/// The slope, the product and the sum are rounded to f32 one after the other, in training and in decoding and on every
/// device alike, so that all rank equally: no division by a period, no fused multiply-add.
///
/// # Shapes
/// - z: `[batch, num_kv_heads, seq_len]`
/// - positions: `[batch, seq_len]`
/// - slopes: one per KV head, as [`sieve_core::DmaShape::slopes`] gives them; `None`: z as it is
pub fn dma_rank<B: Backend>(
    z: Tensor<B, 3>,
    positions: impl FnOnce() -> Tensor<B, 2, Int>,
    slopes: Option<Vec<f64>>,
) -> Tensor<B, 3> {
    let Some(slopes) = slopes else {
        return z;
    };
    let shape = [1, slopes.len(), 1];
    let options = (&z.device(), z.dtype());
    let slopes = Tensor::<B, 3>::from_data(TensorData::new(slopes, shape), options);
    let positions = positions().float().cast(z.dtype()).unsqueeze_dim::<3>(1);
    z + positions * slopes
}

/// What recency adds to the scores of a call's tokens.
#[derive(Debug)]
pub struct Recency<B: Backend> {
    /// One per KV head, as [`sieve_core::DmaShape::slopes`] gives them.
    pub slopes: Vec<f64>,
    /// Where positions are counted from.
    pub origin: PositionOrigin<B>,
}

/// Where the positions of a call's tokens are counted from.
#[derive(Debug)]
pub enum PositionOrigin<B: Backend> {
    /// The first token of its document, `[batch, seq_len]`.
    DocumentStart(IntTensor<B>),
    /// New tokens of each row, from this position on.
    At {
        /// The first one's position.
        position: usize,
        /// Rows, and new tokens of each.
        shape: [usize; 2],
        /// Where the tokens are.
        device: B::Device,
    },
}

/// What ranks the keys of these scores.
pub(crate) fn ranks<B: Backend>(z: Float<B>, recency: Option<Recency<B>>) -> Float<B> {
    match recency {
        None => z,
        Some(Recency { slopes, origin }) => primitive(dma_rank(tensor(z), || origin.positions(), Some(slopes))),
    }
}

impl<B: Backend> PositionOrigin<B> {
    /// The positions, `[batch, seq_len]`.
    fn positions(self) -> Tensor<B, 2, Int> {
        match self {
            Self::DocumentStart(start) => {
                let start = Tensor::<B, 2, Int>::from_primitive(start);
                let seq_len = start.dims()[1] as i64;
                let in_row = Tensor::<B, 1, Int>::arange(0..seq_len, &start.device());
                in_row.unsqueeze::<2>() - start
            }
            Self::At {
                position,
                shape,
                device,
            } => {
                let first = position as i64;
                let in_row = Tensor::<B, 1, Int>::arange(first..first + shape[1] as i64, &device);
                in_row.unsqueeze::<2>().expand(shape)
            }
        }
    }
}
