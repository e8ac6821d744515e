//! A benchmark while it runs: which rows it times, its clock and peak rates, and the rows so far.
mod inputs;
mod row;

pub(crate) use inputs::{Inputs, NO_BIAS, NO_WINDOW};
pub use row::{BenchRow, Ceilings, Growth, Outcome, Rate};

use crate::clock::Clock;
use crate::device::{Gpu, portable_only, wait};
use crate::error::{BenchError, Result};
use crate::scores::Scores;
use crate::shape::BenchHeads;
use burn::tensor::{Tensor, TensorPrimitive};
use inputs::normal;
use row::Sizes;
use serde_json::{Value, json};
use sieve_kernels::{
    AttentionShape, Cublaslt, CudaTensor, DType, DeviceReport, GemmKind, KernelError, MatmulOutput, ToBurn, client_of,
    matmul,
};
use sieve_ops::Cuda;
use sieve_select::Selector;
use std::path::PathBuf;

/// Which rows a benchmark times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BenchRows {
    /// Attention, selection and decoding: the rows of the table in lab/docs/benchmarks.md.
    Standard,
    /// The shapes of Table 2 of arXiv:2508.02124.
    Table2,
    /// How time and memory grow with the length of a row, and with the keys that DMA keeps.
    Scaling,
    /// The kernels around attention, at the sizes of a training step.
    Step,
    /// Latent attention alone, which the standard rows end with.
    Latent,
    /// Attention under random masks, and dense attention.
    Sparse,
    /// Whole prefill selectors, beside dense attention.
    Selectors,
    /// Decoding of one new token, under each decode selector.
    Decode,
    /// Native sparse attention, the kinds that choose blocks, and dense attention.
    Nsa,
    /// DMA alone, as published and in the recipes' form.
    Dma,
    /// A window, first keys and bands, beside dense attention.
    Bands,
}

/// Which kernels a benchmark times, and at which sizes.
#[derive(Clone, Debug)]
pub struct BenchSettings {
    /// Which kernels are timed.
    pub rows: BenchRows,
    /// How DMA's scores are drawn: a row for each.
    pub scores: Vec<Scores>,
    /// Time the portable kernels, even if the device has its own family.
    pub portable: bool,
    /// Timed repetitions of each row.
    pub repetitions: usize,
    /// Captured q, k and v for the rows of selectors.
    pub operands: Option<PathBuf>,
    /// Prefill methods for the rows of selectors; empty: the usual ones.
    pub selectors: Vec<Selector>,
    /// Tokens of a row; empty: the usual lengths. For selectors: tokens of the generated operands.
    pub lengths: Vec<usize>,
    /// Query and KV heads of the standard, DMA, latent and NSA rows; empty: the usual heads.
    pub heads: Vec<BenchHeads>,
    /// Head width of the standard, DMA and NSA rows; the usual widths when absent.
    pub width: Option<usize>,
    /// How many blocks of threads share a tile of keys in backward passes of dense attention, windows and DMA: one more
    /// row for each number. The launch chooses the number itself in the other rows.
    pub blocks_per_tile: Vec<usize>,
}

impl BenchSettings {
    /// Whether the user asked for other sizes than the usual ones.
    pub(crate) fn has_sizes(&self) -> bool {
        !self.heads.is_empty() || self.width.is_some() || !self.lengths.is_empty()
    }

    /// Shapes of batch 1 for every combination of heads and length: the settings' heads and lengths, or the given ones
    /// where the settings have none.
    pub(crate) fn shapes(&self, heads: &[[usize; 2]], lengths: &[usize], width: usize) -> Vec<AttentionShape> {
        let heads: Vec<[usize; 2]> = match self.heads[..] {
            [] => heads.to_vec(),
            _ => self.heads.iter().map(|BenchHeads(heads)| *heads).collect(),
        };
        let lengths = if self.lengths.is_empty() { lengths } else { &self.lengths };
        let width = self.width.unwrap_or(width);
        let of_heads = |heads: [usize; 2]| lengths.iter().map(move |&len| shape(1, len, heads, width));
        heads.into_iter().flat_map(of_heads).collect()
    }
}

/// What a running benchmark reports to the program, which prints it at once.
#[derive(Clone, Debug)]
pub enum BenchEvent {
    /// The GPU's peak rates, before the first row.
    Ceilings(Ceilings),
    /// A row was measured.
    Row(BenchRow),
}

/// The measured rows of a benchmark.
#[derive(Clone, Debug)]
pub struct BenchResult {
    /// All measurements as JSON, for programs.
    pub json: Value,
    /// Number of rows that failed.
    pub failed: usize,
}

/// A running benchmark: device, clock, settings, and the rows so far as JSON.
pub(crate) struct Bench<'a> {
    say: &'a mut dyn FnMut(BenchEvent),
    /// The GPU that is measured.
    pub(crate) device: Gpu,
    gpu: usize,
    clock: Clock,
    /// Which kernels to time, and at which sizes.
    pub(crate) settings: BenchSettings,
    copy_bytes_per_s: f64,
    matmul_flops: f64,
    failed: usize,
    json: Value,
}

