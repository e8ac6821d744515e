//! Launches of `kernels/mla_pack_*.cu`: queries, keys and values of latent attention packed into one tensor.
use crate::KernelError;
use crate::attention::Qkv;
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params, require, require_non_empty};
use crate::step::Rows;
use crate::step::column_sums::{MAX_PARTIALS, column_sums};
use crate::step::qk_norm_rope_forward::RotaryTables;

const FORWARD: &str = "mla_pack_forward";
const BACKWARD: &str = "mla_pack_backward";

/// Tokens of a thread block, one for each warp.
const BLOCK_TOKENS: usize = 8;

/// Largest `head_dim` with norms: a warp holds a head in registers.
const MAX_NORMED_DIM: usize = 256;

/// Sizes of latent attention, and its rotary tables and norms.
#[derive(Debug, Clone, Copy)]
pub struct MlaPack<'a> {
    /// Number of heads of queries, of keys and of values.
    pub num_heads: usize,
    /// Width of the part of a key without rotation, and width of a value; a multiple of 8.
    pub head_dim: usize,
    /// Width of the rotated part; a multiple of 16 up to 256.
    pub rope_dim: usize,
    /// Position of each token, i32 `[batch, seq_len]`, a row of the tables; positions past their end take the last row.
    pub positions: &'a CudaTensor,
    /// Rotary cosines, f32 `[max_positions, rope_dim / 2]`.
    pub cos: &'a CudaTensor,
    /// Rotary sines, f32 `[max_positions, rope_dim / 2]`.
    pub sin: &'a CudaTensor,
    /// Norms of each head's query and key, before the rotation; `None` without q/k-norm.
    pub norm: Option<MlaNorm<'a>>,
}

/// Weights of the two norms, which all heads share.
#[derive(Debug, Clone, Copy)]
pub struct MlaNorm<'a> {
    /// Weight of the queries' norm, bf16 `[head_dim + rope_dim]`.
    pub q_weight: &'a CudaTensor,
    /// Weight of the keys' norm, bf16 `[head_dim + rope_dim]`.
    pub k_weight: &'a CudaTensor,
    /// Epsilon that the norms add to the mean square.
    pub epsilon: f32,
}

/// Gradients of q, kv and `k_rope`, and with norms the f32 gradients of both weights.
pub type MlaPackGradients = ([CudaTensor; 3], Option<[CudaTensor; 2]>);

