//! AdamW over all parameters of a model, or Muon over the matrices of its blocks and AdamW over the others.
mod muon;
mod snapshot;

pub use snapshot::{OptimizerSnapshot, ReplicaSums};

use crate::collectives::{Gathered, Primitive as Inner, Updated, flat};
use crate::gradients::Gradient;
use crate::group::{Group, WeightPieces, released};
use crate::segment::Segment;
use crate::share::Share;
use crate::{GradientBuffer, Precision, TrainError};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{DType, Tensor, TensorMetadata, TensorPrimitive};
use muon::Projection;
use sieve_core::ModelShape;
use sieve_core::kinds::{ParamSpec, Part};
use sieve_core::recipe::{OptimizerName, OptimizerSection};
use sieve_hf::PartSource;
use sieve_nn::Qwen3;
use sieve_ops::{AdamWStep, AdamWTensors, DeviceBackend, TrainBackend};
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// Moments of every parameter, and the low 16 bits of its f32 master if the model holds bf16 weights. Matrices (rank 2
/// and more) have weight decay; norms, gates and scales do not.
///
/// With several ranks, each updates its piece of every matrix and holds the moments and low bits of that piece (ZeRO-1,
/// arXiv:1910.02054). With ZeRO-3 it holds its piece of the weights alone, too. Vectors and small matrices are updated
/// by all ranks. Muon gathers the update of a divided matrix on one rank, which orthogonalises it; see `muon.rs`. With
/// `parallelism.shard_ranks`, matrices are divided within each group of that many ranks, so that every group has all.
#[derive(Debug)]
pub struct Optimizer<B: TrainBackend> {
    settings: OptimizerSection,
    share: Share,
    /// The model's list of parameters, which says what Muon updates and what belongs to an indexer.
    parameters: Vec<ParamSpec>,
    num_updates: u64,
    /// Parameters that Muon updates, and the number of rows of each projection that is packed in them.
    matrices: HashMap<ParamId, Vec<usize>>,
    /// Parameters of indexers, if they have a learning rate of their own.
    indexers: HashSet<ParamId>,
    moments: HashMap<ParamId, Moments<B>>,
    /// The 16 bits of the f32 master that the bf16 weight lacks, from [`sieve_ops::split_master`].
    masters: HashMap<ParamId, Inner<B>>,
    /// A flat copy of this rank's piece of each divided weight. An update changes the copy; then all ranks gather the
    /// weight. With ZeRO-3 it is all that this rank has of the weight.
    pieces: WeightPieces<B>,
}

#[derive(Debug)]
struct Moments<B: TrainBackend> {
    /// AdamW's first moment, or Muon's momentum.
    exp_avg: Inner<B>,
    /// AdamW's second moment; `None` for parameters that Muon updates.
    exp_avg_sq: Option<Inner<B>>,
    /// Number of the optimizer's updates before the parameter's first one: not 0 for a parameter that was added to a
    /// trained model. The correction of the moments' bias counts from there.
    updates_before: u64,
}

impl<B: TrainBackend> Optimizer<B> {
    /// An optimizer of a model of `shape` whose moments are zero; they are allocated at each parameter's first update.
    pub fn new(settings: OptimizerSection, shape: &ModelShape) -> Self {
        Self::of_share(settings, shape, Share::ALL)
    }

    /// Like [`new`](Self::new), for one of several ranks.
    pub(crate) fn of_share(settings: OptimizerSection, shape: &ModelShape, share: Share) -> Self {
        Self {
            settings,
            share,
            parameters: shape.all_parameters(),
            num_updates: 0,
            matrices: HashMap::new(),
            indexers: HashSet::new(),
            moments: HashMap::new(),
            masters: HashMap::new(),
            pieces: HashMap::new(),
        }
    }

    /// Keeps the f32 values of `module`'s parameters as masters and returns the module in bf16.
    ///
    /// Updates then change the masters and round them into the module.
    pub fn hold_masters<M: Module<B>>(&mut self, module: M) -> M {
        module.map(&mut self.holder(Precision::Bf16))
    }