/// Work of one repetition, from which a row's rate follows.
pub(crate) enum Work {
    /// Floating-point operations: the row's rate is in TFLOP/s.
    Flops(f64),
    /// Bytes read and written: the row's rate is in GB/s.
    Bytes(f64),
    /// No rate: the row shows its time alone.
    Time,
}

impl<'a> Bench<'a> {
    /// Measures the clock's overhead and the GPU's peak rates, and reports them.
    pub(crate) fn new(
        settings: &BenchSettings,
        gpu: &DeviceReport,
        say: &'a mut dyn FnMut(BenchEvent),
    ) -> Result<Self> {
        let device = Gpu::new(gpu.index, portable_only(settings.portable));
        let clock = Clock::new(&device, settings.repetitions, gpu.num_multiprocessors);
        // Two stamps with no work between them.
        let overhead = clock.time(&mut || Ok(()))?;
        let copy_bytes_per_s = clock.copy_bytes_per_s()?;
        let (matmul_flops, matmul_by) = matmul_ceiling(&clock, &device)?;
        let is_portable = settings.portable || (gpu.major, gpu.minor) != (9, 0);
        let ceilings = Ceilings {
            device: gpu.name.clone(),
            arch: gpu.arch(),
            num_multiprocessors: gpu.num_multiprocessors,
            family: if is_portable { "portable" } else { "Hopper" },
            repetitions: settings.repetitions,
            clock_us: overhead.median_ms * 1e3,
            copy_bytes_per_s,
            matmul_flops,
            matmul_by,
        };
        let json = json!({
            "device": ceilings.device, "arch": ceilings.arch, "sieve": env!("CARGO_PKG_VERSION"),
            "portable_only": settings.portable, "repetitions": ceilings.repetitions,
            "clock_us": ceilings.clock_us, "copy_bytes_per_s": copy_bytes_per_s,
            "matmul_flops": matmul_flops, "matmul_by": matmul_by, "rows": [], "memory": [], "growth": [],
            "selectors": [],
        });
        say(BenchEvent::Ceilings(ceilings));
        Ok(Self {
            say,
            device,
            gpu: gpu.index,
            clock,
            settings: settings.clone(),
            copy_bytes_per_s,
            matmul_flops,
            failed: 0,
            json,
        })
    }

    /// Sets an entry of the JSON beside its lists.
    pub(crate) fn set(&mut self, name: &str, entry: Value) {
        self.json[name] = entry;
    }

    /// The measured rows.
    pub(crate) fn finish(self) -> BenchResult {
        BenchResult { json: self.json, failed: self.failed }
    }

    /// A tensor of normal random numbers in bf16.
    pub(crate) fn bf16<const D: usize>(&self, shape: [usize; D]) -> CudaTensor {
        normal(shape, DType::BF16, &self.device)
    }

    /// A tensor of normal random numbers in f32.
    pub(crate) fn f32<const D: usize>(&self, shape: [usize; D]) -> CudaTensor {
        normal(shape, DType::F32, &self.device)
    }

    /// Times a row of the table. Returns milliseconds; `None` where a launch failed.
    pub(crate) fn row<T>(
        &mut self,
        name: &str,
        shape: impl Into<Sizes>,
        work: Work,
        mut body: impl FnMut() -> Result<T, KernelError>,
    ) -> Option<f64> {
        match self.clock.time(&mut || body().map(drop)) {
            Ok(times) => {
                let rate = self.rate(&work, times.median_ms * 1e-3);
                self.push(name, shape, Outcome::Timed { times, rate });
                Some(times.median_ms)
            }
            Err(error) => {
                self.fail(name, shape, &error.to_string());
                None
            }
        }
    }

    /// Adds an entry to a list of the JSON.
    pub(crate) fn append(&mut self, list: &str, entry: Value) {
        if let Some(list) = self.json[list].as_array_mut() {
            list.push(entry);
        }
    }

    /// Reports a row that ended with an error.
    pub(crate) fn fail(&mut self, name: &str, shape: impl Into<Sizes>, error: &str) {
        self.failed += 1;
        self.push(name, shape, Outcome::Failed(error.to_owned()));
    }

    /// The rate of `work` in its unit, and its share of the device's measured peak; `None` for work without a rate.
    fn rate(&self, work: &Work, seconds: f64) -> Option<Rate> {
        let (work, scale, unit, peak) = match *work {
            Work::Flops(flops) => (flops, 1e12, "TFLOP/s", self.matmul_flops),
            Work::Bytes(bytes) => (bytes, 1e9, "GB/s", self.copy_bytes_per_s),
            Work::Time => return None,
        };
        Some(Rate { per_second: work / seconds / scale, unit, of_peak: work / seconds / peak })
    }

