//! The parts of a model that have an autodiff graph of their own.
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId, list_param_ids};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorPrimitive};
use sieve_hf::parameter_names;
use sieve_nn::Qwen3;
use sieve_ops::TrainBackend;
use std::collections::{HashMap, VecDeque};

/// A part of the model, in the order of the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Segment {
    /// The token embedding.
    Embedding,
    /// The decoder layer with this index.
    Block(usize),
    /// Final norm, output projection and loss.
    Head,
}

impl Segment {
    /// All segments of a model, first to last.
    pub(crate) fn all<B: TrainBackend>(model: &Qwen3<B>) -> impl Iterator<Item = Self> + use<B> {
        let blocks = (0..model.layers.len()).map(Self::Block);
        let first = Some(Self::Embedding).into_iter();
        first.chain(blocks).chain(Some(Self::Head))
    }

    /// Ids of the segment's parameters, in module order.
    pub(crate) fn ids<B: TrainBackend>(self, model: &Qwen3<B>) -> Vec<ParamId> {
        match self {
            Self::Embedding => list_param_ids(&model.embed_tokens),
            Self::Block(layer) => list_param_ids(&model.layers[layer]),
            Self::Head => list_param_ids(&model.head),
        }
    }

    /// Id and shape of each of the segment's parameters, in module order.
    pub(crate) fn shapes<B: TrainBackend>(self, model: &Qwen3<B>) -> Vec<(ParamId, Vec<usize>)> {
        let mut shapes = Shapes(Vec::new());
        match self {
            Self::Embedding => model.embed_tokens.visit(&mut shapes),
            Self::Block(layer) => model.layers[layer].visit(&mut shapes),
            Self::Head => model.head.visit(&mut shapes),
        }
        shapes.0
    }

    /// The segments whose parameters this one reads: a head with a tied embedding reads the embedding's too.
    pub(crate) fn reads<B: TrainBackend>(self, model: &Qwen3<B>) -> impl Iterator<Item = Self> + use<B> {
        let is_tied = self == Self::Head && model.head.lm_head.is_none();
        std::iter::once(self).chain(is_tied.then_some(Self::Embedding))
    }

    /// The segment after this one in the forward pass.
    pub(crate) fn next<B: TrainBackend>(self, model: &Qwen3<B>) -> Option<Self> {
        Self::all(model).skip_while(|segment| *segment != self).nth(1)
    }

    /// `model` with the parameters and parameter ids of `other` where both have one of the same name. `new` maps those
    /// that `other` does not have.
    pub(crate) fn with_parameters_of<B: TrainBackend>(
        model: Qwen3<B>,
        other: &Qwen3<B>,
        new: &mut impl ModuleMapper<B>,
    ) -> Qwen3<B> {
        let mut all = Values(Vec::new());
        other.visit(&mut all);
        let held = parameter_names(other).into_iter().zip(all.0).collect();
        let names = parameter_names(&model).into();
        model.map(&mut Parameters { names, held, new })
    }

    /// Maps the segment's parameters while clones of them may exist: their tensors are not updated in place.
    pub(crate) fn replace<B: TrainBackend>(self, model: &mut Qwen3<B>, mapper: &mut impl ModuleMapper<B>) {
        match self {
            Self::Embedding => model.embed_tokens = model.embed_tokens.clone().map(mapper),
            Self::Block(layer) => model.layers[layer] = model.layers[layer].clone().map(mapper),
            Self::Head => model.head = model.head.clone().map(mapper),
        }
    }

    /// The model with this segment's parameters mapped.
    pub(crate) fn map<B: TrainBackend>(self, mut model: Qwen3<B>, mapper: &mut impl ModuleMapper<B>) -> Qwen3<B> {
        match self {
            Self::Embedding => model.embed_tokens = model.embed_tokens.map(mapper),
            Self::Head => model.head = model.head.map(mapper),
            Self::Block(layer) => {
                // Moved out and back: a clone would share the tensors, which could then not be updated in place.
                let block = model.layers.swap_remove(layer);
                model.layers.push(block.map(mapper));
                let last = model.layers.len() - 1;
                model.layers.swap(layer, last);
            }
        }
        model
    }
}

/// Collects id and shape of every float parameter.
pub(crate) struct Shapes(pub(crate) Vec<(ParamId, Vec<usize>)>);

impl<B: Backend> ModuleVisitor<B> for Shapes {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0.push((param.id, param.lazy_shape().to_vec()));
    }
}

/// Collects id and values of every float parameter, in module order.
struct Values<B: TrainBackend>(Vec<(ParamId, TensorPrimitive<B>)>);

impl<B: TrainBackend> ModuleVisitor<B> for Values<B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0.push((param.id, param.val().into_primitive()));
    }
}

/// Puts the parameters of another model into one, by name.
struct Parameters<'a, B: TrainBackend, N> {
    /// Names of the parameters that are still to be mapped, in module order.
    names: VecDeque<String>,
    held: HashMap<String, (ParamId, TensorPrimitive<B>)>,
    new: &'a mut N,
}

impl<B: TrainBackend, N: ModuleMapper<B>> ModuleMapper<B> for Parameters<'_, B, N> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let name = self.names.pop_front().expect("a name for each parameter");
        let Some((id, held)) = self.held.remove(&name) else {
            return self.new.map_float(param);
        };
        let held = Tensor::<B, D>::from_primitive(held);
        assert_eq!(param.lazy_shape(), held.shape(), "{name} keeps its sizes");
        // Values that are not read need not be drawn: all of a model's take minutes.
        let (_, _, mapper) = sieve_nn::drawing_only(0..1, || param.consume());
        Param::from_mapped_value(id, held, mapper)
    }
}
