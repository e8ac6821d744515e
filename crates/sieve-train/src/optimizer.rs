//! AdamW over all parameters of a model.
mod snapshot;

pub use snapshot::{OptimizerSnapshot, ReplicaSums};

use crate::collectives::Gathered;
use crate::gradients::Gradient;
use crate::group::Share;
use crate::segment::Segment;
use crate::{GradientBuffer, TrainError};
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::backend::{AutodiffBackend, BackendTypes};
use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{DType, Tensor, TensorMetadata, TensorPrimitive};
use sieve_core::recipe::OptimizerSection;
use sieve_hf::PartSource;
use sieve_nn::Qwen3;
use sieve_ops::{AdamWStep, AdamWTensors, DeviceBackend, TrainBackend};
use std::collections::HashMap;
use std::marker::PhantomData;
use std::ops::Range;

/// Moments of every parameter, and what its f32 master has beyond the model's bf16 where the model holds that. Matrices
/// (rank 2 and more) decay; norms, gates and scales do not.
///
/// Of several ranks each updates its piece of every matrix and holds moments and rests of that piece alone (ZeRO-1,
/// arXiv:1910.02054); what is too small to be cut, all of them update alike.
#[derive(Debug)]
pub struct AdamW<B: TrainBackend> {
    settings: OptimizerSection,
    share: Share,
    num_updates: u64,
    moments: HashMap<ParamId, Moments<B>>,
    /// What [`sieve_ops::split_master`] returned beside the leaf.
    masters: HashMap<ParamId, Inner<B>>,
    /// This rank's piece of each leaf that is cut, flat: a copy, which updates change before all ranks gather the leaf.
    pieces: HashMap<ParamId, Inner<B>>,
}

#[derive(Debug)]
struct Moments<B: TrainBackend> {
    exp_avg: Inner<B>,
    exp_avg_sq: Inner<B>,
}

type Inner<B> = <<B as AutodiffBackend>::InnerBackend as BackendTypes>::FloatTensorPrimitive;

impl<B: TrainBackend> AdamW<B> {
    /// Zero moments, made at each parameter's first update.
    pub fn new(settings: OptimizerSection) -> Self {
        Self::of_share(settings, Share::ALL)
    }

    /// As [`new`](Self::new), for one of several ranks.
    pub(crate) fn of_share(settings: OptimizerSection, share: Share) -> Self {
        Self {
            settings,
            share,
            num_updates: 0,
            moments: HashMap::new(),
            masters: HashMap::new(),
            pieces: HashMap::new(),
        }
    }

    /// Keeps the f32 values of `module`'s parameters as masters and returns the module in bf16.
    ///
    /// Updates then change the masters and round them into the module.
    pub fn hold_masters<M: Module<B>>(&mut self, module: M) -> M {
        module.map(&mut ToBf16 { optimizer: self })
    }

    /// One update of every parameter that has a gradient; `grad_scale` `[1]` multiplies all gradients.
    pub fn step<M: Module<B>>(
        &mut self,
        module: M,
        gradients: &mut GradientBuffer<B>,
        grad_scale: Tensor<B::InnerBackend, 1>,
        lr: f64,
    ) -> M {
        module.map(&mut self.begin(gradients, grad_scale, lr))
    }

    /// As [`step`](Self::step), segment by segment; `updated` gets the pieces of each, to gather its leaves from.
    pub(crate) fn step_by_segment(
        &mut self,
        mut model: Qwen3<B>,
        gradients: &mut GradientBuffer<B>,
        grad_scale: Tensor<B::InnerBackend, 1>,
        lr: f64,
        updated: &mut dyn FnMut(Segment, Updated<B>) -> Result<(), TrainError>,
    ) -> Result<Qwen3<B>, TrainError> {
        let mut update = self.begin(gradients, grad_scale, lr);
        for segment in Segment::all(&model) {
            model = segment.map(model, &mut update);
            updated(segment, std::mem::take(&mut update.updated))?;
        }
        Ok(model)
    }

