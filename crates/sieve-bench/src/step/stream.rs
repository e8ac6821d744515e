//! The residual stream: norms, and sums of two streams.
use super::wrappers::{Calls, Outcome, added, added_of, same, text};
use super::{On, Op, Results, normal};
use crate::bench::Bench;
use crate::device::Device;
use crate::extent::Extent;
use crate::place::{float, floats};
use crate::report::Report;
use burn::tensor::DType;
use burn_flex::{Flex, FlexDevice};
use sieve_kernels::step::{
    GradientTarget, residual_add, rms_norm_backward, rms_norm_backward_with_output, rms_norm_forward,
    rms_norm_residual_forward,
};
use sieve_ops::{DeviceBackend, RmsNormCall, reference};
use sieve_testing::round_bf16;

const EPSILON: f64 = 1e-6;

/// The ops, with the names of their rows.
pub(super) fn ops<B: DeviceBackend>() -> [Op<B>; 1] {
    [("op rms_norm", rms_norm_op)]
}

/// Checks the launches.
pub(super) fn check_launches(report: &mut Report, device: &dyn Device, extent: &Extent) {
    for &[rows, width] in extent.sizes(&[
        [7, 64],
        [5, 2056],
        [1, 8],
        [777, 1024],
        [2049, 768],
        [301, 5120],
        [7, 8192],
    ]) {
        let case = format!("{rows} x {width}");
        report.add(
            "rms_norm",
            "kernel",
            &case,
            rms_norm_launches(Calls::new(device, extent.seed), rows, width),
        );
    }
    report.add(
        "residual_add",
        "kernel",
        "77 x 2056",
        residual_add_launches(Calls::new(device, extent.seed)),
    );
}

/// Norms and sums of the residual stream.
pub(super) fn bench(bench: &mut Bench<'_>, tokens: usize, width: usize) {
    let device = bench.device.clone();
    let of = || normal([tokens, width], DType::BF16, &device);
    let (x, residual, dy) = (of(), of(), of());
    let weight = normal([width], DType::BF16, &device);
    let dweight = normal([width], DType::F32, &device);
    let shape = format!("{tokens}x{width}");
    let epsilon = EPSILON as f32;
    let moved = |times: usize| (times * tokens * width) as f64;
    let target = || GradientTarget::AddTo(&dweight);
    bench.moved("rms_norm forward", &shape, moved(4), &mut || {
        rms_norm_forward(&x, &weight, epsilon).map(drop)
    });
    bench.moved("rms_norm + residual", &shape, moved(8), &mut || {
        rms_norm_residual_forward(&x, &residual, &weight, epsilon).map(drop)
    });
    bench.moved("rms_norm backward", &shape, moved(6), &mut || {
        rms_norm_backward(&x, &weight, epsilon, &dy, None, target()).map(drop)
    });
    bench.moved("rms_norm backward + residual", &shape, moved(8), &mut || {
        rms_norm_backward(&x, &weight, epsilon, &dy, Some(&residual), target()).map(drop)
    });
    let name = "rms_norm backward + residual + output";
    bench.moved(name, &shape, moved(10), &mut || {
        rms_norm_backward_with_output(&x, &weight, epsilon, &dy, &residual, target()).map(drop)
    });
    bench.moved("residual_add", &shape, moved(6), &mut || {
        residual_add(&x, &residual).map(drop)
    });
}

fn rms_norm_op<B: DeviceBackend>(on: &mut On<'_, B>, rows: usize) -> Results {
    let norm = RmsNormCall::<B> {
        x: on.input([rows, 160]),
        weight: on.input([160]),
        epsilon: EPSILON,
    };
    let [dy, beside] = [0, 1].map(|_| on.input([rows, 160]));
    let (y, (dx, dweight), with_output) = if on.own() {
        (
            B::rms_norm(norm.clone()),
            B::rms_norm_backward(norm.clone(), dy.clone(), None),
            B::rms_norm_backward_with_output(norm, dy, beside),
        )
    } else {
        let y = reference::rms_norm::<B>(norm.clone());
        let (dx, dweight) = reference::rms_norm_backward::<B>(norm, dy);
        let sum = B::float_add(dx.clone(), beside);
        let with_output = (sum, dweight.clone(), y.clone());
        (y, (dx, dweight), with_output)
    };
    let (sum, dweight_again, y_again) = with_output;
    vec![
        ("y", floats::<B, 2>(y)),
        ("dx", floats::<B, 2>(dx)),
        ("dweight", floats::<B, 1>(dweight)),
        ("dx + residual", floats::<B, 2>(sum)),
        ("dweight again", floats::<B, 1>(dweight_again)),
        ("y again", floats::<B, 2>(y_again)),
    ]
}

