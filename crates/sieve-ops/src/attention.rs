//! Dense causal and sliding-window attention on the packed tensor.
pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod masks;
pub(crate) mod reference;
pub(crate) mod scores;
#[cfg(test)]
mod tests;

use crate::tensors::{Float, primitive, tensor};
use crate::{DeviceBackend, DocumentBounds, Documents, SieveBackend};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use sieve_core::KernelPolicy;

/// Grouped-query attention, causal: query i sees the keys j <= i of its document, or the last `spec.window_size` of
/// them.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - returns: `[batch, seq_len, num_heads, head_dim]`
pub fn attention<B: SieveBackend>(qkv: Tensor<B, 4>, documents: &Documents<B>, spec: AttentionSpec) -> Tensor<B, 4> {
    let qkv = primitive(qkv);
    let (x, call) = (B::value(qkv.clone()), AttentionCall::new(documents.bounds(), spec));
    let output = <B::Inner as DeviceBackend>::attention(x.clone(), &call);
    tensor(B::node([&qkv], output.o.clone(), move |d_o| [B::Inner::attention_backward(x, &call, output, d_o)]))
}

/// As [`attention`] with one more logit in every query's softmax, a learned one of each query head whose value is zero
/// (a sink, as in gpt-oss, arXiv:2508.10925): weights of keys sum to less than 1.
///
/// # Shapes
/// - qkv: `[batch, seq_len, num_heads + 2 * num_kv_heads, head_dim]`
/// - sinks: `[num_heads]`
/// - returns: `[batch, seq_len, num_heads, head_dim]`
pub fn attention_with_sinks<B: SieveBackend>(
    qkv: Tensor<B, 4>,
    sinks: Tensor<B, 1>,
    documents: &Documents<B>,
    spec: AttentionSpec,
) -> Tensor<B, 4> {
    let (qkv, sinks) = (primitive(qkv), primitive(sinks));
    let (x, logits) = (B::value(qkv.clone()), B::value(sinks.clone()));
    let call = AttentionCall::new(documents.bounds(), spec);
    let output = <B::Inner as DeviceBackend>::attention(x.clone(), &call);
    // The backward pass of attention reads the joined output like any other: its probabilities are exp(score - lse).
    let output = B::Inner::join_sinks(output, logits.clone());
    tensor(B::node([&qkv, &sinks], output.o.clone(), move |d_o: Float<B::Inner>| {
        let d_sinks = B::Inner::sinks_backward(&output, logits, d_o.clone());
        [B::Inner::attention_backward(x, &call, output, d_o), d_sinks]
    }))
}

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
