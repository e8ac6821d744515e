//! Ranks of DMA's keys: scores plus a recency term.
use crate::tensors::{Float, primitive, tensor};
use burn::tensor::backend::Backend;
use burn::tensor::ops::IntTensor;
use burn::tensor::{Int, Tensor, TensorData};

/// Ranks of keys: scores plus the recency term, `z_j + slope * p_j`, where p_j is the key's position in its document.
///
/// The slope, the product and the sum are each rounded to f32. Training and decoding do this on every device, without a
/// division or a fused multiply-add, so that all compute the same ranks.
///
/// # Shapes
/// - z: `[batch, num_kv_heads, seq_len]`
/// - positions: `[batch, seq_len]`
/// - slopes: one per KV head, from [`sieve_core::DmaShape::slopes`]; `None`: returns z
pub fn dma_rank<B: Backend>(z: Tensor<B, 3>, positions: Tensor<B, 2, Int>, slopes: Option<Vec<f64>>) -> Tensor<B, 3> {
    let Some(slopes) = slopes else {
        return z;
    };
    let shape = [1, slopes.len(), 1];
    let options = (&z.device(), z.dtype());
    let slopes = Tensor::<B, 3>::from_data(TensorData::new(slopes, shape), options);
    let positions = positions.float().cast(z.dtype()).unsqueeze_dim::<3>(1);
    z + positions * slopes
}

/// The recency term of DMA's ranks: a slope times the position.
#[derive(Debug)]
pub struct Recency<B: Backend> {
    /// One slope per KV head, from [`sieve_core::DmaShape::slopes`].
    pub slopes: Vec<f64>,
    /// The token that counts as position 0.
    pub origin: PositionOrigin<B>,
}

/// From which token on the positions of a call are counted.
#[derive(Debug)]
pub enum PositionOrigin<B: Backend> {
    /// From the first token of each token's document, whose position in the row is here, `[batch, seq_len]`.
    DocumentStart(IntTensor<B>),
    /// Every row has new tokens at the positions from `position` on.
    At {
        /// Position of the first new token.
        position: usize,
        /// Shape of the positions, `[batch, new tokens]`.
        shape: [usize; 2],
        /// Device on which the positions are made.
        device: B::Device,
    },
}

/// [`dma_rank`] with a [`Recency`]; without one, the scores.
pub(crate) fn ranks<B: Backend>(z: Float<B>, recency: Option<Recency<B>>) -> Float<B> {
    match recency {
        None => z,
        Some(Recency { slopes, origin }) => primitive(dma_rank(tensor(z), origin.positions(), Some(slopes))),
    }
}

impl<B: Backend> PositionOrigin<B> {
    /// Positions of the tokens, `[batch, seq_len]`.
    fn positions(self) -> Tensor<B, 2, Int> {
        match self {
            Self::DocumentStart(start) => {
                let start = Tensor::<B, 2, Int>::from_primitive(start);
                let seq_len = start.dims()[1] as i64;
                let in_row = Tensor::<B, 1, Int>::arange(0..seq_len, &start.device());
                in_row.unsqueeze::<2>() - start
            }
            Self::At { position, shape, device } => {
                let first = position as i64;
                let in_row = Tensor::<B, 1, Int>::arange(first..first + shape[1] as i64, &device);
                in_row.unsqueeze::<2>().expand(shape)
            }
        }
    }
}
