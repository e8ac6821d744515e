//! Helpers that tests and benchmarks of several crates share: random numbers, comparisons, finite differences, timing,
//! checks of messages.
//!
//! Crates depend on this one under `dev-dependencies` only. The exception is `sieve-bench`, which checks the kernels
//! with its random numbers.

mod clock;
mod close;
mod differences;
mod mutated;
mod random;
mod rows;
mod words;

pub use clock::{Time, measure, timed};
pub use close::{assert_close, assert_close_relative, assert_lse_close};
pub use differences::{finite_differences, inner, wide};
pub use mutated::mutated;
pub use random::{Random, round_bf16};
pub use rows::{threads, whole_rows};
pub use words::{cases, panics, parts, refusal, says};
