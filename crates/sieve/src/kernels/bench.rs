//! `sieve kernels bench`: times and memory of the attention kernels on this GPU.
mod clock;
mod inputs;
mod rows;

use super::capture;
use super::check;
use super::scores::Scores;
use crate::device::{Device, DeviceChoice};
use crate::terminal;
use anyhow::{Context, Result, bail};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Distribution, Tensor};
use burn_cuda::CudaDevice;
use clap::Args;
use clock::{Clock, Times};
use inputs::Inputs;
use serde_json::{Value, json};
use sieve_kernels::{
    AttentionShape, CudaTensor, DeviceReport, KernelError, matmul_nt, require_cublaslt,
    use_portable_kernels_only,
};
use sieve_ops::Cuda;
use std::path::PathBuf;

/// Random calls that must pass before anything is timed.
const CHECKED_CASES: usize = 15;

/// Arguments of `sieve kernels bench`.
#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    /// The shapes of paper 004's Table 2 (arXiv:2508.02124) instead of the usual ones
    #[arg(long)]
    table2: bool,
    /// DMA's scores: independent, rising, falling, tied, few-values, signed-zeros or captured:FILE; may be repeated
    /// (independent, rising and tied when absent)
    #[arg(long)]
    scores: Vec<Scores>,
    /// Also time the scores of this trained DMA model
    #[arg(long, value_name = "CHECKPOINT")]
    captured: Option<PathBuf>,
    /// The text that model reads; the kernels' own sources when absent
    #[arg(long, value_name = "FILE", requires = "captured")]
    text: Option<PathBuf>,
    /// Time the portable kernels, also where the device has a family of its own
    #[arg(long)]
    portable: bool,
    /// Timed repetitions of a row
    #[arg(long, default_value_t = 30)]
    repetitions: usize,
    /// Also write the rows as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// auto, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
}

/// Runs the command.
pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    if args.repetitions == 0 {
        bail!("--repetitions 0: nothing would be timed");
    }
    let gpu = match args.device.resolve_and_prepare(check::prepare)? {
        Device::Cuda(gpu) => gpu,
        Device::Cpu => bail!(
            "kernels bench times the CUDA kernels, and there is no GPU here\n  hint: `cargo run --release -p sieve-cpu --example bench_cpu` in the sources times those of the CPU"
        ),
    };
    let device = CudaDevice::new(gpu.index);
    use_portable_kernels_only(args.portable);
    check::require_parity(&device, CHECKED_CASES)?;
    let mut scores = if args.scores.is_empty() {
        vec![Scores::Independent, Scores::Rising, Scores::Tied]
    } else {
        args.scores.clone()
    };
    if let Some(checkpoint) = &args.captured {
        let file =
            std::env::temp_dir().join(format!("sieve-scores-{}.safetensors", std::process::id()));
        let text = args.text.as_deref();
        capture::capture::<Cuda>(checkpoint, text, &file, &device, DType::BF16)?;
        scores.push(Scores::Captured(file));
    }
    let mut bench = Bench::new(device, &gpu, args.repetitions, scores, args.portable)?;
    if args.table2 {
        rows::table2(&mut bench)?;
    } else {
        rows::standard(&mut bench)?;
    }
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&bench.json).context("writing JSON")?;
        std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    match bench.failed {
        0 => Ok(()),
        failed => bail!("{failed} rows could not be timed"),
    }
}

/// A run of the benchmark: what rows need, and the rows so far.
pub(crate) struct Bench {
    device: CudaDevice,
    gpu: usize,
    clock: Clock,
    scores: Vec<Scores>,
    copy_bytes_per_s: f64,
    matmul_flops: f64,
    failed: usize,
    json: Value,
}

/// What a row's time is compared with.
enum Work {
    Flops(f64),
    Bytes(f64),
}

