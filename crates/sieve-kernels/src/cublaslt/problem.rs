//! The sizes of a row-major GEMM, and its matrices in cuBLASLt's column-major terms.
use sieve_core::GemmKind;
use sieve_gpu::KernelError;
use sieve_gpu::step::Fp8Format;
use std::fmt;

/// Name of the library in error messages.
pub(super) const NAME: &str = "cublaslt";

/// Element types of the GEMM's operands x and w.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum OperandTypes {
    Bf16,
    /// fp8 values with one scale for each tensor; only with [`GemmKind::Nt`].
    Fp8 {
        x: Fp8Format,
        w: Fp8Format,
    },
}

impl OperandTypes {
    /// Whether tensor cores may accumulate in less precision than f32 (cuBLASLt's fast accumulation of fp8), which is
    /// faster. Forward passes, where x and w are both e4m3, allow it; gradients, which are e5m2, do not.
    pub(super) fn sum_fast(self) -> bool {
        let e4m3 = Fp8Format::E4m3;
        self == Self::Fp8 { x: e4m3, w: e4m3 }
    }
}

/// What the choice of an algorithm depends on, besides the alignment of the addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Problem {
    pub(super) kind: GemmKind,
    pub(super) operands: OperandTypes,
    /// Sizes of the GEMM, `[m, n, k]`.
    pub(super) sizes: [usize; 3],
    /// Elements from one row of x to the next; the strides of w, C and D follow.
    pub(super) x_stride: usize,
    pub(super) w_stride: usize,
    pub(super) c_stride: usize,
    pub(super) d_stride: usize,
    /// Whether the output is f32; otherwise it is bf16.
    pub(super) is_f32: bool,
}

/// The part of the row-major output that one block of threads computes: `C176x128` is 176 columns of 128 rows. Clusters
/// of two blocks of threads share operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tile {
    C128x128,
    C128x160,
    C176x128,
    C256x128,
}

impl Tile {
    /// cuBLASLt's ids of the tile (`cublasLtMatmulTile_t`) and of the cluster (`cublasLtClusterShape_t`: 3 is 2 x 1
    /// blocks, 5 is 1 x 2).
    pub(super) fn ids(self) -> (u32, u16) {
        match self {
            Self::C128x128 => (20, 3),
            Self::C128x160 => (29, 3),
            Self::C176x128 => (201, 5),
            Self::C256x128 => (24, 5),
        }
    }
}

/// A matrix in cuBLASLt's terms: column-major, so that our rows are its columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) rows: u64,
    pub(super) cols: u64,
    pub(super) leading: i64,
    pub(super) is_transposed: bool,
}

impl Problem {
    /// A, B, C and D of the column-major GEMM `Dᵀ = op(A) op(B) + beta Cᵀ`: A is w and B is x.
    pub(super) fn layouts(&self) -> [Layout; 4] {
        let [m, n, k] = self.sizes.map(|size| size as u64);
        let layout =
            |rows, cols, leading: usize, is_transposed| Layout { rows, cols, leading: leading as i64, is_transposed };
        let (a, b) = match self.kind {
            GemmKind::Nt => (layout(k, n, self.w_stride, true), layout(k, m, self.x_stride, false)),
            GemmKind::Nn => (layout(n, k, self.w_stride, false), layout(k, m, self.x_stride, false)),
            GemmKind::Tn => (layout(n, k, self.w_stride, false), layout(m, k, self.x_stride, true)),
        };
        let c = layout(n, m, self.c_stride, false);
        let d = layout(n, m, self.d_stride, false);
        [a, b, c, d]
    }

    /// Whether an element's sum over k must be added in one order, whatever the number of rows of x: in the forward
    /// pass, so that a token has the same bits in a whole row and in a step (kernels/notes/one-order-of-sums.md).
    pub(super) fn wants_one_order(&self) -> bool {
        self.kind == GemmKind::Nt && self.operands == OperandTypes::Bf16
    }

    /// The problem whose algorithm this one takes on Hopper: with more rows of x, so that prompts of hundreds of
    /// lengths ask the heuristic once. The algorithm adds in the one order for any number of rows. `None` for other
    /// problems, and for the few rows of steps.
    pub(super) fn with_rounded_rows(&self) -> Option<Self> {
        let [m, n, k] = self.sizes;
        let multiple = match m {
            0..=64 => return None,
            65..=1024 => 64,
            1025..=8192 => 256,
            _ => 1024,
        };
        self.wants_one_order().then(|| Self { sizes: [m.next_multiple_of(multiple), n, k], ..*self })
    }

