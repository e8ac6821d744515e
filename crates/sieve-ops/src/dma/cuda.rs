//! Dynamic mask attention's ops on CUDA: methods of `DeviceBackend`. Calls that a kernel refuses run the reference.
use super::rank::{PositionOrigin, Recency};
use super::{DmaCall, DmaKeyLists, DmaKeys, DmaOrder, DmaScoresCall, DmaSelection, reference};
use crate::attention::cuda::{self as attention, bounds, output, packed, with_gradients};
use crate::device::{cast, kernel_or, kernel_or_scores, scores};
use crate::{AttentionCall, AttentionOutput, AttentionSpec, Cuda, DocumentBounds};
use burn::tensor::DType;
use sieve_core::{DmaWindow, KeepOLow, KeyOrder};
use sieve_kernels::{
    AfterCache, CudaPrimitive as Float, KernelError, KeyLists, MOST_ORDERED, ScoresBackward, Selection, ToBurn,
    kernel_tensor,
};

pub(crate) fn dma_scores(call: &DmaScoresCall<Cuda>) -> Float {
    let recency = None;
    let attempt = launch_ranks(call, recency);
    kernel_or("dma_scores", attempt, || reference::dma_scores(call))
}

pub(crate) fn dma_ranks(call: &DmaScoresCall<Cuda>, recency: Option<Recency<Cuda>>) -> Float {
    let attempt = launch_ranks(call, recency.as_ref());
    kernel_or("dma_ranks", attempt, || reference::dma_ranks(call, recency))
}

pub(crate) fn dma_scores_backward(call: &DmaScoresCall<Cuda>, dz: Float, dqkv: Float) -> [Float; 3] {
    // The kernel adds to dqkv in place, so dqkv must have no other owner.
    let dqkv = if dqkv.can_mut() { dqkv } else { dqkv.copy() };
    let attempt = launch_scores_backward(call, &dz, &dqkv);
    let attempt = attempt.map(|[dw_dt, da]| [dqkv.clone(), dw_dt, da]);
    kernel_or("dma_scores_backward", attempt, || reference::dma_scores_backward(call, dz, dqkv))
}

/// The keys in `order`, in lists.
pub(crate) fn dma_select(
    rank: Float,
    documents: &DocumentBounds<Cuda>,
    window: DmaWindow,
    order: DmaOrder<Cuda>,
) -> DmaSelection<Cuda> {
    let attempt = launch_select(&rank, documents, window, order);
    kernel_or("dma_select", attempt, || reference::dma_select::<Cuda>(rank, documents, window))
}

pub(crate) fn dma_attention(call: &DmaCall<Cuda>, o_low: KeepOLow) -> AttentionOutput<Cuda> {
    let attempt = launch_attention(call, o_low);
    let score_matrix = scores(&call.qkv, call.attention.spec.num_heads);
    kernel_or_scores("dma_attention", attempt, score_matrix, || reference::dma_attention(call))
}

pub(crate) fn dma_attention_backward(call: &DmaCall<Cuda>, output: AttentionOutput<Cuda>, d_o: Float) -> [Float; 2] {
    let attempt = launch_attention_backward(call, &output, &d_o);
    let score_matrix = scores(&call.qkv, call.attention.spec.num_heads);
    kernel_or_scores("dma_attention_backward", attempt, score_matrix, || {
        reference::dma_attention_backward(call, output, d_o)
    })
}

/// The keys' ranks; without a recency term, their scores.
fn launch_ranks(call: &DmaScoresCall<Cuda>, recency: Option<&Recency<Cuda>>) -> Result<Float, KernelError> {
    let (w_dt, a) = (cast(&call.w_dt, DType::F32), cast(&call.a, DType::F32));
    let Some(Recency { slopes, origin }) = recency else {
        return Ok(packed(&call.qkv, call.spec).v.dma_scores(&w_dt, &a)?.z.burn());
    };
    let slopes: Vec<f32> = slopes.iter().map(|&slope| slope as f32).collect();
    let start;
    let origin = match origin {
        PositionOrigin::At { position, .. } => sieve_kernels::PositionOrigin::First(*position),
        PositionOrigin::DocumentStart(starts) => {
            start = kernel_tensor(starts.clone());
            sieve_kernels::PositionOrigin::DocumentStart(&start)
        }
    };
    let recency = sieve_kernels::Recency { slopes: &slopes, origin };
    Ok(packed(&call.qkv, call.spec).v.dma_ranks(&w_dt, &a, Some(&recency))?.z.burn())
}

/// Adds the gradient that the values get through the scores to `dqkv`, in place; returns `[dw_dt, da]` in f32.
fn launch_scores_backward(call: &DmaScoresCall<Cuda>, dz: &Float, dqkv: &Float) -> Result<[Float; 2], KernelError> {
    let [w_dt, a] = [&call.w_dt, &call.a].map(|x| cast(x, DType::F32).contiguous());
    let qkv = packed(&call.qkv, call.spec);
    // x, the argument of the softplus, is recomputed: reading v once more is cheaper than keeping x of every layer.
    let scores = qkv.v.dma_scores(&w_dt, &a)?;
    let dz = cast(dz, DType::F32).contiguous();
    let backward = ScoresBackward { values: &qkv.v, w_dt: &w_dt, a: &a, x: &scores.x, dz: &dz };
    let (dw_dt, da) = backward.dma_scores_backward(&packed(dqkv, call.spec).v)?;
    Ok([dw_dt, da].map(ToBurn::burn))
}

