//! Muon (arXiv:2502.16982): momentum, and updates that Newton-Schulz steps orthogonalise.
//!
//! A rank with pieces of the matrices has the momentum and the raw update of its pieces. The update of each projection is
//! gathered on one rank, which orthogonalises it and returns to every rank its part. Projections are taken in rounds of
//! one for each rank, those with the most work first, so that the ranks have about the same work in a round. While the
//! ranks orthogonalise the projections of a round, the updates of the next round are gathered. Nothing is summed over
//! ranks here, so the update has the bits of one process's for the same gradient.
use super::{Inner, Moments, Update, flat, parameter_ids};
use crate::TrainError;
use crate::collectives::{Exchanged, Pending};
use crate::gradients::Gradient;
use crate::group::Group;
use burn::module::ParamId;
use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{DType, Tensor, TensorMetadata, TensorPrimitive};
use sieve_comm::Pieces;
use sieve_nn::Qwen3;
use sieve_ops::TrainBackend;
use std::collections::HashMap;
use std::ops::Range;

/// Nesterov momentum `m = beta m + g` of the gradient g times `scale`: the next momentum, and the update `g + beta m` in
/// `dtype`, which is still to be orthogonalised. A skipped step leaves the momentum as it was.
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
fn scale_of([rows, columns]: [usize; 2]) -> f64 {
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
    /// The parts of the piece's projections, flat and in their order, each with its factor.
    parts: Vec<(Inner<B>, f64)>,
    /// Type of the momentum and the masters.
    dtype: DType,
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
struct Projection {
    id: ParamId,
    /// Its place among the projections of the matrix.
    index: usize,
    /// Its range of elements of the flattened matrix.
    range: Range<usize>,
    shape: [usize; 2],
    /// How the flattened matrix is divided.
    pieces: Pieces,
}

impl Projection {
    /// The elements of the flattened projection that a rank's piece of the matrix holds; often none.
    fn part(&self, rank: usize) -> Range<usize> {
        let (piece, whole) = (self.pieces.of(rank), &self.range);
        let start = piece.start.clamp(whole.start, whole.end);
        start - whole.start..piece.end.clamp(start, whole.end.max(start)) - whole.start
    }

    /// Multiplications of a Newton-Schulz step, but for a constant.
    fn work(&self) -> usize {
        let [rows, columns] = self.shape;
        rows * columns * rows.min(columns)
    }
}

impl<B: TrainBackend> Update<'_, B> {
    /// Takes the gradients of this rank's pieces of the matrices that Muon updates, and fills `orthogonal` with their
    /// updates. All ranks call it.
    ///
    /// # Errors
    /// A rank is lost.
    pub(super) fn orthogonalise_pieces(&mut self, model: &Qwen3<B>, group: &Group<B>) -> Result<(), TrainError> {
        let mut projections = self.divided_projections(model);
        // The sort is stable: all ranks have the same order.
        projections.sort_by_key(|projection| std::cmp::Reverse(projection.work()));
        let Some(first) = projections.first() else {
            return Ok(());
        };
        let dtype = self.dtype_of(first.id);
        let like =
            B::InnerBackend::float_zeros([1].into(), &B::InnerBackend::float_device(&self.grad_scale), dtype.into());
        let mut rounds = Rounds {
            rank: self.optimizer.share.rank,
            size: self.optimizer.share.size,
            updates: self.raw_updates(&projections, dtype),
            like,
            group,
        };
        let size = rounds.size;
        let mut parts: HashMap<ParamId, Vec<(usize, Inner<B>, f64)>> = HashMap::new();
        let mut put = |round: &[Projection], done: Vec<(usize, Inner<B>)>| {
            for (place, part) in done {
                let Projection { id, index, shape, .. } = round[place];
                parts.entry(id).or_default().push((index, part, scale_of(shape)));
            }
        };
        let all = projections.chunks(size).collect::<Vec<_>>();
        let mut gathering = Some(rounds.gather(all[0])?);
        let mut returning = None;
        for (idx, &round) in all.iter().enumerate() {
            let own = rounds.whole(round, gathering.take().expect("each round is gathered before it is worked on"))?;
            gathering = all.get(idx + 1).map(|next| rounds.gather(next)).transpose()?;
            let own = own.map(sieve_ops::orthogonalised);
            if let Some((round, returned)) = returning.take() {
                put(round, rounds.returned(round, returned)?);
            }
            returning = Some((round, rounds.give_back(round, own)?));
        }
        if let Some((round, returned)) = returning {
            put(round, rounds.returned(round, returned)?);
        }
        for (id, mut parts) in parts {
            parts.sort_by_key(|(index, ..)| *index);
            let parts = parts.into_iter().map(|(_, part, factor)| (part, factor)).collect();
            let dtype = self.optimizer.moments[&id].exp_avg.dtype();
            self.orthogonal.insert(id, Orthogonal { parts, dtype });
        }
        Ok(())
    }

    /// The projections of which this rank has a piece of the gradient, in module order.
    fn divided_projections(&self, model: &Qwen3<B>) -> Vec<Projection> {
        let mut found = Vec::new();
        for (_, id, shape) in parameter_ids(model) {
            let rows = self.optimizer.matrices.get(&id).filter(|_| self.gradients.has_piece(id));
            let (Some(rows), Some(pieces)) = (rows, self.optimizer.share.pieces(&shape)) else {
                continue;
            };
            let mut end = 0;
            for (index, &rows) in rows.iter().enumerate() {
                let start = end;
                end += rows * shape[1];
                found.push(Projection { id, index, range: start..end, shape: [rows, shape[1]], pieces });
            }
            assert_eq!(end, shape.iter().product::<usize>(), "projections of all rows");
        }
        found
    }

    /// The type in which a divided matrix is orthogonalised: the weights'.
    fn dtype_of(&self, id: ParamId) -> DType {
        self.optimizer.pieces.get(&id).map_or(DType::F32, |piece| piece.dtype())
    }

    /// Advances the momentum of this rank's pieces, and returns its part of each projection's raw update, flat. `None`
    /// where its piece holds nothing of the projection.
    fn raw_updates(&mut self, projections: &[Projection], dtype: DType) -> Vec<Option<Inner<B>>> {
        let rank = self.optimizer.share.rank;
        let mut by_id: HashMap<ParamId, Vec<usize>> = HashMap::new();
        for (place, projection) in projections.iter().enumerate() {
            by_id.entry(projection.id).or_default().push(place);
        }
        let mut parts = vec![None; projections.len()];
        for (id, places) in by_id {
            assert_eq!(self.dtype_of(id), dtype, "all matrices have one type");
            let Gradient { values, .. } = self.gradients.take(id).expect("it is among those with a gradient");
            let optimizer = &mut *self.optimizer;
            let moments = optimizer.moments.remove(&id);
            let moments = moments.unwrap_or_else(|| Moments {
                exp_avg: B::InnerBackend::float_zeros(
                    values.shape(),
                    &B::InnerBackend::float_device(&values),
                    DType::F32.into(),
                ),
                exp_avg_sq: None,
                updates_before: optimizer.num_updates.saturating_sub(1),
            });
            let beta = optimizer.settings.beta1;
            let (exp_avg, update) = momentum::<B, 1>(moments.exp_avg, values, self.grad_scale.clone(), beta, dtype);
            optimizer.moments.insert(id, Moments { exp_avg, ..moments });
            for place in places {
                let projection = &projections[place];
                let part = projection.part(rank);
                if part.is_empty() {
                    continue;
                }
                let start = projection.range.start + part.start - projection.pieces.of(rank).start;
                let part = flat::<B>(update.clone()).slice([start..start + part.len()]);
                // A copy: a slice would keep the whole update in memory.
                let part = part.into_primitive().tensor();
                parts[place] = Some(B::InnerBackend::float_mul_scalar(part, 1f32.into()));
            }
        }
        parts
    }
}

/// The exchanges of a rank. In each round the rank with number i orthogonalises the i-th projection.
struct Rounds<'a, B: TrainBackend> {
    rank: usize,
    size: usize,
    /// This rank's part of each projection's update, until it is sent.
    updates: Vec<Option<Inner<B>>>,
    like: Inner<B>,
    group: &'a Group<B>,
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
                match rank == self.rank {
                    // A copy: a slice would keep the whole projection in memory.
                    true => own = Some(B::InnerBackend::float_mul_scalar(part, 1f32.into())),
                    false => given.push((rank, part)),
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

    /// The projections of a round, by place, of which this rank holds a part, with the number of its elements.
    fn own_parts(&self, round: &[Projection]) -> impl Iterator<Item = (usize, usize)> {
        let counts = round.iter().map(|projection| projection.part(self.rank).len()).enumerate();
        counts.filter(|(_, count)| *count > 0)
    }

    fn exchange(&self, given: Vec<(usize, Inner<B>)>, wanted: Vec<(usize, usize)>) -> Result<Pending<B>, TrainError> {
        self.group.exchange(Exchanged { given, wanted, like: self.like.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_packed_projections_cover_them_and_the_pieces_once() {
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
