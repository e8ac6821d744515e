//! Rotary positions, with and without per-head norms, on the CPU.
use super::backend::{QkNormRopeCall, RopeBackend, RopeCall, RopeGradients};
use super::reference;
use crate::device::flex::{contiguous, floats, from_vec, ints, is_f32, plain, zeros_like};
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};

impl RopeBackend for Flex {
    fn qk_norm_rope(qkv: FlexTensor, call: QkNormRopeCall<Self>) -> FlexTensor {
        if !is_f32(&qkv) {
            return plain("qk_norm_rope", || reference::qk_norm_rope(qkv, call));
        }
        let (qkv, operands) = (contiguous(qkv), Operands::new(call));
        let mut y = zeros_like(&qkv);
        let documents = operands.tokens.documents();
        sieve_cpu::qk_norm_rope_forward(&operands.op(&qkv), floats(&qkv), documents, &mut y);
        from_vec(y, qkv.shape())
    }

    fn rope(qkv: FlexTensor, call: RopeCall<Self>) -> FlexTensor {
        if !is_f32(&qkv) {
            return plain("rope", || reference::rope(qkv, call));
        }
        let (qkv, tokens) = (contiguous(qkv), Tokens::new(call));
        let mut y = zeros_like(&qkv);
        sieve_cpu::rope(&tokens.op(&qkv), floats(&qkv), tokens.documents(), &mut y);
        from_vec(y, qkv.shape())
    }
}

impl RopeGradients for Flex {
    fn qk_norm_rope_backward(
        qkv: FlexTensor,
        call: QkNormRopeCall<Self>,
        dy: FlexTensor,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        if !is_f32(&qkv) {
            return plain("qk_norm_rope_backward", || {
                reference::qk_norm_rope_backward(qkv, call, dy)
            });
        }
        let [qkv, dy] = [qkv, dy].map(contiguous);
        let operands = Operands::new(call);
        let mut dqkv = zeros_like(&qkv);
        let (mut dq, mut dk) = (zeros_like(&operands.q_weight), zeros_like(&operands.k_weight));
        sieve_cpu::qk_norm_rope_backward(
            &operands.op(&qkv),
            floats(&qkv),
            operands.tokens.documents(),
            floats(&dy),
            &mut dqkv,
            &mut dq,
            &mut dk,
        );
        let weight_shape = operands.q_weight.shape();
        (
            from_vec(dqkv, qkv.shape()),
            from_vec(dq, weight_shape.clone()),
            from_vec(dk, weight_shape),
        )
    }
}

/// The arguments of q/k-norm with RoPE, contiguous and owned.
struct Operands {
    q_weight: FlexTensor,
    k_weight: FlexTensor,
    epsilon: f64,
    tokens: Tokens,
}

impl Operands {
    fn new(call: QkNormRopeCall<Flex>) -> Self {
        Self {
            q_weight: contiguous(call.q_weight),
            k_weight: contiguous(call.k_weight),
            epsilon: call.epsilon,
            tokens: Tokens::new(RopeCall {
                positions: call.positions,
                rope: call.rope,
                num_kv_heads: call.num_kv_heads,
            }),
        }
    }

    fn op(&self, qkv: &FlexTensor) -> sieve_cpu::QkNormRope<'_> {
        sieve_cpu::QkNormRope {
            q_weight: floats(&self.q_weight),
            k_weight: floats(&self.k_weight),
            eps: self.epsilon as f32,
            ..self.tokens.op(qkv)
        }
    }
}

/// Tables and positions, contiguous and owned.
struct Tokens {
    cos: FlexTensor,
    sin: FlexTensor,
    start: Vec<i32>,
    num_kv_heads: usize,
}

impl Tokens {
    fn new(call: RopeCall<Flex>) -> Self {
        let seq_len = call.positions.shape()[1];
        // The kernel counts positions from a document's start; any position is a start for some column.
        let start = ints(&contiguous(call.positions))
            .iter()
            .enumerate()
            .map(|(token, &position)| (token % seq_len) as i32 - position)
            .collect();
        Self {
            cos: contiguous(call.rope.cos),
            sin: contiguous(call.rope.sin),
            start,
            num_kv_heads: call.num_kv_heads,
        }
    }

    /// The rotation alone.
    fn op(&self, qkv: &FlexTensor) -> sieve_cpu::QkNormRope<'_> {
        let shape = qkv.shape();
        sieve_cpu::QkNormRope {
            batch: shape[0],
            seq_len: shape[1],
            num_heads: shape[2] - 2 * self.num_kv_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim: shape[3],
            q_weight: &[],
            k_weight: &[],
            eps: 0.0,
            cos: floats(&self.cos),
            sin: floats(&self.sin),
            position_offset: 0,
        }
    }

    /// Only the starts are read by the kernel.
    fn documents(&self) -> sieve_cpu::Documents<'_> {
        sieve_cpu::Documents {
            start: &self.start,
            end: &self.start,
        }
    }
}
