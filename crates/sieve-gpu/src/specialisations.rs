//! Kernels to compile ahead of time. Nothing here names a kernel: launch wrappers are called on a recording GPU
//! (`calls.rs`), and what they launch is the list.
//!
//! - [`AttentionNeeds::kernels`]: all parts of one model's attention; [`NeededKernels::step`] and the functions beside
//!   it: the rest of a model;
//! - [`NeededKernels::shipped`]: the parts and usual widths in the table of `shipped.rs`, which CI compiles.
mod attention;
mod calls;
mod model;
mod shipped;

pub use attention::{AttentionNeeds, NeededKeys};
pub(crate) use calls::{Calls, EPSILON, ROW};
pub use model::StepSizes;

use crate::KernelError;
use crate::runtime::SourceKernel;

/// Specialisations to compile, without duplicates, and kernels that a device cannot run.
#[derive(Debug, Clone, Default)]
pub struct NeededKernels {
    /// Kernels with their `#define`s, to compile.
    pub kernels: Vec<SourceKernel>,
    /// Errors of calls that the device has no kernel for, for example because tiles do not fit its shared memory; their
    /// ops run the reference there.
    pub refused: Vec<KernelError>,
}

impl NeededKernels {
    /// Adds the kernels and errors that are not in the list yet.
    pub fn extend(&mut self, other: Self) {
        self.extend_kernels(other.kernels);
        other.refused.into_iter().for_each(|error| self.refuse(error));
    }

    /// Adds the kernels that are not in the list yet.
    pub fn extend_kernels(&mut self, kernels: impl IntoIterator<Item = SourceKernel>) {
        for kernel in kernels {
            if !self.kernels.iter().any(|known| known.is_same_code(&kernel)) {
                self.kernels.push(kernel);
            }
        }
    }

    /// Adds the reason that a call was refused, if it is not in the list yet.
    fn refuse(&mut self, error: KernelError) {
        if !self.refused.contains(&error) {
            self.refused.push(error);
        }
    }
}
