//! Attention of a part of each row.
use super::RowParts;
use super::border::{Border, Reach, Sizes};
use super::heads::{to_heads, to_tokens};
use crate::attention::{AttentionBackend, AttentionOutput, AttentionSpec};
use crate::backend::DeviceBackend;
use crate::dma::{DmaSelection, bias_gradient, dma_bias, dma_rank};
use crate::documents::DocumentBounds;
use crate::tensors::{Float, Ints, primitive, tensor};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData, TensorMetadata};
use sieve_core::DmaShape;

/// What DMA has beside the packed tensor: w_dt, a, its form, and the tokens' positions in their documents.
pub(crate) type DmaParts<B> = (Float<B>, Float<B>, DmaShape, Ints<B>);

/// What attention of a part leaves for its backward pass.
#[derive(Clone, Debug)]
pub(crate) struct Parted<B: Backend> {
    /// `[batch, len, num_heads, head_dim]`.
    pub(crate) o: Float<B>,
    way: Way<B>,
}

#[derive(Clone, Debug)]
enum Way<B: Backend> {
    /// Whole rows of some heads.
    Heads(AttentionOutput<B>),
    /// All heads of longer rows.
    Border(Box<Bordered<B>>),
}

#[derive(Clone, Debug)]
struct Bordered<B: Backend> {
    border: Border,
    output: AttentionOutput<B>,
    /// DMA's, and what ranks the keys.
    selection: Option<(DmaSelection<B>, Float<B>)>,
}

#[cfg(test)]
impl<B: Backend> Parted<B> {
    /// DMA's masks over the longer rows, with the positions of the border's keys.
    pub(super) fn mask(&self) -> Option<(&Border, Ints<B>)> {
        match &self.way {
            Way::Heads(_) => None,
            Way::Border(bordered) => {
                let (selection, _) = bordered.selection.as_ref()?;
                Some((&bordered.border, selection.expire.clone()))
            }
        }
    }
}

