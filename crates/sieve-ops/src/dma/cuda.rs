//! DMA's ops on CUDA.
use super::backend::{DmaBackend, DmaGradients, DmaKeyLists, DmaKeys, DmaSelection};
use super::rank::{PositionOrigin, Recency};
use super::reference;
use crate::attention::cuda::{self as attention, Backward, bounds, output, packed};
use crate::attention::{AttentionOutput, AttentionSpec};
use crate::device::cuda::{Cuda, cast};
use crate::device::paths::{kernel_or, kernel_or_scores, scores};
use crate::documents::DocumentBounds;
use burn::tensor::DType;
use sieve_core::{DmaWindow, KeepRest};
use sieve_kernels::{CudaPrimitive as Float, KernelError, KeyLists, ScoresBackward, ToBurn, kernel_tensor};

impl DmaBackend for Cuda {
    fn dma_scores(qkv: Float, w_dt: Float, a: Float, spec: AttentionSpec) -> Float {
        let attempt = launch_ranks(&qkv, &w_dt, &a, spec, None);
        kernel_or("dma_scores", attempt, || {
            reference::dma_scores::<Self>(qkv, w_dt, a, spec)
        })
    }

    fn dma_ranks(qkv: Float, w_dt: Float, a: Float, spec: AttentionSpec, recency: Recency<Self>) -> Float {
        let attempt = launch_ranks(&qkv, &w_dt, &a, spec, Some(&recency));
        kernel_or("dma_ranks", attempt, || {
            reference::dma_ranks::<Self>(qkv, w_dt, a, spec, recency)
        })
    }

    fn dma_select(rank: Float, documents: &DocumentBounds<Self>, window: DmaWindow) -> DmaSelection<Self> {
        let attempt = launch_select(&rank, documents, window);
        kernel_or("dma_select", attempt, || {
            reference::dma_select::<Self>(rank, documents, window)
        })
    }

    fn dma_attention(
        qkv: Float,
        delta: Float,
        documents: &DocumentBounds<Self>,
        selection: &DmaSelection<Self>,
        spec: AttentionSpec,
        rest: KeepRest,
    ) -> AttentionOutput<Self> {
        let attempt = launch(&qkv, (&delta, rest), documents, selection, spec);
        kernel_or_scores("dma_attention", attempt, scores(&qkv, spec.num_heads), || {
            reference::dma_attention::<Self>(qkv, delta, documents, selection, spec)
        })
    }
}

impl DmaGradients for Cuda {
    fn dma_scores_backward(
        qkv: Float,
        w_dt: Float,
        a: Float,
        spec: AttentionSpec,
        dz: Float,
        dqkv: Float,
    ) -> (Float, Float, Float) {
        // The kernel adds to dqkv in place, so it must be nobody else's.
        let dqkv = if dqkv.can_mut() { dqkv } else { dqkv.copy() };
        let attempt = launch_scores_backward(&qkv, [&w_dt, &a], spec, &dz, &dqkv);
        kernel_or(
            "dma_scores_backward",
            attempt.map(|(dw_dt, da)| (dqkv.clone(), dw_dt, da)),
            || reference::dma_scores_backward::<Self>(qkv, w_dt, a, spec, dz, dqkv),
        )
    }

    fn dma_attention_backward(
        qkv: Float,
        delta: Float,
        documents: &DocumentBounds<Self>,
        selection: &DmaSelection<Self>,
        spec: AttentionSpec,
        output: AttentionOutput<Self>,
        d_o: Float,
    ) -> (Float, Float) {
        let attempt = launch_backward(&qkv, &delta, documents, selection, spec, &output, &d_o);
        let scores = scores(&qkv, spec.num_heads);
        kernel_or_scores("dma_attention_backward", attempt, scores, || {
            reference::dma_attention_backward::<Self>(qkv, delta, documents, selection, spec, output, d_o)
        })
    }
}

fn launch_ranks(
    qkv: &Float,
    w_dt: &Float,
    a: &Float,
    spec: AttentionSpec,
    recency: Option<&Recency<Cuda>>,
) -> Result<Float, KernelError> {
    let (w_dt, a) = (cast(w_dt, DType::F32), cast(a, DType::F32));
    let recency = recency.and_then(|recency| Some((recency.slopes.as_ref()?, &recency.origin)));
    let Some((slopes, origin)) = recency else {
        return Ok(packed(qkv, spec).dma_scores(&w_dt, &a)?.z.burn());
    };
    let slopes: Vec<f32> = slopes.iter().map(|&slope| slope as f32).collect();
    let start;
    let origin = match origin {
        PositionOrigin::At { position, .. } => sieve_kernels::PositionOrigin::First(*position),
        PositionOrigin::DocumentStart(of_tokens) => {
            start = kernel_tensor(of_tokens.clone());
            sieve_kernels::PositionOrigin::DocumentStart(&start)
        }
    };
    let recency = sieve_kernels::Recency {
        slopes: &slopes,
        origin,
    };
    Ok(packed(qkv, spec).dma_ranks(&w_dt, &a, Some(&recency))?.z.burn())
}

