//! Checks and times the SwiGLU kernels.
use super::wrappers::{LaunchCheck, same};
use crate::device::Device;
use crate::extent::Extent;
use crate::report::{Outcome, Report, Wrong};
use crate::tensors::floats;
use crate::timed::{Bench, Work};
use burn_flex::Flex;
use sieve_kernels::step::{
    Reuse, swiglu_backward, swiglu_backward_with_amax, swiglu_backward_with_output, swiglu_forward,
    swiglu_forward_with_amax,
};
use sieve_kernels::{CudaTensor, DType};
use sieve_ops::reference;

/// Checks the SwiGLU wrappers at sizes `[rows, d_ff]`.
pub(super) fn check_launches(report: &mut Report, device: &dyn Device, extent: &Extent) {
    for [rows, d_ff] in extent.shapes(&[[1, 8], [3, 40], [2, 99], [777, 1032], [1024, 6144]]) {
        let outcome = swiglu_launches(LaunchCheck::new(device, extent.seed), rows, d_ff);
        report.add("swiglu", "kernel", &format!("{rows} x {d_ff}"), outcome);
    }
}

/// Times the forward pass, and the backward pass that also computes the output again.
pub(super) fn bench(bench: &mut Bench<'_>, tokens: usize, d_ff: usize) {
    let (gate_up, dy) = (bench.bf16([tokens, 2 * d_ff]), bench.bf16([tokens, d_ff]));
    let shape = format!("{tokens}x{d_ff}");
    // The forward pass moves gate, up and y in bf16; the backward pass also dy and the gradients of gate and up.
    let moved = |bytes: usize| Work::Bytes((bytes * tokens * d_ff) as f64);
    bench.row("swiglu forward", &shape, moved(6), || swiglu_forward(&gate_up));
    let name = "swiglu backward + output, in place";
    bench.row(name, &shape, moved(12), || swiglu_backward_with_output(&gate_up, &dy, Reuse::InPlace));
}

/// Compares forward and backward pass with the reference; each further form (in place, with the largest magnitude, with
/// the output) must give the same bits.
fn swiglu_launches(mut calls: LaunchCheck<'_>, rows: usize, d_ff: usize) -> Outcome {
    let (wide, narrow) = ([rows, 2 * d_ff], [rows, d_ff]);
    let gate_up = calls.pitched(wide)?;
    let dy = calls.pitched(narrow)?;
    let y = swiglu_forward(&gate_up.tensor)?;
    let exact = floats::<Flex, 2>(reference::swiglu::<Flex>(gate_up.host(wide)));
    calls.close("y", &y, &exact)?;
    let dx = swiglu_backward(&gate_up.tensor, &dy.tensor, Reuse::Copy)?;
    let dx_exact = reference::swiglu_backward::<Flex>(gate_up.host(wide), dy.host(narrow));
    calls.close("dx", &dx, &floats::<Flex, 2>(dx_exact))?;
    // In place needs an input without gaps. It is a copy, as the result overwrites it.
    let copy = calls.device.float(&gate_up.values, &wide, DType::BF16);
    let alone = swiglu_backward(&copy, &dy.tensor, Reuse::InPlace)?;
    calls.equal("dx alone in place", &alone, &dx)?;
    let (y_too, amax) = swiglu_forward_with_amax(&gate_up.tensor)?;
    calls.equal("y with its largest magnitude", &y_too, &y)?;
    largest_is_found(&calls, &y, &amax)?;
    let (dx_too, amax) = swiglu_backward_with_amax(&gate_up.tensor, &dy.tensor, Reuse::Copy)?;
    calls.equal("dx with its largest magnitude", &dx_too, &dx)?;
    largest_is_found(&calls, &dx, &amax)?;
    let (gate_up, dy) = (gate_up.tensor.contiguous(), dy.tensor.contiguous());
    let with_y = |reuse| swiglu_backward_with_output(&gate_up, &dy, reuse);
    let (dx_too, y_too) = with_y(Reuse::Copy)?;
    calls.equal("dx with y", &dx_too, &dx)?;
    calls.close("y again", &y_too, &exact)?;
    let (in_place, y_in_place) = with_y(Reuse::InPlace)?;
    calls.equal("dx in place", &in_place, &dx)?;
    calls.equal("y in place", &y_in_place, &y_too)?;
    Ok(calls.worst)
}

/// Checks that the maximum of `amax`, partial maxima by block, is the largest magnitude in `x`, bit for bit.
fn largest_is_found(calls: &LaunchCheck<'_>, x: &CudaTensor, amax: &CudaTensor) -> Result<(), Wrong> {
    let largest = |x: &CudaTensor| -> Result<f32, Wrong> {
        let values = calls.device.floats(x)?;
        Ok(values.iter().fold(0.0, |most, x| most.max(x.abs())))
    };
    same("the largest magnitude", &[largest(amax)?], &[largest(x)?])
}
