//! Lists of specialisations to compile ahead of time. `attention.rs` here and `crate::step` name the kernels of each
//! part of a model; two lists are built from these:
//!
//! - [`AttentionNeeds::kernels`]: all parts of one model's attention;
//! - [`NeededKernels::shipped`]: the parts and usual widths in the table of `shipped.rs`, which CI compiles.
mod attention;
mod shipped;

pub use attention::{AttentionNeeds, NeededKeys};

use crate::KernelError;
use crate::runtime::SourceKernel;

/// Specialisations to compile, without duplicates, and kernels that a device cannot run.
#[derive(Debug, Clone, Default)]
pub struct NeededKernels {
    /// Kernels with their `#define`s, to compile.
    pub kernels: Vec<SourceKernel>,
    /// Errors of kernels whose tiles do not fit the device's shared memory; their ops run the reference there.
    pub refused: Vec<KernelError>,
}

impl NeededKernels {
    /// Adds the kernels and errors that are not in the list yet.
    pub fn extend(&mut self, other: Self) {
        self.extend_kernels(other.kernels);
        for error in other.refused {
            if !self.refused.contains(&error) {
                self.refused.push(error);
            }
        }
    }

    /// Adds the kernels that are not in the list yet.
    pub fn extend_kernels(&mut self, kernels: impl IntoIterator<Item = SourceKernel>) {
        for kernel in kernels {
            if !self.kernels.iter().any(|known| known.is_same_code(&kernel)) {
                self.kernels.push(kernel);
            }
        }
    }

    /// Adds a kernel to compile, or the reason that it cannot run.
    fn add(&mut self, kernel: Result<SourceKernel, KernelError>) {
        match kernel {
            Ok(kernel) => self.extend_kernels([kernel]),
            Err(error) => self.extend(Self { refused: vec![error], ..Self::default() }),
        }
    }
}