    /// Tiles that were faster than the heuristic's first choice, the best first; empty where none was.
    ///
    /// Measured on an H200 at its power limit, a quarter of a second each, on the GEMMs of a step of a 1.7B and an 80M
    /// model (lab/notes/experiments.md). With a small k, storing a tile takes much of its time: algorithms with these
    /// tiles overlap the store with the next tile's GEMM, the heuristic's first choice does not.
    pub(super) fn preferred_tiles(&self) -> &'static [Tile] {
        let [m, n, k] = self.sizes;
        let is_forward = matches!(self.operands, OperandTypes::Bf16) || self.operands.sum_fast();
        let is_store_heavy = is_forward && m >= 4096 && (n > k || k < 1024);
        match self.kind {
            GemmKind::Nt if is_store_heavy && n >= 8192 => &[Tile::C176x128, Tile::C128x160],
            GemmKind::Nt if is_store_heavy => &[Tile::C128x160],
            GemmKind::Nn if is_store_heavy => &[Tile::C128x128, Tile::C128x160],
            GemmKind::Tn if m > n && m * n >= 1 << 23 => &[Tile::C256x128],
            _ => &[],
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [m, n, k] = self.sizes;
        let output = if self.is_f32 { "f32" } else { "bf16" };
        let operands = match self.operands {
            OperandTypes::Bf16 => "bf16",
            OperandTypes::Fp8 { .. } => "fp8",
        };
        write!(
            f,
            "{:?} m {m} n {n} k {k}, {operands} to {output}, strides {} {} {} {}",
            self.kind, self.x_stride, self.w_stride, self.c_stride, self.d_stride
        )
    }
}

/// The sizes `[m, n, k]` of a GEMM with operands given as `[rows, columns]`.
///
/// # Errors
/// Inner sizes that differ, or a size of zero.
pub(super) fn operand_rows(kind: GemmKind, x: [usize; 2], w: [usize; 2]) -> Result<[usize; 3], KernelError> {
    let (sizes, inner, expected) = match kind {
        GemmKind::Nt => ([x[0], w[0], x[1]], w[1], [w[0], x[1]]),
        GemmKind::Nn => ([x[0], w[1], x[1]], w[0], [x[1], w[1]]),
        GemmKind::Tn => ([x[1], w[1], x[0]], w[0], [x[0], w[1]]),
    };
    if inner != sizes[2] {
        return Err(KernelError::shape(NAME, "w", &w, &expected));
    }
    for (what, size) in [("m", sizes[0]), ("n", sizes[1]), ("k", sizes[2])] {
        sieve_gpu::require_non_empty(NAME, what, size)?;
    }
    Ok(sizes)
}

