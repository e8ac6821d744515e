//! Checks fp8: the quantisation kernel writes the bytes of the reference, and cuBLASLt's GEMMs of fp8 matrices equal
//! the product of the numbers that the bytes encode.
use super::wrappers::{LaunchCheck, plus, same};
use crate::device::{Device, Gpu};
use crate::extent::Extent;
use crate::report::{Outcome, Report, Wrong, wrong};
use crate::tolerance::Tolerance;
use rayon::prelude::*;
use sieve_kernels::DType;
use sieve_kernels::step::{Fp8Format, Fp8Matrix, Fp8Pair, fp8_quantise, require_fp8};
use sieve_kernels::{Cublaslt, CudaTensor, MatmulOutput, fp8_matmul};
use sieve_ops::reference;

const FORMATS: [Fp8Format; 2] = [Fp8Format::E4m3, Fp8Format::E5m2];
/// For [`fp8_quantise`]: no partial maxima of |x| are known, so it computes them.
const NO_MAXIMA: Option<&CudaTensor> = None;
const PRODUCT: &str = "fp8 GEMM, cuBLASLt";

/// Checks the quantisation kernel at sizes `[rows, width]`.
pub(super) fn check_rounding(report: &mut Report, device: &dyn Device, extent: &Extent) {
    for [rows, width] in extent.shapes(&[[48, 144], [272, 16], [528, 1040], [2064, 4112]]) {
        for format in FORMATS {
            let case = format!("{rows} x {width} {format:?}");
            let outcome = rounding(LaunchCheck::new(device, extent.seed), [rows, width], format);
            report.add("fp8_quantise", "kernel", &case, outcome);
        }
    }
}

/// Checks fp8 GEMMs. Where the GPU has no fp8 or cuBLASLt is missing, the report says why they were not checked.
pub(crate) fn check_gemms(report: &mut Report, device: &Gpu, extent: &Extent, cc: (u32, u32)) {
    if let Err(error) = Cublaslt::require().and_then(|()| require_fp8(cc)) {
        report.add_missing(PRODUCT, &error.to_string());
        return;
    }
    for [m, n, k] in [[64, 48, 80], [144, 272, 1024], [272, 528, 2048]] {
        for formats in [[0, 0], [1, 0], [0, 1]] {
            let formats = formats.map(|at: usize| FORMATS[at]);
            let case = format!("{m} x {n} x {k}, {formats:?}");
            let outcome = check_gemm(LaunchCheck::new(device, extent.seed), [m, n, k], formats);
            report.add(PRODUCT, "cuBLASLt", &case, outcome);
        }
    }
}

/// The numbers that the bytes of a matrix encode, before its scale.
fn numbers(calls: &LaunchCheck<'_>, matrix: &Fp8Matrix) -> Result<Vec<f32>, Wrong> {
    let bytes = calls.device.floats(&matrix.values)?.into_iter();
    Ok(bytes.map(|byte| matrix.format.number_of(byte as u8)).collect())
}

fn transposed(values: &[f32], width: usize) -> Vec<f32> {
    let rows = values.len() / width;
    (0..values.len()).map(|at| values[at % rows * width + at / rows]).collect()
}

/// Compares quantised rows, columns and scale with the reference, and checks that a NaN reaches all numbers.
fn rounding(mut calls: LaunchCheck<'_>, [rows, width]: [usize; 2], format: Fp8Format) -> Outcome {
    // Rows have gaps, so the wrapper must copy them first.
    let x = calls.with_gaps([rows, width], 16)?;
    let checked = |x: &CudaTensor, values: &[f32]| -> Result<Fp8Pair, Wrong> {
        let pair = fp8_quantise(x, format, NO_MAXIMA)?;
        let (exact, scale) = reference::fp8_quantise(values, format);
        calls.holds("the scale", &pair.rows.scale, &[scale])?;
        same("rows", &numbers(&calls, &pair.rows)?, &exact)?;
        same("columns", &numbers(&calls, &pair.columns)?, &transposed(&exact, width))?;
        Ok(pair)
    };
    let pair = checked(&x.tensor, &x.values)?;
    // The kernel before may pass the largest magnitude, as partial maxima by block.
    let largest = x.values.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let mut partial_maxima = vec![0.0; 512];
    partial_maxima[rows % 512] = largest;
    let partial_maxima = calls.device.float(&partial_maxima, &[512], DType::F32);
    let known = fp8_quantise(&x.tensor, format, Some(&partial_maxima))?;
    same("rows of a known largest", &numbers(&calls, &known.rows)?, &numbers(&calls, &pair.rows)?)?;
    // Magnitudes over 37 powers of two: some quantise to subnormal fp8 numbers or to 0.
    let spread: Vec<f32> = (x.values.iter().enumerate()).map(|(at, x)| x * 2f32.powi(-((at % 37) as i32))).collect();
    let upload = |values: &[f32]| calls.device.float(values, &[rows, width], DType::BF16);
    checked(&upload(&spread), &spread)?;
    let zeros = vec![0.0; rows * width];
    checked(&upload(&zeros), &zeros)?;
    let mut one_nan = x.values.clone();
    one_nan[rows * width / 2] = f32::NAN;
    let pair = fp8_quantise(&upload(&one_nan), format, NO_MAXIMA)?;
    if numbers(&calls, &pair.columns)?.iter().all(|x| x.is_nan()) {
        Ok(0.0)
    } else {
        wrong("a NaN did not reach every number")
    }
}

fn exact_sum(x: &[f64], w: &[f64]) -> f64 {
    x.iter().zip(w).map(|(a, b)| a * b).sum()
}

