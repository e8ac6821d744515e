//! Proves the kernel route on a GPU, without any other part of Sieve: `route_check CACHE_DIR [quick]`.
//!
//! Run it twice with the same folder: the second run must find every kernel in the cache. It checks the order of
//! pointers and params, shared memory, pitched and strided inputs, that a changed source is compiled anew, that a compile
//! error comes back as an error, that a cubin stored ahead of time is what runs, and every wrapper against the host.
#![allow(clippy::print_stdout)]
#[path = "route_check/host.rs"]
mod host;
#[path = "route_check/wrappers.rs"]
mod wrappers;

use burn::tensor::{DType, Tensor, TensorData};
use sieve_kernels::{
    CudaTensor, KernelCache, KernelError, SourceKernel, ahead_of_time, init_runtime, probe,
    swiglu_backward, swiglu_forward,
};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

/// Burn's CUDA backend as Sieve uses it.
type Cuda = burn_cuda::Cuda<f32, i32>;

/// Collects outcomes; prints each as it comes.
#[derive(Default)]
struct Outcomes {
    failed: usize,
    passed: usize,
}

impl Outcomes {
    fn record(&mut self, name: &str, outcome: Result<String, String>) {
        match outcome {
            Ok(note) => {
                self.passed += 1;
                println!("ok    {name:48} {note}");
            }
            Err(reason) => {
                self.failed += 1;
                println!("FAIL  {name:48} {reason}");
            }
        }
    }
}

/// Puts f32 values on the GPU as a contiguous tensor of another type if wanted.
fn upload<const D: usize>(
    values: &[f32],
    shape: [usize; D],
    dtype: DType,
    device: &burn_cuda::CudaDevice,
) -> CudaTensor {
    let tensor =
        Tensor::<Cuda, D>::from_data(TensorData::new(values.to_vec(), shape), device).cast(dtype);
    CudaTensor::from(tensor.into_primitive().tensor()).contiguous()
}

fn upload_ints<const D: usize>(
    values: &[i32],
    shape: [usize; D],
    device: &burn_cuda::CudaDevice,
) -> CudaTensor {
    let data = TensorData::new(values.to_vec(), shape);
    let tensor = Tensor::<Cuda, D, burn::tensor::Int>::from_data(data, device);
    CudaTensor::from(tensor.into_primitive()).contiguous()
}

fn download(tensor: &CudaTensor) -> Vec<f32> {
    let data = burn_cubecl::ops::into_data_sync(tensor.primitive().clone());
    data.convert::<f32>().to_vec().unwrap_or_default()
}

fn download_ints(tensor: &CudaTensor) -> Vec<i32> {
    let data = burn_cubecl::ops::into_data_sync(tensor.primitive().clone());
    data.to_vec().unwrap_or_default()
}

/// Numbers in (-1, 1), the same on every machine.
fn scrambled(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

const ORDER: &str = "
struct OrderParams { unsigned long long first, second, third; };
extern \"C\" __global__ void order(const float* a, const float* b, float* out, const __grid_constant__ OrderParams params) {
  extern __shared__ float shared[];
  shared[threadIdx.x] = a[threadIdx.x] - b[threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) { out[0] = shared[63]; out[1] = (float)params.first; out[2] = (float)params.second; out[3] = (float)params.third; }
}";

/// Arguments arrive in order, and dynamic shared memory is there.
fn argument_order(device: &burn_cuda::CudaDevice) -> Result<String, String> {
    let a = upload(&vec![5.0; 64], [64], DType::F32, device);
    let b = upload(&vec![3.0; 64], [64], DType::F32, device);
    let out = a.nan_contiguous(&[4], DType::F32);
    let kernel = SourceKernel::from_text("order", ORDER)
        .threads(64)
        .shared_bytes(99 * 1024);
    // SAFETY: reads 64 elements, writes 4.
    unsafe { kernel.launch([1, 1, 1], &[&a, &b, &out], &[11, 22, 33]) }
        .map_err(|e| e.to_string())?;
    expect(&download(&out), &[2.0, 11.0, 22.0, 33.0])
}

fn constant(
    name: &'static str,
    text: &str,
    device: &burn_cuda::CudaDevice,
) -> Result<f32, KernelError> {
    let out = upload(&[0.0], [1], DType::F32, device);
    let kernel = SourceKernel::from_text(name, text).threads(32);
    // SAFETY: writes one element.
    unsafe { kernel.launch([1, 1, 1], &[&out], &[0]) }?;
    Ok(download(&out)[0])
}

