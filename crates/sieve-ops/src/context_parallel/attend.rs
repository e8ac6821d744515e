//! Attention of a part of each row.
use super::ContextParallel;
use super::halo::{Halo, Reach};
use super::heads::{Heads, to_heads, to_tokens};
use crate::dma::composed::by_rank;
use crate::dma::{dma_bias, dma_bias_backward, dma_rank};
use crate::tensors::{Float, Ints, ints, primitive, tensor};
use crate::{AttentionCall, AttentionOutput, AttentionSpec, DeviceBackend, DmaCall, DmaLayer, DmaOrder, DmaSelection};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorMetadata};
use sieve_core::{KeepOLow, KeyOrder};

/// DMA's inputs besides the packed tensor: its layer, and the tokens' positions in their documents.
pub(crate) type DmaParts<B> = (DmaLayer<B>, Ints<B>);

/// The rows of which this process has a part, and attention inside the part.
pub(crate) type PartPlace<'a, B> = (&'a ContextParallel, &'a AttentionCall<B>);

/// What attention of a part keeps for its backward pass.
#[derive(Clone, Debug)]
pub(crate) struct Parted<B: Backend> {
    /// Attention output, `[batch, len, num_heads, head_dim]`.
    pub(crate) o: Float<B>,
    way: Way<B>,
}

/// Which of the two ways of attending ran; see [`context_parallel`](super).
#[derive(Clone, Debug)]
enum Way<B: Backend> {
    /// Tokens were exchanged for heads: this process attended over whole rows, with some of the heads.
    Heads(AttentionOutput<B>),
    /// This process attended with all heads, over its part and the earlier keys that the part can see (the halo).
    Halo(Box<WithHalo<B>>),
}

#[derive(Clone, Debug)]
struct WithHalo<B: Backend> {
    halo: Halo<B>,
    output: AttentionOutput<B>,
    /// DMA's selection, and the keys' ranks that it was made from; `None` for other kinds.
    selection: Option<(DmaSelection<B>, Float<B>)>,
}

impl<B: Backend> Parted<B> {
    /// The halo, and DMA's mask over the longer rows; `None` where tokens were exchanged for heads.
    pub(super) fn halo(&self) -> Option<(&Halo<B>, Option<Ints<B>>)> {
        let Way::Halo(with_halo) = &self.way else {
            return None;
        };
        let selection = with_halo.selection.as_ref();
        Some((&with_halo.halo, selection.map(|(selection, _)| selection.expire.clone())))
    }
}

/// Attention of this part's queries over the whole rows. `qkv` `[batch, len, num_heads + 2 * num_kv_heads, head_dim]`.
pub(crate) fn forward<B: DeviceBackend>(
    qkv: Float<B>,
    dma: Option<DmaParts<B>>,
    (parts, own_call): PartPlace<'_, B>,
    o_low: KeepOLow,
) -> Parted<B> {
    let spec = own_call.spec;
    let num_parts = parts.links.num_parts();
    let sees_all = dma.is_none() && spec.reach().is_none();
    if sees_all && spec.num_kv_heads.is_multiple_of(num_parts) {
        let own = to_own_heads::<B>(parts, qkv, spec);
        let output = <B as DeviceBackend>::attention(own.clone(), &call_of_whole_rows::<B>(parts, &own, spec));
        let o = tensor::<B, 4>(output.o.clone());
        let o = to_tokens(&*parts.links, o, &[Heads::Split(spec.num_heads)]);
        return Parted { o: primitive(o), way: Way::Heads(output) };
    }
    let reach = match &dma {
        Some((dma, _)) => Reach::Kept(dma.spec.window()),
        None => Reach::Recent(spec.reach().unwrap_or(parts.seq_len)),
    };
    let rank = dma.map(|(dma, positions)| {
        let z = tensor::<B, 3>(B::dma_scores(&dma.scores(qkv.clone(), spec)));
        let rank = dma_rank(z, Tensor::from_primitive(positions), dma.spec.slopes(spec.num_kv_heads));
        (primitive(rank), dma.spec)
    });
    let own_rank = rank.as_ref().map(|(rank, _)| rank);
    let halo = Halo::<B>::gather(parts, &qkv, own_call, reach, own_rank);
    let len = parts.len();
    let (longer, attention) = (halo.with_keys(qkv), halo.call(own_call));
    let (output, selection) = match rank {
        Some((rank, dma)) => {
            let order = DmaOrder::Of(KeyOrder::Leaving);
            let found = by_rank::<B>((longer, halo.with_ranks(rank)), attention, dma, o_low, order);
            (found.output, Some((found.selection, found.rank)))
        }
        None => (<B as DeviceBackend>::attention(longer, &attention), None),
    };
    let o = tensor::<B, 4>(output.o.clone()).narrow(1, halo.slots, len);
    let with_halo = WithHalo { halo, output, selection };
    Parted { o: primitive(o), way: Way::Halo(Box::new(with_halo)) }
}

