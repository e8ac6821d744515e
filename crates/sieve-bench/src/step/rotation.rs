//! Norm and rotary position of heads of queries and keys.
use super::wrappers::{Calls, Outcome, text};
use super::{On, Op, Results, normal};
use crate::bench::Bench;
use crate::device::Device;
use crate::error::Result as BenchResult;
use crate::extent::Extent;
use crate::place::{float, floats};
use crate::report::Report;
use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use sieve_kernels::step::{GradientTarget, QkNormRope, Reuse};
use sieve_ops::{DeviceBackend, QkNormRopeCall, RopeTables, reference};

const EPSILON: f64 = 1e-6;

/// The ops, with the names of their rows.
pub(super) fn ops<B: DeviceBackend>() -> [Op<B>; 1] {
    [("op qk_norm_rope", qk_norm_rope_op)]
}

/// Checks the launches.
pub(super) fn check_launches(report: &mut Report, device: &dyn Device, extent: &Extent) {
    let heads: &[[usize; 4]] = &[
        [5, 3, 1, 64],
        [1, 1, 1, 16],
        [77, 5, 3, 96],
        [1001, 12, 4, 64],
        [4099, 16, 8, 128],
        [33, 7, 2, 128],
    ];
    for &[tokens, heads, kv_heads, head_dim] in extent.sizes(heads) {
        let case = format!("{tokens} tokens, {heads}/{kv_heads} heads of {head_dim}");
        let outcome = qk_norm_rope_launches(Calls::new(device, extent.seed), tokens, [heads, kv_heads], head_dim);
        report.add("qk_norm_rope", "kernel", &case, outcome);
    }
}

pub(super) fn bench(
    bench: &mut Bench<'_>,
    tokens: usize,
    [heads, kv_heads]: [usize; 2],
    head_dim: usize,
) -> BenchResult<()> {
    const POSITIONS: usize = 2048;
    let device = bench.device.clone();
    let packed = [1, tokens, heads + 2 * kv_heads, head_dim];
    let (qkv, dy) = (
        normal(packed, DType::BF16, &device),
        normal(packed, DType::BF16, &device),
    );
    let [q_weight, k_weight] = [0, 1].map(|_| normal([head_dim], DType::BF16, &device));
    let [dq_weight, dk_weight] = [0, 1].map(|_| normal([head_dim], DType::F32, &device));
    let [cos, sin] = [0, 1].map(|_| normal([POSITIONS, head_dim / 2], DType::F32, &device));
    let positions: Vec<i32> = (0..tokens).map(|at| (at % POSITIONS) as i32).collect();
    let positions = device.int(&positions, &[1, tokens]);
    let args = QkNormRope {
        q_weight: &q_weight,
        k_weight: &k_weight,
        positions: &positions,
        cos: &cos,
        sin: &sin,
        num_kv_heads: kv_heads,
        epsilon: EPSILON as f32,
    };
    let shape = format!("{tokens} h{heads}/{kv_heads} d{head_dim}");
    let all = (tokens * packed[2] * head_dim) as f64;
    let rotated = (tokens * (heads + kv_heads) * head_dim) as f64;
    bench.moved("qk_norm_rope forward", &shape, 4.0 * all, &mut || {
        args.qk_norm_rope_forward(&qkv, Reuse::Copy).map(drop)
    });
    let backward = |reuse| {
        let targets = [&dq_weight, &dk_weight].map(GradientTarget::AddTo);
        args.qk_norm_rope_backward(&qkv, &dy, reuse, targets).map(drop)
    };
    let bytes = 4.0 * all + 2.0 * rotated;
    bench.moved("qk_norm_rope backward", &shape, bytes, &mut || backward(Reuse::Copy));
    let name = "qk_norm_rope backward, in place";
    bench.moved(name, &shape, 6.0 * rotated, &mut || backward(Reuse::InPlace));
    Ok(())
}

