//! Queries, keys and values of an attention call: heads of packed or separate tensors, read by strides.
use crate::KernelError;
use crate::runtime::{
    AttentionParams, CudaTensor, DType, KernelPolicy, SumOrder, TokenParams, operands, params, require,
    require_non_empty, row_layout,
};
use sieve_core::AttentionShape;

/// Widths of heads that the attention kernels take: multiples of this, up to [`MAX_HEAD_DIM`].
pub const HEAD_DIM_STEP: usize = 16;

/// The widest heads that the attention kernels take.
pub const MAX_HEAD_DIM: usize = 256;

/// Whether the attention kernels take heads of this width.
pub fn supports_head_dim(head_dim: usize) -> bool {
    head_dim.is_multiple_of(HEAD_DIM_STEP) && (HEAD_DIM_STEP..=MAX_HEAD_DIM).contains(&head_dim)
}

/// Heads and tokens must begin at multiples of this many elements: attention kernels copy 16 bytes at a time.
const ALIGN_ELEMENTS: usize = 8;

/// The f32 buffers per query (log-sum-exps, row sums, sums of dq) are padded to a multiple of this many tokens. The
/// backward kernels read so many queries in a step, and then never read past a buffer's end.
pub(crate) const ROW_ALIGNMENT: usize = 64;

/// A range of consecutive heads of a `[batch, seq_len, heads, head_dim]` bf16 tensor.
#[derive(Debug, Clone)]
pub struct Heads {
    tensor: CudaTensor,
    first_head: usize,
    num_heads: usize,
}

/// The three inputs of an attention call.
#[derive(Debug, Clone)]
pub struct Qkv {
    /// Queries `[batch, seq_len, num_heads, head_dim]`.
    pub q: Heads,
    /// Keys `[batch, seq_len, num_kv_heads, head_dim]`.
    pub k: Heads,
    /// Values; their width may be smaller than the keys'.
    pub v: Heads,
}

/// Padded number of tokens of the f32 buffers per query.
pub(crate) fn padded_len(seq_len: usize) -> usize {
    seq_len.next_multiple_of(ROW_ALIGNMENT)
}

impl Heads {
    /// All heads of a tensor `[batch, seq_len, heads, head_dim]`; none of a tensor of fewer dimensions.
    pub fn all(tensor: &CudaTensor) -> Self {
        let num_heads = tensor.shape().get(2).copied().unwrap_or(0);
        Self::some(tensor, 0, num_heads)
    }

    /// `num_heads` heads of a tensor, from `first_head` on.
    pub fn some(tensor: &CudaTensor, first_head: usize, num_heads: usize) -> Self {
        Self { tensor: tensor.clone(), first_head, num_heads }
    }

    /// The tensor that the heads are part of.
    pub fn tensor(&self) -> &CudaTensor {
        &self.tensor
    }

    /// Number of heads in this view.
    pub(crate) fn num_heads(&self) -> usize {
        self.num_heads
    }

    /// `[batch, seq_len, heads, width]` of these heads.
    ///
    /// # Errors
    /// Another type than bf16, heads past the end of the tensor, a size of 0, a width that no kernel is compiled for.
    pub(crate) fn sizes(&self, kernel: &'static str, name: &'static str) -> Result<[usize; 4], KernelError> {
        let [batch, seq_len, total, width] = self.tensor.dims(kernel, name)?;
        self.tensor.require_dtype(kernel, name, DType::BF16)?;
        let (first, end) = (self.first_head, self.first_head + self.num_heads);
        require!(first < end && end <= total, kernel, "heads": format!("{first}..{end}"), "some of {total}");
        let (step, most) = (HEAD_DIM_STEP, MAX_HEAD_DIM);
        let fits = supports_head_dim(width);
        require!(fits, kernel, "width of heads": width, "multiples of {step} from {step} to {most}");
        require_tokens(kernel, [batch, seq_len])?;
        Ok([batch, seq_len, self.num_heads, width])
    }