/// `dqkv` of this part, and the gradients of w_dt and a; these are `None` without DMA.
pub(crate) fn backward<B: DeviceBackend>(
    parted: Parted<B>,
    qkv: Float<B>,
    dma: Option<DmaParts<B>>,
    (parts, own_call): PartPlace<'_, B>,
    d_o: Float<B>,
) -> (Float<B>, Option<[Float<B>; 2]>) {
    let spec = own_call.spec;
    let links = &*parts.links;
    let with_halo = match parted.way {
        Way::Heads(output) => {
            let d_o = primitive(to_heads(links, tensor::<B, 4>(d_o), &[Heads::Split(spec.num_heads)]));
            let own = to_own_heads::<B>(parts, qkv, spec);
            let d_own = B::attention_backward(own.clone(), &call_of_whole_rows::<B>(parts, &own, spec), output, d_o);
            let d_qkv = to_tokens(links, tensor::<B, 4>(d_own), &kinds(spec));
            return (primitive(d_qkv), None);
        }
        Way::Halo(with_halo) => with_halo,
    };
    let WithHalo { halo, output, selection } = *with_halo;
    let (slots, len) = (halo.slots, parts.len());
    let longer = halo.with_keys(qkv.clone());
    let attention = halo.call(own_call);
    let mut d_o = tensor::<B, 4>(d_o);
    // The output of the halo's queries is not read, so its gradient is 0.
    if slots > 0 {
        let [batch, _, heads, head_dim] = d_o.dims();
        let none = Tensor::zeros([batch, slots, heads, head_dim], (&d_o.device(), d_o.dtype()));
        d_o = Tensor::cat(vec![none, d_o], 1);
    }
    let d_o = primitive(d_o);
    let (Some((selection, rank)), Some((dma, _))) = (selection, dma) else {
        let d_longer = B::attention_backward(longer, &attention, output, d_o);
        let d_delta = None;
        let (d_qkv, _) = halo.own_gradients(parts, d_longer, d_delta);
        return (d_qkv, None);
    };
    let rank = tensor::<B, 3>(rank);
    let delta = dma_bias(rank.clone(), dma.spec.bias);
    let call = DmaCall { qkv: longer, delta: primitive(delta.clone()), selection, attention };
    let [d_longer, d_delta] = B::dma_attention_backward(&call, output, d_o);
    let (d_qkv, d_delta) = halo.own_gradients(parts, d_longer, Some(d_delta));
    let d_delta = tensor::<B, 3>(d_delta.expect("given above"));
    let own = |longer: Tensor<B, 3>| longer.narrow(2, slots, len);
    let dz = dma_bias_backward(own(rank), own(delta), d_delta, dma.spec.bias);
    let scores = dma.scores(qkv, spec);
    let [d_qkv, d_w_dt, d_a] = B::dma_scores_backward(&scores, primitive(dz), d_qkv);
    (d_qkv, Some([d_w_dt, d_a]))
}

/// The heads of a packed tensor, queries, keys and values, which are all divided among the processes.
fn kinds(spec: AttentionSpec) -> [Heads; 3] {
    [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads].map(Heads::Split)
}

/// Whole rows of this process's heads, from the part of the rows with all heads.
fn to_own_heads<B: DeviceBackend>(parts: &ContextParallel, qkv: Float<B>, spec: AttentionSpec) -> Float<B> {
    primitive(to_heads(&*parts.links, tensor::<B, 4>(qkv), &kinds(spec)))
}

/// The call of attention over whole rows with the heads in `own`, this process's share.
fn call_of_whole_rows<B: Backend>(parts: &ContextParallel, own: &Float<B>, spec: AttentionSpec) -> AttentionCall<B> {
    let device = B::float_device(own);
    let shape = [parts.batch, parts.seq_len];
    let documents = [0, 1].map(|bound| {
        let bounds = parts.bounds[bound].iter().map(|&bound| bound as i32);
        ints::<B, 2>(bounds.collect(), shape, &device).into_primitive()
    });
    let (packed_heads, first) = (own.shape()[2], parts.own_heads(spec.num_kv_heads).start);
    AttentionCall::new(documents, spec.of_packed_heads(packed_heads).of_heads_from(first))
}
