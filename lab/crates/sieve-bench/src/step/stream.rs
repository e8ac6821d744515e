//! Checks and times the kernels of the residual stream: RMS norm and residual sum.
use super::wrappers::{LaunchCheck, plus};
use crate::device::Device;
use crate::extent::Extent;
use crate::report::{Outcome, Report};
use crate::tensors::floats;
use crate::timed::{Bench, Work};
use burn_flex::Flex;
use sieve_kernels::DType;
use sieve_kernels::step::{residual_add, rms_norm_backward, rms_norm_backward_with_output, rms_norm_forward};
use sieve_ops::{RmsNormCall, reference};
use sieve_testing::round_bf16;

const EPSILON: f64 = 1e-6;

/// Checks RMS norm at sizes `[rows, width]`, and one residual sum.
pub(super) fn check_launches(report: &mut Report, device: &dyn Device, extent: &Extent) {
    for &[rows, width] in extent.sizes(&[[7, 64], [5, 2056], [1, 8], [777, 1024], [2049, 768], [301, 5120], [7, 8192]])
    {
        let outcome = rms_norm_launches(LaunchCheck::new(device, extent.seed), [rows, width]);
        report.add("rms_norm", "kernel", &format!("{rows} x {width}"), outcome);
    }
    let outcome = residual_add_launches(LaunchCheck::new(device, extent.seed));
    report.add("residual_add", "kernel", "77 x 2056", outcome);
}

/// Times RMS norm and residual sum on `[tokens, width]`.
pub(super) fn bench(bench: &mut Bench<'_>, tokens: usize, width: usize) {
    let [x, residual, dy] = [0; 3].map(|_| bench.bf16([tokens, width]));
    let weight = bench.bf16([width]);
    let shape = format!("{tokens}x{width}");
    let epsilon = EPSILON as f32;
    // Two bytes for each bf16 tensor that is read or written.
    let moved = |bytes: usize| Work::Bytes((bytes * tokens * width) as f64);
    bench.row("rms_norm forward", &shape, moved(4), || rms_norm_forward(&x, &weight, epsilon));
    bench.row("rms_norm backward", &shape, moved(6), || {
        let no_residual = None;
        rms_norm_backward(&x, &weight, epsilon, &dy, no_residual)
    });
    bench.row("rms_norm backward + residual", &shape, moved(8), || {
        rms_norm_backward(&x, &weight, epsilon, &dy, Some(&residual))
    });
    let name = "rms_norm backward + residual + output";
    bench.row(name, &shape, moved(10), || rms_norm_backward_with_output(&x, &weight, epsilon, &dy, &residual));
    bench.row("residual_add", &shape, moved(6), || residual_add(&x, &residual));
}

/// Compares both passes of RMS norm with the references, also with a residual's gradient added, and with the output
/// computed again.
fn rms_norm_launches(mut calls: LaunchCheck<'_>, shape: [usize; 2]) -> Outcome {
    let mut drawn = || calls.pitched(shape);
    let [x, dy, residual] = [drawn()?, drawn()?, drawn()?];
    let width = shape[1];
    let weight = calls.flat(&[width], DType::BF16);
    let call = || RmsNormCall::<Flex> { x: x.host(shape), weight: weight.host([width]), epsilon: EPSILON };
    let y_exact = floats::<Flex, 2>(reference::rms_norm::<Flex>(call()));
    let epsilon = EPSILON as f32;
    let y = rms_norm_forward(&x.tensor, &weight.tensor, epsilon)?;
    calls.close("y", &y, &y_exact)?;

    let [dx_exact, dweight_exact] = reference::rms_norm_backward::<Flex>(call(), dy.host(shape));
    let (dx_exact, dweight_exact) = (floats::<Flex, 2>(dx_exact), floats::<Flex, 1>(dweight_exact));
    let backward = |d_residual| rms_norm_backward(&x.tensor, &weight.tensor, epsilon, &dy.tensor, d_residual);
    let no_residual = None;
    let (dx, dweight) = backward(no_residual)?;
    calls.close("dx", &dx, &dx_exact)?;
    calls.close("dweight", &dweight, &dweight_exact)?;
    let (again, dweight_again) = backward(no_residual)?;
    calls.equal("dx of two runs", &again, &dx)?;
    calls.equal("dweight of two runs", &dweight_again, &dweight)?;
    let (both, dweight_too) = backward(Some(&residual.tensor))?;
    calls.close("dx + its residual", &both, &plus(&dx_exact, &residual.values))?;
    calls.equal("dweight with a residual", &dweight_too, &dweight)?;
    let [x, weight, dy, residual] = [&x.tensor, &weight.tensor, &dy.tensor, &residual.tensor];
    let (with_y, dweight_too, y_again) = rms_norm_backward_with_output(x, weight, epsilon, dy, residual)?;
    calls.equal("dx with y", &with_y, &both)?;
    calls.equal("dweight with y", &dweight_too, &dweight)?;
    calls.close("y again", &y_again, &y_exact)?;
    Ok(calls.worst)
}

fn residual_add_launches(mut calls: LaunchCheck<'_>) -> Outcome {
    const SHAPE: [usize; 2] = [77, 2056];
    let (a, b) = (calls.pitched(SHAPE)?, calls.pitched(SHAPE)?);
    let exact: Vec<f32> = plus(&a.values, &b.values).into_iter().map(round_bf16).collect();
    calls.holds("bf16", &residual_add(&a.tensor, &b.tensor)?, &exact)?;
    Ok(calls.worst)
}
