//! Launches of `kernels/rms_norm_backward.cu` and `column_sums.cu`: gradients of RMSNorm.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, params, require};
use crate::step::Rows;
use crate::step::column_sums::{MAX_PARTIALS, column_sums};

const NAME: &str = "rms_norm_backward";

/// Warps of a thread block.
const BLOCK_WARPS: usize = 16;

/// Columns that a warp holds of a row.
const WARP_WIDTH: usize = 512;

/// Gradients of [`rms_norm_forward`](crate::step::rms_norm_forward()): `(dx, dweight)`, dx bf16 `[.., width]`, dweight
/// f32 `[width]`. `x` is the input of the forward pass.
///
/// `d_residual` is the gradient of x by the residual stream, which bypasses the norm; it is added to dx.
///
/// # Errors
/// Other types or shapes, no rows.
pub fn rms_norm_backward(
    x: &CudaTensor,
    weight: &CudaTensor,
    epsilon: f32,
    dy: &CudaTensor,
    d_residual: Option<&CudaTensor>,
) -> Result<(CudaTensor, CudaTensor), KernelError> {
    let y = None;
    launch([x, weight, dy], epsilon, d_residual, y)
}

/// [`rms_norm_backward`] with a residual gradient that also recomputes y, the output of
/// [`rms_norm_forward`](crate::step::rms_norm_forward()), bf16 `[.., width]`. Returns `(dx, dweight, y)`.
///
/// # Errors
/// The errors of [`rms_norm_backward`].
pub fn rms_norm_backward_with_output(
    x: &CudaTensor,
    weight: &CudaTensor,
    epsilon: f32,
    dy: &CudaTensor,
    d_residual: &CudaTensor,
) -> Result<(CudaTensor, CudaTensor, CudaTensor), KernelError> {
    let y = x.empty_contiguous(x.shape(), DType::BF16);
    let (dx, dweight) = launch([x, weight, dy], epsilon, Some(d_residual), Some(&y))?;
    Ok((dx, dweight, y))
}

/// Checks the operands and launches the kernel, which also writes the norm's output into `y`, if given.
fn launch(
    [x, weight, dy]: [&CudaTensor; 3],
    epsilon: f32,
    d_residual: Option<&CudaTensor>,
    y: Option<&CudaTensor>,
) -> Result<(CudaTensor, CudaTensor), KernelError> {
    let x = Rows::of_words(NAME, "x", x)?;
    let dy = x.like(NAME, "dy", dy)?;
    let weight = x.weight(NAME, weight)?;
    let warps = warps_per_row(x.width)?;
    let blocks = num_blocks(x.rows, warps);
    let d_residual = d_residual.map(|rows| x.like(NAME, "d_residual", rows)).transpose()?;
    let dx = x.tensor.empty_contiguous(x.tensor.shape(), DType::BF16);
    let partials = x.tensor.empty_contiguous(&[blocks, x.width], DType::F32);
    let params = params!(RmsNormBackwardParams {
        { rows, width }: x,
        x_stride: x.stride,
        dy_stride: dy.stride,
        d_residual_stride: d_residual.as_ref().map_or(0, |rows| rows.stride),
        epsilon,
    });
    let residual = match (&d_residual, y) {
        (None, _) => NormResidual::None,
        (Some(_), None) => NormResidual::Added,
        (Some(_), Some(_)) => NormResidual::AddedWithOutput,
    };
    let mut tensors = vec![&x.tensor, &weight, &dy.tensor];
    tensors.extend(d_residual.as_ref().map(|rows| &rows.tensor));
    tensors.extend([&dx, &partials]);
    tensors.extend(y);
    let kernel = rms_norm_backward_kernel(residual, warps);
    // SAFETY: reads rows of `width` columns, writes every element of dx, of the partial sums and of y; sizes checked
    // above.
    unsafe { kernel.launch([blocks, 1, 1], &tensors, &params) }?;
    let [dweight] = column_sums(&partials, [&[x.width]])?;
    Ok((dx, dweight))
}

/// What a launch computes beside the gradient of the norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NormResidual {
    /// There is no residual stream: dx is the gradient of the norm alone.
    None,
    /// The gradient of the residual stream is added to dx.
    Added,
    /// The gradient of the residual stream is added to dx, and the norm's output is recomputed.
    AddedWithOutput,
}

/// The specialisation for rows that `warps_per_row` warps share.
fn rms_norm_backward_kernel(residual: NormResidual, warps_per_row: usize) -> SourceKernel {
    let kernel = SourceKernel::new(NAME)
        .define("HAS_RESIDUAL", (residual != NormResidual::None) as u8)
        .define("WARPS_PER_ROW", warps_per_row)
        .threads(BLOCK_WARPS * 32);
    match residual {
        NormResidual::AddedWithOutput => kernel.define("HAS_OUTPUT", 1),
        NormResidual::None | NormResidual::Added => kernel,
    }
}

/// Warps that share a row: a power of two.
fn warps_per_row(width: usize) -> Result<usize, KernelError> {
    let warps = width.div_ceil(WARP_WIDTH).next_power_of_two();
    require!(warps <= BLOCK_WARPS, NAME, "width": width, "up to {}", BLOCK_WARPS * WARP_WIDTH);
    Ok(warps)
}

/// Thread blocks of a launch; each writes a partial sum of the weight's gradient.
fn num_blocks(rows: usize, warps_per_row: usize) -> usize {
    rows.div_ceil(BLOCK_WARPS / warps_per_row).min(MAX_PARTIALS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_rows_are_shared_among_warps() {
        let warps = [8, 512, 768, 2048, 4096, 8192].map(|width| warps_per_row(width).ok());
        assert_eq!(warps, [1, 1, 2, 4, 8, 16].map(Some));
        assert!(warps_per_row(8200).is_err());
    }

    #[test]
    fn few_rows_take_few_blocks() {
        assert_eq!(num_blocks(1, 1), 1);
        assert_eq!(num_blocks(17, 1), 2);
        assert_eq!(num_blocks(9, 4), 3);
        assert_eq!(num_blocks(9, 16), 9);
        assert_eq!(num_blocks(1 << 20, 1), MAX_PARTIALS);
    }
}