    fn begin<'a>(
        &'a mut self,
        gradients: &'a mut GradientBuffer<B>,
        grad_scale: Tensor<B::InnerBackend, 1>,
        lr: f64,
    ) -> Update<'a, B> {
        self.num_updates += 1;
        let OptimizerSection { beta1, beta2, eps, .. } = self.settings;
        let power = self.num_updates.min(i32::MAX as u64) as i32;
        let step = AdamWStep {
            lr,
            beta1,
            beta2,
            eps,
            weight_decay: 0.0,
            bias_correction1: 1.0 - beta1.powi(power),
            bias_correction2: 1.0 - beta2.powi(power),
        };
        Update {
            optimizer: self,
            gradients,
            grad_scale: grad_scale.into_primitive().tensor(),
            step,
            updated: Vec::new(),
        }
    }

    /// Restores the optimizer's part of a [`snapshot`](Self::snapshot); `read` finds a tensor by name and shape, or
    /// some of its flattened elements.
    ///
    /// # Errors
    /// The first error of `read`.
    pub fn load_state<M: Module<B>, E>(
        &mut self,
        module: &M,
        device: &B::Device,
        read: &mut PartSource<'_, E>,
    ) -> Result<(), E> {
        let updates = read(NUM_UPDATES, &[1], None)?;
        self.num_updates = updates.iter::<i64>().next().unwrap_or(0) as u64;
        self.moments.clear();
        if self.num_updates == 0 {
            // A run saved before its first update has no moments yet; the next step makes them.
            return Ok(());
        }
        for (name, id, shape) in parameter_ids(module) {
            let range = self.share.range(&shape);
            let mut part = |part: &str| -> Result<Inner<B>, E> {
                let mut data = read(&format!("{name}.{part}"), &shape, range.clone())?;
                let own = match &range {
                    Some(range) => vec![range.len()],
                    None => shape.clone(),
                };
                data.shape = [own.iter().product::<usize>()].into();
                let flat = Tensor::<B::InnerBackend, 1>::from_data(data, device);
                let flat = flat.into_primitive().tensor();
                Ok(B::InnerBackend::float_reshape(flat, own.into()))
            };
            let moments = Moments {
                exp_avg: part(EXP_AVG)?,
                exp_avg_sq: part(EXP_AVG_SQ)?,
            };
            self.moments.insert(id, moments);
        }
        Ok(())
    }
}

const NUM_UPDATES: &str = "num_updates";
const EXP_AVG: &str = "exp_avg";
const EXP_AVG_SQ: &str = "exp_avg_sq";

/// Name, id and shape of every float parameter, in module order.
fn parameter_ids<B: TrainBackend, M: Module<B>>(module: &M) -> Vec<(String, ParamId, Vec<usize>)> {
    let mut ids = Ids {
        found: Vec::new(),
        backend: PhantomData,
    };
    module.visit(&mut ids);
    let names = sieve_hf::parameter_names(module);
    names
        .into_iter()
        .zip(ids.found)
        .map(|(name, (id, shape))| (name, id, shape))
        .collect()
}

struct Ids<B> {
    found: Vec<(ParamId, Vec<usize>)>,
    backend: PhantomData<B>,
}

impl<B: TrainBackend> burn::module::ModuleVisitor<B> for Ids<B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.found.push((param.id, param.val().dims().to_vec()));
    }
}

/// Leaves of a segment that were updated in pieces.
pub(crate) type Updated<B> = Vec<(ParamId, Gathered<B>)>;

struct Update<'a, B: TrainBackend> {
    optimizer: &'a mut AdamW<B>,
    gradients: &'a mut GradientBuffer<B>,
    grad_scale: Inner<B>,
    step: AdamWStep,
    updated: Updated<B>,
}

