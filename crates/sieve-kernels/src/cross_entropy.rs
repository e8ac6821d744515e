//! Launch of `kernels/cross_entropy.cu` on a block of logits.
use crate::checks::require_float;
use crate::cuda_tensor::CudaTensor;
use crate::error::KernelError;
use crate::source_kernel::SourceKernel;
use crate::vector_rows::{WORD_ELEMENTS, require_alignment};
use burn::tensor::DType;

const NAME: &str = "cross_entropy";

/// Factors of a loss and its gradient.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossFactors {
    /// Weight of the squared log-sum-exp.
    pub z_loss: f32,
    /// Multiplies the gradients, not the losses: one over the number of labels, when that is known beforehand.
    pub gradient_scale: f32,
}

/// Rows of logits, `[rows, vocab_size]`, padded so that each begins on a 16-byte word.
#[derive(Debug, Clone)]
pub(crate) struct LogitRows {
    /// `[rows, padded_width]`, contiguous.
    pub(crate) tensor: CudaTensor,
    pub(crate) vocab_size: usize,
}

impl LogitRows {
    /// New rows, contents undefined.
    pub(crate) fn new(like: &CudaTensor, rows: usize, vocab_size: usize, dtype: DType) -> Self {
        let shape = [rows, padded_width(vocab_size)];
        Self {
            tensor: like.empty_contiguous(&shape, dtype),
            vocab_size,
        }
    }

    /// The first rows, without their padding: pitched.
    pub(crate) fn matrix(&self, rows: usize) -> Result<CudaTensor, KernelError> {
        let strides = [padded_width(self.vocab_size), 1];
        self.tensor
            .view(NAME, "logits", &[rows, self.vocab_size], &strides)
    }
}

/// Width of a row with its padding.
pub(crate) fn padded_width(vocab_size: usize) -> usize {
    vocab_size.next_multiple_of(WORD_ELEMENTS)
}

/// Losses of the first rows into `losses` f32 `[rows]`.
pub(crate) fn cross_entropy(
    logits: &LogitRows,
    labels: &CudaTensor,
    losses: &CudaTensor,
) -> Result<(), KernelError> {
    launch(logits, labels, losses, None)
}

/// The same, with gradients of the logits into `dlogits` bf16, which may be the logits themselves.
pub(crate) fn cross_entropy_with_gradients(
    logits: &LogitRows,
    labels: &CudaTensor,
    losses: &CudaTensor,
    dlogits: &LogitRows,
    factors: LossFactors,
) -> Result<(), KernelError> {
    launch(logits, labels, losses, Some((dlogits, factors)))
}

fn launch(
    logits: &LogitRows,
    labels: &CudaTensor,
    losses: &CudaTensor,
    gradient: Option<(&LogitRows, LossFactors)>,
) -> Result<(), KernelError> {
    let is_bf16 = require_float(NAME, "logits' type", &logits.tensor)?;
    require_alignment(NAME, "logits", &logits.tensor)?;
    let rows = labels.num_elements();
    let factors = gradient.map_or(
        LossFactors {
            z_loss: 0.0,
            gradient_scale: 0.0,
        },
        |(_, factors)| factors,
    );
    let stride = padded_width(logits.vocab_size) as u64;
    let words = [
        logits.vocab_size as u64,
        stride,
        stride,
        u64::from(factors.z_loss.to_bits()),
        u64::from(factors.gradient_scale.to_bits()),
    ];
    let mut tensors = vec![&logits.tensor, labels, losses];
    tensors.extend(gradient.map(|(dlogits, _)| &dlogits.tensor));
    let kernel = cross_entropy_kernel(is_bf16, gradient.is_some());
    // SAFETY: reads `rows` padded rows and labels, writes as many losses and, with a gradient, padded rows: the callers in
    // this crate allocate both of that many rows.
    unsafe { kernel.launch([rows, 1, 1], &tensors, &words) }
}

/// The specialisation for the logits' type, with or without gradients.
pub fn cross_entropy_kernel(is_bf16: bool, has_gradient: bool) -> SourceKernel {
    SourceKernel::new(NAME)
        .define("IS_BF16", is_bf16 as u8)
        .define("GRADIENT", has_gradient as u8)
        .threads(512)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_padded_to_words() {
        assert_eq!(padded_width(50280), 50280);
        assert_eq!(padded_width(50257), 50264);
        assert_eq!(padded_width(1), 8);
    }
}
