//! What a model needs of its backend, and what a device computes: the ops of every family.
use crate::attention::{AttentionBackend, AttentionGradients};
use crate::block::{AttentionLayerBackend, FeedForwardBackend, SeedBackend};
use crate::decode::DecodeBackend;
use crate::dma::{DmaBackend, DmaGradients, DynamicMaskBackend};
use crate::embedding::{EmbeddingBackend, EmbeddingGradients};
use crate::fp8::Fp8Gradients;
use crate::linear::{LinearBackend, LinearGradients};
use crate::loss::{LossBackend, LossGradients};
use crate::mla::{MlaBackend, MlaGradients};
use crate::norm::{NormBackend, NormGradients};
use crate::nsa::{NsaBackend, NsaGradients};
use crate::optimizer::OptimizerBackend;
use crate::rope::{RopeBackend, RopeGradients};
use crate::row_parts::RowPartsBackend;
use crate::sparse::SparseBackend;
use crate::swiglu::{SwigluBackend, SwigluGradients};
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

all_of!(
    /// A Burn backend with Sieve's ops: a device, or autodiff over one.
    ///
    /// The ops are methods on primitives; users call the functions of this crate that carry their names.
    SieveBackend: LinearBackend EmbeddingBackend NormBackend RopeBackend SwigluBackend AttentionBackend DmaBackend
        DynamicMaskBackend NsaBackend MlaBackend DecodeBackend SparseBackend LossBackend OptimizerBackend
        FeedForwardBackend AttentionLayerBackend SeedBackend
);

all_of!(
    /// A backend that computes itself, every op and every op's gradient: the CPU's and CUDA's. Nothing has a default
    /// body: what has no kernel says so and is counted.
    DeviceBackend: LinearGradients Fp8Gradients EmbeddingGradients NormGradients RopeGradients SwigluGradients
        AttentionGradients DmaGradients NsaGradients MlaGradients DecodeBackend SparseBackend LossGradients
        OptimizerBackend RowPartsBackend
);

/// What a training loop needs of its backend: Sieve's ops with and without gradients.
pub trait TrainBackend: SieveBackend + AutodiffBackend<InnerBackend: SieveBackend> {}

impl<B: DeviceBackend> TrainBackend for Autodiff<B> {}
