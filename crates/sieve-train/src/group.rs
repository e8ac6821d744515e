//! One rank of a run of several processes: its share of the rows, and its collectives.
//!
//! In ZeRO-1 (arXiv:1910.02054) the gradients of a segment are reduce-scattered as soon as the last micro-batch has
//! added to them, while the backward pass continues. In ZeRO-2 they are reduce-scattered in every micro-batch, so that
//! a rank accumulates only its pieces; vectors, which are not divided, are all-reduced after the last micro-batch. The
//! gradient norm is over the pieces of all ranks. Each rank updates its pieces. The weights are gathered while later
//! segments are updated and while the next forward pass runs, which waits for each segment's weights before it reads
//! them. In ZeRO-3 a rank has only its pieces of the weights between their uses: see `weights.rs`.
//!
//! With `parallelism.shard_ranks` the ranks are several groups that divide all tensors alike. Gradients are summed over
//! all ranks, and weights are gathered within a group.
//!
//! Rank r reads the micro-batches r, r + N, ... of every step. Gradients are added up block by block: on the host
//! in the order of the ranks, on GPUs by NCCL on a stream beside Burn's. Before each step all ranks exchange their
//! step, mean loss, number of labels, and whether they were asked to stop.
mod health;
mod sharded_model;
mod step_times;
mod weights;

pub use health::Health;
pub use sharded_model::{PieceKeeper, ShardedWeights};
pub(crate) use weights::{WeightPieces, Weights, released};

use crate::collectives::{Collectives, Exchanged, HostCollectives, Pending, Primitive, Updated, bytes_of, floats_of};
use crate::gradients::Gradient;
use crate::segment::Segment;
use crate::segments::PassHooks;
use crate::share::Share;
use crate::{GradientBuffer, TrainError};
use burn::module::{ModuleMapper, Param, ParamId, list_param_ids};
use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{DType, FloatDType, Tensor, TensorMetadata, TensorPrimitive};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sieve_comm::{CommError, Mesh, Work};
use sieve_nn::Qwen3;
use sieve_ops::{RankGroup, TrainBackend};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use step_times::StepTimes;

/// The most pending sums: each holds the gradients of a segment in memory until it ends.
const MAX_SUMS: usize = 2;

/// The ranks that train one model together. Each computes with the whole model and takes every step.
pub struct Group<B: TrainBackend> {
    /// This rank's TCP connections to other ranks.
    mesh: Arc<Mesh>,
    collectives: Box<dyn Collectives<B>>,
    /// The ranks that share each row, connected from GPU to GPU; with `None` they exchange parts of rows over the mesh.
    rank_group: Option<Arc<dyn RankGroup>>,
    /// The first failed exchange among the ranks of a row, kept here because ops inside a pass cannot return errors.
    row_error: RowError,
    /// Whether the present micro-batch is its step's last.
    is_last: bool,
    /// `parallelism.zero_stage`. From 2 on, gradients are reduce-scattered in every micro-batch, else only in the last.
    zero_stage: usize,
    /// All-reduces or reduce-scatters of gradients that still run, oldest first.
    sums: VecDeque<Sums<B>>,
    /// All-gathers of weights that still run, by segment.
    leaves: BTreeMap<Segment, GatheredLeaves<B>>,
    /// With ZeRO-3, the segments whose weights are whole on this rank.
    held: BTreeSet<Segment>,
    step_times: RefCell<StepTimes>,
}

/// The first error that [`Neighbours`] met, shared between threads.
type RowError = Arc<Mutex<Option<CommError>>>;

/// A pending all-gather of a segment's weights.
struct GatheredLeaves<B: TrainBackend> {
    ids: Vec<ParamId>,
    /// The tensors that the gather writes into, if the model does not have them yet.
    wholes: Vec<Primitive<B>>,
    pending: Pending<B>,
}

/// A pending sum of a segment's gradients.
struct Sums<B: TrainBackend> {
    /// Parameter ids, and whether each gradient was reduce-scattered (`true`) or all-reduced.
    places: Vec<(ParamId, bool)>,
    pending: Pending<B>,
}

/// What the ranks exchange before a step: a rank's own values, or all ranks' values combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Agreement {
    /// Labels in the rows of the step.
    pub(crate) num_labels: usize,
    /// Tokens in the step's rows, without padding.
    pub(crate) num_tokens: usize,
    /// Whether some rank was asked to stop.
    pub(crate) stops: bool,
    /// Whether some rank's device may need more than a minute for the steps that it was given.
    pub(crate) is_far_behind: bool,
    /// Whether all ranks have written their files of a checkpoint.
    pub(crate) all_written: bool,
    /// Whether a checkpoint that failed is to be tried again.
    pub(crate) saves: bool,
}

