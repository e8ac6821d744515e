//! Tokens for heads: from a part of all heads to whole rows of some heads, and back.
use super::RowLinks;
use super::backend::Parcel;
use crate::DeviceBackend;
use crate::tensors::{primitive, tensor};
use burn::tensor::Tensor;

/// From `[batch, len, heads, width]` of this part to whole rows of every rank's share of the heads. `kinds` says how
/// many heads follow one another that are shared out alike: queries, keys, values.
pub(super) fn to_heads<B: DeviceBackend>(
    links: &dyn RowLinks,
    x: Tensor<B, 4>,
    kinds: &[usize],
) -> Tensor<B, 4> {
    let (parts, [batch, len, heads, width]) = (links.num_parts(), x.dims());
    let of_part = |part: usize| {
        let mut first = 0;
        let heads = kinds.iter().map(|&heads| {
            let own = heads / parts;
            let some = x.clone().narrow(2, first + part * own, own);
            first += heads;
            some
        });
        Tensor::cat(heads.collect(), 2)
    };
    let given = (0..parts).map(of_part).collect();
    Tensor::cat(
        all_to_all(links, given, [batch, len, heads / parts, width]),
        1,
    )
}

/// The inverse of [`to_heads`].
pub(super) fn to_tokens<B: DeviceBackend>(
    links: &dyn RowLinks,
    x: Tensor<B, 4>,
    kinds: &[usize],
) -> Tensor<B, 4> {
    let (parts, [batch, seq_len, own_heads, width]) = (links.num_parts(), x.dims());
    let len = seq_len / parts;
    let given = (0..parts).map(|part| x.clone().narrow(1, part * len, len));
    let found = all_to_all(links, given.collect(), [batch, len, own_heads, width]);
    let mut first = 0;
    let kinds = kinds.iter().flat_map(|&heads| {
        let own = heads / parts;
        let some = found
            .iter()
            .map(|found| found.clone().narrow(2, first, own));
        let some = some.collect::<Vec<_>>();
        first += own;
        some
    });
    Tensor::cat(kinds.collect(), 2)
}

/// Gives each part's rank one of the tensors, and returns what each gives to this one.
fn all_to_all<B: DeviceBackend>(
    links: &dyn RowLinks,
    given: Vec<Tensor<B, 4>>,
    shape: [usize; 4],
) -> Vec<Tensor<B, 4>> {
    let given = given.into_iter().map(primitive).enumerate();
    let given = given.collect::<Vec<_>>();
    let parcel = Parcel {
        like: given[links.part()].1.clone(),
        given,
        from: 0..links.num_parts(),
        shape: shape.to_vec(),
    };
    B::exchange(links, parcel).into_iter().map(tensor).collect()
}
