//! One rank's part in a run of several processes: which rows it reads, and what it adds up with the others.
use crate::{GradientBuffer, TrainError};
use burn::module::Module;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{Tensor, TensorData, TensorMetadata, TensorPrimitive};
use sieve_comm::{CommError, Mesh};
use sieve_ops::TrainBackend;
use std::sync::Arc;

type Primitive<B> =
    <<B as AutodiffBackend>::InnerBackend as burn::tensor::backend::BackendTypes>::FloatTensorPrimitive;

/// Replaces tensors by their sums over all ranks. All ranks give the same shapes in the same order.
pub type SumOverRanks<B> = Box<dyn Fn(Vec<Primitive<B>>) -> Result<Vec<Primitive<B>>, TrainError>>;

/// The ranks that train one model together. Each holds the whole model and takes every step; gradients are added up.
pub struct Group<B: TrainBackend> {
    mesh: Arc<Mesh>,
    sum: SumOverRanks<B>,
}

/// Which of how many ranks reads rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) rank: usize,
    pub(crate) size: usize,
}

impl Share {
    /// A run in one process.
    pub(crate) const ALL: Self = Self { rank: 0, size: 1 };
}

/// What all ranks know of a step before they take it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Agreement {
    /// Labels of all ranks' rows.
    pub(crate) num_labels: usize,
    /// Whether some rank was asked to stop.
    pub(crate) stops: bool,
}

impl<B: TrainBackend> Group<B> {
    /// Ranks whose tensors are added up by `sum`.
    pub fn new(mesh: Arc<Mesh>, sum: SumOverRanks<B>) -> Self {
        Self { mesh, sum }
    }

    /// Ranks whose tensors are added up on the host, in the order of the ranks.
    pub fn on_host(mesh: Arc<Mesh>) -> Self {
        let sums = mesh.clone();
        let sum = move |tensors: Vec<Primitive<B>>| {
            let mut shapes = Vec::with_capacity(tensors.len());
            let mut values = Vec::<f32>::new();
            let device = tensors.first().map(B::InnerBackend::float_device);
            for tensor in tensors {
                let shape = tensor.shape();
                let count = shape.num_elements();
                let flat = B::InnerBackend::float_reshape(tensor, [count].into());
                let flat =
                    Tensor::<B::InnerBackend, 1>::from_primitive(TensorPrimitive::Float(flat));
                values.extend(flat.into_data().iter::<f32>());
                shapes.push((shape, count));
            }
            sums.sum(&mut values)?;
            let Some(device) = device else {
                return Ok(Vec::new());
            };
            let mut rest = values.as_slice();
            let summed = shapes.into_iter().map(|(shape, count)| {
                let (own, others) = rest.split_at(count);
                rest = others;
                let data = TensorData::new(own.to_vec(), [count]);
                let flat = Tensor::<B::InnerBackend, 1>::from_data(data, &device);
                B::InnerBackend::float_reshape(flat.into_primitive().tensor(), shape)
            });
            Ok(summed.collect())
        };
        Self::new(mesh, Box::new(sum))
    }

    pub(crate) fn share(&self) -> Share {
        let world = self.mesh.world();
        Share {
            rank: world.rank,
            size: world.size,
        }
    }

    /// Adds up the gradients of `module` and the loss over all ranks.
    pub(crate) fn reduce<M: Module<B>>(
        &self,
        module: &M,
        gradients: &mut GradientBuffer<B>,
        loss: Tensor<B::InnerBackend, 1>,
    ) -> Result<Tensor<B::InnerBackend, 1>, TrainError> {
        let (ids, mut tensors): (Vec<_>, Vec<_>) = gradients.take_all(module).into_iter().unzip();
        tensors.push(loss.into_primitive().tensor());
        let mut summed = (self.sum)(tensors)?;
        let loss = summed.pop().expect("as many as were given");
        gradients.put(ids.into_iter().zip(summed));
        Ok(Tensor::from_primitive(TensorPrimitive::Float(loss)))
    }

    /// What all ranks together know of the step after `step`; `mean_loss` is the guard's, which must be the same for all.
    ///
    /// # Errors
    /// A rank is lost, or stands elsewhere.
    pub(crate) fn agree(
        &self,
        step: u64,
        mean_loss: f32,
        own: Agreement,
    ) -> Result<Agreement, TrainError> {
        let (labels, stops) = (own.num_labels as u64, u64::from(own.stops));
        let words = [step, u64::from(mean_loss.to_bits()), labels, stops];
        let all = self.gather(&words.map(u64::to_le_bytes).concat())?;
        let mut sum = Agreement {
            num_labels: 0,
            stops: false,
        };
        for (rank, bytes) in all.iter().enumerate() {
            let word = |place: usize| {
                let bytes = bytes.get(8 * place..8 * place + 8);
                bytes.map_or(0, |bytes| {
                    u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
                })
            };
            let [theirs, ours] = [f32::from_bits(word(1) as u32), mean_loss];
            if word(0) != step {
                return Err(apart(
                    rank,
                    format!("step {}", word(0)),
                    format!("step {step}"),
                ));
            }
            if theirs.to_bits() != ours.to_bits() {
                let mean = |loss: f32| format!("a mean loss of {loss} at step {step}");
                return Err(apart(rank, mean(theirs), mean(ours)));
            }
            sum.num_labels += word(2) as usize;
            sum.stops |= word(3) != 0;
        }
        Ok(sum)
    }

    /// Checks that all ranks say the same of themselves, for example which data they read.
    ///
    /// # Errors
    /// A rank is lost, or says something else.
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
}

fn apart(rank: usize, theirs: String, ours: String) -> TrainError {
    CommError::OutOfStep { rank, theirs, ours }.into()
}