    /// Maps f32 parameters to the parameters that a step computes with: bf16 with masters as
    /// [`hold_masters`](Self::hold_masters) keeps them, or f32. With ZeRO-3 it keeps only this rank's pieces.
    pub(crate) fn holder(&mut self, precision: Precision) -> Holder<'_, B> {
        Holder { optimizer: self, precision }
    }

    /// Whether it has updated weights, so that it has their moments.
    pub(crate) fn has_updated(&self) -> bool {
        self.num_updates > 0
    }

    /// This rank's piece of each divided weight.
    pub(crate) fn pieces(&self) -> &WeightPieces<B> {
        &self.pieces
    }

    /// Continues with `module`, a model of `shape`: keeps the state of its parameters and forgets all other state.
    /// Parameters that are new begin without moments.
    pub(crate) fn go_on_with<M: Module<B>>(&mut self, shape: &ModelShape, module: &M) {
        self.parameters = shape.all_parameters();
        let kept = parameter_ids(module).into_iter().map(|(_, id, _)| id).collect::<HashSet<_>>();
        self.moments.retain(|id, _| kept.contains(id));
        self.masters.retain(|id, _| kept.contains(id));
        self.pieces.retain(|id, _| kept.contains(id));
        // Found again at the next update.
        self.matrices.clear();
        self.indexers.clear();
    }

    /// Updates every parameter that has a gradient. `grad_scale`, `[1]`, multiplies all gradients.
    pub fn step<M: Module<B>>(
        &mut self,
        module: M,
        gradients: &mut GradientBuffer<B>,
        grad_scale: Tensor<B::InnerBackend, 1>,
        lr: f64,
    ) -> M {
        self.find_groups(&module);
        module.map(&mut self.begin(gradients, grad_scale, lr))
    }

    /// As [`step`](Self::step), in the order embedding, blocks, head. The ranks of `group` share the work on matrices
    /// that Muon updates, and start gathering a segment's weights once its pieces are updated.
    ///
    /// # Errors
    /// A rank is lost.
    pub(crate) fn step_by_segment(
        &mut self,
        mut model: Qwen3<B>,
        gradients: &mut GradientBuffer<B>,
        grad_scale: Tensor<B::InnerBackend, 1>,
        lr: f64,
        group: &mut Group<B>,
    ) -> Result<Qwen3<B>, TrainError> {
        self.find_groups(&model);
        let mut update = self.begin(gradients, grad_scale, lr);
        update.orthogonalise_pieces(&model, group)?;
        for segment in Segment::all(&model) {
            model = segment.map(model, &mut update);
            group.gather_leaves(segment, std::mem::take(&mut update.updated))?;
        }
        Ok(model)
    }

    /// Fills `matrices` and `indexers` from the model's list of parameters, at the first call.
    fn find_groups<M: Module<B>>(&mut self, module: &M) {
        let is_muon = self.settings.name == OptimizerName::Muon && self.matrices.is_empty();
        let own_rate = self.settings.indexer_scale().is_some() && self.indexers.is_empty();
        if !is_muon && !own_rate {
            return;
        }
        let specs: HashMap<&str, &ParamSpec> = self.parameters.iter().map(|spec| (spec.ours.as_str(), spec)).collect();
        for (name, id, shape) in parameter_ids(module) {
            let spec = specs.get(name.as_str()).unwrap_or_else(|| panic!("{name} is a parameter of the model's list"));
            assert_eq!(spec.dims, shape, "{name} has the sizes of the model's list");
            if let Some(rows) = spec.orthogonal_rows().filter(|_| is_muon) {
                self.matrices.insert(id, rows);
            }
            if own_rate && spec.part == Part::Indexer {
                self.indexers.insert(id);
            }
        }
    }

    /// Begins an update: counts it, and computes the step's numbers but the weight decay, which differs by parameter.
    fn begin<'a>(
        &'a mut self,
        gradients: &'a mut GradientBuffer<B>,
        grad_scale: Tensor<B::InnerBackend, 1>,
        lr: f64,
    ) -> Update<'a, B> {
        self.num_updates += 1;
        let OptimizerSection { beta1, beta2, eps, .. } = self.settings;
        let [bias_correction1, bias_correction2] = self.bias_corrections(0);
        let step = AdamWStep { lr, beta1, beta2, eps, weight_decay: 0.0, bias_correction1, bias_correction2 };
        Update {
            optimizer: self,
            gradients,
            grad_scale: grad_scale.into_primitive().tensor(),
            step,
            orthogonal: HashMap::new(),
            updated: Vec::new(),
        }
    }

    /// `1 - beta^n` of both moments, where n is the number of the parameter's own updates: all of the optimizer's but
    /// `updates_before`. Skipped ones count, because the device alone knows of them in time: where the first steps of
    /// a run are skipped, its first updates are smaller than Adam's.
    fn bias_corrections(&self, updates_before: u64) -> [f64; 2] {
        let power = self.num_updates.saturating_sub(updates_before).min(i32::MAX as u64) as i32;
        [self.settings.beta1, self.settings.beta2].map(|beta| 1.0 - beta.powi(power))
    }

    /// Restores the moments and the number of updates from a saved [`snapshot`](Self::snapshot). `read` returns a
    /// tensor by name and shape, or a range of its flattened elements; `has` says whether one was saved. Parameters
    /// that `is_new`, by their names, have none: their moments start at their first update.
    ///
    /// # Errors
    /// The first error of `read`.
    pub(crate) fn load_state<M: Module<B>, E>(
        &mut self,
        module: &M,
        device: &B::Device,
        read: &mut PartSource<'_, E>,
        has: &dyn Fn(&str) -> bool,
        is_new: &dyn Fn(&str) -> bool,
    ) -> Result<(), E> {
        let whole = None;
        let updates = read(NUM_UPDATES, &[1], whole.clone())?;
        self.num_updates = updates.iter::<i64>().next().unwrap_or(0) as u64;
        self.moments.clear();
        if self.num_updates == 0 {
            // A checkpoint from before the first update has no moments; the first step creates them.
            return Ok(());
        }
        self.find_groups(module);
        for (name, id, shape) in parameter_ids(module).into_iter().filter(|(name, ..)| !is_new(name)) {
            let range = self.share.range(&shape);
            let late = format!("{name}.{UPDATES_BEFORE}");
            let updates_before =
                if has(&late) { read(&late, &[1], whole.clone())?.iter::<i64>().next().unwrap_or(0) as u64 } else { 0 };
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
                exp_avg_sq: if self.matrices.contains_key(&id) { None } else { Some(part(EXP_AVG_SQ)?) },
                updates_before,
            };
            self.moments.insert(id, moments);
        }
        Ok(())
    }
}

