//! Snapshots of weights and moments, and checksums that show whether all ranks compute with the same weights.
use super::{EXP_AVG, EXP_AVG_SQ, Inner, NUM_UPDATES, Optimizer, UPDATES_BEFORE, cut, parameter_ids};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{Tensor, TensorData};
use serde::{Deserialize, Serialize};
use sieve_core::kinds::{ParamSpec, Part};
use sieve_core::recipe::OptimizerName;
use sieve_hf::NamedTensor;
use sieve_ops::{DeviceBackend, Snapshot, SnapshotReader, TrainBackend};

impl<B: TrainBackend> Optimizer<B> {
    /// Bytes of the tensors in a checkpoint, which all ranks write together: f32 weights, and moments once there are
    /// any; with `indexers_alone` only theirs.
    pub(crate) fn checkpoint_bytes(&self, indexers_alone: bool) -> u64 {
        let is_muon = self.settings.name == OptimizerName::Muon;
        let of = |spec: &ParamSpec| {
            let moments = match is_muon && spec.orthogonal_rows().is_some() {
                _ if self.num_updates == 0 || (indexers_alone && spec.part != Part::Indexer) => 0,
                true => 1,
                false => 2,
            };
            4 * (1 + moments) * spec.dims.iter().product::<usize>() as u64
        };
        self.parameters.iter().map(of).sum()
    }

    /// The weights and optimizer moments after the last update, to be read on any thread. Each rank of the first
    /// replica takes its shards; rank 0 also takes the tensors that are not sharded.
    ///
    /// The snapshot also holds weights for checksums, which show whether all ranks compute with the same weights: this
    /// rank's own shard, its copy of the shard of rank + `distance`, and every tensor that is not sharded. With ZeRO-3
    /// that rank has the same shard, if there are replicas.
    ///
    /// On a GPU with room for a second copy nothing is read now, and later updates write to copies. Without that room
    /// every tensor is read before this returns.
    ///
    /// # Panics
    /// The device reports an error of this or of earlier work.
    pub fn snapshot<M: Module<B>>(&self, module: &M, device: &B::Device, distance: usize) -> OptimizerSnapshot {
        let share = self.share;
        let parameters = parameter_ids(module).into_iter().filter_map(|parameter| {
            let (name, id, shape) = parameter;
            match share.range(&shape) {
                Some(range) => share.counts(true).then(|| (name, id, vec![range.len()])),
                None => share.counts(false).then_some((name, id, shape)),
            }
        });
        let parameters = parameters.collect::<Vec<_>>();
        let elements = parameters.iter().map(|(_, _, shape)| shape.iter().product::<usize>());
        // Two moments and the joined master, in f32, and a quarter more for training itself.
        let needed_bytes = 3 * 4 * elements.sum::<usize>() as u64;
        let has_room = B::InnerBackend::free_memory(device) > needed_bytes + needed_bytes / 4;
        let mut taker = Taker::<B> {
            optimizer: self,
            device,
            reader: (!has_room).then(SnapshotReader::default),
            distance,
            weights: Vec::new(),
            replica: Replica::default(),
        };
        module.visit(&mut taker);
        let mut moments = Vec::new();
        for (name, id, shape) in &parameters {
            if let Some(of) = self.moments.get(id) {
                let second = of.exp_avg_sq.as_ref().map(|values| (EXP_AVG_SQ, values));
                for (part, values) in [(EXP_AVG, &of.exp_avg)].into_iter().chain(second) {
                    let name = format!("{name}.{part}");
                    moments.push((name, shape.clone(), taker.take(values.clone())));
                }
            }
        }
        taker.wait();
        let late = parameter_ids(module).into_iter().filter_map(|(name, id, _)| {
            let updates_before = self.moments.get(&id)?.updates_before;
            (share.rank == 0 && updates_before > 0).then(|| (format!("{name}.{UPDATES_BEFORE}"), updates_before))
        });
        let updates = (share.rank == 0).then_some((NUM_UPDATES.to_owned(), self.num_updates));
        let counts = updates.into_iter().chain(late).collect();
        let names = parameters.into_iter();
        OptimizerSnapshot {
            counts,
            weights: names.zip(taker.weights).map(|((name, _, shape), values)| (name, shape, values)).collect(),
            moments,
            replica: taker.replica,
        }
    }
}

/// A copy of a rank's weights and optimizer moments between two updates.
#[derive(Debug)]
pub struct OptimizerSnapshot {
    /// Numbers of updates, by name: so far, and before the first one of a parameter that was added to a trained model.
    /// Empty on ranks other than 0.
    counts: Vec<(String, u64)>,
    weights: Vec<Held>,
    moments: Vec<Held>,
    replica: Replica,
}

/// Weights that one of several ranks computes with; [`ReplicaSums`] has a checksum of each field.
#[derive(Debug, Default)]
struct Replica {
    own: Vec<Snapshot>,
    /// Empty if the other rank's pieces are this one's too.
    other: Vec<Snapshot>,
    whole: Vec<Snapshot>,
}

/// Checksums of the weights that one of several ranks computes with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReplicaSums {
    /// Checksum of the pieces that this rank updates.
    own: u64,
    /// Checksum of the pieces that another rank updates, in this rank's copy of the weights.
    other: u64,
    /// Checksum of the weights that are not divided.
    whole: u64,
}