impl Agreement {
    /// Combines the values of two ranks: sums counts, and joins each flag as its field says (some rank, or all).
    fn and(self, other: Self) -> Self {
        Self {
            num_labels: self.num_labels + other.num_labels,
            num_tokens: self.num_tokens + other.num_tokens,
            stops: self.stops | other.stops,
            is_far_behind: self.is_far_behind | other.is_far_behind,
            all_written: self.all_written & other.all_written,
            saves: self.saves | other.saves,
        }
    }
}

/// The message that each rank sends before a step.
#[derive(Serialize, Deserialize)]
struct StepMessage {
    /// Number of steps that the rank has taken.
    step: u64,
    /// Bits of the guard's f32 mean loss: JSON has no NaN.
    mean_loss_bits: u32,
    /// Time of this rank's last step, without its waits for other ranks.
    step_time: Duration,
    own: Agreement,
}

impl<B: TrainBackend> Group<B> {
    /// A group whose ranks reduce and gather tensors by `collectives`.
    pub fn new(mesh: Arc<Mesh>, collectives: Box<dyn Collectives<B>>) -> Self {
        Self {
            mesh,
            collectives,
            rank_group: None,
            row_error: RowError::default(),
            is_last: true,
            zero_stage: 1,
            sums: VecDeque::new(),
            leaves: BTreeMap::new(),
            held: BTreeSet::new(),
            step_times: RefCell::default(),
        }
    }

    /// A group that sums tensors on the CPU, in the order of the ranks. Each `shard_ranks` consecutive ranks divide the
    /// weights among them; 0: all ranks.
    pub fn on_host(mesh: Arc<Mesh>, shard_ranks: usize) -> Self {
        Self::new(mesh.clone(), Box::new(HostCollectives::new(mesh, shard_ranks)))
    }

    /// Exchanges the parts of a row by `links` instead of the mesh.
    pub fn with_rank_group(mut self, links: Arc<dyn RankGroup>) -> Self {
        self.rank_group = Some(links);
        self
    }

    pub(crate) fn share(&self) -> Share {
        let (world, group) = (self.mesh.world(), self.collectives.shard_group());
        let keeps_whole = self.zero_stage < 3 || group.size() == 1;
        Share { rank: world.rank, size: world.size, group, cuts: self.zero_stage > 0, keeps_whole }
    }

    /// Number of processes on a host, if a group of `parallelism.shard_ranks` crosses hosts; else `None`.
    pub(crate) fn crossed_hosts(&self) -> Option<usize> {
        let (on_host, group) = (self.mesh.world().local_size, self.collectives.shard_group());
        (group.num_replicas() > 1 && !on_host.is_multiple_of(group.size())).then_some(on_host)
    }

    /// The `degree` ranks that share each row, this one among them; `None` if no row is shared.
    pub(crate) fn rank_group(&self, degree: usize) -> Option<Arc<dyn RankGroup>> {
        if degree <= 1 {
            return None;
        }
        let over_mesh = || {
            Arc::new(Neighbours {
                mesh: self.mesh.clone(),
                part: self.share().rank % degree,
                degree,
                error: self.row_error.clone(),
            }) as Arc<dyn RankGroup>
        };
        Some(self.rank_group.clone().unwrap_or_else(over_mesh))
    }

    /// Sets the kind of work this rank begins, and with it the time within which it must report progress.
    pub(crate) fn set_work(&self, work: Work) {
        self.mesh.set_work(work);
        self.step_times.borrow_mut().set_work(work, self.mesh.waited());
    }

    /// A message that names the slowest rank, if its steps take a tenth longer than the median rank's; at most one a
    /// minute.
    pub(crate) fn slow_rank(&self) -> Option<String> {
        self.step_times.borrow_mut().slow_rank()
    }

    /// Reports progress to the other ranks.
    pub(crate) fn tick(&self) {
        self.mesh.tick();
    }