const NUM_UPDATES: &str = "num_updates";
const EXP_AVG: &str = "exp_avg";
const EXP_AVG_SQ: &str = "exp_avg_sq";
/// Saved only where it is not 0.
const UPDATES_BEFORE: &str = "updates_before";

/// Name, id and shape of every float parameter, in module order.
fn parameter_ids<B: TrainBackend, M: Module<B>>(module: &M) -> Vec<(String, ParamId, Vec<usize>)> {
    let mut ids = Ids(Vec::new());
    module.visit(&mut ids);
    let names = sieve_hf::parameter_names(module);
    names.into_iter().zip(ids.0).map(|(name, (id, shape))| (name, id, shape)).collect()
}

struct Ids(Vec<(ParamId, Vec<usize>)>);

impl<B: TrainBackend> ModuleVisitor<B> for Ids {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0.push((param.id, param.lazy_shape().to_vec()));
    }
}

/// One update of the optimizer, mapped over the model's parameters.
struct Update<'a, B: TrainBackend> {
    optimizer: &'a mut Optimizer<B>,
    gradients: &'a mut GradientBuffer<B>,
    grad_scale: Inner<B>,
    step: AdamWStep,
    /// Muon's updates of this rank's pieces, from [`orthogonalise_pieces`](Self::orthogonalise_pieces).
    orthogonal: HashMap<ParamId, muon::Orthogonal<B>>,
    /// Divided weights whose pieces were updated, until a gather takes them.
    updated: Updated<B>,
}

/// What changes a weight.
enum Change<B: TrainBackend> {
    Gradient(Inner<B>),
    /// Muon's update, whose momentum is already among the moments.
    Orthogonal(Inner<B>),
}

