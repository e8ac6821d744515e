//! Checks of operands that several launch wrappers share.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType};

/// Returns an error from the calling function unless a condition holds. `require!(width <= 64, NAME, "width": width,
/// "up to {MOST}")` names the refused value and the values that the kernel `NAME` takes.
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
    match size {
        0 => Err(KernelError::empty(kernel, what)),
        _ => Ok(()),
    }
}

/// Refuses dtypes other than bf16 and f32, for which element-wise kernels are compiled; returns true for bf16.
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

/// Number of rows of a tensor, and the stride between rows, if all its dimensions but the last are seen as rows. `None`
/// where no single stride leads from each row to the next: the caller must then copy the tensor.
pub fn uniform_rows(shape: &[usize], strides: &[usize]) -> Option<(usize, usize)> {
    let (&width, outer) = shape.split_last()?;
    if width > 1 && strides[shape.len() - 1] != 1 {
        return None;
    }
    let rows = outer.iter().product();
    // The innermost outer dimension of a size above 1 sets the stride; the strides of the others must continue it.
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
    fn rows_have_one_stride_between_all_neighbours() {
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
    fn a_size_of_0_is_refused_by_name() {
        let error = require_non_empty("k", "seq_len", 0).expect_err("zero").to_string();
        assert!(error.starts_with("k: seq_len is 0"), "{error}");
        assert!(require_non_empty("k", "seq_len", 1).is_ok());
    }
}
