//! Muon (arXiv:2502.16982): momentum, and updates that Newton-Schulz steps orthogonalise.
//!
//! A rank with pieces of the matrices has the momentum and the raw update of its pieces. The update of each projection
//! is gathered on one rank, which orthogonalises it and returns to every rank its part. Projections are taken in rounds
//! of one for each rank, those with the most work first, so that the ranks have about the same work in a round. While
//! the ranks orthogonalise the projections of a round, the updates of the next round are gathered. Nothing is summed
//! over ranks here, so the update has the bits of one process's for the same gradient.
use crate::TrainError;
use crate::collectives::{Exchanged, Pending, Primitive as Inner, flat};
use burn::module::ParamId;
use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{DType, Tensor, TensorPrimitive};
use sieve_comm::Pieces;
use sieve_ops::TrainBackend;
use std::ops::Range;

/// Nesterov momentum `m = beta m + g` of the gradient g times `scale`: the next momentum, and the update `g + beta m`
/// in `dtype`, which is still to be orthogonalised. A skipped step leaves the momentum as it was.
pub(super) fn momentum<B: TrainBackend, const D: usize>(
    momentum: Inner<B>,
    gradient: Inner<B>,
    scale: Inner<B>,
    beta: f64,
    dtype: DType,
) -> (Inner<B>, Inner<B>) {
    let old = tensor::<B, D>(momentum);
    let (shape, master_dtype) = (old.dims(), old.dtype());
    let scale = tensor::<B, 1>(scale);
    let skipped = is_skipped::<B>(scale.clone());
    let gradient = tensor::<B, D>(gradient).cast(master_dtype) * scale.cast(master_dtype).reshape([1; D]);
    let next = old.clone() * beta + gradient.clone();
    let update = (gradient + next.clone() * beta).cast(dtype);
    let next = next.mask_where(skipped.reshape([1; D]).expand(shape), old);
    (next.into_primitive().tensor(), update.into_primitive().tensor())
}

/// `[1]`: 0 if the step is skipped, else 1.
pub(super) fn gate<B: TrainBackend>(scale: Inner<B>, dtype: DType) -> Inner<B> {
    let gate = is_skipped::<B>(tensor::<B, 1>(scale)).bool_not().float().cast(dtype);
    gate.into_primitive().tensor()
}

/// Orthogonalises the update of a matrix by its packed projections, whose numbers of rows are given. The root mean
/// square of the result is about the same as of AdamW's updates, so that one learning rate serves both.
///
/// # Shapes
/// - update: `[out, in]`
/// - returns: `[out, in]`, `dtype`
pub(super) fn orthogonal<B: TrainBackend>(update: Inner<B>, projections: &[usize], dtype: DType) -> Inner<B> {
    let update = tensor::<B, 2>(update);
    let [rows, columns] = update.dims();
    assert_eq!(projections.iter().sum::<usize>(), rows, "projections of all rows");
    let updates = update.split_with_sizes(projections.to_vec(), 0).into_iter();
    let updates = updates
        .zip(projections)
        .map(|(update, &rows)| sieve_ops::orthogonalised(update).cast(dtype) * scale_of([rows, columns]));
    Tensor::cat(updates.collect(), 0).into_primitive().tensor()
}

/// The factor of an orthogonalised update, `0.2 sqrt(max(out, in))` (arXiv:2502.16982, equation 4).
pub(super) fn scale_of([rows, columns]: [usize; 2]) -> f64 {
    0.2 * (rows.max(columns) as f64).sqrt()
}

/// Whether a step is skipped, `[1]`: its gradient scale is 0 or not finite.
fn is_skipped<B: TrainBackend>(scale: Tensor<B::InnerBackend, 1>) -> Tensor<B::InnerBackend, 1, burn::tensor::Bool> {
    scale.clone().equal_elem(0.0).bool_or(scale.is_finite().bool_not())
}

fn tensor<B: TrainBackend, const D: usize>(x: Inner<B>) -> Tensor<B::InnerBackend, D> {
    Tensor::from_primitive(TensorPrimitive::Float(x))
}

/// The orthogonalised update of this rank's piece of a matrix.
pub(super) struct Orthogonal<B: TrainBackend> {
    /// This rank's parts of the matrix's projections, flat and in order, each with the factor of [`scale_of`].
    pub(super) parts: Vec<(Inner<B>, f64)>,
    /// Type of the momentum and the masters.
    pub(super) dtype: DType,
}

