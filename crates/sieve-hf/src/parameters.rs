//! A module's parameters by name, in module order.
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorData};
use sieve_core::NumberFormat;
use sieve_core::model::Conversion;
use std::collections::HashMap;
use std::ops::Range;

/// A named parameter of a model, on the host.
#[derive(Clone, Debug)]
pub struct NamedTensor {
    /// Path of the field, joined by dots, without variants of enums.
    pub name: String,
    /// Values, shape and dtype.
    pub data: TensorData,
}

/// The types in which the parameters of a loaded model are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// All parameters are kept in one type.
    All(DType),
    /// For a CPU: weights of GEMMs in bf16, all others in f32. GEMMs sum in f32; some CPUs round their inputs to bf16.
    Bf16Weights,
}

impl Kept {
    /// The number format of a model whose parameters are kept so.
    pub fn number_format(self) -> NumberFormat {
        match self {
            Self::All(DType::BF16) => NumberFormat::Bf16,
            Self::All(_) => NumberFormat::F32,
            Self::Bf16Weights => NumberFormat::Bf16Weights,
        }
    }

    /// The type of the parameter with this name.
    pub fn dtype(self, name: &str) -> DType {
        match self {
            Self::All(dtype) => dtype,
            Self::Bf16Weights if sieve_nn::may_be_bf16(name) => DType::BF16,
            Self::Bf16Weights => DType::F32,
        }
    }
}

impl From<DType> for Kept {
    fn from(dtype: DType) -> Self {
        Self::All(dtype)
    }
}

/// Finds a tensor by name and shape.
pub type TensorSource<'a, E> = dyn FnMut(&str, &[usize]) -> Result<TensorData, E> + 'a;

/// Finds a tensor by name and shape, or a range of its flattened elements.
pub type PartSource<'a, E> = dyn FnMut(&str, &[usize], Option<Range<usize>>) -> Result<TensorData, E> + 'a;

/// All float parameters, copied to the host, in module order.
pub fn named_parameters<B: Backend, M: Module<B>>(module: &M) -> Vec<NamedTensor> {
    let mut tensors = Vec::new();
    visit(module, |name, _shape, data| tensors.push(NamedTensor { name, data: data() }));
    tensors
}

/// Names of all float parameters, in module order.
pub fn parameter_names<B: Backend, M: Module<B>>(module: &M) -> Vec<String> {
    let mut names = Vec::new();
    visit(module, |name, _shape, _data| names.push(name));
    names
}

/// Calls `take` with the name and shape of each float parameter, and a function that copies its values to the host.
/// Initial values are drawn when it is called.
pub(crate) fn visit<B: Backend, M: Module<B>>(module: &M, take: impl FnMut(String, &[usize], &dyn Fn() -> TensorData)) {
    let path = Vec::new();
    module.visit(&mut Reader { path, take });
}

/// Replaces every float parameter by the tensor that `source` returns for its name and shape, in the type of `kept`. No
/// initial values are drawn.
///
/// # Errors
/// The first error of `source`; the module is consumed either way.
pub fn load_parameters<B: Backend, M: Module<B>, E>(
    module: M,
    kept: impl Into<Kept>,
    source: &mut TensorSource<'_, E>,
) -> Result<M, E> {
    load_parameters_then(module, kept, source, &mut AsTheyAre)
}

/// As [`load_parameters`]; `then` maps each parameter before the next parameter is read.
pub(crate) fn load_parameters_then<B: Backend, M: Module<B>, E>(
    module: M,
    kept: impl Into<Kept>,
    source: &mut TensorSource<'_, E>,
    then: &mut impl ModuleMapper<B>,
) -> Result<M, E> {
    let mut loading = LoadedThen { loader: ParameterLoader::new(kept, source), then };
    let module = module.map(&mut loading);
    loading.loader.finish()?;
    Ok(module)
}

/// As [`load_parameters`], for the weights of another model, which `source` has: the tensors that `conversion` adds
/// keep their initial values.
///
/// # Errors
/// The first error of `source`.
pub fn load_converted<B: Backend, M: Module<B>, E>(
    module: M,
    conversion: &Conversion,
    kept: impl Into<Kept>,
    source: &mut TensorSource<'_, E>,
) -> Result<M, E> {
    let mut source = converted_source(&module, conversion, source);
    load_parameters(module, kept, &mut source)
}

