//! Attention of a part of each row.
use super::RowParts;
use super::border::{Border, Reach};
use super::heads::{to_heads, to_tokens};
use crate::DeviceBackend;
use crate::attention::{AttentionBackend, AttentionOutput, AttentionSpec};
use crate::dma::{DmaSelection, bias_gradient, dma_bias, dma_rank};
use crate::documents::DocumentBounds;
use crate::tensors::{Float, Ints, primitive, tensor};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use sieve_core::{DmaShape, KeepRest};

/// What DMA has beside the packed tensor: w_dt, a, its form, and the tokens' positions in their documents.
pub(crate) type DmaParts<B> = (Float<B>, Float<B>, DmaShape, Ints<B>);

/// Where a part's tokens stand: the rows, the document bounds inside the part, and how they attend.
pub(crate) type PartPlace<'a, B> = (&'a RowParts, &'a DocumentBounds<B>, AttentionSpec);

/// What attention of a part leaves for its backward pass.
#[derive(Clone, Debug)]
pub(crate) struct Parted<B: Backend> {
    /// `[batch, len, num_heads, head_dim]`.
    pub(crate) o: Float<B>,
    way: Way<B>,
}

/// Which of the two attentions of [`row_parts`](super) ran.
#[derive(Clone, Debug)]
enum Way<B: Backend> {
    /// Tokens were exchanged for heads: this rank attended over whole rows, with some of the heads.
    Heads(AttentionOutput<B>),
    /// This rank attended with all heads, over its part and the earlier keys that the part can see (the border).
    Border(Box<Bordered<B>>),
}

#[derive(Clone, Debug)]
struct Bordered<B: Backend> {
    border: Border<B>,
    output: AttentionOutput<B>,
    /// DMA's selection, and the ranks it was made from.
    selection: Option<(DmaSelection<B>, Float<B>)>,
}

impl<B: Backend> Parted<B> {
    /// The border, and DMA's masks over the longer rows; `None` where whole rows of some heads were exchanged.
    pub(super) fn border(&self) -> Option<(&Border<B>, Option<Ints<B>>)> {
        match &self.way {
            Way::Heads(_) => None,
            Way::Border(bordered) => {
                let expire = bordered
                    .selection
                    .as_ref()
                    .map(|(selection, _)| selection.expire.clone());
                Some((&bordered.border, expire))
            }
        }
    }
}

/// Attention of this part's queries over the whole rows. `qkv` `[batch, len, num_heads + 2 * num_kv_heads, head_dim]`.
pub(crate) fn forward<B: DeviceBackend>(
    qkv: Float<B>,
    dma: Option<DmaParts<B>>,
    (parts, own_documents, spec): PartPlace<'_, B>,
    rest: KeepRest,
) -> Parted<B> {
    let num_parts = parts.links.num_parts();
    let is_dense = dma.is_none() && spec.window_size.is_none();
    if is_dense && spec.num_kv_heads.is_multiple_of(num_parts) {
        let own = to_own_heads::<B>(parts, qkv, spec);
        let (documents, own_spec) = whole::<B>(parts, &own, spec);
        let output = <B as AttentionBackend>::attention(own, &documents, own_spec);
        let o = tensor::<B, 4>(output.o.clone());
        let o = to_tokens(&*parts.links, o, &[spec.num_heads]);
        return Parted {
            o: primitive(o),
            way: Way::Heads(output),
        };
    }
    let reach = match (&dma, spec.window_size) {
        (Some((_, _, dma, _)), _) => Reach::Kept(dma.window()),
        (None, window) => Reach::Recent(window.map_or(parts.seq_len, |window| window - 1)),
    };
    let rank = dma.map(|(w_dt, a, dma, positions)| {
        let z = tensor::<B, 3>(B::dma_scores(qkv.clone(), w_dt, a, spec));
        let positions = || Tensor::<B, 2, Int>::from_primitive(positions);
        let rank = dma_rank(z, positions, dma.slopes(spec.num_kv_heads));
        (primitive(rank), dma)
    });
    let own_rank = rank.as_ref().map(|(rank, _)| rank);
    let border = Border::<B>::gather(parts, &qkv, (own_documents, spec), reach, own_rank);
    let len = parts.len();
    let (longer, documents) = (border.with_keys(qkv), border.documents(own_documents));
    let (output, selection) = match rank {
        Some((rank, dma)) => {
            let rank = border.with_ranks(rank);
            let delta = primitive(dma_bias(tensor::<B, 3>(rank.clone()), dma.bias));
            let selection = B::dma_select(rank.clone(), &documents, dma.window());
            let output = B::dma_attention(longer, delta, &documents, &selection, spec, rest);
            (output, Some((selection, rank)))
        }
        None => {
            let output = <B as AttentionBackend>::attention(longer, &documents, spec);
            (output, None)
        }
    };
    let o = tensor::<B, 4>(output.o.clone()).narrow(1, border.slots, len);
    let bordered = Bordered {
        border,
        output,
        selection,
    };
    Parted {
        o: primitive(o),
        way: Way::Border(Box::new(bordered)),
    }
}

