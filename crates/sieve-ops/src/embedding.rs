//! Token embedding and its gradient on every device. Calls that the kernels refuse run `reference`.
use crate::device::{contiguous, floats, from_vec, ints, last_dim, plain, unless_f32};
use crate::tensors::{Float, Ints, primitive, tensor};
use crate::{DeviceBackend, SieveBackend};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, IndexingUpdateOp, Int, Tensor, TensorMetadata};
use burn_flex::FlexTensor;

/// The row of `weight` of each token id.
///
/// # Shapes
/// - weight: `[vocab_size, d_model]`
/// - ids: `[batch, seq_len]`, each in `0..vocab_size`
/// - returns: `[batch, seq_len, d_model]`
pub fn embedding<B: SieveBackend>(weight: Tensor<B, 2>, ids: Tensor<B, 2, Int>) -> Tensor<B, 3> {
    let [vocab_size, _d_model] = weight.dims();
    let (weight, ids) = (primitive(weight), ids.into_primitive());
    let y = <B::Inner as DeviceBackend>::embedding(B::value(weight.clone()), ids.clone());
    tensor(B::node([&weight], y, move |dy| [<B::Inner as DeviceBackend>::embedding_backward(dy, ids, vocab_size)]))
}

pub(crate) mod reference {
    //! Rows of a table, and their gradient.
    use super::*;

    /// Looks up the rows `weight[ids]`.
    pub fn embedding<B: Backend>(weight: Float<B>, ids: Ints<B>) -> Float<B> {
        let ids: Tensor<B, 2, Int> = Tensor::from_primitive(ids);
        let [batch, seq_len] = ids.dims();
        let weight = tensor::<B, 2>(weight);
        let [_, d_model] = weight.dims();
        let rows = weight.select(0, ids.reshape([batch * seq_len]));
        primitive(rows.reshape([batch, seq_len, d_model]))
    }

    /// Adds the rows of `dy`, `[batch, seq_len, d_model]`, by token id to `[vocab_size, d_model]`.
    pub fn embedding_backward<B: Backend>(dy: Float<B>, ids: Ints<B>, vocab_size: usize) -> Float<B> {
        let ids: Tensor<B, 2, Int> = Tensor::from_primitive(ids);
        let [batch, seq_len] = ids.dims();
        let dy = tensor::<B, 3>(dy);
        let [_, _, d_model] = dy.dims();
        let zeros = Tensor::<B, 2>::zeros([vocab_size, d_model], (&dy.device(), dy.dtype()));
        let dy = dy.reshape([batch * seq_len, d_model]);
        primitive(zeros.select_assign(0, ids.reshape([batch * seq_len]), dy, IndexingUpdateOp::Add))
    }
}

pub(crate) mod cpu {
    //! Embedding on the CPU: methods of `DeviceBackend`.
    use super::*;
    use burn::tensor::{Element, bf16};
    use burn_flex::Flex;

    /// Rows of an f32 or bf16 table, in the table's dtype; other dtypes take the reference.
    pub(crate) fn embedding(weight: FlexTensor, ids: FlexTensor) -> FlexTensor {
        let dtype = weight.dtype();
        // Other dtypes have no kernel.
        if ![DType::F32, DType::BF16].contains(&dtype) {
            return plain("embedding", || reference::embedding::<Flex>(weight, ids));
        }
        let (weight, ids) = (contiguous(weight), contiguous(ids));
        let d_model = last_dim(&weight);
        match dtype {
            DType::F32 => rows(floats(&weight), &ids, d_model),
            _ => rows(weight.storage::<bf16>(), &ids, d_model),
        }
    }

    fn rows<T: Element + Default>(weight: &[T], ids: &FlexTensor, d_model: usize) -> FlexTensor {
        let shape = ids.shape();
        let mut y = vec![T::default(); shape.num_elements() * d_model];
        sieve_cpu::embedding_forward(ints(ids), weight, d_model, &mut y);
        from_vec(y, [shape[0], shape[1], d_model])
    }

    /// The sum of the rows of `dy`, `[batch, seq_len, d_model]`, by token id, in the order of the tokens; rows of
    /// tokens that do not occur are 0.
    pub(crate) fn embedding_backward(dy: FlexTensor, ids: FlexTensor, vocab_size: usize) -> FlexTensor {
        unless_f32!(&dy, "embedding_backward": reference::embedding_backward::<Flex>(dy, ids, vocab_size));
        let (dy, ids) = (contiguous(dy), contiguous(ids));
        let d_model = last_dim(&dy);
        let mut dweight = sieve_cpu::zeros(vocab_size * d_model);
        sieve_cpu::embedding_backward(floats(&dy), ints(&ids), d_model, &mut dweight);
        from_vec(dweight, [vocab_size, d_model])
    }
}

#[cfg(feature = "cuda")]
pub(crate) mod cuda {
    //! Embedding on CUDA. If the gradient's kernel refuses a call, GEMMs sum the gradient in a fixed order.
    use super::*;
    use crate::Cuda;
    use crate::device::{CudaPrimitive, kernel_or, tensors};
    use sieve_kernels::ToBurn;

    /// Tokens of one GEMM, which bounds the size of its one-hot matrix.
    const TOKENS: usize = 1024;

    pub(crate) fn embedding(weight: CudaPrimitive, ids: CudaPrimitive) -> CudaPrimitive {
        let [table, rows] = tensors([&weight, &ids]);
        let attempt = sieve_kernels::step::embedding_forward(&table, &rows);
        kernel_or("embedding", attempt.map(ToBurn::burn), || reference::embedding::<Cuda>(weight, ids))
    }

    /// dweight in f32. The kernel sorts the ids instead of using atomics.
    pub(crate) fn embedding_backward(dy: CudaPrimitive, ids: CudaPrimitive, vocab_size: usize) -> CudaPrimitive {
        let [d, rows] = tensors([&dy, &ids]);
        let attempt = sieve_kernels::step::embedding_backward(&d, &rows, vocab_size);
        kernel_or("embedding_backward", attempt.map(ToBurn::burn), || {
            let dy = tensor::<Cuda, 3>(dy).cast(DType::F32);
            primitive(by_one_hot_gemms(dy, Tensor::from_primitive(ids), vocab_size))
        })
    }

    /// The gradient by GEMMs with one-hot matrices of [`TOKENS`] tokens, summed in f32: many tokens may have the same
    /// id, and a bf16 sum would lose small gradients. This is slower than a scatter, whose atomics add in an
    /// unspecified order.
    fn by_one_hot_gemms(dy: Tensor<Cuda, 3>, ids: Tensor<Cuda, 2, Int>, vocab_size: usize) -> Tensor<Cuda, 2> {
        let [batch, seq_len, d_model] = dy.dims();
        let device = dy.device();
        let tokens = batch * seq_len;
        let dy = dy.reshape([tokens, d_model]);
        let ids = ids.reshape([1, tokens]);
        let rows = Tensor::<Cuda, 1, Int>::arange(0..vocab_size as i64, &device);
        let rows = rows.reshape([vocab_size, 1]);
        let mut sum = Tensor::<Cuda, 2>::zeros([vocab_size, d_model], (&device, DType::F32));
        for first in (0..tokens).step_by(TOKENS) {
            let count = TOKENS.min(tokens - first);
            let here = ids.clone().narrow(1, first, count);
            let one_hot = rows.clone().expand([vocab_size, count]).equal(here.expand([vocab_size, count]));
            let one_hot = one_hot.float().cast(DType::F32);
            sum = sum + one_hot.matmul(dy.clone().narrow(0, first, count));
        }
        sum
    }
}

#[cfg(test)]
mod tests;