impl ReplicaSums {
    /// The first two ranks that compute with different weights, if there are any. `all` are the sums of each rank; the
    /// `other` sum of rank r is over its copy of the pieces of rank r + `distance`.
    pub(crate) fn differ(all: &[Self], distance: usize) -> Option<[usize; 2]> {
        let first = all.first()?;
        (0..all.len()).find_map(|rank| {
            let further = (rank + distance) % all.len();
            if all[rank].whole != first.whole {
                Some([0, rank])
            } else {
                (all[rank].other != all[further].own).then_some([further, rank])
            }
        })
    }
}

/// Name, shape and values of a tensor.
type Held = (String, Vec<usize>, Snapshot);

impl OptimizerSnapshot {
    /// Reads the snapshot as `(weights, state, sums)`: the f32 weights in module order; the number of updates and the
    /// moments; the checksums to compare with other ranks.
    ///
    /// # Errors
    /// The device's driver reports an error.
    pub fn read(self) -> Result<(Vec<NamedTensor>, Vec<NamedTensor>, ReplicaSums), String> {
        let mut reader = SnapshotReader::default();
        let mut sum = |held: Vec<Snapshot>| -> Result<u64, String> {
            held.into_iter().try_fold(0, |sum: u64, values| {
                let data = reader.read(values).map_err(|error| error.to_string())?;
                Ok(sieve_hf::checksum([&sum.to_le_bytes(), &data.bytes[..]]))
            })
        };
        let own = sum(self.replica.own)?;
        let other = if self.replica.other.is_empty() { own } else { sum(self.replica.other)? };
        let sums = ReplicaSums { own, other, whole: sum(self.replica.whole)? };
        let mut read = |held: Vec<Held>| -> Result<Vec<NamedTensor>, String> {
            let tensors = held.into_iter().map(|(name, shape, values)| {
                let mut data = reader.read(values).map_err(|error| error.to_string())?;
                data.shape = shape.into();
                Ok(NamedTensor { name, data })
            });
            tensors.collect()
        };
        let weights = read(self.weights)?;
        let count = |(name, count)| NamedTensor { name, data: TensorData::new(vec![count as i64], [1]) };
        let mut state = self.counts.into_iter().map(count).collect::<Vec<_>>();
        state.extend(read(self.moments)?);
        Ok((weights, state, sums))
    }
}

/// Takes snapshots of a model's weights, one parameter after another.
struct Taker<'a, B: TrainBackend> {
    optimizer: &'a Optimizer<B>,
    device: &'a B::Device,
    /// Reads every tensor at once; `None` if the device has room to keep the values.
    reader: Option<SnapshotReader>,
    distance: usize,
    weights: Vec<Snapshot>,
    replica: Replica,
}

impl<B: TrainBackend> Taker<'_, B> {
    /// Takes a snapshot of a tensor; without room on the device, copies the tensor to the host at once.
    fn take(&mut self, values: Inner<B>) -> Snapshot {
        let snapshot = B::InnerBackend::snapshot(values);
        if self.reader.is_none() {
            return snapshot;
        }
        self.wait();
        let reader = self.reader.as_mut().expect("it is not `None` here");
        let data = reader.read(snapshot);
        Snapshot::of_data(data.unwrap_or_else(|error| panic!("{error}")))
    }

    /// Waits until the device has done all queued work.
    fn wait(&self) {
        let done = B::InnerBackend::sync(self.device);
        done.unwrap_or_else(|error| panic!("{error:?}"));
    }
}

impl<B: TrainBackend> ModuleVisitor<B> for Taker<'_, B> {
    /// Takes one weight: for the checksums of several ranks, and its f32 master for this rank's part of the checkpoint.
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let Optimizer { share, masters, pieces, .. } = self.optimizer;
        let tensor = param.val();
        let cuts = share.pieces(&tensor.dims());
        let range = cuts.map(|cuts| share.own(cuts));
        let leaf = tensor.inner().into_primitive().tensor();
        if share.size > 1 {
            let further = share.group.place_of((share.rank + self.distance) % share.size);
            // A copy: the gather after the next update overwrites the weight in place while the snapshot is read.
            let copy = |part| B::InnerBackend::float_mul_scalar(part, 1f32.into());
            let copy_of = |range| copy(cut::<B>(leaf.clone(), range));
            match cuts {
                // With ZeRO-3 only the ranks of one place, one in each replica, have the same piece to compare.
                Some(_) if !share.keeps_whole => {
                    let piece = pieces.get(&param.id).filter(|_| share.group.num_replicas() > 1);
                    let piece = piece.map(|piece| self.take(piece.clone()));
                    self.replica.own.extend(piece);
                }
                Some(cuts) => {
                    let own = match pieces.get(&param.id) {
                        Some(piece) => piece.clone(),
                        None => copy_of(share.own(cuts)),
                    };
                    let own = self.take(own);
                    self.replica.own.push(own);
                    let other = self.take(copy_of(cuts.of(further)));
                    self.replica.other.push(other);
                }
                None => {
                    let whole = self.take(copy(leaf.clone()));
                    self.replica.whole.push(whole);
                }
            }
        }
        if !share.counts(range.is_some()) {
            // Rank 0 saves the tensors that are not divided, the first replica those that are.
            return;
        }
        let leaf = match (pieces.get(&param.id), range) {
            (Some(piece), _) => piece.clone(),
            // f32 weights have no `pieces` before their first update.
            (None, Some(range)) => cut::<B>(leaf, range),
            (None, None) => leaf,
        };
        let value = match masters.get(&param.id) {
            Some(rest) => B::InnerBackend::join_master(leaf, rest.clone()),
            None => leaf,
        };
        let snapshot = self.take(value);
        self.weights.push(snapshot);
    }
}
