//! Checks and times the cross-entropy kernel: vocabularies of any size, labels that are ignored or out of range. It
//! overwrites the logits with their gradients, or computes the same losses alone.
use super::wrappers::{LaunchCheck, SEED, gapped};
use crate::device::Device;
use crate::error::Result;
use crate::extent::Extent;
use crate::report::{Outcome, Report, wrong};
use crate::timed::{Bench, Work};
use crate::tolerance::Tolerance;
use sieve_kernels::DType;
use sieve_kernels::step::{LogitRows, cross_entropy, cross_entropy_with_gradients};
use sieve_testing::{Random, round_bf16};

/// Rows and vocabulary. The kernel keeps the first 28,672 bf16 columns in registers and reads later columns twice.
const SIZES: &[[usize; 2]] = &[[1, 1], [7, 13], [2, 50257], [5, 4096], [333, 50257], [64, 50280], [19, 151_936]];

/// The emulator checks this many of the sizes.
const EMULATED: usize = 3;

/// Checks the loss kernels at every size, with gradients and without.
pub(super) fn check_launches(report: &mut Report, device: &dyn Device, extent: &Extent) {
    let sizes = SIZES[..extent.pick(EMULATED, SIZES.len())].iter().filter(|[rows, vocab]| extent.takes(rows * vocab));
    for &[rows, vocab] in sizes {
        let outcome = losses(LaunchCheck::new(device, extent.seed), rows, vocab);
        report.add("cross_entropy", "kernel", &format!("{rows} x {vocab}"), outcome);
    }
    let outcome = outside(LaunchCheck::new(device, extent.seed));
    report.add("cross_entropy", "kernel", "a label outside", outcome);
}

/// Times losses with gradients, and losses alone.
pub(super) fn bench(bench: &mut Bench<'_>, rows: usize, vocab: usize) -> Result<()> {
    let mut random = Random(SEED);
    let labels: Vec<i32> = (0..rows).map(|_| random.below(vocab) as i32).collect();
    let labels = bench.device.int(&labels, &[rows]);
    let losses = bench.f32([rows]);
    let width = vocab.next_multiple_of(8);
    let shape = format!("{rows}x{vocab}");
    let bytes = (2 * rows * vocab) as f64;
    let logits = LogitRows::of(&bench.bf16([rows, width]), vocab)?;
    bench.row("cross_entropy losses", &shape, Work::Bytes(bytes), || cross_entropy(&logits, &labels, &losses));
    // The logits are read and overwritten.
    bench.row("cross_entropy, in place", &shape, Work::Bytes(2.0 * bytes), || {
        cross_entropy_with_gradients(&logits, &labels, &losses)
    });
    Ok(())
}

/// Expected loss and gradients of one row of logits.
fn expected(logits: &[f32], label: i32) -> (f32, Vec<f32>) {
    let Ok(label) = usize::try_from(label) else {
        // A label below 0 is ignored.
        return (0.0, vec![0.0; logits.len()]);
    };
    let wide = |x: f32| f64::from(x);
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|&x| (wide(x) - wide(largest)).exp()).sum();
    let lse = wide(largest) + total.ln();
    let gradient = |(at, &x): (usize, &f32)| {
        let p = (wide(x) - lse).exp();
        let target = f64::from(u8::from(at == label));
        (p - target) as f32
    };
    ((lse - wide(logits[label])) as f32, logits.iter().enumerate().map(gradient).collect())
}

/// Compares the losses, alone and with gradients, which must be equal, and the gradients that are left in the logits.
/// Every fifth label is ignored.
fn losses(mut calls: LaunchCheck<'_>, rows: usize, vocab: usize) -> Outcome {
    let device = calls.device;
    let width = vocab.next_multiple_of(8);
    let normals = calls.random.bf16_normals(rows * vocab);
    let values: Vec<f32> = normals.iter().map(|x| round_bf16(3.0 * x)).collect();
    // The columns past the vocabulary are NaN: they must reach no result.
    let buffer = gapped(&values, vocab, width);
    let labels: Vec<i32> = (0..rows)
        .map(|at| match at % 5 {
            3 => -100,
            _ => calls.random.below(vocab) as i32,
        })
        .collect();
    let rows_and_labels = values.chunks_exact(vocab).zip(&labels);
    let (losses, gradients): (Vec<f32>, Vec<_>) = rows_and_labels.map(|(row, &label)| expected(row, label)).unzip();
    let gradients = gradients.concat();
    let rounded: Vec<f32> = gradients.iter().map(|&x| round_bf16(x)).collect();

    let labels_on_device = device.int(&labels, &[rows]);
    let logits = device.float(&buffer, &[rows, width], DType::BF16);
    let [alone, found] = [(); 2].map(|()| device.float(&vec![f32::NAN; rows], &[rows], DType::F32));
    let logit_rows = LogitRows::of(&logits, vocab)?;
    cross_entropy(&logit_rows, &labels_on_device, &alone)?;
    cross_entropy_with_gradients(&logit_rows, &labels_on_device, &found)?;
    calls.close("losses", &found, &losses)?;
    calls.equal("losses alone", &alone, &found)?;
    let after = device.floats(&logits)?;
    let after = after.chunks_exact(width).flat_map(|row| &row[..vocab]).copied();
    let after: Vec<f32> = after.collect();
    let ratio = Tolerance::new(2.0, 1e-6, 1e-6).judge("dlogits", &after, &rounded, &gradients)?;
    Ok(calls.worst.max(ratio))
}

/// Checks that a label past the vocabulary makes the loss of its own row NaN, and of no other row.
fn outside(mut calls: LaunchCheck<'_>) -> Outcome {
    let device = calls.device;
    let values = calls.random.bf16_normals(3 * 8);
    let logits = device.float(&values, &[3, 8], DType::BF16);
    let logits = LogitRows::of(&logits, 8)?;
    let losses = device.float(&[0.0; 3], &[3], DType::F32);
    cross_entropy(&logits, &device.int(&[2, 9, 7], &[3]), &losses)?;
    let got = device.floats(&losses)?;
    if got.iter().map(|x| x.is_nan()).eq([false, true, false]) {
        Ok(0.0)
    } else {
        wrong(format!("the losses of labels 2, 9 and 7 among 8 are {got:?}"))
    }
}
