//! Launch of `kernels/cross_entropy.cu`: losses, and gradients of logits in place.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params, require, require_non_empty};
use crate::step::{WORD_ELEMENTS, require_alignment};

const NAME: &str = "cross_entropy";

/// Logits `[rows, vocab_size]`, padded so that each row begins at a multiple of 16 bytes.
#[derive(Debug, Clone)]
pub struct LogitRows {
    /// The padded logits, `[rows, padded_width]`, contiguous.
    pub(crate) tensor: CudaTensor,
    pub(crate) vocab_size: usize,
}

impl LogitRows {
    /// Allocates bf16 logits of `rows` rows; contents undefined.
    pub fn new(like: &CudaTensor, rows: usize, vocab_size: usize) -> Self {
        let shape = [rows, padded_width(vocab_size)];
        Self { tensor: like.empty_contiguous(&shape, DType::BF16), vocab_size }
    }

    /// The rows of a contiguous bf16 tensor `[rows, vocab_size rounded up to 8]`.
    ///
    /// # Errors
    /// Another type, other shapes, gaps, an empty vocabulary.
    pub fn of(tensor: &CudaTensor, vocab_size: usize) -> Result<Self, KernelError> {
        let [rows, _] = tensor.dims(NAME, "logits")?;
        require_non_empty(NAME, "vocab_size", vocab_size)?;
        tensor.require_shape(NAME, "logits", &[rows, padded_width(vocab_size)])?;
        tensor.require_contiguous(NAME, "logits")?;
        tensor.require_dtype(NAME, "logits", DType::BF16)?;
        Ok(Self { tensor: tensor.clone(), vocab_size })
    }

    /// A view of the first rows without their padding.
    pub fn matrix(&self, rows: usize) -> Result<CudaTensor, KernelError> {
        let strides = [padded_width(self.vocab_size), 1];
        self.tensor.view(NAME, "logits", &[rows, self.vocab_size], &strides)
    }
}

/// Elements of a row with its padding.
pub fn padded_width(vocab_size: usize) -> usize {
    vocab_size.next_multiple_of(WORD_ELEMENTS)
}

/// Writes the losses of the first rows, one for each of `labels` (i32 `[rows]`), to `losses` (f32 `[rows]`).
///
/// # Errors
/// Other types or shapes, more labels than rows.
pub fn cross_entropy(logits: &LogitRows, labels: &CudaTensor, losses: &CudaTensor) -> Result<(), KernelError> {
    let has_gradient = false;
    launch(logits, labels, losses, has_gradient)
}

/// As [`cross_entropy`]; the logits are overwritten by their gradients.
///
/// # Errors
/// The errors of [`cross_entropy`].
pub fn cross_entropy_with_gradients(
    logits: &LogitRows,
    labels: &CudaTensor,
    losses: &CudaTensor,
) -> Result<(), KernelError> {
    let has_gradient = true;
    launch(logits, labels, losses, has_gradient)
}

/// Writes the loss of each label's row of logits; with `has_gradient` the gradients of the logits replace them. Rows
/// past the labels are neither read nor written.
fn launch(logits: &LogitRows, labels: &CudaTensor, losses: &CudaTensor, has_gradient: bool) -> Result<(), KernelError> {
    require_alignment(NAME, "logits", &logits.tensor)?;
    let [rows] = labels.dims(NAME, "labels")?;
    operands!(only NAME, labels: I32[rows] contiguous, losses: F32[rows] contiguous);
    let most = logits.tensor.shape()[0];
    require!(rows <= most, NAME, "logits": format!("{most} rows"), "a row for each of {rows} labels");
    let params = params!(CrossEntropyParams { vocab_size: logits.vocab_size, stride: padded_width(logits.vocab_size) });
    let kernel = cross_entropy_kernel(has_gradient);
    // SAFETY: reads `rows` padded rows and labels, writes as many losses and, with gradients, the padded rows: all
    // checked above.
    unsafe { kernel.launch([rows, 1, 1], &[&logits.tensor, labels, losses], &params) }
}

/// The specialisation that leaves the logits' gradients in their place, or the logits.
fn cross_entropy_kernel(has_gradient: bool) -> SourceKernel {
    SourceKernel::new(NAME).define("GRADIENT", has_gradient as u8).threads(512)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_logits_are_padded_to_16_bytes() {
        assert_eq!(padded_width(50280), 50280);
        assert_eq!(padded_width(50257), 50264);
        assert_eq!(padded_width(1), 8);
    }
}