/// The tensors of `source`, and the initial values of those that `conversion` adds to `module`.
pub fn converted_source<'a, 'b, B: Backend, M: Module<B>, E>(
    module: &M,
    conversion: &Conversion,
    source: &'a mut TensorSource<'b, E>,
) -> impl FnMut(&str, &[usize]) -> Result<TensorData, E> + use<'a, 'b, B, M, E> {
    let mut new = HashMap::new();
    visit(module, |name, _shape, data| {
        if conversion.adds(&name) {
            new.insert(name, data());
        }
    });
    move |name: &str, shape: &[usize]| match new.remove(name) {
        Some(data) => Ok(data),
        None => source(name, shape),
    }
}

/// Whether a container adds a level to parameter names; variants of enums do not.
fn is_level(container: &str) -> bool {
    !container.starts_with("Enum:")
}

/// Calls `take` for each float parameter of a module.
struct Reader<F> {
    /// Names of the fields that lead to the present one.
    path: Vec<String>,
    take: F,
}

impl<B: Backend, F: FnMut(String, &[usize], &dyn Fn() -> TensorData)> ModuleVisitor<B> for Reader<F> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        (self.take)(self.path.join("."), &param.lazy_shape(), &|| param.val().into_data());
    }

    fn enter_module(&mut self, name: &str, container: &str) {
        if is_level(container) {
            self.path.push(name.to_owned());
        }
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        if is_level(container) {
            self.path.pop();
        }
    }
}

/// Replaces parameters one by one, as [`load_parameters`] does; for a caller that maps each of them further before the
/// next one is read.
pub struct ParameterLoader<'a, 'b, E> {
    path: Vec<String>,
    kept: Kept,
    source: &'a mut TensorSource<'b, E>,
    error: Option<E>,
}

impl<'a, 'b, E> ParameterLoader<'a, 'b, E> {
    /// Loads parameters from `source` in the type of `kept`.
    pub fn new(kept: impl Into<Kept>, source: &'a mut TensorSource<'b, E>) -> Self {
        Self { path: Vec::new(), kept: kept.into(), source, error: None }
    }

    /// Whether `source` has failed; since then parameters are left as they were.
    pub fn has_failed(&self) -> bool {
        self.error.is_some()
    }

    /// Ends the loading.
    ///
    /// # Errors
    /// The first error of `source`.
    pub fn finish(self) -> Result<(), E> {
        self.error.map_or(Ok(()), Err)
    }
}

impl<B: Backend, E> ModuleMapper<B> for ParameterLoader<'_, '_, E> {
    /// Loads one parameter in the type that it is kept in; after an error, leaves it as it is.
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        // The first error ends the loading; the module is dropped then.
        if self.error.is_some() {
            return param;
        }
        let (name, shape) = (self.path.join("."), param.lazy_shape());
        match (self.source)(&name, &shape) {
            Ok(data) => {
                let (id, device) = (param.id, param.lazy_device());
                let dtype = self.kept.dtype(&name);
                let loaded = if data.dtype == dtype {
                    Tensor::<B, D>::from_data(data, (&device, dtype))
                } else {
                    // Other types go to the device as f32 and are cast there.

                    let data = data.convert_dtype(DType::F32);
                    Tensor::<B, D>::from_data(data, (&device, DType::F32)).cast(dtype)
                };
                param.transform_for_load(loaded, id)
            }
            Err(error) => {
                self.error = Some(error);
                param
            }
        }
    }

    fn enter_module(&mut self, name: &str, container: &str) {
        if is_level(container) {
            self.path.push(name.to_owned());
        }
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        if is_level(container) {
            self.path.pop();
        }
    }
}

/// Reads each parameter and hands it to another mapper before the next one is read, so that a mapper that keeps a piece
/// of each never has the model whole.
pub struct LoadedThen<'a, 'b, 'm, E, M> {
    /// Reads the parameters.
    pub loader: ParameterLoader<'a, 'b, E>,
    /// Maps each parameter that was read.
    pub then: &'m mut M,
}

impl<B: Backend, E, M: ModuleMapper<B>> ModuleMapper<B> for LoadedThen<'_, '_, '_, E, M> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let param = self.loader.map_float(param);
        if self.loader.has_failed() { param } else { self.then.map_float(param) }
    }

    fn enter_module(&mut self, name: &str, container: &str) {
        ModuleMapper::<B>::enter_module(&mut self.loader, name, container);
    }

    fn exit_module(&mut self, name: &str, container: &str) {
        ModuleMapper::<B>::exit_module(&mut self.loader, name, container);
    }
}

