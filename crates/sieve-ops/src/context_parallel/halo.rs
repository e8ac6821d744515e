//! The keys of earlier parts that a part's queries may see.
use super::{ContextParallel, SendRecv};
use crate::tensors::{Float, Ints, ints, primitive, tensor};
use crate::{AttentionCall, AttentionSpec, DeviceBackend, DocumentBounds};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorMetadata, s};
use sieve_core::DmaWindow;
use std::ops::Range;

/// Which keys before a part the part's queries may see.
#[derive(Clone, Copy, Debug)]
pub(super) enum Reach {
    /// This many keys right before the part.
    Recent(usize),
    /// The keys that DMA still keeps where the part begins.
    Kept(DmaWindow),
}

impl Reach {
    /// Most keys per head that may be seen.
    fn keys(self) -> usize {
        match self {
            Self::Recent(keys) => keys,
            Self::Kept(window) => window.keep_window_size,
        }
    }

    /// The first of the parts, `len` tokens each, with keys that the queries of part `part` may see.
    fn first_part(self, part: usize, len: usize) -> usize {
        match self {
            Self::Recent(keys) => (part * len).saturating_sub(keys) / len,
            Self::Kept(_) => 0,
        }
    }
}

/// The halo: keys from earlier parts of each row. All rows and heads have the same number of slots; those with fewer
/// keys leave their first slots empty.
#[derive(Clone, Debug)]
pub(super) struct Halo<B: Backend> {
    spec: AttentionSpec,
    /// Tokens of this process's part of a row.
    len: usize,
    /// Slots of the halo in each row, one key each.
    pub(super) slots: usize,
    /// K, then V, `[batch, slots, 2 * num_kv_heads, head_dim]`; `None` without slots.
    pub(super) keys: Option<Float<B>>,
    /// DMA's ranks of the keys, `[batch, num_kv_heads, slots]`; `None` without DMA or without slots.
    pub(super) ranks: Option<Float<B>>,
    /// Document bounds of the longer rows (halo, then part); `None` without slots.
    documents: Option<DocumentBounds<B>>,
    /// Keys per row and head that each part sends to later parts.
    share: usize,
    /// Parts from which this process receives halo keys.
    from: Range<usize>,
    /// Parts to which this process sends its keys.
    to: Range<usize>,
    /// Positions in this part of the keys that were sent, `[batch, num_kv_heads, share]`, ascending; -1 in the first
    /// places of a head that keeps fewer. `None`: the last `share` keys were sent (no DMA), or none were (last part).
    sent: Option<Ints<B>>,
    /// Indices of the keys that fill the slots among the `from.len() * share` received keys, `[batch, num_kv_heads,
    /// slots]`, ascending; -1 in empty slots. `None`: the last received keys fill them (no DMA), or all do (they fit).
    chosen: Option<Ints<B>>,
}

