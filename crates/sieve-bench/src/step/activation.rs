//! Activations between projections: SwiGLU.
use super::wrappers::{Calls, Outcome, text};
use super::{On, Op, Results, normal};
use crate::bench::Bench;
use crate::device::Device;
use crate::extent::Extent;
use crate::place::{float, floats};
use crate::report::Report;
use burn::tensor::DType;
use burn_flex::{Flex, FlexDevice};
use sieve_kernels::step::{Reuse, swiglu_backward, swiglu_backward_with_output, swiglu_forward};
use sieve_ops::{DeviceBackend, reference};

/// The ops, with the names of their rows.
pub(super) fn ops<B: DeviceBackend>() -> [Op<B>; 1] {
    [("op swiglu", swiglu_op)]
}

/// Checks the launches.
pub(super) fn check_launches(report: &mut Report, device: &dyn Device, extent: &Extent) {
    for &[rows, d_ff] in extent.sizes(&[[1, 8], [3, 40], [2, 99], [777, 1032], [1024, 6144]]) {
        for dtype in [DType::BF16, DType::F32] {
            let case = format!("{rows} x {d_ff} {}", dtype.name());
            report.add(
                "swiglu",
                "kernel",
                &case,
                swiglu_launches(Calls::new(device, extent.seed), rows, d_ff, dtype),
            );
        }
    }
}

pub(super) fn bench(bench: &mut Bench<'_>, tokens: usize, d_ff: usize) {
    let gate_up = normal([tokens, 2 * d_ff], DType::BF16, &bench.device);
    let dy = normal([tokens, d_ff], DType::BF16, &bench.device);
    let shape = format!("{tokens}x{d_ff}");
    let moved = |times: usize| (times * tokens * d_ff) as f64;
    bench.moved("swiglu forward", &shape, moved(6), &mut || {
        swiglu_forward(&gate_up).map(drop)
    });
    let name = "swiglu backward + output, in place";
    bench.moved(name, &shape, moved(12), &mut || {
        swiglu_backward_with_output(&gate_up, &dy, Reuse::InPlace).map(drop)
    });
}

fn swiglu_op<B: DeviceBackend>(on: &mut On<'_, B>, rows: usize) -> Results {
    let (gate_up, dy) = (on.input([rows, 2 * 96]), on.input([rows, 96]));
    let (y, dx, (dx_again, y_again)) = if on.own() {
        (
            B::swiglu(gate_up.clone()),
            B::swiglu_backward(gate_up.clone(), dy.clone()),
            // Nobody else holds them now: they are written in place.
            B::swiglu_backward_with_output(gate_up, dy),
        )
    } else {
        let y = reference::swiglu::<B>(gate_up.clone());
        let dx = reference::swiglu_backward::<B>(gate_up, dy);
        (y.clone(), dx.clone(), (dx, y))
    };
    vec![
        ("y", floats::<B, 2>(y)),
        ("dx", floats::<B, 2>(dx)),
        ("dx again", floats::<B, 2>(dx_again)),
        ("y again", floats::<B, 2>(y_again)),
    ]
}

fn swiglu_launches(mut calls: Calls<'_>, rows: usize, d_ff: usize, dtype: DType) -> Outcome {
    let (gate_up, dy) = (calls.pitched(rows, 2 * d_ff, dtype)?, calls.pitched(rows, d_ff, dtype)?);
    let host = || float::<Flex, 2>(&gate_up.values, [rows, 2 * d_ff], &FlexDevice);
    let y = swiglu_forward(&gate_up.on).map_err(text)?;
    let exact = floats::<Flex, 2>(reference::swiglu::<Flex>(host()));
    calls.close("y", &y, &exact)?;
    let dx = swiglu_backward(&gate_up.on, &dy.on, Reuse::Copy).map_err(text)?;
    let host_dy = float::<Flex, 2>(&dy.values, [rows, d_ff], &FlexDevice);
    let dx_exact = floats::<Flex, 2>(reference::swiglu_backward::<Flex>(host(), host_dy));
    calls.close("dx", &dx, &dx_exact)?;
    // Without gaps, so that the results can take their place: a copy, since one row has no gap in any case.
    let copy = calls.device.float(&gate_up.values, &[rows, 2 * d_ff], dtype);
    let alone = swiglu_backward(&copy, &dy.on, Reuse::InPlace);
    calls.equal("dx alone in place", &alone.map_err(text)?, &dx)?;
    let (gate_up, dy) = (gate_up.on.contiguous(), dy.on.contiguous());
    let with_y = |reuse| swiglu_backward_with_output(&gate_up, &dy, reuse).map_err(text);
    let (dx_too, y_too) = with_y(Reuse::Copy)?;
    calls.equal("dx beside y", &dx_too, &dx)?;
    calls.close("y again", &y_too, &exact)?;
    let (in_place, y_in_place) = with_y(Reuse::InPlace)?;
    calls.equal("dx in place", &in_place, &dx)?;
    calls.equal("y in place", &y_in_place, &y_too)?;
    Ok(calls.worst)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulator::tests::emulated;

    #[test]
    fn emulated_launches_pass() {
        let extent = Extent::emulated(1, 64, 3);
        emulated(1, |device, report| {
            check_launches(report, device, &extent);
            Ok(())
        });
    }
}