impl Bench {
    fn new(
        device: CudaDevice,
        gpu: &DeviceReport,
        repetitions: usize,
        scores: Vec<Scores>,
        portable: bool,
    ) -> Result<Self> {
        let clock = Clock::new(&device, repetitions, gpu.num_multiprocessors);
        let overhead = clock.overhead()?;
        let copy_bytes_per_s = clock.copy_bytes_per_s()?;
        let (matmul_flops, product) = matmul_ceiling(&clock, &device)?;
        terminal::line(&format!(
            "{} ({}), {} multiprocessors, {} attention kernels; medians of {repetitions} on the GPU's clock, L2 flushed; reading the clock takes {:.1} us",
            gpu.name,
            gpu.arch(),
            gpu.num_multiprocessors,
            if portable || (gpu.major, gpu.minor) != (9, 0) {
                "portable"
            } else {
                "Hopper"
            },
            overhead.median_ms * 1e3
        ));
        terminal::line(&format!(
            "ceilings in this run: copy {:.2} TB/s (read + write), bf16 product of 8192 x 8192 x 8192 by {product} {:.0} TFLOP/s",
            copy_bytes_per_s / 1e12,
            matmul_flops / 1e12
        ));
        terminal::line(&format!(
            "{:48} {:30} {:>10} {:>19} {:>16} {:>9}",
            "kernel", "shape", "median ms", "p10-p90", "rate", "of peak"
        ));
        let json = json!({
            "device": gpu.name, "arch": gpu.arch(), "sieve": env!("CARGO_PKG_VERSION"),
            "portable_only": portable, "repetitions": repetitions, "clock_us": overhead.median_ms * 1e3,
            "copy_bytes_per_s": copy_bytes_per_s, "matmul_flops": matmul_flops, "matmul_by": product,
            "rows": [], "memory": [],
        });
        Ok(Self {
            device,
            gpu: gpu.index,
            clock,
            scores,
            copy_bytes_per_s,
            matmul_flops,
            failed: 0,
            json,
        })
    }

    /// Times a row that computes.
    pub(crate) fn flops(
        &mut self,
        name: &str,
        shape: AttentionShape,
        flops: f64,
        work: &mut dyn FnMut() -> Result<(), KernelError>,
    ) {
        self.row(name, shape, Work::Flops(flops), work);
    }

    /// Times a row that moves memory.
    pub(crate) fn bytes(
        &mut self,
        name: &str,
        shape: AttentionShape,
        bytes: f64,
        work: &mut dyn FnMut() -> Result<(), KernelError>,
    ) {
        self.row(name, shape, Work::Bytes(bytes), work);
    }

    fn row(
        &mut self,
        name: &str,
        shape: AttentionShape,
        work: Work,
        body: &mut dyn FnMut() -> Result<(), KernelError>,
    ) {
        match self.clock.time(body) {
            Ok(times) => self.timed(name, shape, &work, times),
            Err(error) => {
                self.failed += 1;
                terminal::line(&format!("{name:48} {:30} FAILED {error}", text(shape)));
            }
        }
    }

    fn timed(&mut self, name: &str, shape: AttentionShape, work: &Work, times: Times) {
        let seconds = times.median_ms * 1e-3;
        let (rate, unit, share) = match work {
            Work::Flops(flops) => (
                flops / seconds / 1e12,
                "TFLOP/s",
                flops / seconds / self.matmul_flops,
            ),
            Work::Bytes(bytes) => (
                bytes / seconds / 1e9,
                "GB/s",
                bytes / seconds / self.copy_bytes_per_s,
            ),
        };
        terminal::line(&format!(
            "{name:48} {:30} {:>10.4} {:>19} {:>16} {:>8.1}%",
            text(shape),
            times.median_ms,
            format!("{:.4}-{:.4}", times.p10_ms, times.p90_ms),
            format!("{rate:.1} {unit}"),
            100.0 * share
        ));
        self.push(
            "rows",
            json!({
                "name": name, "shape": text(shape), "median_ms": times.median_ms,
                "p10_ms": times.p10_ms, "p90_ms": times.p90_ms, "rate": rate, "unit": unit,
                "of_peak": share,
            }),
        );
    }

