//! The keys of earlier parts that a part's queries may see.
use super::attend::int_primitive;
use super::{ContextParallel, SendRecv};
use crate::tensors::{Float, Ints, primitive, tensor};
use crate::{AttentionCall, AttentionSpec, DeviceBackend, DocumentBounds};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorMetadata};
use sieve_core::DmaWindow;
use std::ops::Range;

/// Which keys before a part its queries may see.
#[derive(Clone, Copy, Debug)]
pub(super) enum Reach {
    /// The last ones.
    Recent(usize),
    /// Those that DMA keeps.
    Kept(DmaWindow),
}

impl Reach {
    /// As many keys at the most.
    fn keys(self) -> usize {
        match self {
            Self::Recent(keys) => keys,
            Self::Kept(window) => window.keep_window_size,
        }
    }

    /// The first part that has keys which part `part` may see, of parts of `len` tokens.
    fn first_part(self, part: usize, len: usize) -> usize {
        match self {
            Self::Recent(keys) => (part * len).saturating_sub(keys) / len,
            Self::Kept(_) => 0,
        }
    }
}

/// The halo: keys from earlier parts of a row. Every row and head has as many slots; a row with fewer keys leaves its
/// first slots empty.
#[derive(Clone, Debug)]
pub(super) struct Halo<B: Backend> {
    spec: AttentionSpec,
    /// Tokens of the part.
    len: usize,
    /// Slots of a row.
    pub(super) slots: usize,
    /// K, then V, `[batch, slots, 2 * num_kv_heads, head_dim]`; none without slots.
    pub(super) keys: Option<Float<B>>,
    /// Of DMA's keys, `[batch, num_kv_heads, slots]`.
    pub(super) ranks: Option<Float<B>>,
    /// Document bounds of the longer rows; none without slots.
    documents: Option<DocumentBounds<B>>,
    /// Keys of each row and head that a part gives.
    share: usize,
    /// Parts that give their keys to this one, and parts that get this one's.
    from: Range<usize>,
    to: Range<usize>,
    /// DMA's keys of this part that were given away; else they are the last ones.
    given: Option<Ints<B>>,
    /// Which keys of all earlier parts are kept; `None`: all.
    chosen: Option<Ints<B>>,
}

