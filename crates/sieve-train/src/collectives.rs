//! Collective operations on tensors: sums and gathers over all ranks.
use crate::TrainError;
use burn::module::ParamId;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{DType, Shape, Tensor, TensorData, TensorMetadata, TensorPrimitive};
use sieve_comm::{Mesh, Pieces, ShardGroup};
use sieve_ops::TrainBackend;
use std::ops::Range;
use std::sync::Arc;

/// A float tensor of the inner backend, outside any autodiff graph.
pub type Primitive<B> =
    <<B as AutodiffBackend>::InnerBackend as burn::tensor::backend::BackendTypes>::FloatTensorPrimitive;

/// A collective that has begun. Calling it makes later work on this rank's device wait for the collective, and returns
/// the resulting tensors; nothing may read them before that.
pub type Pending<B> = Box<dyn FnOnce() -> Result<Vec<Primitive<B>>, TrainError> + Send>;

/// What a rank contributes to an all-gather.
#[derive(Debug)]
pub struct Gathered<B: TrainBackend> {
    /// This rank's piece, as a tensor of one dimension.
    pub piece: Primitive<B>,
    /// The tensor that the pieces of all ranks make up. Its values are overwritten.
    pub whole: Primitive<B>,
    /// How `whole` is divided into the pieces.
    pub pieces: Pieces,
}

/// Weights of a segment whose pieces were updated, ready to be gathered.
pub(crate) type Updated<B> = Vec<(ParamId, Gathered<B>)>;

/// What a rank sends to other ranks of its group and receives from them: at most one tensor to each, and one from each.
#[derive(Debug)]
pub struct Exchanged<B: TrainBackend> {
    /// Tensors of one dimension, each with the rank that receives it.
    pub given: Vec<(usize, Primitive<B>)>,
    /// The ranks that send a tensor to this one, and the number of its elements.
    pub wanted: Vec<(usize, usize)>,
    /// A tensor on this rank's device of the type that all tensors have.
    pub like: Primitive<B>,
}

/// Reductions and gathers over the ranks of a run. All must pass tensors of the same shapes in the same order.
/// Collectives overlap the device's other work and end in the order in which they began.
pub trait Collectives<B: TrainBackend>: Send {
    /// The ranks that divide tensors into pieces. Numbers of ranks in [`Exchanged`] and in [`Pieces`] are places in
    /// this group.
    fn shard_group(&self) -> ShardGroup;
    /// Starts summing f32 tensors over all ranks. A tensor with pieces is reduce-scattered: each rank gets the sum of
    /// its own piece, flat. A tensor without pieces is all-reduced.
    ///
    /// # Errors
    /// A rank is lost; another element type.
    fn sum(&self, tensors: Vec<(Primitive<B>, Option<Pieces>)>) -> Result<Pending<B>, TrainError>;
    /// Starts gathering the pieces of all ranks of the group. The pending collective returns the whole tensors, or no
    /// tensors if the implementation writes into [`Gathered::whole`] in place.
    ///
    /// # Errors
    /// A rank is lost.
    fn gather(&self, tensors: Vec<Gathered<B>>) -> Result<Pending<B>, TrainError>;
    /// Starts sending tensors inside the group, and receiving them; a rank with nothing to send or receive calls it
    /// too. The pending collective returns the received tensors, of one dimension, in the order of
    /// [`Exchanged::wanted`].
    ///
    /// # Errors
    /// A rank is lost; a tensor of another length than is wanted.
    fn exchange(&self, exchanged: Exchanged<B>) -> Result<Pending<B>, TrainError>;
}

/// Collectives on the host, over TCP; sums are added in the order of the ranks. Values are exchanged when a collective
/// begins, and the tensors with the result are created when it ends, as on a device.
#[derive(Clone, Debug)]
pub struct HostCollectives {
    /// The connections of all ranks.
    pub mesh: Arc<Mesh>,
    group: ShardGroup,
}

impl HostCollectives {
    /// Collectives over the ranks of `mesh`. Each `shard_ranks` consecutive ranks divide tensors among them; 0: all.
    pub fn new(mesh: Arc<Mesh>, shard_ranks: usize) -> Self {
        let group = ShardGroup::new(mesh.world().rank, mesh.world().size, shard_ranks);
        Self { mesh, group }
    }
}

impl<B: TrainBackend> Collectives<B> for HostCollectives {
    fn shard_group(&self) -> ShardGroup {
        self.group
    }

    /// Sums over the TCP connections before it returns; the pending work only makes tensors of the sums.
    fn sum(&self, tensors: Vec<(Primitive<B>, Option<Pieces>)>) -> Result<Pending<B>, TrainError> {
        let Some((first, _)) = tensors.first() else {
            return Ok(Box::new(|| Ok(Vec::new())));
        };
        let device = B::InnerBackend::float_device(first);
        let mut values = Vec::new();
        let mut summands = Vec::new();
        for (tensor, pieces) in tensors {
            let (shape, start) = (tensor.shape(), values.len());
            values.extend(values_of::<B>(tensor));
            let range = start..values.len();
            summands.push(Summand { range, pieces, shape });
        }
        // Every rank with the same place gets the same sums.
        let place_of = |rank: usize| self.group.place_of(rank);
        let ranges_of =
            |rank: usize| summands.iter().map(|summand| summand.range_of(place_of(rank))).collect::<Vec<_>>();
        let own = ranges_of(self.mesh.world().rank);
        let mut received = self.mesh.sum_parts(values, &ranges_of)?.into_iter();
        let sums = summands.into_iter().zip(own).map(|(summand, own)| {
            let shape = match summand.pieces {
                Some(_) => [own.len()].into(),
                None => summand.shape,
            };
            (received.by_ref().take(own.len()).collect(), shape)
        });
        let sums = sums.collect::<Vec<_>>();
        Ok(Box::new(move || {
            let tensors = sums.into_iter();
            let tensors = tensors.map(|(values, shape)| tensor_of::<B>(values, shape, &device, DType::F32));
            Ok(tensors.collect())
        }))
    }

