//! Checks and times DMA's scores of keys, their ranks and their gradient.
use super::wrappers::LaunchCheck;
use crate::device::Device;
use crate::error::Result;
use crate::extent::Extent;
use crate::report::{Outcome, Report};
use crate::tensors::floats;
use crate::timed::{Bench, Work};
use burn_flex::Flex;
use sieve_kernels::{DType, PositionOrigin as Origin, Qkv, Recency as KernelRecency, ScoresBackward};
use sieve_ops::{AttentionSpec, DmaScoresCall, reference};

/// Numbers of KV heads that are checked.
pub(crate) const KV_HEADS: &[usize] = &[1, 2, 3, 4, 8, 16, 32];

/// Checks the kernels with two query heads for each KV head.
pub(super) fn check_launches(report: &mut Report, device: &dyn Device, extent: &Extent) {
    for &kv_heads in extent.pick(&[3][..], KV_HEADS) {
        for (tokens, head_dim) in [(33, 64), (257, 128), (1001, 96)] {
            let case = format!("{tokens} tokens, {kv_heads} heads of {head_dim}");
            let calls = LaunchCheck::new(device, extent.seed);
            let outcome = dma_scores_launches(calls, tokens, kv_heads, head_dim);
            report.add("dma_scores", "kernel", &case, outcome);
        }
    }
}

/// Times the scores and their backward pass.
pub(super) fn bench(
    bench: &mut Bench<'_>,
    tokens: usize,
    [heads, kv_heads]: [usize; 2],
    head_dim: usize,
) -> Result<()> {
    let packed = [1, tokens, heads + 2 * kv_heads, head_dim];
    let [qkv, dqkv] = [0, 1].map(|_| Qkv::packed(&bench.bf16(packed), heads, kv_heads));
    let w_dt = bench.f32([kv_heads, kv_heads * head_dim]);
    let (a, dz) = (bench.f32([kv_heads]), bench.f32([1, kv_heads, tokens]));
    let forward = || qkv.v.dma_scores(&w_dt, &a);
    let shape = format!("{tokens} kv heads {kv_heads} d{head_dim}");
    let keys = (tokens * kv_heads) as f64;
    // Reads v in bf16; writes x and z in f32.
    let work = Work::Bytes(keys * (2 * head_dim + 8) as f64);
    bench.row("dma_scores forward", &shape, work, forward);
    let scored = forward()?;
    // Reads v, reads and writes dv in bf16; reads x and dz in f32.
    let work = Work::Bytes(keys * (6 * head_dim + 8) as f64);
    bench.row("dma_scores backward", &shape, work, || {
        let call = ScoresBackward { values: &qkv.v, w_dt: &w_dt, a: &a, x: &scored.x, dz: &dz };
        call.dma_scores_backward(&dqkv.v)
    });
    Ok(())
}

/// Compares scores and gradients with the references, and ranks with scores plus slope times position.
fn dma_scores_launches(mut calls: LaunchCheck<'_>, tokens: usize, kv_heads: usize, head_dim: usize) -> Outcome {
    const BATCH: usize = 2;
    let shape = [BATCH, tokens, 4 * kv_heads, head_dim];
    let [qkv, dqkv] = [0, 1].map(|_| calls.flat(&shape, DType::BF16));
    let w_shape = [kv_heads, kv_heads * head_dim];
    let w_dt: Vec<f32> = (0..kv_heads * head_dim * kv_heads)
        .map(|_| calls.random.normal_with_tails() / (kv_heads as f32 * head_dim as f32).sqrt())
        .collect();
    let w_dt = calls.input(w_dt, &w_shape, DType::F32);
    let a = calls.flat(&[kv_heads], DType::F32);
    let dz = calls.flat(&[BATCH, kv_heads, tokens], DType::F32);
    let spec = AttentionSpec::dense([2 * kv_heads, kv_heads], head_dim);
    let on_host = DmaScoresCall::<Flex> { qkv: qkv.host(shape), w_dt: w_dt.host(w_shape), a: a.host([kv_heads]), spec };
    let z = floats::<Flex, 3>(reference::dma_scores(&on_host));
    let heads = Qkv::packed(&qkv.tensor, 2 * kv_heads, kv_heads);
    let scores = heads.v.dma_scores(&w_dt.tensor, &a.tensor)?;
    calls.close("z", &scores.z, &z)?;
    // The expected ranks are computed from the kernel's scores: the product of slope and position is rounded to f32,
    // then the sum.
    let z = calls.device.floats(&scores.z)?;
    let slopes: Vec<f32> = (0..kv_heads).map(|head| 1.0 / (3.0 + head as f32)).collect();
    let starts: Vec<i32> = (0..BATCH * tokens).map(|at| (at % tokens / 100 * 100) as i32).collect();
    let start = calls.device.int(&starts, &[BATCH, tokens]);
    for (what, origin) in
        [("ranks in documents", Origin::DocumentStart(&start)), ("ranks from a position on", Origin::First(100_001))]
    {
        let ranks = heads.v.dma_ranks(&w_dt.tensor, &a.tensor, Some(&KernelRecency { slopes: &slopes, origin }))?;
        let expected = z.iter().enumerate().map(|(at, z)| {
            let (row, token) = (at / tokens / kv_heads, at % tokens);
            let position = match origin {
                Origin::DocumentStart(_) => token - starts[row * tokens + token] as usize,
                Origin::First(first) => first + token,
            };
            z + position as f32 * slopes[at / tokens % kv_heads]
        });
        calls.holds(what, &ranks.z, &expected.collect::<Vec<f32>>())?;
    }

    let (dz_host, dqkv_host) = (dz.host([BATCH, kv_heads, tokens]), dqkv.host(shape));
    let [dqkv_exact, dw_exact, da_exact] = reference::dma_scores_backward(&on_host, dz_host, dqkv_host);
    let call = ScoresBackward { values: &heads.v, w_dt: &w_dt.tensor, a: &a.tensor, x: &scores.x, dz: &dz.tensor };
    let into = Qkv::packed(&dqkv.tensor, 2 * kv_heads, kv_heads);
    let (dw, da) = call.dma_scores_backward(&into.v)?;
    calls.close("dv among dqkv", &dqkv.tensor, &floats::<Flex, 4>(dqkv_exact))?;
    calls.close("dw_dt", &dw, &floats::<Flex, 2>(dw_exact))?;
    calls.close("da", &da, &floats::<Flex, 1>(da_exact))?;
    Ok(calls.worst)
}
