//! GEMMs on slices: a checked wrapper over the `gemm` crate.

use gemm::Parallelism;
use std::ops::Range;

/// A read-only matrix inside a slice, with any strides.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

/// A writable matrix inside a slice: rows of consecutive elements, which do not overlap.
#[derive(Debug)]
pub struct MatrixMut<'a> {
    data: &'a mut [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
}

/// Whether a GEMM may use the other threads of the current rayon pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// Only the calling thread.
    One,
    /// All threads of the pool; the result is the same.
    All,
}

/// Multiplications from which a GEMM is faster on all threads: 256 cubed is, 128 cubed is not.
const MIN_SHARED_PRODUCT: usize = 192 * 192 * 192;

impl Threads {
    /// Whether one thread or all compute `a b` faster.
    pub fn of_gemm(a: Matrix<'_>, b: Matrix<'_>) -> Self {
        match a.rows * a.cols * b.cols {
            few if few < MIN_SHARED_PRODUCT => Self::One,
            _ => Self::All,
        }
    }
}

/// How many elements a slice needs so that every element of the matrix lies inside; `None` on overflow.
fn extent(rows: usize, cols: usize, row_stride: usize, col_stride: usize) -> Option<usize> {
    if rows == 0 || cols == 0 {
        return Some(0);
    }
    let last_row = (rows - 1).checked_mul(row_stride)?;
    let last_col = (cols - 1).checked_mul(col_stride)?;
    last_row.checked_add(last_col)?.checked_add(1).filter(|&len| len <= isize::MAX as usize)
}

impl<'a> Matrix<'a> {
    /// A dense row-major `[rows, cols]` matrix: the whole of `data`.
    ///
    /// # Panics
    /// When `data` has another length.
    pub fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        assert_eq!(data.len(), rows * cols, "Matrix::new: data does not hold [{rows}, {cols}]");
        Self::strided(data, rows, cols, cols, 1)
    }

    /// A matrix whose element (r, c) is `data[r * row_stride + c * col_stride]`.
    ///
    /// # Panics
    /// When an element lies outside `data`.
    pub fn strided(data: &'a [f32], rows: usize, cols: usize, row_stride: usize, col_stride: usize) -> Self {
        let needed = extent(rows, cols, row_stride, col_stride);
        assert!(needed.is_some_and(|n| n <= data.len()), "Matrix::strided: [{rows}, {cols}] leaves the slice");
        Self { data, rows, cols, row_stride, col_stride }
    }

    /// The elements of a dense row-major matrix, row by row.
    ///
    /// # Panics
    /// When rows or columns have gaps.
    pub(crate) fn rows_in_order(&self) -> &'a [f32] {
        assert!(self.col_stride == 1 && self.row_stride == self.cols, "Matrix: rows are not consecutive");
        &self.data[..self.rows * self.cols]
    }

    /// Number of rows of the view, which [`t`](Self::t) swaps with its columns.
    pub fn num_rows(&self) -> usize {
        self.rows
    }

    /// Number of columns of the view.
    pub fn num_columns(&self) -> usize {
        self.cols
    }

    /// These columns of the matrix, as a view.
    ///
    /// # Panics
    /// When the matrix has fewer columns.
    #[must_use]
    pub(crate) fn columns(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.cols, "Matrix: no columns {range:?} of {}", self.cols);
        // A view without elements may begin behind the last one.
        let first = if range.is_empty() || self.rows == 0 { 0 } else { range.start * self.col_stride };
        Self { data: &self.data[first..], cols: range.len(), ..self }
    }

    /// The transpose of the matrix, as a view.
    #[must_use]
    pub fn t(self) -> Self {
        Self {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }
}

impl<'a> MatrixMut<'a> {
    /// A dense row-major `[rows, cols]` matrix: the whole of `data`.
    ///
    /// # Panics
    /// When `data` has another length.
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        assert_eq!(data.len(), rows * cols, "MatrixMut::new: data does not hold [{rows}, {cols}]");
        Self::strided(data, rows, cols, cols)
    }

    /// Rows of `cols` consecutive elements, `row_stride >= cols` apart.
    ///
    /// # Panics
    /// When rows would overlap or an element lies outside `data`.
    pub fn strided(data: &'a mut [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(row_stride >= cols, "MatrixMut::strided: rows overlap");
        let needed = extent(rows, cols, row_stride, 1);
        assert!(needed.is_some_and(|n| n <= data.len()), "MatrixMut::strided: [{rows}, {cols}] leaves the slice");
        Self { data, rows, cols, row_stride }
    }

    /// The same matrix, for a shorter time.
    pub(crate) fn reborrow(&mut self) -> MatrixMut<'_> {
        MatrixMut { data: &mut *self.data, ..*self }
    }
}

