//! Rows that hold a prompt once for several endings: token-wise work of a layer is done once for the prompt, and only
//! attention sees the prompt repeated before each ending.
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use sieve_ops::Documents;

/// Which tokens the attention sees, as rows of documents, and where its output goes.
#[derive(Clone, Debug)]
pub struct SharedPrompts<B: Backend> {
    /// Of the attention's rows.
    documents: Documents<B>,
    /// The token in each place of the attention's rows, `[rows * row_len]`.
    repeat: Tensor<B, 1, Int>,
    /// A place of each token in the attention's rows, `[num_tokens]`.
    place: Tensor<B, 1, Int>,
}

impl<B: Backend> SharedPrompts<B> {
    /// `tokens` maps each position of the attention's rows to a token, `place` each token to its first position there.
    ///
    /// Panics when `tokens` and `documents` have different lengths.
    pub fn new(documents: Documents<B>, tokens: &[u32], place: &[usize], device: &B::Device) -> Self {
        assert_eq!(documents.start.shape().num_elements(), tokens.len());
        let ints = |values: Vec<i32>| {
            let len = values.len();
            Tensor::from_data(TensorData::new(values, [len]), device)
        };
        Self {
            documents,
            repeat: ints(tokens.iter().map(|&token| token as i32).collect()),
            place: ints(place.iter().map(|&place| place as i32).collect()),
        }
    }

    /// Document bounds of the attention's rows.
    pub(crate) fn documents(&self) -> &Documents<B> {
        &self.documents
    }

    /// `[1, num_tokens, heads, width]` to the attention's rows, `[rows, row_len, heads, width]`.
    pub(crate) fn repeat(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let [rows, row_len] = self.documents.start.dims();
        select(x, &self.repeat, [rows, row_len])
    }

    /// The way back.
    pub(crate) fn once(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        select(x, &self.place, [1, self.place.dims()[0]])
    }
}

fn select<B: Backend>(x: Tensor<B, 4>, tokens: &Tensor<B, 1, Int>, [rows, row_len]: [usize; 2]) -> Tensor<B, 4> {
    let [batch, seq_len, heads, width] = x.dims();
    x.reshape([batch * seq_len, heads * width])
        .select(0, tokens.clone())
        .reshape([rows, row_len, heads, width])
}
