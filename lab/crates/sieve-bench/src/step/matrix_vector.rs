//! Checks and times the GEMV kernel of decoding, a weight matrix times a few rows, and the greedy choice of a token.
use super::wrappers::{LaunchCheck, same};
use crate::device::{Device, family};
use crate::extent::Extent;
use crate::report::{Outcome, Report};
use crate::timed::{Bench, Work};
use crate::tolerance::Tolerance;
use sieve_core::Draw;
use sieve_kernels::step::{
    Epilogue, MAX_VECTORS, Vectors, draw, likeliest, matrix_vector, rms_norm_forward, swiglu_forward,
};
use sieve_kernels::{
    AttentionShape, CudaTensor, DType, GemmKind, KernelError, KernelFamily, KeySource, MatmulOutput, matmul,
};
use sieve_testing::round_bf16;

const EPSILON: f32 = 1e-6;

/// The result is rounded to bf16 once. The norm or activation before it rounds each element too, and may round to the
/// other side of a tie than the reference.
const TOLERANCE: Tolerance = Tolerance::new(0.0, 1e-6, 1.0 / 128.0);

/// Checks the GEMV kernel at sizes `[rows of x, n, k]`.
pub(super) fn check_launches(report: &mut Report, device: &dyn Device, extent: &Extent) {
    for [rows, n, k] in extent.shapes(&[
        [1, 40, 64],
        [3, 9, 2056],
        [4, 1, 8],
        [2, 777, 1032],
        [1, 4224, 768],
        [1, 2048, 6144],
        [4, 12_288, 2048],
        [1, 50_304, 1024],
    ]) {
        for form in ["plain", "normed", "swiglu"] {
            let outcome = launches(LaunchCheck::new(device, extent.seed), form, [rows, n, k]);
            report.add("matrix_vector", "kernel", &format!("{form}, {rows} x {n} x {k}"), outcome);
        }
    }
}

/// Checks on Hopper that a row has one product whatever the number of rows beside it, at sizes `[n, k]` of the weights
/// of a model of 80M and of 1.7B.
pub(super) fn check_same_bits(report: &mut Report, device: &dyn Device, extent: &Extent) {
    let shape = AttentionShape::new(1, 1, [1, 1], [128, 128]);
    if family(device, &shape, KeySource::Dense) != KernelFamily::Hopper {
        return;
    }
    for size in [[1536, 768], [768, 768], [4096, 768], [768, 2048], [4096, 2048], [2048, 2048], [2048, 6144]] {
        let outcome = same_bits(LaunchCheck::new(device, extent.seed), size);
        report.add("a row's product", "kernel", &format!("{} x {}", size[0], size[1]), outcome);
    }
}

/// Multiplies 4096 normed rows, and then only their first ones: each product, its sum with a residual and its SwiGLU
/// must have the same bits.
fn same_bits(mut calls: LaunchCheck<'_>, [n, k]: [usize; 2]) -> Outcome {
    const ROWS: usize = 4096;
    let mut bf16 = |shape: &[usize]| calls.flat(shape, DType::BF16).tensor;
    let (x, w, norm, residual) = (bf16(&[ROWS, k]), bf16(&[n, k]), bf16(&[k]), bf16(&[ROWS, n]));
    let results_of = |x: &CudaTensor, residual: &CudaTensor| -> Result<[(&str, CudaTensor); 3], KernelError> {
        let h = rms_norm_forward(x, &norm, EPSILON)?;
        let product = matmul(GemmKind::Nt, &h, &w, MatmulOutput::New(DType::BF16))?;
        let added = matmul(GemmKind::Nt, &h, &w, MatmulOutput::PlusC(residual))?;
        let gated = swiglu_forward(&product)?;
        Ok([("product", product), ("sum", added), ("gated", gated)])
    };
    let whole = results_of(&x, &residual)?;
    for rows in [1, 2, 3, 4, 5, 8, 16, 17, 33, 64, 100, 256] {
        let first = |of: &CudaTensor| {
            let width = of.shape()[1];
            of.view("check", "rows", &[rows, width], &[width, 1])
        };
        for ((what, result), (_, whole)) in results_of(&first(&x)?, &first(&residual)?)?.iter().zip(&whole) {
            calls.equal(&format!("{what} of {rows} rows"), result, &first(whole)?)?;
        }
    }
    Ok(0.0)
}

