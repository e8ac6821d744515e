//! Launches of `kernels/mla_pack_*.cu`: queries, keys and values of latent attention as one tensor, and its heads.
use crate::attention::heads::Qkv;
use crate::error::KernelError;
use crate::runtime::checks::{require_non_empty, require_tokens};
use crate::runtime::cuda_tensor::CudaTensor;
use crate::runtime::params::params;
use crate::runtime::source_kernel::SourceKernel;
use crate::step::qk_norm_rope_forward::RotaryTables;
use crate::step::vector_rows::VectorRows;
use burn::tensor::DType;

const FORWARD: &str = "mla_pack_forward";
const BACKWARD: &str = "mla_pack_backward";

/// Tokens of a block: one a warp.
const BLOCK_TOKENS: usize = 8;

/// Sizes of latent attention, and what its rotary parts are rotated by.
#[derive(Debug, Clone, Copy)]
pub struct MlaPack<'a> {
    /// Heads, of queries as of keys and values.
    pub num_heads: usize,
    /// Width of the part without rotation, and of a value; a multiple of 8.
    pub head_dim: usize,
    /// Width of the rotated part; a multiple of 16 up to 256.
    pub rope_dim: usize,
    /// i32 `[batch, seq_len]`: rows of the tables. Past their end counts as the last row.
    pub positions: &'a CudaTensor,
    /// f32 `[max_positions, rope_dim / 2]`.
    pub cos: &'a CudaTensor,
    /// f32 `[max_positions, rope_dim / 2]`.
    pub sin: &'a CudaTensor,
}

