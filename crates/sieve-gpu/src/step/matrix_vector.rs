//! Launch of `kernels/matrix_vector.cu`: the GEMV of decoding, with norm, residual or SwiGLU.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, Hardware, SourceKernel, params, require};
use crate::step::VectorRows;
use crate::step::swiglu_forward::{as_rows, with_width};

const NAME: &str = "matrix_vector";

/// Most rows of a call; for more rows a GEMM is faster.
const MAX_ROWS: usize = 16;

/// Warps of a thread block.
const NUM_WARPS: usize = 8;

/// Rows of w of a tile.
const TILE: usize = 16;

/// Bytes of a row of w or x in a stage of a warp's ring.
const STAGE_BYTES: usize = 128;

/// Static shared memory of a block: the warps' sums of squares of each row.
const STATIC_BYTES: usize = MAX_ROWS * NUM_WARPS * size_of::<f32>();

/// The rows by which a weight matrix is multiplied, up to [`max_vectors`].
#[derive(Debug, Clone, Copy)]
pub enum Vectors<'a> {
    /// bf16 rows `[.., k]`, multiplied without a norm.
    Plain(&'a CudaTensor),
    /// The RMSNorm of bf16 `[.., k]`, with its weight, bf16 `[k]`, and epsilon.
    Normed(&'a CudaTensor, &'a CudaTensor, f32),
}

impl Vectors<'_> {
    fn x(&self) -> &CudaTensor {
        let (Self::Plain(x) | Self::Normed(x, ..)) = self;
        x
    }
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

/// Most rows like those of `input` that [`matrix_vector`] takes: 16, or fewer where their norms do not fit the shared
/// memory of a thread block beside the weights.
pub fn max_vectors(input: Vectors<'_>) -> usize {
    let (x, is_normed) = (input.x(), matches!(input, Vectors::Normed(..)));
    let k = x.shape().last().copied().unwrap_or(0);
    let fits = |rows: &usize| Ring::of(is_normed, [*rows, k], usize::MAX, &x.hardware()).is_some();
    (1..=MAX_ROWS).rev().find(fits).unwrap_or(0)
}

/// `input wᵀ` with the epilogue `finish`. `w` is bf16 `[n, k]`, for SwiGLU `[2 * n, k]`; returns bf16 `[.., n]`. Sums
/// are f32, and a residual is added to them before the rounding. The norm is rounded to bf16 like the output of its own
/// kernel; so are gates and ups.
///
/// # Errors
/// Other types or shapes, more than [`max_vectors`] rows, or a `k` that is not a multiple of 8.
pub fn matrix_vector(input: Vectors<'_>, w: &CudaTensor, finish: Epilogue<'_>) -> Result<CudaTensor, KernelError> {
    let [n, k] = w.dims(NAME, "w")?;
    let (is_normed, epsilon) = match input {
        Vectors::Plain(_) => (false, 0.0),
        Vectors::Normed(_, _, epsilon) => (true, epsilon),
    };
    let (n, residual) = match finish {
        Epilogue::Stored => (n, None),
        Epilogue::Added(residual) => (n, Some(residual)),
        Epilogue::SwiGlu if n.is_multiple_of(2) => (n / 2, None),
        Epilogue::SwiGlu => return Err(KernelError::unsupported(NAME, "rows of w", n, "gates and as many ups")),
    };
    let x = VectorRows::of(NAME, "x", input.x())?;
    let w = VectorRows::of(NAME, "w", w)?;
    require!(x.width == k, NAME, "width of x": x.width, "w's {k}");
    let hardware = x.tensor.hardware();
    let most = max_vectors(input);
    require!(x.rows <= most, NAME, "number of rows": x.rows, "up to {most}");
    let norm = match input {
        Vectors::Normed(_, norm, _) => Some(x.weight(NAME, norm)?),
        _ => None,
    };
    let shape = with_width(&x.tensor, n);
    if let Some(residual) = residual {
        residual.require_dtype(NAME, "residual", DType::BF16)?;
        residual.require_shape(NAME, "residual", &shape)?;
    }
    let residual = residual.map(as_rows);
    let y = x.tensor.empty_contiguous(&shape, DType::BF16);
    let params = params!(MatrixVectorParams {
        rows: x.rows,
        n,
        k,
        x_stride: x.stride,
        w_stride: w.stride,
        residual_stride: residual.as_ref().map_or(0, |(_, _, stride)| *stride),
        epsilon,
    });
    let form = Form::of(finish);
    let tiles = n.div_ceil(form.outputs());
    let blocks = tiles.min(hardware.num_multiprocessors);
    let work = tiles.div_ceil(blocks) * k.div_ceil(NUM_WARPS * STAGE_BYTES / DType::BF16.size());
    let Some(ring) = Ring::of(is_normed, [x.rows, k], work, &hardware) else {
        unreachable!("so many rows fit");
    };
    let kernel = matrix_vector_kernel(is_normed, form, ring.stages).shared_bytes(ring.shared_bytes);
    let added = residual.as_ref().map_or(&x.tensor, |(residual, ..)| residual);
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
    /// Elements of a row of y that a tile gives: a gate and an up are two rows of w.
    fn outputs(self) -> usize {
        match self {
            Self::SwiGlu => TILE / 2,
            _ => TILE,
        }
    }

    fn of(finish: Epilogue<'_>) -> Self {
        match finish {
            Epilogue::Stored => Self::Stored,
            Epilogue::Added(_) => Self::Added,
            Epilogue::SwiGlu => Self::SwiGlu,
        }
    }
}

