//! The checks that several launch wrappers make, each with one plain message.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, operand};

/// Refuses a call of a kernel unless a condition holds: `require!(width <= 64, NAME, "width": width, "up to {MOST}")`
/// names the value, and what the kernel takes instead. Returns from the caller.
macro_rules! require {
    ($holds:expr, $kernel:expr, $what:literal: $got:expr, $($supported:tt)+) => {
        if !($holds) {
            let supported = format_args!($($supported)+);
            return Err($crate::KernelError::unsupported($kernel, $what, $got, supported));
        }
    };
}
pub(crate) use require;

/// Refuses a size of zero.
///
/// # Errors
/// [`KernelError::Refused`].
pub fn require_non_empty(kernel: &'static str, what: &'static str, size: usize) -> Result<(), KernelError> {
    if size > 0 {
        Ok(())
    } else {
        Err(KernelError::empty(kernel, what))
    }
}

/// An i32 tensor of one number a token, `[batch, seq_len]`; returned contiguous.
pub(crate) fn require_tokens(
    kernel: &'static str,
    name: &'static str,
    tensor: &CudaTensor,
    shape: [usize; 2],
) -> Result<CudaTensor, KernelError> {
    Ok(operand(kernel, name, tensor, DType::I32, &shape)?.contiguous())
}

/// A float type that the element-wise kernels are compiled for: true for bf16, false for f32.
pub(crate) fn require_float(
    kernel: &'static str,
    what: &'static str,
    tensor: &CudaTensor,
) -> Result<bool, KernelError> {
    match tensor.dtype() {
        DType::BF16 => Ok(true),
        DType::F32 => Ok(false),
        other => Err(KernelError::unsupported(kernel, what, other.name(), "bf16, f32")),
    }
}

/// A tensor read as rows of `width` elements: how many rows, and how far apart. Takes any number of leading dimensions
/// as long as one stride reaches from each row to the next; else the caller copies first.
pub fn uniform_rows(shape: &[usize], strides: &[usize]) -> Option<(usize, usize)> {
    let (&width, outer) = shape.split_last()?;
    if width > 1 && strides[shape.len() - 1] != 1 {
        return None;
    }
    let rows = outer.iter().product();
    // The innermost dimension that has neighbours sets the stride; each outer one must continue it.
    let mut row_stride = None;
    let mut next = 0;
    for (&size, &stride) in outer.iter().zip(strides).rev() {
        if size == 1 {
            continue;
        }
        match row_stride {
            None if stride >= width => row_stride = Some(stride),
            Some(_) if stride == next => {}
            _ => return None,
        }
        next = stride * size;
    }
    Some((rows, row_stride.unwrap_or(width)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_pitched_and_sliced_tensors() {
        assert_eq!(uniform_rows(&[2, 3, 5], &[15, 5, 1]), Some((6, 5)));
        assert_eq!(uniform_rows(&[2, 3, 5], &[24, 8, 1]), Some((6, 8)), "pitched rows");
        assert_eq!(uniform_rows(&[2, 3, 5], &[64, 8, 1]), None, "a gap between batches");
        assert_eq!(uniform_rows(&[2, 3, 5], &[0, 8, 1]), None, "expanded batch");
        assert_eq!(uniform_rows(&[3, 5], &[0, 1]), None, "expanded rows");
        assert_eq!(uniform_rows(&[5, 3], &[1, 5]), None, "transposed");
        assert_eq!(uniform_rows(&[1, 1, 5], &[7, 9, 1]), Some((1, 5)));
        assert_eq!(uniform_rows(&[4, 1, 5], &[8, 3, 1]), Some((4, 8)));
        assert_eq!(uniform_rows(&[5], &[1]), Some((1, 5)));
        assert_eq!(uniform_rows(&[], &[]), None);
    }

    #[test]
    fn nothing_to_compute_is_said_plainly() {
        let error = require_non_empty("k", "seq_len", 0).expect_err("zero").to_string();
        assert!(error.starts_with("k: seq_len is 0"), "{error}");
        assert!(require_non_empty("k", "seq_len", 1).is_ok());
    }
}
