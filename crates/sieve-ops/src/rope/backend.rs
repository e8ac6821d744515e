//! Per-head norms with rotary positions as a backend computes them.
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};

/// Cosine and sine tables of rotary position embeddings, each `[max_positions, head_dim / 2]`.
#[derive(Clone, Debug)]
pub struct RopeTables<B: Backend> {
    /// Cosines.
    pub cos: FloatTensor<B>,
    /// Sines.
    pub sin: FloatTensor<B>,
}

impl<B: Backend, C: CheckpointStrategy> RopeTables<Autodiff<B, C>> {
    /// The tables below the graph.
    pub(crate) fn inner(&self) -> RopeTables<B> {
        RopeTables {
            cos: self.cos.primitive.clone(),
            sin: self.sin.primitive.clone(),
        }
    }
}

/// What a call of [`crate::qk_norm_rope`] has beside the packed tensor.
#[derive(Clone, Debug)]
pub struct QkNormRopeCall<B: Backend> {
    /// `[head_dim]`.
    pub q_weight: FloatTensor<B>,
    /// `[head_dim]`.
    pub k_weight: FloatTensor<B>,
    /// `[batch, seq_len]`, an index into the tables' rows.
    pub positions: IntTensor<B>,
    /// Tables of the angles.
    pub rope: RopeTables<B>,
    /// Key heads, and as many value heads, after the query heads.
    pub num_kv_heads: usize,
    /// Added to the mean square.
    pub epsilon: f64,
}

/// Per-head norms with rotary positions.
pub trait RopeBackend: Backend {
    /// See [`crate::qk_norm_rope`].
    fn qk_norm_rope(qkv: FloatTensor<Self>, call: QkNormRopeCall<Self>) -> FloatTensor<Self>;
}

/// Their gradients, as a device computes them.
pub trait RopeGradients: RopeBackend {
    /// `(dqkv, dq_weight, dk_weight)` of [`crate::qk_norm_rope`].
    fn qk_norm_rope_backward(
        qkv: FloatTensor<Self>,
        call: QkNormRopeCall<Self>,
        dy: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
}
