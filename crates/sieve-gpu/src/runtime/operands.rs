//! Declarations of the operands of a launch: dtype, shape and memory layout.
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

/// Checks operands, each declared as `NAME: DTYPE [SHAPE] LAYOUT = TENSOR`, and binds the tensor to a variable NAME,
/// which error messages use too. Without `= TENSOR` the tensor is the variable NAME. The layout is
///
/// - nothing: any strides; binds the tensor, or a contiguous copy where it has gaps;
/// - `aligned`: like nothing, and the tensor must begin at a multiple of 16 bytes;
/// - `contiguous`: tensors with gaps are refused; binds the tensor;
/// - `strided`: any strides; binds the tensor.
///
/// With `only` in front nothing is bound. The macro returns the first [`KernelError`] from the calling function.
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
        $crate::step::require_alignment($kernel, stringify!($name), &tensor)?;
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

    /// The shape of `x` after its declaration, or the error.
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
        // `y` is strided, and `x` with gaps would be copied; the last declaration of `x` is contiguous and refuses `y`.
        let gaps = text(gpu.strided(&[3, 5], &[8, 1], DType::F32), 3);
        assert!(gaps.starts_with("k: x of shape [3, 5] has strides [8, 1]"), "{gaps}");
    }
}
