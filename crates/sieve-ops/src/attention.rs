//! Dense causal and sliding-window attention on the packed tensor.
mod call;
pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod masks;
pub(crate) mod reference;
pub(crate) mod scores;
#[cfg(test)]
mod tests;

pub use call::{AttentionCall, AttentionOutput, AttentionSpec};

use crate::tensors::{Float, primitive, tensor};
use crate::{DeviceBackend, DocumentBounds, Documents, SieveBackend};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

/// Grouped-query attention, causal: query i sees the keys j <= i of its document, or the last `spec.window_size` of
/// them and with `spec.far` others farther away.
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

/// Attention of the tokens from `first` on in rows of one document each, without a graph; the tokens before them have
/// keys and values alone. Each has the output of [`attention`], or with sinks of [`attention_with_sinks`], on a CPU to
/// the bit.
///
/// # Shapes
/// - qkv: `[batch, tokens, num_heads + 2 * num_kv_heads, head_dim]`
/// - sinks: `[num_heads]`
/// - bounds: those that [`bounds_of_last`] makes, for all layers of a pass
/// - returns: `[batch, tokens - first, num_heads, head_dim]`
pub fn attention_of_last<B: DeviceBackend>(
    qkv: Tensor<B, 4>,
    sinks: Option<Tensor<B, 1>>,
    spec: AttentionSpec,
    (first, bounds): (usize, DocumentBounds<B>),
) -> Tensor<B, 4> {
    let tokens = qkv.dims()[1];
    let output = B::attention_of_last(primitive(qkv), &AttentionCall::new(bounds, spec), first);
    let output = match sinks {
        Some(sinks) => B::join_sinks(output, primitive(sinks)),
        None => output,
    };
    tensor::<B, 4>(output.o).narrow(1, first, tokens - first)
}

/// Queries of a tile, or a multiple of them, in every kernel of dense attention.
const WHOLE_TILES: usize = 384;

/// Bounds for [`attention_of_last`] of rows of one document each, `[batch, tokens]`. The kernels of a GPU compute the
/// output of every token but need not for those before `first`: these see themselves alone there, which takes no time.
pub fn bounds_of_last<B: DeviceBackend>(
    [batch, tokens]: [usize; 2],
    first: usize,
    device: &B::Device,
) -> DocumentBounds<B> {
    let bounds = Documents::<B>::whole_rows([batch, tokens], device).bounds();
    if B::ON_HOST { bounds } else { alone_before::<B>(bounds, first) }
}

/// The bounds with tokens before `first` that see themselves alone. Kernels take the first key of a tile of queries
/// from its first query, so that tokens in the tile of token `first` keep their bounds.
fn alone_before<B: Backend>([start, end]: DocumentBounds<B>, first: usize) -> DocumentBounds<B> {
    let alone = first / WHOLE_TILES * WHOLE_TILES;
    if alone == 0 {
        return [start, end];
    }
    let start = Tensor::<B, 2, Int>::from_primitive(start);
    let [batch, tokens] = start.dims();
    let own = Tensor::<B, 1, Int>::arange(0..alone as i64, &start.device()).unsqueeze_dim::<2>(0);
    let start = Tensor::cat(vec![own.repeat_dim(0, batch), start.narrow(1, alone, tokens - alone)], 1);
    [start.into_primitive(), end]
}

/// As [`attention`], with a sink (gpt-oss, arXiv:2508.10925): each query head has one more, learned logit in its
/// softmax, with a zero vector as its value, so that the weights of the keys sum to less than 1.
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
