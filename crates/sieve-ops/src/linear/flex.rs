//! Products with a weight on the CPU.
use super::backend::{LinearBackend, LinearGradients};
use super::reference;
use crate::device::flex::{contiguous, floats, from_vec, is_f32, last_dim, plain};
use burn::tensor::TensorMetadata;
use burn::tensor::ops::FloatTensorOps;
use burn_flex::{Flex, FlexTensor};
use sieve_cpu::{Matrix, MatrixMut, Threads, matmul};

/// Rows below which the product library takes other code, with another order of its sums.
const MIN_PRODUCT_ROWS: usize = 8;

/// Multiplications from which a product takes all threads: 256 cubed is faster so, 128 cubed is not.
const MIN_SHARED_PRODUCT: usize = 192 * 192 * 192;

/// Rows of a contiguous tensor whose leading dimensions are folded.
fn num_rows(x: &FlexTensor) -> usize {
    x.shape().num_elements() / last_dim(x).max(1)
}

/// The contiguous f32 tensor `x [.., columns]` as a matrix.
fn rows(x: &FlexTensor) -> Matrix<'_> {
    Matrix::strided(floats(x), num_rows(x), last_dim(x), last_dim(x), 1)
}

/// `a b`, row after row.
fn product(a: Matrix<'_>, b: Matrix<'_>) -> Vec<f32> {
    let (m, n) = (a.num_rows(), b.num_columns());
    let mut c = vec![0.0; m * n];
    let threads = match m * n * b.num_rows() {
        few if few < MIN_SHARED_PRODUCT => Threads::One,
        _ => Threads::All,
    };
    matmul(threads, 1.0, a, b, 0.0, MatrixMut::new(&mut c, m, n));
    c
}

/// `values` under `x`'s shape with another last dimension.
fn with_columns(x: &FlexTensor, columns: usize, values: Vec<f32>) -> FlexTensor {
    let mut shape = x.shape().to_vec();
    let last = shape.len() - 1;
    shape[last] = columns;
    from_vec(values, shape)
}

impl LinearBackend for Flex {
    /// A row's result must not depend on how many rows there are: when a prompt and a single decoded token round
    /// differently, equal tokens get unequal scores, and DMA's ties fall otherwise than in the full pass. So few rows
    /// are multiplied with rows of zeros behind them.
    fn linear(x: FlexTensor, weight: FlexTensor) -> FlexTensor {
        if !is_f32(&x) {
            return plain("linear", || reference::linear::<Self>(x, weight));
        }
        let (x, weight) = (contiguous(x), contiguous(weight));
        let (count, d_in, d_out) = (num_rows(&x), last_dim(&x), num_rows(&weight));
        if count >= MIN_PRODUCT_ROWS || d_in == 0 {
            let y = product(rows(&x), rows(&weight).t());
            return with_columns(&x, d_out, y);
        }
        let mut padded = floats(&x)[..count * d_in].to_vec();
        padded.resize(MIN_PRODUCT_ROWS * d_in, 0.0);
        let mut y = product(Matrix::new(&padded, MIN_PRODUCT_ROWS, d_in), rows(&weight).t());
        y.truncate(count * d_out);
        with_columns(&x, d_out, y)
    }

    fn linear_add(x: FlexTensor, weight: FlexTensor, residual: FlexTensor) -> FlexTensor {
        Self::float_add(residual, <Self as LinearBackend>::linear(x, weight))
    }
}

impl LinearGradients for Flex {
    fn linear_input_gradient(weight: FlexTensor, dy: FlexTensor) -> FlexTensor {
        if !is_f32(&dy) {
            return plain("linear_input_gradient", || {
                reference::linear_input_gradient::<Self>(weight, dy)
            });
        }
        let (weight, dy) = (contiguous(weight), contiguous(dy));
        with_columns(&dy, last_dim(&weight), product(rows(&dy), rows(&weight)))
    }

    fn linear_weight_gradient(x: FlexTensor, dy: FlexTensor, sum: Option<FlexTensor>) -> FlexTensor {
        if !is_f32(&x) {
            return plain("linear_weight_gradient", || {
                reference::added::<Self>(sum, reference::linear_weight_gradient::<Self>(x, dy))
            });
        }
        let (x, dy) = (contiguous(x), contiguous(dy));
        let gradient = product(rows(&dy).t(), rows(&x));
        reference::added::<Self>(sum, from_vec(gradient, [last_dim(&dy), last_dim(&x)]))
    }
}
