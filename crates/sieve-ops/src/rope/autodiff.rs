//! Per-head norms with rotary positions as a node of the autodiff graph.
use super::backend::{QkNormRopeCall, RopeBackend, RopeGradients};
use crate::device::autodiff::{Gradient, enter};
use crate::tensors::Float;
use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::tensor::backend::Backend;

#[derive(Clone, Debug)]
struct Rotated<B: Backend> {
    qkv: Float<B>,
    call: QkNormRopeCall<B>,
}

impl<B: RopeGradients> Gradient<B, 3> for Rotated<B> {
    fn gradients(self, dy: Float<B>) -> [Float<B>; 3] {
        B::qk_norm_rope_backward(self.qkv, self.call, dy).into()
    }
}

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
        let y = B::qk_norm_rope(qkv.primitive.clone(), inner.clone());
        let kept = Rotated {
            qkv: qkv.primitive.clone(),
            call: inner,
        };
        enter::<B, C, _, 3>([&qkv, &call.q_weight, &call.k_weight], kept, y)
    }
}