impl<B: TrainBackend> Update<'_, B> {
    /// Updates a weight, or this rank's piece of it, with its moments and master, and returns it. AdamW's kernel
    /// applies every update; a matrix that Muon updates has its orthogonalised momentum in place of the gradient.
    fn updated_leaf(&mut self, id: ParamId, leaf: Inner<B>, change: Change<B>, decays: bool) -> Inner<B> {
        let optimizer = &mut *self.optimizer;
        // With masters, `param` is the low bits and `leaf` the bf16 weight; without, `param` is the f32 weight.
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
        let weight_decay = if decays { optimizer.settings.weight_decay } else { 0.0 };
        let lr_scale = optimizer.settings.indexer_scale().filter(|_| optimizer.indexers.contains(&id));
        let mut step = AdamWStep { lr: self.step.lr * lr_scale.unwrap_or(1.0), weight_decay, ..self.step };
        let mut moments = optimizer.moments.remove(&id).unwrap_or_else(|| Moments {
            exp_avg: zeros(),
            exp_avg_sq: None,
            updates_before: optimizer.num_updates.saturating_sub(1),
        });
        let updates_before = moments.updates_before;
        if updates_before > 0 {
            [step.bias_correction1, step.bias_correction2] = optimizer.bias_corrections(updates_before);
        }
        let change = match (change, optimizer.matrices.get(&id)) {
            (Change::Gradient(gradient), Some(projections)) => {
                let dtype = leaf.as_ref().map_or(param.dtype(), |leaf| leaf.dtype());
                let (momentum, update) =
                    muon::momentum::<B, 2>(moments.exp_avg, gradient, self.grad_scale.clone(), step.beta1, dtype);
                moments.exp_avg = momentum;
                Change::Orthogonal(muon::orthogonal::<B>(update, projections, moments.exp_avg.dtype()))
            }
            (change, _) => change,
        };
        let (gradient, grad_scale, momentum, exp_avg) = match change {
            Change::Gradient(gradient) => (gradient, self.grad_scale.clone(), None, moments.exp_avg),
            Change::Orthogonal(update) => {
                // AdamW's kernel with these numbers computes p -= lr (weight_decay p + update): its first moment is the
                // update, and its second moment stays 0.
                step = AdamWStep {
                    beta1: 0.0,
                    beta2: 1.0,
                    eps: 1.0,
                    bias_correction1: 1.0,
                    bias_correction2: 1.0,
                    ..step
                };
                let gate = muon::gate::<B>(self.grad_scale.clone(), update.dtype());
                (update, gate, Some(moments.exp_avg), zeros())
            }
        };
        let tensors = AdamWTensors { exp_avg, exp_avg_sq: moments.exp_avg_sq.unwrap_or_else(zeros), param, leaf };
        let next = B::InnerBackend::adamw(tensors, gradient, grad_scale, step);
        let moments = match momentum {
            Some(exp_avg) => Moments { exp_avg, exp_avg_sq: None, updates_before },
            None => Moments { exp_avg: next.exp_avg, exp_avg_sq: Some(next.exp_avg_sq), updates_before },
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

impl<B: TrainBackend> Update<'_, B> {
    /// Takes the gradients of this rank's pieces of the matrices that Muon updates, and fills `orthogonal` with their
    /// updates. All ranks call it.
    ///
    /// # Errors
    /// A rank is lost.
    fn orthogonalise_pieces(&mut self, model: &Qwen3<B>, group: &Group<B>) -> Result<(), TrainError> {
        let mut projections = self.divided_projections(model);
        // The most work first, so that ranks work about equally long. The sort is stable: all ranks have one order.
        projections.sort_by_key(|projection| std::cmp::Reverse(projection.work()));
        let Some(first) = projections.first() else {
            return Ok(());
        };
        let dtype = self.dtype_of(first.id);
        let like =
            B::InnerBackend::float_zeros([1].into(), &B::InnerBackend::float_device(&self.grad_scale), dtype.into());
        let updates = self.raw_updates(&projections, dtype);
        let Share { group: shards, .. } = self.optimizer.share;
        let place = [shards.place(), shards.size()];
        let exchange = |exchanged| group.exchange(exchanged);
        let found = muon::orthogonalised_parts::<B>(&projections, updates, like, place, &exchange)?;
        let mut parts: HashMap<ParamId, Vec<(usize, Inner<B>, f64)>> = HashMap::new();
        for (place, part) in found {
            let Projection { id, index, shape, .. } = projections[place];
            parts.entry(id).or_default().push((index, part, muon::scale_of(shape)));
        }
        for (id, mut parts) in parts {
            parts.sort_by_key(|(index, ..)| *index);
            let parts = parts.into_iter().map(|(_, part, factor)| (part, factor)).collect();
            let dtype = self.optimizer.moments[&id].exp_avg.dtype();
            self.orthogonal.insert(id, muon::Orthogonal { parts, dtype });
        }
        Ok(())
    }

    /// The projections of which this rank has a piece of the gradient, in module order.
    fn divided_projections(&self, model: &Qwen3<B>) -> Vec<Projection> {
        let mut found = Vec::new();
        for (_, id, shape) in parameter_ids(model) {
            let rows = self.optimizer.matrices.get(&id).filter(|_| self.gradients.has_piece(id));
            let (Some(rows), Some(pieces)) = (rows, self.optimizer.share.pieces(&shape)) else {
                continue;
            };
            let mut end = 0;
            for (index, &rows) in rows.iter().enumerate() {
                let start = end;
                end += rows * shape[1];
                found.push(Projection { id, index, range: start..end, shape: [rows, shape[1]], pieces });
            }
            assert_eq!(end, shape.iter().product::<usize>(), "projections of all rows");
        }
        found
    }

    /// The type in which a divided matrix is orthogonalised: the weights'.
    fn dtype_of(&self, id: ParamId) -> DType {
        self.optimizer.pieces.get(&id).map_or(DType::F32, |piece| piece.dtype())
    }

    /// Advances the momentum of this rank's pieces, and returns its part of each projection's raw update, flat. `None`
    /// where its piece holds nothing of the projection.
    fn raw_updates(&mut self, projections: &[Projection], dtype: DType) -> Vec<Option<Inner<B>>> {
        let rank = self.optimizer.share.group.place();
        let mut by_id: HashMap<ParamId, Vec<usize>> = HashMap::new();
        for (place, projection) in projections.iter().enumerate() {
            by_id.entry(projection.id).or_default().push(place);
        }
        let mut parts = vec![None; projections.len()];
        for (id, places) in by_id {
            assert_eq!(self.dtype_of(id), dtype, "all matrices have one type");
            let Gradient { values, .. } = self.gradients.take(id).expect("it is among those with a gradient");
            let optimizer = &mut *self.optimizer;
            let moments = optimizer.moments.remove(&id);
            let moments = moments.unwrap_or_else(|| Moments {
                exp_avg: B::InnerBackend::float_zeros(
                    values.shape(),
                    &B::InnerBackend::float_device(&values),
                    DType::F32.into(),
                ),
                exp_avg_sq: None,
                updates_before: optimizer.num_updates.saturating_sub(1),
            });
            let beta = optimizer.settings.beta1;
            let (exp_avg, update) =
                muon::momentum::<B, 1>(moments.exp_avg, values, self.grad_scale.clone(), beta, dtype);
            optimizer.moments.insert(id, Moments { exp_avg, ..moments });
            for place in places {
                let projection = &projections[place];
                let part = projection.part(rank);
                if part.is_empty() {
                    continue;
                }
                let start = projection.range.start + part.start - projection.pieces.of(rank).start;
                let range = start..start + part.len();
                let slice = flat::<B>(update.clone()).slice([range]).into_primitive().tensor();
                // Multiplied by 1 to copy it: a slice would keep the whole update in memory.
                parts[place] = Some(B::InnerBackend::float_mul_scalar(slice, 1f32.into()));
            }
        }
        parts
    }
}

impl<B: TrainBackend> ModuleMapper<B> for Update<'_, B> {
    /// Updates a whole parameter in the model, or this rank's piece of it in `pieces`, which `updated` lists.
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let (change, is_piece) = match (self.orthogonal.remove(&id), self.gradients.take(id)) {
            (Some(update), _) => (Change::Orthogonal(update.joined()), true),
            (None, Some(Gradient { values, is_piece })) => (Change::Gradient(values), is_piece),
            // A parameter without a gradient is not updated.
            (None, None) => return Param::from_mapped_value(id, tensor, mapper),
        };
        let decays = D >= 2;
        if !is_piece {
            let leaf = self.updated_leaf(id, tensor.inner().into_primitive().tensor(), change, decays);
            let leaf = Tensor::from_primitive(TensorPrimitive::Float(leaf));
            let leaf = Tensor::<B, D>::from_inner(leaf).require_grad();
            return Param::from_mapped_value(id, leaf, mapper);
        }
        let share = self.optimizer.share;
        let pieces = share.pieces(&tensor.dims()).expect("its gradient is cut");
        let whole = tensor.clone().inner().into_primitive().tensor();
        let piece = self.optimizer.pieces.remove(&id);
        let piece = piece.unwrap_or_else(|| cut::<B>(whole.clone(), share.own(pieces)));
        let piece = self.updated_leaf(id, piece, change, decays);
        self.optimizer.pieces.insert(id, piece.clone());
        if share.keeps_whole {
            self.updated.push((id, Gathered { piece, whole, pieces }));
        }
        // The weight has its old values until the pieces of all ranks are gathered.
        Param::from_mapped_value(id, tensor, mapper)
    }
}

