//! Attention over consecutive keys, and over keys and blocks that the caller chose.
use super::{Inputs, Outputs, o_low, result, wrong};
use crate::request::PlanError;
use serde::{Deserialize, Serialize};
use sieve_core::{CallShape, FarKeys, KeyMask, MaskPlaces, Tiles};
use sieve_gpu::{AttentionShape, CudaTensor, KernelError, SelectedBlocks, TileLists};

/// q, k, v, doc_start, bias?, sinks? → o, lse, o_low?, base?
///
/// `sinks`, bf16 or f32 `[heads]`, are one more logit of each query head, whose value is zero.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionForward {
    /// Factor on `q . k`.
    pub scale: f32,
    /// The most keys that a query sees, its own included; absent: all keys up to its own.
    #[serde(default)]
    pub window: Option<usize>,
    /// The keys that a query sees beyond its window, without a bias: as many first ones of its document as the first
    /// number, and its KV head's band of distances, of those from the window's end to before the second number, divided
    /// into as many bands as the third; absent: none.
    #[serde(default)]
    pub bands: Option<[usize; 3]>,
    /// Whether `o` is the only output.
    #[serde(default)]
    pub only_o: bool,
}

impl AttentionForward {
    /// `base` is an output only with a bias, and `o_low` only where the kernel stores it; sinks are joined to o in
    /// place after the attention.
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let &Self { scale, window, bands, only_o } = self;
        let (start, bias) = (t.get("doc_start")?, t.maybe("bias"));
        let forward = match far_of("attention_forward", window, bands)? {
            None => t.qkv()?.attention_forward(&start, window, scale, bias.as_ref().map(|b| (b, o_low(only_o))))?,
            Some(_) if bias.is_some() => return Err(biased_bands("attention_forward")),
            Some((window, far)) => t.qkv()?.far_attention_forward(&start, window, far, scale)?,
        };
        let forward = match t.maybe("sinks") {
            Some(sinks) => forward.with_sinks(&sinks)?,
            None => forward,
        };
        Ok(result(forward, only_o))
    }
}

/// The forward's inputs, doc_end, o, lse, o_low?, base?, d_o → dq, dk, dv, d_bias?, d_sinks?
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionBackward {
    /// Factor on `q . k`.
    pub scale: f32,
    /// The most keys that a query sees, its own included; absent: all keys up to its own.
    #[serde(default)]
    pub window: Option<usize>,
    /// As of the forward pass.
    #[serde(default)]
    pub bands: Option<[usize; 3]>,
    /// Whether sums are added in a fixed order.
    #[serde(default)]
    pub fixed_order: bool,
}

impl AttentionBackward {
    /// With a bias `d_bias` is among the gradients; that of the sinks comes last, from the forward pass's joined o and
    /// lse.
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let &Self { scale, window, bands, fixed_order } = self;
        let [start, end] = t.documents()?;
        let (far, bias) = (far_of("attention_backward", window, bands)?, t.maybe("bias"));
        if far.is_some() && bias.is_some() {
            return Err(biased_bands("attention_backward"));
        }
        let mut outputs = t.gradients(scale, fixed_order, |call| match far {
            None => call.attention_backward([&start, &end], window, bias.as_ref()),
            Some((window, far)) => call.far_attention_backward([&start, &end], window, far).map(|()| None),
        })?;
        if let Some(sinks) = t.maybe("sinks") {
            outputs.push(("d_sinks", t.result()?.sinks_gradient(&sinks, &t.get("d_o")?)?));
        }
        Ok(outputs)
    }
}

/// The window and the keys beyond it.
pub(super) fn far_of(
    op: &'static str,
    window: Option<usize>,
    bands: Option<[usize; 3]>,
) -> Result<Option<(usize, FarKeys)>, PlanError> {
    let Some([sink_tokens, reach, num_bands]) = bands else { return Ok(None) };
    let window = window.ok_or_else(|| wrong(op, "bands", "must come with a window"))?;
    if num_bands == 0 {
        return Err(wrong(op, "bands", "must be one band or more"));
    }
    Ok(Some((window, FarKeys { sink_tokens, distances: [window, reach], num_bands, first_band: 0 })))
}

fn biased_bands(op: &'static str) -> PlanError {
    wrong(op, "bands", "have no kernel with a bias")
}

/// Attention over given blocks: q, k, v, indices `[batch, tokens, KV heads, blocks]` in any order, counts? `[batch,
/// tokens, KV heads]`, doc_start, doc_end → o, unless `only_o` lse, and block_indices for `nsa_selected_backward`,
/// and with `block_sums` the attention on each index's block, summed over the heads of the group
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SelectedForward {
    /// Factor on `q . k`.
    pub scale: f32,
    /// Tokens of a block: 16, 32, 64 or 128.
    pub block: usize,
    /// Whether `o` is the only output, but for `block_sums`.
    #[serde(default)]
    pub only_o: bool,
    /// Whether the attention on each block is an output.
    #[serde(default)]
    pub block_sums: bool,
}

