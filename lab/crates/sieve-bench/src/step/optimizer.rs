//! Checks and times AdamW, split masters, and sums over tensors.
use super::wrappers::{LaunchCheck, same};
use crate::device::Device;
use crate::extent::Extent;
use crate::report::{Outcome, Report, Wrong, wrong};
use crate::timed::{Bench, Work};
use sieve_core::AdamWStep;
use sieve_kernels::DType;
use sieve_kernels::step::{AdamwTensors, FixedSum, Term, join_master, split_master};
use sieve_kernels::{CudaTensor, KernelError};
use sieve_testing::{Random, round_bf16};

/// Checks the optimizer's kernels on tensors of given numbers of elements.
pub(super) fn check_launches(report: &mut Report, device: &dyn Device, extent: &Extent) {
    for &size in extent.sizes(&[1027, 1, 5, 65536, 65537, 1_234_567]) {
        let (case, calls) = (size.to_string(), || LaunchCheck::new(device, extent.seed));
        let outcome = adamw_launches(calls(), size);
        report.add("adamw, split_master", "kernel", &case, outcome);
        report.add("sums", "kernel", &case, sums_launches(calls(), size));
    }
}

/// Times an AdamW update of both kinds of masters, and a sum of squares.
pub(super) fn bench(bench: &mut Bench<'_>, size: usize) {
    let [param, exp_avg, exp_avg_sq, grad] = [0; 4].map(|_| bench.f32([size]));
    let [leaf, rest] = [0; 2].map(|_| bench.bf16([size]));
    let grad_scale = bench.device.float(&[1.0], &[1], DType::F32);
    let update = |param| {
        let tensors = [param, &exp_avg, &exp_avg_sq];
        step(AdamWStep::usual(1e-3, 1), tensors, [&grad, &grad_scale], Some(&leaf))
    };
    let shape = size.to_string();
    // Bytes moved for each parameter: an f32 master 8 and its bf16 copy (the leaf) 2, or a master split into the leaf
    // and its low 16 bits 4 each; both moments 16; the gradient 4. The gradient is only read, the leaf beside an f32
    // master only written, all else both.
    let moved = |bytes: usize| Work::Bytes((bytes * size) as f64);
    bench.row("adamw, f32 master", &shape, moved(30), || update(&param));
    bench.row("adamw, split master", &shape, moved(28), || update(&rest));
    bench.row("sum of squares", &shape, moved(4), || FixedSum::of(&grad, Term::Square));
}

/// One AdamW update in place. `leaf`, where given, gets the updated parameter in bf16.
fn step(
    update: AdamWStep,
    [param, exp_avg, exp_avg_sq]: [&CudaTensor; 3],
    [grad, grad_scale]: [&CudaTensor; 2],
    leaf: Option<&CudaTensor>,
) -> Result<(), KernelError> {
    let tensors = AdamwTensors { param, exp_avg, exp_avg_sq, grad, grad_scale, leaf };
    tensors.adamw(update)
}

