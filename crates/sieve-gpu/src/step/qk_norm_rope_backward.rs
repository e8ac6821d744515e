//! Launches of `kernels/qk_norm_rope_backward.cu` and `column_sums.cu`: gradients of the norm and rotary position
//! embedding of queries and keys.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, params};
use crate::step::column_sums::{MAX_PARTIALS, column_sums};
use crate::step::qk_norm_rope_forward::{BLOCK_TOKENS, PackedTokens, QkNormRope, Reuse, Rotation};

const NAME: &str = "qk_norm_rope_backward";

/// Gradients that [`QkNormRope::qk_norm_rope_backward`] returns.
#[derive(Debug, Clone)]
pub struct QkNormRopeGradients {
    /// Gradient of the packed qkv, bf16, in its shape.
    pub dqkv: CudaTensor,
    /// Gradient of the queries' norm weight, f32 `[head_dim]`.
    pub dq_weight: CudaTensor,
    /// Gradient of the keys' norm weight, f32 `[head_dim]`.
    pub dk_weight: CudaTensor,
}

impl QkNormRope<'_> {
    /// Gradients of [`QkNormRope::qk_norm_rope_forward`]. `qkv` is the input of the forward pass; `dy` has its shape.
    /// With [`Reuse::InPlace`] dqkv overwrites `dy`.
    ///
    /// # Errors
    /// The errors of the forward pass; with [`Reuse::InPlace`] strides of `dy` that the kernel does not take.
    pub fn qk_norm_rope_backward(
        &self,
        qkv: &CudaTensor,
        dy: &CudaTensor,
        reuse: Reuse,
    ) -> Result<QkNormRopeGradients, KernelError> {
        let qkv = PackedTokens::of(NAME, "qkv", qkv, Reuse::Copy)?;
        dy.require_shape(NAME, "dy", qkv.tensor.shape())?;
        let dy = PackedTokens::of(NAME, "dy", dy, reuse)?;
        let [q_weight, k_weight] = self.weights(NAME, qkv.head_dim)?;
        let rotation = self.rotation(NAME, &qkv)?;
        let (dqkv, out_stride) = match reuse {
            Reuse::Copy => (qkv.tensor.empty_contiguous(qkv.tensor.shape(), DType::BF16), qkv.row_elements()),
            Reuse::InPlace => (dy.tensor.clone(), dy.token_stride),
        };
        let blocks = qkv.tokens.div_ceil(BLOCK_TOKENS).min(MAX_PARTIALS);
        let partials = qkv.tensor.empty_contiguous(&[blocks, 2 * qkv.head_dim], DType::F32);
        let params = params!(QkNormRopeBackwardParams {
            tokens: qkv.tokens,
            { num_heads, num_kv_heads }: rotation,
            in_stride: qkv.token_stride,
            dy_stride: dy.token_stride,
            out_stride,
            max_positions: rotation.tables.max_positions,
            table_stride: rotation.tables.stride,
            epsilon: self.epsilon,
        });
        let Rotation { positions, tables, .. } = &rotation;
        let rotation = [positions, &tables.cos, &tables.sin];
        let tensors = [&[&qkv.tensor, &q_weight, &k_weight][..], &rotation, &[&dy.tensor, &dqkv, &partials]].concat();
        // SAFETY: reads and writes whole heads of every token, inside the tensors whose sizes were checked.
        unsafe { qk_norm_rope_backward_kernel(qkv.head_dim, reuse).launch([blocks, 1, 1], &tensors, &params) }?;
        let [dq_weight, dk_weight] = column_sums(&partials, [&[qkv.head_dim]; 2])?;
        Ok(QkNormRopeGradients { dqkv, dq_weight, dk_weight })
    }
}

/// The specialisation for a head width and a way of output.
fn qk_norm_rope_backward_kernel(head_dim: usize, reuse: Reuse) -> SourceKernel {
    SourceKernel::new(NAME).define("HEAD_DIM", head_dim).define("COPY_V", (reuse == Reuse::Copy) as u8).threads(256)
}