impl<B: TrainBackend> Update<'_, B> {
    /// The next leaf, whole or of this rank's piece.
    fn leaf(&mut self, id: ParamId, leaf: Inner<B>, gradient: Inner<B>, decays: bool) -> Inner<B> {
        let optimizer = &mut *self.optimizer;
        let (param, leaf) = match optimizer.masters.remove(&id) {
            Some(master) => (master, Some(leaf)),
            None => (leaf, None),
        };
        let zeros = || {
            let dtype = match &leaf {
                Some(_) => DType::F32,
                None => param.dtype(),
            };
            let device = B::InnerBackend::float_device(&param);
            B::InnerBackend::float_zeros(param.shape(), &device, dtype.into())
        };
        let Moments { exp_avg, exp_avg_sq } = optimizer.moments.remove(&id).unwrap_or_else(|| Moments {
            exp_avg: zeros(),
            exp_avg_sq: zeros(),
        });
        let weight_decay = if decays { optimizer.settings.weight_decay } else { 0.0 };
        let tensors = AdamWTensors {
            param,
            leaf,
            exp_avg,
            exp_avg_sq,
        };
        let step = AdamWStep {
            weight_decay,
            ..self.step
        };
        let next = B::InnerBackend::adamw(tensors, gradient, self.grad_scale.clone(), step);
        let moments = Moments {
            exp_avg: next.exp_avg,
            exp_avg_sq: next.exp_avg_sq,
        };
        optimizer.moments.insert(id, moments);
        match next.leaf {
            Some(leaf) => {
                optimizer.masters.insert(id, next.param);
                leaf
            }
            None => next.param,
        }
    }
}

impl<B: TrainBackend> ModuleMapper<B> for Update<'_, B> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let Some(Gradient { values, is_piece }) = self.gradients.take(id) else {
            return Param::from_mapped_value(id, tensor, mapper);
        };
        let decays = D >= 2;
        if !is_piece {
            let leaf = self.leaf(id, tensor.inner().into_primitive().tensor(), values, decays);
            let leaf = Tensor::from_primitive(TensorPrimitive::Float(leaf));
            let leaf = Tensor::<B, D>::from_inner(leaf).require_grad();
            return Param::from_mapped_value(id, leaf, mapper);
        }
        let share = self.optimizer.share;
        let pieces = share.pieces(&tensor.dims()).expect("its gradient is cut");
        let whole = tensor.clone().inner().into_primitive().tensor();
        let piece = self.optimizer.pieces.remove(&id);
        let piece = piece.unwrap_or_else(|| cut::<B>(whole.clone(), pieces.of(share.rank)));
        let piece = self.leaf(id, piece, values, decays);
        self.optimizer.pieces.insert(id, piece.clone());
        let gathered = Gathered { piece, whole, pieces };
        self.updated.push((id, gathered));
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// Some elements of a tensor, flat.
fn cut<B: TrainBackend>(whole: Inner<B>, range: Range<usize>) -> Inner<B> {
    let count = whole.shape().num_elements();
    let flat = B::InnerBackend::float_reshape(whole, [count].into());
    let flat = Tensor::<B::InnerBackend, 1>::from_primitive(TensorPrimitive::Float(flat));
    flat.slice([range]).into_primitive().tensor()
}

struct ToBf16<'a, B: TrainBackend> {
    optimizer: &'a mut AdamW<B>,
}

impl<B: TrainBackend> ModuleMapper<B> for ToBf16<'_, B> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let range = self.optimizer.share.range(&tensor.dims());
        let master = tensor.inner();
        let (leaf, mut rest) = sieve_ops::split_master(master.clone());
        if let Some(range) = range {
            // Split again: a view of the whole rest would keep all of it.
            let piece = cut::<B>(master.into_primitive().tensor(), range);
            let piece = Tensor::<B::InnerBackend, 1>::from_primitive(TensorPrimitive::Float(piece));
            let (piece, own) = sieve_ops::split_master(piece);
            self.optimizer.pieces.insert(id, piece.into_primitive().tensor());
            rest = own;
        }
        self.optimizer.masters.insert(id, rest);
        Param::from_mapped_value(id, Tensor::from_inner(leaf).require_grad(), mapper)
    }
}
