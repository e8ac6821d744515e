//! One rank of a run of several processes: which rows it reads, and its collectives.
//!
//! A step in ZeRO-1 (arXiv:1910.02054): the gradients of a segment are reduce-scattered as soon as the last micro-batch
//! has added to them, overlapping the remaining backward pass. In ZeRO-2 this happens in every micro-batch, and each
//! rank accumulates its pieces only; vectors, which are not cut, wait for the last micro-batch. Gradient norms are over
//! all pieces. Each rank updates its pieces; the weights are gathered while later segments are updated and while the
//! next forward pass runs, which waits for each segment's weights before it reads them.
mod health;
mod step_times;

pub use health::{DeviceState, Health};

use crate::collectives::{Collectives, HostCollectives, Pending, Primitive};
use crate::gradients::Gradient;
use crate::optimizer::Updated;
use crate::segment::Segment;
use crate::segments::PassHooks;
use crate::{GradientBuffer, TrainError};
use burn::module::{ModuleMapper, Param, ParamId};
use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{DType, FloatDType, Tensor, TensorMetadata, TensorPrimitive};
use sieve_comm::{CommError, Mesh, Pieces, Work};
use sieve_nn::Qwen3;
use sieve_ops::{RankGroup, TrainBackend};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use step_times::StepTimes;

/// Pending sums at most: each holds the gradients of a segment until it ends.
const MAX_SUMS: usize = 2;

/// The ranks that train one model together. Each holds the whole model and takes every step.
pub struct Group<B: TrainBackend> {
    mesh: Arc<Mesh>,
    collectives: Box<dyn Collectives<B>>,
    /// The ranks that share each row, where not the mesh connects them.
    rank_group: Option<Arc<dyn RankGroup>>,
    /// The first failed exchange among the ranks of a row: ops inside a pass cannot return errors.
    row_error: RowError,
    /// Whether the present micro-batch is its step's last.
    is_last: bool,
    /// `parallelism.zero_stage`. With 2, gradients are reduce-scattered in every micro-batch, not in the last alone.
    zero_stage: usize,
    /// Pending sums of gradients, oldest first.
    sums: VecDeque<Sums<B>>,
    /// Pending gathers of updated weights.
    leaves: BTreeMap<Segment, (Vec<ParamId>, Pending<B>)>,
    step_times: RefCell<StepTimes>,
}

/// The first error of [`Neighbours`].
type RowError = Arc<Mutex<Option<CommError>>>;

/// A pending sum of a segment's gradients.
struct Sums<B: TrainBackend> {
    /// Parameter ids, and whether each gradient was reduce-scattered (`true`) or all-reduced.
    places: Vec<(ParamId, bool)>,
    pending: Pending<B>,
}

/// Which of how many ranks this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    /// Whether parameters are cut: not with `parallelism.zero_stage = 0`.
    pub(crate) cuts: bool,
}

impl Share {
    /// A run in one process.
    pub(crate) const ALL: Self = Self {
        rank: 0,
        size: 1,
        cuts: true,
    };

    /// Which of how many shares of the rows, where `degree` ranks one after another share each row.
    pub(crate) fn of_rows(&self, degree: usize) -> Self {
        Self {
            rank: self.rank / degree,
            size: (self.size / degree).max(1),
            ..*self
        }
    }

    /// How a parameter of this shape is cut; `None` for vectors and small matrices, which every rank updates whole.
    pub(crate) fn pieces(&self, shape: &[usize]) -> Option<Pieces> {
        let count = shape.iter().product();
        (self.cuts && shape.len() > 1).then(|| Pieces::new(count, self.size))?
    }

    /// This rank's piece of such a parameter.
    pub(crate) fn range(&self, shape: &[usize]) -> Option<Range<usize>> {
        Some(self.pieces(shape)?.of(self.rank))
    }
}

/// What all ranks know of a step before they take it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Agreement {
    /// Labels of all ranks' rows.
    pub(crate) num_labels: usize,
    /// Tokens of all ranks' rows besides padding.
    pub(crate) num_tokens: usize,
    /// Whether some rank was asked to stop.
    pub(crate) stops: bool,
    /// Whether some rank's device may be far behind.
    pub(crate) is_far_behind: bool,
    /// Whether all ranks have written their files of a checkpoint.
    pub(crate) all_written: bool,
    /// Whether a checkpoint that failed is to be tried again.
    pub(crate) saves: bool,
}

