//! Operands of the element-wise kernels: rows of whole 16-byte words.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, operands, require, require_non_empty};
use crate::step::swiglu_forward::as_rows;

/// bf16 elements of a 16-byte word.
pub(crate) const WORD_ELEMENTS: usize = 8;

/// A bf16 tensor as rows that a kernel reads 16 bytes at a time.
#[derive(Debug, Clone)]
pub(crate) struct VectorRows {
    pub(crate) tensor: CudaTensor,
    pub(crate) rows: usize,
    pub(crate) width: usize,
    pub(crate) stride: usize,
}

impl VectorRows {
    /// The tensor, or a contiguous copy if no single stride leads from each row to the next, or if this stride is not a
    /// multiple of 16 bytes.
    ///
    /// # Errors
    /// A type other than bf16, a width that is not a multiple of 8, no rows, a view that does not begin at a multiple
    /// of 16 bytes.
    pub(crate) fn of(kernel: &'static str, name: &'static str, tensor: &CudaTensor) -> Result<Self, KernelError> {
        tensor.require_dtype(kernel, name, DType::BF16)?;
        let (mut tensor, rows, mut stride) = as_rows(tensor);
        let width = tensor.shape().last().copied().unwrap_or(0);
        require_words(kernel, width)?;
        require_non_empty(kernel, "the number of rows", rows)?;
        if rows > 1 && !stride.is_multiple_of(WORD_ELEMENTS) {
            tensor = tensor.contiguous();
            stride = width;
        }
        require_alignment(kernel, name, &tensor)?;
        Ok(Self { tensor, rows, width, stride })
    }

    /// The rows of another tensor, which must have the same shape.
    pub(crate) fn like(
        &self,
        kernel: &'static str,
        name: &'static str,
        tensor: &CudaTensor,
    ) -> Result<Self, KernelError> {
        tensor.require_shape(kernel, name, self.tensor.shape())?;
        Self::of(kernel, name, tensor)
    }

    /// Checks a bf16 vector of the rows' width and returns it contiguous.
    pub(crate) fn weight(&self, kernel: &'static str, weight: &CudaTensor) -> Result<CudaTensor, KernelError> {
        operands!(kernel, weight: BF16[self.width] aligned);
        Ok(weight)
    }
}

/// Refuses a width of bf16 elements that is not a multiple of 16 bytes.
pub(crate) fn require_words(kernel: &'static str, width: usize) -> Result<(), KernelError> {
    require_non_empty(kernel, "the width", width)?;
    require!(width.is_multiple_of(WORD_ELEMENTS), kernel, "width": width, "multiples of 8");
    Ok(())
}

/// Refuses a view that does not begin at a multiple of 16 bytes.
pub(crate) fn require_alignment(
    kernel: &'static str,
    name: &'static str,
    tensor: &CudaTensor,
) -> Result<(), KernelError> {
    if tensor.offset_bytes().is_multiple_of(16) {
        return Ok(());
    }
    Err(tensor.layout_error(kernel, name, "it must begin on a 16-byte word"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_are_whole_words() {
        assert!(require_words("k", 768).is_ok());
        let error = require_words("k", 100).expect_err("not whole").to_string();
        assert!(error.contains("width 100") && error.contains("multiples of 8"), "{error}");
        assert!(require_words("k", 0).is_err());
    }
}
