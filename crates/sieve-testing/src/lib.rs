//! What tests and benchmarks of several crates share: random numbers, comparisons, derivatives by differences,
//! times, words of messages.
//!
//! Nothing here is part of a release: crates name it under `dev-dependencies`, and `sieve-bench`, the proving ground of
//! the kernels, uses its random numbers.

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
