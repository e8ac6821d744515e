//! Time on the GPU: its own nanosecond clock, read by a kernel before and after the work, on the stream of the work.
//!
//! CubeCL keeps its stream to itself, so there is no place to record an event; a one-thread kernel that stores
//! `%globaltimer` is in order with everything else, and costs a microsecond or two, which a benchmark measures first.
//! Before each repetition a kernel reads half a gigabyte, which throws everything out of the L2 and leaves nothing
//! dirty there, and then waits until the host has queued the work: gaps on the host are not measured.
use crate::device::{Device, Gpu};
use crate::error::{BenchError, Result};

use sieve_kernels::{CudaTensor, DType, KernelError, SourceKernel, ToBurn, client_of};
use std::time::Instant;

/// Warm-up repetitions, whose times do not count.
const WARM: usize = 3;

/// Bytes read between two repetitions: several times any L2.
const FLUSH_BYTES: usize = 512 << 20;

/// The GPU waits this many times the host's time to queue the work, so that small work is queued before it starts.
const WAIT_FACTOR: f64 = 2.0;

const STAMP: &str = "
struct StampParams { unsigned long long index; };
extern \"C\" __global__ void bench_stamp(unsigned long long* stamps, const __grid_constant__ StampParams params) {
  unsigned long long now;
  asm volatile(\"mov.u64 %0, %globaltimer;\" : \"=l\"(now));
  if (threadIdx.x == 0) stamps[params.index] = now;
}";

const FLUSH: &str = "
struct FlushParams { unsigned long long words, wait_ns; };
extern \"C\" __global__ void __launch_bounds__(1024) bench_flush(
    const uint4* data, unsigned* out, const __grid_constant__ FlushParams params) {
  unsigned long long begin, now;
  asm volatile(\"mov.u64 %0, %globaltimer;\" : \"=l\"(begin));
  unsigned sum = 0;
  for (unsigned long long i = blockIdx.x * 1024ull + threadIdx.x; i < params.words; i += gridDim.x * 1024ull) {
    const uint4 word = data[i];
    sum ^= word.x ^ word.y ^ word.z ^ word.w;
  }
  if (sum == 0x9e3779b9u) out[0] = sum;  // so that the loads are needed
  do asm volatile(\"mov.u64 %0, %globaltimer;\" : \"=l\"(now)); while (now - begin < params.wait_ns);
}";

const COPY: &str = "
struct CopyParams { unsigned long long words; };
extern \"C\" __global__ void __launch_bounds__(1024) bench_copy(
    const uint4* from, uint4* to, const __grid_constant__ CopyParams params) {
  for (unsigned long long i = blockIdx.x * 1024ull + threadIdx.x; i < params.words; i += gridDim.x * 1024ull)
    to[i] = from[i];
}";

/// Median and percentiles of a call's time, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Times {
    /// Median of the repetitions, in milliseconds.
    pub median_ms: f64,
    /// Tenth percentile of the repetitions, in milliseconds.
    pub p10_ms: f64,
    /// Ninetieth percentile of the repetitions, in milliseconds.
    pub p90_ms: f64,
}

/// Times work on the GPU: kernels around it write time stamps, and reading `flushed` evicts the L2 cache before it.
pub(crate) struct Clock {
    stamps: CudaTensor,
    flushed: CudaTensor,
    sink: CudaTensor,
    repetitions: usize,
    multiprocessors: usize,
}

impl Clock {
    /// Allocates two stamps for each repetition, and the buffer that `flush` reads.
    pub(crate) fn new(device: &Gpu, repetitions: usize, multiprocessors: usize) -> Self {
        let sink = device.float(&[0.0; 4], &[4], DType::F32);
        Self {
            stamps: sink.empty_contiguous(&[2 * (WARM + repetitions)], DType::I64),
            flushed: sink.zeros_contiguous(&[FLUSH_BYTES / 4], DType::F32),
            sink,
            repetitions,
            multiprocessors,
        }
    }

    /// Times of `work`, each repetition with a cold L2.
    pub(crate) fn time(&self, work: &mut dyn FnMut() -> Result<(), KernelError>) -> Result<Times> {
        let client = client_of(&self.sink);
        // The first call compiles the kernels; the second measures how long the host takes to queue the work.
        work()?;
        client.flush().map_err(BenchError::gpu)?;
        let started = Instant::now();
        work()?;
        client.flush().map_err(BenchError::gpu)?;
        let wait_ns = (started.elapsed().as_nanos() as f64 * WAIT_FACTOR) as u64 + 50_000;
        for repetition in 0..WARM + self.repetitions {
            self.flush(wait_ns)?;
            self.stamp(2 * repetition)?;
            work()?;
            self.stamp(2 * repetition + 1)?;
            client.flush().map_err(BenchError::gpu)?;
        }
        let stamps = burn_cubecl::ops::into_data_sync(self.stamps.clone().burn());
        let stamps: Vec<i64> = stamps.to_vec().map_err(BenchError::gpu)?;
        let pairs = stamps.chunks_exact(2).skip(WARM);
        Ok(of_samples(pairs.map(|pair| (pair[1] - pair[0]) as f64 * 1e-6).collect()))
    }

    /// Bytes a second of a copy of a gigabyte, read and write counted.
    pub(crate) fn copy_bytes_per_s(&self) -> Result<f64> {
        // Buffers of its own: the end of the buffer that `flush` reads would still be in the L2.
        let new = || self.sink.zeros_contiguous(&[FLUSH_BYTES / 4], DType::F32);
        let (from, to) = (new(), new());
        let kernel = SourceKernel::from_text("bench_copy", COPY).threads(1024);
        // A word is a uint4.
        let words = [(FLUSH_BYTES / 16) as u64];
        let grid = [self.multiprocessors * 2, 1, 1];
        let times = self.time(&mut || {
            // SAFETY: both buffers hold FLUSH_BYTES.
            unsafe { kernel.launch_words(grid, &[], &[&from, &to], &words) }
        })?;
        Ok(2.0 * FLUSH_BYTES as f64 / (times.median_ms * 1e-3))
    }

    fn stamp(&self, index: usize) -> Result<(), KernelError> {
        let kernel = SourceKernel::from_text("bench_stamp", STAMP).threads(32);
        // SAFETY: index is below the number of stamps.
        unsafe { kernel.launch_words([1, 1, 1], &[], &[&self.stamps], &[index as u64]) }
    }

    /// Evicts the L2 cache, and keeps the GPU busy until `wait_ns` have passed, so that the host can queue the work.
    fn flush(&self, wait_ns: u64) -> Result<(), KernelError> {
        let kernel = SourceKernel::from_text("bench_flush", FLUSH).threads(1024);
        let params = [(FLUSH_BYTES / 16) as u64, wait_ns];
        let grid = [self.multiprocessors * 2, 1, 1];
        // SAFETY: reads FLUSH_BYTES, writes one word, and ends when its time is over.
        unsafe { kernel.launch_words(grid, &[], &[&self.flushed, &self.sink], &params) }
    }
}

/// Median, tenth and ninetieth percentile of some samples in milliseconds.
fn of_samples(mut samples: Vec<f64>) -> Times {
    samples.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let last = samples.len().saturating_sub(1) as f64;
        samples.get((share * last).round() as usize).copied().unwrap_or(f64::NAN)
    };
    Times { median_ms: at(0.5), p10_ms: at(0.1), p90_ms: at(0.9) }
}
