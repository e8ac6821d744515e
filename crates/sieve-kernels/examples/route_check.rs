//! Proves the kernel route on a GPU, without any other part of Sieve: `route_check CACHE_DIR`.
//!
//! Run it twice with the same folder: the second run must find every kernel in the cache. It checks the order of
//! pointers and params, shared memory, that a changed source is compiled anew, that a compile error comes back as an
//! error, and that a cubin stored ahead of time is what runs. What the kernels compute is for `sieve kernels check`.
#![allow(clippy::print_stdout)]

use burn::tensor::{DType, Tensor, TensorData};
use sieve_kernels::{CudaReport, CudaTensor, KernelCache, KernelError, SourceKernel, ahead_of_time};
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
    let tensor = Tensor::<Cuda, D>::from_data(TensorData::new(values.to_vec(), shape), device).cast(dtype);
    CudaTensor::from(tensor.into_primitive().tensor()).contiguous()
}

fn download(tensor: &CudaTensor) -> Vec<f32> {
    let data = burn_cubecl::ops::into_data_sync(tensor.primitive().clone());
    data.convert::<f32>().to_vec().unwrap_or_default()
}

const ORDER: &str = "
struct OrderParams { unsigned long long first, second, third; };
extern \"C\" __global__ void order(
    const float* a, const float* b, float* out, const __grid_constant__ OrderParams params) {
  extern __shared__ float shared[];
  shared[threadIdx.x] = a[threadIdx.x] - b[threadIdx.x];
  __syncthreads();
  if (threadIdx.x > 0) return;
  out[0] = shared[63];
  out[1] = (float)params.first;
  out[2] = (float)params.second;
  out[3] = (float)params.third;
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
    unsafe { kernel.launch_text([1, 1, 1], &[&a, &b, &out], &[11, 22, 33]) }.map_err(|e| e.to_string())?;
    expect(&download(&out), &[2.0, 11.0, 22.0, 33.0])
}

fn constant(name: &'static str, text: &str, device: &burn_cuda::CudaDevice) -> Result<f32, KernelError> {
    let out = upload(&[0.0], [1], DType::F32, device);
    let kernel = SourceKernel::from_text(name, text).threads(32);
    // SAFETY: writes one element.
    unsafe { kernel.launch_text([1, 1, 1], &[&out], &[0]) }?;
    Ok(download(&out)[0])
}

fn constant_text(value: &str) -> String {
    format!("extern \"C\" __global__ void constant(float* out) {{ if (threadIdx.x == 0) out[0] = {value}; }}")
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
    unsafe { stored_kernel().launch_text([1, 1, 1], &[&out], &[0]) }.map_err(|e| e.to_string())?;
    expect(&download(&out), &[7.0])
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
    let [folder] = arguments.as_slice() else {
        println!("usage: route_check CACHE_DIR");
        return ExitCode::FAILURE;
    };
    match run(Path::new(folder)) {
        Ok(outcomes) => {
            println!("route_check: {} passed, {} failed", outcomes.passed, outcomes.failed);
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

fn run(folder: &Path) -> Result<Outcomes, KernelError> {
    let mut outcomes = Outcomes::default();
    let report = CudaReport::probe()?;
    let device = report.device(0)?;
    println!(
        "{} {}, driver {}, NVRTC {}",
        device.name,
        device.arch(),
        report.driver,
        report.nvrtc
    );
    let wrong = report.device(99).map(|_| String::new()).map_err(|e| e.to_string());
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
    let cuda_path = report.include_folder.parent().unwrap_or(Path::new("/usr/local/cuda"));
    let good = SourceKernel::from_text("constant", constant_text("7.0f")).threads(32);
    let start = Instant::now();
    let compiled = ahead_of_time::compile_with_nvrtc(&good, &device.arch(), cuda_path)?;
    ahead_of_time::store(&cache, &[(stored_kernel(), compiled.cubin)])?;
    println!(
        "stored a cubin ahead of time in {:.0} ms",
        start.elapsed().as_secs_f64() * 1e3
    );
    cache.init_runtime()?;
    let twice = cache.init_runtime().err();
    outcomes.record(
        "a second KernelCache::init_runtime is refused",
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
    sieve_kernels::step::fill_zero(&probe_tensor)?;
    let first_ms = start.elapsed().as_secs_f64() * 1e3;
    let note = format!(
        "{} cache, first launch {first_ms:.1} ms",
        if warm { "warm" } else { "cold" }
    );
    let outcome = if !warm || first_ms < 50.0 { Ok(note) } else { Err(note) };
    outcomes.record("a kernel of an earlier run needs no compiler", outcome);

    outcomes.record("pointers, words and shared memory in order", argument_order(&gpu));
    outcomes.record("a stored cubin runs instead of its source", stored_cubin_runs(&gpu));
    outcomes.record("a changed source is compiled anew", changed_source(&gpu));
    outcomes.record("a compile error is reported", compile_error(&gpu));
    Ok(outcomes)
}
