//! Rotary positions, with and without per-head norms, as a node of the autodiff graph.
use super::backend::{QkNormRopeCall, RopeBackend, RopeCall, RopeGradients};
use crate::device::autodiff::enter;
use crate::tensors::Float;
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;

impl<B: RopeGradients, C: CheckpointStrategy> RopeBackend for Autodiff<B, C> {
    fn qk_norm_rope(qkv: Float<Self>, call: QkNormRopeCall<Self>) -> Float<Self> {
        let inner = QkNormRopeCall {
            q_weight: call.q_weight.primitive.clone(),
            k_weight: call.k_weight.primitive.clone(),
            positions: call.positions,
            rope: call.rope.inner(),
            num_kv_heads: call.num_kv_heads,
            epsilon: call.epsilon,
        };
        let x = qkv.primitive.clone();
        let y = B::qk_norm_rope(x.clone(), inner.clone());
        enter::<B, C, _, _>([&qkv, &call.q_weight, &call.k_weight], y, move |dy| {
            B::qk_norm_rope_backward(x, inner, dy).into()
        })
    }

    fn rope(qkv: Float<Self>, call: RopeCall<Self>) -> Float<Self> {
        let inner = RopeCall {
            positions: call.positions,
            rope: call.rope.inner(),
            num_kv_heads: call.num_kv_heads,
        };
        let y = B::rope(qkv.primitive.clone(), inner.clone());
        enter::<B, C, _, _>([&qkv], y, move |dy| [B::rope(dy, inner.inverse())])
    }
}
