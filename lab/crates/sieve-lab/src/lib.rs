//! The lab's commands, which `sieve` mounts under names of its own: measures of models and selectors, checks and times
//! of kernels, runs side by side.
//!
//! Nothing of the engine knows this crate; the program alone has an arrow to it.

mod compare;
mod draw;
mod eval;
mod generate_data;
mod kernels;

pub use compare::{CompareArgs, run as compare};
pub use eval::{EvalCommand, run as eval};
pub use generate_data::{GenerateArgs, run as generate_data};
pub use kernels::{KernelsCommand, run as kernels};

/// (name, text) of sources and docs that the program holds.
pub type OwnText = &'static [(&'static str, &'static str)];
