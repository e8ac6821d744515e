//! DMA's scores, selection and attention.
use super::attention::{self, Backward, bounds, output, packed};
use crate::device::cuda::{Cuda, cast};
use crate::{AttentionOutput, AttentionSpec, DmaSelection, DocumentBounds};
use burn::tensor::DType;
use sieve_core::DmaWindow;
use sieve_kernels::{
    CudaPrimitive, CudaTensor, GradientTarget, KernelError, KeyLists, ScoreBias, ScoresBackward,
    TILE_QUERIES,
};

/// What a selection of this backend holds in [`DmaSelection::lists`].
enum Kept {
    /// Every key of every document: the dense kernel with a bias per key.
    All,
    /// Ordered key lists.
    Lists(Box<KeyLists>),
}

impl Kept {
    /// Reads the lists back; one tensor stands for "all", none for a selection that the reference made.
    fn of(selection: &DmaSelection<Cuda>) -> Result<Self, KernelError> {
        match selection.lists.as_slice() {
            [_all] => Ok(Self::All),
            [list, list_len, num_entering, tile_window] => {
                let of = |tensor: &CudaPrimitive| CudaTensor::from(tensor.clone());
                Ok(Self::Lists(Box::new(KeyLists {
                    list: of(list),
                    list_len: of(list_len),
                    num_entering: of(num_entering),
                    tile_window: of(tile_window),
                    tile_queries: TILE_QUERIES,
                })))
            }
            _ => Err(KernelError::Unsupported {
                kernel: "dma_attention",
                what: "selection",
                got: "made by the reference".to_owned(),
                supported: "made by dma_select".to_owned(),
            }),
        }
    }
}

pub(crate) fn scores(
    qkv: &CudaPrimitive,
    w_dt: &CudaPrimitive,
    a: &CudaPrimitive,
    spec: AttentionSpec,
) -> Result<CudaPrimitive, KernelError> {
    let (w_dt, a) = (cast(w_dt, DType::F32), cast(a, DType::F32));
    // The bias that the kernel computes along is not used: the caller makes it from z.
    let scores = sieve_kernels::dma_scores(&packed(qkv, spec), &w_dt, &a, ScoreBias::Linear)?;
    Ok(scores.z.into())
}

/// Adds the path through the scores to `dqkv` in place; returns `(dw_dt, da)` in f32.
pub(crate) fn scores_backward(
    qkv: &CudaPrimitive,
    [w_dt, a]: [&CudaPrimitive; 2],
    spec: AttentionSpec,
    dz: &CudaPrimitive,
    dqkv: &CudaPrimitive,
) -> Result<(CudaPrimitive, CudaPrimitive), KernelError> {
    let (w_dt, a) = (cast(w_dt, DType::F32), cast(a, DType::F32));
    let (w_dt, a) = (w_dt.contiguous(), a.contiguous());
    let qkv = packed(qkv, spec);
    // One read of v is cheaper than keeping x of every layer.
    let scores = sieve_kernels::dma_scores(&qkv, &w_dt, &a, ScoreBias::Linear)?;
    let dz = cast(dz, DType::F32).contiguous();
    let call = ScoresBackward {
        qkv: &qkv,
        w_dt: &w_dt,
        a: &a,
        x: &scores.x,
        dz: &dz,
    };
    let (new_w, new_a) = (GradientTarget::New, GradientTarget::New);
    let (dw_dt, da) = sieve_kernels::dma_scores_backward(call, &packed(dqkv, spec), new_w, new_a)?;
    Ok((dw_dt.into(), da.into()))
}

pub(crate) fn select(
    rank: &CudaPrimitive,
    documents: &DocumentBounds<Cuda>,
    window: DmaWindow,
) -> Result<DmaSelection<Cuda>, KernelError> {
    let rank = CudaTensor::from(rank.clone());
    let [start, end] = bounds(documents);
    let (kept, local) = (window.keep_window_size, window.local_window_size);
    let selection = sieve_kernels::dma_select(&rank, &start, &end, kept, local)?;
    let [_, _, seq_len] = rank.dims("dma_select", "rank")?;
    let lists: Vec<CudaPrimitive> = if kept >= seq_len {
        vec![selection.expire.clone().into()]
    } else {
        let lists = sieve_kernels::dma_lists(&selection, &start, &end, TILE_QUERIES)?;
        let KeyLists {
            list,
            list_len,
            num_entering,
            tile_window,
            ..
        } = lists;
        [list, list_len, num_entering, tile_window]
            .map(Into::into)
            .to_vec()
    };
    let expire = selection.expire.into();
    Ok(DmaSelection { expire, lists })
}

pub(crate) fn forward(
    qkv: &CudaPrimitive,
    delta: &CudaPrimitive,
    documents: &DocumentBounds<Cuda>,
    selection: &DmaSelection<Cuda>,
    spec: AttentionSpec,
) -> Result<AttentionOutput<Cuda>, KernelError> {
    let delta = CudaTensor::from(delta.clone());
    let spec = without_window(spec);
    match Kept::of(selection)? {
        Kept::All => attention::forward(qkv, documents, spec, Some(&delta)),
        Kept::Lists(lists) => {
            let scale = spec.softmax_scale as f32;
            let qkv = packed(qkv, spec);
            sieve_kernels::dma_attention_forward(&qkv, &delta, &lists, scale).map(output)
        }
    }
}

/// `(dqkv, ddelta)`.
pub(crate) fn backward(
    qkv: &CudaPrimitive,
    delta: &CudaPrimitive,
    documents: &DocumentBounds<Cuda>,
    selection: &DmaSelection<Cuda>,
    spec: AttentionSpec,
    output: &AttentionOutput<Cuda>,
    d_o: &CudaPrimitive,
) -> Result<(CudaPrimitive, CudaPrimitive), KernelError> {
    let delta = CudaTensor::from(delta.clone());
    let spec = without_window(spec);
    match Kept::of(selection)? {
        Kept::All => {
            let bias = Some(&delta);
            let (dqkv, d_delta) = attention::backward(qkv, documents, spec, bias, output, d_o)?;
            let d_delta = d_delta.expect("a call with a bias returns the bias's gradient");
            Ok((dqkv, d_delta.into()))
        }
        Kept::Lists(lists) => {
            let backward = Backward::new(qkv, spec, output, d_o);
            let d_delta = sieve_kernels::dma_attention_backward(backward.call(), &delta, &lists)?;
            Ok((backward.dqkv.into(), d_delta.into()))
        }
    }
}

/// The selection is the whole mask of DMA.
fn without_window(spec: AttentionSpec) -> AttentionSpec {
    AttentionSpec {
        window_size: None,
        ..spec
    }
}
