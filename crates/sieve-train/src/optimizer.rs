//! AdamW over all parameters of a model, or Muon over the matrices of its blocks and AdamW over the others.
mod snapshot;

pub use snapshot::{OptimizerSnapshot, ReplicaSums};

use crate::collectives::{Gathered, Primitive as Inner, flat};
use crate::gradients::Gradient;
use crate::group::{Released, Share, WeightPieces};
use crate::segment::Segment;
use crate::{GradientBuffer, Precision, TrainError};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{DType, Tensor, TensorMetadata, TensorPrimitive};
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
/// by all ranks. Muon needs whole matrices, so it runs with `zero_stage = 0`.
#[derive(Debug)]
pub struct Optimizer<B: TrainBackend> {
    settings: OptimizerSection,
    share: Share,
    /// The model's parameters, by which groups are found.
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

    /// Maps f32 parameters to those that a step computes with: bf16 with masters as
    /// [`hold_masters`](Self::hold_masters) keeps them, or f32. With ZeRO-3 it keeps this rank's pieces of them alone.
    pub(crate) fn holder(&mut self, precision: Precision) -> Holder<'_, B> {
        Holder { optimizer: self, precision }
    }

    /// This rank's piece of each divided weight.
    pub(crate) fn pieces(&self) -> &WeightPieces<B> {
        &self.pieces
    }

    /// Goes on with a model of `shape`, whose parameters are those of `module`: forgets the state of all others. What is
    /// new begins without moments.
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

    /// As [`step`](Self::step), segment by segment. `updated` receives the updated pieces of each segment, to gather
    /// its weights.
    pub(crate) fn step_by_segment(
        &mut self,
        mut model: Qwen3<B>,
        gradients: &mut GradientBuffer<B>,
        grad_scale: Tensor<B::InnerBackend, 1>,
        lr: f64,
        updated: &mut dyn FnMut(Segment, Updated<B>) -> Result<(), TrainError>,
    ) -> Result<Qwen3<B>, TrainError> {
        self.find_groups(&model);
        let mut update = self.begin(gradients, grad_scale, lr);
        for segment in Segment::all(&model) {
            model = segment.map(model, &mut update);
            updated(segment, std::mem::take(&mut update.updated))?;
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
            updated: Vec::new(),
        }
    }

    /// `1 - beta^n` of both moments, of a parameter with n updates: all but `updates_before`.
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
            let updates_before = match has(&late) {
                true => read(&late, &[1], whole.clone())?.iter::<i64>().next().unwrap_or(0) as u64,
                false => 0,
            };
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
                exp_avg_sq: match self.matrices.contains_key(&id) {
                    true => None,
                    false => Some(part(EXP_AVG_SQ)?),
                },
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

/// Weights of a segment whose pieces were updated, ready to be gathered.
pub(crate) type Updated<B> = Vec<(ParamId, Gathered<B>)>;

/// One update of the optimizer, mapped over the model's parameters.
struct Update<'a, B: TrainBackend> {
    optimizer: &'a mut Optimizer<B>,
    gradients: &'a mut GradientBuffer<B>,
    grad_scale: Inner<B>,
    step: AdamWStep,
    updated: Updated<B>,
}

