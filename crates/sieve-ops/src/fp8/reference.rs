//! fp8 GEMMs in plain arithmetic: values are rounded to fp8 and stored in the tensors' dtype.
use super::Fp8Kept;
use crate::linear::added;
use crate::linear::reference::{linear, linear_input_gradient, linear_weight_gradient};
use crate::tensors::Float;
use burn::tensor::backend::{Backend, ExecutionError};
use burn::tensor::{TensorData, TensorMetadata};
use sieve_core::Fp8Format;

/// Lower bound of the largest magnitude, so that a tensor of zeros has a scale. It is 2^-100.
const SMALLEST_BOUND: f32 = 7.888_609e-31;

/// Of a format: bits of the mantissa, exponent of the smallest normal number, largest number.
fn limits(format: Fp8Format) -> (i32, i32, f32) {
    match format {
        Fp8Format::E4m3 => (3, -6, 448.0),
        Fp8Format::E5m2 => (2, -14, 57344.0),
    }
}

/// The nearest number of the format, ties to even; clamped to the largest number.
fn round(x: f32, format: Fp8Format) -> f32 {
    let (mantissa_bits, smallest_exponent, largest) = limits(format);
    if x.is_nan() {
        return x;
    }
    let exponent = (x.abs().to_bits() >> 23) as i32 - 127;
    let step = 2f32.powi(exponent.max(smallest_exponent) - mantissa_bits);
    ((x / step).round_ties_even() * step).clamp(-largest, largest)
}

/// The fp8 numbers for `values`, and the scale by which they must be multiplied to approximate `values`.
pub fn fp8_quantise(values: &[f32], format: Fp8Format) -> (Vec<f32>, f32) {
    let (_, _, largest) = limits(format);
    // As integers, a NaN's bits are larger than any number's bits, so a NaN makes the bound NaN.
    let bits = values.iter().map(|x| x.abs().to_bits()).max();
    let bound = f32::from_bits(bits.unwrap_or(0).max(SMALLEST_BOUND.to_bits()));
    let factor = largest / bound;
    let rounded = values.iter().map(|x| round(x * factor, format)).collect();
    (rounded, bound / largest)
}

/// The values `[rows, width]` of e4m3 bytes `[width, rows]` with this scale.
#[cfg(any(feature = "cuda", test))]
pub(super) fn rows_of(bytes: &[u8], [width, rows]: [usize; 2], scale: f32) -> Vec<f32> {
    let row = |row| (0..width).map(move |column| Fp8Format::E4m3.number_of(bytes[column * rows + row]) * scale);
    (0..rows).flat_map(row).collect()
}

fn read<B: Backend>(x: Float<B>) -> TensorData {
    let read: Result<TensorData, ExecutionError> = burn::tensor::read_sync(B::float_into_data(x));
    read.expect("the tensor can be read")
}

/// Operands that a device kept as bytes, as the reference keeps them; `dy`, the gradient of the output, gives dtype and
/// device.
#[cfg(feature = "cuda")]
pub(super) fn unpacked<B: Backend>(kept: Fp8Kept<B>, dy: &Float<B>) -> Fp8Kept<B> {
    let Some(scales) = kept.scales else {
        return kept;
    };
    let (device, dtype, mut shape) = (B::float_device(dy), dy.dtype(), dy.shape().to_vec());
    let [x_scale, weight_scale] = scales.map(|scale| read::<B>(scale).iter::<f32>().next().unwrap_or(f32::NAN));
    let of = |bytes: Float<B>, scale: f32, shape: &mut Vec<usize>| {
        let size = bytes.shape().to_vec();
        let [width, rows] = [size[0], size[1]];
        let bytes = read::<B>(bytes);
        let values = rows_of(bytes.as_slice().expect("bytes"), [width, rows], scale);
        *shape.last_mut().expect("a matrix has a width") = width;
        let data = TensorData::new(values, shape.clone()).convert_dtype(dtype);
        B::float_from_data(data, &device)
    };
    // `of` replaces the last size of a shape by the width.
    let out = kept.weight.shape().to_vec()[1];
    Fp8Kept {
        x: of(kept.x, x_scale, &mut shape),
        weight: of(kept.weight, weight_scale, &mut vec![out, 0]),
        scales: None,
    }
}

/// The tensor with its values rounded to fp8, in its own dtype.
fn rounded<B: Backend>(x: Float<B>, format: Fp8Format) -> Float<B> {
    let (device, dtype, shape) = (B::float_device(&x), x.dtype(), x.shape());
    let data = read::<B>(x).convert::<f32>();
    let (codes, scale) = fp8_quantise(data.as_slice().expect("converted to f32"), format);
    let values: Vec<f32> = codes.iter().map(|code| code * scale).collect();
    let data = TensorData::new(values, shape.to_vec()).convert_dtype(dtype);
    B::float_from_data(data, &device)
}

/// `x wᵀ` of rounded operands, plus the residual if there is one.
pub fn fp8_linear<B: Backend>(x: Float<B>, weight: Float<B>, residual: Option<Float<B>>) -> (Float<B>, Fp8Kept<B>) {
    let [x, weight] = [x, weight].map(|operand| rounded::<B>(operand, Fp8Format::E4m3));
    let y = added::<B>(residual, linear::<B>(x.clone(), weight.clone()));
    let kept = Fp8Kept { x, weight, scales: None };
    (y, kept)
}

/// Gradients `[dx, dweight]` of [`fp8_linear`].
pub fn fp8_linear_backward<B: Backend>(kept: Fp8Kept<B>, dy: Float<B>) -> [Float<B>; 2] {
    let dy = rounded::<B>(dy, Fp8Format::E5m2);
    let dx = linear_input_gradient::<B>(kept.weight, dy.clone());
    [dx, linear_weight_gradient::<B>(kept.x, dy)]
}