impl<B: DeviceBackend> Halo<B> {
    /// Sends later parts the keys that they may see, and receives those that this part may see. `qkv` is this part's
    /// packed tensor, `own` attention inside it, `rank` `[batch, num_kv_heads, len]` what DMA ranks its keys by.
    pub(super) fn gather(
        parts: &ContextParallel,
        qkv: &Float<B>,
        own: &AttentionCall<B>,
        reach: Reach,
        rank: Option<&Float<B>>,
    ) -> Self {
        let (documents, spec) = (&own.documents, own.spec);
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
            given: None,
            chosen: None,
        };
        let mut given = None;
        if !halo.to.is_empty() {
            given = Some(match (reach, rank) {
                (Reach::Kept(window), Some(rank)) => {
                    let kept = B::dma_last_kept(rank.clone(), documents, window, share);
                    halo.given = Some(kept.clone());
                    let [keys, ranks] = B::dma_border_keys(qkv.clone(), rank.clone(), kept, spec);
                    (keys, Some(ranks))
                }
                _ => {
                    let last = tensor::<B, 4>(qkv.clone()).narrow(1, len - share, share);
                    (primitive(keys_of(last, spec)), None)
                }
            });
        }
        let (keys, ranks) = given.unzip();
        let shape = halo.shape_of_keys(batch, head_dim);
        let keys = halo.give_on(parts, keys, shape, qkv);
        let ranks = rank.map(|rank| {
            let shape = vec![batch, kv_heads, share];
            halo.give_on(parts, ranks.flatten(), shape, rank)
        });
        if halo.from.is_empty() {
            return halo;
        }
        let keys = keys.into_iter().map(tensor::<B, 4>).collect();
        let mut keys = primitive(Tensor::cat(keys, 1));
        let mut ranks = ranks.map(|ranks| {
            let ranks = ranks.into_iter().map(tensor::<B, 3>).collect();
            primitive(Tensor::cat(ranks, 2))
        });
        let all = halo.from.len() * share;
        let valid = parts.keys_of_open_documents(halo.from.clone(), share);
        halo.slots = all.min(reach.keys());
        let device = B::float_device(qkv);
        if let (Reach::Kept(window), Some(candidates)) = (reach, &ranks)
            && all > halo.slots
        {
            let bounds = candidate_bounds::<B>(&valid, all, &device);
            let chosen = B::dma_last_kept(candidates.clone(), &bounds, window, halo.slots);
            let [best, best_ranks] = B::dma_border_keys(keys, candidates.clone(), chosen.clone(), spec);
            (keys, ranks, halo.chosen) = (best, Some(best_ranks), Some(chosen));
        } else if all > halo.slots {
            let last = tensor::<B, 4>(keys).narrow(1, all - halo.slots, halo.slots);
            keys = primitive(last);
        }
        let pads = valid.iter().map(|&keys| halo.slots - keys.min(halo.slots));
        let bounds = parts.bounds_behind(halo.slots, &pads.collect::<Vec<_>>());
        let shape = [batch, halo.slots + len];
        halo.documents = Some(bounds.map(|bounds| int_primitive::<B>(bounds, shape, &device)));
        halo.keys = Some(keys);
        halo.ranks = ranks;
        halo
    }

    /// Sends this part's tensor to the later parts, and returns the earlier parts' tensors.
    fn give_on(
        &self,
        parts: &ContextParallel,
        given: Option<Float<B>>,
        shape: Vec<usize>,
        like: &Float<B>,
    ) -> Vec<Float<B>> {
        let to = self.to.clone();
        let given = to.filter_map(|part| Some((part, given.clone()?)));
        let parcel = SendRecv {
            given: given.collect(),
            from: self.from.clone(),
            shape,
            like: like.clone(),
        };
        B::exchange(&*parts.links, parcel)
    }

    /// Attention over the longer rows, where the one inside the part is `own`.
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

    /// Ranks of the longer rows.
    pub(super) fn with_ranks(&self, own: Float<B>) -> Float<B> {
        let Some(ranks) = &self.ranks else {
            return own;
        };
        let [ranks, own] = [ranks.clone(), own].map(tensor::<B, 3>);
        primitive(Tensor::cat(vec![ranks, own], 2))
    }

    /// Gradients of this part's keys, from the gradients of the longer rows (packed qkv, and DMA's ranks): each part
    /// sends the gradients of its halo back to the parts that the keys are from.
    pub(super) fn give_back(
        &self,
        parts: &ContextParallel,
        d_longer: Float<B>,
        d_delta: Option<Float<B>>,
    ) -> (Float<B>, Option<Float<B>>) {
        let (slots, len, spec) = (self.slots, self.len, self.spec);
        let d_longer = tensor::<B, 4>(d_longer);
        let [batch, _, heads, head_dim] = d_longer.dims();
        let (own, own_delta) = match (slots, d_delta.clone()) {
            (0, own_delta) => (d_longer.clone(), own_delta),
            (_, d_delta) => {
                let own_delta = d_delta.map(|d_delta| {
                    let own: Tensor<B, 3> = tensor::<B, 3>(d_delta).narrow(2, slots, len);
                    primitive(own)
                });
                (d_longer.clone().narrow(1, slots, len), own_delta)
            }
        };
        let own = primitive(own);
        let of_border = (slots > 0).then(|| self.of_candidates(d_longer, d_delta));
        let (d_keys, d_ranks) = of_border.unzip();
        let d_keys = self.take_back::<4>(parts, d_keys, (1, self.shape_of_keys(batch, head_dim)), &own);
        let d_ranks = own_delta.as_ref().map(|like| {
            let shape = vec![batch, spec.num_kv_heads, self.share];
            self.take_back::<3>(parts, d_ranks.flatten(), (2, shape), like)
        });
        let Some(d_keys) = d_keys else {
            return (own, own_delta);
        };
        if let (Some(given), Some(Some(d_ranks)), Some(own_delta)) = (&self.given, d_ranks, &own_delta) {
            let sums = [own, own_delta.clone()];
            let gradients = [primitive(d_keys), primitive(d_ranks)];
            let [own, own_delta] = B::dma_border_keys_backward(sums, given.clone(), gradients, spec);
            return (own, Some(own_delta));
        }
        let range = [
            0..batch,
            len - self.share..len,
            heads - 2 * spec.num_kv_heads..heads,
            0..head_dim,
        ];
        let own = tensor::<B, 4>(own);
        let sums = own.clone().slice(range.clone()) + d_keys;
        (primitive(own.slice_assign(range, sums)), own_delta)
    }

    fn shape_of_keys(&self, batch: usize, head_dim: usize) -> Vec<usize> {
        vec![batch, self.share, 2 * self.spec.num_kv_heads, head_dim]
    }

    /// Gradients of all keys that earlier parts sent, and of DMA's ranks, cut from the gradients of the longer rows.
    fn of_candidates(&self, d_longer: Tensor<B, 4>, d_delta: Option<Float<B>>) -> (Tensor<B, 4>, Option<Tensor<B, 3>>) {
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
                let [keys, ranks] = B::dma_border_keys_backward(
                    [primitive(zeros(all)), primitive(ranks)],
                    chosen.clone(),
                    [primitive(d_keys), primitive(d_ranks)],
                    spec,
                );
                (tensor(keys), Some(tensor(ranks)))
            }
            // Of the first part's some were too early.
            (_, d_ranks) if all > slots => (Tensor::cat(vec![zeros(all - slots), d_keys], 1), d_ranks),
            (_, d_ranks) => (d_keys, d_ranks),
        }
    }

    /// Sends each earlier part its gradients, which are concatenated along `dim`, and sums those received from later
    /// parts.
    fn take_back<const D: usize>(
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
        let parcel = SendRecv {
            given: given.collect(),
            from: self.to.clone(),
            shape,
            like: like.clone(),
        };
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

/// Document bounds of rows of `all` candidates: the last `valid` are one document, padding before them is another.
fn candidate_bounds<B: Backend>(valid: &[usize], all: usize, device: &B::Device) -> DocumentBounds<B> {
    let mut bounds = [Vec::new(), Vec::new()];
    for &valid in valid {
        let pads = all - valid;
        bounds[0].extend((0..all).map(|at| if at < pads { 0 } else { pads as i32 }));
        bounds[1].extend((0..all).map(|at| if at < pads { pads as i32 } else { all as i32 }));
    }
    let shape = [valid.len(), all];
    bounds.map(|bounds| int_primitive::<B>(bounds, shape, device))
}