    /// Memory that what `body` returns keeps in use, from the allocator's own count.
    pub(crate) fn memory<T>(
        &mut self,
        name: &str,
        shape: AttentionShape,
        body: impl FnOnce() -> Result<T, KernelError>,
    ) -> Result<()> {
        let client = self.any_tensor().client().clone();
        let in_use = || -> Result<u64> {
            // What was dropped is given back when the device thread gets there.
            Cuda::sync(&self.device).map_err(|e| anyhow::anyhow!("the GPU reported: {e:?}"))?;
            let usage = client.memory_usage();
            let usage = usage.map_err(|e| anyhow::anyhow!("memory usage: {e:?}"))?;
            Ok(usage.bytes_in_use)
        };
        let before = in_use()?;
        let held = body()?;
        let after = in_use()?;
        drop(held);
        let heads = 2 * shape.num_heads + 2 * shape.num_kv_heads;
        let inputs = (shape.batch * shape.seq_len * shape.head_dim * 2 * heads) as f64;
        let kept = after.saturating_sub(before);
        terminal::line(&format!(
            "{name:48} {:30} {:>10} in use after the forward pass, {:.1} % of q + k + v + o",
            text(shape),
            terminal::bytes(kept),
            100.0 * kept as f64 / inputs
        ));
        self.push(
            "memory",
            json!({
                "name": name, "shape": text(shape), "in_use_before": before,
                "in_use_after": after, "q_k_v_o_bytes": inputs,
            }),
        );
        Ok(())
    }

    /// The tensors of a shape; `None`, with a row that says so, when they do not fit.
    pub(crate) fn inputs(&mut self, shape: AttentionShape) -> Result<Option<Inputs>> {
        let bytes = Inputs::bytes(shape) as f64;
        Ok(self
            .fits("attention", shape, bytes)?
            .then(|| Inputs::new(shape, &self.device)))
    }

    /// Whether so many bytes are free, with a row when not.
    pub(crate) fn fits(&mut self, name: &str, shape: AttentionShape, bytes: f64) -> Result<bool> {
        self.any_tensor().client().memory_cleanup();
        let (free, _) = sieve_kernels::memory_bytes(self.gpu)?;
        if bytes <= free as f64 {
            return Ok(true);
        }
        let reason = format!(
            "needs {}, {} are free",
            terminal::bytes(bytes as u64),
            terminal::bytes(free)
        );
        self.skip(name, shape, &reason);
        Ok(false)
    }

    /// A row that was not timed, and why.
    pub(crate) fn skip(&mut self, name: &str, shape: AttentionShape, reason: &str) {
        terminal::line(&format!("{name:48} {:30} skipped: {reason}", text(shape)));
        self.push(
            "rows",
            json!({ "name": name, "shape": text(shape), "skipped": reason }),
        );
    }

    fn push(&mut self, list: &str, value: Value) {
        if let Some(list) = self.json[list].as_array_mut() {
            list.push(value);
        }
    }

    fn any_tensor(&self) -> CudaTensor {
        let zero = Tensor::<Cuda, 1>::zeros([1], &self.device);
        CudaTensor::from(zero.into_primitive().tensor())
    }
}

/// FLOP/s of a large product, and by what: cuBLASLt where it is installed, else Burn's.
fn matmul_ceiling(clock: &Clock, device: &CudaDevice) -> Result<(f64, &'static str)> {
    const SIZE: usize = 8192;
    let random = || {
        let normal = Distribution::Normal(0.0, 1.0);
        Tensor::<Cuda, 2>::random([SIZE, SIZE], normal, device).cast(DType::BF16)
    };
    let (a, b) = (random(), random());
    let flops = 2.0 * (SIZE as f64).powi(3);
    let own = |x: &Tensor<Cuda, 2>| CudaTensor::from(x.clone().into_primitive().tensor());
    let (x, w) = (own(&a), own(&b));
    let (times, by) = if require_cublaslt().is_ok() {
        let product = || matmul_nt(&x, &w).map(drop);
        (clock.time(&mut || product())?, "cuBLASLt")
    } else {
        let product = || drop(a.clone().matmul(b.clone().transpose()));
        let mut body = || {
            product();
            Ok(())
        };
        (clock.time(&mut body)?, "Burn, since cuBLASLt is missing,")
    };
    Ok((flops / (times.median_ms * 1e-3), by))
}

/// `2x8192 h16/8 d128`.
fn text(shape: AttentionShape) -> String {
    format!(
        "{}x{} h{}/{} d{}",
        shape.batch, shape.seq_len, shape.num_heads, shape.num_kv_heads, shape.head_dim
    )
}
