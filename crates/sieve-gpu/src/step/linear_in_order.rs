//! Launch of `kernels/linear_in_order.cu`: rows times a weight matrix in one order of sums.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params, require_non_empty};
use crate::step::with_width;

const NAME: &str = "linear_in_order";
const THREADS: usize = 512;

/// Rows of a thread block, which share its reads of the weights.
const ROWS: usize = 4;

/// `x wᵀ` of bf16 `x`, `[.., k]`, and `w`, bf16 `[n, k]`; returns bf16 `[.., n]`. A row's sums have an order that
/// depends on k alone, so that its bits are those that it has among any number of rows.
///
/// # Errors
/// Other types or shapes; rows that do not fit the shared memory of a thread block.
pub fn linear_in_order(x: &CudaTensor, w: &CudaTensor) -> Result<CudaTensor, KernelError> {
    let [n, k] = w.dims(NAME, "w")?;
    let shape = with_width(x, k);
    operands!(NAME,
        x: BF16 shape,
        w: BF16[n, k],
    );
    require_non_empty(NAME, "the number of weights", n * k)?;
    let rows = x.num_elements() / k;
    require_non_empty(NAME, "the number of rows", rows)?;
    let y = x.empty_contiguous(&with_width(&x, n), DType::BF16);
    let fits = row_bytes(k) * ROWS <= x.hardware().max_shared_bytes;
    let held = if rows > 1 && fits { ROWS } else { 1 };
    let params = params!(LinearInOrderParams { rows, n, k });
    // SAFETY: sizes and types checked above; writes every element of y.
    unsafe { linear_in_order_kernel(held, k).launch([rows.div_ceil(held), 1, 1], &[&x, &w, &y], &params) }?;
    Ok(y)
}

/// Bytes of a row of `k` columns in shared memory.
fn row_bytes(k: usize) -> usize {
    k.div_ceil(8) * 16
}

/// The specialisation for thread blocks of so many rows of `k` columns.
fn linear_in_order_kernel(rows: usize, k: usize) -> SourceKernel {
    SourceKernel::new(NAME)
        .define("X_ROWS", rows)
        .define("IS_EVEN", u8::from(k.is_multiple_of(8)))
        .threads(THREADS)
        .shared_bytes(rows * row_bytes(k))
        .starts_early()
}