impl<B: TrainBackend> Orthogonal<B> {
    /// The update of the piece, `[elements]`.
    pub(super) fn joined(self) -> Inner<B> {
        let parts = self.parts.into_iter();
        let parts = parts.map(|(part, factor)| tensor::<B, 1>(part).cast(self.dtype) * factor);
        Tensor::cat(parts.collect(), 0).into_primitive().tensor()
    }
}

/// A projection of a divided matrix, which one rank orthogonalises.
#[derive(Clone, Debug)]
pub(super) struct Projection {
    pub(super) id: ParamId,
    /// Its place among the projections of the matrix.
    pub(super) index: usize,
    /// Its range of elements of the flattened matrix.
    pub(super) range: Range<usize>,
    pub(super) shape: [usize; 2],
    /// How the flattened matrix is divided.
    pub(super) pieces: Pieces,
}

impl Projection {
    /// The elements of the flattened projection that a rank's piece of the matrix holds; often none.
    pub(super) fn part(&self, rank: usize) -> Range<usize> {
        let (piece, whole) = (self.pieces.of(rank), &self.range);
        let start = piece.start.clamp(whole.start, whole.end);
        start - whole.start..piece.end.clamp(start, whole.end.max(start)) - whole.start
    }

    /// Multiplications of a Newton-Schulz step, but for a constant.
    pub(super) fn work(&self) -> usize {
        let [rows, columns] = self.shape;
        rows * columns * rows.min(columns)
    }
}

/// Orthogonalises the updates of divided projections; this is rank `rank` of the `size` that divide them. `updates` has
/// this rank's part of each projection's raw update, `None` where it has none. Returns this rank's parts of the
/// results, each with its projection's index, without the factor of [`scale_of`]. `like` is a tensor of the updates'
/// type; `exchange` begins an exchange, and all ranks call it equally often.
///
/// # Errors
/// The first error of an exchange.
pub(super) fn orthogonalised_parts<B: TrainBackend>(
    projections: &[Projection],
    updates: Vec<Option<Inner<B>>>,
    like: Inner<B>,
    [rank, size]: [usize; 2],
    exchange: &Exchange<'_, B>,
) -> Result<Vec<(usize, Inner<B>)>, TrainError> {
    let mut rounds = Rounds { rank, size, updates, like, exchange };
    let all = projections.chunks(size).collect::<Vec<_>>();
    let mut parts = Vec::new();
    let mut put = |number: usize, done: Vec<(usize, Inner<B>)>| {
        parts.extend(done.into_iter().map(|(place, part)| (number * size + place, part)));
    };
    let mut gathering = all.first().map(|first| rounds.gather(first)).transpose()?;
    let mut returning = None;
    // While this rank works on a round, the next one is gathered and the one before is returned.
    for (number, &round) in all.iter().enumerate() {
        let own = rounds.whole(round, gathering.take().expect("each round is gathered before it is worked on"))?;
        gathering = all.get(number + 1).map(|next| rounds.gather(next)).transpose()?;
        let own = own.map(sieve_ops::orthogonalised);
        if let Some((before, returned)) = returning.take() {
            put(before, rounds.returned(all[before], returned)?);
        }
        returning = Some((number, rounds.give_back(round, own)?));
    }
    if let Some((before, returned)) = returning {
        put(before, rounds.returned(all[before], returned)?);
    }
    Ok(parts)
}

/// Begins an exchange among all ranks.
type Exchange<'a, B> = dyn Fn(Exchanged<B>) -> Result<Pending<B>, TrainError> + 'a;

/// The exchanges of a rank. In each round the rank with number i orthogonalises the i-th projection.
struct Rounds<'a, B: TrainBackend> {
    rank: usize,
    size: usize,
    /// This rank's part of each projection's update, until it is sent.
    updates: Vec<Option<Inner<B>>>,
    like: Inner<B>,
    exchange: &'a Exchange<'a, B>,
}

/// An exchange that has begun, and this rank's own part of it, which is not sent.
type Travelling<B> = (Option<Inner<B>>, Pending<B>);