impl<B: TrainBackend> Group<B> {
    /// Ranks that work together on their tensors by `collectives`.
    pub fn new(mesh: Arc<Mesh>, collectives: Box<dyn Collectives<B>>) -> Self {
        Self {
            mesh,
            collectives,
            rank_group: None,
            row_error: RowError::default(),
            is_last: false,
            zero_stage: 1,
            sums: VecDeque::new(),
            leaves: BTreeMap::new(),
            step_times: RefCell::default(),
        }
    }

    /// Ranks whose tensors are added up on the host, in the order of the ranks.
    pub fn on_host(mesh: Arc<Mesh>) -> Self {
        Self::new(mesh.clone(), Box::new(HostCollectives(mesh)))
    }

    /// The same, where the parts of a row travel by `links`.
    pub fn with_rank_group(mut self, links: Arc<dyn RankGroup>) -> Self {
        self.rank_group = Some(links);
        self
    }

    pub(crate) fn share(&self) -> Share {
        let world = self.mesh.world();
        Share {
            rank: world.rank,
            size: world.size,
            cuts: self.zero_stage > 0,
        }
    }

    /// The ranks that share each row with this one, where `degree` do.
    pub(crate) fn rank_group(&self, degree: usize) -> Option<Arc<dyn RankGroup>> {
        let over_hosts = || {
            Arc::new(Neighbours {
                mesh: self.mesh.clone(),
                part: self.share().rank % degree,
                degree,
                error: self.row_error.clone(),
            }) as Arc<dyn RankGroup>
        };
        let links = self.rank_group.clone();
        (degree > 1).then(|| links.unwrap_or_else(over_hosts))
    }

    /// Sets the kind of work this rank begins, and with it the time within which it must report progress.
    pub(crate) fn set_work(&self, work: Work) {
        self.mesh.set_work(work);
        self.step_times.borrow_mut().set_work(work, self.mesh.waited());
    }

    /// The rank whose host takes longest for a step, where that is a tenth more than usual: in words, and now and then.
    pub(crate) fn slow_rank(&self) -> Option<String> {
        self.step_times.borrow_mut().slow_rank()
    }

    /// Reports progress.
    pub(crate) fn tick(&self) {
        self.mesh.tick();
    }

    /// Whether all ranks are well, as far as this one knows.
    ///
    /// # Errors
    /// A rank is lost.
    pub(crate) fn check(&self) -> Result<(), TrainError> {
        Ok(self.mesh.check()?)
    }

    /// The ZeRO stage of the steps that follow.
    pub(crate) fn set_zero_stage(&mut self, stage: usize) {
        self.zero_stage = stage;
    }

    /// A micro-batch begins, a step's last or not.
    pub(crate) fn begin(&mut self, is_last: bool, gradients: &mut GradientBuffer<B>) {
        self.is_last = is_last;
        gradients.begin(is_last || self.zero_stage > 1);
    }

    /// Waits for the sums of all gradients.
    pub(crate) fn finish_sums(&mut self, gradients: &mut GradientBuffer<B>) -> Result<(), TrainError> {
        self.finish_sums_but(0, gradients)?;
        gradients.close_shards();
        Ok(())
    }

    fn finish_sums_but(&mut self, under_way: usize, gradients: &mut GradientBuffer<B>) -> Result<(), TrainError> {
        while self.sums.len() > under_way {
            let Some(Sums { places, pending }) = self.sums.pop_front() else {
                break;
            };
            for ((id, is_piece), values) in places.into_iter().zip(pending()?) {
                match is_piece {
                    true => gradients.add_shard(id, values),
                    false => gradients.put(id, Gradient { values, is_piece }),
                }
            }
        }
        Ok(())
    }

