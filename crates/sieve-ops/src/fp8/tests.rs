use super::reference::{fp8_linear, fp8_linear_backward, fp8_quantise, rows_of};
use crate::testing::{Random, RandomInput, host};
use burn::tensor::DType;
use burn_flex::Flex;
use sieve_core::Fp8Format::{self, E4m3, E5m2};

/// All non-negative numbers of a format, ascending, from the standard's definition of the bits.
fn numbers(format: Fp8Format) -> Vec<f64> {
    // E4m3's code 0x7f is NaN; E5m2's codes from 0x7c on are infinity and NaN.
    let (mantissa_bits, bias, count) = match format {
        E4m3 => (3, 7, 0x7f),
        E5m2 => (2, 15, 0x7c),
    };
    let number = |code: i32| {
        let (exponent, mantissa) = (code >> mantissa_bits, code & ((1 << mantissa_bits) - 1));
        let fraction = f64::from(mantissa) / f64::from(1 << mantissa_bits);
        match exponent {
            0 => fraction * 2f64.powi(1 - bias),
            _ => (1.0 + fraction) * 2f64.powi(exponent - bias),
        }
    };
    (0..count).map(number).collect()
}

/// Rounds by comparing with all numbers of the format: the nearest number, ties to the even code.
fn nearest(x: f64, numbers: &[f64]) -> f64 {
    let distance = |&code: &usize| ((x.abs() - numbers[code]).abs(), code % 2);
    let best = (0..numbers.len()).min_by(|a, b| distance(a).partial_cmp(&distance(b)).unwrap());
    numbers[best.unwrap()].copysign(x)
}

#[test]
fn numbers_are_rounded_to_the_nearest_one_and_ties_to_even() {
    for format in [E4m3, E5m2] {
        let numbers = numbers(format);
        let largest = numbers[numbers.len() - 1];
        assert_eq!(largest, if format == E4m3 { 448.0 } else { 57344.0 });
        // The largest magnitude makes the scale 1. The values are all numbers, all midpoints, and some values near
        // them.
        let mut values = vec![largest as f32];
        for pair in numbers.windows(2) {
            let middle = (pair[0] + pair[1]) / 2.0;
            values.extend([pair[0], middle, middle * 0.999, middle * 1.001].map(|x| x as f32));
        }
        values.extend(Random(1).vector(500).iter().map(|x| x * 0.01));
        values.extend(values.clone().iter().map(|x| -x));
        let (found, scale) = fp8_quantise(&values, format);
        assert_eq!(scale, 1.0);
        for (x, found) in values.iter().zip(found) {
            let expected = nearest(f64::from(*x), &numbers);
            assert_eq!(f64::from(found), expected, "{x:e} in {format:?}");
        }
    }
}

#[test]
fn bytes_that_a_device_kept_are_unpacked_to_their_numbers() {
    let codes = numbers(E4m3);
    let bytes: Vec<u8> = (0..0x7f).chain(0x80..0xff).collect();
    let found = rows_of(&bytes, [1, bytes.len()], 0.5);
    let expected = codes.iter().copied().chain(codes.iter().map(|x| -x));
    for (found, expected) in found.into_iter().zip(expected) {
        assert_eq!(f64::from(found), 0.5 * expected);
    }
    assert!(rows_of(&[0x7f], [1, 1], 1.0)[0].is_nan());
    // 1 to 6 as [width 3, rows 2]: a row holds every second value.
    let bytes = [0x38, 0x40, 0x44, 0x48, 0x4a, 0x4c];
    assert_eq!(rows_of(&bytes, [3, 2], 1.0), [1.0, 3.0, 5.0, 2.0, 4.0, 6.0]);
}

#[test]
fn the_largest_value_becomes_the_largest_number_of_the_format() {
    let (codes, scale) = fp8_quantise(&[0.5, -3.0, 0.0], E4m3);
    assert_eq!(codes[1], -448.0);
    assert!((codes[1] * scale + 3.0).abs() < 1e-6);
    let (codes, scale) = fp8_quantise(&[0.0; 4], E5m2);
    assert_eq!(codes, [0.0; 4]);
    assert!(scale > 0.0 && scale.is_finite());
    let (codes, _) = fp8_quantise(&[1.0, f32::NAN], E4m3);
    assert!(codes.iter().all(|code| code.is_nan()), "{codes:?}");
    let (codes, scale) = fp8_quantise(&[1.0, f32::INFINITY], E4m3);
    assert!((codes[0] * scale).is_nan() && (codes[1] * scale).is_nan());
}

#[test]
fn gemms_and_gradients_have_rounded_operands() {
    let (tokens, d_in, d_out) = (6, 5, 4);
    let mut random = Random(2);
    let [x, w, dy, residual] =
        [[tokens, d_in], [d_out, d_in], [tokens, d_out], [tokens, d_out]].map(|dims| random.input(&dims));
    let exact = |values: &[f64], format| {
        let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
        let (codes, scale) = fp8_quantise(&values, format);
        let wide = |code: &f32| f64::from(code * scale);
        codes.iter().map(wide).collect::<Vec<_>>()
    };
    let [xr, wr, dyr] = [(&x, E4m3), (&w, E4m3), (&dy, E5m2)].map(|(x, f)| exact(&x.values, f));
    let on = |input: &crate::testing::Input| input.tensor(DType::F32);
    let (y, kept) = fp8_linear::<Flex>(on(&x), on(&w), Some(on(&residual)));
    let [dx, dw] = fp8_linear_backward::<Flex>(kept, on(&dy));
    let sum = |count: usize, term: &dyn Fn(usize) -> f64| (0..count).map(term).sum::<f64>();
    let close = |found: Vec<f64>, width: usize, of: &dyn Fn(usize, usize) -> f64| {
        for (at, found) in found.iter().enumerate() {
            let expected = of(at / width, at % width);
            assert!((found - expected).abs() < 1e-4, "{found} {expected}");
        }
    };
    close(host(y), d_out, &|i, j| residual.values[i * d_out + j] + sum(d_in, &|k| xr[i * d_in + k] * wr[j * d_in + k]));
    close(host(dx), d_in, &|i, j| sum(d_out, &|k| dyr[i * d_out + k] * wr[k * d_in + j]));
    close(host(dw), d_in, &|i, j| sum(tokens, &|k| dyr[k * d_out + i] * xr[k * d_in + j]));
}