    /// Reports progress inside a pass.
    ///
    /// # Errors
    /// An exchange among the ranks of a row failed.
    fn tick_in_pass(&self) -> Result<(), TrainError> {
        self.mesh.tick();
        let error = self.row_error.lock().unwrap_or_else(PoisonError::into_inner).take();
        error.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Checks that no rank is known to be lost.
    ///
    /// # Errors
    /// A rank is lost.
    pub(crate) fn check(&self) -> Result<(), TrainError> {
        Ok(self.mesh.check()?)
    }

    /// Sets the ZeRO stage of later steps.
    pub(crate) fn set_zero_stage(&mut self, stage: usize) {
        self.zero_stage = stage;
    }

    /// Begins a micro-batch; `is_last` marks the last one of a step.
    pub(crate) fn begin(&mut self, is_last: bool, gradients: &mut GradientBuffer<B>) {
        self.is_last = is_last;
        gradients.begin(is_last || self.zero_stage > 1);
    }

    /// Starts summing the gradients of a segment over all ranks, if this micro-batch's are summed.
    fn start_sums(
        &mut self,
        model: &Qwen3<B>,
        segment: Segment,
        gradients: &mut GradientBuffer<B>,
    ) -> Result<(), TrainError> {
        if !(self.is_last || self.zero_stage > 1) {
            // The buffer adds up micro-batches on this rank until the last one.
            return Ok(());
        }
        let share = self.share();
        let mut places = Vec::new();
        let mut tensors = Vec::new();
        for id in segment.ids(model) {
            let Some(Gradient { values, is_piece }) = gradients.take(id) else {
                continue;
            };
            let pieces = share.pieces(&values.shape());
            if pieces.is_none() && !self.is_last {
                // Gradients that are not divided are all-reduced only after the last micro-batch.
                gradients.put(id, Gradient { values, is_piece });
                continue;
            }
            places.push((id, pieces.is_some()));
            tensors.push((f32_of::<B>(values), pieces));
        }
        let pending = self.collectives.sum(tensors)?;
        self.sums.push_back(Sums { places, pending });
        self.finish_sums_but(MAX_SUMS, gradients)
    }

    /// Waits for the sums of all gradients over the ranks.
    pub(crate) fn finish_sums(&mut self, gradients: &mut GradientBuffer<B>) -> Result<(), TrainError> {
        self.finish_sums_but(0, gradients)?;
        gradients.close_shards();
        Ok(())
    }

    /// Waits for the oldest sums until at most `num_pending` are left.
    fn finish_sums_but(&mut self, num_pending: usize, gradients: &mut GradientBuffer<B>) -> Result<(), TrainError> {
        let num_done = self.sums.len().saturating_sub(num_pending);
        for Sums { places, pending } in self.sums.drain(..num_done) {
            for ((id, is_piece), values) in places.into_iter().zip(pending()?) {
                if is_piece {
                    gradients.add_shard(id, values)
                } else {
                    gradients.put(id, Gradient { values, is_piece })
                }
            }
        }
        Ok(())
    }

    /// The loss summed over all ranks, and the norm of all their gradients, `[1]` each.
    pub(crate) fn totals(
        &self,
        loss: Tensor<B::InnerBackend, 1>,
        model: &Qwen3<B>,
        gradients: &GradientBuffer<B>,
        device: &B::Device,
    ) -> Result<[Tensor<B::InnerBackend, 1>; 2], TrainError> {
        let own = gradients.norm_of(&list_param_ids(model), device, self.share());
        let sums = self.sum_of(Tensor::cat(vec![loss, own.clone() * own], 0))?;
        let [loss, square] = [0, 1].map(|place| sums.clone().narrow(0, place, 1));
        Ok([loss, square.sqrt()])
    }

    /// The sum of a small tensor over all ranks.
    pub(crate) fn sum_of(&self, values: Tensor<B::InnerBackend, 1>) -> Result<Tensor<B::InnerBackend, 1>, TrainError> {
        let pending = self.collectives.sum(vec![(values.into_primitive().tensor(), None)])?;
        let sum = pending()?.pop().expect("as many as were given");
        Ok(Tensor::from_primitive(TensorPrimitive::Float(sum)))
    }

    /// Starts sending tensors to other ranks and receiving from them, and reports progress.
    pub(crate) fn exchange(&self, exchanged: Exchanged<B>) -> Result<Pending<B>, TrainError> {
        self.tick();
        self.collectives.exchange(exchanged)
    }

    /// Starts gathering the weights of a segment, after each rank has updated its pieces.
    pub(crate) fn gather_leaves(&mut self, segment: Segment, updated: Updated<B>) -> Result<(), TrainError> {
        let (ids, pieces): (Vec<_>, Vec<_>) = updated.into_iter().unzip();
        if !ids.is_empty() {
            let pending = self.collectives.gather(pieces)?;
            self.leaves.insert(segment, GatheredLeaves { ids, wholes: Vec::new(), pending });
        }
        Ok(())
    }

    /// Waits until the weights of all segments are gathered, and puts them into the model. Until then only a training
    /// pass may read the weights, because it waits segment by segment.
    pub(crate) fn finish_leaves(&mut self, model: &mut Option<Qwen3<B>>) -> Result<(), TrainError> {
        let Some(model) = model else {
            // While an update has moved the model out, no code reads its weights.
            return Ok(());
        };
        while let Some((&segment, _)) = self.leaves.first_key_value() {
            self.put_leaves(model, segment)?;
        }
        Ok(())
    }

    /// Waits for the weights of a segment, if they are being gathered, and puts them into the model.
    fn put_leaves(&mut self, model: &mut Qwen3<B>, segment: Segment) -> Result<(), TrainError> {
        let Some(leaves) = self.leaves.remove(&segment) else {
            return Ok(());
        };
        let leaves = leaves.finish()?;
        if !leaves.is_empty() {
            segment.replace(model, &mut Leaves(leaves));
        }
        Ok(())
    }

    /// Exchanges and combines what each rank knows before the step that follows `step`. The guard's `mean_loss` must be
    /// equal on all ranks.
    ///
    /// # Errors
    /// A rank is lost, or is at another step.
    pub(crate) fn agree(&self, step: u64, mean_loss: f32, own: Agreement) -> Result<Agreement, TrainError> {
        let message =
            StepMessage { step, mean_loss_bits: mean_loss.to_bits(), step_time: self.step_times.borrow().own, own };
        let messages = self.gather_data(&message)?;
        for (rank, theirs) in messages.iter().enumerate() {
            if theirs.step != step {
                return Err(apart(rank, format!("step {}", theirs.step), format!("step {step}")));
            }
            if theirs.mean_loss_bits != message.mean_loss_bits {
                let mean = |bits: u32| format!("a mean loss of {} at step {step}", f32::from_bits(bits));
                return Err(apart(rank, mean(theirs.mean_loss_bits), mean(message.mean_loss_bits)));
            }
            self.step_times.borrow_mut().add(rank, theirs.step_time);
        }
        let all = messages.into_iter().map(|message| message.own);
        Ok(all.reduce(Agreement::and).expect("this rank is one of them"))
    }

    /// Checks that a value, for example the fingerprint of the data, is equal on all ranks.
    ///
    /// # Errors
    /// A rank is lost, or has another value.
    pub(crate) fn check_equal(&self, text: &str) -> Result<(), TrainError> {
        for (rank, other) in self.gather_data(&text.to_owned())?.into_iter().enumerate() {
            if other != text {
                return Err(apart(rank, other, text.to_owned()));
            }
        }
        Ok(())
    }

    /// The data of every rank, by rank.
    ///
    /// # Errors
    /// A rank is lost.
    pub(crate) fn gather_data<T: Serialize + DeserializeOwned>(&self, own: &T) -> Result<Vec<T>, TrainError> {
        gather_data(&self.mesh, own)
    }
}

/// Gathers plain data of every rank as JSON, by rank.
fn gather_data<T: Serialize + DeserializeOwned>(mesh: &Mesh, own: &T) -> Result<Vec<T>, TrainError> {
    let all = mesh.gather(&serde_json::to_vec(own).expect("plain data serialises"))?;
    let all = all.iter().map(|bytes| serde_json::from_slice(bytes));
    Ok(all.collect::<Result<_, _>>().expect("ranks of one version"))
}

/// The collectives of a micro-batch: sums of gradients, and gathers of weights.
pub(crate) struct StepHooks<'a, B: TrainBackend>(pub(crate) Weights<'a, B>);