impl MlaPack<'_> {
    fn key_dim(&self) -> usize {
        self.head_dim + self.rope_dim
    }

    /// Elements of a packed token: queries, keys and values of all heads.
    fn token_len(&self) -> usize {
        self.num_heads * (2 * self.key_dim() + self.head_dim)
    }

    /// Refuses widths that the kernels do not take: parts of a head that are no whole words, and with norms heads that
    /// a warp cannot hold.
    fn require_widths(&self, kernel: &'static str) -> Result<(), KernelError> {
        require_non_empty(kernel, "the number of heads", self.num_heads)?;
        let (head_dim, rope_dim) = (self.head_dim, self.rope_dim);
        require!(head_dim > 0 && head_dim.is_multiple_of(8), kernel, "head_dim": head_dim, "multiples of 8");
        let fits = rope_dim.is_multiple_of(16) && (16..=256).contains(&rope_dim);
        require!(fits, kernel, "rope_dim": rope_dim, "multiples of 16 from 16 to 256");
        let fits = self.norm.is_none() || head_dim <= MAX_NORMED_DIM;
        require!(fits, kernel, "head_dim of a normed head": head_dim, "up to {MAX_NORMED_DIM}");
        Ok(())
    }

    /// Width of the norms and their weights. Without norms the width is 0, and `unused` stands in for the weights,
    /// which the kernel then does not read.
    fn norms(&self, kernel: &'static str, unused: &CudaTensor) -> Result<(usize, [CudaTensor; 2]), KernelError> {
        let Some(norm) = self.norm else {
            return Ok((0, [unused.clone(), unused.clone()]));
        };
        let width = self.key_dim();
        operands!(kernel,
            q_weight: BF16[width] aligned = norm.q_weight,
            k_weight: BF16[width] aligned = norm.k_weight,
        );
        Ok((width, [q_weight, k_weight]))
    }

    fn epsilon(&self) -> f32 {
        self.norm.map_or(0.0, |norm| norm.epsilon)
    }

    /// q, kv and `k_rope` as rows of 16-byte words.
    fn input_rows(
        &self,
        kernel: &'static str,
        [q, kv, k_rope]: [&CudaTensor; 3],
        [batch, seq_len]: [usize; 2],
    ) -> Result<[Rows; 3], KernelError> {
        let rows = |name, tensor: &CudaTensor, width| {
            tensor.require_shape(kernel, name, &[batch, seq_len, width])?;
            Rows::of_words(kernel, name, tensor)
        };
        Ok([
            rows("q", q, self.num_heads * self.key_dim())?,
            rows("kv", kv, self.num_heads * 2 * self.head_dim)?,
            rows("k_rope", k_rope, self.rope_dim)?,
        ])
    }

    /// Norms and rotates queries and keys, and packs them with the values. The inputs are q, bf16 `[batch, seq_len,
    /// num_heads * (head_dim + rope_dim)]`; kv, bf16 `[batch, seq_len, num_heads * 2 * head_dim]` with key, then value
    /// of each head; and `k_rope`, bf16 `[batch, seq_len, rope_dim]`, which all heads share.
    ///
    /// Returns the packed tensor, bf16 `[batch, seq_len, num_heads * (3 * head_dim + 2 * rope_dim)]` (see
    /// [`MlaPack::heads`]), and with norms the part of the keys that decoding caches: `k_rope` times its weight,
    /// rotated, bf16 `[batch, seq_len, rope_dim]`, and 1 / rms of each key, f32 `[batch, seq_len, num_heads]`.
    ///
    /// # Errors
    /// Other types or shapes, no tokens, widths that are not whole 16-byte words or too wide for a norm.
    pub fn mla_pack_forward(
        &self,
        inputs: [&CudaTensor; 3],
    ) -> Result<(CudaTensor, Option<[CudaTensor; 2]>), KernelError> {
        self.require_widths(FORWARD)?;
        let [batch, seq_len, _] = inputs[0].dims(FORWARD, "q")?;
        let [q, kv, k_rope] = self.input_rows(FORWARD, inputs, [batch, seq_len])?;
        operands!(FORWARD, positions: I32[batch, seq_len] = self.positions);
        let tables = RotaryTables::of(FORWARD, [self.cos, self.sin], self.rope_dim)?;
        let (norm_dim, [q_weight, k_weight]) = self.norms(FORWARD, &q.tensor)?;
        let new = |width, dtype| q.tensor.empty_contiguous(&[batch, seq_len, width], dtype);
        let packed = new(self.token_len(), DType::BF16);
        let keys = (norm_dim > 0).then(|| [new(self.rope_dim, DType::BF16), new(self.num_heads, DType::F32)]);
        // Without norms the kernel writes no keys: `packed` stands in for them.
        let [rotated_keys, key_scale] = keys.clone().unwrap_or_else(|| [packed.clone(), packed.clone()]);
        let tokens = q.rows;
        let params = params!(MlaPackForwardParams {
            tokens,
            num_heads: self.num_heads,
            q_stride: q.stride,
            kv_stride: kv.stride,
            rope_stride: k_rope.stride,
            max_positions: tables.max_positions,
            table_stride: tables.stride,
            epsilon: self.epsilon(),
        });
        let tensors = [
            &q.tensor,
            &kv.tensor,
            &k_rope.tensor,
            &q_weight,
            &k_weight,
            &positions,
            &tables.cos,
            &tables.sin,
            &packed,
            &rotated_keys,
            &key_scale,
        ];
        let [kernel, _] = mla_pack_kernels(self.head_dim, self.rope_dim, norm_dim);
        // SAFETY: sizes, strides and types checked above; positions are clamped; writes every element of packed and of
        // the keys.
        unsafe { kernel.launch([tokens.div_ceil(BLOCK_TOKENS), 1, 1], &tensors, &params) }?;
        Ok((packed, keys))
    }

    /// Gradients of q, kv, `k_rope` (summed over the heads) and the norms' weights, from the gradient `dy` of the
    /// packed tensor of [`MlaPack::mla_pack_forward`]. `inputs` are the inputs of the forward pass; without norms they
    /// may be `None`, and other tensors stand in for them and for the weights' partial sums.
    ///
    /// # Errors
    /// The errors of [`MlaPack::mla_pack_forward`].
    pub fn mla_pack_backward(
        &self,
        inputs: Option<[&CudaTensor; 3]>,
        dy: &CudaTensor,
    ) -> Result<MlaPackGradients, KernelError> {
        self.require_widths(BACKWARD)?;
        let [batch, seq_len, _] = dy.dims(BACKWARD, "dy")?;
        dy.require_shape(BACKWARD, "dy", &[batch, seq_len, self.token_len()])?;
        let dy = Rows::of_words(BACKWARD, "dy", dy)?;
        let inputs = match self.norm {
            None => [dy.clone(), dy.clone(), dy.clone()],
            Some(_) => {
                let inputs = inputs.expect("norms are recomputed from the inputs");
                self.input_rows(BACKWARD, inputs, [batch, seq_len])?
            }
        };
        operands!(BACKWARD, positions: I32[batch, seq_len] = self.positions);
        let tables = RotaryTables::of(BACKWARD, [self.cos, self.sin], self.rope_dim)?;
        let (norm_dim, [q_weight, k_weight]) = self.norms(BACKWARD, &dy.tensor)?;
        let grads = [self.num_heads * self.key_dim(), self.num_heads * 2 * self.head_dim, self.rope_dim].map(|width| {
            let shape = [batch, seq_len, width];
            dy.tensor.empty_contiguous(&shape, DType::BF16)
        });
        let tokens = dy.rows;
        let blocks = tokens.div_ceil(BLOCK_TOKENS);
        let (blocks, partials) = match norm_dim {
            0 => (blocks, grads[2].clone()),
            _ => {
                let blocks = blocks.min(MAX_PARTIALS);
                (blocks, dy.tensor.empty_contiguous(&[blocks, 2 * norm_dim], DType::F32))
            }
        };
        let [q, kv, k_rope] = &inputs;
        let params = params!(MlaPackBackwardParams {
            tokens,
            num_heads: self.num_heads,
            q_stride: q.stride,
            kv_stride: kv.stride,
            rope_stride: k_rope.stride,
            dy_stride: dy.stride,
            max_positions: tables.max_positions,
            table_stride: tables.stride,
            epsilon: self.epsilon(),
        });
        let [dq, dkv, dk_rope] = &grads;
        let tensors = [
            &q.tensor,
            &kv.tensor,
            &k_rope.tensor,
            &q_weight,
            &k_weight,
            &positions,
            &tables.cos,
            &tables.sin,
            &dy.tensor,
            dq,
            dkv,
            dk_rope,
            &partials,
        ];
        let [_, kernel] = mla_pack_kernels(self.head_dim, self.rope_dim, norm_dim);
        // SAFETY: sizes, strides and types checked above; positions are clamped; writes every element of the gradients
        // and of the partial sums.
        unsafe { kernel.launch([blocks, 1, 1], &tensors, &params) }?;
        if norm_dim == 0 {
            return Ok((grads, None));
        }
        Ok((grads, Some(column_sums(&partials, [&[norm_dim]; 2])?)))
    }

    /// Queries, keys and values of a packed tensor `[batch, seq_len, num_heads * (3 * head_dim + 2 * rope_dim)]`, which
    /// holds for each token all queries, then all keys, then all values. A tensor with gaps is copied.
    ///
    /// # Errors
    /// Another width, or another number of dimensions.
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

/// The forward and the backward specialisation; `norm_dim` is 0 without norms.
fn mla_pack_kernels(head_dim: usize, rope_dim: usize, norm_dim: usize) -> [SourceKernel; 2] {
    [FORWARD, BACKWARD].map(|name| {
        SourceKernel::new(name)
            .define("CONTENT_DIM", head_dim)
            .define("ROPE_DIM", rope_dim)
            .define("NORM_DIM", norm_dim)
            .threads(256)
    })
}
