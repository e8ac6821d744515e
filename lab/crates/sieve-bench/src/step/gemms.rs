//! Checks and times cuBLASLt's GEMMs: all three transpositions, rows with gaps, every kind of output, both searches for
//! an algorithm, and their order among Burn's own operations. The emulator has no cuBLASLt.
use super::wrappers::{Input, LaunchCheck, VOCAB, plus, same};
use crate::device::Gpu;
use crate::extent::Extent;
use crate::report::{Outcome, Report, Wrong, wrong};
use crate::timed::{Bench, Work};
use crate::tolerance::Tolerance;
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorPrimitive};
use sieve_kernels::{
    Cublaslt, CudaTensor, DType, GemmKind, KernelError, LaunchCounts, MatmulOutput, ToBurn, kernel_tensor, matmul,
};
use sieve_ops::Cuda;

const NAME: &str = "GEMM, cuBLASLt";

/// `[m, n, k]`, and the gap between rows in elements: 0, multiples of 8 that keep rows 16-byte aligned, and 1, which
/// does not.
const SIZES: &[([usize; 3], usize)] =
    &[([70, 56, 40], 8), ([129, 64, 200], 16), ([1, 24, 40], 8), ([33, 7, 5], 1), ([256, 512, 384], 0)];

/// Tolerance as a share of the largest number: of f32 results, sums of a few hundred products, and of bf16 ones.
const F32_SHARE: f32 = 1e-5;
const BF16_SHARE: f32 = 1.0 / 256.0;

/// Times the GEMMs of a training step, each with the kind of output that the step uses.
pub(super) fn bench(bench: &mut Bench<'_>) {
    if let Err(error) = Cublaslt::require() {
        bench.skip("GEMM", &"all".to_owned(), &error.to_string());
        return;
    }
    for [m, n, k] in [
        [16384, 4096, 2048],
        [16384, 2048, 2048],
        [16384, 12288, 2048],
        [16384, 2048, 6144],
        [4096, VOCAB, 2048],
        [65536, 768, 768],
        [2048, 512, 512],
    ] {
        let [x, w, dy] = [[m, k], [n, k], [m, n]].map(|sizes| bench.bf16(sizes));
        let dweight = bench.f32([n, k]);
        let shape = format!("{m}x{n}x{k}");
        let new = MatmulOutput::New(DType::BF16);
        for (name, kind, a, b, output) in [
            ("GEMM NT", GemmKind::Nt, &x, &w, new),
            ("GEMM NT + residual", GemmKind::Nt, &x, &w, MatmulOutput::PlusC(&dy)),
            ("GEMM NN", GemmKind::Nn, &dy, &w, new),
            ("GEMM TN, added to f32", GemmKind::Tn, &dy, &x, MatmulOutput::AddTo(&dweight)),
        ] {
            let work = Work::Flops(2.0 * (m * n * k) as f64);
            bench.row(name, &shape, work, || matmul(kind, a, b, output));
        }
    }
}

/// Compares cuBLASLt's GEMMs with a reference.
pub(crate) fn check_gemms(report: &mut Report, device: &Gpu, extent: &Extent) {
    if let Err(error) = Cublaslt::require() {
        report.add_missing(NAME, &error.to_string());
        return;
    }
    for kind in [GemmKind::Nt, GemmKind::Nn, GemmKind::Tn] {
        for &([m, n, k], gap) in SIZES {
            let case = format!("{kind:?} {m} x {n} x {k}, gap {gap}");
            let outcome = outputs(LaunchCheck::new(device, extent.seed), kind, [m, n, k], gap);
            report.add(NAME, path(), &case, outcome);
        }
    }
    let outcome = in_order(LaunchCheck::new(device, extent.seed), device);
    report.add(NAME, path(), "a chain with Burn's operations", outcome);
    let outcome = refused(LaunchCheck::new(device, extent.seed));
    report.add(NAME, path(), "sizes that do not fit", outcome);
}

/// A GEMM whose result is rounded to bf16.
fn rounded(kind: GemmKind, x: &CudaTensor, w: &CudaTensor) -> Result<CudaTensor, KernelError> {
    matmul(kind, x, w, MatmulOutput::New(DType::BF16))
}

/// The stream on which the GEMMs so far were queued.
fn path() -> &'static str {
    match LaunchCounts::so_far().is_inline {
        Some(true) => "on Burn's own stream",
        Some(false) => "on a stream of its own",
        None => "not queued",
    }
}

