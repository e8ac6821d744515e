//! Sizes, call and output of attention.
use crate::DocumentBounds;
use crate::tensors::Float;
use burn::tensor::backend::Backend;
use sieve_core::{FarKeys, KernelPolicy};

/// Sizes and scale of one grouped-query attention call on a packed tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Factor on `q·k`, usually `1/sqrt(head_dim)`.
    pub softmax_scale: f64,
    /// Most keys that a query sees, its own included (`i - window_size < j <= i`); `None`: dense attention.
    pub window_size: Option<usize>,
    /// The keys that a query sees beyond its window; `None`: none.
    pub far: Option<FarKeys>,
    /// Which kernels a GPU may use, and in which order backward kernels sum.
    pub policy: KernelPolicy,
}

impl AttentionSpec {
    /// Dense attention with the usual softmax scale.
    pub fn dense([num_heads, num_kv_heads]: [usize; 2], head_dim: usize) -> Self {
        Self {
            num_heads,
            num_kv_heads,
            softmax_scale: 1.0 / (head_dim as f64).sqrt(),
            window_size: None,
            far: None,
            policy: KernelPolicy::default(),
        }
    }

    /// Heads of the packed tensor: queries, then keys, then values.
    pub fn packed_heads(&self) -> usize {
        self.num_heads + 2 * self.num_kv_heads
    }

    /// The same attention for a packed tensor of `packed_heads` heads, which holds only some of the KV heads, with
    /// their query heads.
    ///
    /// # Panics
    /// When `packed_heads` is not a multiple of `group_size + 2`.
    pub fn of_packed_heads(self, packed_heads: usize) -> Self {
        let group = self.group_size();
        assert_eq!(packed_heads % (group + 2), 0, "{packed_heads} heads in groups of {group}");
        let num_kv_heads = packed_heads / (group + 2);
        Self { num_heads: num_kv_heads * group, num_kv_heads, ..self }
    }

    /// The same attention for a call whose first KV head is this call's head `kv_head`.
    #[must_use]
    pub fn of_heads_from(self, kv_head: usize) -> Self {
        Self { far: self.far.map(|far| far.of_heads_from(kv_head)), ..self }
    }

    /// The window and the keys beyond it; `None`: a query sees no others.
    pub(crate) fn far_window(&self) -> Option<(usize, FarKeys)> {
        self.window_size.zip(self.far)
    }

    /// The keys of a text that its later queries may read: the first ones, and the last, each query's own included.
    /// `None`: all.
    pub fn kept_keys(&self) -> Option<[usize; 2]> {
        let window = self.window_size?;
        Some(self.far.map_or([0, window], |far| [far.sink_tokens, window.max(far.distances[1])]))
    }

    /// The keys beyond the window, where there is one.
    #[cfg(feature = "cuda")]
    pub(crate) fn far_keys(&self) -> Option<FarKeys> {
        self.far_window().map(|(_, far)| far)
    }

    /// Number of keys before its own that a query may see; `None`: all.
    pub(crate) fn reach(&self) -> Option<usize> {
        // A window includes the query's own token.
        self.window_size.filter(|_| self.far.is_none()).map(|window| window - 1)
    }

    /// Query heads that share one KV head.
    pub fn group_size(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }
}

/// Operands of attention other than the packed tensor.
#[derive(Clone, Debug)]
pub struct AttentionCall<B: Backend, S = AttentionSpec> {
    /// Document bounds.
    pub documents: DocumentBounds<B>,
    /// Sizes and scale, and the window of dense attention.
    pub spec: S,
}

impl<B: Backend, S> AttentionCall<B, S> {
    /// Attention inside these documents.
    pub fn new(documents: DocumentBounds<B>, spec: S) -> Self {
        Self { documents, spec }
    }
}

/// Output of an attention forward pass.
#[derive(Clone, Debug)]
pub struct AttentionOutput<B: Backend> {
    /// `[batch, seq_len, num_heads, head_dim]`, dtype of the packed input.
    pub o: Float<B>,
    /// Log-sum-exp of each row's logits, f32 `[batch, num_heads, seq_len]`; `-inf` where a row sees nothing. With
    /// biases, the largest bias that the row sees is subtracted from its logits, to keep their precision.
    pub lse: Float<B>,
    /// `o_f32 - o`: what rounding o to bf16 removed, shaped as o. `None` unless the device's backward pass reads it.
    pub o_low: Option<Float<B>>,
    /// The largest bias that each query sees. `None` unless the device's backward pass reads it.
    pub base: Option<Float<B>>,
}

impl<B: Backend> AttentionOutput<B> {
    /// Output for a backward pass that reads only o and the log-sum-exp.
    pub(crate) fn new(o: Float<B>, lse: Float<B>) -> Self {
        Self { o, lse, o_low: None, base: None }
    }
}
