//! Launches of `kernels/qk_norm_rope_forward.cu`: norm and rotary position embedding of queries and keys.
use crate::KernelError;
use crate::runtime::{CudaTensor, DType, SourceKernel, operands, params, require, require_non_empty, row_layout};
use crate::step::{WORD_ELEMENTS, require_alignment};

const NAME: &str = "qk_norm_rope_forward";

/// Tokens of a thread block, one for each warp.
pub(crate) const BLOCK_TOKENS: usize = 8;

/// Up to this many tokens (decoding) the heads of a token are divided among thread blocks.
const FEW_TOKENS: usize = 64;
/// Heads of a thread block where heads are divided.
const HEADS_AT_ONCE: usize = 4;

/// Operands of the norm and rotary position embedding beside the packed tensor.
#[derive(Debug, Clone, Copy)]
pub struct QkNormRope<'a> {
    /// Weight of the queries' norm, bf16 `[head_dim]`.
    pub q_weight: &'a CudaTensor,
    /// Weight of the keys' norm, bf16 `[head_dim]`.
    pub k_weight: &'a CudaTensor,
    /// Position of each token, i32 `[batch, seq_len]`, a row of the tables; positions past their end take the last row.
    pub positions: &'a CudaTensor,
    /// Rotary cosines, f32 `[max_positions, head_dim / 2]`.
    pub cos: &'a CudaTensor,
    /// Rotary sines, f32 `[max_positions, head_dim / 2]`.
    pub sin: &'a CudaTensor,
    /// Number of key heads, and of value heads. They follow the query heads; there may be none of either.
    pub num_kv_heads: usize,
    /// Epsilon that the norms add to the mean square.
    pub epsilon: f32,
}

/// Whether a kernel writes over its input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reuse {
    /// The output is a new tensor; the input stays.
    Copy,
    /// The output overwrites the input, and every clone of it shares the change.
    InPlace,
}

impl QkNormRope<'_> {
    /// Normalises the query and key heads of `qkv`, bf16 `[batch, seq_len, num_heads + 2 num_kv_heads, head_dim]`, and
    /// rotates them by their positions; values are copied. `head_dim` is a multiple of 16 up to 256.
    ///
    /// # Errors
    /// Other types or shapes, no tokens, a table that does not fit.
    pub fn qk_norm_rope_forward(&self, qkv: &CudaTensor) -> Result<CudaTensor, KernelError> {
        let qkv = PackedTokens::of(NAME, "qkv", qkv, Reuse::Copy)?;
        let weights = self.weights(NAME, qkv.head_dim)?;
        let rotation = self.rotation(NAME, &qkv)?;
        launch(qk_norm_rope_forward_kernel(qkv.head_dim), &qkv, weights.each_ref(), &rotation, self.epsilon)
    }

    pub(crate) fn rotation(&self, kernel: &'static str, qkv: &PackedTokens) -> Result<Rotation, KernelError> {
        Rotation::of(kernel, qkv, self.positions, [self.cos, self.sin], self.num_kv_heads)
    }

    /// The weights of the queries' and of the keys' norm.
    pub(crate) fn weights(&self, kernel: &'static str, head_dim: usize) -> Result<[CudaTensor; 2], KernelError> {
        operands!(kernel,
            q_weight: BF16[head_dim] aligned = self.q_weight,
            k_weight: BF16[head_dim] aligned = self.k_weight,
        );
        Ok([q_weight, k_weight])
    }
}

/// [`QkNormRope::qk_norm_rope_forward`] without the norms. Called on dy with negated sines it computes its gradient.
///
/// # Errors
/// Other types or shapes, no tokens, a table that does not fit.
pub fn rope(
    qkv: &CudaTensor,
    positions: &CudaTensor,
    tables: [&CudaTensor; 2],
    num_kv_heads: usize,
) -> Result<CudaTensor, KernelError> {
    const NAME: &str = "rope";
    let qkv = PackedTokens::of(NAME, "qkv", qkv, Reuse::Copy)?;
    let rotation = Rotation::of(NAME, &qkv, positions, tables, num_kv_heads)?;
    // Without norms the kernel reads no weights; qkv stands in for them.
    launch(rope_kernel(qkv.head_dim), &qkv, [&qkv.tensor; 2], &rotation, 0.0)
}

