//! Launches of `kernels/rms_norm_backward.cu` and `column_sums.cu`.
use crate::cuda_tensor::CudaTensor;
use crate::error::KernelError;
use crate::rms_norm_forward::{NormResidual, warps_per_row, with_epsilon};
use crate::source_kernel::SourceKernel;
use crate::vector_rows::{GradientTarget, VectorRows};
use burn::tensor::DType;

const NAME: &str = "rms_norm_backward";

/// Blocks, and so partial sums: three on each multiprocessor of an H100. A constant, because the order of the sum follows it.
const MAX_BLOCKS: usize = 396;

/// Rows of a block when one warp takes a row.
const BLOCK_WARPS: usize = 4;

/// Gradients of [`rms_norm_forward`](crate::rms_norm_forward()): `(dx, dweight)`, dx bf16 `[.., width]`, dweight f32
/// `[width]`. `x` is what was normalised.
///
/// `d_residual` is the gradient that reaches x beside this norm, as the residual stream's does; it is added to dx.
///
/// # Errors
/// Other types or shapes, no rows.
pub fn rms_norm_backward(
    x: &CudaTensor,
    weight: &CudaTensor,
    epsilon: f32,
    dy: &CudaTensor,
    d_residual: Option<&CudaTensor>,
    dweight: GradientTarget<'_>,
) -> Result<(CudaTensor, CudaTensor), KernelError> {
    let x = VectorRows::of(NAME, "x", x)?;
    let dy = x.like(NAME, "dy", dy)?;
    let weight = x.weight(NAME, weight)?;
    let warps = warps_per_row(NAME, x.width)?;
    let dx = x.tensor.empty_contiguous(x.tensor.shape(), DType::BF16);
    let blocks = num_blocks(x.rows, warps);
    let partials = x.tensor.empty_contiguous(&[blocks, x.width], DType::F32);
    let (mut tensors, mut strides) = (
        vec![&x.tensor, &weight, &dy.tensor],
        [x.stride, dy.stride, 0],
    );
    let d_residual = d_residual
        .map(|tensor| x.like(NAME, "d_residual", tensor))
        .transpose()?;
    let residual = match &d_residual {
        Some(rows) => {
            tensors.push(&rows.tensor);
            strides[2] = rows.stride;
            NormResidual::Added
        }
        None => NormResidual::None,
    };
    tensors.extend([&dx, &partials]);
    let mut words = vec![x.rows as u64, x.width as u64];
    words.extend(strides.map(|stride| stride as u64));
    // SAFETY: reads rows of `width` columns, writes every element of dx and of the blocks' partial sums.
    unsafe {
        rms_norm_backward_kernel(residual, warps).launch(
            [blocks, 1, 1],
            &tensors,
            &with_epsilon(&words, epsilon),
        )
    }?;
    let dweight = dweight.sum(NAME, &partials, 0, &[x.width])?;
    Ok((dx, dweight))
}

/// The specialisation with or without a residual gradient, for rows that so many warps share.
pub fn rms_norm_backward_kernel(residual: NormResidual, warps_per_row: usize) -> SourceKernel {
    SourceKernel::new(NAME)
        .define("HAS_RESIDUAL", (residual == NormResidual::Added) as u8)
        .define("WARPS_PER_ROW", warps_per_row)
        .threads(BLOCK_WARPS * 32)
}

fn num_blocks(rows: usize, warps_per_row: usize) -> usize {
    rows.div_ceil(BLOCK_WARPS / warps_per_row).min(MAX_BLOCKS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_rows_take_few_blocks() {
        assert_eq!(num_blocks(1, 1), 1);
        assert_eq!(num_blocks(9, 1), 3);
        assert_eq!(num_blocks(9, 4), 9);
        assert_eq!(num_blocks(1 << 20, 1), MAX_BLOCKS);
    }
}