/// The GEMM in f64. `x` and `w` are transposed in memory as `kind` says: `Tn` reads x as `[k, m]`, `Nt` reads w as
/// `[n, k]`.
fn definition(kind: GemmKind, x: &[f32], w: &[f32], [m, n, k]: [usize; 3]) -> Vec<f64> {
    let of = |i: usize, j: usize, l: usize| {
        let a = match kind {
            GemmKind::Tn => x[l * m + i],
            GemmKind::Nt | GemmKind::Nn => x[i * k + l],
        };
        let b = match kind {
            GemmKind::Nt => w[j * k + l],
            GemmKind::Nn | GemmKind::Tn => w[l * n + j],
        };
        f64::from(a) * f64::from(b)
    };
    (0..m * n).map(|at| (0..k).map(|l| of(at / n, at % n, l)).sum()).collect()
}

/// Compares a GEMM with its definition in each form of its output, into new and into given tensors.
fn outputs(mut calls: LaunchCheck<'_>, kind: GemmKind, [m, n, k]: [usize; 3], gap: usize) -> Outcome {
    let (x_shape, w_shape) = match kind {
        GemmKind::Nt => ([m, k], [n, k]),
        GemmKind::Nn => ([m, k], [k, n]),
        GemmKind::Tn => ([k, m], [k, n]),
    };
    let x = calls.with_gaps(x_shape, gap)?;
    let w = calls.with_gaps(w_shape, 2 * gap)?;
    let exact = definition(kind, &x.values, &w.values, [m, n, k]);
    let alone = plus(&exact, &vec![0.0; m * n]);
    let run = |into| matmul(kind, &x.tensor, &w.tensor, into);

    within(&mut calls, "bf16", &rounded(kind, &x.tensor, &w.tensor)?, &alone)?;
    let wide = run(MatmulOutput::New(DType::F32))?;
    within(&mut calls, "f32", &wide, &alone)?;

    let Input { tensor: addend, values } = calls.with_gaps([m, n], 3 * gap)?;
    let sum = run(MatmulOutput::PlusC(&addend))?;
    within(&mut calls, "plus", &sum, &plus(&exact, &values))?;
    calls.holds("the addend", &addend, &values)?;

    let total = calls.flat(&[m, n], DType::F32);
    run(MatmulOutput::AddTo(&total.tensor))?;
    within(&mut calls, "added to", &total.tensor, &plus(&exact, &total.values))?;
    run(MatmulOutput::Into(&total.tensor))?;
    within(&mut calls, "into", &total.tensor, &alone)?;
    run(MatmulOutput::Into(&addend))?;
    within(&mut calls, "into rows with gaps", &addend, &alone)?;
    Ok(calls.worst)
}

/// Fails where a GEMM's result differs by more than the share of its type.
fn within(calls: &mut LaunchCheck<'_>, name: &str, got: &CudaTensor, exact: &[f32]) -> Result<(), Wrong> {
    let share = match got.dtype() {
        DType::BF16 => BF16_SHARE,
        _ => F32_SHARE,
    };
    calls.within(Tolerance::new(0.0, 0.0, share), name, got, [exact, exact])
}

/// Chains GEMMs and Burn's operations: each reads the previous one's result. The chain must give the same
/// bits with a device synchronisation after each round and without.
fn in_order(mut calls: LaunchCheck<'_>, device: &Gpu) -> Outcome {
    const WIDTH: usize = 512;
    let start = calls.flat(&[WIDTH, WIDTH], DType::BF16);
    let w = calls.flat(&[WIDTH, WIDTH], DType::BF16);
    let chain = |waits: bool| -> Result<Vec<f32>, Wrong> {
        let mut x = start.tensor.clone();
        for round in 0..60 {
            let y = rounded(GemmKind::Nt, &x, &w.tensor)?;
            let y = Tensor::<Cuda, 2>::from_primitive(TensorPrimitive::Float(y.burn()));
            // Each operation allocates, so the allocator reuses freed buffers at once.
            let y = y.mul_scalar(0.04).add_scalar(0.01 * f64::from(round % 3));
            x = kernel_tensor(y.into_primitive().tensor());
            if waits {
                Cuda::sync(device).map_err(|error| Wrong::from(error.to_string()))?;
            }
        }
        Ok(calls.device.floats(&x)?)
    };
    let (with_waits, without_waits) = (true, false);
    let (waited, queued) = (chain(with_waits)?, chain(without_waits)?);
    if !waited.iter().all(|x| x.is_finite()) {
        return wrong("the chain is not finite");
    }
    same("the chain without waits", &queued, &waited)?;
    Ok(0.0)
}

fn refused(mut calls: LaunchCheck<'_>) -> Outcome {
    let [a, b] = [[16, 24], [8, 8]].map(|sizes| calls.flat(&sizes, DType::BF16));
    match rounded(GemmKind::Nt, &a.tensor, &b.tensor) {
        Ok(_) => wrong("they were taken"),
        Err(_) => Ok(0.0),
    }
}
