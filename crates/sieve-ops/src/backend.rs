//! What a model needs of its backend: the ops of every family.
use crate::attention::AttentionBackend;
use crate::block::{AttentionLayerBackend, FeedForwardBackend, SeedBackend};
use crate::decode::DecodeBackend;
use crate::device_backend::DeviceBackend;
use crate::dma::{DmaBackend, DynamicMaskBackend};
use crate::embedding::EmbeddingBackend;
use crate::linear::LinearBackend;
use crate::loss::LossBackend;
use crate::mla::MlaBackend;
use crate::norm::NormBackend;
use crate::nsa::NsaBackend;
use crate::optimizer::OptimizerBackend;
use crate::rope::RopeBackend;
use crate::sparse::SparseBackend;
use crate::swiglu::SwigluBackend;
use burn::backend::Autodiff;
use burn::tensor::backend::AutodiffBackend;

/// A Burn backend with Sieve's ops: a device, or autodiff over one.
///
/// The ops are methods on primitives; users call the functions of this crate that carry their names.
pub trait SieveBackend:
    LinearBackend
    + EmbeddingBackend
    + NormBackend
    + RopeBackend
    + SwigluBackend
    + AttentionBackend
    + DmaBackend
    + DynamicMaskBackend
    + NsaBackend
    + MlaBackend
    + DecodeBackend
    + SparseBackend
    + LossBackend
    + OptimizerBackend
    + FeedForwardBackend
    + AttentionLayerBackend
    + SeedBackend
{
}

impl<B> SieveBackend for B where
    B: LinearBackend
        + EmbeddingBackend
        + NormBackend
        + RopeBackend
        + SwigluBackend
        + AttentionBackend
        + DmaBackend
        + DynamicMaskBackend
        + NsaBackend
        + MlaBackend
        + DecodeBackend
        + SparseBackend
        + LossBackend
        + OptimizerBackend
        + FeedForwardBackend
        + AttentionLayerBackend
        + SeedBackend
{
}

/// What a training loop needs of its backend: Sieve's ops with and without gradients.
pub trait TrainBackend: SieveBackend + AutodiffBackend<InnerBackend: SieveBackend> {}

impl<B: DeviceBackend> TrainBackend for Autodiff<B> {}
