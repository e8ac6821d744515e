//! Proves the cuBLASLt route on a GPU: `matmul_check CACHE_DIR [time] [search]`.
//!
//! Products of all three kinds with pitched operands, into new and given outputs, with a residual and with a sum, against
//! the host; their order among Burn's own operations; and, with `time`, TFLOP/s over the shapes of a 1.7B step and what
//! queuing a product costs the host; `search` times the heuristic's first twelve algorithms for each of those shapes.
#![allow(clippy::print_stdout)]
use burn::tensor::{DType, Distribution, Shape, Tensor, backend::Backend};
use burn_cuda::CudaDevice;
use sieve_kernels::{
    AlgorithmSearch, CudaTensor, KernelCache, KernelError, MatmulOutput, Product, init_runtime,
    matmul, matmul_is_inline, matmul_nn, matmul_nt, matmul_tn, probe, require_cublaslt,
    set_algorithm_search,
};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

type Cuda = burn_cuda::Cuda<f32, i32>;

/// Relative error of an f32 output: sums of a few hundred products of bf16 numbers.
const F32_BAR: f64 = 1e-5;

/// Relative error of a bf16 output: one rounding more.
const BF16_BAR: f64 = 1.0 / 256.0;

fn random(rows: usize, cols: usize, device: &CudaDevice) -> Tensor<Cuda, 2> {
    let shape = Shape::new([rows, cols]);
    Tensor::<Cuda, 2>::random(shape, Distribution::Normal(0.0, 1.0), device)
}

/// A bf16 matrix whose rows lie `pad` elements further apart than they are wide.
fn pitched(rows: usize, cols: usize, pad: usize, device: &CudaDevice) -> Tensor<Cuda, 2> {
    let wide = random(rows, cols + pad, device).cast(DType::BF16);
    wide.narrow(1, 0, cols)
}

fn kernel_tensor(tensor: &Tensor<Cuda, 2>) -> CudaTensor {
    CudaTensor::from(tensor.clone().into_primitive().tensor())
}

fn download(tensor: &CudaTensor) -> Vec<f64> {
    let data = burn_cubecl::ops::into_data_sync(tensor.primitive().clone());
    data.iter::<f64>().collect()
}

fn host_product(product: Product, x: &[f64], w: &[f64], [m, n, k]: [usize; 3]) -> Vec<f64> {
    let mut out = vec![0.0; m * n];
    for i in 0..m {
        for j in 0..n {
            out[i * n + j] = (0..k)
                .map(|l| {
                    let a = match product {
                        Product::Tn => x[l * m + i],
                        _ => x[i * k + l],
                    };
                    let b = match product {
                        Product::Nt => w[j * k + l],
                        _ => w[l * n + j],
                    };
                    a * b
                })
                .sum();
        }
    }
    out
}

/// Largest difference over the largest magnitude; infinite for a NaN.
fn error(got: &[f64], exact: &[f64]) -> f64 {
    let largest = exact.iter().fold(1e-30f64, |all, x| all.max(x.abs()));
    let mut worst = 0.0f64;
    for (g, e) in got.iter().zip(exact) {
        let difference = (g - e).abs() / largest;
        worst = worst.max(if difference.is_nan() {
            f64::INFINITY
        } else {
            difference
        });
    }
    if got.len() == exact.len() {
        worst
    } else {
        f64::INFINITY
    }
}

