//! Launch of `kernels/column_sums.cu`: the second half of every weight gradient that blocks sum up in parts.
use crate::cuda_tensor::CudaTensor;
use crate::error::KernelError;
use crate::source_kernel::SourceKernel;

const NAME: &str = "column_sums";

/// Columns of a block.
const COLUMNS: usize = 32;

/// Sums columns `offset ..` of `partials` f32 `[num_partials, stride]` into the contiguous f32 `out`, adding to what is
/// there or overwriting it.
pub(crate) fn column_sums(
    partials: &CudaTensor,
    offset: usize,
    out: &CudaTensor,
    accumulate: bool,
) -> Result<(), KernelError> {
    let [num_partials, stride] = partials.dims(NAME, "partials")?;
    let width = out.num_elements();
    debug_assert!(offset + width <= stride, "the columns are there");
    let words = [num_partials, stride, offset, width, usize::from(accumulate)];
    let grid = [width.div_ceil(COLUMNS), 1, 1];
    // SAFETY: reads `width` columns of every partial, writes the `width` elements of out.
    unsafe { column_sums_kernel().launch(grid, &[partials, out], &words.map(|word| word as u64)) }
}

/// The kernel.
pub fn column_sums_kernel() -> SourceKernel {
    SourceKernel::new(NAME).threads(256)
}