impl<B: DeviceBackend> Halo<B> {
    /// Sends later parts the keys that they may see, and receives those that this part may see. `qkv` is the part's
    /// packed tensor, `call` attention inside the part, `rank` `[batch, num_kv_heads, len]` DMA's ranks of its keys.
    pub(super) fn gather(
        parts: &ContextParallel,
        qkv: &Float<B>,
        call: &AttentionCall<B>,
        reach: Reach,
        rank: Option<&Float<B>>,
    ) -> Self {
        let spec = call.spec;
        let (own, num_parts, len) = (parts.links.part(), parts.links.num_parts(), parts.len());
        let (share, kv_heads) = (reach.keys().min(len), spec.num_kv_heads);
        let [batch, _, _, head_dim] = qkv.shape().dims();
        let later = (own + 1..num_parts).take_while(|&part| reach.first_part(part, len) <= own);
        let mut halo = Self {
            spec,
            len,
            slots: 0,
            keys: None,
            ranks: None,
            documents: None,
            share,
            from: reach.first_part(own, len)..own,
            to: own + 1..own + 1 + later.count(),
            sent: None,
            chosen: None,
        };
        let to_send = (!halo.to.is_empty()).then(|| halo.keys_for_later_parts(qkv, call, reach, rank));
        let (keys, ranks) = to_send.unzip();
        let shape = halo.shape_of_keys(batch, head_dim);
        let keys = halo.pass_on(parts, keys, shape, qkv);
        let ranks = rank.map(|rank| halo.pass_on(parts, ranks.flatten(), vec![batch, kv_heads, share], rank));
        // The first part has no earlier keys.
        if halo.from.is_empty() {
            return halo;
        }
        let keys = primitive(Tensor::cat(keys.into_iter().map(tensor::<B, 4>).collect(), 1));
        let ranks = ranks.map(|ranks| primitive(Tensor::cat(ranks.into_iter().map(tensor::<B, 3>).collect(), 2)));
        // How many of each row's received keys, the last ones, belong to the document that continues into this part.
        let valid = parts.keys_of_open_documents(halo.from.clone(), share);
        halo.fill_slots(reach, keys, ranks, &valid);
        let pads = valid.iter().map(|&keys| halo.slots - keys.min(halo.slots));
        let bounds = parts.bounds_behind(halo.slots, &pads.collect::<Vec<_>>());
        let (shape, device) = ([batch, halo.slots + len], B::float_device(qkv));
        halo.documents = Some(bounds.map(|bounds| ints::<B, 2>(bounds, shape, &device).into_primitive()));
        halo
    }

    /// Fills the slots from the received keys of all parts, the candidates, and their DMA ranks. Where there are more
    /// candidates than slots, DMA takes the keys that it keeps, and a window its last keys. Of each row's candidates
    /// the last `valid` ones belong to the document that continues into this part.
    fn fill_slots(&mut self, reach: Reach, keys: Float<B>, ranks: Option<Float<B>>, valid: &[usize]) {
        let all = self.from.len() * self.share;
        self.slots = all.min(reach.keys());
        if all == self.slots {
            (self.keys, self.ranks) = (Some(keys), ranks);
            return;
        }
        match (reach, ranks) {
            (Reach::Kept(window), Some(ranks)) => {
                let bounds = candidate_bounds::<B>(valid, all, &B::float_device(&keys));
                let chosen = B::dma_last_kept(ranks.clone(), &bounds, window, self.slots);
                let [keys, ranks] = B::dma_halo_keys(keys, ranks, chosen.clone(), self.spec);
                (self.keys, self.ranks, self.chosen) = (Some(keys), Some(ranks), Some(chosen));
            }
            (_, ranks) => {
                let last = tensor::<B, 4>(keys).narrow(1, all - self.slots, self.slots);
                (self.keys, self.ranks) = (Some(primitive(last)), ranks);
            }
        }
    }

    /// The keys that later parts may see, `[batch, share, 2 * num_kv_heads, head_dim]`, and their DMA ranks.
    fn keys_for_later_parts(
        &mut self,
        qkv: &Float<B>,
        call: &AttentionCall<B>,
        reach: Reach,
        rank: Option<&Float<B>>,
    ) -> (Float<B>, Option<Float<B>>) {
        if let (Reach::Kept(window), Some(rank)) = (reach, rank) {
            let kept = B::dma_last_kept(rank.clone(), &call.documents, window, self.share);
            self.sent = Some(kept.clone());
            let [keys, ranks] = B::dma_halo_keys(qkv.clone(), rank.clone(), kept, self.spec);
            return (keys, Some(ranks));
        }
        let last = tensor::<B, 4>(qkv.clone()).narrow(1, self.len - self.share, self.share);
        (primitive(keys_of(last, self.spec)), None)
    }

