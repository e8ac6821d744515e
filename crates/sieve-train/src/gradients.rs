//! Gradients of all parameters, added up over micro-batches.
use crate::collectives::Primitive;
use crate::share::Share;
use burn::module::{Module, ModuleVisitor, Param, ParamId, list_param_ids};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorData, TensorPrimitive};
use sieve_core::recipe::GradientDtype;
use sieve_hf::NamedTensor;
use sieve_ops::{DeviceBackend, TrainBackend};
use std::collections::HashMap;

/// One gradient per parameter. Looked up by id; walked only in module order, so sums have a fixed order.
#[derive(Debug)]
pub struct GradientBuffer<B: TrainBackend> {
    by_id: HashMap<ParamId, Gradient<B>>,
    /// This rank's shards of gradients that were summed over all ranks, flat.
    shards: HashMap<ParamId, Primitive<B>>,
    /// Type in which the sums of matrices over micro-batches are stored.
    dtype: GradientDtype,
    /// Whether this micro-batch's gradients are summed over all ranks before they are stored: they stay f32 until then.
    are_reduced: bool,
}

/// Sums of matrix gradients over earlier micro-batches; see [`sieve_nn::PassState::sums`].
pub(crate) type Sums<B> = HashMap<ParamId, Tensor<B, 2>>;

#[derive(Debug)]
pub(crate) struct Gradient<B: TrainBackend> {
    pub(crate) values: Primitive<B>,
    /// Whether `values` is only this rank's piece of the gradient, flat.
    pub(crate) is_piece: bool,
}

impl<B: TrainBackend> Default for GradientBuffer<B> {
    fn default() -> Self {
        Self::kept_in(GradientDtype::F32)
    }
}

impl<B: TrainBackend> GradientBuffer<B> {
    /// An empty buffer. Micro-batches are added in f32; sums of matrices are stored in `dtype`.
    pub(crate) fn kept_in(dtype: GradientDtype) -> Self {
        Self { by_id: HashMap::new(), shards: HashMap::new(), dtype, are_reduced: false }
    }

    /// Begins a micro-batch; `are_reduced` says whether its gradients will be summed over all ranks.
    pub(crate) fn begin(&mut self, are_reduced: bool) {
        self.are_reduced = are_reduced;
    }

    /// Takes the gradients of `module`'s parameters out of a backward pass and adds them to the sums so far.
    pub fn collect<M: Module<B>>(&mut self, module: &M, gradients: &mut B::Gradients) {
        module.visit(&mut Collector { buffer: self, gradients });
    }

    /// Adds the gradient of a parameter that was computed without a graph.
    pub(crate) fn add_values<const D: usize>(&mut self, param: &Param<Tensor<B, D>>, values: Primitive<B>) {
        self.add(param.id, Tensor::<B::InnerBackend, D>::from_primitive(TensorPrimitive::Float(values)));
    }

    /// Stores a gradient.
    ///
    /// # Panics
    /// The buffer has a gradient of this parameter: that one was added after the all-reduce had begun.
    pub(crate) fn put(&mut self, id: ParamId, gradient: Gradient<B>) {
        let held = self.by_id.insert(id, gradient);
        assert!(held.is_none(), "a gradient came after its sum had begun");
    }

    /// Removes the gradient of a parameter and returns it.
    pub(crate) fn take(&mut self, id: ParamId) -> Option<Gradient<B>> {
        self.by_id.remove(&id)
    }

    /// Whether it has this rank's piece of a parameter's gradient.
    pub(crate) fn has_piece(&self, id: ParamId) -> bool {
        self.by_id.get(&id).is_some_and(|gradient| gradient.is_piece)
    }

    /// Adds this rank's flat shard of a gradient to the shard of earlier micro-batches.
    pub(crate) fn add_shard(&mut self, id: ParamId, shard: Primitive<B>) {
        let shard = Tensor::<B::InnerBackend, 1>::from_primitive(TensorPrimitive::Float(shard));
        let sum = sum_of::<B, 1>(self.shards.remove(&id), shard);
        self.shards.insert(id, rounded::<B, 1>(sum, self.dtype));
    }

    /// Makes the shards this rank's gradients, once no more are added.
    pub(crate) fn close_shards(&mut self) {
        for (id, values) in std::mem::take(&mut self.shards) {
            self.put(id, Gradient { values, is_piece: true });
        }
    }

    /// Takes the summed gradients of a module's matrices, so that the backward GEMMs add to them in place. GEMMs can do
    /// so only in f32; with another dtype nothing is taken.
    pub(crate) fn take_sums<M: Module<B>>(&mut self, module: &M) -> Sums<B> {
        let is_f32 = self.dtype == GradientDtype::F32;
        let mut taker = Taker { buffer: self, taken: HashMap::new() };
        if is_f32 {
            module.visit(&mut taker);
        }
        taker.taken
    }