fn constant_text(value: &str) -> String {
    format!(
        "extern \"C\" __global__ void constant(float* out) {{ if (threadIdx.x == 0) out[0] = {value}; }}"
    )
}

/// One changed character is another kernel, in one process.
fn changed_source(device: &burn_cuda::CudaDevice) -> Result<String, String> {
    let one = constant("constant", &constant_text("1.0f"), device).map_err(|e| e.to_string())?;
    let two = constant("constant", &constant_text("2.0f"), device).map_err(|e| e.to_string())?;
    let again = constant("constant", &constant_text("1.0f"), device).map_err(|e| e.to_string())?;
    expect(&[one, two, again], &[1.0, 2.0, 1.0])
}

/// A refused source is an error with the compiler's words, and the stream works on.
fn compile_error(device: &burn_cuda::CudaDevice) -> Result<String, String> {
    let error = match constant("constant", &constant_text("undefined_name"), device) {
        Err(KernelError::Compile { log, .. }) => log,
        other => return Err(format!("expected a compile error, got {other:?}")),
    };
    if !error.contains("undefined_name") || !error.contains("kernels/constant.cu(1)") {
        return Err(format!("the log does not say what and where: {error}"));
    }
    let after = constant("constant", &constant_text("3.0f"), device).map_err(|e| e.to_string())?;
    expect(&[after], &[3.0]).map(|_| error.lines().next().unwrap_or_default().to_owned())
}

/// The kernel whose source is broken on purpose; only its stored cubin can run.
fn stored_kernel() -> SourceKernel {
    SourceKernel::from_text("constant", "#error this text must not be compiled").threads(32)
}

fn stored_cubin_runs(device: &burn_cuda::CudaDevice) -> Result<String, String> {
    let out = upload(&[0.0], [1], DType::F32, device);
    // SAFETY: the stored kernel writes one element.
    unsafe { stored_kernel().launch([1, 1, 1], &[&out], &[0]) }.map_err(|e| e.to_string())?;
    expect(&download(&out), &[7.0])
}

/// Element-wise kernels on contiguous, pitched and sliced inputs, both types.
fn swiglu(
    device: &burn_cuda::CudaDevice,
    dtype: DType,
    d_ff: usize,
    pitched: bool,
) -> Result<String, String> {
    let rows = 37;
    let values = scrambled(rows * 2 * d_ff, 1 + d_ff as u64);
    let grads = scrambled(rows * d_ff, 2 + d_ff as u64);
    let tensor = |values: &[f32], width: usize| {
        let data = TensorData::new(values.to_vec(), [rows, width]);
        // A cast makes a new tensor, whose rows Burn pads.
        let tensor = Tensor::<Cuda, 2>::from_data(data, device).cast(dtype);
        let tensor = CudaTensor::from(tensor.into_primitive().tensor());
        if pitched { tensor } else { tensor.contiguous() }
    };
    let (gate_up, dy) = (tensor(&values, 2 * d_ff), tensor(&grads, d_ff));
    let y = swiglu_forward(&gate_up).map_err(|e| e.to_string())?;
    let dx = swiglu_backward(&gate_up, &dy).map_err(|e| e.to_string())?;
    let (values, grads) = (download(&gate_up), download(&dy));
    let (mut y_host, mut dx_host) = (vec![], vec![0.0; values.len()]);
    for row in 0..rows {
        for c in 0..d_ff {
            let (g, u) = (
                f64::from(values[row * 2 * d_ff + c]),
                f64::from(values[row * 2 * d_ff + d_ff + c]),
            );
            let dy = f64::from(grads[row * d_ff + c]);
            let s = 1.0 / (1.0 + (-g).exp());
            y_host.push((g * s * u) as f32);
            dx_host[row * 2 * d_ff + c] = (dy * u * s * (1.0 + g * (1.0 - s))) as f32;
            dx_host[row * 2 * d_ff + d_ff + c] = (dy * g * s) as f32;
        }
    }
    let tolerance = if dtype == DType::BF16 { 8e-3 } else { 1e-5 };
    let worst = host::largest_gap(&download(&y), &y_host)?
        .max(host::largest_gap(&download(&dx), &dx_host)?);
    let strides = format!("strides {:?}, largest gap {worst:.1e}", gate_up.strides());
    if worst <= tolerance {
        Ok(strides)
    } else {
        Err(strides)
    }
}

