//! The operands of a launch, declared: element type, shape, and how they may lie in memory.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType};

/// Refuses a tensor of another element type or shape.
///
/// # Errors
/// [`KernelError::Refused`].
pub fn operand<'a>(
    kernel: &'static str,
    name: &'static str,
    tensor: &'a CudaTensor,
    dtype: DType,
    shape: &[usize],
) -> Result<&'a CudaTensor, KernelError> {
    tensor.require_dtype(kernel, name, dtype)?;
    tensor.require_shape(kernel, name, shape)?;
    Ok(tensor)
}

/// Checks operands and binds each to its name, which error messages use: `NAME: DTYPE [SHAPE] LAYOUT = TENSOR`. An
/// operand without a tensor is the variable of that name. The layout is
///
/// - nothing: any strides; what is bound is contiguous, a copy where the tensor has gaps;
/// - `aligned`: as without a layout, and begins on a 16-byte word;
/// - `contiguous`: gaps are refused; bound as it is;
/// - `strided`: any strides; bound as it is.
///
/// With `only` in front nothing is bound. Returns from the caller with the first [`KernelError`].
///
/// ```ignore
/// operands!(NAME,
///     logits: BF16[batch, seq_len, num_heads * 3],
///     sums: F32(shape.per_key()) contiguous = &self.sums,
/// );
/// ```
macro_rules! operands {
    (only $kernel:expr, $($name:ident: $dtype:ident $shape:tt $layout:ident $(= $tensor:expr)?),+ $(,)?) => {
        $($crate::runtime::operands::operands!(@ $layout, $kernel, $name, $dtype, $shape $(, $tensor)?);)+
    };
    ($kernel:expr, $($name:ident: $dtype:ident $shape:tt $($layout:ident)? $(= $tensor:expr)?),+ $(,)?) => {
        $(let $name = $crate::runtime::operands::operands!(
            @ $($layout)?, $kernel, $name, $dtype, $shape $(, $tensor)?
        );)+
    };
    (@ $($layout:ident)?, $kernel:expr, $name:ident, $dtype:ident, $shape:tt) => {
        $crate::runtime::operands::operands!(@ $($layout)?, $kernel, $name, $dtype, $shape, $name)
    };
    (@ , $kernel:expr, $name:ident, $dtype:ident, $shape:tt, $tensor:expr) => {
        $crate::runtime::operands::operands!(@ strided, $kernel, $name, $dtype, $shape, $tensor).contiguous()
    };
    (@ aligned, $kernel:expr, $name:ident, $dtype:ident, $shape:tt, $tensor:expr) => {{
        let tensor = $crate::runtime::operands::operands!(@ , $kernel, $name, $dtype, $shape, $tensor);
        $crate::step::vector_rows::require_alignment($kernel, stringify!($name), &tensor)?;
        tensor
    }};
    (@ contiguous, $kernel:expr, $name:ident, $dtype:ident, $shape:tt, $tensor:expr) => {{
        let tensor = $crate::runtime::operands::operands!(@ strided, $kernel, $name, $dtype, $shape, $tensor);
        tensor.require_contiguous($kernel, stringify!($name))?;
        tensor
    }};
    (@ strided, $kernel:expr, $name:ident, $dtype:ident, $shape:tt, $tensor:expr) => {
        $crate::runtime::operands::operand(
            $kernel,
            stringify!($name),
            $tensor,
            $crate::runtime::dtype::DType::$dtype,
            &$shape,
        )?
    };
}
pub(crate) use operands;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Hardware, Recorder};

    /// The shape that was copied to, or the error.
    fn declared(x: &CudaTensor, rows: usize) -> Result<Vec<usize>, KernelError> {
        operands!("k", y: F32[rows, 5] strided = x, x: F32[rows, 5]);
        assert!(x.is_contiguous() && y.shape() == x.shape());
        operands!(only "k", x: F32[rows, 5] contiguous = y);
        Ok(x.shape().to_vec())
    }

    #[test]
    fn operands_are_refused_by_name_with_what_was_expected() {
        let gpu = Recorder::new(Hardware::AMPERE);
        let text =
            |x: CudaTensor, rows| declared(&x, rows).map_or_else(|e| e.to_string(), |shape| format!("{shape:?}"));
        let plain = || gpu.tensor(&[3, 5], DType::F32);
        assert_eq!(text(plain(), 3), "[3, 5]");
        assert!(text(plain(), 2).starts_with("k: y has shape [3, 5], expected [2, 5]"));
        assert!(text(gpu.tensor(&[3, 5], DType::BF16), 3).starts_with("k: y is bf16, expected f32"));
        // Copied where that is declared, refused where it is not.
        let gaps = text(gpu.strided(&[3, 5], &[8, 1], DType::F32), 3);
        assert!(gaps.starts_with("k: x of shape [3, 5] has strides [8, 1]"), "{gaps}");
    }
}