    /// Measures by the allocator's count how many bytes the result of `body` keeps in use, reports them as a row and
    /// returns them.
    pub(crate) fn memory<T>(
        &mut self,
        name: &str,
        shape: AttentionShape,
        body: impl FnOnce() -> Result<T, KernelError>,
    ) -> Result<u64> {
        let client = client_of(&self.any_tensor()).clone();
        let in_use = || -> Result<u64> {
            // The allocator frees dropped tensors when the device thread reaches them.
            wait(&self.device)?;
            Ok(client.memory_usage().map_err(BenchError::gpu)?.bytes_in_use)
        };
        let before = in_use()?;
        let held = body()?;
        let after = in_use()?;
        drop(held);
        // q, k, v and o in bf16.
        let heads = 2 * shape.num_heads + 2 * shape.num_kv_heads;
        let inputs = (shape.batch * shape.seq_len * shape.head_dim * 2 * heads) as f64;
        self.push(name, shape, Outcome::Memory { before, after, inputs });
        Ok(after.saturating_sub(before))
    }

    /// Reports by which power of a size time and memory grow.
    pub(crate) fn growth(&mut self, name: &str, growth: Growth) {
        let sizes = format!("{} to {} {}", growth.from, growth.to, growth.with);
        self.push(name, &sizes, Outcome::Growth(growth));
    }

    /// The tensors of a call of this shape; `None`, reported as a skipped row, when they do not fit into memory.
    pub(crate) fn inputs_or_skip(&mut self, shape: AttentionShape) -> Result<Option<Inputs>> {
        let bytes = Inputs::bytes(shape) as f64;
        Ok(self.fits("attention", shape, bytes)?.then(|| Inputs::new(shape, &self.device)))
    }

    /// Whether `bytes` are free on the GPU; reports a skipped row when not.
    pub(crate) fn fits(&mut self, name: &str, shape: AttentionShape, bytes: f64) -> Result<bool> {
        client_of(&self.any_tensor()).memory_cleanup();
        let (free, _) = DeviceReport::memory_bytes(self.gpu)?;
        if bytes <= free as f64 {
            return Ok(true);
        }
        let reason = format!("needs {}, {} are free", row::bytes(bytes as u64), row::bytes(free));
        self.skip(name, shape, &reason);
        Ok(false)
    }

    /// Reports a row that was not timed, and why.
    pub(crate) fn skip(&mut self, name: &str, shape: impl Into<Sizes>, reason: &str) {
        self.push(name, shape, Outcome::Skipped(reason.to_owned()));
    }

    fn push(&mut self, name: &str, shape: impl Into<Sizes>, outcome: Outcome) {
        let row = BenchRow { name: name.to_owned(), shape: shape.into().0, outcome };
        if let Some((list, entry)) = row.json() {
            self.append(list, entry);
        }
        (self.say)(BenchEvent::Row(row));
    }

    fn any_tensor(&self) -> CudaTensor {
        let zero = Tensor::<Cuda, 1>::zeros([1], &self.device.device);
        self.device.tensor(zero.into_primitive().tensor())
    }
}

/// FLOP/s of a bf16 GEMM of 8192 x 8192 x 8192, and whose GEMM it was: cuBLASLt where it is installed, else Burn's.
fn matmul_ceiling(clock: &Clock, device: &Gpu) -> Result<(f64, &'static str)> {
    const SIZE: usize = 8192;
    let [x, w] = [(); 2].map(|()| normal([SIZE, SIZE], DType::BF16, device));
    let flops = 2.0 * (SIZE as f64).powi(3);
    let (times, by) = if Cublaslt::require().is_ok() {
        let output = MatmulOutput::New(DType::BF16);
        let mut gemm = || matmul(GemmKind::Nt, &x, &w, output).map(drop);
        (clock.time(&mut gemm)?, "cuBLASLt")
    } else {
        let [a, b] = [x, w].map(|x| Tensor::<Cuda, 2>::from_primitive(TensorPrimitive::Float(x.burn())));
        let mut gemm = || {
            drop(a.clone().matmul(b.clone().transpose()));
            Ok(())
        };
        (clock.time(&mut gemm)?, "Burn, since cuBLASLt is missing,")
    };
    Ok((flops / (times.median_ms * 1e-3), by))
}

/// The sizes of a row's attention call.
pub(crate) fn shape(batch: usize, seq_len: usize, heads: [usize; 2], width: usize) -> AttentionShape {
    AttentionShape::new(batch, seq_len, heads, [width; 2])
}

/// FLOPs of a forward pass in which each query sees at most `window` keys.
pub(crate) fn forward_flops(shape: AttentionShape, window: usize) -> f64 {
    let (n, w) = (shape.seq_len as f64, window.min(shape.seq_len) as f64);
    // Every query sees w keys, except that the first w - 1 see only those before them.
    let pairs = w * n - w * (w - 1.0) / 2.0;
    let widths = (shape.head_dim + shape.head_dim_v) as f64;
    2.0 * widths * (shape.num_heads * shape.batch) as f64 * pairs
}