/// Compares an AdamW update with f64; an update of a split master must give the same bits, and a gradient scale of 0 or
/// not finite must change nothing.
fn adamw_launches(mut calls: LaunchCheck<'_>, size: usize) -> Outcome {
    let update = AdamWStep::usual(3e-3, 7);
    let normal = |random: &mut Random| {
        let numbers = (0..size).map(|_| random.normal_with_tails());
        numbers.collect::<Vec<f32>>()
    };
    let [p, m, g] = [0, 1, 2].map(|_| normal(&mut calls.random));
    let v: Vec<f32> = normal(&mut calls.random).iter().map(|x| x * x).collect();
    let device = calls.device;
    let upload = |values: &[f32]| device.float(values, &[size], DType::F32);
    let scale = device.float(&[GRADIENT_SCALE], &[1], DType::F32);
    let (param, exp_avg, exp_avg_sq, grad) = (upload(&p), upload(&m), upload(&v), upload(&g));
    let leaf = device.float(&vec![f32::NAN; size], &[size], DType::BF16);
    step(update, [&param, &exp_avg, &exp_avg_sq], [&grad, &scale], Some(&leaf))?;
    let exact = exact_update(update, [&p, &m, &v], &g, GRADIENT_SCALE);
    for (name, got, exact) in
        [("param", &param, &exact[0]), ("exp_avg", &exp_avg, &exact[1]), ("exp_avg_sq", &exp_avg_sq, &exact[2])]
    {
        calls.close(name, got, exact)?;
    }
    let whole = device.floats(&param)?;
    let rounded: Vec<f32> = whole.iter().map(|&x| round_bf16(x)).collect();
    calls.holds("leaf", &leaf, &rounded)?;

    // The same update on a split master, the bf16 leaf and its rest, gives the same bits.
    let (leaf, rest) = split_master(&upload(&p))?;
    let joined = || join_master(&leaf, &rest);
    calls.holds("split and joined", &joined()?, &p)?;
    let (moment, second) = (upload(&m), upload(&v));
    step(update, [&rest, &moment, &second], [&grad, &scale], Some(&leaf))?;
    calls.equal("param of a split master", &joined()?, &param)?;
    calls.equal("exp_avg of a split master", &moment, &exp_avg)?;
    calls.equal("exp_avg_sq of a split master", &second, &exp_avg_sq)?;

    // A gradient scale of 0, NaN or infinity skips the update, whatever the gradient holds.
    let nan = device.float(&vec![f32::NAN; size], &[size], DType::F32);
    for gate in [0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let gate = device.float(&[gate], &[1], DType::F32);
        let (p, m, v) = (upload(&whole), upload(&exact[1]), upload(&exact[2]));
        let no_leaf = None;
        step(update, [&p, &m, &v], [&nan, &gate], no_leaf)?;
        calls.holds("param behind a gate", &p, &whole)?;
        calls.holds("exp_avg behind a gate", &m, &exact[1])?;
        calls.holds("exp_avg_sq behind a gate", &v, &exact[2])?;
        step(update, [&rest, &m, &v], [&nan, &gate], Some(&leaf))?;
        calls.equal("a split master behind a gate", &joined()?, &param)?;
    }
    Ok(calls.worst)
}

/// Factor on the gradients of a checked update.
const GRADIENT_SCALE: f32 = 0.5;

/// Parameters, first moments and second moments after an AdamW step, computed in f64.
fn exact_update(update: AdamWStep, [p, m, v]: [&[f32]; 3], g: &[f32], gradient_scale: f32) -> [Vec<f32>; 3] {
    let mut exact = [Vec::new(), Vec::new(), Vec::new()];
    for at in 0..p.len() {
        let grad = f64::from(g[at]) * f64::from(gradient_scale);
        let m = f64::from(m[at]) * update.beta1 + grad * (1.0 - update.beta1);
        let v = f64::from(v[at]) * update.beta2 + grad * grad * (1.0 - update.beta2);
        let root = (v / update.bias_correction2).sqrt() + update.eps;
        let kept = f64::from(p[at]) * (1.0 - update.lr * update.weight_decay);
        let p = kept - update.lr / update.bias_correction1 * m / root;
        for (list, value) in exact.iter_mut().zip([p, m, v]) {
            list.push(value as f32);
        }
    }
    exact
}

/// Compares the sum, the sum of squares and the norm of a tensor with f64.
fn sums_launches(mut calls: LaunchCheck<'_>, size: usize) -> Outcome {
    for dtype in [DType::F32, DType::BF16] {
        let x = calls.flat(&[size], dtype);
        let wide = || x.values.iter().map(|&x| f64::from(x));
        // The tolerance is a share of the sum of magnitudes: where terms cancel, the sum is small but its rounding
        // error is not.
        let sum = calls.device.floats(&FixedSum::of(&x.tensor, Term::Value)?)?[0];
        let magnitudes = wide().map(f64::abs).sum::<f64>();
        let off = (f64::from(sum) - wide().sum::<f64>()).abs();
        if off.is_nan() || off > 1e-5 * magnitudes {
            let expected = wide().sum::<f64>();
            return wrong(format!("the sum of {size} is {sum}, expected {expected}"));
        }
        let squares: f64 = wide().map(|x| x * x).sum();
        let found = FixedSum::of(&x.tensor, Term::Square)?;
        calls.close("sum of squares", &found, &[squares as f32])?;
    }
    // The norm of (3, 4) is 5; a NaN makes the norm NaN.
    let norm = |values: &[f32]| -> Result<f32, Wrong> {
        let upload = |values: &[f32]| calls.device.float(values, &[values.len()], DType::F32);
        let mut sum = FixedSum::new(&upload(&[0.0]), Term::Square, [values.len()]);
        sum.add(&upload(values))?;
        Ok(calls.device.floats(&sum.root()?)?[0])
    };
    same("norms", &[norm(&[3.0, 4.0])?, norm(&[1.0, f32::NAN])?], &[5.0, f32::NAN])?;
    Ok(calls.worst)
}
