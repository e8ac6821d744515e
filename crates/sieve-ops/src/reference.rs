//! Every op in plain Burn operations: the definition the fast paths are measured against.
//!
//! Intermediate values are f32, or f64 for f64 inputs, whatever the dtype of the input; outputs have the input's dtype.
//! No fast library is called and nothing is skipped: attention builds its full score matrix.

mod adamw;
mod attention;
mod attention_layer;
mod dma;
mod feed_forward;
mod linear;
mod linear_cross_entropy;
mod mla;
mod norm;
mod nsa;
mod swiglu;

pub use adamw::{adamw_step, global_norm, scaled, sum_of_squares, zero_scalar};
pub use attention::{
    attention, attention_backward, decode_attention, dma_attention, dma_attention_backward,
};
pub use attention_layer::attention_layer;
pub use dma::{dma_scores, dma_scores_backward, dma_select};
pub use feed_forward::feed_forward;
pub use linear::{
    embedding, embedding_backward, linear, linear_backward, linear_input_gradient,
    linear_weight_gradient,
};
pub use linear_cross_entropy::{
    linear_cross_entropy, linear_cross_entropy_with_gradients, token_losses,
};
pub use mla::{mla_attention, mla_attention_backward, mla_pack, mla_pack_backward};
pub use norm::{QkNormRope, qk_norm_rope, qk_norm_rope_backward, rms_norm, rms_norm_backward};
pub use nsa::{
    nsa_blocks, nsa_blocks_backward, nsa_compressed_attention, nsa_compressed_attention_backward,
    nsa_gates, nsa_gates_backward, nsa_mean_pool, nsa_mean_pool_backward, nsa_selected_attention,
    nsa_selected_attention_backward,
};
pub use swiglu::{swiglu, swiglu_backward};

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, Tensor, TensorMetadata, TensorPrimitive};

/// A primitive as a tensor of known rank.
fn tensor<B: Backend, const D: usize>(primitive: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

/// Back to a primitive.
fn primitive<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> FloatTensor<B> {
    tensor.into_primitive().tensor()
}

/// The dtype a reference computes in: f64 stays, everything else becomes f32.
fn compute_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 {
        DType::F64
    } else {
        DType::F32
    }
}

/// A primitive in its compute dtype; its own dtype beside it.
fn upcast<B: Backend, const D: usize>(primitive: FloatTensor<B>) -> (Tensor<B, D>, DType) {
    let dtype = primitive.dtype();
    (tensor::<B, D>(primitive).cast(compute_dtype(dtype)), dtype)
}

/// All leading dimensions folded into one: `[rows, last]`, with the full shape beside it.
fn rows<B: Backend>(primitive: FloatTensor<B>) -> (Tensor<B, 2>, DType, Vec<usize>) {
    let shape = primitive.shape().to_vec();
    let dtype = primitive.dtype();
    let last = shape[shape.len() - 1];
    let count = shape.iter().product::<usize>() / last.max(1);
    let flat = B::float_reshape(primitive, [count, last].into());
    (
        tensor::<B, 2>(flat).cast(compute_dtype(dtype)),
        dtype,
        shape,
    )
}

/// The inverse of [`rows`], in `dtype` and with `shape`.
fn unrows<B: Backend>(flat: Tensor<B, 2>, dtype: DType, shape: Vec<usize>) -> FloatTensor<B> {
    B::float_reshape(primitive(flat.cast(dtype)), shape.into())
}
