//! Rows of a benchmark, as text and as JSON.
use crate::clock::Times;
use crate::shape::queries_of;
use serde_json::{Value, json};
use sieve_kernels::AttentionShape;
use std::fmt;

/// The GPU of a run and its measured peak rates, which the rows' rates are compared with.
#[derive(Clone, Debug)]
pub struct Ceilings {
    /// Name of the GPU.
    pub device: String,
    /// The GPU's architecture, such as `sm_90a`.
    pub arch: String,
    /// Number of streaming multiprocessors.
    pub num_multiprocessors: usize,
    /// Family of the attention kernels: portable or Hopper.
    pub family: &'static str,
    /// Timed repetitions of each row.
    pub repetitions: usize,
    /// Microseconds of a measurement of nothing: the clock's own time.
    pub clock_us: f64,
    /// Bytes a second of a copy, read and write counted.
    pub copy_bytes_per_s: f64,
    /// Measured FLOP/s of a large bf16 GEMM.
    pub matmul_flops: f64,
    /// Whether cuBLASLt or Burn ran that GEMM.
    pub matmul_by: &'static str,
}

impl fmt::Display for Ceilings {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            out,
            "{} ({}), {} multiprocessors, {} attention kernels; medians of {} on the GPU's clock, L2 flushed; reading \
             the clock takes {:.1} us",
            self.device, self.arch, self.num_multiprocessors, self.family, self.repetitions, self.clock_us
        )?;
        writeln!(
            out,
            "ceilings in this run: copy {:.2} TB/s (read + write), bf16 GEMM of 8192 x 8192 x 8192 by {} {:.0} \
             TFLOP/s",
            self.copy_bytes_per_s / 1e12,
            self.matmul_by,
            self.matmul_flops / 1e12
        )?;
        write!(
            out,
            "{:48} {:30} {:>10} {:>19} {:>16} {:>9}",
            "kernel", "shape", "median ms", "p10-p90", "rate", "of peak"
        )
    }
}

/// The sizes of a row in words: `2x8192 h16/8 d128`.
pub(crate) struct Sizes(pub(crate) String);

impl From<AttentionShape> for Sizes {
    fn from(shape: AttentionShape) -> Self {
        let [batch, seq_len, heads, width] = queries_of(shape);
        Self(format!("{batch}x{seq_len} h{heads}/{} d{width}", shape.num_kv_heads))
    }
}

impl<'a> From<&'a String> for Sizes {
    fn from(text: &'a String) -> Self {
        Self(text.clone())
    }
}

/// One row of a benchmark's table.
#[derive(Clone, Debug)]
pub struct BenchRow {
    /// Name of the kernel or op that was timed.
    pub name: String,
    /// Shape of the operands, for example `2x8192 h16/8 d128`.
    pub shape: String,
    /// What was measured, or why nothing was.
    pub outcome: Outcome,
}

/// Work per second.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    /// Operations or bytes a second, in `unit`.
    pub per_second: f64,
    /// Unit of the rate: TFLOP/s or GB/s.
    pub unit: &'static str,
    /// Share of this run's peak rate ([`Ceilings`]).
    pub of_peak: f64,
}

/// What a row measured, or why it measured nothing.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// The call was timed.
    Timed {
        /// Percentiles of the call's time.
        times: Times,
        /// Work a second; `None` where the row is a time alone.
        rate: Option<Rate>,
    },
    /// Memory that the result keeps in use.
    Memory {
        /// GPU memory in use before the call, in bytes.
        before: u64,
        /// GPU memory in use while the result lives, in bytes.
        after: u64,
        /// Bytes of q, k, v and o.
        inputs: f64,
    },
    /// By which power of the size the time and memory of earlier rows grow.
    Growth(Growth),
    /// The call was not timed, for this reason.
    Skipped(String),
    /// The call failed with this error text.
    Failed(String),
}

/// Exponents by which time and memory grow with a size.
#[derive(Clone, Copy, Debug)]
pub struct Growth {
    /// What the size counts: tokens, or kept keys.
    pub with: &'static str,
    /// The smallest size that was measured.
    pub from: usize,
    /// The largest size that was measured.
    pub to: usize,
    /// Exponent p of the time of a forward and backward pass, fitted as `size^p`.
    pub time: f64,
    /// Exponent p of the memory that the forward pass keeps for the backward pass, fitted as `size^p`.
    pub memory: f64,
}

impl BenchRow {
    /// The row as JSON, and the list of the JSON file that it goes to; `None` for a failed row, which is only printed.
    pub(crate) fn json(&self) -> Option<(&'static str, Value)> {
        let Self { name, shape, .. } = self;
        match &self.outcome {
            Outcome::Timed { times, rate } => Some((
                "rows",
                json!({
                    "name": name, "shape": shape, "median_ms": times.median_ms,
                    "p10_ms": times.p10_ms, "p90_ms": times.p90_ms,
                    "rate": rate.map(|rate| rate.per_second), "unit": rate.map(|rate| rate.unit),
                    "of_peak": rate.map(|rate| rate.of_peak),
                }),
            )),
            Outcome::Memory { before, after, inputs } => Some((
                "memory",
                json!({
                    "name": name, "shape": shape, "in_use_before": before,
                    "in_use_after": after, "q_k_v_o_bytes": inputs,
                }),
            )),
            Outcome::Growth(growth) => Some((
                "growth",
                json!({
                    "name": name, "with": growth.with, "from": growth.from, "to": growth.to,
                    "time_power": growth.time, "memory_power": growth.memory,
                }),
            )),
            Outcome::Skipped(reason) => Some(("rows", json!({ "name": name, "shape": shape, "skipped": reason }))),
            Outcome::Failed(_) => None,
        }
    }
}

impl fmt::Display for BenchRow {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:48} {:30} ", self.name, self.shape)?;
        match &self.outcome {
            Outcome::Timed { times, rate } => {
                let range = format!("{:.4}-{:.4}", times.p10_ms, times.p90_ms);
                write!(out, "{:>10.4} {range:>19}", times.median_ms)?;
                match rate {
                    None => Ok(()),
                    Some(rate) => write!(
                        out,
                        " {:>16} {:>8.1}%",
                        format!("{:.1} {}", rate.per_second, rate.unit),
                        100.0 * rate.of_peak
                    ),
                }
            }
            Outcome::Memory { before, after, inputs } => {
                let kept = after.saturating_sub(*before);
                write!(
                    out,
                    "{:>10} in use after the forward pass, {:.1} % of q + k + v + o",
                    bytes(kept),
                    100.0 * kept as f64 / inputs
                )
            }
            Outcome::Growth(growth) => {
                write!(out, "time grows as n^{:.2}, memory between the passes as n^{:.2}", growth.time, growth.memory)
            }
            Outcome::Skipped(reason) => write!(out, "skipped: {reason}"),
            Outcome::Failed(error) => write!(out, "FAILED {error}"),
        }
    }
}

/// Formats a number of bytes, such as `1.23 GiB`.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    let mut size = count as f64 / 1024.0;
    if size < 1.0 {
        return format!("{count} B");
    }
    let mut unit = 0;
    while size >= 1024.0 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    format!("{size:.2} {}", UNITS[unit])
}