    /// Puts the sums that no layer has taken back into the buffer.
    pub(crate) fn give_back(&mut self, sums: Sums<B>) {
        for (id, sum) in sums {
            let gradient = Gradient { values: sum.inner().into_primitive().tensor(), is_piece: false };
            self.put(id, gradient);
        }
    }

    /// Euclidean norm over all gradients of `module`: `[1]`, f32.
    pub fn norm<M: Module<B>>(&self, module: &M, device: &B::Device) -> Tensor<B::InnerBackend, 1> {
        self.norm_of(&list_param_ids(module), device, Share::ALL)
    }

    /// Euclidean norm of this rank's gradients of these parameters, `[1]`, f32. It leaves out gradients that another
    /// rank counts, so that each element counts once over all ranks.
    pub(crate) fn norm_of(&self, ids: &[ParamId], device: &B::Device, share: Share) -> Tensor<B::InnerBackend, 1> {
        let gradients = ids.iter().filter_map(|id| self.by_id.get(id));
        let gradients = gradients.filter(|gradient| share.counts(gradient.is_piece));
        let found: Vec<_> = gradients.map(|gradient| gradient.values.clone()).collect();
        if found.is_empty() {
            return Tensor::zeros([1], device);
        }
        let norm = B::InnerBackend::global_norm(found);
        Tensor::from_primitive(TensorPrimitive::Float(norm))
    }

    /// Copies all gradients of `module` to the host, by parameter name, in module order.
    pub fn named<M: Module<B>>(&self, module: &M) -> Vec<NamedTensor> {
        let mut reader = Reader { buffer: self, found: Vec::new() };
        module.visit(&mut reader);
        let names = sieve_hf::parameter_names(module).into_iter();
        let named = names.zip(reader.found);
        named.filter_map(|(name, data)| data.map(|data| NamedTensor { name, data })).collect()
    }

    /// Adds a parameter's gradient of one micro-batch to its sum, and stores the sum in the buffer's dtype.
    fn add<const D: usize>(&mut self, id: ParamId, gradient: Tensor<B::InnerBackend, D>) {
        let held = self.take(id).map(|held| held.values);
        let sum = sum_of::<B, D>(held, gradient);
        // Vectors take little memory, and each of their elements is a sum over all tokens: they stay f32.
        let stays_f32 = self.are_reduced || D < 2;
        let dtype = if stays_f32 { GradientDtype::F32 } else { self.dtype };
        let gradient = Gradient { values: rounded::<B, D>(sum, dtype), is_piece: false };
        self.by_id.insert(id, gradient);
    }
}

/// Adds a gradient to the sum so far, in f32: a bf16 sum would lose small gradients.
fn sum_of<B: TrainBackend, const D: usize>(
    held: Option<Primitive<B>>,
    gradient: Tensor<B::InnerBackend, D>,
) -> Tensor<B::InnerBackend, D> {
    let gradient = widened(gradient);
    match held {
        Some(held) => widened(Tensor::from_primitive(TensorPrimitive::Float(held))) + gradient,
        None => gradient,
    }
}

/// Casts bf16 and f16 tensors to f32.
fn widened<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    match x.dtype() {
        DType::BF16 | DType::F16 => x.cast(DType::F32),
        _ => x,
    }
}

fn rounded<B: TrainBackend, const D: usize>(x: Tensor<B::InnerBackend, D>, dtype: GradientDtype) -> Primitive<B> {
    let x = match dtype {
        GradientDtype::F32 => x,
        GradientDtype::Bf16 => x.cast(DType::BF16),
    };
    x.into_primitive().tensor()
}

/// Adds a backward pass's gradients of a module to the buffer.
struct Collector<'a, B: TrainBackend> {
    buffer: &'a mut GradientBuffer<B>,
    gradients: &'a mut B::Gradients,
}

impl<B: TrainBackend> ModuleVisitor<B> for Collector<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(gradient) = param.val().grad_remove(self.gradients) {
            self.buffer.add(param.id, gradient);
        }
    }
}

/// Takes the sums of a module's matrices out of the buffer.
struct Taker<'a, B: TrainBackend> {
    buffer: &'a mut GradientBuffer<B>,
    taken: HashMap<ParamId, Tensor<B, 2>>,
}

impl<B: TrainBackend> ModuleVisitor<B> for Taker<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if D == 2
            && let Some(gradient) = self.buffer.take(param.id)
        {
            let sum = Tensor::from_primitive(TensorPrimitive::Float(gradient.values));
            self.taken.insert(param.id, Tensor::from_inner(sum));
        }
    }
}

/// Copies the gradient of each parameter to the host, `None` where the buffer has none.
struct Reader<'a, B: TrainBackend> {
    buffer: &'a GradientBuffer<B>,
    found: Vec<Option<TensorData>>,
}

impl<B: TrainBackend> ModuleVisitor<B> for Reader<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let gradient = self.buffer.by_id.get(&param.id);
        self.found.push(gradient.map(|gradient| {
            let values = TensorPrimitive::Float(gradient.values.clone());
            Tensor::<B::InnerBackend, D>::from_primitive(values).into_data()
        }));
    }
}
