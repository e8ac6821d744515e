//! Launch of `kernels/dma_attention_forward.cu`: attention over DMA's key lists.
use crate::KernelError;
use crate::attention::{
    AttentionResult, AttentionShape, Bias, KernelFamily, KeySource, PassInputs, Qkv, SeenKeys, launch_forward,
    require_scale,
};
use crate::dma::KeyLists;
use crate::runtime::{CudaTensor, DType, operand, operands, params};
use crate::step::empty_zero;
use sieve_core::KeepOLow;

const NAME: &str = "dma_attention_forward";

impl Qkv {
    /// Attention of query i over the keys with `j <= i < expire[j]`; `delta` (f32 `[batch, num_kv_heads, seq_len]`) is
    /// added to every logit of its key (arXiv:2508.02124, eq. 3 to 6). A query that sees no key gets `o = 0`,
    /// `lse = -inf`. `o_low` says for which row lengths the low 16 bits of the output are kept.
    ///
    /// # Errors
    /// Another type than bf16, sizes that do not fit each other or the lists, a scale that is not positive.
    pub fn dma_attention_forward(
        &self,
        delta: &CudaTensor,
        lists: &KeyLists,
        softmax_scale: f32,
        o_low: KeepOLow,
    ) -> Result<AttentionResult, KernelError> {
        listed_attention_forward(self, Some((delta, o_low)), lists, softmax_scale)
    }
}

/// How the kernels for a call read listed keys: the portable ones always with a bias.
pub(crate) fn listed_source(has_bias: bool, shape: &AttentionShape, queries: &CudaTensor) -> KeySource {
    match (has_bias, KernelFamily::of(shape, KeySource::Gathered, queries)) {
        (false, KernelFamily::Hopper) => KeySource::GatheredUnbiased,
        _ => KeySource::Gathered,
    }
}

/// The bias of a pass over lists, and its base, which a forward pass may have kept. A call without `delta` gets zeros
/// where its kernels always add a bias, and no bias otherwise.
pub(crate) fn listed_bias(
    pass: &PassInputs<'_>,
    delta: Option<&CudaTensor>,
    base: Option<&CudaTensor>,
    lists: &KeyLists,
) -> Result<Option<Bias>, KernelError> {
    if !pass.source.has_bias() {
        return Ok(None);
    }
    let delta = match delta {
        Some(delta) => operand(pass.name, "delta", delta, DType::F32, &pass.shape.per_key())?.contiguous(),
        None => empty_zero(pass.qkv.q.tensor(), &pass.shape.per_key())?,
    };
    Bias::new(delta, base, SeenKeys::Listed(lists), pass.shape).map(Some)
}

/// [`dma_attention_forward`](crate::Qkv::dma_attention_forward) with a bias or without. Without one no `o_low` is kept:
/// the backward pass computes row sums from the bf16 o.
pub(crate) fn listed_attention_forward(
    qkv: &Qkv,
    delta: Option<(&CudaTensor, KeepOLow)>,
    lists: &KeyLists,
    softmax_scale: f32,
) -> Result<AttentionResult, KernelError> {
    let o_low = delta.map_or(KeepOLow::Never, |(_, o_low)| o_low);
    let delta = delta.map(|(delta, _)| delta);
    let shape = qkv.shape(NAME)?;
    let qkv = qkv.with_kernel_strides();
    require_scale(NAME, softmax_scale)?;
    require_lists(NAME, lists, &shape)?;
    let q = qkv.q.tensor();
    let pass = PassInputs {
        name: NAME,
        qkv: &qkv,
        d_o: None,
        shape: &shape,
        source: listed_source(delta.is_some(), &shape, q),
        list_queries: lists.queries,
    };
    let kept_base = None;
    let bias = listed_bias(&pass, delta, kept_base, lists)?;
    let params = params!(DmaAttentionForwardParams {
        base: qkv.params(NAME, &shape)?,
        softmax_scale,
        list_capacity: lists.capacity(),
        tile_queries: lists.tile_queries,
    });
    let mut tensors = vec![q, qkv.k.tensor(), qkv.v.tensor()];
    tensors.extend(bias.iter().flat_map(Bias::tensors));
    tensors.extend([&lists.list, &lists.tile_window]);
    // SAFETY: sizes, strides and types checked above; the lists name positions below seq_len only.
    let result = unsafe { launch_forward(&pass, tensors, &params, o_low) }?;
    Ok(AttentionResult { base: bias.map(|bias| bias.base), ..result })
}

/// Checks that lists were made for a shape.
pub(crate) fn require_lists(kernel: &'static str, lists: &KeyLists, shape: &AttentionShape) -> Result<(), KernelError> {
    let (batch, heads) = (shape.batch, shape.num_kv_heads);
    let blocks = shape.seq_len.div_ceil(lists.queries);
    let tiles = shape.seq_len.div_ceil(lists.tile_queries);
    let [_, _, _, capacity, _] = lists.list.dims::<5>(kernel, "list")?;
    operands!(only kernel,
        list: I32[batch, heads, blocks, capacity, 2] contiguous = &lists.list,
        list_len: I32[batch, heads, blocks] contiguous = &lists.list_len,
        tile_window: I32[batch, heads, tiles, 2] contiguous = &lists.tile_window,
    );
    Ok(())
}
