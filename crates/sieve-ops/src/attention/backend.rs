//! Dense and sliding-window attention as a backend computes them.
use crate::documents::DocumentBounds;
use crate::tensors::Float;
use burn::tensor::backend::Backend;

/// Sizes and scale of one grouped-query attention call on a packed tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Factor on `q·k`, usually `1/sqrt(head_dim)`.
    pub softmax_scale: f64,
    /// Keys a query may see at most, itself included (`i - window < j <= i`); `None` is dense causal.
    pub window_size: Option<usize>,
}

impl AttentionSpec {
    /// Dense attention of query and KV heads of this width.
    pub fn dense([num_heads, num_kv_heads]: [usize; 2], head_dim: usize) -> Self {
        Self {
            num_heads,
            num_kv_heads,
            softmax_scale: 1.0 / (head_dim as f64).sqrt(),
            window_size: None,
        }
    }

    /// Heads of the packed tensor: queries, then keys, then values.
    pub fn packed_heads(&self) -> usize {
        self.num_heads + 2 * self.num_kv_heads
    }

    /// Query heads that share one KV head.
    pub fn group_size(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }
}

/// Output of an attention forward pass.
#[derive(Clone, Debug)]
pub struct AttentionOutput<B: Backend> {
    /// `[batch, seq_len, num_heads, head_dim]`, dtype of the packed input.
    pub o: Float<B>,
    /// Natural logarithm of each row's softmax sum, f32 `[batch, num_heads, seq_len]`; `-inf` where a row sees nothing.
    /// With a bias per key it is less by the largest bias that the row sees, beside which it would lose its digits.
    pub lse: Float<B>,
    /// The lower bits of o in f32, where the backend's backward pass makes use of them.
    pub o_rest: Option<Float<B>>,
    /// The largest bias that each query sees, where the backend's backward pass makes use of it.
    pub base: Option<Float<B>>,
}

impl<B: Backend> AttentionOutput<B> {
    /// Of a backend whose backward pass makes use of o and the log-sum-exp alone.
    pub(crate) fn new(o: Float<B>, lse: Float<B>) -> Self {
        Self {
            o,
            lse,
            o_rest: None,
            base: None,
        }
    }
}

/// Dense and sliding-window attention.
///
/// Burn's own backend trait has an `attention` too: write `<B as AttentionBackend>::attention`.
pub trait AttentionBackend: Backend {
    /// See [`crate::attention`].
    fn attention(qkv: Float<Self>, documents: &DocumentBounds<Self>, spec: AttentionSpec) -> AttentionOutput<Self>;
}

/// Their gradient, as a device computes it.
pub trait AttentionGradients: AttentionBackend {
    /// `dqkv` of [`crate::attention`].
    fn attention_backward(
        qkv: Float<Self>,
        documents: &DocumentBounds<Self>,
        spec: AttentionSpec,
        output: AttentionOutput<Self>,
        d_o: Float<Self>,
    ) -> Float<Self>;
}