    /// Sizes of an attention call whose queries these are, where its `num_kv_heads` heads of keys, and of values of
    /// `head_dim_v` columns, are no heads of tokens: they lie in a cache or at the ends of compressed blocks.
    ///
    /// # Errors
    /// The errors of [`sizes`](Self::sizes); KV heads that do not divide the query heads; a width of values that does
    /// not fit.
    pub(crate) fn as_queries(
        &self,
        kernel: &'static str,
        num_kv_heads: usize,
        head_dim_v: usize,
    ) -> Result<AttentionShape, KernelError> {
        let [batch, seq_len, num_heads, head_dim] = self.sizes(kernel, "q")?;
        let fits = num_kv_heads > 0 && num_heads.is_multiple_of(num_kv_heads);
        require!(fits, kernel, "number of KV heads": num_kv_heads, "divisors of the {num_heads} query heads");
        require_value_width(kernel, head_dim_v, head_dim)?;
        Ok(AttentionShape::new(batch, seq_len, [num_heads, num_kv_heads], [head_dim, head_dim_v]))
    }

    /// The same heads with strides that the kernels take: a tensor with other strides is copied.
    pub(crate) fn with_kernel_strides(&self) -> Self {
        match self.words() {
            Some(_) => self.clone(),
            None => Self { tensor: self.tensor.contiguous(), ..self.clone() },
        }
    }

    /// [`words`](Self::words) of heads whose strides kernels take.
    ///
    /// # Errors
    /// [`KernelError::Refused`] when [`with_kernel_strides`](Self::with_kernel_strides) was not called.
    pub(crate) fn require_words(&self, kernel: &'static str, name: &'static str) -> Result<[usize; 3], KernelError> {
        let expected = "heads must be adjacent, rows 16-byte aligned";
        self.words().ok_or_else(|| self.tensor.layout_error(kernel, name, expected))
    }

    /// Offset of the first head, token stride and batch stride, in elements; `None` where kernels do not take the
    /// strides: heads that are not side by side, or not at multiples of 8 elements.
    pub(crate) fn words(&self) -> Option<[usize; 3]> {
        let shape: [usize; 4] = self.tensor.shape().try_into().ok()?;
        let strides: [usize; 4] = self.tensor.strides().try_into().ok()?;
        let layout = row_layout(shape, strides, ALIGN_ELEMENTS)?;
        Some([self.first_head * shape[3], layout.token_stride, layout.batch_stride])
    }
}

impl Qkv {
    /// The kernel policy of calls with these queries.
    pub fn policy(&self) -> KernelPolicy {
        self.q.tensor.policy()
    }

    /// A copy whose backward kernels add their sums in this order.
    pub fn in_order(&self, sums: SumOrder) -> Self {
        self.under(KernelPolicy { sums, ..self.policy() })
    }

    /// A copy whose calls run under another kernel policy.
    pub fn under(&self, policy: KernelPolicy) -> Self {
        let mut queries = self.clone();
        queries.q.tensor = queries.q.tensor.under(policy);
        queries
    }

    /// One tensor `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`: queries, keys, values.
    pub fn packed(qkv: &CudaTensor, num_heads: usize, num_kv_heads: usize) -> Self {
        Self {
            q: Heads::some(qkv, 0, num_heads),
            k: Heads::some(qkv, num_heads, num_kv_heads),
            v: Heads::some(qkv, num_heads + num_kv_heads, num_kv_heads),
        }
    }

    /// q, k and v from three tensors `[batch, seq_len, heads, head_dim]`.
    pub fn separate(q: &CudaTensor, k: &CudaTensor, v: &CudaTensor) -> Self {
        Self { q: Heads::all(q), k: Heads::all(k), v: Heads::all(v) }
    }

    /// Checks the three inputs against each other.
    ///
    /// # Errors
    /// Another type than bf16, sizes that do not fit, a `head_dim` the kernels are not compiled for.
    pub fn shape(&self, kernel: &'static str) -> Result<AttentionShape, KernelError> {
        let [batch, seq_len, q_total, head_dim] = self.q.tensor.dims(kernel, "q")?;
        let [_, _, _, head_dim_v] = self.v.tensor.dims::<4>(kernel, "v")?;
        let (num_heads, num_kv_heads) = (self.q.num_heads, self.k.num_heads);
        // Heads that reach past the end of their tensor give a larger total, which the check below refuses.
        let total = |heads: &Heads| {
            let total = heads.tensor.shape().get(2).copied().unwrap_or(0);
            total.max(heads.first_head + heads.num_heads)
        };
        operands!(only kernel,
            q: BF16[batch, seq_len, total(&self.q), head_dim] strided = &self.q.tensor,
            k: BF16[batch, seq_len, total(&self.k), head_dim] strided = &self.k.tensor,
            v: BF16[batch, seq_len, total(&self.v), head_dim_v] strided = &self.v.tensor,
        );
        let num_v_heads = self.v.num_heads;
        let fits = num_kv_heads > 0 && num_v_heads == num_kv_heads && num_heads > 0;
        require!(fits && num_heads.is_multiple_of(num_kv_heads), kernel,
            "number of q/k/v heads": format!("{num_heads}/{num_kv_heads}/{num_v_heads} of {q_total}"),
            "as many k as v heads, dividing the q heads");
        let (step, most) = (HEAD_DIM_STEP, MAX_HEAD_DIM);
        let fits = supports_head_dim(head_dim);
        require!(fits, kernel, "head_dim": head_dim, "multiples of {step} from {step} to {most}");
        require_value_width(kernel, head_dim_v, head_dim)?;
        require_tokens(kernel, [batch, seq_len])?;
        let heads = [num_heads, num_kv_heads];
        Ok(AttentionShape::new(batch, seq_len, heads, [head_dim, head_dim_v]))
    }

