//! What ranks the keys: their scores, plus recency.
use crate::documents::DocumentBounds;
use burn::tensor::backend::Backend;
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

/// Positions inside documents, `[batch, seq_len]`, from the documents' starts.
pub(crate) fn positions_in_documents<B: Backend>(documents: &DocumentBounds<B>) -> Tensor<B, 2, Int> {
    let start = Tensor::<B, 2, Int>::from_primitive(documents[0].clone());
    let seq_len = start.dims()[1] as i64;
    let in_row = Tensor::<B, 1, Int>::arange(0..seq_len, &start.device());
    in_row.unsqueeze::<2>() - start
}
