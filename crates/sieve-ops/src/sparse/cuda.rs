//! Attention under a selector's mask on CUDA: the mask's arrays are copied to the device, q, k and v are there.
use super::backend::SparseBackend;
use crate::attention::cuda::packed_heads;
use crate::device::cuda::Cuda;
use crate::device::paths::kernel_or_refusal;
use burn::tensor::{DType, Int, Tensor, TensorData};
use sieve_core::PackedMask;
use sieve_kernels::{
    CudaPrimitive as Float, CudaTensor, sparse_attention_forward, supports_head_dim,
};

impl SparseBackend for Cuda {
    fn has_sparse_attention(qkv: &Float) -> bool {
        let qkv = CudaTensor::from(qkv.clone());
        qkv.dtype() == DType::BF16 && supports_head_dim(qkv.shape()[3])
    }

    fn sparse_attention(
        qkv: Float,
        mask: &PackedMask,
        softmax_scale: f64,
    ) -> Result<Float, String> {
        let data = TensorData::new(mask.data().to_vec(), [mask.data().len()]);
        let device = CudaTensor::from(qkv.clone()).device().clone();
        let data = Tensor::<Self, 1, Int>::from_data(data, &device);
        let data = CudaTensor::from(data.into_primitive()).contiguous();
        let qkv = packed_heads(&qkv, mask.heads());
        let result = sparse_attention_forward(&qkv, mask, &data, softmax_scale as f32);
        kernel_or_refusal("sparse_attention", result.map(|result| result.o.into()))
    }
}