    /// Gathers over the TCP connections before it returns; the pending work only puts the pieces together.
    fn gather(&self, tensors: Vec<Gathered<B>>) -> Result<Pending<B>, TrainError> {
        let mut own = Vec::new();
        let mut wholes = Vec::new();
        for Gathered { piece, whole, pieces } in tensors {
            own.extend(values_of::<B>(piece));
            wholes.push((whole, pieces));
        }
        let group = self.group;
        let count = |rank: usize| wholes.iter().map(|(_, pieces)| pieces.of(group.place_of(rank)).len()).sum::<usize>();
        // The ranks of the group one after another, and for each rank its piece of every tensor.
        let all = self.mesh.gather_values(&own, &count, group)?;
        Ok(Box::new(move || {
            let mut all = all.into_iter();
            let mut values: Vec<Vec<f32>> = wholes.iter().map(|_| Vec::new()).collect();
            for place in 0..group.size() {
                for (values, (_, pieces)) in values.iter_mut().zip(&wholes) {
                    values.extend(all.by_ref().take(pieces.of(place).len()));
                }
            }
            let wholes = wholes.into_iter().zip(values).map(|((whole, _), values)| {
                let device = B::InnerBackend::float_device(&whole);
                tensor_of::<B>(values, whole.shape(), &device, whole.dtype())
            });
            Ok(wholes.collect())
        }))
    }

    /// Sends and receives before it returns; the pending work only makes tensors of what was received.
    fn exchange(&self, Exchanged { given, wanted, like }: Exchanged<B>) -> Result<Pending<B>, TrainError> {
        let first = self.group.ranks().start;
        let mut bytes = vec![Vec::new(); self.mesh.world().size];
        for (place, tensor) in given {
            bytes[first + place] = bytes_of(values_of::<B>(tensor));
        }
        let found = self.mesh.exchange(bytes)?;
        let (device, dtype) = (B::InnerBackend::float_device(&like), like.dtype());
        let received = wanted.into_iter().map(|(place, count)| {
            let rank = first + place;
            let values = floats_of(&found[rank]);
            if values.len() == count {
                Ok(values)
            } else {
                Err(TrainError::Collective(format!("rank {rank} has sent {} values of {count}", values.len())))
            }
        });
        let received = received.collect::<Result<Vec<_>, _>>()?;
        Ok(Box::new(move || {
            let tensors = received.into_iter().map(|values| {
                let shape = [values.len()].into();
                tensor_of::<B>(values, shape, &device, dtype)
            });
            Ok(tensors.collect())
        }))
    }
}

/// Values as the bytes that are sent to another rank, little-endian.
pub(crate) fn bytes_of(values: Vec<f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

/// The values of [`bytes_of`].
pub(crate) fn floats_of(bytes: &[u8]) -> Vec<f32> {
    let (values, _) = bytes.as_chunks();
    values.iter().copied().map(f32::from_le_bytes).collect()
}

/// One tensor of an all-reduce or reduce-scatter.
struct Summand {
    /// The tensor's range in the concatenated values of all tensors.
    range: Range<usize>,
    /// The piece of each place in a reduce-scatter; `None` in an all-reduce.
    pieces: Option<Pieces>,
    shape: Shape,
}

impl Summand {
    /// The values whose sum the ranks of a place receive: their piece, or the whole tensor.
    fn range_of(&self, place: usize) -> Range<usize> {
        match self.pieces {
            Some(pieces) => {
                let piece = pieces.of(place);
                self.range.start + piece.start..self.range.start + piece.end
            }
            None => self.range.clone(),
        }
    }
}

fn tensor_of<B: TrainBackend>(values: Vec<f32>, shape: Shape, device: &B::Device, dtype: DType) -> Primitive<B> {
    let data = TensorData::new(values, [shape.num_elements()]).convert_dtype(dtype);
    let flat = Tensor::<B::InnerBackend, 1>::from_data(data, (device, dtype));
    B::InnerBackend::float_reshape(flat.into_primitive().tensor(), shape)
}

/// A tensor flattened to one dimension.
pub(crate) fn flat<B: TrainBackend>(tensor: Primitive<B>) -> Tensor<B::InnerBackend, 1> {
    let count = tensor.shape().num_elements();
    let flat = B::InnerBackend::float_reshape(tensor, [count].into());
    Tensor::from_primitive(TensorPrimitive::Float(flat))
}

fn values_of<B: TrainBackend>(tensor: Primitive<B>) -> Vec<f32> {
    flat::<B>(tensor).into_data().iter::<f32>().collect()
}
