//! Launch of `kernels/matrix_vector.cu`: the GEMV of decoding, with norm, residual or SwiGLU.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, operand, params, require};
use crate::step::rms_norm_forward::WARP_WIDTH;
use crate::step::{Rows, with_width};

const NAME: &str = "matrix_vector";

/// Most rows of a call; for more rows a GEMM is faster.
pub const MAX_VECTORS: usize = 4;

/// Rows of w that a warp multiplies at once.
const TILE: usize = 8;

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
    /// A residual, bf16 `[.., n]`, is added to the f32 sum.
    Added(&'a CudaTensor),
    /// A residual, bf16 `[.., n]`, is added to the product, after this is rounded to bf16.
    AddedToRounded(&'a CudaTensor),
    /// SwiGLU, where the first half of the rows of `w` gives gates.
    SwiGlu,
}

/// `input wᵀ` with the epilogue `finish`. `w` is bf16 `[n, k]`, for SwiGLU `[2 * n, k]`; returns bf16 `[.., n]`. Sums
/// are f32, with the bits of a GEMM that does not split k. The norm is rounded to bf16 like the output of its own
/// kernel, whose bits it has; so are gates and ups.
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
        Epilogue::Added(residual) | Epilogue::AddedToRounded(residual) => (n, Some(residual)),
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
    let kernel = matrix_vector_kernel(Form { is_normed, finish: Finish::of(finish), rows: x.rows, n, k });
    let blocks = n.div_ceil(TILE * num_warps(n)).min(BLOCKS * x.tensor.hardware().num_multiprocessors);
    let added = residual.as_ref().map_or(&x.tensor, |residual| &residual.tensor);
    let tensors = [&x.tensor, &w.tensor, norm.as_ref().unwrap_or(&x.tensor), added, &y];
    // SAFETY: reads rows of `k` columns of x, w and the norm, and of `n` columns of the residual, and writes every
    // element of y; sizes checked above. Without a norm or residual, x is passed in its place and not read as one.
    unsafe { kernel.launch([blocks, 1, 1], &tensors, &params) }?;
    Ok(y)
}

/// What a specialisation does with the products: its epilogue.
#[derive(Clone, Copy)]
enum Finish {
    Stored,
    Added,
    AddedToRounded,
    SwiGlu,
}

impl Finish {
    fn of(finish: Epilogue<'_>) -> Self {
        match finish {
            Epilogue::Stored => Self::Stored,
            Epilogue::Added(_) => Self::Added,
            Epilogue::AddedToRounded(_) => Self::AddedToRounded,
            Epilogue::SwiGlu => Self::SwiGlu,
        }
    }
}

/// What decides a call's specialisation and shared memory: whether x is normed (1 or 0), the epilogue, and its sizes.
struct Form {
    is_normed: u8,
    finish: Finish,
    rows: usize,
    n: usize,
    k: usize,
}

fn matrix_vector_kernel(form: Form) -> SourceKernel {
    let Form { is_normed, finish, rows, n, k } = form;
    let is_gated = matches!(finish, Finish::SwiGlu);
    let residual = match finish {
        Finish::Stored | Finish::SwiGlu => 0,
        Finish::Added => 1,
        Finish::AddedToRounded => 2,
    };
    SourceKernel::new(NAME)
        .define("INPUT", is_normed)
        .define("OUTPUT", u8::from(is_gated))
        .define("RESIDUAL", residual)
        .define("X_ROWS", held_rows(rows))
        .define("NUM_WARPS", num_warps(n))
        .define("NORM_WARPS", if is_normed == 1 && k > WARP_WIDTH { 4 } else { 1 })
        .threads(num_warps(n) * 32)
        .shared_bytes(held_rows(rows) * row_bytes(k, is_gated))
        .starts_early()
}

/// Rows of x for which the kernel is compiled, where a call has `rows`.
fn held_rows(rows: usize) -> usize {
    rows.next_power_of_two()
}

/// Shared memory of a row of x in bytes: whole rounds of the steps that are on their way, and 16 columns of padding.
fn row_bytes(k: usize, is_gated: bool) -> usize {
    let round = if is_gated { 24 } else { 48 } * 16;
    (k.next_multiple_of(round) + 16) * DType::BF16.size()
}

/// Warps of a thread block: few, since blocks of few rows are shared out evenly, unless there are many rows.
fn num_warps(n: usize) -> usize {
    if n > 1 << 15 { 4 } else { 2 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_held_in_whole_rounds_of_steps() {
        assert_eq!([1, 2, 3, 4].map(held_rows), [1, 2, 4, 4]);
        assert_eq!([8, 768, 2048].map(|k| row_bytes(k, false)), [1568, 1568, 4640]);
        assert_eq!(row_bytes(2048, true), 4640);
        assert_eq!([768, 151_936].map(num_warps), [2, 4]);
    }
}