/// `dqkv` of this part, and the gradients of w_dt and a.
#[allow(clippy::type_complexity)]
pub(crate) fn backward<B: DeviceBackend>(
    parted: Parted<B>,
    qkv: Float<B>,
    dma: Option<DmaParts<B>>,
    (parts, own_documents, spec): PartPlace<'_, B>,
    d_o: Float<B>,
) -> (Float<B>, Option<(Float<B>, Float<B>)>) {
    let links = &*parts.links;
    let bordered = match parted.way {
        Way::Heads(output) => {
            let d_o = primitive(to_heads(links, tensor::<B, 4>(d_o), &[spec.num_heads]));
            let own = to_own_heads::<B>(parts, qkv, spec);
            let (documents, own_spec) = whole::<B>(parts, &own, spec);
            let d_own = B::attention_backward(own, &documents, own_spec, output, d_o);
            let d_qkv = to_tokens(links, tensor::<B, 4>(d_own), &kinds(spec));
            return (primitive(d_qkv), None);
        }
        Way::Border(bordered) => bordered,
    };
    let Bordered {
        border,
        output,
        selection,
    } = *bordered;
    let (slots, len) = (border.slots, parts.len());
    let longer = border.with_keys(qkv.clone());
    let documents = border.documents(own_documents);
    let mut d_o = tensor::<B, 4>(d_o);
    if slots > 0 {
        let [batch, _, heads, head_dim] = d_o.dims();
        let none = Tensor::zeros([batch, slots, heads, head_dim], (&d_o.device(), d_o.dtype()));
        d_o = Tensor::cat(vec![none, d_o], 1);
    }
    let d_o = primitive(d_o);
    let (Some((selection, rank)), Some((w_dt, a, dma, _))) = (selection, dma) else {
        let d_longer = B::attention_backward(longer, &documents, spec, output, d_o);
        let (d_qkv, _) = border.give_back(parts, d_longer, None);
        return (d_qkv, None);
    };
    let rank = tensor::<B, 3>(rank);
    let delta = dma_bias(rank.clone(), dma.bias);
    let (d_longer, d_delta) = B::dma_attention_backward(
        longer,
        primitive(delta.clone()),
        &documents,
        &selection,
        spec,
        output,
        d_o,
    );
    let (d_qkv, d_delta) = border.give_back(parts, d_longer, Some(d_delta));
    let d_delta = tensor::<B, 3>(d_delta.expect("given above"));
    let own = |x: Tensor<B, 3>| x.narrow(2, slots, len);
    let dz = bias_gradient(own(rank), own(delta), d_delta, dma.bias);
    let (d_qkv, d_w_dt, d_a) = B::dma_scores_backward(qkv, w_dt, a, spec, primitive(dz), d_qkv);
    (d_qkv, Some((d_w_dt, d_a)))
}

fn kinds(spec: AttentionSpec) -> [usize; 3] {
    [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
}

fn to_own_heads<B: DeviceBackend>(parts: &RowParts, qkv: Float<B>, spec: AttentionSpec) -> Float<B> {
    primitive(to_heads(&*parts.links, tensor::<B, 4>(qkv), &kinds(spec)))
}

/// Bounds of the whole rows, and the spec of this rank's heads.
fn whole<B: Backend>(parts: &RowParts, own: &Float<B>, spec: AttentionSpec) -> (DocumentBounds<B>, AttentionSpec) {
    let device = B::float_device(own);
    let shape = [parts.batch, parts.seq_len];
    let documents = [0, 1].map(|bound| {
        let bounds = parts.bounds[bound].iter().map(|&bound| bound as i32);
        int_primitive::<B>(bounds.collect(), shape, &device)
    });
    let num_parts = parts.links.num_parts();
    let own_spec = AttentionSpec {
        num_heads: spec.num_heads / num_parts,
        num_kv_heads: spec.num_kv_heads / num_parts,
        ..spec
    };
    (documents, own_spec)
}

pub(super) fn int_primitive<B: Backend>(values: Vec<i32>, shape: [usize; 2], device: &B::Device) -> Ints<B> {
    Tensor::<B, 2, Int>::from_data(TensorData::new(values, shape), device).into_primitive()
}

pub(super) fn values_of<B: Backend, const D: usize>(x: Tensor<B, D>) -> Vec<f32> {
    x.into_data().iter::<f32>().collect()
}

pub(super) fn from_values<B: Backend, const D: usize>(
    values: Vec<f32>,
    shape: [usize; D],
    device: &B::Device,
) -> Tensor<B, D> {
    Tensor::from_data(TensorData::new(values, shape), device)
}
