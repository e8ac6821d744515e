//! Attention under a selector's mask, and its selection, where a backend has kernels for them.
use crate::decode::DmaCache;
use crate::tensors::Float;
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::backend::Backend;
use burn::tensor::ops::IntTensor;
use burn_flex::Flex;
use sieve_core::{BlockSelection, HeavyKeys, KeyMask, ProbeCorrection};
use std::ops::Range;

/// A backend that may have kernels for attention under masks. Calls of one without go to sieve-select, which takes
/// slices on the host.
pub trait SparseBackend: Backend {
    /// The kernels.
    fn sparse_kernels() -> Option<&'static dyn SparseKernels<Self>>;
}

impl SparseBackend for Flex {
    fn sparse_kernels() -> Option<&'static dyn SparseKernels<Self>> {
        None
    }
}

/// Attention under a mask has no gradient.
impl<B: Backend, C: CheckpointStrategy> SparseBackend for Autodiff<B, C> {
    fn sparse_kernels() -> Option<&'static dyn SparseKernels<Self>> {
        None
    }
}

/// Kernels of a backend; each says why it refuses a call.
pub trait SparseKernels<B: Backend> {
    /// See [`crate::has_sparse_attention`].
    fn takes(&self, qkv: &Float<B>) -> bool;
    /// See [`crate::sparse_attention`]. Returns o and the log-sum-exp.
    fn sparse_attention(
        &self,
        qkv: Float<B>,
        mask: KeyMask<IntTensor<B>>,
        softmax_scale: f64,
    ) -> Result<[Float<B>; 2], String>;
    /// See [`crate::select_blocks`].
    fn select_blocks(
        &self,
        qkv: Float<B>,
        selection: &BlockSelection,
        bounds: Option<Float<B>>,
    ) -> Result<KeyMask<IntTensor<B>>, String>;
    /// See [`crate::correct_by_probes`].
    fn correct_by_probes(
        &self,
        qkv: Float<B>,
        o: Float<B>,
        correction: ProbeCorrection,
        dense_rows: Range<usize>,
        softmax_scale: f64,
    ) -> Result<Float<B>, String>;
    /// See [`crate::keep_heavy_keys`].
    fn keep_heavy_keys(&self, qkv: Float<B>, heavy: &HeavyKeys) -> Result<DmaCache<B>, String>;
    /// See [`crate::heavy_decode`].
    fn heavy_decode(
        &self,
        cache: DmaCache<B>,
        qkv: Float<B>,
        position: usize,
        softmax_scale: f64,
    ) -> Result<(DmaCache<B>, Float<B>), String>;
}