/// Shape of a new output: x's leading dimensions and n, or `[m, n]` when x is transposed.
pub(super) fn result_shape(kind: GemmKind, x: &[usize], [m, n, _k]: [usize; 3]) -> Vec<usize> {
    if kind == GemmKind::Tn {
        return vec![m, n];
    }
    let mut shape = x.to_vec();
    if let Some(last) = shape.last_mut() {
        *last = n;
    }
    shape
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Multiplies as cuBLASLt would, from the layouts alone.
    fn column_major(problem: &Problem, x: &[f64], w: &[f64], c: &[f64], beta: f64) -> Vec<f64> {
        let [a, b, c_layout, d] = problem.layouts();
        let at = |values: &[f64], layout: Layout, row: u64, col: u64| {
            let (row, col) = if layout.is_transposed { (col, row) } else { (row, col) };
            assert!(row < layout.rows && col < layout.cols);
            values[row as usize + col as usize * layout.leading as usize]
        };
        let inner = if a.is_transposed { a.rows } else { a.cols };
        let mut out = vec![f64::NAN; d.leading as usize * d.cols as usize];
        for col in 0..d.cols {
            for row in 0..d.rows {
                let sum: f64 = (0..inner).map(|i| at(w, a, row, i) * at(x, b, i, col)).sum();
                let old = if beta == 0.0 { 0.0 } else { beta * at(c, c_layout, row, col) };
                out[row as usize + col as usize * d.leading as usize] = sum + old;
            }
        }
        out
    }

    fn numbers(count: usize, seed: usize) -> Vec<f64> {
        (0..count).map(|i| ((i * 37 + seed * 11) % 23) as f64 - 11.0).collect()
    }

    #[test]
    fn column_major_layouts_give_the_row_major_gemm() {
        let [m, n, k] = [3, 5, 4];
        for kind in [GemmKind::Nt, GemmKind::Nn, GemmKind::Tn] {
            let (x_rows, x_cols) = if kind == GemmKind::Tn { (k, m) } else { (m, k) };
            let (w_rows, w_cols) = if kind == GemmKind::Nt { (n, k) } else { (k, n) };
            // Every matrix has a gap after each row, each of another length.
            let problem = Problem {
                kind,
                operands: OperandTypes::Bf16,
                sizes: [m, n, k],
                x_stride: x_cols + 1,
                w_stride: w_cols + 2,
                c_stride: n + 3,
                d_stride: n + 4,
                is_f32: true,
            };
            let x = numbers(x_rows * problem.x_stride, 1);
            let w = numbers(w_rows * problem.w_stride, 2);
            let c = numbers(m * problem.c_stride, 3);
            let d = column_major(&problem, &x, &w, &c, 1.0);
            for i in 0..m {
                for j in 0..n {
                    let sum: f64 = (0..k)
                        .map(|l| {
                            let x_at = match kind {
                                GemmKind::Tn => x[l * problem.x_stride + i],
                                _ => x[i * problem.x_stride + l],
                            };
                            let w_at = match kind {
                                GemmKind::Nt => w[j * problem.w_stride + l],
                                _ => w[l * problem.w_stride + j],
                            };
                            x_at * w_at
                        })
                        .sum();
                    let expected = sum + c[i * problem.c_stride + j];
                    assert_eq!(d[i * problem.d_stride + j], expected, "{:?} {i} {j}", problem.kind);
                }
            }
        }
    }

    #[test]
    fn prompts_of_many_lengths_share_few_algorithms() {
        let problem = |m| Problem {
            kind: GemmKind::Nt,
            operands: OperandTypes::Bf16,
            sizes: [m, 512, 256],
            x_stride: 256,
            w_stride: 256,
            c_stride: 512,
            d_stride: 512,
            is_f32: false,
        };
        // Each case: rows, and the rows of the problem whose algorithm is taken.
        for (m, rounded) in [(64, None), (65, Some(128)), (128, Some(128)), (1025, Some(1280)), (8193, Some(9216))] {
            let found = problem(m).with_rounded_rows();
            assert_eq!(found, rounded.map(problem), "{m}");
        }
        assert_eq!(Problem { kind: GemmKind::Nn, ..problem(65) }.with_rounded_rows(), None, "a gradient");
    }

    #[test]
    fn tiles_are_preferred_where_they_were_measured() {
        let cuts = |kind, operands, sizes| {
            let problem = Problem {
                kind,
                operands,
                sizes,
                x_stride: 0,
                w_stride: 0,
                c_stride: 0,
                d_stride: 0,
                is_f32: kind == GemmKind::Tn,
            };
            problem.preferred_tiles().first().copied()
        };
        let fp8 = |x| OperandTypes::Fp8 { x, w: Fp8Format::E4m3 };
        let forward = fp8(Fp8Format::E4m3);
        for (kind, operands, sizes, cut) in [
            (GemmKind::Nt, OperandTypes::Bf16, [16384, 4096, 2048], Some(Tile::C128x160)),
            (GemmKind::Nt, OperandTypes::Bf16, [16384, 12288, 2048], Some(Tile::C176x128)),
            (GemmKind::Nt, OperandTypes::Bf16, [65536, 768, 768], Some(Tile::C128x160)),
            (GemmKind::Nt, OperandTypes::Bf16, [16384, 2048, 6144], None),
            // One token of decoding.
            (GemmKind::Nt, OperandTypes::Bf16, [1, 12288, 2048], None),
            (GemmKind::Nn, OperandTypes::Bf16, [16384, 6144, 2048], Some(Tile::C128x128)),
            (GemmKind::Nn, OperandTypes::Bf16, [16384, 2048, 12288], None),
            (GemmKind::Tn, OperandTypes::Bf16, [12288, 2048, 16384], Some(Tile::C256x128)),
            (GemmKind::Tn, OperandTypes::Bf16, [2048, 6144, 16384], None),
            // Fewer tiles than an H200 has multiprocessors: the sum over k is split instead.
            (GemmKind::Tn, OperandTypes::Bf16, [2304, 768, 65536], None),
            (GemmKind::Nt, forward, [16384, 12288, 2048], Some(Tile::C176x128)),
            (GemmKind::Nt, fp8(Fp8Format::E5m2), [16384, 6144, 2048], None),
        ] {
            assert_eq!(cuts(kind, operands, sizes), cut, "{kind:?} {sizes:?}");
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_named() {
        assert_eq!(operand_rows(GemmKind::Nt, [7, 4], [5, 4]), Ok([7, 5, 4]));
        assert_eq!(operand_rows(GemmKind::Nn, [7, 4], [4, 5]), Ok([7, 5, 4]));
        assert_eq!(operand_rows(GemmKind::Tn, [4, 7], [4, 5]), Ok([7, 5, 4]));
        let error = operand_rows(GemmKind::Nn, [7, 4], [5, 4]).expect_err("k differs").to_string();
        assert!(error.contains("[5, 4]") && error.contains("[4, 4]"), "{error}");
        assert!(operand_rows(GemmKind::Nt, [0, 4], [5, 4]).is_err());
        assert!(operand_rows(GemmKind::Nt, [7, 0], [5, 0]).is_err());
    }

    #[test]
    fn the_output_has_the_leading_dimensions_of_x() {
        assert_eq!(result_shape(GemmKind::Nt, &[2, 3, 4], [6, 5, 4]), [2, 3, 5]);
        assert_eq!(result_shape(GemmKind::Tn, &[2, 3, 4], [4, 5, 6]), [4, 5]);
    }
}