    /// Sends `own` to the later parts, and returns the earlier parts' tensors.
    fn pass_on(
        &self,
        parts: &ContextParallel,
        own: Option<Float<B>>,
        shape: Vec<usize>,
        like: &Float<B>,
    ) -> Vec<Float<B>> {
        let given = self.to.clone().filter_map(|part| Some((part, own.clone()?)));
        let parcel = SendRecv { given: given.collect(), from: self.from.clone(), shape, like: like.clone() };
        B::exchange(&*parts.links, parcel)
    }

    /// Attention over the longer rows; `own` is attention inside the part.
    pub(super) fn call(&self, own: &AttentionCall<B>) -> AttentionCall<B> {
        match &self.documents {
            Some(documents) => AttentionCall::new(documents.clone(), own.spec),
            None => own.clone(),
        }
    }

    /// The packed tensor of the longer rows: the halo's keys with queries of zero, then the part.
    pub(super) fn with_keys(&self, qkv: Float<B>) -> Float<B> {
        let Some(keys) = &self.keys else {
            return qkv;
        };
        let [batch, _, _, head_dim] = qkv.shape().dims();
        let queries = [batch, self.slots, self.spec.num_heads, head_dim];
        let queries = Tensor::<B, 4>::zeros(queries, (&B::float_device(&qkv), qkv.dtype()));
        let halo = Tensor::cat(vec![queries, tensor::<B, 4>(keys.clone())], 2);
        primitive(Tensor::cat(vec![halo, tensor::<B, 4>(qkv)], 1))
    }

    /// Ranks of the keys, with the halo's in front.
    pub(super) fn with_ranks(&self, own: Float<B>) -> Float<B> {
        let Some(ranks) = &self.ranks else {
            return own;
        };
        let [ranks, own] = [ranks.clone(), own].map(tensor::<B, 3>);
        primitive(Tensor::cat(vec![ranks, own], 2))
    }

    /// The gradients of this part's packed tensor and of DMA's biases of its keys, from `d_longer` and `d_delta`, those
    /// of the longer rows. Every part sends its halo's gradients back to the parts whose keys they are, and adds the
    /// received ones to its own.
    pub(super) fn own_gradients(
        &self,
        parts: &ContextParallel,
        d_longer: Float<B>,
        d_delta: Option<Float<B>>,
    ) -> (Float<B>, Option<Float<B>>) {
        let (slots, len, spec) = (self.slots, self.len, self.spec);
        let [batch, _, heads, head_dim] = d_longer.shape().dims();
        let (mut own, mut own_delta, mut d_halo) = (d_longer, d_delta, None);
        if slots > 0 {
            let longer = tensor::<B, 4>(own);
            own = primitive(longer.clone().narrow(1, slots, len));
            d_halo = Some(self.candidate_gradients(longer, own_delta.clone()));
            own_delta = own_delta.map(|d_delta| primitive(tensor::<B, 3>(d_delta).narrow(2, slots, len)));
        }
        let (d_keys, d_ranks) = d_halo.unzip();
        let d_keys = self.pass_back::<4>(parts, d_keys, (1, self.shape_of_keys(batch, head_dim)), &own);
        let d_ranks = own_delta.as_ref().and_then(|like| {
            let shape = vec![batch, spec.num_kv_heads, self.share];
            self.pass_back::<3>(parts, d_ranks.flatten(), (2, shape), like)
        });
        let Some(d_keys) = d_keys else {
            return (own, own_delta);
        };
        if let (Some(sent), Some(d_ranks), Some(own_delta)) = (&self.sent, d_ranks, &own_delta) {
            let (totals, halo) = ([own, own_delta.clone()], [primitive(d_keys), primitive(d_ranks)]);
            let [own, own_delta] = B::dma_halo_keys_backward(totals, sent.clone(), halo, spec);
            return (own, Some(own_delta));
        }
        let sent = s![.., len - self.share..len, heads - 2 * spec.num_kv_heads..heads, ..];
        let own = tensor::<B, 4>(own);
        let totals = own.clone().slice(sent) + d_keys;
        (primitive(own.slice_assign(sent, totals)), own_delta)
    }