/// Launches the kernel, with norms or without.
fn launch(
    kernel: SourceKernel,
    qkv: &PackedTokens,
    [q_weight, k_weight]: [&CudaTensor; 2],
    rotation: &Rotation,
    epsilon: f32,
) -> Result<CudaTensor, KernelError> {
    let Rotation { num_heads, num_kv_heads, positions, tables } = rotation;
    let out = qkv.tensor.empty_contiguous(qkv.tensor.shape(), DType::BF16);
    let params = params!(QkNormRopeForwardParams {
        tokens: qkv.tokens,
        { num_heads, num_kv_heads }: rotation,
        in_stride: qkv.token_stride,
        out_stride: qkv.row_elements(),
        max_positions: tables.max_positions,
        table_stride: tables.stride,
        epsilon,
    });
    let tensors = [&qkv.tensor, q_weight, k_weight, positions, &tables.cos, &tables.sin, &out];
    // SAFETY: reads and writes whole heads of every token, inside the tensors whose sizes were checked.
    unsafe { kernel.launch(grid(qkv.tokens, num_heads + num_kv_heads), &tensors, &params) }?;
    Ok(out)
}

/// With few tokens the heads of a token are divided among thread blocks, as one warp would take long for all of them.
fn grid(tokens: usize, rotated_heads: usize) -> [usize; 3] {
    let slices = if tokens <= FEW_TOKENS { rotated_heads.div_ceil(HEADS_AT_ONCE) } else { 1 };
    [tokens.div_ceil(BLOCK_TOKENS), slices, 1]
}

/// The specialisation for a head width without norms.
fn rope_kernel(head_dim: usize) -> SourceKernel {
    qk_norm_rope_forward_kernel(head_dim).define("QK_NORM", 0)
}

/// The specialisation for a head width with norms.
fn qk_norm_rope_forward_kernel(head_dim: usize) -> SourceKernel {
    SourceKernel::new(NAME).define("HEAD_DIM", head_dim).threads(256).starts_early()
}

/// A packed `[batch, seq_len, heads, head_dim]` tensor with the same stride between any two consecutive tokens, also
/// from one batch row to the next.
#[derive(Debug, Clone)]
pub(crate) struct PackedTokens {
    pub(crate) tensor: CudaTensor,
    pub(crate) tokens: usize,
    pub(crate) heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) token_stride: usize,
}

impl PackedTokens {
    /// The tensor itself if its tokens have one stride and no gaps inside. Otherwise a contiguous copy, or an error
    /// with [`Reuse::InPlace`], as the kernel would write to the copy.
    pub(crate) fn of(
        kernel: &'static str,
        name: &'static str,
        tensor: &CudaTensor,
        reuse: Reuse,
    ) -> Result<Self, KernelError> {
        tensor.require_dtype(kernel, name, DType::BF16)?;
        let shape: [usize; 4] = tensor.dims(kernel, name)?;
        let [batch, seq_len, heads, head_dim] = shape;
        require_non_empty(kernel, "the number of tokens", batch * seq_len)?;
        let stride_of = |tensor: &CudaTensor| {
            let strides: [usize; 4] = tensor.strides().try_into().ok()?;
            let layout = row_layout(shape, strides, WORD_ELEMENTS)?;
            // Rows of one token are as far apart as their tokens.
            let stride = if seq_len == 1 { layout.batch_stride } else { layout.token_stride };
            let even = batch == 1 || layout.batch_stride == seq_len * stride;
            even.then_some(stride)
        };
        let (tensor, token_stride) = match (stride_of(tensor), reuse) {
            (Some(stride), _) => (tensor.clone(), stride),
            (None, Reuse::Copy) => (tensor.contiguous(), heads * head_dim),
            (None, Reuse::InPlace) => {
                let expected = "tokens one stride apart without gaps inside are needed in place";
                return Err(tensor.layout_error(kernel, name, expected));
            }
        };
        require_alignment(kernel, name, &tensor)?;
        Ok(Self { tensor, tokens: batch * seq_len, heads, head_dim, token_stride })
    }