/// A range of the elements of a flattened tensor.
fn cut<B: TrainBackend>(whole: Inner<B>, range: Range<usize>) -> Inner<B> {
    flat::<B>(whole).slice([range]).into_primitive().tensor()
}

/// Keeps f32 parameters as the optimizer needs them between updates; see [`Optimizer::holder`]. Maps one parameter
/// after another, so that a model whose parameters are still to be drawn or read is never whole in memory.
pub(crate) struct Holder<'a, B: TrainBackend> {
    optimizer: &'a mut Optimizer<B>,
    precision: Precision,
}

impl<B: TrainBackend> ModuleMapper<B> for Holder<'_, B> {
    /// Rounds a bf16 model's weight and keeps the rest as its master; cuts this rank's piece of a divided weight.
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Optimizer { share, masters, pieces, .. } = &mut *self.optimizer;
        let is_bf16 = self.precision == Precision::Bf16;
        if !is_bf16 && share.keeps_whole {
            return param;
        }
        let shape: [usize; D] = param.lazy_shape().dims();
        let range = share.range(&shape);
        // A parameter that is still to be drawn is drawn in this rank's range alone.
        let (id, tensor, mapper) = match range.clone().filter(|_| !share.keeps_whole) {
            Some(range) => sieve_nn::drawing_only(range, || param.consume()),
            None => param.consume(),
        };
        let mut master = tensor.inner();
        let is_cut = range.is_some();
        if let Some(range) = range {
            // A tensor that was drawn in the range alone has only the range's elements. `split_master` and the
            // multiplication by 1 both copy: a slice would keep the whole tensor in memory.
            let own = if master.dims() == shape { range } else { 0..range.len() };
            let piece = cut::<B>(master.clone().into_primitive().tensor(), own);
            let piece = if is_bf16 {
                let piece = Tensor::<B::InnerBackend, 1>::from_primitive(TensorPrimitive::Float(piece));
                let (piece, rest) = sieve_ops::split_master(piece);
                masters.insert(id, rest);
                piece.into_primitive().tensor()
            } else {
                B::InnerBackend::float_mul_scalar(piece, 1f32.into())
            };
            pieces.insert(id, piece);
            if !share.keeps_whole {
                let released = released::<B, D>(&pieces[&id], shape, &mut None);
                return Param::from_mapped_value(id, Tensor::from_inner(released).require_grad(), mapper);
            }
        }
        if is_bf16 {
            let (leaf, rest) = sieve_ops::split_master(master);
            master = leaf;
            if !is_cut {
                masters.insert(id, rest);
            }
        }
        Param::from_mapped_value(id, Tensor::from_inner(master).require_grad(), mapper)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::Autodiff;
    use burn_flex::{Flex, FlexDevice};
    use sieve_core::Recipe;

    fn msa_80m() -> String {
        sieve_core::recipe::sibling("msa_80m", include_str!("../../../recipes/mha_80m.toml")).expect("a known name")
    }

    /// A model of one layer, and its optimizer.
    fn small_model(recipe: &str, more: &[&str]) -> (Qwen3<Autodiff<Flex>>, Optimizer<Autodiff<Flex>>) {
        let small = "model.num_hidden_layers=1 model.hidden_size=96 model.intermediate_size=40 \
            model.num_attention_heads=4 model.num_key_value_heads=2 model.head_dim=32 model.vocab_size=64";
        let overrides = small.split_whitespace().chain(more.iter().copied());
        let overrides = overrides.map(str::to_owned).collect::<Vec<_>>();
        let recipe = Recipe::load(recipe, "a recipe", &overrides).unwrap();
        let shape = recipe.model_shape(64).unwrap();
        let model = Qwen3::new(&shape, 0, &FlexDevice);
        (model, Optimizer::new(recipe.optimizer, &shape))
    }

    /// The packed and the compressing matrices of a block that Muon updates, by name, with their projections' rows.
    fn packed_matrices(recipe: &str, more: &[&str]) -> Vec<(String, Vec<usize>)> {
        let (model, mut optimizer) = small_model(recipe, &[&["optimizer.name=Muon"], more].concat());
        optimizer.find_groups(&model);
        let all = parameter_ids(&model).into_iter();
        let parts = all.filter_map(|(name, id, _)| Some((name, optimizer.matrices.get(&id)?.clone())));
        let short = parts.map(|(name, parts)| (name.split("self_attn.").last().unwrap().to_owned(), parts));
        short.filter(|(name, parts)| parts.len() > 1 || name.contains("compress")).collect()
    }

    /// Every parameter's name and values after an update whose gradients are all 1.
    fn values_after_update(more: &[&str]) -> Vec<(String, Vec<f32>)> {
        let (model, mut optimizer) = small_model(&msa_80m(), more);
        let mut gradients = GradientBuffer::default();
        for (_, id, shape) in parameter_ids(&model) {
            let values = <Flex as FloatTensorOps<Flex>>::float_ones(shape.into(), &FlexDevice, DType::F32.into());
            gradients.put(id, Gradient { values, is_piece: false });
        }
        let scale = Tensor::from_floats([1.0], &FlexDevice);
        let model = optimizer.step(model, &mut gradients, scale, 1e-3);
        let named = sieve_hf::named_parameters(&model).into_iter();
        named.map(|tensor| (tensor.name, tensor.data.iter::<f32>().collect())).collect()
    }

    #[test]
    fn an_indexer_has_a_learning_rate_of_its_own() {
        let rate = |scale: f64| format!("optimizer.indexer_lr={}", 3e-3 * scale);
        let [same, still, double] = [1.0, 0.0, 2.0].map(|scale| values_after_update(&[&rate(scale)]));
        assert_eq!(same, values_after_update(&[]));
        let (before, _) = small_model(&msa_80m(), &[]);
        let before = sieve_hf::named_parameters(&before);
        let mut num_of_indexer = 0;
        for (at, (name, values)) in same.iter().enumerate() {
            let is_of_indexer = name.contains("indexer.");
            let begun = before[at].data.iter::<f32>().collect::<Vec<_>>();
            assert_eq!(still[at].1 == begun, is_of_indexer, "{name}");
            assert_eq!(double[at].1 != *values, is_of_indexer, "{name}");
            num_of_indexer += usize::from(is_of_indexer);
        }
        assert_eq!(num_of_indexer, 3, "a projection and two norms");
    }

    #[test]
    fn muon_takes_each_packed_projection_as_a_matrix() {
        let gate_up = ("layers.0.mlp.gate_up_proj.weight", vec![40, 40]);
        let qkv = ("qkv.qkv_proj.weight", vec![128, 64, 64]);
        let nsa = include_str!("../../../recipes/nsa_80m.toml");
        let msa: &str = &msa_80m();
        for (recipe, more, own) in [
            (
                nsa,
                &["attention.shared_kv=false", "attention.compress_hidden_size=48"][..],
                // The position embeddings, `[32, 32]`, are not among the matrices.
                vec![
                    ("compress_kv_proj.weight", vec![64, 64]),
                    ("select_kv_proj.weight", vec![64, 64]),
                    ("k_compress.up_proj.weight", vec![48]),
                    ("k_compress.down_proj.weight", vec![32]),
                    ("v_compress.up_proj.weight", vec![48]),
                    ("v_compress.down_proj.weight", vec![32]),
                ],
            ),
            (msa, &[], vec![("indexer.proj.weight", vec![64, 32])]),
        ] {
            let expected = [vec![qkv.clone()], own, vec![gate_up.clone()]].concat();
            let expected = expected.into_iter().map(|(name, parts)| (name.to_owned(), parts));
            assert_eq!(packed_matrices(recipe, more), expected.collect::<Vec<_>>());
        }
    }
}
