//! What several processes do together with tensors.
use crate::TrainError;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{Tensor, TensorData, TensorMetadata, TensorPrimitive};
use sieve_comm::{Mesh, Pieces};
use sieve_ops::TrainBackend;
use std::ops::Range;
use std::sync::Arc;

/// A tensor below the autodiff graph.
pub type Primitive<B> =
    <<B as AutodiffBackend>::InnerBackend as burn::tensor::backend::BackendTypes>::FloatTensorPrimitive;

/// A collective that has begun. Calling it makes later work on this rank's device wait for the collective, and returns
/// its tensors, which must not be used before.
pub type Pending<B> = Box<dyn FnOnce() -> Result<Vec<Primitive<B>>, TrainError>>;

/// A rank's operand of a gather.
#[derive(Debug)]
pub struct Gathered<B: TrainBackend> {
    /// This rank's piece, flat.
    pub piece: Primitive<B>,
    /// The tensor that all pieces make. Its values are written over.
    pub whole: Primitive<B>,
    /// How it is cut.
    pub pieces: Pieces,
}

/// Reductions and gathers over all ranks, which pass tensors of the same shapes in the same order. Collectives overlap
/// the device's other work and end in the order in which they began.
pub trait Collectives<B: TrainBackend> {
    /// Starts summing f32 tensors over all ranks. A tensor that is cut is reduce-scattered: a rank gets the flat sum of
    /// its piece; any other is all-reduced.
    ///
    /// # Errors
    /// A rank is lost; another element type.
    fn sum(&self, tensors: Vec<(Primitive<B>, Option<Pieces>)>) -> Result<Pending<B>, TrainError>;
    /// Starts gathering the pieces of all ranks. Returns the whole tensors, or none where they were written in place.
    ///
    /// # Errors
    /// A rank is lost.
    fn gather(&self, tensors: Vec<Gathered<B>>) -> Result<Pending<B>, TrainError>;
}

/// Over TCP, on the host: sums are added in the order of the ranks. Values are sent when a collective begins and become
/// visible when it ends, as on a device.
#[derive(Clone, Debug)]
pub struct HostCollectives(pub Arc<Mesh>);

impl<B: TrainBackend> Collectives<B> for HostCollectives {
    fn sum(&self, tensors: Vec<(Primitive<B>, Option<Pieces>)>) -> Result<Pending<B>, TrainError> {
        let Some((first, _)) = tensors.first() else {
            return Ok(Box::new(|| Ok(Vec::new())));
        };
        let device = B::InnerBackend::float_device(first);
        let mut values = Vec::new();
        let mut places = Vec::new();
        for (tensor, pieces) in tensors {
            let shape = tensor.shape();
            let first = values.len();
            values.extend(values_of::<B>(tensor));
            places.push((first..values.len(), pieces, shape));
        }
        let part = |(all, pieces): (&Range<usize>, &Option<Pieces>), rank: usize| match pieces {
            Some(pieces) => {
                let piece = pieces.of(rank);
                all.start + piece.start..all.start + piece.end
            }
            None => all.clone(),
        };
        let parts = |rank: usize| {
            let places = places.iter().map(|(all, pieces, _)| (all, pieces));
            places.map(|place| part(place, rank)).collect::<Vec<_>>()
        };
        let sums = self.0.sum_parts(values, &parts)?;
        let rank = self.0.world().rank;
        let own = parts(rank);
        let mut rest = sums.as_slice();
        let sums = places.into_iter().zip(own).map(|((_, pieces, shape), own)| {
            let (values, others) = rest.split_at(own.len());
            rest = others;
            let shape = match pieces {
                Some(_) => [own.len()].into(),
                None => shape,
            };
            (values.to_vec(), shape)
        });
        let sums = sums.collect::<Vec<_>>();
        Ok(Box::new(move || {
            let sums = sums.into_iter();
            let sums = sums.map(|(values, shape)| {
                let data = TensorData::new(values, [shape.num_elements()]);
                let flat = Tensor::<B::InnerBackend, 1>::from_data(data, &device);
                B::InnerBackend::float_reshape(flat.into_primitive().tensor(), shape)
            });
            Ok(sums.collect())
        }))
    }

    fn gather(&self, tensors: Vec<Gathered<B>>) -> Result<Pending<B>, TrainError> {
        let size = self.0.world().size;
        let mut own = Vec::new();
        let mut wholes = Vec::new();
        for Gathered { piece, whole, pieces } in tensors {
            own.extend(values_of::<B>(piece));
            wholes.push((whole, pieces));
        }
        let count = |rank: usize| wholes.iter().map(|(_, cut)| cut.of(rank).len()).sum();
        let all = self.0.gather_values(&own, &count)?;
        Ok(Box::new(move || {
            // Rank by rank, and in each tensor by tensor.
            let mut values: Vec<Vec<f32>> = wholes.iter().map(|_| Vec::new()).collect();
            let mut rest = all.as_slice();
            for rank in 0..size {
                for (values, (_, pieces)) in values.iter_mut().zip(&wholes) {
                    let (piece, others) = rest.split_at(pieces.of(rank).len());
                    values.extend(piece);
                    rest = others;
                }
            }
            let wholes = wholes.into_iter().zip(values).map(|((whole, _), values)| {
                let (device, dtype) = (B::InnerBackend::float_device(&whole), whole.dtype());
                let data = TensorData::new(values, [whole.shape().num_elements()]);
                let data = data.convert_dtype(dtype);
                let flat = Tensor::<B::InnerBackend, 1>::from_data(data, (&device, dtype));
                B::InnerBackend::float_reshape(flat.into_primitive().tensor(), whole.shape())
            });
            Ok(wholes.collect())
        }))
    }
}

fn values_of<B: TrainBackend>(tensor: Primitive<B>) -> Vec<f32> {
    let count = tensor.shape().num_elements();
    let flat = B::InnerBackend::float_reshape(tensor, [count].into());
    let flat = Tensor::<B::InnerBackend, 1>::from_primitive(TensorPrimitive::Float(flat));
    flat.into_data().iter::<f32>().collect()
}