    /// Elements of a packed token: q, k and v heads, without gaps.
    pub(crate) fn row_elements(&self) -> usize {
        self.heads * self.head_dim
    }
}

/// Positions and tables after their checks against a packed tensor, and the tensor's numbers of heads.
#[derive(Debug)]
pub(crate) struct Rotation {
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) positions: CudaTensor,
    pub(crate) tables: RotaryTables,
}

impl Rotation {
    /// Checks `positions`, i32 `[batch, seq_len]`, and the `tables` of cosines and of sines. The packed heads are those
    /// of queries but for the last `2 * num_kv_heads`.
    fn of(
        kernel: &'static str,
        qkv: &PackedTokens,
        positions: &CudaTensor,
        tables: [&CudaTensor; 2],
        num_kv_heads: usize,
    ) -> Result<Self, KernelError> {
        let num_heads = query_heads(kernel, qkv.heads, num_kv_heads)?;
        require_head_dim(kernel, qkv.head_dim)?;
        let [batch, seq_len, _, _] = qkv.tensor.dims(kernel, "qkv")?;
        operands!(kernel, positions: I32[batch, seq_len]);
        let tables = RotaryTables::of(kernel, tables, qkv.head_dim)?;
        Ok(Self { num_heads, num_kv_heads, positions, tables })
    }
}

/// Tables of cosines and sines, f32 `[max_positions, width / 2]`, with strides that the kernels take.
#[derive(Debug, Clone)]
pub(crate) struct RotaryTables {
    pub(crate) cos: CudaTensor,
    pub(crate) sin: CudaTensor,
    pub(crate) max_positions: usize,
    /// Elements from one position's row to the next.
    pub(crate) stride: usize,
}

impl RotaryTables {
    /// The tables for heads of `width`; copies where the kernels do not take the strides.
    ///
    /// # Errors
    /// Another type or shape, no positions.
    pub(crate) fn of(kernel: &'static str, [cos, sin]: [&CudaTensor; 2], width: usize) -> Result<Self, KernelError> {
        let [max_positions, _] = cos.dims(kernel, "cos")?;
        require_non_empty(kernel, "the number of positions", max_positions)?;
        operands!(only kernel,
            cos: F32[max_positions, width / 2] strided,
            sin: F32[max_positions, width / 2] strided,
        );
        let has_kernel_strides =
            cos.strides() == sin.strides() && cos.strides()[1] == 1 && cos.strides()[0].is_multiple_of(4);
        let (cos, sin, stride) = if has_kernel_strides {
            (cos.clone(), sin.clone(), cos.strides()[0])
        } else {
            (cos.contiguous(), sin.contiguous(), width / 2)
        };
        for (name, table) in [("cos", &cos), ("sin", &sin)] {
            require_alignment(kernel, name, table)?;
        }
        Ok(Self { cos, sin, max_positions, stride })
    }
}

fn query_heads(kernel: &'static str, heads: usize, num_kv_heads: usize) -> Result<usize, KernelError> {
    let most = heads / 2;
    require!(num_kv_heads <= most, kernel, "number of KV heads": num_kv_heads, "up to {most} of {heads} packed heads");
    Ok(heads - 2 * num_kv_heads)
}

fn require_head_dim(kernel: &'static str, head_dim: usize) -> Result<(), KernelError> {
    let fits = head_dim > 0 && head_dim.is_multiple_of(16) && head_dim <= 256;
    require!(fits, kernel, "head_dim": head_dim, "multiples of 16 up to 256");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_heads_are_queries_keys_and_values() {
        assert_eq!(query_heads("k", 32, 8), Ok(16));
        assert_eq!(query_heads("k", 16, 8), Ok(0), "keys and values alone");
        assert_eq!(query_heads("k", 8, 0), Ok(8), "queries alone");
        let error = query_heads("k", 4, 3).expect_err("too many").to_string();
        assert!(error.contains("up to 2 of 4"), "{error}");
    }

    #[test]
    fn head_widths_are_multiples_of_16_up_to_256() {
        assert!([16, 48, 64, 96, 128, 192, 256].iter().all(|&d| require_head_dim("k", d).is_ok()));
        assert!([0, 8, 40, 272].iter().all(|&d| require_head_dim("k", d).is_err()));
    }
}
