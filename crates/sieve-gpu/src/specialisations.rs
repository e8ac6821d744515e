//! Which specialisations of the kernels there are. The kernels of each part of a model are named once, in
//! `attention.rs` here and in `crate::step`; everything else is a view:
//!
//! - [`AttentionNeeds::kernels`]: all parts of one model's attention, for a build ahead of time;
//! - [`NeededKernels::shipped`]: the usual widths, by a table of parts (`shipped.rs`), which CI compiles.
mod attention;
mod shipped;

pub use attention::{AttentionNeeds, NeededKeys};

use crate::KernelError;
use crate::runtime::SourceKernel;

/// Specialisations, each once, and why others cannot be had on a device.
#[derive(Debug, Clone, Default)]
pub struct NeededKernels {
    /// What to compile.
    pub kernels: Vec<SourceKernel>,
    /// Kernels whose tiles do not fit the device's shared memory: calls of these take the reference path there.
    pub refused: Vec<KernelError>,
}

impl NeededKernels {
    /// Adds those that are not in the list yet.
    pub fn extend(&mut self, other: Self) {
        self.extend_kernels(other.kernels);
        for error in other.refused {
            if !self.refused.contains(&error) {
                self.refused.push(error);
            }
        }
    }

    /// Adds those kernels that are not in the list yet.
    pub fn extend_kernels(&mut self, kernels: impl IntoIterator<Item = SourceKernel>) {
        for kernel in kernels {
            if !self.kernels.iter().any(|known| known.is_same_code(&kernel)) {
                self.kernels.push(kernel);
            }
        }
    }

    /// Adds a kernel, or the reason why there is none.
    fn add(&mut self, kernel: Result<SourceKernel, KernelError>) {
        match kernel {
            Ok(kernel) => self.extend_kernels([kernel]),
            Err(error) => self.extend(Self {
                refused: vec![error],
                ..Self::default()
            }),
        }
    }
}
