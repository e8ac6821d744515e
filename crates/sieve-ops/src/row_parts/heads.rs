//! Tokens for heads: from a part of all heads to whole rows of some heads, and back.
//!
//! Both ways a copy puts what goes to one rank, or comes from it, in one piece; with one row a micro-batch the other
//! side of the exchange is in order as it is.
use super::RowLinks;
use crate::DeviceBackend;
use crate::tensors::{primitive, tensor};
use burn::tensor::{Tensor, s};
use std::ops::Range;

/// From `[batch, len, heads, width]` of this part to whole rows of every rank's share of the heads. `kinds` says how
/// many heads follow one another that are shared out alike: queries, keys, values.
pub(super) fn to_heads<B: DeviceBackend>(links: &dyn RowLinks, x: Tensor<B, 4>, kinds: &[usize]) -> Tensor<B, 4> {
    let (parts, [batch, len, heads, width]) = (links.num_parts(), x.dims());
    let own = heads / parts;
    let mut given = Tensor::empty([parts, batch, len, own, width], (&x.device(), x.dtype()));
    for Stretch { part, all, of_part } in stretches(kinds, parts) {
        let some = x.clone().slice(s![.., .., all, ..]).unsqueeze_dim::<5>(0);
        given = given.slice_assign(s![part..=part, .., .., of_part, ..], some);
    }
    let found = tensor::<B, 5>(B::all_to_all(links, primitive(given)));
    let rows = match batch {
        1 => found,
        _ => found.swap_dims(0, 1),
    };
    rows.reshape([batch, parts * len, own, width])
}

/// The inverse of [`to_heads`].
pub(super) fn to_tokens<B: DeviceBackend>(links: &dyn RowLinks, x: Tensor<B, 4>, kinds: &[usize]) -> Tensor<B, 4> {
    let (parts, [batch, seq_len, own, width]) = (links.num_parts(), x.dims());
    let len = seq_len / parts;
    let given = match batch {
        1 => x.reshape([parts, batch, len, own, width]),
        _ => (x.reshape([batch, parts, len, own, width])).swap_dims(0, 1),
    };
    let found = tensor::<B, 5>(B::all_to_all(links, primitive(given)));
    let mut rows = Tensor::empty([batch, len, own * parts, width], (&found.device(), found.dtype()));
    for Stretch { part, all, of_part } in stretches(kinds, parts) {
        let some = found.clone().slice(s![part..=part, .., .., of_part, ..]);
        rows = rows.slice_assign(s![.., .., all, ..], some.squeeze_dim::<4>(0));
    }
    rows
}

/// Heads of one kind that are one rank's.
struct Stretch {
    part: usize,
    /// Their place among all heads, and among the rank's heads.
    all: Range<usize>,
    of_part: Range<usize>,
}

fn stretches(kinds: &[usize], parts: usize) -> Vec<Stretch> {
    let (mut first, mut stretches) = (0, Vec::new());
    for heads in kinds {
        let own = heads / parts;
        stretches.extend((0..parts).map(|part| {
            let (from, of_part) = (first + part * own, first / parts);
            Stretch {
                part,
                all: from..from + own,
                of_part: of_part..of_part + own,
            }
        }));
        first += heads;
    }
    stretches
}