fn expect(got: &[f32], wanted: &[f32]) -> Result<String, String> {
    if got == wanted {
        Ok(String::new())
    } else {
        Err(format!("got {got:?}, expected {wanted:?}"))
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, rest @ ..] = arguments.as_slice() else {
        println!("usage: route_check CACHE_DIR [quick]");
        return ExitCode::FAILURE;
    };
    match run(Path::new(folder), rest.iter().any(|word| word == "quick")) {
        Ok(outcomes) => {
            println!(
                "route_check: {} passed, {} failed",
                outcomes.passed, outcomes.failed
            );
            if outcomes.failed == 0 {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        Err(error) => {
            println!("route_check: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(folder: &Path, quick: bool) -> Result<Outcomes, KernelError> {
    let mut outcomes = Outcomes::default();
    let report = probe()?;
    let device = report.device(0)?;
    println!(
        "{} {}, driver {}, NVRTC {}",
        device.name,
        device.arch(),
        report.driver,
        report.nvrtc
    );
    let wrong = report
        .device(99)
        .map(|_| String::new())
        .map_err(|e| e.to_string());
    outcomes.record(
        "a wrong device number is refused",
        match wrong {
            Err(message) if message.contains("no device 99") => {
                Ok(message.lines().next().unwrap_or_default().to_owned())
            }
            other => Err(format!("{other:?}")),
        },
    );

    let cache = KernelCache::open(folder, &device.arch(), report.nvrtc)?;
    // A process beside this one must not write the same files.
    let second = KernelCache::open(folder, &device.arch(), report.nvrtc)?;
    let private = (cache.is_private(), second.is_private()) == (false, true);
    outcomes.record(
        "a second user gets a private cache",
        if private {
            Ok(String::new())
        } else {
            Err("it did not".into())
        },
    );
    drop(second);
    let fill = SourceKernel::new("fill_zero").threads(256);
    let warm = ahead_of_time::is_stored(&cache, &fill)?;
    let cuda_path = report
        .include_folder
        .parent()
        .unwrap_or(Path::new("/usr/local/cuda"));
    let good = SourceKernel::from_text("constant", constant_text("7.0f")).threads(32);
    let start = Instant::now();
    let compiled = ahead_of_time::compile_with_nvrtc(&good, &device.arch(), cuda_path)?;
    ahead_of_time::store(&cache, &[(stored_kernel(), compiled.cubin)])?;
    println!(
        "stored a cubin ahead of time in {:.0} ms",
        start.elapsed().as_secs_f64() * 1e3
    );
    init_runtime(&cache)?;
    let twice = init_runtime(&cache).err();
    outcomes.record(
        "a second init_runtime is refused",
        match twice {
            Some(KernelError::AlreadyInitialised) => Ok(String::new()),
            other => Err(format!("{other:?}")),
        },
    );

    let gpu = burn_cuda::CudaDevice::new(0);
    let start = Instant::now();
    let probe_tensor = upload(&[1.0], [1], DType::F32, &gpu);
    println!("client in {:.0} ms", start.elapsed().as_secs_f64() * 1e3);
    let start = Instant::now();
    sieve_kernels::fill_zero(&probe_tensor)?;
    let first_ms = start.elapsed().as_secs_f64() * 1e3;
    let note = format!(
        "{} cache, first launch {first_ms:.1} ms",
        if warm { "warm" } else { "cold" }
    );
    let outcome = if !warm || first_ms < 50.0 {
        Ok(note)
    } else {
        Err(note)
    };
    outcomes.record("a kernel of an earlier run needs no compiler", outcome);

    outcomes.record(
        "pointers, words and shared memory in order",
        argument_order(&gpu),
    );
    outcomes.record(
        "a stored cubin runs instead of its source",
        stored_cubin_runs(&gpu),
    );
    outcomes.record("a changed source is compiled anew", changed_source(&gpu));
    outcomes.record("a compile error is reported", compile_error(&gpu));
    for (dtype, d_ff, pitched) in [
        (DType::BF16, 96, false),
        (DType::BF16, 96, true),
        (DType::BF16, 99, true),
        (DType::F32, 100, true),
        (DType::F32, 4096, false),
    ] {
        let name = format!(
            "swiglu {} d_ff {d_ff}{}",
            dtype.name(),
            if pitched { ", pitched" } else { "" }
        );
        outcomes.record(&name, swiglu(&gpu, dtype, d_ff, pitched));
    }
    wrappers::check(&mut outcomes, &gpu, quick);
    Ok(outcomes)
}
