//! Launch of `kernels/likeliest.cu`: the greedy choice of a token.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, params, require, require_non_empty};
use crate::step::Rows;

const NAME: &str = "likeliest";

/// Finds the largest logit among the first `num_tokens` in each row of bf16 `[rows, vocab_size]`; of equal ones the
/// first. Returns its index, i32 `[rows, 1]`; -1 where one of these logits is NaN or infinite.
///
/// # Errors
/// Other types, no logits, more than 2^31 of them in a row.
pub fn likeliest(logits: &CudaTensor, num_tokens: usize) -> Result<CudaTensor, KernelError> {
    let [rows, vocab_size] = logits.dims(NAME, "logits")?;
    logits.require_dtype(NAME, "logits", DType::BF16)?;
    require_non_empty(NAME, "the number of rows", rows)?;
    require_non_empty(NAME, "num_tokens", num_tokens)?;
    require!(num_tokens <= vocab_size.min(i32::MAX as usize), NAME, "num_tokens": num_tokens,
        "up to the {vocab_size} logits of a row, below 2^31");
    let Rows { tensor: logits, stride: x_stride, .. } = Rows::of(logits);
    let ids = logits.empty_contiguous(&[rows, 1], DType::I32);
    let params = params!(LikeliestParams { num_tokens, x_stride });
    // SAFETY: reads `num_tokens` of each row, writes every id; sizes checked above.
    unsafe { LIKELIEST.launch([rows, 1, 1], &[&logits, &ids], &params) }?;
    Ok(ids)
}

const LIKELIEST: SourceKernel = SourceKernel::new(NAME).threads(1024);