impl MlaPack<'_> {
    fn key_dim(&self) -> usize {
        self.head_dim + self.rope_dim
    }

    fn token_len(&self) -> usize {
        self.num_heads * (2 * self.key_dim() + self.head_dim)
    }

    fn require_widths(&self, kernel: &'static str) -> Result<(), KernelError> {
        require_non_empty(kernel, "the number of heads", self.num_heads)?;
        let unsupported = |what, got: usize, supported: &str| {
            let (got, supported) = (got.to_string(), supported.to_owned());
            Err(KernelError::Unsupported {
                kernel,
                what,
                got,
                supported,
            })
        };
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(8) {
            return unsupported("head_dim", self.head_dim, "multiples of 8");
        }
        if !self.rope_dim.is_multiple_of(16) || !(16..=256).contains(&self.rope_dim) {
            return unsupported("rope_dim", self.rope_dim, "multiples of 16 from 16 to 256");
        }
        Ok(())
    }

    /// Rotates and packs: q bf16 `[batch, seq_len, num_heads * (head_dim + rope_dim)]`, kv bf16
    /// `[batch, seq_len, num_heads * 2 * head_dim]` (key then value of each head) and `k_rope` bf16
    /// `[batch, seq_len, rope_dim]`, shared by the heads, become
    /// `[batch, seq_len, num_heads * (3 * head_dim + 2 * rope_dim)]`; see [`MlaPack::heads`].
    ///
    /// # Errors
    /// Other types or shapes, no tokens, widths that are no whole 16-byte words.
    pub fn mla_pack_forward(&self, [q, kv, k_rope]: [&CudaTensor; 3]) -> Result<CudaTensor, KernelError> {
        self.require_widths(FORWARD)?;
        let [batch, seq_len, _] = q.dims(FORWARD, "q")?;
        let rows = |name, tensor: &CudaTensor, width| {
            tensor.require_shape(FORWARD, name, &[batch, seq_len, width])?;
            VectorRows::of(FORWARD, name, tensor)
        };
        let q = rows("q", q, self.num_heads * self.key_dim())?;
        let kv = rows("kv", kv, self.num_heads * 2 * self.head_dim)?;
        let k_rope = rows("k_rope", k_rope, self.rope_dim)?;
        let positions = require_tokens(FORWARD, "positions", self.positions, [batch, seq_len])?;
        let tables = RotaryTables::of(FORWARD, [self.cos, self.sin], self.rope_dim)?;
        let packed = q
            .tensor
            .empty_contiguous(&[batch, seq_len, self.token_len()], DType::BF16);
        let params = params!(MlaPackForwardParams {
            tokens: q.rows,
            num_heads: self.num_heads,
            q_stride: q.stride,
            kv_stride: kv.stride,
            rope_stride: k_rope.stride,
            max_positions: tables.max_positions,
            table_stride: tables.stride,
        });
        let tensors = [
            &q.tensor,
            &kv.tensor,
            &k_rope.tensor,
            &positions,
            &tables.cos,
            &tables.sin,
            &packed,
        ];
        let kernel = mla_pack_forward_kernel(self.head_dim, self.rope_dim);
        // SAFETY: sizes, strides and types checked above; positions are clamped; writes every element of packed.
        unsafe { kernel.launch([q.rows.div_ceil(BLOCK_TOKENS), 1, 1], &tensors, &params) }?;
        Ok(packed)
    }

    /// Gradients of q, kv and `k_rope` from that of [`MlaPack::mla_pack_forward`]'s result; `k_rope`'s is the sum over
    /// the heads.
    ///
    /// # Errors
    /// As [`MlaPack::mla_pack_forward`].
    pub fn mla_pack_backward(&self, dy: &CudaTensor) -> Result<[CudaTensor; 3], KernelError> {
        self.require_widths(BACKWARD)?;
        let [batch, seq_len, _] = dy.dims(BACKWARD, "dy")?;
        dy.require_shape(BACKWARD, "dy", &[batch, seq_len, self.token_len()])?;
        let dy = VectorRows::of(BACKWARD, "dy", dy)?;
        let positions = require_tokens(BACKWARD, "positions", self.positions, [batch, seq_len])?;
        let tables = RotaryTables::of(BACKWARD, [self.cos, self.sin], self.rope_dim)?;
        let grads = [
            self.num_heads * self.key_dim(),
            self.num_heads * 2 * self.head_dim,
            self.rope_dim,
        ]
        .map(|width| {
            let shape = [batch, seq_len, width];
            dy.tensor.empty_contiguous(&shape, DType::BF16)
        });
        let params = params!(MlaPackBackwardParams {
            tokens: dy.rows,
            num_heads: self.num_heads,
            dy_stride: dy.stride,
            max_positions: tables.max_positions,
            table_stride: tables.stride,
        });
        let [dq, dkv, dk_rope] = &grads;
        let tensors = [&dy.tensor, &positions, &tables.cos, &tables.sin, dq, dkv, dk_rope];
        let kernel = mla_pack_backward_kernel(self.head_dim, self.rope_dim);
        // SAFETY: sizes, strides and types checked above; positions are clamped; writes every element of the gradients.
        unsafe { kernel.launch([dy.rows.div_ceil(BLOCK_TOKENS), 1, 1], &tensors, &params) }?;
        Ok(grads)
    }

    /// Queries, keys and values of a packed tensor `[batch, seq_len, num_heads * (3 * head_dim + 2 * rope_dim)]` as
    /// attention kernels read them: per token all queries, all keys, all values. A copy where the tensor has gaps.
    ///
    /// # Errors
    /// Another width, or a tensor of another rank.
    pub fn heads(packed: &CudaTensor, num_heads: usize, [head_dim, rope_dim]: [usize; 2]) -> Result<Qkv, KernelError> {
        const NAME: &str = "mla_attention";
        let key_dim = head_dim + rope_dim;
        let token_len = num_heads * (2 * key_dim + head_dim);
        let [batch, seq_len, _] = packed.dims(NAME, "packed")?;
        packed.require_shape(NAME, "packed", &[batch, seq_len, token_len])?;
        let packed = packed.contiguous();
        let heads = |first: usize, width: usize| {
            let strides = [seq_len * token_len, token_len, width, 1];
            packed.view_at(NAME, "packed", first, &[batch, seq_len, num_heads, width], &strides)
        };
        let q = heads(0, key_dim)?;
        let k = heads(num_heads * key_dim, key_dim)?;
        let v = heads(2 * num_heads * key_dim, head_dim)?;
        Ok(Qkv::separate(&q, &k, &v))
    }
}

/// The forward specialisation for two widths.
pub(crate) fn mla_pack_forward_kernel(head_dim: usize, rope_dim: usize) -> SourceKernel {
    pack_kernel(FORWARD, head_dim, rope_dim)
}

/// The backward specialisation for two widths.
pub(crate) fn mla_pack_backward_kernel(head_dim: usize, rope_dim: usize) -> SourceKernel {
    pack_kernel(BACKWARD, head_dim, rope_dim)
}

fn pack_kernel(name: &'static str, head_dim: usize, rope_dim: usize) -> SourceKernel {
    SourceKernel::new(name)
        .define("CONTENT_DIM", head_dim)
        .define("ROPE_DIM", rope_dim)
        .threads(256)
}
