//! Launch of `kernels/dma_attention_forward.cu`: attention over the keys that DMA kept.
use crate::KernelError;
use crate::attention::{
    AttentionResult, AttentionShape, Bias, KernelFamily, KeySource, PassInputs, Qkv, SeenKeys, launch_forward,
    require_per_key, require_scale,
};
use crate::dma::KeyLists;
use crate::dma::oracle::SUPER_BLOCK;
use crate::runtime::{CudaTensor, operands, params};
use crate::step::empty_zero;
use sieve_core::KeepOLow;

const NAME: &str = "dma_attention_forward";

impl Qkv {
    /// Attention of query i over the keys with `j <= i < expire[j]`, `delta` (f32 `[batch, num_kv_heads, seq_len]`)
    /// added to every logit of its key (arXiv:2508.02124, eq. 3 to 6). A query that sees nothing gets `o = 0`,
    /// `lse = -inf`. `o_low` is kept in the rows of `o_low`.
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

/// A bias per key, of zeros where there is none: for kernels that always add one.
pub(crate) fn listed_bias(
    delta: Option<&CudaTensor>,
    like: &CudaTensor,
    shape: &AttentionShape,
) -> Result<CudaTensor, KernelError> {
    match delta {
        Some(delta) => require_per_key(NAME, "delta", delta, shape),
        None => empty_zero(like, &shape.per_key()),
    }
}

/// As [`dma_attention_forward`](crate::Qkv::dma_attention_forward), or without a bias; then the row sums of the
/// backward pass come from the o that is stored.
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
    let family = KernelFamily::of(&shape, KeySource::Gathered, q);
    let source = match (delta, family) {
        (None, KernelFamily::Hopper) => KeySource::GatheredUnbiased,
        _ => KeySource::Gathered,
    };
    let bias = match source.has_bias() {
        true => {
            let delta = listed_bias(delta, q, &shape)?;
            Some(Bias::new(delta, SeenKeys::Listed(lists), &shape)?)
        }
        false => None,
    };
    let params = params!(DmaAttentionForwardParams {
        base: qkv.params(NAME, &shape)?,
        softmax_scale,
        list_capacity: lists.capacity(),
        tile_queries: lists.tile_queries,
    });
    let mut tensors = vec![q, qkv.k.tensor(), qkv.v.tensor()];
    tensors.extend(bias.iter().flat_map(Bias::tensors));
    tensors.extend([&lists.list, &lists.tile_window]);
    let pass = PassInputs {
        name: NAME,
        qkv: &qkv,
        d_o: None,
        shape: &shape,
        source,
    };
    // SAFETY: sizes, strides and types checked above; the lists name positions below seq_len only.
    let result = unsafe { launch_forward(&pass, tensors, &params, o_low) }?;
    Ok(AttentionResult {
        base: bias.map(|bias| bias.base),
        ..result
    })
}

/// Checks that lists were made for a shape.
pub(crate) fn require_lists(kernel: &'static str, lists: &KeyLists, shape: &AttentionShape) -> Result<(), KernelError> {
    let (batch, heads) = (shape.batch, shape.num_kv_heads);
    let blocks = shape.seq_len.div_ceil(SUPER_BLOCK);
    let tiles = shape.seq_len.div_ceil(lists.tile_queries);
    let [_, _, _, capacity, _] = lists.list.dims::<5>(kernel, "list")?;
    operands!(only kernel,
        list: I32[batch, heads, blocks, capacity, 2] contiguous = &lists.list,
        list_len: I32[batch, heads, blocks] contiguous = &lists.list_len,
        tile_window: I32[batch, heads, tiles, 2] contiguous = &lists.tile_window,
    );
    Ok(())
}
