//! Eight-bit floats: the bytes that the kernels write are those of the definition, and cuBLASLt's products of them are
//! the products of what the bytes stand for.
use super::wrappers::{Calls, Outcome, same, text};
use crate::bar::Bar;
use crate::device::Device;
use crate::extent::Extent;
use crate::report::Report;
use burn::tensor::DType;
use burn_cuda::CudaDevice;
use sieve_kernels::step::{Fp8Format, Fp8Matrix, Fp8Pair, fp8_quantise, require_fp8};
use sieve_kernels::{CudaTensor, MatmulOutput, matmul_fp8, require_cublaslt};
use sieve_ops::reference;

const FORMATS: [Fp8Format; 2] = [Fp8Format::E4m3, Fp8Format::E5m2];
const PRODUCT: &str = "product of eight-bit floats, cuBLASLt";

/// Checks the rounding.
pub(super) fn check_rounding(report: &mut Report, device: &dyn Device, extent: &Extent) {
    for &[rows, width] in extent.sizes(&[[48, 144], [272, 16], [528, 1040], [2064, 4112]]) {
        for format in FORMATS {
            let case = format!("{rows} x {width} {format:?}");
            let outcome = rounding(Calls::new(device, extent.seed), [rows, width], format);
            report.add("fp8_quantise", "kernel", &case, outcome);
        }
    }
}

/// Checks the products; where the GPU has none, the row says so.
pub(crate) fn check_products(
    report: &mut Report,
    device: &CudaDevice,
    extent: &Extent,
    cc: (u32, u32),
) {
    if let Err(error) = require_cublaslt().and_then(|()| require_fp8(cc)) {
        report.add_missing(PRODUCT, &error.to_string());
        return;
    }
    for [m, n, k] in [[64, 48, 80], [144, 272, 1024], [272, 528, 2048]] {
        for formats in [[0, 0], [1, 0], [0, 1]] {
            let formats = formats.map(|at: usize| FORMATS[at]);
            let case = format!("{m} x {n} x {k}, {formats:?}");
            let outcome = product(Calls::new(device, extent.seed), [m, n, k], formats);
            report.add(PRODUCT, "cuBLASLt", &case, outcome);
        }
    }
}

