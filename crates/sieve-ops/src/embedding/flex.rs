//! Token embedding on the CPU.
use super::backend::{EmbeddingBackend, EmbeddingGradients};
use super::reference;
use crate::device::flex::{contiguous, floats, from_vec, ints, is_f32, last_dim, plain};
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};

impl EmbeddingBackend for Flex {
    fn embedding(weight: FlexTensor, ids: FlexTensor) -> FlexTensor {
        if !is_f32(&weight) {
            return plain("embedding", || reference::embedding::<Self>(weight, ids));
        }
        let (weight, ids) = (contiguous(weight), contiguous(ids));
        let d_model = last_dim(&weight);
        let shape = ids.shape();
        let mut y = vec![0.0; shape.num_elements() * d_model];
        sieve_cpu::embedding_forward(ints(&ids), floats(&weight), d_model, &mut y);
        from_vec(y, [shape[0], shape[1], d_model])
    }
}

impl EmbeddingGradients for Flex {
    fn embedding_backward(dy: FlexTensor, ids: FlexTensor, vocab_size: usize) -> FlexTensor {
        if !is_f32(&dy) {
            return plain("embedding_backward", || {
                reference::embedding_backward::<Self>(dy, ids, vocab_size)
            });
        }
        let (dy, ids) = (contiguous(dy), contiguous(ids));
        let d_model = last_dim(&dy);
        let mut dweight = vec![0.0; vocab_size * d_model];
        sieve_cpu::embedding_backward(floats(&dy), ints(&ids), d_model, &mut dweight);
        from_vec(dweight, [vocab_size, d_model])
    }
}
