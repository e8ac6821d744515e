//! Tokens for heads: from a part of all heads to whole rows of some heads, and back.
use super::RowLinks;
use super::attend::{from_values, values_of};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

/// From `[batch, len, heads, width]` of this part to whole rows of every rank's share of the heads. `kinds` says how
/// many heads follow one another that are shared out alike: queries, keys, values.
pub(super) fn to_heads<B: Backend>(
    links: &dyn RowLinks,
    x: Tensor<B, 4>,
    kinds: &[usize],
) -> Tensor<B, 4> {
    let (parts, [batch, len, heads, width]) = (links.num_parts(), x.dims());
    let device = x.device();
    let values = (0..parts).map(|part| {
        let mut first = 0;
        let heads = kinds.iter().map(|&heads| {
            let own = heads / parts;
            let some = x.clone().narrow(2, first + part * own, own);
            first += heads;
            some
        });
        values_of(Tensor::cat(heads.collect(), 2))
    });
    let shape = [batch, len, heads / parts, width];
    let counts = vec![shape.iter().product(); parts];
    let values = links.exchange(values.collect(), &counts).into_iter();
    let tokens = values.map(|values| from_values(values, shape, &device));
    Tensor::cat(tokens.collect(), 1)
}

/// The inverse of [`to_heads`].
pub(super) fn to_tokens<B: Backend>(
    links: &dyn RowLinks,
    x: Tensor<B, 4>,
    kinds: &[usize],
) -> Tensor<B, 4> {
    let (parts, [batch, seq_len, own_heads, width]) = (links.num_parts(), x.dims());
    let device = x.device();
    let len = seq_len / parts;
    let values = (0..parts).map(|part| values_of(x.clone().narrow(1, part * len, len)));
    let shape = [batch, len, own_heads, width];
    let counts = vec![shape.iter().product(); parts];
    let values = links.exchange(values.collect(), &counts).into_iter();
    let found = values.map(|values| from_values::<B, 4>(values, shape, &device));
    let found = found.collect::<Vec<_>>();
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