/// `c = beta * c + alpha * a b`; with `beta == 0` the old content of `c` is not read (it may be NaN).
///
/// # Shapes
/// - a: `[m, k]`, b: `[k, n]`, c: `[m, n]`
///
/// # Panics
/// When the shapes do not fit.
pub fn matmul(threads: Threads, alpha: f32, a: Matrix<'_>, b: Matrix<'_>, beta: f32, c: MatrixMut<'_>) {
    assert_eq!(a.cols, b.rows, "matmul: a and b disagree in the inner size");
    assert_eq!((a.rows, b.cols), (c.rows, c.cols), "matmul: c does not have the shape of a b");
    let parallelism = match threads {
        Threads::One => Parallelism::None,
        // 0: all threads of the pool.
        Threads::All => Parallelism::Rayon(0),
    };
    let (reads_c, conjugates) = (beta != 0.0, false);
    // The `gemm` crate takes the factor of c first, under the name alpha.
    let (factor_of_c, factor_of_product) = (beta, alpha);
    let col_stride_of_c = 1;
    // SAFETY: Matrix and MatrixMut are built only after `extent` showed that every element they name lies inside their
    // slice, with offsets that fit isize; c is exclusively borrowed, its elements are distinct (row_stride >= cols) and
    // it cannot overlap a or b. With beta == 0, reads_c is false and c is only written.
    unsafe {
        gemm::gemm(
            c.rows,
            c.cols,
            a.cols,
            c.data.as_mut_ptr(),
            col_stride_of_c,
            c.row_stride as isize,
            reads_c,
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            factor_of_c,
            factor_of_product,
            conjugates,
            conjugates,
            conjugates,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_testing::{Random, assert_close_relative, threads, wide};

    /// a[r, c] of a matrix with strides.
    fn at(m: &Matrix<'_>, r: usize, c: usize) -> f64 {
        f64::from(m.data[r * m.row_stride + c * m.col_stride])
    }

    #[test]
    fn equals_the_definition_for_any_strides() {
        let mut random = Random(1);
        for (m, n, k) in [(1, 1, 1), (3, 5, 7), (17, 2, 33), (65, 129, 31), (1, 40, 9), (50, 1, 6), (4, 6, 0)] {
            let (a, b) = (random.vector(m * (k + 3) + 2), random.vector(k * n + 2));
            let a = Matrix::strided(&a, m, k, k + 3, 1);
            // b is stored transposed.
            let b = Matrix::strided(&b, n, k, k, 1).t();
            let old = random.vector(m * (n + 1) + 1);
            for (alpha, beta) in [(1.0, 0.0), (-0.5, 1.0), (2.0, 0.25)] {
                let mut c = old.clone();
                matmul(Threads::All, alpha, a, b, beta, MatrixMut::strided(&mut c, m, n, n + 1));
                let mut expected = wide(&old);
                for r in 0..m {
                    for col in 0..n {
                        let sum: f64 = (0..k).map(|i| at(&a, r, i) * at(&b, i, col)).sum();
                        let c = &mut expected[r * (n + 1) + col];
                        *c = f64::from(beta) * *c + f64::from(alpha) * sum;
                    }
                }
                // The gaps between rows must stay as they were, so the whole slice is compared.
                assert_close_relative("c", &c, &expected, 1e-5);
            }
        }
    }

    /// `a b` of whole matrices, with a `c` that holds NaN before.
    fn gemm_of(threads: Threads, a: &[f32], b: &[f32], [m, k, k_of_b, n]: [usize; 4]) -> Vec<f32> {
        let mut c = vec![f32::NAN; m * n];
        let (a, b) = (Matrix::new(a, m, k), Matrix::new(b, k_of_b, n));
        matmul(threads, 1.0, a, b, 0.0, MatrixMut::new(&mut c, m, n));
        c
    }

    #[test]
    fn beta_zero_does_not_read_c() {
        let c = gemm_of(Threads::One, &[1.0, 2.0], &[3.0, 4.0], [2, 1, 1, 2]);
        assert_eq!(c, [3.0, 4.0, 6.0, 8.0]);
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        let mut random = Random(2);
        let (m, n, k) = (333, 257, 1100);
        let (a, b) = (random.vector(m * k), random.vector(k * n));
        let run = |threads: Threads| gemm_of(threads, &a, &b, [m, k, k, n]);
        let one = run(Threads::One);
        for count in [1, 2, 3, 7] {
            assert_eq!(threads(count).install(|| run(Threads::All)), one);
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        let zeros = [0.0; 10];
        sieve_testing::panics("leaves the slice", || Matrix::strided(&zeros, 3, 3, 4, 1));
        // An extent that overflows.
        sieve_testing::panics("leaves the slice", || Matrix::strided(&zeros, usize::MAX, 2, usize::MAX, 1));
        sieve_testing::panics("rows overlap", || MatrixMut::strided(&mut [0.0; 10], 3, 3, 2).rows);
        let wrong = || gemm_of(Threads::One, &zeros[..4], &zeros[..6], [2, 2, 3, 2]);
        sieve_testing::panics("inner size", wrong);
    }
}
