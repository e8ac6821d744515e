//! Operands of the element-wise kernels, seen as rows.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, operands, require, require_non_empty, uniform_rows};

/// bf16 elements of a 16-byte word.
pub(crate) const WORD_ELEMENTS: usize = 8;

/// A tensor as rows of its last dimension, with the same stride between any two neighbours.
#[derive(Debug, Clone)]
pub struct Rows {
    /// The tensor, or a contiguous copy if no single stride leads from each row to the next.
    pub tensor: CudaTensor,
    /// Number of rows.
    pub rows: usize,
    /// Columns of a row.
    pub width: usize,
    /// Elements from one row to the next.
    pub stride: usize,
}

impl Rows {
    /// The rows of a tensor.
    pub fn of(tensor: &CudaTensor) -> Self {
        let width = tensor.shape().last().copied().unwrap_or(0);
        match uniform_rows(tensor.shape(), tensor.strides()) {
            Some((rows, stride)) => Self { tensor: tensor.clone(), rows, width, stride },
            None => {
                let rows = tensor.num_elements() / width.max(1);
                Self { tensor: tensor.contiguous(), rows, width, stride: width }
            }
        }
    }

    /// The rows of a bf16 tensor that a kernel reads 16 bytes at a time: a contiguous copy also if the stride is not a
    /// multiple of 16 bytes.
    ///
    /// # Errors
    /// A type other than bf16, a width that is not a multiple of 8, no rows, a view that does not begin at a multiple
    /// of 16 bytes.
    pub(crate) fn of_words(kernel: &'static str, name: &'static str, tensor: &CudaTensor) -> Result<Self, KernelError> {
        tensor.require_dtype(kernel, name, DType::BF16)?;
        let mut rows = Self::of(tensor);
        require_words(kernel, rows.width)?;
        require_non_empty(kernel, "the number of rows", rows.rows)?;
        if rows.rows > 1 && !rows.stride.is_multiple_of(WORD_ELEMENTS) {
            rows = Self { tensor: rows.tensor.contiguous(), stride: rows.width, ..rows };
        }
        require_alignment(kernel, name, &rows.tensor)?;
        Ok(rows)
    }

    /// The rows of another tensor, which must have the same shape.
    pub(crate) fn like(
        &self,
        kernel: &'static str,
        name: &'static str,
        tensor: &CudaTensor,
    ) -> Result<Self, KernelError> {
        tensor.require_shape(kernel, name, self.tensor.shape())?;
        Self::of_words(kernel, name, tensor)
    }

    /// Checks a bf16 vector of the rows' width and returns it contiguous.
    pub(crate) fn weight(&self, kernel: &'static str, weight: &CudaTensor) -> Result<CudaTensor, KernelError> {
        operands!(kernel, weight: BF16[self.width] aligned);
        Ok(weight)
    }
}

/// The shape of a tensor with another width.
pub(crate) fn with_width(tensor: &CudaTensor, width: usize) -> Vec<usize> {
    let mut shape = tensor.shape().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = width;
    }
    shape
}

/// Elements of a 16-byte access if every size allows it, else 1.
pub(crate) fn vector_width(dtype: DType, sizes: &[usize]) -> usize {
    let widest = 16 / dtype.size();
    if sizes.iter().all(|size| size.is_multiple_of(widest)) { widest } else { 1 }
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
    fn widths_are_multiples_of_16_bytes() {
        assert!(require_words("k", 768).is_ok());
        let error = require_words("k", 100).expect_err("not whole").to_string();
        assert!(error.contains("width 100") && error.contains("multiples of 8"), "{error}");
        assert!(require_words("k", 0).is_err());
    }
}
