//! Projection to the vocabulary and cross-entropy, one block of tokens after another: GEMMs by cuBLASLt around
//! `kernels/cross_entropy.cu`. Only one block's logits are in memory at a time.
use crate::cublaslt::{GemmKind, MatmulOutput, matmul};
use sieve_gpu::step::{FixedSum, LogitRows, Term, cross_entropy, cross_entropy_with_gradients, padded_width};
use sieve_gpu::{CudaTensor, DType, KernelError, operand, require_non_empty};

const NAME: &str = "linear_cross_entropy";

/// Most bytes of one block's logits: 8192 tokens of a vocabulary of 50,304 in bf16. Smaller blocks would leave
/// multiprocessors idle in the GEMM of dh where d_model is small, and read and write the f32 dweight more often.
const BLOCK_BYTES: usize = 800 << 20;

/// The number of a block's tokens is a multiple of this, the height of a GEMM's tile.
const TOKEN_STEP: usize = 128;

/// Loss and gradients that [`linear_cross_entropy_with_gradients`] returns.
#[derive(Debug, Clone)]
pub struct LinearCrossEntropyGradients {
    /// Sum of the tokens' losses, f32 `[1]`.
    pub loss: CudaTensor,
    /// Gradient of the hidden states, bf16 `[tokens, d_model]`.
    pub dh: CudaTensor,
    /// Gradient of the output weight, f32 `[vocab_size, d_model]`.
    pub dweight: CudaTensor,
}

/// Cross-entropy of each token in nats, f32 `[tokens]`, 0 where its label is negative: the losses that
/// [`linear_cross_entropy_with_gradients`] adds up, to the bit. `h` bf16 `[tokens, d_model]`, `weight` bf16
/// `[vocab_size, d_model]`, `labels` i32 `[tokens]`.
///
/// # Errors
/// Other types or shapes, no tokens, no cuBLASLt.
pub fn token_losses(h: &CudaTensor, weight: &CudaTensor, labels: &CudaTensor) -> Result<CudaTensor, KernelError> {
    let input = Input::of(h, weight, labels)?;
    let block = loss_block_tokens(input.tokens, input.vocab_size);
    let logits = LogitRows::new(h, block, input.vocab_size);
    let losses = h.empty_contiguous(&[input.tokens], DType::F32);
    for first in (0..input.tokens).step_by(block) {
        input.block_losses([first, block.min(input.tokens - first)], &logits, &losses, cross_entropy)?;
    }
    Ok(losses)
}

/// The losses of one token of each row of `logits`, bf16 `[rows, vocab_size rounded up to 8]`; `labels` i32 `[rows]`.
/// Returns f32 `[rows]`: the losses of [`token_losses`], to the bit.
///
/// # Errors
/// Other types or shapes.
pub fn losses_of_logits(
    logits: &CudaTensor,
    vocab_size: usize,
    labels: &CudaTensor,
) -> Result<CudaTensor, KernelError> {
    let [rows, _] = logits.dims(NAME, "logits")?;
    let losses = logits.empty_contiguous(&[rows], DType::F32);
    cross_entropy(&LogitRows::of(&logits.contiguous(), vocab_size)?, &labels.contiguous(), &losses)?;
    Ok(losses)
}

/// Summed cross-entropy with its gradients. The logits are bf16, like the GEMMs' other operands; sums are f32.
///
/// # Errors
/// The errors of [`token_losses`].
pub fn linear_cross_entropy_with_gradients(
    h: &CudaTensor,
    weight: &CudaTensor,
    labels: &CudaTensor,
) -> Result<LinearCrossEntropyGradients, KernelError> {
    let input = Input::of(h, weight, labels)?;
    let (tokens, d_model) = (input.tokens, input.d_model);
    let block = loss_block_tokens(tokens, input.vocab_size);
    let logits = LogitRows::new(h, block, input.vocab_size);
    let losses = h.empty_contiguous(&[tokens], DType::F32);
    let dh = h.empty_contiguous(&[tokens, d_model], DType::BF16);
    let dweight = h.empty_contiguous(&[input.vocab_size, d_model], DType::F32);
    for first in (0..tokens).step_by(block) {
        let count = block.min(tokens - first);
        let [h, dlogits] = input.block_losses([first, count], &logits, &losses, cross_entropy_with_gradients)?;
        let dh = dh.row_range(NAME, "dh", first, count)?;
        matmul(GemmKind::Nn, &dlogits, &input.weight, MatmulOutput::Into(&dh))?;
        // The first block overwrites dweight, so it needs no clearing.
        let into = match first {
            0 => MatmulOutput::Into(&dweight),
            _ => MatmulOutput::AddTo(&dweight),
        };
        matmul(GemmKind::Tn, &dlogits, &h, into)?;
    }
    Ok(LinearCrossEntropyGradients { loss: FixedSum::of(&losses, Term::Value)?, dh, dweight })
}

