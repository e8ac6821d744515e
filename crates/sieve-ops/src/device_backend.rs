//! What a device computes: every op, and every op's gradient.
use crate::attention::AttentionGradients;
use crate::decode::DecodeBackend;
use crate::dma::DmaGradients;
use crate::embedding::EmbeddingGradients;
use crate::linear::LinearGradients;
use crate::loss::LossGradients;
use crate::mla::MlaGradients;
use crate::norm::NormGradients;
use crate::nsa::NsaGradients;
use crate::optimizer::OptimizerBackend;
use crate::rope::RopeGradients;
use crate::sparse::SparseBackend;
use crate::swiglu::SwigluGradients;

/// A backend that computes itself: the CPU's and CUDA's. Nothing has a default body: what has no kernel says so and is
/// counted.
pub trait DeviceBackend:
    LinearGradients
    + EmbeddingGradients
    + NormGradients
    + RopeGradients
    + SwigluGradients
    + AttentionGradients
    + DmaGradients
    + NsaGradients
    + MlaGradients
    + DecodeBackend
    + SparseBackend
    + LossGradients
    + OptimizerBackend
{
}

impl<B> DeviceBackend for B where
    B: LinearGradients
        + EmbeddingGradients
        + NormGradients
        + RopeGradients
        + SwigluGradients
        + AttentionGradients
        + DmaGradients
        + NsaGradients
        + MlaGradients
        + DecodeBackend
        + SparseBackend
        + LossGradients
        + OptimizerBackend
{
}