/// The rings of weights of a block's warps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ring {
    /// Stages of a warp's ring.
    stages: usize,
    /// Shared memory of a block: rings, sums of the warps, and the norms of the rows of x.
    shared_bytes: usize,
}

impl Ring {
    /// The longest ring with which two blocks fit a multiprocessor where the next kernel can start early, so that its
    /// weights are on their way while this one ends, but not longer than the `work` of a warp, in stages. `None` where
    /// not even two stages fit beside `rows` rows.
    fn of(is_normed: bool, [rows, k]: [usize; 2], work: usize, hardware: &Hardware) -> Option<Self> {
        let (chunks, element_bytes) = (k.div_ceil(8), DType::BF16.size());
        let sums = NUM_WARPS * rows.next_multiple_of(8) * TILE * size_of::<f32>();
        // The kernel's rows of norms lie 64 bytes more than whole stages apart.
        let (norms, slot_rows) = if is_normed {
            (rows * (chunks.next_multiple_of(8) + 4) * 8 * element_bytes, TILE)
        } else {
            (0, TILE + rows)
        };
        let ring = |stages: usize| Self {
            stages,
            shared_bytes: NUM_WARPS * stages * slot_rows * STAGE_BYTES + sums + norms,
        };
        let most = hardware.max_shared_bytes - STATIC_BYTES;
        let shared = if hardware.compute_capability >= (9, 0) {
            most / 2
        } else {
            most
        };
        let longest = |stages: &[usize], limit| {
            let mut rings = stages.iter().filter(|n| **n <= work.max(3)).map(|n| ring(*n));
            rings.find(|ring| ring.shared_bytes <= limit)
        };
        longest(&[6, 4, 3], shared).or_else(|| longest(&[3, 2], most))
    }
}

/// The specialisation for an input with or without a norm, an epilogue, and the stages of a warp's ring.
pub(crate) fn matrix_vector_kernel(is_normed: bool, output: Form, stages: usize) -> SourceKernel {
    SourceKernel::new(NAME)
        .define("INPUT", u8::from(is_normed))
        .define("OUTPUT", u8::from(matches!(output, Form::SwiGlu)))
        .define("RESIDUAL", u8::from(matches!(output, Form::Added)))
        .define("STAGES", stages)
        .threads(NUM_WARPS * 32)
        .starts_early()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_blocks_fit_a_multiprocessor_that_starts_kernels_early() {
        let ring = |is_normed, rows, k| Ring::of(is_normed, [rows, k], 12, &Hardware::HOPPER);
        let stages = |is_normed, rows, k| ring(is_normed, rows, k).map(|ring| ring.stages);
        assert_eq!(
            [1, 2, 4, 8, 16].map(|rows| stages(true, rows, 2048)),
            [6, 6, 4, 4, 3].map(Some)
        );
        assert_eq!(
            [1, 2, 4, 8, 16].map(|rows| stages(false, rows, 6144)),
            [6, 6, 4, 4, 3].map(Some)
        );
        // Sixteen rows: the product of gates and ups beside the one after it. A block of each has one KiB more.
        let both =
            [(true, 2048), (false, 6144)].map(|(is_normed, k)| ring(is_normed, 16, k).map_or(0, |r| r.shared_bytes));
        assert!(
            both.iter().sum::<usize>() + 2048 + STATIC_BYTES <= 228 << 10,
            "{both:?}"
        );
        // A product of 2048 x 2048 leaves room for a block of attention beside it.
        let short = Ring::of(false, [1, 2048], 4, &Hardware::HOPPER);
        assert_eq!(short.map(|ring| ring.stages), Some(4));
        // Norms that do not fit are another kernel's.
        let small = Hardware {
            max_shared_bytes: 99 << 10,
            ..Hardware::AMPERE
        };
        assert_eq!(Ring::of(true, [1, 2048], 12, &small).map(|ring| ring.stages), Some(4));
        assert_eq!(Ring::of(true, [16, 2048], 12, &small), None);
        assert_eq!(Ring::of(false, [16, 6144], 12, &small).map(|ring| ring.stages), Some(2));
    }
}
