//! Queries, keys and values that selectors are timed on: captured from a trained model in a file, or generated.
use super::generator::{Generated, HEAD_DIM, STEP, Weights};
use crate::device::{Device, Gpu};
use crate::error::{Result, refused};
use crate::timed::shape;
use burn::tensor::Tensor;
use sieve_core::ShownPath;
use sieve_hf::TensorFile;
use sieve_kernels::{AttentionResult, AttentionShape, CudaTensor, KernelError, Qkv};
use sieve_ops::Cuda;
use std::path::Path;

/// Queries, keys and values of one text, in bf16 on the GPU.
pub(super) struct Operands {
    pub(super) shape: AttentionShape,
    pub(super) qkv: Qkv,
    doc_start: CudaTensor,
}

impl Operands {
    /// Reads `q`, `k` and `v` of a file, `[tokens, heads, 128]`, which `sieve kernels capture` wrote of a dense model.
    pub(super) fn captured(path: &Path, device: &Gpu) -> Result<Self> {
        let file = TensorFile::open(path)?;
        let read = |name: &str| -> Result<Tensor<Cuda, 3>> {
            let data = file.any_tensor(name)?;
            match data.shape[..] {
                [tokens, _, HEAD_DIM] if tokens >= STEP => {
                    let x = Tensor::<Cuda, 3>::from_data(data.convert::<f32>(), &device.device);
                    // Cut to a multiple of STEP: the generator draws as many tokens for the fit.
                    Ok(x.narrow(0, 0, tokens / STEP * STEP).swap_dims(0, 1))
                }
                _ => refused(format!(
                    "{}: {name} is {:?}, not [{STEP} tokens or more, heads, {HEAD_DIM}]",
                    path.shown(),
                    data.shape
                )),
            }
        };
        Ok(Self::stored([read("q")?, read("k")?, read("v")?], device))
    }

    /// Generated operands, with queries scaled by `weights`.
    pub(super) fn weighted(drawn: &Generated<Cuda>, weights: &[Weights], device: &Gpu) -> Self {
        let qkv = [drawn.queries(weights), drawn.keys.clone(), drawn.values.clone()];
        Self::stored(qkv, device)
    }

    /// Converts q, k and v from `[heads, tokens, HEAD_DIM]` to bf16 `[1, tokens, heads, HEAD_DIM]`.
    fn stored(qkv: [Tensor<Cuda, 3>; 3], device: &Gpu) -> Self {
        let [num_heads, seq_len, _] = qkv[0].dims();
        let num_kv_heads = qkv[1].dims()[0];
        let [q, k, v] = qkv.map(|x| {
            let [heads, rows, width] = x.dims();
            let x = x.cast(burn::tensor::DType::BF16).swap_dims(0, 1);
            let x = x.reshape([1, rows, heads, width]);
            device.tensor(x.into_primitive().tensor()).contiguous()
        });
        Self {
            shape: shape(1, seq_len, [num_heads, num_kv_heads], HEAD_DIM),
            qkv: Qkv::separate(&q, &k, &v),
            doc_start: device.int(&vec![0; seq_len], &[1, seq_len]),
        }
    }

    pub(super) fn scale(&self) -> f32 {
        1.0 / (self.shape.head_dim as f32).sqrt()
    }

    /// Forward pass of dense attention over the same operands.
    pub(super) fn dense(&self) -> Result<AttentionResult, KernelError> {
        let (no_window, no_bias) = (None, None);
        self.qkv.attention_forward(&self.doc_start, no_window, self.scale(), no_bias)
    }
}
