//! Products with a weight on the CPU, through Burn's own.
use super::backend::{LinearBackend, LinearGradients};
use super::reference;
use crate::device::flex::{contiguous, floats, from_vec, is_f32, last_dim, plain};
use burn::tensor::TensorMetadata;
use burn::tensor::ops::FloatTensorOps;
use burn_flex::{Flex, FlexTensor};

/// Rows below which the product library takes other code, with another order of its sums.
const MIN_PRODUCT_ROWS: usize = 8;

/// `x` with rows of zeros up to [`MIN_PRODUCT_ROWS`], and how many rows it had.
fn padded_rows(x: FlexTensor, d_in: usize) -> (FlexTensor, usize) {
    let x = contiguous(x);
    let rows = x.shape().num_elements() / d_in;
    let mut values = floats(&x).to_vec();
    values.resize(MIN_PRODUCT_ROWS * d_in, 0.0);
    (from_vec(values, [MIN_PRODUCT_ROWS, d_in]), rows)
}

impl LinearBackend for Flex {
    /// A row's result must not depend on how many rows there are: when a prompt and a single decoded token round
    /// differently, equal tokens get unequal scores, and DMA's ties fall otherwise than in the full pass.
    fn linear(x: FlexTensor, weight: FlexTensor) -> FlexTensor {
        let mut shape = x.shape().to_vec();
        let d_in = last_dim(&x);
        let few_rows = x.shape().num_elements() < MIN_PRODUCT_ROWS * d_in;
        if !is_f32(&x) {
            return plain("linear", || reference::linear::<Self>(x, weight));
        }
        if !few_rows || d_in == 0 {
            return reference::linear::<Self>(x, weight);
        }
        let (padded, rows) = padded_rows(x, d_in);
        let y = contiguous(reference::linear::<Self>(padded, weight));
        let d_out = last_dim(&y);
        let last = shape.len() - 1;
        shape[last] = d_out;
        from_vec(floats(&y)[..rows * d_out].to_vec(), shape)
    }

    fn linear_add(x: FlexTensor, weight: FlexTensor, residual: FlexTensor) -> FlexTensor {
        Self::float_add(residual, <Self as LinearBackend>::linear(x, weight))
    }
}

/// The products of the reference are the CPU's fast path.
impl LinearGradients for Flex {
    fn linear_input_gradient(weight: FlexTensor, dy: FlexTensor) -> FlexTensor {
        reference::linear_input_gradient::<Self>(weight, dy)
    }

    fn linear_weight_gradient(x: FlexTensor, dy: FlexTensor, sum: Option<FlexTensor>) -> FlexTensor {
        reference::added::<Self>(sum, reference::linear_weight_gradient::<Self>(x, dy))
    }
}