/// Adds the path through the scores to `dqkv` in place; returns `(dw_dt, da)` in f32.
fn launch_scores_backward(
    qkv: &Float,
    [w_dt, a]: [&Float; 2],
    spec: AttentionSpec,
    dz: &Float,
    dqkv: &Float,
) -> Result<(Float, Float), KernelError> {
    let (w_dt, a) = (cast(w_dt, DType::F32), cast(a, DType::F32));
    let (w_dt, a) = (w_dt.contiguous(), a.contiguous());
    let qkv = packed(qkv, spec);
    // One read of v is cheaper than keeping x of every layer.
    let scores = qkv.dma_scores(&w_dt, &a)?;
    let dz = cast(dz, DType::F32).contiguous();
    let call = ScoresBackward {
        qkv: &qkv,
        w_dt: &w_dt,
        a: &a,
        x: &scores.x,
        dz: &dz,
    };
    let (dw_dt, da) = call.dma_scores_backward(&packed(dqkv, spec))?;
    Ok((dw_dt.burn(), da.burn()))
}

fn launch_select(
    rank: &Float,
    documents: &DocumentBounds<Cuda>,
    window: DmaWindow,
) -> Result<DmaSelection<Cuda>, KernelError> {
    let rank = kernel_tensor(rank.clone());
    let [start, end] = bounds(documents);
    let (kept, local) = (window.keep_window_size, window.local_window_size);
    let selection = sieve_kernels::dma_select(&rank, &start, &end, kept, local)?;
    let [_, _, seq_len] = rank.dims("dma_select", "rank")?;
    let keys = if kept >= seq_len {
        DmaKeys::All
    } else {
        let lists = selection.dma_lists(&start, &end, KeyLists::TILE_QUERIES)?;
        DmaKeys::Lists(DmaKeyLists {
            list: lists.list.burn(),
            list_len: lists.list_len.burn(),
            tile_window: lists.tile_window.burn(),
        })
    };
    let expire = selection.expire.burn();
    Ok(DmaSelection { expire, keys })
}

fn launch(
    qkv: &Float,
    (delta, rest): (&Float, KeepRest),
    documents: &DocumentBounds<Cuda>,
    selection: &DmaSelection<Cuda>,
    spec: AttentionSpec,
) -> Result<AttentionOutput<Cuda>, KernelError> {
    let delta = kernel_tensor(delta.clone());
    let spec = without_window(spec);
    match &selection.keys {
        DmaKeys::All => attention::forward(qkv, documents, spec, Some((&delta, rest))),
        DmaKeys::Lists(lists) => {
            let lists = kernel_lists(lists);
            let scale = spec.softmax_scale as f32;
            let qkv = packed(qkv, spec);
            qkv.dma_attention_forward(&delta, &lists, scale, rest).map(output)
        }
        DmaKeys::Expire => Err(not_selected()),
    }
}

/// `(dqkv, ddelta)`.
fn launch_backward(
    qkv: &Float,
    delta: &Float,
    documents: &DocumentBounds<Cuda>,
    selection: &DmaSelection<Cuda>,
    spec: AttentionSpec,
    output: &AttentionOutput<Cuda>,
    d_o: &Float,
) -> Result<(Float, Float), KernelError> {
    let delta = kernel_tensor(delta.clone());
    let spec = without_window(spec);
    match &selection.keys {
        DmaKeys::All => {
            let bias = Some(&delta);
            let (dqkv, d_delta) = attention::backward(qkv, documents, spec, bias, output, d_o)?;
            let d_delta = d_delta.expect("a call with a bias returns the bias's gradient");
            Ok((dqkv, d_delta.burn()))
        }
        DmaKeys::Lists(lists) => {
            let lists = kernel_lists(lists);
            let backward = Backward::new(qkv, spec, output, d_o);
            let d_delta = backward.call().dma_attention_backward(&delta, &lists)?;
            Ok((backward.dqkv.burn(), d_delta.burn()))
        }
        DmaKeys::Expire => Err(not_selected()),
    }
}

/// The selection is the whole mask of DMA.
fn without_window(spec: AttentionSpec) -> AttentionSpec {
    AttentionSpec {
        window_size: None,
        ..spec
    }
}

fn kernel_lists(lists: &DmaKeyLists<Cuda>) -> KeyLists {
    let of = |tensor: &Float| kernel_tensor(tensor.clone());
    KeyLists {
        list: of(&lists.list),
        list_len: of(&lists.list_len),
        tile_window: of(&lists.tile_window),
        tile_queries: KeyLists::TILE_QUERIES,
    }
}

fn not_selected() -> KernelError {
    let (what, supported) = ("selection", "made by dma_select");
    KernelError::unsupported("dma_attention", what, "made by the reference", supported)
}