impl<B: TrainBackend> PassHooks<B> for StepHooks<'_, B> {
    /// Reports progress, and makes the segment's weights whole; the sums of earlier work end before the head.
    fn before_forward(
        &mut self,
        model: &mut Qwen3<B>,
        segment: Segment,
        gradients: &mut GradientBuffer<B>,
    ) -> Result<(), TrainError> {
        let group = &mut *self.0.group;
        group.tick_in_pass()?;
        if segment == Segment::Head {
            // The last sums of the previous micro-batch ran during this forward pass; they end before the loss, where
            // memory peaks.
            group.finish_sums_but(0, gradients)?;
        }
        self.0.before_forward(model, segment)
    }

    fn after_forward(&mut self, model: &mut Qwen3<B>, segment: Segment) -> Result<(), TrainError> {
        self.0.after_forward(model, segment);
        Ok(())
    }

    fn before_backward(&mut self, model: &mut Qwen3<B>, segment: Segment) -> Result<(), TrainError> {
        self.0.before_backward(model, segment)
    }

    fn after_backward(
        &mut self,
        model: &mut Qwen3<B>,
        segment: Segment,
        gradients: &mut GradientBuffer<B>,
    ) -> Result<(), TrainError> {
        self.0.group.tick_in_pass()?;
        self.0.group.start_sums(model, segment, gradients)?;
        self.0.after_backward(model, segment);
        Ok(())
    }
}