    /// The loss of all ranks, and the norm of their gradients of `model`, `[1]` each.
    pub(crate) fn totals(
        &self,
        loss: Tensor<B::InnerBackend, 1>,
        model: &Qwen3<B>,
        gradients: &GradientBuffer<B>,
        device: &B::Device,
    ) -> Result<[Tensor<B::InnerBackend, 1>; 2], TrainError> {
        // What all ranks hold is counted by rank 0.
        let own = gradients.norm_of(model, device, self.share().rank == 0);
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

    /// Starts gathering the weights of a segment, of which each rank has updated its pieces.
    pub(crate) fn gather_leaves(&mut self, segment: Segment, updated: Updated<B>) -> Result<(), TrainError> {
        let (ids, pieces): (Vec<_>, Vec<_>) = updated.into_iter().unzip();
        if !ids.is_empty() {
            let pending = self.collectives.gather(pieces)?;
            self.leaves.insert(segment, (ids, pending));
        }
        Ok(())
    }

    /// Waits until the weights of all segments are gathered. Before, only a forward pass may read them.
    pub(crate) fn finish_leaves(&mut self, model: &mut Option<Qwen3<B>>) -> Result<(), TrainError> {
        let under_way = self.leaves.keys().copied().collect::<Vec<_>>();
        let Some(model) = model else {
            return Ok(());
        };
        let mut segments = under_way.into_iter();
        segments.try_for_each(|segment| self.put_leaves(model, segment))
    }

    /// Waits for the weights of a segment, if they are being gathered.
    fn put_leaves(&mut self, model: &mut Qwen3<B>, segment: Segment) -> Result<(), TrainError> {
        let Some((ids, pending)) = self.leaves.remove(&segment) else {
            return Ok(());
        };
        let leaves = pending()?;
        if !leaves.is_empty() {
            let mut next = Leaves(ids.into_iter().zip(leaves).collect());
            *model = segment.map(model.clone(), &mut next);
        }
        Ok(())
    }

    /// Exchanges what each rank knows before the step after `step`; `mean_loss` is the guard's and must be equal on all
    /// ranks.
    ///
    /// # Errors
    /// A rank is lost, or is at another step.
    pub(crate) fn agree(&self, step: u64, mean_loss: f32, own: Agreement) -> Result<Agreement, TrainError> {
        let [labels, tokens] = [own.num_labels, own.num_tokens].map(|count| count as u64);
        let flags = [own.stops, own.all_written, own.is_far_behind, own.saves].map(u64::from);
        let flags = flags[0] | flags[1] << 1 | flags[2] << 2 | flags[3] << 3;
        let own_time = self.step_times.borrow().own.as_nanos() as u64;
        let words = [step, u64::from(mean_loss.to_bits()), labels, flags, own_time, tokens];
        let all = self.gather(&words.map(u64::to_le_bytes).concat())?;
        let mut sum = Agreement {
            num_labels: 0,
            num_tokens: 0,
            stops: false,
            is_far_behind: false,
            all_written: true,
            saves: false,
        };
        for (rank, bytes) in all.iter().enumerate() {
            let word = |place: usize| {
                let bytes = bytes.get(8 * place..8 * place + 8);
                bytes.map_or(0, |bytes| u64::from_le_bytes(bytes.try_into().expect("eight bytes")))
            };
            let [theirs, ours] = [f32::from_bits(word(1) as u32), mean_loss];
            if word(0) != step {
                return Err(apart(rank, format!("step {}", word(0)), format!("step {step}")));
            }
            if theirs.to_bits() != ours.to_bits() {
                let mean = |loss: f32| format!("a mean loss of {loss} at step {step}");
                return Err(apart(rank, mean(theirs), mean(ours)));
            }
            sum.num_labels += word(2) as usize;
            sum.num_tokens += word(5) as usize;
            sum.stops |= word(3) & 1 != 0;
            sum.all_written &= word(3) & 2 != 0;
            sum.is_far_behind |= word(3) & 4 != 0;
            sum.saves |= word(3) & 8 != 0;
            self.step_times.borrow_mut().add(rank, Duration::from_nanos(word(4)));
        }
        Ok(sum)
    }

    /// Checks that a value, for example the fingerprint of the data, is equal on all ranks.
    ///
    /// # Errors
    /// A rank is lost, or has another value.
    pub(crate) fn check_equal(&self, text: &str) -> Result<(), TrainError> {
        for (rank, other) in self.gather(text.as_bytes())?.iter().enumerate() {
            let other = String::from_utf8_lossy(other);
            if other != text {
                return Err(apart(rank, other.into_owned(), text.to_owned()));
            }
        }
        Ok(())
    }

    /// What each rank has, by rank.
    ///
    /// # Errors
    /// A rank is lost.
    pub(crate) fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, TrainError> {
        Ok(self.mesh.gather(bytes)?)
    }

    /// What rank 0 knows.
    ///
    /// # Errors
    /// A rank is lost.
    pub(crate) fn of_first(&self, number: Option<u64>) -> Result<Option<u64>, TrainError> {
        let text = number.map_or(String::new(), |number| number.to_string());
        let text = self.mesh.broadcast(text.as_bytes())?;
        Ok(String::from_utf8_lossy(&text).parse().ok())
    }

    /// A number of each rank.
    ///
    /// # Errors
    /// A rank is lost.
    pub(crate) fn numbers(&self, own: u64) -> Result<Vec<u64>, TrainError> {
        let all = self.mesh.gather(&own.to_le_bytes())?;
        let numbers = all.iter().map(|bytes| {
            let bytes = bytes.first_chunk().copied().unwrap_or_default();
            u64::from_le_bytes(bytes)
        });
        Ok(numbers.collect())
    }
}

impl<B: TrainBackend> Group<B> {
    /// Reports progress inside a pass.
    ///
    /// # Errors
    /// An exchange among the ranks of a row failed.
    fn tick_in_pass(&self) -> Result<(), TrainError> {
        self.mesh.tick();
        let error = self.row_error.lock().unwrap_or_else(PoisonError::into_inner).take();
        error.map_or(Ok(()), |error| Err(error.into()))
    }
}

impl<B: TrainBackend> PassHooks<B> for Group<B> {
    fn before(
        &mut self,
        model: &mut Qwen3<B>,
        segment: Segment,
        gradients: &mut GradientBuffer<B>,
    ) -> Result<(), TrainError> {
        self.tick_in_pass()?;
        if segment == Segment::Head {
            // The last sums of the previous micro-batch ran during this forward pass; they end before the loss, where
            // memory peaks.
            self.finish_sums_but(0, gradients)?;
        }
        self.put_leaves(model, segment)
    }

