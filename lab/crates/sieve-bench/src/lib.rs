//! Checks and benchmarks of the kernels, behind `sieve kernels`.
//!
//! A check draws calls from a seed, computes each on the host in f64 by its definition and once more as plain bf16 code
//! would, and compares the kernel's error with the plain one. A [`Report`] also names the path that every call took,
//! kernel or reference. A benchmark times the same calls on the GPU's own clock. Nothing here prints: callers get
//! reports and events.

mod error;

mod scores;
mod shape;

mod case;
mod extent;
mod outputs;
mod strided;
mod tensors;

mod reference;
mod report;
mod tolerance;

mod device;
mod emulator;

mod clock;
mod timed;

mod on_device;

mod attention;
mod bands;
mod biases;
mod block_order;
mod branch_order;
mod decode;
mod key_order;
mod latent;
mod models;
mod nsa;
mod select;
mod selection;
mod sparse;
mod step;
mod tiles;
mod trained_bits;

mod bench;
mod capture;
mod check;
mod run;

pub use bench::bench;
pub use capture::{Captured, capture, kernel_sources};
pub use check::{CheckSettings, CheckedPart, check, check_emulated, check_json, short_check};
pub use clock::Times;
pub use emulator::replay_emulated;
pub use error::BenchError;
pub use extent::CheckPart;
pub use report::{Report, Row};
pub use run::{NsaForm, Op, RunSettings, run};
pub use scores::Scores;
pub use shape::{BenchHeads, CaseBlocks, CaseShape};
pub use timed::{BenchEvent, BenchResult, BenchRow, BenchRows, BenchSettings, Ceilings, Growth, Outcome, Rate};