fn rms_norm_launches(mut calls: Calls<'_>, rows: usize, width: usize) -> Outcome {
    let [x, residual, dy, beside] = [
        calls.pitched(rows, width, DType::BF16)?,
        calls.pitched(rows, width, DType::BF16)?,
        calls.pitched(rows, width, DType::BF16)?,
        calls.pitched(rows, width, DType::BF16)?,
    ];
    let (weight, before) = (calls.flat(&[width], DType::BF16), calls.flat(&[width], DType::F32));
    let host = |values: &[f32]| float::<Flex, 2>(values, [rows, width], &FlexDevice);
    let host_weight = || float::<Flex, 1>(&weight.values, [width], &FlexDevice);
    let call = |x: &[f32]| RmsNormCall::<Flex> {
        x: host(x),
        weight: host_weight(),
        epsilon: EPSILON,
    };
    let norm = |x: &[f32]| floats::<Flex, 2>(reference::rms_norm::<Flex>(call(x)));
    let epsilon = EPSILON as f32;
    let y = rms_norm_forward(&x.on, &weight.on, epsilon).map_err(text)?;
    calls.close("y", &y, &norm(&x.values))?;
    let (sum, y_of_sum) = rms_norm_residual_forward(&x.on, &residual.on, &weight.on, epsilon).map_err(text)?;
    let added: Vec<f32> = added(&x.values, &residual.values).map(round_bf16).collect();
    same("x + residual", &calls.device.floats(&sum).map_err(text)?, &added)?;
    calls.close("y of x + residual", &y_of_sum, &norm(&added))?;

    let (dx_exact, dweight_exact) = reference::rms_norm_backward::<Flex>(call(&x.values), host(&dy.values));
    let (dx_exact, dweight_exact) = (floats::<Flex, 2>(dx_exact), floats::<Flex, 1>(dweight_exact));
    let backward =
        |d_residual, target| rms_norm_backward(&x.on, &weight.on, epsilon, &dy.on, d_residual, target).map_err(text);
    let (dx, dweight) = backward(None, GradientTarget::New)?;
    calls.close("dx", &dx, &dx_exact)?;
    calls.close("dweight", &dweight, &dweight_exact)?;
    let (again, dweight_again) = backward(None, GradientTarget::New)?;
    calls.equal("dx of two runs", &again, &dx)?;
    calls.equal("dweight of two runs", &dweight_again, &dweight)?;
    let (both, total) = backward(Some(&beside.on), GradientTarget::AddTo(&before.on))?;
    let expected: Vec<f32> = added_of(&dx_exact, &beside.values);
    calls.close("dx + its residual", &both, &expected)?;
    calls.close("dweight added", &total, &added_of(&dweight_exact, &before.values))?;
    let (with_y, dweight_too, y_again) =
        rms_norm_backward_with_output(&x.on, &weight.on, epsilon, &dy.on, &beside.on, GradientTarget::New)
            .map_err(text)?;
    calls.equal("dx beside y", &with_y, &both)?;
    calls.equal("dweight beside y", &dweight_too, &dweight)?;
    calls.close("y again", &y_again, &norm(&x.values))?;
    Ok(calls.worst)
}

fn residual_add_launches(mut calls: Calls<'_>) -> Outcome {
    let (a, b) = (
        calls.pitched(77, 2056, DType::BF16)?,
        calls.pitched(77, 2056, DType::BF16)?,
    );
    let sum = residual_add(&a.on, &b.on).map_err(text)?;
    let exact: Vec<f32> = added(&a.values, &b.values).map(round_bf16).collect();
    same("bf16", &calls.device.floats(&sum).map_err(text)?, &exact)?;
    let (a, b) = (calls.flat(&[77, 2056], DType::F32), calls.flat(&[77, 2056], DType::F32));
    let sum = residual_add(&a.on, &b.on).map_err(text)?;
    same(
        "f32",
        &calls.device.floats(&sum).map_err(text)?,
        &added_of(&a.values, &b.values),
    )?;
    Ok(calls.worst)
}