impl<B: TrainBackend> Update<'_, B> {
    /// Updates a weight, or this rank's piece of it, with its moments and master, and returns it.
    fn updated_leaf(&mut self, id: ParamId, leaf: Inner<B>, gradient: Inner<B>, decays: bool) -> Inner<B> {
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
        let (mut gradient, mut grad_scale) = (gradient, self.grad_scale.clone());
        let mut moments = optimizer.moments.remove(&id).unwrap_or_else(|| Moments {
            exp_avg: zeros(),
            exp_avg_sq: None,
            updates_before: optimizer.num_updates.saturating_sub(1),
        });
        let updates_before = moments.updates_before;
        if updates_before > 0 {
            [step.bias_correction1, step.bias_correction2] = optimizer.bias_corrections(updates_before);
        }
        let mut momentum = None;
        if let Some(parts) = optimizer.matrices.get(&id) {
            let dtype = leaf.as_ref().map_or(param.dtype(), |leaf| leaf.dtype());
            let old = std::mem::replace(&mut moments.exp_avg, zeros());
            let next = muon::<B>(old, gradient, grad_scale, step.beta1, dtype, parts);
            (gradient, grad_scale, momentum) = (next.update, next.gate, Some(next.momentum));
            // p -= lr (weight_decay p + update), by AdamW's kernel: the update as gradient and first moment, no second.
            step = AdamWStep { beta1: 0.0, beta2: 1.0, eps: 1.0, bias_correction1: 1.0, bias_correction2: 1.0, ..step };
        }
        let tensors = AdamWTensors {
            exp_avg: moments.exp_avg,
            exp_avg_sq: moments.exp_avg_sq.unwrap_or_else(zeros),
            param,
            leaf,
        };
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

/// Muon's orthogonalised update of one weight matrix.
struct Orthogonal<B: TrainBackend> {
    momentum: Inner<B>,
    /// The update; its root mean square is about the same as of AdamW's updates, so that one learning rate serves both.
    update: Inner<B>,
    /// `[1]`: 0 if the step is skipped, which is known by a gradient scale of 0, or one that is not finite; else 1.
    gate: Inner<B>,
}

/// Nesterov momentum `m = beta m + g` of the gradient g times `scale`. The update is `g + beta m`; the update of each
/// projection is orthogonalised in `dtype` and multiplied by `0.2 sqrt(max(out, in))` (arXiv:2502.16982, equations 2
/// and 4). `projections` are the numbers of their rows. A skipped step leaves the momentum as it was.
fn muon<B: TrainBackend>(
    momentum: Inner<B>,
    gradient: Inner<B>,
    scale: Inner<B>,
    beta: f64,
    dtype: DType,
    projections: &[usize],
) -> Orthogonal<B> {
    let tensor = |x| Tensor::<B::InnerBackend, 2>::from_primitive(TensorPrimitive::Float(x));
    let scale = Tensor::<B::InnerBackend, 1>::from_primitive(TensorPrimitive::Float(scale));
    let is_skipped = scale.clone().equal_elem(0.0).bool_or(scale.clone().is_finite().bool_not());
    let old = tensor(momentum);
    let (shape, master_dtype) = (old.dims(), old.dtype());
    assert_eq!(projections.iter().sum::<usize>(), shape[0], "projections of all rows");
    let gradient = tensor(gradient).cast(master_dtype) * scale.cast(master_dtype).reshape([1, 1]);
    let next = old.clone() * beta + gradient.clone();
    let update = (gradient + next.clone() * beta).cast(dtype);
    let updates = update.split_with_sizes(projections.to_vec(), 0).into_iter();
    let updates = updates.zip(projections).map(|(update, &rows)| {
        let factor = 0.2 * (rows.max(shape[1]) as f64).sqrt();
        sieve_ops::orthogonalised(update).cast(master_dtype) * factor
    });
    let update = Tensor::cat(updates.collect(), 0);
    let momentum = next.mask_where(is_skipped.clone().reshape([1, 1]).expand(shape), old);
    let gate = is_skipped.bool_not().float().cast(master_dtype);
    Orthogonal {
        momentum: momentum.into_primitive().tensor(),
        update: update.into_primitive().tensor(),
        gate: gate.into_primitive().tensor(),
    }
}

impl<B: TrainBackend> ModuleMapper<B> for Update<'_, B> {
    /// Updates a whole parameter in the model, or this rank's piece of it in `pieces`, which `updated` lists.
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let Some(Gradient { values, is_piece }) = self.gradients.take(id) else {
            // A parameter without a gradient is not updated.
            return Param::from_mapped_value(id, tensor, mapper);
        };
        let decays = D >= 2;
        if !is_piece {
            let leaf = self.updated_leaf(id, tensor.inner().into_primitive().tensor(), values, decays);
            let leaf = Tensor::from_primitive(TensorPrimitive::Float(leaf));
            let leaf = Tensor::<B, D>::from_inner(leaf).require_grad();
            return Param::from_mapped_value(id, leaf, mapper);
        }
        let share = self.optimizer.share;
        let pieces = share.pieces(&tensor.dims()).expect("its gradient is cut");
        let whole = tensor.clone().inner().into_primitive().tensor();
        let piece = self.optimizer.pieces.remove(&id);
        let piece = piece.unwrap_or_else(|| cut::<B>(whole.clone(), pieces.of(share.rank)));
        let piece = self.updated_leaf(id, piece, values, decays);
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
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Optimizer { share, masters, pieces, .. } = &mut *self.optimizer;
        let is_bf16 = self.precision == Precision::Bf16;
        if !is_bf16 && share.keeps_whole {
            return param;
        }
        let (id, tensor, mapper) = param.consume();
        let range = share.range(&tensor.dims());
        let mut master = tensor.inner();
        let is_cut = range.is_some();
        if let Some(range) = range {
            // A copy, or split anew: a slice would keep the whole tensor in memory.
            let piece = cut::<B>(master.clone().into_primitive().tensor(), range);
            let piece = match is_bf16 {
                true => {
                    let piece = Tensor::<B::InnerBackend, 1>::from_primitive(TensorPrimitive::Float(piece));
                    let (piece, rest) = sieve_ops::split_master(piece);
                    masters.insert(id, rest);
                    piece.into_primitive().tensor()
                }
                false => B::InnerBackend::float_mul_scalar(piece, 1f32.into()),
            };
            pieces.insert(id, piece);
            if !share.keeps_whole {
                let param = Param::from_mapped_value(id, Tensor::from_inner(master).require_grad(), mapper);
                return Released { pieces, nan: None }.map_float(param);
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

    /// A model of one layer, and its optimizer.
    fn small(recipe: &str, more: &[&str]) -> (Qwen3<Autodiff<Flex>>, Optimizer<Autodiff<Flex>>) {
        let small = "model.num_hidden_layers=1 model.hidden_size=96 model.intermediate_size=40 \
            model.num_attention_heads=4 model.num_key_value_heads=2 model.head_dim=32 model.vocab_size=64";
        let overrides = small.split_whitespace().chain(more.iter().copied());
        let overrides = overrides.map(str::to_owned).collect::<Vec<_>>();
        let recipe = Recipe::load(recipe, "a recipe", &overrides).unwrap();
        let shape = recipe.model_shape(64).unwrap();
        let model = Qwen3::new(&shape, 0, &FlexDevice);
        (model, Optimizer::new(recipe.optimizer, &shape))
    }

    /// The packed matrices of a block that Muon updates, by name, with the rows of their projections.
    fn packed(recipe: &str, more: &[&str]) -> Vec<(String, Vec<usize>)> {
        let (model, mut optimizer) = small(recipe, &[&["optimizer.name=Muon"], more].concat());
        optimizer.find_groups(&model);
        let all = parameter_ids(&model).into_iter();
        let parts = all.filter_map(|(name, id, _)| Some((name, optimizer.matrices.get(&id)?.clone())));
        let short = parts.map(|(name, parts)| (name.split("self_attn.").last().unwrap().to_owned(), parts));
        short.filter(|(name, parts)| parts.len() > 1 || name.contains("compress")).collect()
    }

    /// Every parameter's name and values after an update whose gradients are all 1.
    fn updated(more: &[&str]) -> Vec<(String, Vec<f32>)> {
        let (model, mut optimizer) = small(include_str!("../../../recipes/msa_80m.toml"), more);
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
        let [same, still, double] = [1.0, 0.0, 2.0].map(|scale| updated(&[&rate(scale)]));
        assert_eq!(same, updated(&[]));
        let (before, _) = small(include_str!("../../../recipes/msa_80m.toml"), &[]);
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
        let msa = include_str!("../../../recipes/msa_80m.toml");
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
            assert_eq!(packed(recipe, more), expected.collect::<Vec<_>>());
        }
    }
}
