//! All-to-all between tokens and heads: from a part of the row with all heads to whole rows of some heads, and back
//! (Ulysses, arXiv:2309.14509).
//!
//! Before the exchange a copy makes each process's slice contiguous. After it, a batch of one row needs no copy.
use super::{ContextParallel, RankGroup};
use crate::backend::value;
use crate::tensors::{primitive, tensor};
use crate::{DeviceBackend, Documents, SieveBackend};
use burn::tensor::{DType, Tensor, s};
use std::ops::Range;

/// Heads of one kind in a tensor that is exchanged: queries, keys, values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heads {
    /// Divided: each process gets an equal share of this many heads.
    Split(usize),
    /// Each process gets all of this many heads, as of a latent that all heads share.
    Shared(usize),
}

impl Heads {
    /// Number of heads of all processes together.
    fn all(self) -> usize {
        match self {
            Self::Split(heads) | Self::Shared(heads) => heads,
        }
    }

    /// Number of heads that one of `parts` processes computes.
    fn own(self, parts: usize) -> usize {
        match self {
            Self::Split(heads) => heads / parts,
            Self::Shared(heads) => heads,
        }
    }
}

impl ContextParallel {
    /// Exchanges tokens for heads: from this process's part of each row to whole rows of its heads. All processes of
    /// a row call it in the same order.
    ///
    /// # Shapes
    /// - x: `[batch, len, heads, width]`, the heads of `kinds` one after another
    /// - returns: `[batch, seq_len, own heads, width]`
    pub fn to_heads<B: SieveBackend>(&self, x: Tensor<B, 4>, kinds: &[Heads]) -> Tensor<B, 4> {
        let (links, kinds) = (self.links.clone(), kinds.to_vec());
        let rows = primitive(to_heads(&*links, value::<B, 4>(x.clone()), &kinds));
        let x = primitive(x);
        tensor(B::node([&x], rows, move |d_rows| {
            [primitive(to_tokens(&*links, tensor::<B::Inner, 4>(d_rows), &kinds))]
        }))
    }

    /// The inverse of [`to_heads`](Self::to_heads) for split heads.
    ///
    /// # Shapes
    /// - x: `[batch, seq_len, own heads, width]`
    /// - returns: `[batch, len, num_heads, width]`
    pub fn to_tokens<B: SieveBackend>(&self, x: Tensor<B, 4>, num_heads: usize) -> Tensor<B, 4> {
        let (links, kinds) = (self.links.clone(), [Heads::Split(num_heads)]);
        let part = primitive(to_tokens(&*links, value::<B, 4>(x.clone()), &kinds));
        let x = primitive(x);
        tensor(B::node([&x], part, move |d_part| [primitive(to_heads(&*links, tensor::<B::Inner, 4>(d_part), &kinds))]))
    }

    /// This process's share of `count` heads.
    ///
    /// Panics when they cannot be shared out equally.
    pub fn own_heads(&self, count: usize) -> Range<usize> {
        let (part, parts) = (self.links.part(), self.links.num_parts());
        assert_eq!(count % parts, 0, "{count} heads among {parts} processes");
        let own = count / parts;
        part * own..(part + 1) * own
    }

    /// Bounds and positions of the whole rows.
    pub fn whole_rows<B: SieveBackend>(&self, device: &B::Device) -> Documents<B> {
        let [start, end] = &*self.bounds;
        Documents::new(start, end, [self.batch, self.seq_len], device)
    }
}

/// Implements [`ContextParallel::to_heads`].
pub(super) fn to_heads<B: DeviceBackend>(links: &dyn RankGroup, x: Tensor<B, 4>, kinds: &[Heads]) -> Tensor<B, 4> {
    let (parts, [batch, len, _, width]) = (links.num_parts(), x.dims());
    let own = kinds.iter().map(|kind| kind.own(parts)).sum();
    let mut given = Tensor::empty([parts, batch, len, own, width], (&x.device(), x.dtype()));
    for share in shares(kinds, parts) {
        let heads = x.clone().slice(s![.., .., share.among_all, ..]).unsqueeze_dim::<5>(0);
        given = given.slice_assign(s![share.part..=share.part, .., .., share.among_own, ..], heads);
    }
    let found = tensor::<B, 5>(B::all_to_all(links, primitive(given)));
    let rows = match batch {
        1 => found,
        _ => found.swap_dims(0, 1),
    };
    rows.reshape([batch, parts * len, own, width])
}

/// The inverse of [`to_heads`] for split heads, and its gradient for all: shared heads are summed over the processes.
pub(super) fn to_tokens<B: DeviceBackend>(links: &dyn RankGroup, x: Tensor<B, 4>, kinds: &[Heads]) -> Tensor<B, 4> {
    let (parts, [batch, seq_len, own, width]) = (links.num_parts(), x.dims());
    let len = seq_len / parts;
    let given = match batch {
        1 => x.reshape([parts, batch, len, own, width]),
        _ => (x.reshape([batch, parts, len, own, width])).swap_dims(0, 1),
    };
    let found = tensor::<B, 5>(B::all_to_all(links, primitive(given)));
    let heads = kinds.iter().map(|kind| kind.all()).sum();
    let mut rows = Tensor::empty([batch, len, heads, width], (&found.device(), found.dtype()));
    for share in shares(kinds, parts) {
        let found = found.clone().slice(s![.., .., .., share.among_own, ..]);
        let heads = match (share.is_shared, share.part) {
            (false, part) => found.narrow(0, part, 1),
            (true, 0) => sum_of_parts(found),
            // The processes' copies of shared heads were summed with the first one's.
            (true, _) => continue,
        };
        rows = rows.slice_assign(s![.., .., share.among_all, ..], heads.squeeze_dim::<4>(0));
    }
    rows
}

/// The sum over the first dimension, in f32 and in the order of the parts.
fn sum_of_parts<B: DeviceBackend>(x: Tensor<B, 5>) -> Tensor<B, 5> {
    match x.dtype() {
        dtype @ (DType::BF16 | DType::F16) => x.cast(DType::F32).sum_dim(0).cast(dtype),
        _ => x.sum_dim(0),
    }
}

/// The heads of one kind that the process of one part holds after the exchange.
struct Share {
    part: usize,
    /// Range of these heads among the heads of all processes.
    among_all: Range<usize>,
    /// Range of these heads among the heads of this process.
    among_own: Range<usize>,
    is_shared: bool,
}

/// The shares of all parts in the heads of each kind.
fn shares(kinds: &[Heads], parts: usize) -> Vec<Share> {
    let (mut first, mut first_own, mut shares) = (0, 0, Vec::new());
    for &kind in kinds {
        let own = kind.own(parts);
        let is_shared = matches!(kind, Heads::Shared(_));
        shares.extend((0..parts).map(|part| {
            let from = if is_shared { first } else { first + part * own };
            Share { part, among_all: from..from + own, among_own: first_own..first_own + own, is_shared }
        }));
        first += kind.all();
        first_own += own;
    }
    shares
}