    /// The same heads with strides that the kernels take: each tensor with other strides is copied.
    pub(crate) fn with_kernel_strides(&self) -> Self {
        let [q, k, v] = [&self.q, &self.k, &self.v].map(Heads::with_kernel_strides);
        Self { q, k, v }
    }

    /// The first fields of every attention kernel's params struct; `shape` is the shape of these heads.
    ///
    /// # Errors
    /// [`KernelError::Refused`] when [`with_kernel_strides`](Self::with_kernel_strides) was not called.
    pub(crate) fn params(&self, kernel: &'static str, shape: &AttentionShape) -> Result<AttentionParams, KernelError> {
        let [q, k, v] = self.head_words(kernel)?;
        Ok(params!(AttentionParams {
            { batch, seq_len, num_heads, num_kv_heads }: shape,
            [q_offset, q_token_stride, q_batch_stride]: q,
            [k_offset, k_token_stride, k_batch_stride]: k,
            [v_offset, v_token_stride, v_batch_stride]: v,
        }))
    }

    /// The first fields of every decoding kernel's params struct; `shape` is the shape of these heads, one token a row.
    ///
    /// # Errors
    /// The errors of [`params`](Self::params).
    pub(crate) fn token_params(
        &self,
        kernel: &'static str,
        shape: &AttentionShape,
        softmax_scale: f32,
    ) -> Result<TokenParams, KernelError> {
        Ok(token_params(shape, softmax_scale, self.head_words(kernel)?))
    }

    /// `{offset, token stride, batch stride}` of q, k and v.
    ///
    /// # Errors
    /// The errors of [`params`](Self::params).
    pub(crate) fn head_words(&self, kernel: &'static str) -> Result<[[usize; 3]; 3], KernelError> {
        let Self { q, k, v } = self;
        Ok([q.require_words(kernel, "q")?, k.require_words(kernel, "k")?, v.require_words(kernel, "v")?])
    }
}

/// The first fields of every decoding kernel's params struct. `words` has three words for each of the token's q, k and
/// v; for a k and v that the kernel does not read they are 0.
pub(crate) fn token_params(shape: &AttentionShape, softmax_scale: f32, words: [[usize; 3]; 3]) -> TokenParams {
    let [q, k, v] = words;
    params!(TokenParams {
        { num_heads, num_kv_heads }: shape,
        softmax_scale,
        q_offset: q[0],
        k_offset: k[0],
        v_offset: v[0],
        q_batch_stride: q[2],
        k_batch_stride: k[2],
        v_batch_stride: v[2],
    })
}

/// Refuses values of a width that no kernel takes beside queries and keys of `head_dim` columns.
fn require_value_width(kernel: &'static str, head_dim_v: usize, head_dim: usize) -> Result<(), KernelError> {
    let step = HEAD_DIM_STEP;
    let fits = head_dim_v > 0 && head_dim_v.is_multiple_of(step) && head_dim_v <= head_dim;
    require!(fits, kernel, "head_dim of v": head_dim_v, "multiples of {step} up to the head_dim of q and k");
    Ok(())
}

/// Refuses calls without tokens, and rows whose positions kernels cannot number.
fn require_tokens(kernel: &'static str, [batch, seq_len]: [usize; 2]) -> Result<(), KernelError> {
    require_non_empty(kernel, "batch", batch)?;
    require_non_empty(kernel, "seq_len", seq_len)?;
    require!(seq_len <= i32::MAX as usize / 2, kernel, "seq_len": seq_len, "below 2^30");
    Ok(())
}
