//! Launch of `kernels/column_sums.cu`, which adds up the partial sums of weight gradients.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, params};

const NAME: &str = "column_sums";

/// Most partial sums that a backward kernel writes, one for each thread block: two for each multiprocessor of an H100.
/// It is a constant, as the order of the sum depends on it.
pub(crate) const MAX_PARTIALS: usize = 264;

/// Matrix columns that a thread block sums.
const COLUMNS: usize = 32;

/// Sums the rows of `partials`, f32 `[num_partials, width]`, into one or two f32 tensors of these shapes: the first
/// takes the first columns.
pub(crate) fn column_sums<const N: usize>(
    partials: &CudaTensor,
    shapes: [&[usize]; N],
) -> Result<[CudaTensor; N], KernelError> {
    const { assert!(N == 1 || N == 2, "the kernel has two outputs") };
    let [num_partials, width] = partials.dims(NAME, "partials")?;
    let outputs = shapes.map(|shape| partials.empty_contiguous(shape, DType::F32));
    let (split, sizes) = (outputs[0].num_elements(), outputs.iter().map(CudaTensor::num_elements));
    debug_assert_eq!(sizes.sum::<usize>(), width, "the gradients divide the columns");
    let params = params!(ColumnSumsParams { num_partials, width, split });
    // A single output is passed twice; all its columns come before `split`.
    let tensors = [partials, &outputs[0], &outputs[N - 1]];
    let grid = [width.div_ceil(COLUMNS), 1, 1];
    // SAFETY: reads every partial, writes the elements of the outputs, which have `width` together.
    unsafe { COLUMN_SUMS.launch(grid, &tensors, &params) }?;
    Ok(outputs)
}

const COLUMN_SUMS: SourceKernel = SourceKernel::new(NAME).threads(1024);