/// Selects keys, and lists them for the attention kernels unless queries see all keys. Windows that cannot be listed by
/// epochs are listed as for training.
fn launch_select(
    rank: &Float,
    documents: &DocumentBounds<Cuda>,
    window: DmaWindow,
    order: DmaOrder<Cuda>,
) -> Result<DmaSelection<Cuda>, KernelError> {
    let rank = kernel_tensor(rank.clone());
    let [start, end] = bounds(documents);
    let selection = sieve_kernels::dma_select(&rank, &start, &end, window)?;
    let [_, _, seq_len] = rank.dims("dma_select", "rank")?;
    let (keep_window_size, has_epochs) = (selection.keep_window_size, window.keep_window_size <= MOST_ORDERED);
    let ordered = |after| {
        let lists = selection.dma_ordered_lists(&rank, &start, window, after)?;
        Ok(DmaKeys::Ordered(burn_lists(lists), keep_window_size))
    };
    let keys = match order {
        _ if keep_window_size >= seq_len => DmaKeys::All,
        DmaOrder::Of(KeyOrder::Epochs) if has_epochs => ordered(None)?,
        DmaOrder::EpochsBehind { positions, first_query, first_position } if has_epochs => {
            let positions = kernel_tensor(positions);
            ordered(Some(AfterCache { positions: &positions, first_query, first_position }))?
        }
        _ => DmaKeys::Lists(burn_lists(selection.dma_lists(&start, &end, KeyLists::TILE_QUERIES)?)),
    };
    let expire = selection.expire.burn();
    Ok(DmaSelection { expire, keys })
}

/// Attention over the selected keys: by the dense kernel where queries see all keys, else by the kernel that reads
/// lists.
fn launch_attention(call: &DmaCall<Cuda>, o_low: KeepOLow) -> Result<AttentionOutput<Cuda>, KernelError> {
    let delta = kernel_tensor(call.delta.clone());
    let whole = without_window(&call.attention);
    // A kernel that keeps `o_low` follows a row's maximum more closely, and has other bits than passes that keep none.
    let o_low = match whole.spec.policy.keys {
        KeyOrder::Leaving => o_low,
        KeyOrder::Epochs => KeepOLow::Never,
    };
    match &call.selection.keys {
        DmaKeys::All => attention::forward(&call.qkv, &whole, Some((&delta, o_low))),
        DmaKeys::Lists(lists) | DmaKeys::Ordered(lists, _) => {
            let lists = kernel_lists(lists);
            let scale = whole.spec.softmax_scale as f32;
            let qkv = packed(&call.qkv, whole.spec);
            qkv.dma_attention_forward(&delta, &lists, scale, o_low).map(output)
        }
        DmaKeys::Expire | DmaKeys::Listed(_) => Err(not_selected()),
    }
}

/// Gradients `[dqkv, ddelta]` of DMA's attention.
fn launch_attention_backward(
    call: &DmaCall<Cuda>,
    output: &AttentionOutput<Cuda>,
    d_o: &Float,
) -> Result<[Float; 2], KernelError> {
    let delta = kernel_tensor(call.delta.clone());
    let whole = without_window(&call.attention);
    let by_lists = |lists: &KeyLists| {
        let (dqkv, d_delta) = with_gradients(&call.qkv, whole.spec, output, d_o, |gradients| {
            gradients.dma_attention_backward(&delta, lists)
        })?;
        Ok([dqkv, d_delta.burn()])
    };
    match &call.selection.keys {
        DmaKeys::All => {
            let (dqkv, d_delta) = attention::backward(&call.qkv, &whole, Some(&delta), output, d_o)?;
            let d_delta = d_delta.expect("a call with a bias returns the bias's gradient");
            Ok([dqkv, d_delta.burn()])
        }
        DmaKeys::Lists(lists) => by_lists(&kernel_lists(lists)),
        DmaKeys::Ordered(_, keep_window_size) | DmaKeys::Listed(keep_window_size) => {
            let [start, end] = bounds(&call.attention.documents);
            let expire = kernel_tensor(call.selection.expire.clone());
            let selection = Selection::of_expire(&expire, &start, *keep_window_size)?;
            by_lists(&selection.dma_lists(&start, &end, KeyLists::TILE_QUERIES)?)
        }
        DmaKeys::Expire => Err(not_selected()),
    }
}

/// The call without its window: DMA's selection is the whole mask.
fn without_window(call: &AttentionCall<Cuda>) -> AttentionCall<Cuda> {
    let window_size = None;
    let spec = AttentionSpec { window_size, ..call.spec };
    AttentionCall::new(call.documents.clone(), spec)
}

/// The kernels' lists as a selection holds them.
fn burn_lists(lists: KeyLists) -> DmaKeyLists<Cuda> {
    DmaKeyLists {
        queries: lists.queries,
        list: lists.list.burn(),
        list_len: lists.list_len.burn(),
        tile_window: lists.tile_window.burn(),
    }
}

/// The lists as the kernels take them.
fn kernel_lists(lists: &DmaKeyLists<Cuda>) -> KeyLists {
    let of = |tensor: &Float| kernel_tensor(tensor.clone());
    KeyLists {
        list: of(&lists.list),
        list_len: of(&lists.list_len),
        tile_window: of(&lists.tile_window),
        tile_queries: KeyLists::TILE_QUERIES,
        queries: lists.queries,
    }
}

/// The refusal of a selection without lists, which the reference made.
fn not_selected() -> KernelError {
    let (what, supported) = ("selection", "made by dma_select");
    KernelError::unsupported("dma_attention", what, "made by the reference", supported)
}
