//! Launch of `kernels/embedding_forward.cu`: the embedding lookup.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params, require_non_empty};
use crate::step::{Rows, WORD_ELEMENTS};

const NAME: &str = "embedding_forward";

/// Rows of `weight`, bf16 `[vocab_size, width]`, by `ids`, i32 `[batch, seq_len]`. Returns bf16
/// `[batch, seq_len, width]`; an id outside the table gives a row of NaN.
///
/// # Errors
/// Other types or shapes, a width that is not a multiple of 8, no tokens.
pub fn embedding_forward(weight: &CudaTensor, ids: &CudaTensor) -> Result<CudaTensor, KernelError> {
    let [vocab_size, width] = weight.dims(NAME, "weight")?;
    let [batch, seq_len] = ids.dims(NAME, "ids")?;
    operands!(NAME, ids: I32[batch, seq_len]);
    let tokens = batch * seq_len;
    require_non_empty(NAME, "the number of tokens", tokens)?;
    let weight = Rows::of_words(NAME, "weight", weight)?;
    let y = ids.empty_contiguous(&[batch, seq_len, width], DType::BF16);
    let width_words = width / WORD_ELEMENTS;
    let params =
        params!(EmbeddingForwardParams { tokens, vocab_size, width_words, row_words: weight.stride / WORD_ELEMENTS });
    let grid = [(tokens * width_words).div_ceil(256), 1, 1];
    // SAFETY: reads rows of the table (the kernel checks ids), writes every element of y.
    unsafe { EMBEDDING_FORWARD.launch(grid, &[&weight.tensor, &ids, &y], &params) }?;
    Ok(y)
}

const EMBEDDING_FORWARD: SourceKernel = SourceKernel::new(NAME).threads(256);