/// What a byte stands for.
fn decoded(byte: f32, format: Fp8Format) -> f32 {
    let byte = byte as i32;
    let (mantissa_bits, bias) = match format {
        Fp8Format::E4m3 => (3, 7),
        Fp8Format::E5m2 => (2, 15),
    };
    let (exponent, mantissa) = (
        byte >> mantissa_bits & (0x7f >> mantissa_bits),
        byte & ((1 << mantissa_bits) - 1),
    );
    let fraction = mantissa as f32 / (1 << mantissa_bits) as f32;
    let magnitude = match exponent {
        _ if byte & 0x7f == 0x7f => f32::NAN,
        0 => fraction * 2f32.powi(1 - bias),
        _ => (1.0 + fraction) * 2f32.powi(exponent - bias),
    };
    if byte & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

fn numbers(calls: &Calls<'_>, matrix: &Fp8Matrix) -> Result<Vec<f32>, String> {
    let bytes = calls.device.floats(&matrix.values).map_err(text)?;
    Ok(bytes
        .iter()
        .map(|&byte| decoded(byte, matrix.format))
        .collect())
}

fn turned(values: &[f32], width: usize) -> Vec<f32> {
    let rows = values.len() / width;
    (0..values.len())
        .map(|at| values[at % rows * width + at / rows])
        .collect()
}

fn rounding(mut calls: Calls<'_>, [rows, width]: [usize; 2], format: Fp8Format) -> Outcome {
    // Large and tiny rows, so that some numbers lie below the smallest normal one; gaps, so that it is copied first.
    let x = calls.with_gaps([rows, width], 16, DType::BF16)?;
    let checked = |x: &CudaTensor, values: &[f32]| -> Result<Fp8Pair, String> {
        let pair = fp8_quantise(x, format).map_err(text)?;
        let (exact, scale) = reference::fp8_quantise(values, format);
        let found = calls.device.floats(&pair.rows.scale).map_err(text)?;
        same("the scale", &found, &[scale])?;
        same("rows", &numbers(&calls, &pair.rows)?, &exact)?;
        same(
            "columns",
            &numbers(&calls, &pair.columns)?,
            &turned(&exact, width),
        )?;
        Ok(pair)
    };
    checked(&x.on, &x.values)?;
    let spread: Vec<f32> = (x.values.iter().enumerate())
        .map(|(at, x)| x * 2f32.powi(-((at % 37) as i32)))
        .collect();
    let on = |values: &[f32]| calls.device.float(values, &[rows, width], DType::BF16);
    checked(&on(&spread), &spread)?;
    let zeros = vec![0.0; rows * width];
    checked(&on(&zeros), &zeros)?;
    let mut one_nan = x.values.clone();
    one_nan[rows * width / 2] = f32::NAN;
    let pair = fp8_quantise(&on(&one_nan), format).map_err(text)?;
    match numbers(&calls, &pair.columns)?.iter().all(|x| x.is_nan()) {
        true => Ok(0.0),
        false => Err("a NaN did not reach every number".to_owned()),
    }
}

fn product(mut calls: Calls<'_>, [m, n, k]: [usize; 3], formats: [Fp8Format; 2]) -> Outcome {
    let mut operand = |rows, format| -> Result<(Fp8Matrix, Vec<f64>), String> {
        let x = calls.flat(&[rows, k], DType::BF16);
        let matrix = fp8_quantise(&x.on, format).map_err(text)?.rows;
        let (values, scale) = reference::fp8_quantise(&x.values, format);
        let wide = values.iter().map(|&x| f64::from(x) * f64::from(scale));
        Ok((matrix, wide.collect()))
    };
    let ((x, x_exact), (w, w_exact)) = (operand(m, formats[0])?, operand(n, formats[1])?);
    let of = |at: usize| {
        let pairs = x_exact[at / n * k..][..k]
            .iter()
            .zip(&w_exact[at % n * k..][..k]);
        pairs.map(|(a, b)| a * b).sum::<f64>()
    };
    let exact: Vec<f64> = (0..m * n).map(of).collect();
    let addend = calls.flat(&[m, n], DType::BF16);
    let plus = |addend: &[f32]| -> Vec<f32> {
        let pairs = exact.iter().zip(addend);
        pairs.map(|(a, &b)| (a + f64::from(b)) as f32).collect()
    };
    let alone = plus(&vec![0.0; m * n]);
    // Sums of a forward product are kept in about 14 bits for a few hundred terms.
    let is_fast = formats == [Fp8Format::E4m3; 2];
    let mut worst = 0.0f32;
    for (name, output, exact) in [
        ("bf16", MatmulOutput::New(DType::BF16), &alone),
        ("f32", MatmulOutput::New(DType::F32), &alone),
        (
            "plus",
            MatmulOutput::Plus(&addend.on),
            &plus(&addend.values),
        ),
    ] {
        let y = matmul_fp8(&x, &w, output).map_err(text)?;
        let bar = Bar {
            plain: 0.0,
            floor: 0.0,
            share: match (y.dtype(), is_fast) {
                (DType::BF16, true) => 1.0 / 128.0,
                (DType::BF16, false) | (_, true) => 1.0 / 256.0,
                _ => 2e-4,
            },
            norm: false,
        };
        let y = calls.device.floats(&y).map_err(text)?;
        worst = worst.max(bar.judge(name, &y, exact, exact)?);
    }
    Ok(worst)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulator::tests::emulated;

    #[test]
    fn the_emulated_rounding_passes() {
        let extent = Extent::emulated(1, 64, 3);
        emulated(1, |device, report| {
            check_rounding(report, device, &extent);
            Ok(())
        });
    }
}