/// Checks the greedy choice of a token from logits at sizes `[rows, width of a row, vocabulary]`.
pub(super) fn check_likeliest(report: &mut Report, device: &dyn Device, extent: &Extent) {
    for &[rows, width, count] in extent.sizes(&[[3, 40, 40], [2, 2056, 1999], [5, 8, 1], [4, 50_304, 50_277]]) {
        let mut calls = LaunchCheck::new(device, extent.seed);
        let outcome = (|| {
            let x = calls.pitched([rows, width])?;
            let expected: Vec<f32> = x
                .values
                .chunks(width)
                .map(|row| {
                    let largest = row[..count].iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b));
                    row[..count].iter().position(|x| *x == largest).map_or(-1.0, |at| at as f32)
                })
                .collect();
            let ids = device.ints(&likeliest(&x.tensor, count)?)?;
            same("ids", &ids.iter().map(|id| *id as f32).collect::<Vec<_>>(), &expected)?;
            // A row with a number that is not finite gives -1.
            for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut row = x.values[..width].to_vec();
                row[count - 1] = wrong;
                let ids = device.ints(&likeliest(&device.float(&row, &[1, width], DType::BF16), count)?)?;
                same("ids", &[ids[0] as f32], &[-1.0])?;
            }
            Ok(0.0)
        })();
        report.add("likeliest", "kernel", &format!("{count} of {rows} x {width}"), outcome);
    }
}

/// Checks drawn tokens at sizes `[rows, width of a row, vocabulary]`: each must be the token that the CPU draws. Rows
/// differ in temperature, top-k and top-p; logits are spread widely or narrowly, or equal but for a few.
pub(super) fn check_draw(report: &mut Report, device: &dyn Device, extent: &Extent) {
    for &[rows, width, count] in extent.sizes(&[[8, 1200, 1111], [9, 8, 1], [12, 2056, 2056], [16, 50_304, 50_277]]) {
        for (name, factor) in [("wide", 20.0), ("narrow", 0.02), ("zeros of both signs", 0.0), ("usual", 3.0)] {
            let outcome = drawn(LaunchCheck::new(device, extent.seed), device, [rows, width, count], factor);
            report.add("draw", "kernel", &format!("{name}, {count} of {rows} x {width}"), outcome);
        }
    }
}

/// Draws tokens of rows of random logits times a factor, and compares them with the CPU's.
fn drawn(mut calls: LaunchCheck<'_>, device: &dyn Device, [rows, width, count]: [usize; 3], factor: f32) -> Outcome {
    let x = calls.pitched([rows, width])?;
    let values: Vec<f32> = x.values.iter().map(|x| round_bf16(x * factor)).collect();
    let logits = device.float(&values, &[rows, width], DType::BF16);
    // Numbers of all sizes, the least and the largest among them.
    let number = |row: usize| match row % 4 {
        0 => 0,
        1 => u64::MAX,
        _ => (row as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
    };
    for (at, temperature) in [1e-3, 0.8, 1.0, 5.0].into_iter().enumerate() {
        let draws: Vec<Draw> = (0..rows)
            .map(|row| {
                let top_k = [None, Some(1), Some(3), Some(count / 2 + 1)][(row + at) % 4];
                let top_p = [1.0, 0.95, 0.5, 1e-9, 0.999_999][row % 5];
                let min_p = [0.0, 0.05, 0.0, 1.0][row % 4];
                let draw = Draw::new(temperature, top_k, top_p, number(row)).above(min_p);
                if row % 7 == 6 { Draw::LIKELIEST } else { draw }
            })
            .collect();
        let words: Vec<i32> = draws.iter().flat_map(Draw::words).collect();
        let ids = device.ints(&draw(&logits, &device.int(&words, &[rows, Draw::WORDS]), count)?)?;
        let of_row = |(row, one): (&[f32], &Draw)| sieve_cpu::draw(&row[..count], one).map_or(-1.0, |id| id as f32);
        let expected: Vec<f32> = values.chunks(width).zip(&draws).map(of_row).collect();
        same("ids", &ids.iter().map(|id| *id as f32).collect::<Vec<_>>(), &expected)?;
    }
    for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut row = values[..width].to_vec();
        row[count - 1] = wrong;
        let words = device.int(&Draw::new(1.0, None, 1.0, 5).words(), &[1, Draw::WORDS]);
        let ids = device.ints(&draw(&device.float(&row, &[1, width], DType::BF16), &words, count)?)?;
        same("ids", &[ids[0] as f32], &[-1.0])?;
    }
    Ok(0.0)
}

