//! Launches of `kernels/rms_norm_backward.cu` and `column_sums.cu`.
use crate::error::KernelError;
use crate::runtime::cuda_tensor::CudaTensor;
use crate::runtime::params::params;
use crate::runtime::source_kernel::SourceKernel;
use crate::step::column_sums::column_sums;
use crate::step::rms_norm_forward::NormResidual;
use crate::step::vector_rows::{GradientTarget, VectorRows};
use burn::tensor::DType;

const NAME: &str = "rms_norm_backward";

/// Blocks, and so partial sums: two on each multiprocessor of an H100. A constant, because the order of the sum follows
/// it.
const MAX_BLOCKS: usize = 264;

/// Warps of a block.
const BLOCK_WARPS: usize = 16;

/// Columns that a warp holds of a row.
const WARP_WIDTH: usize = 512;

/// Gradients of [`rms_norm_forward`](crate::step::rms_norm_forward()): `(dx, dweight)`, dx bf16 `[.., width]`, dweight
/// f32 `[width]`. `x` is what was normalised.
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
    let call = Call::of(x, weight, epsilon, dy)?;
    let (dx, partials) = call.outputs();
    match d_residual {
        None => {
            let tensors = [&call.x.tensor, &call.weight, &call.dy.tensor];
            let kernel = rms_norm_backward_kernel(NormResidual::None, call.warps);
            call.launch(kernel, &tensors, [&dx, &partials], None, 0)?;
        }
        Some(d_residual) => {
            let rows = call.x.like(NAME, "d_residual", d_residual)?;
            let tensors = [&call.x.tensor, &call.weight, &call.dy.tensor, &rows.tensor];
            let kernel = rms_norm_backward_kernel(NormResidual::Added, call.warps);
            call.launch(kernel, &tensors, [&dx, &partials], None, rows.stride)?;
        }
    }
    let [dweight] = column_sums(NAME, &partials, [(dweight, &[call.x.width])])?;
    Ok((dx, dweight))
}

/// As [`rms_norm_backward`] with a residual gradient, and computes y, the output of
/// [`rms_norm_forward`](crate::step::rms_norm_forward()), again, bf16 `[.., width]`: `(dx, dweight, y)`.
///
/// # Errors
/// As [`rms_norm_backward`].
pub fn rms_norm_backward_with_output(
    x: &CudaTensor,
    weight: &CudaTensor,
    epsilon: f32,
    dy: &CudaTensor,
    d_residual: &CudaTensor,
    dweight: GradientTarget<'_>,
) -> Result<(CudaTensor, CudaTensor, CudaTensor), KernelError> {
    let call = Call::of(x, weight, epsilon, dy)?;
    let (dx, partials) = call.outputs();
    let y = call.new_rows();
    let rows = call.x.like(NAME, "d_residual", d_residual)?;
    let tensors = [&call.x.tensor, &call.weight, &call.dy.tensor, &rows.tensor];
    let kernel = rms_norm_backward_with_output_kernel(call.warps);
    call.launch(kernel, &tensors, [&dx, &partials], Some(&y), rows.stride)?;
    let [dweight] = column_sums(NAME, &partials, [(dweight, &[call.x.width])])?;
    Ok((dx, dweight, y))
}

/// Checked operands of a call.
struct Call {
    x: VectorRows,
    dy: VectorRows,
    weight: CudaTensor,
    epsilon: f32,
    warps: usize,
    blocks: usize,
}

impl Call {
    fn of(x: &CudaTensor, weight: &CudaTensor, epsilon: f32, dy: &CudaTensor) -> Result<Self, KernelError> {
        let x = VectorRows::of(NAME, "x", x)?;
        let dy = x.like(NAME, "dy", dy)?;
        let weight = x.weight(NAME, weight)?;
        let warps = warps_per_row(x.width)?;
        Ok(Self {
            blocks: num_blocks(x.rows, warps),
            x,
            dy,
            weight,
            epsilon,
            warps,
        })
    }

    fn new_rows(&self) -> CudaTensor {
        let x = &self.x.tensor;
        x.empty_contiguous(x.shape(), DType::BF16)
    }

    /// dx, and the blocks' partial sums of dweight.
    fn outputs(&self) -> (CudaTensor, CudaTensor) {
        let shape = [self.blocks, self.x.width];
        let partials = self.x.tensor.empty_contiguous(&shape, DType::F32);
        (self.new_rows(), partials)
    }

    fn launch(
        &self,
        kernel: SourceKernel,
        inputs: &[&CudaTensor],
        outputs: [&CudaTensor; 2],
        y: Option<&CudaTensor>,
        residual_stride: usize,
    ) -> Result<(), KernelError> {
        let mut tensors = inputs.to_vec();
        tensors.extend(outputs);
        tensors.extend(y);
        let (x, dy) = (&self.x, &self.dy);
        let params = params!(RmsNormBackwardParams {
            rows: x.rows,
            width: x.width,
            x_stride: x.stride,
            dy_stride: dy.stride,
            d_residual_stride: residual_stride,
            epsilon: self.epsilon,
        });
        // SAFETY: reads rows of `width` columns, writes every element of dx, of the blocks' partial sums and of y;
        // sizes were checked when this call was made.
        unsafe { kernel.launch([self.blocks, 1, 1], &tensors, &params) }
    }
}

/// The specialisation with or without a residual gradient, for rows that `warps_per_row` warps share.
pub(crate) fn rms_norm_backward_kernel(residual: NormResidual, warps_per_row: usize) -> SourceKernel {
    SourceKernel::new(NAME)
        .define("HAS_RESIDUAL", (residual == NormResidual::Added) as u8)
        .define("WARPS_PER_ROW", warps_per_row)
        .threads(BLOCK_WARPS * 32)
}

/// The specialisation with a residual gradient and the output.
pub(crate) fn rms_norm_backward_with_output_kernel(warps_per_row: usize) -> SourceKernel {
    rms_norm_backward_kernel(NormResidual::Added, warps_per_row).define("HAS_OUTPUT", 1)
}

/// Warps that share a row: a power of two.
fn warps_per_row(width: usize) -> Result<usize, KernelError> {
    let warps = width.div_ceil(WARP_WIDTH).next_power_of_two();
    if warps <= BLOCK_WARPS {
        return Ok(warps);
    }
    Err(KernelError::Unsupported {
        kernel: NAME,
        what: "width",
        got: width.to_string(),
        supported: format!("up to {}", BLOCK_WARPS * WARP_WIDTH),
    })
}

fn num_blocks(rows: usize, warps_per_row: usize) -> usize {
    rows.div_ceil(BLOCK_WARPS / warps_per_row).min(MAX_BLOCKS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_rows_are_shared() {
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
        assert_eq!(num_blocks(1 << 20, 1), MAX_BLOCKS);
    }
}
