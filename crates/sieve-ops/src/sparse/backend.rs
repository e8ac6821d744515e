//! Attention under a selector's mask, and its selection, as a backend computes them.
use crate::decode::{DecodeBackend, DmaCache};
use crate::tensors::Float;
use burn::tensor::ops::IntTensor;
use sieve_core::{BlockSelection, HeavyKeys, MaskLayout, ProbeCorrection};
use std::ops::Range;

/// A mask made on a device.
#[derive(Clone, Debug)]
pub struct ChosenBlocks<I> {
    /// Sizes, and where arrays are in the first tensor.
    pub layout: MaskLayout,
    /// The mask; kept tiles and kept pairs of each row; rows of each head with a score that is no number.
    pub tensors: [I; 4],
}

/// Attention under a selector's mask.
pub trait SparseBackend: DecodeBackend {
    /// See [`crate::has_sparse_attention`].
    fn has_sparse_attention(qkv: &Float<Self>) -> bool;
    /// See [`crate::sparse_attention`]. Returns o and the log-sum-exp.
    fn sparse_attention(
        qkv: Float<Self>,
        mask: &MaskLayout,
        data: IntTensor<Self>,
        softmax_scale: f64,
    ) -> Result<[Float<Self>; 2], String>;
    /// See [`crate::select_blocks`].
    fn select_blocks(
        qkv: Float<Self>,
        selection: &BlockSelection,
        bounds: Option<Float<Self>>,
    ) -> Result<ChosenBlocks<IntTensor<Self>>, String>;
    /// See [`crate::correct_by_probes`].
    fn correct_by_probes(
        qkv: Float<Self>,
        o: Float<Self>,
        correction: ProbeCorrection,
        dense_rows: Range<usize>,
        softmax_scale: f64,
    ) -> Result<Float<Self>, String>;
    /// See [`crate::keep_heavy_keys`].
    fn keep_heavy_keys(qkv: Float<Self>, heavy: &HeavyKeys) -> Result<DmaCache<Self>, String>;
    /// See [`crate::heavy_decode`].
    fn heavy_decode(
        cache: &mut DmaCache<Self>,
        qkv: Float<Self>,
        position: usize,
        softmax_scale: f64,
        scratch: &mut Self::DecodeScratch,
    ) -> Result<Float<Self>, String>;
}