/// Times the GEMVs of a layer and of the logits.
pub(super) fn bench(bench: &mut Bench<'_>, width: usize, d_ff: usize, vocab_size: usize) {
    for (n, k) in [(2 * width, width), (width, width), (2 * d_ff, width), (width, d_ff), (vocab_size, width)] {
        let (x, w) = (bench.bf16([1, k]), bench.bf16([n, k]));
        let work = Work::Bytes(2.0 * (n * k) as f64);
        bench.row("matrix_vector", &format!("{n}x{k}"), work, || {
            matrix_vector(Vectors::Plain(&x), &w, Epilogue::Stored)
        });
    }
}

/// Compares a form of the GEMV with sums in f64, also with a residual added; a second call must be equal, and more than
/// [`MAX_VECTORS`] rows must be refused.
fn launches(mut calls: LaunchCheck<'_>, form: &str, [rows, n, k]: [usize; 3]) -> Outcome {
    let x = calls.pitched([rows, k])?;
    let w = calls.pitched([if form == "swiglu" { 2 * n } else { n }, k])?;
    let norm = calls.flat(&[k], DType::BF16);
    let residual = calls.pitched([rows, n])?;
    let input = match form {
        "plain" => Vectors::Plain(&x.tensor),
        _ => Vectors::Normed(&x.tensor, &norm.tensor, EPSILON),
    };
    let h = x.values.chunks(k).map(|row| prepared(form, row, &norm.values));
    let sums = h.map(|h| {
        let of_row = |w: &[f32]| -> f64 { h.iter().zip(w).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum() };
        w.values.chunks(k).map(of_row).collect::<Vec<_>>()
    });
    let sums: Vec<f64> = match form {
        "swiglu" => sums.flat_map(|row| swiglu(&row)).collect(),
        _ => sums.flatten().collect(),
    };
    let alone: Vec<f32> = sums.iter().map(|sum| *sum as f32).collect();
    let finish = if form == "swiglu" { Epilogue::SwiGlu } else { Epilogue::Stored };
    let y = matrix_vector(input, &w.tensor, finish)?;
    calls.within(TOLERANCE, "y", &y, [&alone, &alone])?;
    calls.equal("a second call", &matrix_vector(input, &w.tensor, finish)?, &y)?;
    if form != "swiglu" {
        let added: Vec<f32> =
            (sums.iter().zip(&residual.values)).map(|(sum, r)| (sum + f64::from(*r)) as f32).collect();
        let sum = matrix_vector(input, &w.tensor, Epilogue::Added(&residual.tensor))?;
        calls.within(TOLERANCE, "y + residual", &sum, [&added, &added])?;
    }
    let refused = calls.flat(&[MAX_VECTORS + 1, k], DType::BF16);
    match matrix_vector(Vectors::Plain(&refused.tensor), &w.tensor, Epilogue::Stored) {
        Ok(_) => crate::report::wrong("more rows were taken"),
        Err(_) => Ok(calls.worst),
    }
}

/// The row that is multiplied: normed, where the form has a norm, in f64 and rounded to bf16 once.
fn prepared(form: &str, row: &[f32], norm: &[f32]) -> Vec<f32> {
    if form == "plain" {
        return row.to_vec();
    }
    let squares: f64 = row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
    let root = (squares / row.len() as f64 + f64::from(EPSILON)).sqrt();
    let normed = row.iter().zip(norm).map(|(x, w)| f64::from(*x) / root * f64::from(*w));
    normed.map(|x| round_bf16(x as f32)).collect()
}

/// SwiGLU of a row of gates, then ups; both are rounded to bf16 first.
fn swiglu(row: &[f64]) -> Vec<f64> {
    let row: Vec<f64> = row.iter().map(|x| f64::from(round_bf16(*x as f32))).collect();
    let (gates, ups) = row.split_at(row.len() / 2);
    gates.iter().zip(ups).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect()
}
