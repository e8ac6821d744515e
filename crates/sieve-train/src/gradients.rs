//! Gradients of all parameters, added up over micro-batches.
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Tensor, TensorData, TensorPrimitive};
use sieve_hf::NamedTensor;
use sieve_ops::{OptimizerBackend, TrainBackend};
use std::collections::HashMap;

type Primitive<B> =
    <<B as AutodiffBackend>::InnerBackend as burn::tensor::backend::BackendTypes>::FloatTensorPrimitive;

/// One gradient per parameter. Looked up by id; walked only in module order, so sums have a fixed order.
#[derive(Debug)]
pub struct GradientBuffer<B: TrainBackend> {
    by_id: HashMap<ParamId, Primitive<B>>,
}

impl<B: TrainBackend> Default for GradientBuffer<B> {
    fn default() -> Self {
        Self {
            by_id: HashMap::new(),
        }
    }
}

impl<B: TrainBackend> GradientBuffer<B> {
    /// Takes the gradients of `module`'s parameters out of a backward pass and adds them to those held.
    pub fn collect<M: Module<B>>(&mut self, module: &M, gradients: &mut B::Gradients) {
        module.visit(&mut Collector {
            buffer: self,
            gradients,
        });
    }

    /// Removes and returns the gradients of `module`, in module order.
    pub(crate) fn take_all<M: Module<B>>(&mut self, module: &M) -> Vec<(ParamId, Primitive<B>)> {
        let mut taker = Taker {
            buffer: self,
            found: Vec::new(),
        };
        module.visit(&mut taker);
        taker.found
    }

    /// Holds these gradients.
    pub(crate) fn put(&mut self, gradients: impl IntoIterator<Item = (ParamId, Primitive<B>)>) {
        self.by_id.extend(gradients);
    }

    /// Removes and returns one gradient.
    pub(crate) fn take<const D: usize>(
        &mut self,
        id: ParamId,
    ) -> Option<Tensor<B::InnerBackend, D>> {
        let primitive = self.by_id.remove(&id)?;
        Some(Tensor::from_primitive(TensorPrimitive::Float(primitive)))
    }

    /// Euclidean norm over all gradients of `module`, `[1]`.
    pub fn norm<M: Module<B>>(&self, module: &M, device: &B::Device) -> Tensor<B::InnerBackend, 1> {
        let mut all = All {
            buffer: self,
            found: Vec::new(),
        };
        module.visit(&mut all);
        if all.found.is_empty() {
            return Tensor::zeros([1], device);
        }
        let norm = B::InnerBackend::global_norm(all.found);
        Tensor::from_primitive(TensorPrimitive::Float(norm))
    }

    /// Copies all gradients of `module` to the host, by parameter name, in module order.
    pub fn named<M: Module<B>>(&self, module: &M) -> Vec<NamedTensor> {
        let mut reader = Reader {
            buffer: self,
            found: Vec::new(),
        };
        module.visit(&mut reader);
        let names = sieve_hf::parameter_names(module).into_iter();
        let named = names.zip(reader.found);
        named
            .filter_map(|(name, data)| data.map(|data| NamedTensor { name, data }))
            .collect()
    }

    fn add<const D: usize>(&mut self, id: ParamId, gradient: Tensor<B::InnerBackend, D>) {
        // bf16 sums over micro-batches would lose small gradients.
        let gradient = match gradient.dtype() {
            DType::BF16 | DType::F16 => gradient.cast(DType::F32),
            _ => gradient,
        };
        let sum = match self.take(id) {
            Some(held) => held + gradient,
            None => gradient,
        };
        self.by_id.insert(id, sum.into_primitive().tensor());
    }
}

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

struct All<'a, B: TrainBackend> {
    buffer: &'a GradientBuffer<B>,
    found: Vec<Primitive<B>>,
}

impl<B: TrainBackend> ModuleVisitor<B> for All<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.found.extend(self.buffer.by_id.get(&param.id).cloned());
    }
}

struct Taker<'a, B: TrainBackend> {
    buffer: &'a mut GradientBuffer<B>,
    found: Vec<(ParamId, Primitive<B>)>,
}

impl<B: TrainBackend> ModuleVisitor<B> for Taker<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let gradient = self.buffer.by_id.remove(&param.id);
        self.found
            .extend(gradient.map(|gradient| (param.id, gradient)));
    }
}

struct Reader<'a, B: TrainBackend> {
    buffer: &'a GradientBuffer<B>,
    found: Vec<Option<TensorData>>,
}

impl<B: TrainBackend> ModuleVisitor<B> for Reader<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let gradient = self.buffer.by_id.get(&param.id).cloned();
        self.found.push(gradient.map(|gradient| {
            Tensor::<B::InnerBackend, D>::from_primitive(TensorPrimitive::Float(gradient))
                .into_data()
        }));
    }
}