/// A dot product as Hopper's fp8 tensor cores accumulate it (arXiv:2412.19437, section 3.5.2). Each step adds 32
/// products to the sum: all 33 terms are truncated to 13 bits below the leading bit of the largest. Every 128 products
/// the sum is added to an f32 total.
fn kept_on_hopper(x: &[f64], w: &[f64]) -> f64 {
    let mut total = 0.0f32;
    for (x, w) in x.chunks(128).zip(w.chunks(128)) {
        let mut sum = 0.0f64;
        for (x, w) in x.chunks(32).zip(w.chunks(32)) {
            let terms = || x.iter().zip(w).map(|(a, b)| a * b).chain([sum]);
            let largest = terms().fold(0.0f64, |most, x| most.max(x.abs()));
            if largest > 0.0 {
                let unit = 2f64.powi(largest.log2().floor() as i32 - 13);
                sum = terms().map(|x| (x / unit).trunc() * unit).sum();
            }
        }
        total += sum as f32;
    }
    total.into()
}

/// The numbers that an operand's bytes encode, and the scale that multiplies them.
type Operand = (Vec<f64>, f64);

/// Quantises values on the host.
fn operand(values: &[f32], format: Fp8Format) -> Operand {
    let (values, scale) = reference::fp8_quantise(values, format);
    (values.into_iter().map(f64::from).collect(), scale.into())
}

/// `x wᵀ` of operands with rows of `k` numbers, on all cores; `sum` computes the dot product of two rows.
fn gemm_of_rows(
    (x, x_scale): &Operand,
    (w, w_scale): &Operand,
    k: usize,
    sum: impl Fn(&[f64], &[f64]) -> f64 + Sync,
) -> Vec<f64> {
    let of_row = |x| w.chunks(k).map(|w| sum(x, w) * x_scale * w_scale).collect::<Vec<f64>>();
    x.par_chunks(k).flat_map_iter(of_row).collect()
}

/// Compares an fp8 GEMM, in each form of its output, with the exact product and with Hopper's accumulation.
fn check_gemm(mut calls: LaunchCheck<'_>, [m, n, k]: [usize; 3], formats: [Fp8Format; 2]) -> Outcome {
    let mut quantised = |rows, format| -> Result<(Fp8Matrix, Operand), Wrong> {
        let x = calls.flat(&[rows, k], DType::BF16);
        let matrix = fp8_quantise(&x.tensor, format, NO_MAXIMA)?.rows;
        Ok((matrix, operand(&x.values, format)))
    };
    let ((x, x_exact), (w, w_exact)) = (quantised(m, formats[0])?, quantised(n, formats[1])?);
    let exact = gemm_of_rows(&x_exact, &w_exact, k, exact_sum);
    let kept = gemm_of_rows(&x_exact, &w_exact, k, kept_on_hopper);
    let addend = calls.flat(&[m, n], DType::BF16);
    let before = calls.flat(&[m, n], DType::F32);
    let nothing = vec![0.0; m * n];
    let is_forward = formats == [Fp8Format::E4m3; 2];
    for (name, output, addend) in [
        ("bf16", MatmulOutput::New(DType::BF16), &nothing),
        ("f32", MatmulOutput::New(DType::F32), &nothing),
        ("plus", MatmulOutput::PlusC(&addend.tensor), &addend.values),
        ("added", MatmulOutput::AddTo(&before.tensor), &before.values),
    ] {
        let y = fp8_matmul(&x, &w, output)?;
        let (exact, kept) = (plus(&exact, addend), plus(&kept, addend));
        calls.within(tolerance(y.dtype(), is_forward), name, &y, [&kept, &exact])?;
    }
    Ok(calls.worst)
}

/// Forward GEMMs (both operands e4m3) accumulate a few hundred products in about 14 bits. GEMMs of a gradient
/// accumulate as [`kept_on_hopper`] does.
fn tolerance(dtype: DType, is_forward: bool) -> Tolerance {
    let (plain, share) = match (dtype, is_forward) {
        (DType::BF16, true) => (0.0, 1.0 / 128.0),
        (DType::BF16, false) | (_, true) => (0.0, 1.0 / 256.0),
        _ => (1.0, 2e-4),
    };
    Tolerance::new(plain, 0.0, share)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_testing::Random;

    #[test]
    fn sums_as_hopper_keeps_them_pass_and_a_lost_product_does_not() {
        let (k, mut random) = (80, Random(1));
        let mut drawn = |rows: usize, format| operand(&random.bf16_normals(rows * k), format);
        let (x, w) = (drawn(64, FORMATS[0]), drawn(48, FORMATS[1]));
        let of = |sum: &(dyn Fn(&[f64], &[f64]) -> f64 + Sync)| -> Vec<f32> {
            gemm_of_rows(&x, &w, k, sum).iter().map(|&x| x as f32).collect()
        };
        let (exact, kept) = (of(&exact_sum), of(&kept_on_hopper));
        // An H200 gave the first number for this dot product; the second is exact.
        assert_eq!((kept[2749], exact[2749]), (20.096191, 20.08929));
        let tolerance = tolerance(DType::F32, false);
        let judged = tolerance.judge("f32", &kept, &kept, &exact);
        assert!(judged.as_ref().is_ok_and(|ratio| *ratio > 0.5), "{judged:?}");
        let lost = of(&|x, w| exact_sum(&x[1..], &w[1..]));
        assert!(tolerance.judge("f32", &lost, &kept, &exact).is_err());
    }
}