impl SelectedForward {
    /// The output `block_indices` is the kernel's own form of the indices, which the backward pass reads.
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let &Self { scale, block, only_o, block_sums } = self;
        let (indices, counts, [start, end]) = (t.get("indices")?, t.maybe("counts"), t.documents()?);
        let selected = SelectedBlocks { indices: &indices, counts: counts.as_ref(), block };
        let forward = t.qkv()?.selected_attention_forward([&start, &end], selected, scale, block_sums)?;
        let mut outputs = result(forward.result, only_o);
        outputs.extend((!only_o).then_some(("block_indices", forward.block_indices)));
        outputs.extend(forward.block_sums.map(|sums| ("block_sums", sums)));
        Ok(outputs)
    }
}

/// q, k, v of one row, words (0, then row_ptr `[heads * query tiles + 1]`, then tile_idx) → o, lse
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct BlockSparse {
    /// Factor on `q . k`.
    pub scale: f32,
    /// Queries, and keys, of a block.
    pub block: [usize; 2],
}

impl BlockSparse {
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let Self { scale, block } = self;
        let (qkv, words) = (t.qkv()?, t.get("words")?);
        let mask = block_mask(qkv.shape("block_sparse")?, *block, words)?;
        let only_o = false;
        Ok(result(qkv.sparse_attention_forward(&mask, *scale)?, only_o))
    }
}

/// The forward's inputs, tile_lists (the mask by key tiles, `kernels/common/tile_steps.cuh`), o, lse, d_o → dq, dk, dv
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct BlockSparseBackward {
    /// Factor on `q . k`.
    pub scale: f32,
    /// Queries, and keys, of a block.
    pub block: [usize; 2],
    /// Whether sums are added in a fixed order.
    #[serde(default)]
    pub fixed_order: bool,
    /// Shares of a KV head's query heads, each with lists of its own.
    #[serde(default = "one")]
    pub head_shares: usize,
}

fn one() -> usize {
    1
}

impl BlockSparseBackward {
    /// Two forms of one mask are inputs: `words` by tiles of queries, as the forward pass has it, and `tile_lists` by
    /// tiles of keys.
    pub(super) fn launches(&self, t: &Inputs) -> Result<Outputs, PlanError> {
        let &Self { scale, block, fixed_order, head_shares } = self;
        let (words, lists) = (t.get("words")?, t.get("tile_lists")?);
        let mask = block_mask(t.qkv()?.shape("block_sparse_backward")?, block, words)?;
        t.gradients(scale, fixed_order, |call| {
            call.sparse_attention_backward(&mask, TileLists { words: &lists, head_shares })?;
            Ok(None)
        })
    }
}

/// The mask in which each query head has a list of blocks of its own; `words`, on the device, hold the lists.
fn block_mask(
    shape: AttentionShape,
    [query_tile, key_tile]: [usize; 2],
    words: CudaTensor,
) -> Result<KeyMask<CudaTensor>, PlanError> {
    let call = CallShape {
        num_queries: shape.seq_len,
        num_keys: shape.seq_len,
        num_heads: shape.num_heads,
        num_kv_heads: shape.num_kv_heads,
        head_dim: shape.head_dim,
    };
    // Tiles must be whole stages of the kernels' shared memory.
    if ![64, 128].contains(&query_tile) || ![64, 128].contains(&key_tile) {
        let got = format!("{query_tile} x {key_tile}");
        return Err(KernelError::unsupported("block_sparse", "block", got, "64 or 128 queries and keys").into());
    }
    let tiles = Tiles::new(call, query_tile, key_tile);
    // Word 0 is unused. Then `row_ptr`: where the list of each (head, query tile) begins in `tile_idx`, at last where
    // the last list ends. Then `tile_idx`, the key tiles of all lists.
    let row_ptr_len = shape.num_heads * tiles.num_query_tiles() + 1;
    let [num_words] = words.dims("block_sparse", "words")?;
    if num_words < 1 + row_ptr_len {
        let supported = format!("at least {}: 0, the rows' starts and the blocks", 1 + row_ptr_len);
        return Err(KernelError::unsupported("block_sparse", "number of words", num_words, supported).into());
    }
    let places =
        MaskPlaces { row_ptr: 1..1 + row_ptr_len, tile_idx: 1 + row_ptr_len..num_words, ..MaskPlaces::default() };
    Ok(KeyMask {
        shape: call,
        tiles,
        heads_per_list: 1,
        heads_per_order: 1,
        causal: true,
        dense_rows: Vec::new(),
        places,
        words,
        counts: None,
    })
}
