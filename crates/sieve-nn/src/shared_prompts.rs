//! Batches in which several endings share one prompt. Projections and feed-forward layers process the prompt once; only
//! attention sees rows in which the prompt is repeated before each ending.
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use sieve_ops::Documents;

/// The rows that attention sees, and the maps between them and the tokens of the batch.
#[derive(Clone, Debug)]
pub struct SharedPrompts<B: Backend> {
    /// Document bounds of the attention's rows.
    documents: Documents<B>,
    /// The batch's token at each position of the attention's rows, `[rows * row_len]`.
    tokens: Tensor<B, 1, Int>,
    /// For each token of the batch, one of its positions in the attention's rows, `[num_tokens]`.
    positions: Tensor<B, 1, Int>,
}

impl<B: Backend> SharedPrompts<B> {
    /// `tokens` maps each position of the attention's rows to a token of the batch, `positions` each token of the batch
    /// to a position in the attention's rows.
    ///
    /// Panics when `tokens` and `documents` have different lengths.
    pub fn new(documents: Documents<B>, tokens: &[u32], positions: &[usize], device: &B::Device) -> Self {
        assert_eq!(documents.start.shape().num_elements(), tokens.len());
        let ints = |values: Vec<i32>| {
            let len = values.len();
            Tensor::from_data(TensorData::new(values, [len]), device)
        };
        Self {
            documents,
            tokens: ints(tokens.iter().map(|&token| token as i32).collect()),
            positions: ints(positions.iter().map(|&position| position as i32).collect()),
        }
    }

    /// Document bounds of the attention's rows.
    pub(crate) fn documents(&self) -> &Documents<B> {
        &self.documents
    }

    /// From the batch's tokens, `[1, num_tokens, heads, width]`, to the attention's rows, `[rows, row_len, heads,
    /// width]`.
    pub(crate) fn repeat(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let [rows, row_len] = self.documents.start.dims();
        select(x, &self.tokens, [rows, row_len])
    }

    /// From the attention's rows, `[rows, row_len, heads, width]`, to the batch's tokens, `[1, num_tokens, heads,
    /// width]`.
    pub(crate) fn once(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        select(x, &self.positions, [1, self.positions.dims()[0]])
    }
}

/// The tokens of x at the flat indices `tokens`, as `rows` rows of `row_len`.
fn select<B: Backend>(x: Tensor<B, 4>, tokens: &Tensor<B, 1, Int>, [rows, row_len]: [usize; 2]) -> Tensor<B, 4> {
    let [batch, seq_len, heads, width] = x.dims();
    x.reshape([batch * seq_len, heads * width]).select(0, tokens.clone()).reshape([rows, row_len, heads, width])
}