/// The ranks that share each row of a batch, which exchange values over TCP.
#[derive(Debug)]
struct Neighbours {
    mesh: Arc<Mesh>,
    /// This rank's part of the row, from 0.
    part: usize,
    /// Number of ranks that share a row.
    degree: usize,
    error: RowError,
}

impl RankGroup for Neighbours {
    fn part(&self) -> usize {
        self.part
    }

    fn num_parts(&self) -> usize {
        self.degree
    }

    /// Sends `values[part]` to each part of the row, and returns the `counts[part]` values that each part sent.
    fn exchange(&self, values: Vec<Vec<f32>>, counts: &[usize]) -> Vec<Vec<f32>> {
        let world = self.mesh.world();
        let first = world.rank - self.part;
        let mut bytes = vec![Vec::new(); world.size];
        for (bytes, values) in bytes[first..].iter_mut().zip(values) {
            *bytes = bytes_of(values);
        }
        // After an error the pass computes with zeros until its next segment, where `tick_in_pass` returns the error.
        let found = self.mesh.exchange(bytes).unwrap_or_else(|error| {
            let mut first_error = self.error.lock().unwrap_or_else(PoisonError::into_inner);
            first_error.get_or_insert(error);
            Vec::new()
        });
        let received = (first..).zip(counts).map(|(rank, &count)| {
            let mut values = floats_of(found.get(rank).map_or(&[][..], Vec::as_slice));
            values.resize(count, 0.0);
            values
        });
        received.collect()
    }
}

/// Writes gathered weights into the model.
struct Leaves<B: TrainBackend>(HashMap<ParamId, Primitive<B>>);

impl<B: TrainBackend> ModuleMapper<B> for Leaves<B> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let tensor = match self.0.remove(&id) {
            Some(leaf) => {
                let leaf = Tensor::from_primitive(TensorPrimitive::Float(leaf));
                Tensor::<B, D>::from_inner(leaf).require_grad()
            }
            None => tensor,
        };
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// Casts a bf16 gradient to f32, the dtype in which ranks reduce. Gradients that this micro-batch added to are f32; one
/// from an earlier micro-batch may be stored in bf16.
fn f32_of<B: TrainBackend>(values: Primitive<B>) -> Primitive<B> {
    match values.dtype() {
        DType::BF16 => B::InnerBackend::float_cast(values, FloatDType::F32),
        _ => values,
    }
}

/// The error to return when a rank's state differs from this rank's.
fn apart(rank: usize, theirs: String, ours: String) -> TrainError {
    CommError::OutOfStep { rank, theirs, ours }.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::Autodiff;
    use burn_flex::Flex;
    use sieve_comm::{ReservedPort, Timeouts, World};

    #[test]
    fn a_failed_exchange_in_a_row_is_returned_at_the_next_segment() {
        let port = ReservedPort::take().expect("a port");
        let join = |rank: usize| {
            let world = World::on_this_host(rank, 2, port.number());
            Arc::new(Mesh::join(world, "1", Timeouts::default(), |_| {}).expect("two ranks"))
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mesh = join(1);
                // Rank 0 calls another collective: an exchange among the ranks of a row.
                mesh.barrier().expect_err("rank 0 is elsewhere");
                mesh.leave();
            });
            let mesh = join(0);
            let group = Group::<Autodiff<Flex>>::on_host(mesh.clone(), 0);
            let links = group.rank_group(2).expect("two parts");
            group.tick_in_pass().expect("all is well");
            let values = links.exchange(vec![vec![1.0], vec![2.0]], &[1, 1]);
            assert_eq!(values, [[0.0], [0.0]]);
            let error = group.tick_in_pass().expect_err("a message of another kind").to_string();
            assert!(error.contains("rank 1") && error.contains("values for some ranks"), "{error}");
            mesh.fail(&error);
        });
    }
}