fn products(
    product: Product,
    sizes: [usize; 3],
    pad: usize,
    device: &CudaDevice,
) -> Result<Vec<(&'static str, f64, f64)>, KernelError> {
    let [m, n, k] = sizes;
    let (x_shape, w_shape) = match product {
        Product::Nt => ([m, k], [n, k]),
        Product::Nn => ([m, k], [k, n]),
        Product::Tn => ([k, m], [k, n]),
    };
    let x = kernel_tensor(&pitched(x_shape[0], x_shape[1], pad, device));
    let w = kernel_tensor(&pitched(w_shape[0], w_shape[1], 2 * pad, device));
    let exact = host_product(product, &download(&x), &download(&w), sizes);
    let mut results = Vec::new();
    let plain = match product {
        Product::Nt => matmul_nt(&x, &w)?,
        Product::Nn => matmul_nn(&x, &w)?,
        Product::Tn => matmul_tn(&x, &w)?,
    };
    results.push(("bf16", error(&download(&plain), &exact), BF16_BAR));
    let f32_output = matmul(product, &x, &w, MatmulOutput::New(DType::F32))?;
    results.push(("f32", error(&download(&f32_output), &exact), F32_BAR));
    let residual = kernel_tensor(&pitched(m, n, 3 * pad, device));
    let before = download(&residual);
    let added: Vec<f64> = exact.iter().zip(&before).map(|(a, b)| a + b).collect();
    let sum = matmul(product, &x, &w, MatmulOutput::Plus(&residual))?;
    results.push(("plus", error(&download(&sum), &added), BF16_BAR));
    results.push(("addend kept", error(&download(&residual), &before), 0.0));
    let total = kernel_tensor(&random(m, n, device)).contiguous();
    let accumulated: Vec<f64> = exact
        .iter()
        .zip(download(&total))
        .map(|(a, b)| a + b)
        .collect();
    matmul(product, &x, &w, MatmulOutput::AddTo(&total))?;
    results.push(("added to", error(&download(&total), &accumulated), F32_BAR));
    matmul(product, &x, &w, MatmulOutput::Into(&total))?;
    results.push(("into", error(&download(&total), &exact), F32_BAR));
    matmul(product, &x, &w, MatmulOutput::Into(&residual))?;
    results.push((
        "into pitched rows",
        error(&download(&residual), &exact),
        BF16_BAR,
    ));
    Ok(results)
}

/// A chain of products and Burn operations, each reading what the one before wrote; with a wait after each, or without.
fn chain(
    start: &Tensor<Cuda, 2>,
    w: &CudaTensor,
    device: &CudaDevice,
    wait: bool,
) -> Result<Vec<f64>, KernelError> {
    let mut x = start.clone();
    for round in 0..60 {
        let y = matmul_nt(&kernel_tensor(&x), w)?;
        let y: Tensor<Cuda, 2> =
            Tensor::from_primitive(burn::tensor::TensorPrimitive::Float(y.into()));
        // A fresh buffer each time, so that freed ones are taken again at once.
        x = y.mul_scalar(0.04).add_scalar(0.01 * (round % 3) as f64);
        if wait {
            Cuda::sync(device).expect("the queue is healthy");
        }
    }
    Ok(download(&kernel_tensor(&x)))
}