    fn shape_of_keys(&self, batch: usize, head_dim: usize) -> Vec<usize> {
        vec![batch, self.share, 2 * self.spec.num_kv_heads, head_dim]
    }

    /// Gradients of all keys that earlier parts sent, and of DMA's biases of these keys, from the gradients of the
    /// longer rows; zero where a key got no slot.
    fn candidate_gradients(
        &self,
        d_longer: Tensor<B, 4>,
        d_delta: Option<Float<B>>,
    ) -> (Tensor<B, 4>, Option<Tensor<B, 3>>) {
        let (slots, spec) = (self.slots, self.spec);
        let all = self.from.len() * self.share;
        let d_keys = keys_of(d_longer.narrow(1, 0, slots), spec);
        let [batch, _, heads, head_dim] = d_keys.dims();
        let d_ranks = d_delta.map(|d_delta| tensor::<B, 3>(d_delta).narrow(2, 0, slots));
        let zeros = |tokens: usize| {
            let shape = [batch, tokens, heads, head_dim];
            Tensor::<B, 4>::zeros(shape, (&d_keys.device(), d_keys.dtype()))
        };
        match (&self.chosen, d_ranks) {
            (Some(chosen), Some(d_ranks)) => {
                let shape = [batch, spec.num_kv_heads, all];
                let ranks = Tensor::<B, 3>::zeros(shape, (&d_ranks.device(), d_ranks.dtype()));
                let [keys, ranks] = B::dma_halo_keys_backward(
                    [primitive(zeros(all)), primitive(ranks)],
                    chosen.clone(),
                    [primitive(d_keys), primitive(d_ranks)],
                    spec,
                );
                (tensor(keys), Some(tensor(ranks)))
            }
            // The slots hold the last candidates; the first ones are out of the window's reach.
            (_, d_ranks) if all > slots => (Tensor::cat(vec![zeros(all - slots), d_keys], 1), d_ranks),
            (_, d_ranks) => (d_keys, d_ranks),
        }
    }

    /// Sends each earlier part its share of `gradients`, which lie one after the other along `dim`, and returns the sum
    /// of those received from later parts.
    fn pass_back<const D: usize>(
        &self,
        parts: &ContextParallel,
        gradients: Option<Tensor<B, D>>,
        (dim, shape): (usize, Vec<usize>),
        like: &Float<B>,
    ) -> Option<Tensor<B, D>> {
        let given = self.from.clone().enumerate().filter_map(|(at, part)| {
            let own = gradients.clone()?.narrow(dim, at * self.share, self.share);
            Some((part, primitive(own)))
        });
        let parcel = SendRecv { given: given.collect(), from: self.to.clone(), shape, like: like.clone() };
        let found = B::exchange(&*parts.links, parcel).into_iter();
        let sums = found.map(|found| tensor::<B, D>(found).cast(DType::F32));
        Some(sums.reduce(|sum, more| sum + more)?.cast(like.dtype()))
    }
}

/// K and V of a packed tensor.
fn keys_of<B: Backend>(packed: Tensor<B, 4>, spec: AttentionSpec) -> Tensor<B, 4> {
    let (heads, kept) = (packed.dims()[2], 2 * spec.num_kv_heads);
    packed.narrow(2, heads - kept, kept)
}

/// Document bounds of rows of `all` candidates, of which the last `valid` are keys of one document. The empty slots
/// before them count as another document.
fn candidate_bounds<B: Backend>(valid: &[usize], all: usize, device: &B::Device) -> DocumentBounds<B> {
    let mut bounds = [Vec::new(), Vec::new()];
    for &valid in valid {
        let pads = all - valid;
        bounds[0].extend((0..all).map(|at| if at < pads { 0 } else { pads as i32 }));
        bounds[1].extend((0..all).map(|at| if at < pads { pads as i32 } else { all as i32 }));
    }
    let shape = [valid.len(), all];
    bounds.map(|bounds| ints::<B, 2>(bounds, shape, device).into_primitive())
}