/// Operands of the loss, checked and made contiguous.
struct Input {
    h: CudaTensor,
    weight: CudaTensor,
    labels: CudaTensor,
    tokens: usize,
    d_model: usize,
    vocab_size: usize,
}

impl Input {
    /// Checks the operands, and copies those with gaps.
    fn of(h: &CudaTensor, weight: &CudaTensor, labels: &CudaTensor) -> Result<Self, KernelError> {
        let [tokens, d_model] = h.dims(NAME, "h")?;
        let [vocab_size, _] = weight.dims(NAME, "weight")?;
        for (what, size) in [("tokens", tokens), ("d_model", d_model), ("vocab_size", vocab_size)] {
            require_non_empty(NAME, what, size)?;
        }
        Ok(Self {
            h: operand(NAME, "h", h, DType::BF16, &[tokens, d_model])?.contiguous(),
            weight: operand(NAME, "weight", weight, DType::BF16, &[vocab_size, d_model])?.contiguous(),
            labels: operand(NAME, "labels", labels, DType::I32, &[tokens])?.contiguous(),
            tokens,
            d_model,
            vocab_size,
        })
    }

    /// Computes `count` tokens' logits from token `first` on, and their losses by `losses_of`. Returns those rows of h
    /// and of `logits`.
    fn block_losses(
        &self,
        [first, count]: [usize; 2],
        logits: &LogitRows,
        losses: &CudaTensor,
        losses_of: fn(&LogitRows, &CudaTensor, &CudaTensor) -> Result<(), KernelError>,
    ) -> Result<[CudaTensor; 2], KernelError> {
        let rows = logits.matrix(count)?;
        let h = self.h.row_range(NAME, "h", first, count)?;
        matmul(GemmKind::Nt, &h, &self.weight, MatmulOutput::Into(&rows))?;
        let labels = self.labels.row_range(NAME, "labels", first, count)?;
        let losses = losses.row_range(NAME, "losses", first, count)?;
        losses_of(logits, &labels, &losses)?;
        Ok([h, rows])
    }
}

/// Tokens of a block, whose bf16 logits take at most `BLOCK_BYTES`; `tokens` is at least one.
pub fn loss_block_tokens(tokens: usize, vocab_size: usize) -> usize {
    let fitting = BLOCK_BYTES / (padded_width(vocab_size) * DType::BF16.size());
    let most = (fitting / TOKEN_STEP * TOKEN_STEP).max(TOKEN_STEP);
    // Blocks of nearly equal size: a short last block would run at a fraction of the speed.
    let num_blocks = tokens.div_ceil(most);
    tokens.div_ceil(num_blocks).next_multiple_of(TOKEN_STEP).min(most).min(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_stay_within_their_memory_and_are_even() {
        assert_eq!(loss_block_tokens(16384, 50280), 8192);
        assert_eq!(loss_block_tokens(65536, 50304), 8192);
        assert_eq!(loss_block_tokens(16384, 151_936), 2432);
        assert_eq!(loss_block_tokens(100, 50280), 100);
        assert_eq!(loss_block_tokens(1, 1), 1);
        assert_eq!(loss_block_tokens(9000, 50280), 4608, "two blocks, not 8320 and 680");
        for (tokens, vocab) in [(16384, 50280), (65536, 50280), (777, 1 << 20)] {
            let block = loss_block_tokens(tokens, vocab);
            let small = block * padded_width(vocab) * 2 <= BLOCK_BYTES;
            assert!(small || block <= TOKEN_STEP, "{tokens} {vocab}: {block}");
        }
    }
}