impl<B: TrainBackend> Rounds<'_, B> {
    /// Starts gathering the projections of the next round, each on its rank.
    fn gather(&mut self, round: &[Projection]) -> Result<Travelling<B>, TrainError> {
        let (mut own, mut given) = (None, Vec::new());
        for (place, part) in self.updates.drain(..round.len()).enumerate() {
            match part {
                Some(part) if place == self.rank => own = Some(part),
                Some(part) => given.push((place, part)),
                None => {}
            }
        }
        let parts = round.get(self.rank).into_iter().flat_map(|projection| self.parts_of(projection));
        let wanted = parts.filter(|(rank, _)| *rank != self.rank).map(|(rank, part)| (rank, part.len()));
        Ok((own, self.exchange(given, wanted.collect())?))
    }

    /// The projection that this rank orthogonalises; `None` if it has none in this round.
    fn whole(
        &self,
        round: &[Projection],
        (own, pending): Travelling<B>,
    ) -> Result<Option<Tensor<B::InnerBackend, 2>>, TrainError> {
        let (mut own, mut received) = (own, pending()?.into_iter());
        let Some(projection) = round.get(self.rank) else {
            return Ok(None);
        };
        let parts = self.parts_of(projection).map(|(rank, _)| {
            let part = if rank == self.rank { own.take() } else { received.next() };
            tensor::<B, 1>(part.expect("each rank has given its part"))
        });
        Ok(Some(Tensor::cat(parts.collect(), 0).reshape(projection.shape)))
    }

    /// Starts returning to each rank its part of the orthogonalised projections.
    fn give_back(
        &self,
        round: &[Projection],
        whole: Option<Tensor<B::InnerBackend, 2>>,
    ) -> Result<Travelling<B>, TrainError> {
        let (mut own, mut given) = (None, Vec::new());
        if let (Some(whole), Some(projection)) = (whole, round.get(self.rank)) {
            let whole = flat::<B>(whole.into_primitive().tensor());
            for (rank, part) in self.parts_of(projection) {
                let part = whole.clone().slice([part]).into_primitive().tensor();
                if rank == self.rank {
                    // A copy: a slice would keep the whole projection in memory.
                    own = Some(B::InnerBackend::float_mul_scalar(part, 1f32.into()))
                } else {
                    given.push((rank, part))
                }
            }
        }
        let wanted = self.own_parts(round).filter(|(place, _)| *place != self.rank);
        let wanted = wanted.collect();
        Ok((own, self.exchange(given, wanted)?))
    }

    /// This rank's parts of the orthogonalised projections, by their places in the round.
    fn returned(
        &self,
        round: &[Projection],
        (own, pending): Travelling<B>,
    ) -> Result<Vec<(usize, Inner<B>)>, TrainError> {
        let (mut own, mut received) = (own, pending()?.into_iter());
        let parts = self.own_parts(round).map(|(place, _)| {
            let part = if place == self.rank { own.take() } else { received.next() };
            (place, part.expect("each rank has returned this one's part"))
        });
        Ok(parts.collect())
    }

    /// The ranks that hold a part of a projection, with that part.
    fn parts_of(&self, projection: &Projection) -> impl Iterator<Item = (usize, Range<usize>)> {
        let parts = (0..self.size).map(|rank| (rank, projection.part(rank)));
        parts.filter(|(_, part)| !part.is_empty())
    }

    /// (place in the round, number of elements) of each part of a projection that this rank holds.
    fn own_parts(&self, round: &[Projection]) -> impl Iterator<Item = (usize, usize)> {
        let counts = round.iter().map(|projection| projection.part(self.rank).len()).enumerate();
        counts.filter(|(_, count)| *count > 0)
    }

    fn exchange(&self, given: Vec<(usize, Inner<B>)>, wanted: Vec<(usize, usize)>) -> Result<Pending<B>, TrainError> {
        (self.exchange)(Exchanged { given, wanted, like: self.like.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_each_projection_and_each_piece_once() {
        // 33 rows, so that with most numbers of ranks a piece begins inside a projection.
        let rows = [128, 64, 64, 33];
        let columns = 96;
        for size in 2..=9 {
            let count = rows.iter().sum::<usize>() * columns;
            let pieces = Pieces::new(count, size).expect("long enough");
            let mut held = vec![0; size];
            let mut end = 0;
            for (index, rows) in rows.into_iter().enumerate() {
                let range = end..end + rows * columns;
                end = range.end;
                let projection = Projection { id: ParamId::new(), index, range, shape: [rows, columns], pieces };
                let mut next = 0;
                for (rank, held) in held.iter_mut().enumerate() {
                    let part = projection.part(rank);
                    *held += part.len();
                    if !part.is_empty() {
                        assert_eq!(part.start, next, "{size} ranks");
                        next = part.end;
                    }
                }
                assert_eq!(next, rows * columns, "{size} ranks");
            }
            assert!((0..size).all(|rank| held[rank] == pieces.of(rank).len()), "{size} ranks");
        }
    }
}
