//! Checks and times the norm and rotary position embedding of queries and keys.
use super::wrappers::LaunchCheck;
use crate::device::Device;
use crate::extent::Extent;
use crate::report::{Outcome, Report};
use crate::tensors::floats;
use crate::timed::{Bench, Work};
use burn::tensor::{Int, Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use sieve_kernels::DType;
use sieve_kernels::step::{QkNormRope, Reuse, rope};
use sieve_ops::{QkNormRopeCall, RopeCall, RopeTables, reference};

const EPSILON: f64 = 1e-6;

/// Checks the kernels at sizes `[tokens, query heads, KV heads, head_dim]`.
pub(super) fn check_launches(report: &mut Report, device: &dyn Device, extent: &Extent) {
    let heads: &'static [[usize; 4]] =
        &[[5, 3, 1, 64], [1, 1, 1, 16], [77, 5, 3, 96], [1001, 12, 4, 64], [4099, 16, 8, 128], [33, 7, 2, 128]];
    for [tokens, heads, kv_heads, head_dim] in extent.shapes(heads) {
        let case = format!("{tokens} tokens, {heads}/{kv_heads} heads of {head_dim}");
        let calls = LaunchCheck::new(device, extent.seed);
        let outcome = qk_norm_rope_launches(calls, tokens, [heads, kv_heads], head_dim);
        report.add("qk_norm_rope", "kernel", &case, outcome);
    }
}

/// Times the forward pass, and the backward pass into a copy and in place.
pub(super) fn bench(bench: &mut Bench<'_>, tokens: usize, [heads, kv_heads]: [usize; 2], head_dim: usize) {
    const POSITIONS: usize = 2048;
    let packed = [1, tokens, heads + 2 * kv_heads, head_dim];
    let [qkv, dy] = [0, 1].map(|_| bench.bf16(packed));
    let [q_weight, k_weight] = [0, 1].map(|_| bench.bf16([head_dim]));
    let [cos, sin] = [0, 1].map(|_| bench.f32([POSITIONS, head_dim / 2]));
    let positions: Vec<i32> = (0..tokens).map(|at| (at % POSITIONS) as i32).collect();
    let positions = bench.device.int(&positions, &[1, tokens]);
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
    // All heads are read and written in bf16; the norms' backward pass reads queries and keys besides, and in place it
    // moves these alone.
    bench.row("qk_norm_rope forward", &shape, Work::Bytes(4.0 * all), || args.qk_norm_rope_forward(&qkv));
    let backward = |reuse| args.qk_norm_rope_backward(&qkv, &dy, reuse);
    let work = Work::Bytes(4.0 * all + 2.0 * rotated);
    bench.row("qk_norm_rope backward", &shape, work, || backward(Reuse::Copy));
    let (name, work) = ("qk_norm_rope backward, in place", Work::Bytes(6.0 * rotated));
    bench.row(name, &shape, work, || backward(Reuse::InPlace));
}

/// Compares rotation without norms, and both passes of norms with rotation, with the references; in place must give the
/// same bits.
fn qk_norm_rope_launches(
    mut calls: LaunchCheck<'_>,
    tokens: usize,
    [heads, kv_heads]: [usize; 2],
    head_dim: usize,
) -> Outcome {
    const POSITIONS: usize = 5000;
    let packed = heads + 2 * kv_heads;
    let shape = [1, tokens, packed, head_dim];
    let [qkv, dy] = [0, 1].map(|_| calls.flat(&shape, DType::BF16));
    let weights = [0, 1].map(|_| calls.flat(&[head_dim], DType::BF16));
    let positions: Vec<i32> = (0..tokens).map(|_| calls.random.below(POSITIONS) as i32).collect();
    let half = head_dim / 2;
    let angle = |at: usize| (at / half) as f64 * 10000f64.powf(-((at % half) as f64) / half as f64);
    let table_shape = [POSITIONS, half];
    let [cos, sin] = [f64::cos, f64::sin].map(|function| {
        let angles = (0..POSITIONS * half).map(angle);
        calls.input(angles.map(|angle| function(angle) as f32).collect(), &table_shape, DType::F32)
    });
    let positions_on = calls.device.int(&positions, &[1, tokens]);
    let args = QkNormRope {
        q_weight: &weights[0].tensor,
        k_weight: &weights[1].tensor,
        positions: &positions_on,
        cos: &cos.tensor,
        sin: &sin.tensor,
        num_kv_heads: kv_heads,
        epsilon: EPSILON as f32,
    };
    let on_host = TensorData::new(positions, [1, tokens]);
    let on_host = Tensor::<Flex, 2, Int>::from_data(on_host, &FlexDevice).into_primitive();
    let tables = || RopeTables { cos: cos.host(table_shape), sin: sin.host(table_shape) };
    let host_call = || QkNormRopeCall::<Flex> {
        q_weight: weights[0].host([head_dim]),
        k_weight: weights[1].host([head_dim]),
        positions: on_host.clone(),
        rope: tables(),
        num_kv_heads: kv_heads,
        epsilon: EPSILON,
    };
    let rotated = rope(&qkv.tensor, &positions_on, [&cos.tensor, &sin.tensor], kv_heads)?;
    let without_norms = RopeCall { positions: on_host.clone(), rope: tables(), num_kv_heads: kv_heads };
    let exact = reference::rope::<Flex>(qkv.host(shape), without_norms);
    calls.close("rotated", &rotated, &floats::<Flex, 4>(exact))?;
    let y = args.qk_norm_rope_forward(&qkv.tensor)?;
    let y_exact = reference::qk_norm_rope::<Flex>(qkv.host(shape), host_call());
    calls.close("y", &y, &floats::<Flex, 4>(y_exact))?;
    let [dqkv, dq, dk] = reference::qk_norm_rope_backward::<Flex>(qkv.host(shape), host_call(), dy.host(shape));
    let backward = |reuse| args.qk_norm_rope_backward(&qkv.tensor, &dy.tensor, reuse);
    let copied = backward(Reuse::Copy)?;
    calls.close("dqkv", &copied.dqkv, &floats::<Flex, 4>(dqkv))?;
    calls.close("dq_weight", &copied.dq_weight, &floats::<Flex, 1>(dq))?;
    calls.close("dk_weight", &copied.dk_weight, &floats::<Flex, 1>(dk))?;
    let in_place = backward(Reuse::InPlace)?;
    calls.equal("dqkv in place", &in_place.dqkv, &copied.dqkv)?;
    let [again, first] = [&in_place.dq_weight, &copied.dq_weight];
    calls.equal("dq_weight of two runs", again, first)?;
    Ok(calls.worst)
}