    fn after(
        &mut self,
        model: &Qwen3<B>,
        segment: Segment,
        gradients: &mut GradientBuffer<B>,
    ) -> Result<(), TrainError> {
        self.tick_in_pass()?;
        if !(self.is_last || self.zero_stage > 1) {
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
}

/// The ranks that share each row, over TCP.
#[derive(Debug)]
struct Neighbours {
    mesh: Arc<Mesh>,
    part: usize,
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

    fn exchange(&self, values: Vec<Vec<f32>>, counts: &[usize]) -> Vec<Vec<f32>> {
        let world = self.mesh.world();
        let first = world.rank - self.part;
        let mut bytes = vec![Vec::new(); world.size];
        for (bytes, values) in bytes[first..].iter_mut().zip(values) {
            *bytes = values.into_iter().flat_map(f32::to_le_bytes).collect();
        }
        // A pass computes with zeros until its next segment, where `go_on` ends it with the error.
        let found = self.mesh.exchange(bytes).unwrap_or_else(|error| {
            let mut first = self.error.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert(error);
            Vec::new()
        });
        let own = (first..).zip(counts).map(|(rank, &count)| {
            let bytes = found.get(rank).map_or(&[][..], Vec::as_slice);
            let (values, _) = bytes.as_chunks();
            let values = values.iter().copied().map(f32::from_le_bytes);
            let mut values = values.collect::<Vec<_>>();
            values.resize(count, 0.0);
            values
        });
        own.collect()
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

/// A gradient in the dtype in which ranks reduce gradients. One to which this micro-batch added nothing may still be
/// stored in another.
fn f32_of<B: TrainBackend>(values: Primitive<B>) -> Primitive<B> {
    match values.dtype() {
        DType::BF16 => B::InnerBackend::float_cast(values, FloatDType::F32),
        _ => values,
    }
}

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
    fn a_row_whose_ranks_are_apart_ends_its_pass_with_the_reason() {
        let port = ReservedPort::take().expect("a port");
        let join = |rank: usize| {
            let world = World::on_this_host(rank, 2, port.number());
            Arc::new(Mesh::join(world, "1", Timeouts::default(), |_| {}).expect("two ranks"))
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mesh = join(1);
                // Rank 0 exchanges values of a row meanwhile.
                mesh.barrier().expect_err("rank 0 is elsewhere");
                mesh.leave();
            });
            let mesh = join(0);
            let group = Group::<Autodiff<Flex>>::on_host(mesh.clone());
            let links = group.rank_group(2).expect("two parts");
            group.tick_in_pass().expect("all is well");
            let values = links.exchange(vec![vec![1.0], vec![2.0]], &[1, 1]);
            assert_eq!(values, [[0.0], [0.0]]);
            let error = group.tick_in_pass().expect_err("a message of another kind").to_string();
            assert!(
                error.contains("rank 1") && error.contains("values for some ranks"),
                "{error}"
            );
            mesh.fail(&error);
        });
    }
}