fn qk_norm_rope_op<B: DeviceBackend>(on: &mut On<'_, B>, rows: usize) -> Results {
    let (batch, heads, kv_heads, width) = (2, 4, 2, 64);
    let shape = [batch, rows, heads + 2 * kv_heads, width];
    let qkv = on.input(shape);
    let (q_weight, k_weight) = (on.input([width]), on.input([width]));
    let dy = on.input(shape);
    let positions = on.indices([batch, rows], rows).into_primitive();
    let angles: Vec<f32> = (0..rows * width / 2)
        .map(|at| (at / (width / 2)) as f32 / (1 + at % (width / 2)) as f32)
        .collect();
    let table = |of: fn(f32) -> f32| {
        let values: Vec<f32> = angles.iter().map(|&angle| of(angle)).collect();
        float::<B, 2>(&values, [rows, width / 2], on.device)
    };
    let call = QkNormRopeCall::<B> {
        q_weight,
        k_weight,
        positions,
        rope: RopeTables {
            cos: table(f32::cos),
            sin: table(f32::sin),
        },
        num_kv_heads: kv_heads,
        epsilon: EPSILON,
    };
    let (y, (dx, dq, dk)) = if on.own() {
        (
            B::qk_norm_rope(qkv.clone(), call.clone()),
            B::qk_norm_rope_backward(qkv, call, dy),
        )
    } else {
        (
            reference::qk_norm_rope::<B>(qkv.clone(), call.clone()),
            reference::qk_norm_rope_backward::<B>(qkv, call, dy),
        )
    };
    vec![
        ("y", floats::<B, 4>(y)),
        ("dx", floats::<B, 4>(dx)),
        ("dq_weight", floats::<B, 1>(dq)),
        ("dk_weight", floats::<B, 1>(dk)),
    ]
}

fn qk_norm_rope_launches(
    mut calls: Calls<'_>,
    tokens: usize,
    [heads, kv_heads]: [usize; 2],
    head_dim: usize,
) -> Outcome {
    const POSITIONS: usize = 5000;
    let packed = heads + 2 * kv_heads;
    let shape = [1, tokens, packed, head_dim];
    let (qkv, dy) = (calls.flat(&shape, DType::BF16), calls.flat(&shape, DType::BF16));
    let weights = [0, 1].map(|_| calls.flat(&[head_dim], DType::BF16));
    let positions: Vec<i32> = (0..tokens).map(|_| calls.random.below(POSITIONS) as i32).collect();
    let half = head_dim / 2;
    let angle = |at: usize| (at / half) as f64 * 10000f64.powf(-((at % half) as f64) / half as f64);
    let table = |of: fn(f64) -> f64| -> Vec<f32> { (0..POSITIONS * half).map(|at| of(angle(at)) as f32).collect() };
    let (cos, sin) = (table(f64::cos), table(f64::sin));
    let on = |values: &[f32]| calls.device.float(values, &[POSITIONS, half], DType::F32);
    let (cos_on, sin_on) = (on(&cos), on(&sin));
    let positions_on = calls.device.int(&positions, &[1, tokens]);
    let args = QkNormRope {
        q_weight: &weights[0].on,
        k_weight: &weights[1].on,
        positions: &positions_on,
        cos: &cos_on,
        sin: &sin_on,
        num_kv_heads: kv_heads,
        epsilon: EPSILON as f32,
    };
    let host = |values: &[f32]| float::<Flex, 4>(values, shape, &FlexDevice);
    let host_call = || QkNormRopeCall::<Flex> {
        q_weight: float::<Flex, 1>(&weights[0].values, [head_dim], &FlexDevice),
        k_weight: float::<Flex, 1>(&weights[1].values, [head_dim], &FlexDevice),
        positions: Tensor::<Flex, 2, Int>::from_data(TensorData::new(positions.clone(), [1, tokens]), &FlexDevice)
            .into_primitive(),
        rope: RopeTables {
            cos: float::<Flex, 2>(&cos, [POSITIONS, half], &FlexDevice),
            sin: float::<Flex, 2>(&sin, [POSITIONS, half], &FlexDevice),
        },
        num_kv_heads: kv_heads,
        epsilon: EPSILON,
    };
    let y = args.qk_norm_rope_forward(&qkv.on, Reuse::Copy).map_err(text)?;
    let y_exact = reference::qk_norm_rope::<Flex>(host(&qkv.values), host_call());
    calls.close("y", &y, &floats::<Flex, 4>(y_exact))?;
    let (dqkv, dq, dk) = reference::qk_norm_rope_backward::<Flex>(host(&qkv.values), host_call(), host(&dy.values));
    let backward = |reuse| {
        let targets = [GradientTarget::New; 2];
        args.qk_norm_rope_backward(&qkv.on, &dy.on, reuse, targets)
            .map_err(text)
    };
    let copied = backward(Reuse::Copy)?;
    calls.close("dqkv", &copied.dqkv, &floats::<Flex, 4>(dqkv))?;
    calls.close("dq_weight", &copied.dq_weight, &floats::<Flex, 1>(dq))?;
    calls.close("dk_weight", &copied.dk_weight, &floats::<Flex, 1>(dk))?;
    let in_place = backward(Reuse::InPlace)?;
    calls.equal("dqkv in place", &in_place.dqkv, &copied.dqkv)?;
    calls.equal("dq_weight of two runs", &in_place.dq_weight, &copied.dq_weight)?;
    let y_in_place = args.qk_norm_rope_forward(&qkv.on, Reuse::InPlace).map_err(text)?;
    calls.equal("y in place", &y_in_place, &y)?;
    Ok(calls.worst)
}
