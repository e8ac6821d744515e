//! Rotary positions, with and without per-head norms, as a backend computes them.
use crate::tensors::{Float, Ints};
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::backend::Backend;

/// Cosine and sine tables of rotary position embeddings, each `[max_positions, head_dim / 2]`.
#[derive(Clone, Debug)]
pub struct RopeTables<B: Backend> {
    /// Cosines.
    pub cos: Float<B>,
    /// Sines.
    pub sin: Float<B>,
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
    pub q_weight: Float<B>,
    /// `[head_dim]`.
    pub k_weight: Float<B>,
    /// `[batch, seq_len]`, an index into the tables' rows.
    pub positions: Ints<B>,
    /// Tables of the angles.
    pub rope: RopeTables<B>,
    /// Key heads, and as many value heads, after the query heads.
    pub num_kv_heads: usize,
    /// Added to the mean square.
    pub epsilon: f64,
}

/// What a call of [`crate::rope`] has beside the packed tensor.
#[derive(Clone, Debug)]
pub struct RopeCall<B: Backend> {
    /// `[batch, seq_len]`, an index into the tables' rows.
    pub positions: Ints<B>,
    /// Tables of the angles.
    pub rope: RopeTables<B>,
    /// Key heads, and as many value heads, after the query heads.
    pub num_kv_heads: usize,
}

impl<B: Backend> RopeCall<B> {
    /// The rotation by the negative angles, which is the gradient.
    pub(crate) fn inverse(self) -> Self {
        let rope = RopeTables {
            sin: B::float_neg(self.rope.sin),
            ..self.rope
        };
        Self { rope, ..self }
    }
}

/// Rotary positions, with and without per-head norms.
pub trait RopeBackend: Backend {
    /// See [`crate::qk_norm_rope`].
    fn qk_norm_rope(qkv: Float<Self>, call: QkNormRopeCall<Self>) -> Float<Self>;

    /// See [`crate::rope`].
    fn rope(qkv: Float<Self>, call: RopeCall<Self>) -> Float<Self>;
}

/// Their gradients, as a device computes them.
pub trait RopeGradients: RopeBackend {
    /// `(dqkv, dq_weight, dk_weight)` of [`crate::qk_norm_rope`].
    fn qk_norm_rope_backward(
        qkv: Float<Self>,
        call: QkNormRopeCall<Self>,
        dy: Float<Self>,
    ) -> (Float<Self>, Float<Self>, Float<Self>);
}
