//! Operands of the element-wise step kernels: rows of whole 16-byte words.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, operands, require, require_non_empty};
use crate::step::swiglu_forward::as_rows;

/// bf16 of a 16-byte word.
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
    /// The tensor, or a contiguous copy where its rows have no one stride, or one that is not a multiple of 16 bytes.
    ///
    /// # Errors
    /// A type other than bf16, a width that 8 does not divide, no rows, a view that begins between two 16-byte words.
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
        Ok(Self {
            tensor,
            rows,
            width,
            stride,
        })
    }

    /// A tensor of as many rows of the same width.
    pub(crate) fn like(
        &self,
        kernel: &'static str,
        name: &'static str,
        tensor: &CudaTensor,
    ) -> Result<Self, KernelError> {
        tensor.require_shape(kernel, name, self.tensor.shape())?;
        Self::of(kernel, name, tensor)
    }

    /// A contiguous bf16 vector of the rows' width.
    pub(crate) fn weight(&self, kernel: &'static str, weight: &CudaTensor) -> Result<CudaTensor, KernelError> {
        operands!(kernel, weight: BF16[self.width] aligned);
        Ok(weight)
    }
}

/// Refuses a width that is not made of whole 16-byte words of bf16.
pub(crate) fn require_words(kernel: &'static str, width: usize) -> Result<(), KernelError> {
    require_non_empty(kernel, "the width", width)?;
    require!(width.is_multiple_of(WORD_ELEMENTS), kernel, "width": width, "multiples of 8");
    Ok(())
}

/// Refuses a view that begins between two 16-byte words.
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
        assert!(
            error.contains("width 100") && error.contains("multiples of 8"),
            "{error}"
        );
        assert!(require_words("k", 0).is_err());
    }
}
