//! Launch of `kernels/draw.cu`: a token of each row of logits, with temperature, top-k, min-p and nucleus
//! sampling.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, params, require, require_non_empty};
use crate::step::Rows;
use sieve_core::Draw;

const NAME: &str = "draw";

/// Draws one of the first `num_tokens` tokens of each row of bf16 `[rows, vocab_size]`; `draws` are the words of each
/// row's [`Draw`], i32 `[rows, 8]`. Returns the tokens, i32 `[rows, 1]`; -1 where one of these logits is NaN or
/// infinite.
///
/// # Errors
/// Other types or shapes, no logits, or more than 2^18 logits in a row, because the sum of their weights could
/// overflow.
pub fn draw(logits: &CudaTensor, draws: &CudaTensor, num_tokens: usize) -> Result<CudaTensor, KernelError> {
    const MOST: usize = 1 << 18;
    let [rows, vocab_size] = logits.dims(NAME, "logits")?;
    logits.require_dtype(NAME, "logits", DType::BF16)?;
    draws.require_dtype(NAME, "draws", DType::I32)?;
    require_non_empty(NAME, "the number of rows", rows)?;
    require_non_empty(NAME, "num_tokens", num_tokens)?;
    require!(num_tokens <= vocab_size.min(MOST), NAME, "num_tokens": num_tokens,
        "up to the {vocab_size} logits of a row, at most {MOST}");
    let of_draws = draws.dims::<2>(NAME, "draws")?;
    require!(of_draws == [rows, Draw::WORDS], NAME, "the shape of draws": format!("{of_draws:?}"),
        "[{rows}, {}]", Draw::WORDS);
    let draws = draws.contiguous();
    let Rows { tensor: logits, stride: x_stride, .. } = Rows::of(logits);
    let ids = logits.empty_contiguous(&[rows, 1], DType::I32);
    let params = params!(DrawParams { num_tokens, x_stride });
    // SAFETY: reads `num_tokens` of each row and eight words of each draw, writes every id; sizes checked above.
    unsafe { DRAW.launch([rows, 1, 1], &[&logits, &draws, &ids], &params) }?;
    Ok(ids)
}

const DRAW: SourceKernel = SourceKernel::new(NAME).threads(512);