/// Attention of this part's queries over the whole rows. `qkv` `[batch, len, num_heads + 2 * num_kv_heads, head_dim]`.
pub(crate) fn forward<B: DeviceBackend>(
    qkv: Float<B>,
    dma: Option<DmaParts<B>>,
    parts: &RowParts,
    spec: AttentionSpec,
) -> Parted<B> {
    let num_parts = parts.links.num_parts();
    let is_dense = dma.is_none() && spec.window_size.is_none();
    if is_dense && spec.num_kv_heads.is_multiple_of(num_parts) {
        let output = dense::<B>(to_own_heads::<B>(parts, qkv, spec), parts, spec);
        let o = to_tokens(
            &*parts.links,
            tensor::<B, 4>(output.o.clone()),
            &[spec.num_heads],
        );
        return Parted {
            o: primitive(o),
            way: Way::Heads(output),
        };
    }
    let device = B::float_device(&qkv);
    let reach = match (&dma, spec.window_size) {
        (Some((_, _, dma, _)), _) => {
            let window = dma.window();
            Reach {
                ranked: window.num_ranked(),
                recent: window.local_window_size,
            }
        }
        (None, window) => Reach {
            ranked: 0,
            recent: window.map_or(parts.seq_len, |window| window - 1),
        },
    };
    let rank = dma.map(|(w_dt, a, dma, positions)| {
        let z = tensor::<B, 3>(B::dma_scores(qkv.clone(), w_dt, a, spec));
        let positions = || Tensor::<B, 2, Int>::from_primitive(positions);
        (dma_rank(z, positions, dma.slopes(spec.num_kv_heads)), dma)
    });
    let values = values_of(tensor::<B, 4>(qkv.clone()));
    let own_ranks = rank.as_ref().map(|(rank, _)| values_of(rank.clone()));
    let sizes = sizes(&qkv, spec);
    let border = Border::gather(parts, sizes, reach, &values, own_ranks.as_deref());
    let [batch, len, heads, head_dim] = qkv.shape().dims();
    let row_len = border.slots + len;
    let longer = from_values::<B, 4>(
        border.with_keys(&values),
        [batch, row_len, heads, head_dim],
        &device,
    );
    let (longer, documents) = (primitive(longer), bounds::<B>(&border, row_len, &device));
    let (output, selection) = match (rank, own_ranks) {
        (Some((_, dma)), Some(own)) => {
            let shape = [batch, spec.num_kv_heads, row_len];
            let rank = from_values::<B, 3>(border.with_ranks(&own), shape, &device);
            let delta = primitive(dma_bias(rank.clone(), dma.bias));
            let rank = primitive(rank);
            let selection = B::dma_select(rank.clone(), &documents, dma.window());
            let output = B::dma_attention(longer, delta, &documents, &selection, spec);
            (output, Some((selection, rank)))
        }
        _ => {
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
    (parts, spec): (&RowParts, AttentionSpec),
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
    let device = B::float_device(&qkv);
    let shape: [usize; 4] = qkv.shape().dims();
    let [batch, len, heads, head_dim] = shape;
    let row_len = border.slots + len;
    let values = border.with_keys(&values_of(tensor::<B, 4>(qkv.clone())));
    let longer = from_values::<B, 4>(values, [batch, row_len, heads, head_dim], &device);
    let longer = primitive(longer);
    let documents = bounds::<B>(&border, row_len, &device);
    let before = [batch, border.slots, spec.num_heads, head_dim];
    let d_o = Tensor::cat(vec![Tensor::zeros(before, &device), tensor::<B, 4>(d_o)], 1);
    let d_o = primitive(d_o);
    let (Some((selection, rank)), Some((w_dt, a, dma, _))) = (selection, dma) else {
        let d_longer = B::attention_backward(longer, &documents, spec, output, d_o);
        let d_longer = values_of(tensor::<B, 4>(d_longer));
        let (d_qkv, _) = border.give_back(&d_longer, None);
        return (primitive(from_values::<B, 4>(d_qkv, shape, &device)), None);
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
    let d_longer = values_of(tensor::<B, 4>(d_longer));
    let d_delta = values_of(tensor::<B, 3>(d_delta));
    let (d_qkv, d_delta) = border.give_back(&d_longer, Some(&d_delta));
    let d_qkv = primitive(from_values::<B, 4>(d_qkv, shape, &device));
    let shape = [batch, spec.num_kv_heads, len];
    let d_delta = d_delta.expect("given above");
    let d_delta = from_values::<B, 3>(d_delta, shape, &device);
    let own = |x: Tensor<B, 3>| x.narrow(2, border.slots, len);
    let dz = bias_gradient(own(rank), own(delta), d_delta, dma.bias);
    let (d_qkv, d_w_dt, d_a) = B::dma_scores_backward(qkv, w_dt, a, spec, primitive(dz), d_qkv);
    (d_qkv, Some((d_w_dt, d_a)))
}

fn kinds(spec: AttentionSpec) -> [usize; 3] {
    [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
}

fn to_own_heads<B: Backend>(parts: &RowParts, qkv: Float<B>, spec: AttentionSpec) -> Float<B> {
    primitive(to_heads(&*parts.links, tensor::<B, 4>(qkv), &kinds(spec)))
}

fn dense<B: DeviceBackend>(
    own: Float<B>,
    parts: &RowParts,
    spec: AttentionSpec,
) -> AttentionOutput<B> {
    let (documents, own_spec) = whole::<B>(parts, &own, spec);
    <B as AttentionBackend>::attention(own, &documents, own_spec)
}

/// Bounds of the whole rows, and the spec of this rank's heads.
fn whole<B: Backend>(
    parts: &RowParts,
    own: &Float<B>,
    spec: AttentionSpec,
) -> (DocumentBounds<B>, AttentionSpec) {
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

fn bounds<B: Backend>(border: &Border, row_len: usize, device: &B::Device) -> DocumentBounds<B> {
    border.bounds().map(|bounds| {
        let shape = [bounds.len() / row_len, row_len];
        int_primitive::<B>(bounds, shape, device)
    })
}

fn int_primitive<B: Backend>(values: Vec<i32>, shape: [usize; 2], device: &B::Device) -> Ints<B> {
    Tensor::<B, 2, Int>::from_data(TensorData::new(values, shape), device).into_primitive()
}

fn sizes<F: TensorMetadata>(qkv: &F, spec: AttentionSpec) -> Sizes {
    Sizes {
        num_heads: spec.num_heads,
        num_kv_heads: spec.num_kv_heads,
        head_dim: qkv.shape()[3],
    }
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
