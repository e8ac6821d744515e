//! Launch of `kernels/matrix_vector.cu`: the GEMV of decoding, with norm, residual or SwiGLU.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, operand, params, require};
use crate::step::{Rows, with_width};

const NAME: &str = "matrix_vector";

/// Most rows of a call; for more rows a GEMM is faster.
pub const MAX_VECTORS: usize = 4;

/// Warps of a thread block.
const NUM_WARPS: usize = 8;

/// Thread blocks that run on a multiprocessor at a time.
const BLOCKS: usize = 4;

/// The rows by which a weight matrix is multiplied, up to [`MAX_VECTORS`].
#[derive(Debug, Clone, Copy)]
pub enum Vectors<'a> {
    /// bf16 rows `[.., k]`, multiplied without a norm.
    Plain(&'a CudaTensor),
    /// The RMSNorm of bf16 `[.., k]`, with its weight, bf16 `[k]`, and epsilon.
    Normed(&'a CudaTensor, &'a CudaTensor, f32),
}

/// What the kernel does with each product before it stores it.
#[derive(Debug, Clone, Copy)]
pub enum Epilogue<'a> {
    /// The product is stored unchanged.
    Stored,
    /// A residual, bf16 `[.., n]`, is added.
    Added(&'a CudaTensor),
    /// SwiGLU, where the first half of the rows of `w` gives gates.
    SwiGlu,
}

/// `input wᵀ` with the epilogue `finish`. `w` is bf16 `[n, k]`, for SwiGLU `[2 * n, k]`; returns bf16 `[.., n]`. Sums
/// are f32, and a residual is added to them before the rounding. The norm is rounded to bf16 like the output of its own
/// kernel; so are gates and ups.
///
/// # Errors
/// Other types or shapes, more than [`MAX_VECTORS`] rows, a `k` that is not a multiple of 8, or rows of `k` that do not
/// fit the shared memory of a thread block.
pub fn matrix_vector(input: Vectors<'_>, w: &CudaTensor, finish: Epilogue<'_>) -> Result<CudaTensor, KernelError> {
    let [n, k] = w.dims(NAME, "w")?;
    let (is_normed, x, epsilon) = match input {
        Vectors::Plain(x) => (0, x, 0.0),
        Vectors::Normed(x, _, epsilon) => (1, x, epsilon),
    };
    let (n, residual) = match finish {
        Epilogue::Stored => (n, None),
        Epilogue::Added(residual) => (n, Some(residual)),
        Epilogue::SwiGlu if n.is_multiple_of(2) => (n / 2, None),
        Epilogue::SwiGlu => return Err(KernelError::unsupported(NAME, "rows of w", n, "gates and as many ups")),
    };
    let x = Rows::of_words(NAME, "x", x)?;
    let w = Rows::of_words(NAME, "w", w)?;
    require!(x.width == k, NAME, "width of x": x.width, "w's {k}");
    require!(x.rows <= MAX_VECTORS, NAME, "number of rows": x.rows, "up to {MAX_VECTORS}");
    let norm = match input {
        Vectors::Normed(_, norm, _) => Some(x.weight(NAME, norm)?),
        _ => None,
    };
    let shape = with_width(&x.tensor, n);
    if let Some(residual) = residual {
        operand(NAME, "residual", residual, DType::BF16, &shape)?;
    }
    let residual = residual.map(Rows::of);
    let y = x.tensor.empty_contiguous(&shape, DType::BF16);
    let params = params!(MatrixVectorParams {
        rows: x.rows,
        n,
        k,
        x_stride: x.stride,
        w_stride: w.stride,
        residual_stride: residual.as_ref().map_or(0, |residual| residual.stride),
        epsilon,
    });
    let multiprocessors = x.tensor.hardware().num_multiprocessors;
    let warps_per_row = warps_per_row(w.rows, multiprocessors);
    let kernel = matrix_vector_kernel(is_normed, Form::of(finish), x.rows, warps_per_row);
    let kernel = kernel.shared_bytes(held_rows(x.rows) * k * DType::BF16.size());
    let blocks = n.div_ceil(NUM_WARPS / warps_per_row).min(BLOCKS * multiprocessors);
    let added = residual.as_ref().map_or(&x.tensor, |residual| &residual.tensor);
    let tensors = [&x.tensor, &w.tensor, norm.as_ref().unwrap_or(&x.tensor), added, &y];
    // SAFETY: reads rows of `k` columns of x, w and the norm, and of `n` columns of the residual, and writes every
    // element of y; sizes checked above. Without a norm or residual, x is passed in its place and not read as one.
    unsafe { kernel.launch([blocks, 1, 1], &tensors, &params) }?;
    Ok(y)
}

/// What a specialisation does with the products: its epilogue.
#[derive(Clone, Copy)]
pub(crate) enum Form {
    Stored,
    Added,
    SwiGlu,
}

impl Form {
    fn of(finish: Epilogue<'_>) -> Self {
        match finish {
            Epilogue::Stored => Self::Stored,
            Epilogue::Added(_) => Self::Added,
            Epilogue::SwiGlu => Self::SwiGlu,
        }
    }
}

/// The specialisation for an input (0: plain, 1: normed), an epilogue, a number of rows of x, and warps that share a
/// row of w.
fn matrix_vector_kernel(input: u8, output: Form, rows: usize, warps_per_row: usize) -> SourceKernel {
    SourceKernel::new(NAME)
        .define("INPUT", input)
        .define("OUTPUT", u8::from(matches!(output, Form::SwiGlu)))
        .define("RESIDUAL", u8::from(matches!(output, Form::Added)))
        .define("X_ROWS", held_rows(rows))
        .define("WARPS_PER_ROW", warps_per_row)
        .threads(NUM_WARPS * 32)
        .starts_early()
}

/// Rows of x for which the kernel is compiled, where a call has `rows`.
fn held_rows(rows: usize) -> usize {
    rows.next_power_of_two()
}

/// Warps that share a row of w: the fewest with which all warps of the device have work.
fn warps_per_row(n: usize, multiprocessors: usize) -> usize {
    let wanted = BLOCKS * NUM_WARPS * multiprocessors;
    wanted.div_ceil(n.max(1)).next_power_of_two().min(NUM_WARPS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_matrices_share_their_rows_among_warps() {
        let warps = |n| warps_per_row(n, 132);
        assert_eq!([50_304, 12_288, 4224, 4096].map(warps), [1, 1, 1, 2]);
        assert_eq!([2048, 1024, 8].map(warps), [4, 8, 8]);
        assert_eq!([1, 2, 3, 4].map(held_rows), [1, 2, 4, 4]);
    }
}
