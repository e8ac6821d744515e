//! Checks and times the kernels of attention's sinks.
use super::wrappers::LaunchCheck;
use crate::device::Device;
use crate::extent::Extent;
use crate::report::{Outcome, Report};
use crate::tensors::floats;
use crate::timed::{Bench, Work};
use burn_flex::Flex;
use sieve_kernels::{AttentionResult, CudaTensor, DType};
use sieve_ops::{AttentionOutput, reference};

/// Checks the kernels at sizes `[batch, seq_len, heads, width]`, with rows that see no key.
pub(super) fn check_launches(report: &mut Report, device: &dyn Device, extent: &Extent) {
    for shape in extent.shapes(&[[1, 1, 1, 64], [2, 33, 3, 64], [2, 17, 2, 20], [1, 65, 5, 7], [2, 4097, 16, 128]]) {
        for dtype in [DType::BF16, DType::F32] {
            let outcome = sinks_launches(LaunchCheck::new(device, extent.seed), shape, dtype);
            report.add("attention_sinks", "kernel", &format!("{shape:?}, sinks {}", dtype.name()), outcome);
        }
    }
}

/// Times the joining of sinks to the output of attention, and their gradient.
pub(super) fn bench(bench: &mut Bench<'_>, tokens: usize, heads: usize, width: usize) {
    let shape = [1, tokens, heads, width];
    let [o, d_o] = [0, 1].map(|_| bench.bf16(shape));
    let (lse, sinks) = (bench.f32([1, heads, tokens]), bench.bf16([heads]));
    let result = || AttentionResult { o: o.clone(), lse: lse.clone(), o_low: None, base: None };
    let name = format!("{tokens} heads {heads} d{width}");
    // Both kernels read or write o twice over; the log-sum-exp is small beside it.
    let work = || Work::Bytes((4 * tokens * heads * width) as f64);
    bench.row("attention sinks forward", &name, work(), || result().with_sinks(&sinks));
    bench.row("attention sinks backward", &name, work(), || result().sinks_gradient(&sinks, &d_o));
}

/// Compares o, lse and the sinks' gradient with the references; a second gradient must have the same bits.
fn sinks_launches(mut calls: LaunchCheck<'_>, shape: [usize; 4], dtype: DType) -> Outcome {
    let [batch, seq_len, heads, width] = shape;
    let lse_shape = [batch, heads, seq_len];
    let mut lse: Vec<f32> = (0..lse_shape.iter().product()).map(|_| calls.random.normal_with_tails()).collect();
    let mut o = calls.flat(&shape, DType::BF16).values;
    let d_o = calls.flat(&shape, DType::BF16);
    // Every seventh token sees no key: its output is 0.
    for (n, row) in o.chunks_mut(width).enumerate().filter(|(n, _)| n / heads % seq_len % 7 == 3) {
        let (row_idx, head) = (n / heads, n % heads);
        row.fill(0.0);
        lse[(row_idx / seq_len * heads + head) * seq_len + row_idx % seq_len] = f32::NEG_INFINITY;
    }
    let mut sinks = calls.random.bf16_normals(heads);
    if heads > 2 {
        // A sink without weight, and one that takes all; its number is cut to what bf16 holds.
        (sinks[1], sinks[2]) = (f32::NEG_INFINITY, 1e30);
        sinks[2] = f32::from_bits(sinks[2].to_bits() & 0xffff_0000);
    }
    let sinks = calls.input(sinks, &[heads], dtype);
    let [o, lse] = [calls.input(o, &shape, DType::BF16), calls.input(lse, &lse_shape, DType::F32)];
    let (host_o, host_lse) = (o.host(shape), lse.host(lse_shape));
    let exact = AttentionOutput::<Flex> { o: host_o, lse: host_lse, o_low: None, base: None };
    let exact = reference::join_sinks::<Flex>(exact, sinks.host([heads]));
    let result = AttentionResult { o: o.tensor, lse: lse.tensor, o_low: None, base: None };
    let joined = result.with_sinks(&sinks.tensor)?;
    calls.close("o", &joined.o, &floats::<Flex, 4>(exact.o))?;
    // Exact infinities would make differences of NaN.
    let finite = |values: Vec<f32>| values.into_iter().map(|x| x.clamp(-1e30, 1e30)).collect::<Vec<_>>();
    let got = calls.input(finite(calls.device.floats(&joined.lse)?), &lse_shape, DType::F32);
    calls.close("lse", &got.tensor, &finite(floats::<Flex, 3>(exact.lse)))?;
    let gradient = joined.sinks_gradient(&sinks.tensor, &d_o.tensor)?;
    let values = |x: &CudaTensor| calls.device.floats(x);
    let (o, lse) = (values(&joined.o)?, values(&joined.lse)?);
    let (o, lse) = (calls.input(o, &shape, DType::BF16), calls.input(lse, &lse_shape, DType::F32));
    let output = AttentionOutput::<Flex> { o: o.host(shape), lse: lse.host(lse_shape), o_low: None, base: None };
    let exact = reference::sinks_backward::<Flex>(&output, sinks.host([heads]), d_o.host(shape));
    calls.close("dsinks", &gradient, &floats::<Flex, 1>(exact))?;
    let again = joined.sinks_gradient(&sinks.tensor, &d_o.tensor)?;
    calls.equal("dsinks again", &again, &gradient)?;
    Ok(calls.worst)
}
