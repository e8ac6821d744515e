//! What a model, a device and a training loop are asked for, as traits that stand for others.
use crate::{DeviceBackend, OptimizerBackend, SieveBackend};
use burn::backend::Autodiff;
use burn::tensor::backend::AutodiffBackend;

/// A trait that stands for others: whatever has them all has it.
macro_rules! all_of {
    ($(#[doc = $doc:literal])+ $name:ident: $($family:ident)+) => {
        $(#[doc = $doc])+
        pub trait $name: $($family +)+ {}

        impl<B: $($family +)+> $name for B {}
    };
}
pub(crate) use all_of;

/// What a training loop needs of its backend: Sieve's ops with and without gradients, and below them the optimizer's.
pub trait TrainBackend: SieveBackend + AutodiffBackend<InnerBackend: SieveBackend + OptimizerBackend> {}

impl<B: DeviceBackend> TrainBackend for Autodiff<B> {}