fn time(device: &CudaDevice) -> Result<(), KernelError> {
    let sync = || Cuda::sync(device).expect("the queue is healthy");
    println!("shape m n k                        product  ms     TFLOP/s  host us a product");
    for [m, n, k] in [
        [16384, 4096, 2048],
        [16384, 2048, 2048],
        [16384, 12288, 2048],
        [16384, 2048, 6144],
        [4096, 50280, 2048],
        [65536, 768, 768],
        [2048, 512, 512],
    ] {
        let bf16 =
            |rows, cols| kernel_tensor(&random(rows, cols, device).cast(DType::BF16)).contiguous();
        let (x, w, dy) = (bf16(m, k), bf16(n, k), bf16(m, n));
        let dweight = kernel_tensor(&random(n, k, device)).contiguous();
        type Run<'a> = Box<dyn Fn() -> Result<CudaTensor, KernelError> + 'a>;
        let runs: [(&str, Run<'_>); 4] = [
            ("NT", Box::new(|| matmul_nt(&x, &w))),
            (
                "NT + residual",
                Box::new(|| matmul(Product::Nt, &x, &w, MatmulOutput::Plus(&dy))),
            ),
            ("NN", Box::new(|| matmul_nn(&dy, &w))),
            (
                "TN += f32",
                Box::new(|| matmul(Product::Tn, &dy, &x, MatmulOutput::AddTo(&dweight))),
            ),
        ];
        for (name, run) in runs {
            for _ in 0..3 {
                run()?;
            }
            sync();
            let mut medians = Vec::new();
            let mut host = f64::INFINITY;
            for _ in 0..5 {
                let start = Instant::now();
                for _ in 0..20 {
                    run()?;
                }
                host = host.min(start.elapsed().as_secs_f64() / 20.0);
                sync();
                medians.push(start.elapsed().as_secs_f64() / 20.0);
            }
            medians.sort_by(f64::total_cmp);
            let tflops = 2.0 * (m * n * k) as f64 / medians[2] / 1e12;
            println!(
                "{m:6} {n:6} {k:6} {name:>16} {:8.3} {tflops:8.1} {:8.1}",
                medians[2] * 1e3,
                host * 1e6
            );
        }
    }
    Ok(())
}

fn run(cache: &Path, timed: bool, search: AlgorithmSearch) -> Result<usize, KernelError> {
    let report = probe()?;
    require_cublaslt()?;
    let cache = KernelCache::open(cache, &report.device(0)?.arch(), report.nvrtc)?;
    init_runtime(&cache)?;
    let device = CudaDevice::new(0);
    let (mut failed, mut checks) = (0, 0);
    for search in [AlgorithmSearch::First, AlgorithmSearch::Timed(8)] {
        set_algorithm_search(search);
        for product in [Product::Nt, Product::Nn, Product::Tn] {
            for (sizes, pad) in [
                ([70, 56, 40], 8),
                ([129, 64, 200], 16),
                ([1, 24, 40], 8),
                ([33, 7, 5], 1),
                ([256, 512, 384], 0),
            ] {
                // A search must meet each shape anew.
                let sizes = match search {
                    AlgorithmSearch::First => sizes,
                    AlgorithmSearch::Timed(_) => [sizes[0] + 8, sizes[1], sizes[2]],
                };
                for (what, error, bar) in products(product, sizes, pad, &device)? {
                    checks += 1;
                    if error > bar {
                        failed += 1;
                        println!(
                            "FAIL  {product:?} {sizes:?} pad {pad} {what}: {error:.2e}, bar {bar:.2e}"
                        );
                    }
                }
            }
        }
    }
    set_algorithm_search(AlgorithmSearch::First);
    let start = random(512, 512, &device).cast(DType::BF16);
    let w = kernel_tensor(&random(512, 512, &device).cast(DType::BF16)).contiguous();
    let (waited, queued) = (
        chain(&start, &w, &device, true)?,
        chain(&start, &w, &device, false)?,
    );
    checks += 1;
    if waited != queued || waited.iter().any(|x| !x.is_finite()) {
        failed += 1;
        println!("FAIL  products and Burn's operations in order");
    }
    let mismatch = matmul_nt(&w, &kernel_tensor(&random(8, 8, &device).cast(DType::BF16)));
    checks += 1;
    if mismatch.is_ok() {
        failed += 1;
        println!("FAIL  sizes that do not fit were taken");
    }
    println!(
        "{checks} checks, {failed} failed; on Burn's own stream: {:?}",
        matmul_is_inline()
    );
    if timed && failed == 0 {
        set_algorithm_search(search);
        time(&device)?;
    }
    Ok(failed)
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(folder) = arguments.first() else {
        println!("usage: matmul_check CACHE_DIR [time] [search]");
        return ExitCode::FAILURE;
    };
    let has = |word: &str| arguments.iter().any(|argument| argument == word);
    let search = if has("search") {
        AlgorithmSearch::Timed(12)
    } else {
        AlgorithmSearch::First
    };
    match run(Path::new(folder), has("time"), search) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            println!("FAIL  {error}");
            ExitCode::FAILURE
        }
    }
}