/// Leaves parameters as they are.
pub(crate) struct AsTheyAre;

impl<B: Backend> ModuleMapper<B> for AsTheyAre {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        param
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_flex::Flex;
    use sieve_core::kinds::Rows;
    use sieve_core::model::test_shapes::tiny_dma;
    use sieve_core::{Attention, DmaShape, ModelShape, Recipe};
    use sieve_nn::Qwen3;

    /// The model's list of parameters, by which they are counted, exported, imported and grouped, against the module's
    /// own fields, in every shipped recipe and in the forms that none has.
    #[test]
    fn the_list_of_parameters_equals_the_fields_of_the_module() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes");
        let mut checked = 0;
        let read = |path: std::path::PathBuf| std::fs::read_to_string(path).expect("a recipe");
        let mut all = sieve_core::recipe::siblings(|dense| read(folder.join(format!("{dense}.toml"))));
        for entry in std::fs::read_dir(&folder).expect("recipes") {
            let path = entry.expect("readable").path();
            all.insert(path.to_string_lossy().into_owned(), read(path));
        }
        for (name, text) in all {
            for more in [
                &[][..],
                &["model.tie_word_embeddings=false", "model.residual_scale=true"],
                &["model.qk_norm=false", "model.qkv_bias=true"],
                &["model.attention_sinks=true"],
            ] {
                let more = more.iter().map(|&set| set.to_owned()).collect::<Vec<_>>();
                // Some kinds have no form without norms of heads, with biases, or with sinks.
                let Ok(recipe) = Recipe::load(&text, "a recipe", &more) else { continue };
                let shape = recipe.model_shape(49_152).expect("a model");
                let mut found = Vec::new();
                // No initial values are drawn.
                visit(&Qwen3::<Flex>::new(&shape, 0, &Default::default()), |name, dims, _| {
                    found.push((name, dims.to_vec()));
                });
                let listed = shape.all_parameters().into_iter();
                let mut listed = listed
                    .map(|spec| {
                        assert_eq!(sieve_nn::may_be_bf16(&spec.ours), spec.rows == Rows::Gemm, "{}", spec.ours);
                        let rows: usize = spec.theirs.iter().map(|(_, rows)| rows).sum();
                        assert_eq!(rows, spec.dims[0], "{}", spec.ours);
                        (spec.ours, spec.dims)
                    })
                    .collect::<Vec<_>>();
                found.sort();
                listed.sort();
                assert_eq!(found, listed, "{name}");
                checked += 1;
            }
        }
        assert!(checked >= 100, "{checked} models");
    }

    #[test]
    fn names_are_field_paths_and_round_trip() {
        let shape = ModelShape {
            d_model: 8,
            d_ff: 12,
            num_layers: 2,
            num_heads: 2,
            num_kv_heads: 1,
            head_dim: 4,
            vocab_size: 11,
            tie_word_embeddings: true,
            max_seq_len: 16,
            residual_scale: false,
            attention: Attention::Dma(DmaShape::published(3)),
            ..tiny_dma()
        };
        let model = Qwen3::<Flex>::new(&shape, 7, &Default::default());
        let tensors = named_parameters(&model);
        let names: Vec<&str> = tensors.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names[0], "embed_tokens.weight");
        assert!(names.contains(&"layers.1.self_attn.qkv.qkv_proj.weight"), "{names:?}");
        assert!(names.contains(&"layers.0.self_attn.a"), "{names:?}");
        assert_eq!(names[names.len() - 1], "head.norm.weight");
        let other = Qwen3::<Flex>::new(&shape, 8, &Default::default());
        let loaded = load_parameters(other, DType::F32, &mut |name, shape| {
            let tensor = tensors.iter().find(|t| t.name == name).ok_or(name.to_owned())?;
            assert_eq!(tensor.data.shape.to_vec(), shape);
            Ok::<_, String>(tensor.data.clone())
        })
        .expect("every name is there");
        for (a, b) in named_parameters(&loaded).iter().zip(&tensors) {
            assert_eq!((&a.name, &a.data), (&b.name, &b.data));
        }
    }
}
