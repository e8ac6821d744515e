//! Launch of `kernels/rms_norm_forward.cu`: RMSNorm.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, params, require};
use crate::step::Rows;

const NAME: &str = "rms_norm_forward";

/// Columns of a row that a warp holds in registers, see `common/norm_row.cuh`.
const WARP_WIDTH: usize = 2048;

/// Most columns of a row that the kernel takes.
const MAX_WIDTH: usize = 4 * WARP_WIDTH;

/// RMSNorm of each row: `x / sqrt(mean(x²) + epsilon) * weight`. `x` is bf16 `[.., width]`, `weight` bf16 `[width]`,
/// and width a multiple of 8 up to 8192. Returns bf16 `[.., width]`.
///
/// # Errors
/// Other types or shapes, no rows.
pub fn rms_norm_forward(x: &CudaTensor, weight: &CudaTensor, epsilon: f32) -> Result<CudaTensor, KernelError> {
    let x = Rows::of_words(NAME, "x", x)?;
    let weight = x.weight(NAME, weight)?;
    let warps = warps_per_row(NAME, x.width)?;
    let y = x.tensor.empty_contiguous(x.tensor.shape(), DType::BF16);
    let params = params!(RmsNormForwardParams {
        { rows, width }: x,
        x_stride: x.stride,
        epsilon,
    });
    let kernel = rms_norm_forward_kernel(warps);
    // SAFETY: reads rows of `width` columns and the weight, writes every element of y; sizes checked above.
    unsafe { kernel.launch(grid(x.rows, warps), &[&x.tensor, &weight, &y], &params) }?;
    Ok(y)
}

/// The specialisation for rows that `warps_per_row` warps share.
fn rms_norm_forward_kernel(warps_per_row: usize) -> SourceKernel {
    SourceKernel::new(NAME).define("WARPS_PER_ROW", warps_per_row).threads(256)
}

/// Number of warps that share a row of this width.
pub(crate) fn warps_per_row(kernel: &'static str, width: usize) -> Result<usize, KernelError> {
    if width <= WARP_WIDTH {
        return Ok(1);
    }
    require!(width <= MAX_WIDTH, kernel, "width": width, "up to {MAX_WIDTH}");
    Ok(4)
}

/// The grid of a launch; a thread block has eight warps.
fn grid(rows: usize, warps_per_row: usize) -> [usize; 3] {
    [rows.div_ceil(8 / warps_per_row), 1, 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_rows_are_shared_among_warps() {
        assert_eq!(warps_per_row("k", 8), Ok(1));
        assert_eq!(warps_per_row("k", 2048), Ok(1));
        assert_eq!(warps_per_row("k", 2056), Ok(4));
        assert_eq!(warps_per_row("k", 8192), Ok(4));
        assert!(warps_per_row("k", 8200).is_err());
        assert_eq!(grid(9, 1), [2, 1, 1]);
        assert_eq!(grid(9, 4), [5, 1, 1]);
    }
}
