//! Loads the model of a checkpoint.
use crate::export::{row_tokens, tokenizer_files};
use crate::odd_folders::is_of_transformers;
use crate::parameters::{AsTheyAre, load_parameters_then};
use crate::{ChatTemplate, Checkpoint, CheckpointError, CheckpointState, Kept};
use burn::module::ModuleMapper;
use burn::tensor::backend::Backend;
use serde_json::Value;
use sieve_core::{InitialWeights, ModelShape, Recipe, ShownPath, model_line};
use sieve_nn::Qwen3;
use std::path::{Path, PathBuf};

/// A model on a device, and the recipe and state of its run.
#[derive(Debug)]
pub struct LoadedModel<B: Backend> {
    /// The model with its weights.
    pub model: Qwen3<B>,
    /// The resolved recipe of the run, at the stage that the weights come from.
    pub recipe: Recipe,
    /// Sizes of the model, by recipe and vocabulary.
    pub shape: ModelShape,
    /// Path of the run's `tokenizer.json`.
    pub tokenizer_path: PathBuf,
    /// State of training: the contents of `state.json`.
    pub state: CheckpointState,
    /// Path of the folder `step-N` that was read.
    pub path: PathBuf,
    /// The types in which the parameters are kept.
    pub kept: Kept,
}

/// How the `generation_config.json` of an imported model samples where a request does not say it. A key is `None` where
/// the file does not set it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    /// What logits are divided by.
    pub temperature: Option<f64>,
    /// The probability of the likeliest tokens that are drawn from.
    pub top_p: Option<f64>,
    /// The number of likeliest tokens that are drawn from; `Some(None)` draws from all.
    pub top_k: Option<Option<usize>>,
    /// The least probability of a drawn token, as a share of the likeliest token's.
    pub min_p: Option<f64>,
    /// What the logits of tokens that a text has already are divided by.
    pub repetition_penalty: Option<f64>,
    /// `max_new_tokens` of the file, which `sieve serve` does not follow and names in a warning. Other settings are
    /// ignored.
    pub max_new_tokens: Option<u64>,
}

impl SamplingDefaults {
    /// The defaults in the object of `generation_config.json`; an error is what is wrong with a value.
    fn of(all: &serde_json::Map<String, Value>) -> Result<Self, String> {
        let key = |name: &str| all.get(name).filter(|value| !value.is_null());
        let number = |name: &str, wanted: &str, is_in: fn(f64) -> bool| {
            let read = |value: &Value| {
                let found = value.as_f64().filter(|number| is_in(*number));
                found.ok_or_else(|| format!("{name} is {value}, not {wanted}"))
            };
            key(name).map(read).transpose()
        };
        // transformers draws from all tokens with 0, vLLM with -1 too.
        let is_count = |count: f64| count.fract() == 0.0 && (-1.0..=f64::from(u32::MAX)).contains(&count);
        let top_k = number("top_k", "a whole number from -1", is_count)?;
        Ok(Self {
            temperature: number("temperature", "a number from 0", |number| number >= 0.0)?,
            top_p: number("top_p", "a number above 0 and up to 1", |number| number > 0.0 && number <= 1.0)?,
            top_k: top_k.map(|count| (count >= 1.0).then_some(count as usize)),
            min_p: number("min_p", "a number from 0 to 1", |number| (0.0..=1.0).contains(&number))?,
            repetition_penalty: number("repetition_penalty", "a number above 0", |number| number > 0.0)?,
            max_new_tokens: key("max_new_tokens").and_then(Value::as_u64),
        })
    }
}

impl<B: Backend> LoadedModel<B> {
    /// What the model is, on one line ([`model_line`]); it names the folder from which the weights were read.
    pub fn line(&self) -> String {
        let weights = InitialWeights::Folder { path: self.path.shown().to_string(), step: self.step() };
        model_line(&self.recipe, &self.shape, self.kept.number_format(), &weights)
    }

    /// The step that the weights come from; `None` for a folder of `transformers`, which does not say it.
    pub fn step(&self) -> Option<u64> {
        (!is_of_transformers(&self.path)).then_some(self.state.step)
    }

    /// The tokens of a row in training, at the stage that the weights come from; `None` for weights that no run of
    /// this recipe trained, such as an import's or an export's, which do not say it.
    pub fn trained_len(&self) -> Option<usize> {
        (self.state.step > 0).then_some(self.recipe.training.seq_len)
    }

    /// Whether the model's folder says the length of a row in training, as runs and exports do. The recipe of another
    /// folder of `transformers` has a usual one.
    pub fn says_row(&self) -> bool {
        !is_of_transformers(&self.path) || row_tokens(&self.path).is_some()
    }

    /// The tokens that end a text: `eos_id`, and further end tokens in the `generation_config.json` of an imported
    /// model, as chat models have.
    ///
    /// # Errors
    /// A file that exists and cannot be read.
    pub fn end_ids(&self, eos_id: u32) -> Result<Vec<u32>, CheckpointError> {
        end_ids(&self.path, &self.recipe, eos_id)
    }

    /// How the `generation_config.json` of an imported model samples; a run's own model has none.
    ///
    /// # Errors
    /// A file that exists and cannot be read, or a value that cannot be sampled with.
    pub fn sampling_defaults(&self) -> Result<SamplingDefaults, CheckpointError> {
        let folder = self.generation_folder();
        let path = folder.join(tokenizer_files::GENERATION);
        SamplingDefaults::of(&tokenizer_files::generation(&folder)?).map_err(|problem| {
            CheckpointError::refused(
                format!("{}: {problem}", path.shown()),
                "correct the value, or remove the key: requests may then set it",
            )
        })
    }

    /// The folder of the model's `generation_config.json`, if it has one.
    fn generation_folder(&self) -> PathBuf {
        tokenizer_files::folder(&self.path, &self.recipe)
    }
}

/// The tokens that end a text of the model in the folder `path`, as [`LoadedModel::end_ids`] gives them.
///
/// # Errors
/// A file that exists and cannot be read.
pub fn end_ids(path: &Path, recipe: &Recipe, eos_id: u32) -> Result<Vec<u32>, CheckpointError> {
    let source = tokenizer_files::generation(&tokenizer_files::folder(path, recipe))?;
    let theirs = tokenizer_files::ends(&source, eos_id).and_then(Value::as_array);
    let ids = theirs.into_iter().flatten().filter_map(Value::as_u64);
    let others = ids.map(|id| id as u32).filter(|&id| id != eos_id);
    Ok(std::iter::once(eos_id).chain(others).collect())
}

/// The recipe and the sizes of the model that [`load_model`] would load, without its tensors.
///
/// # Errors
/// As [`load_model`].
pub fn peek_model(path: &Path) -> Result<(Recipe, ModelShape), CheckpointError> {
    if is_of_transformers(path) {
        crate::imported_model(path, None, &[])
    } else {
        Checkpoint::peek(path)?.recipe_and_shape()
    }
}

/// The `tokenizer.json` of the model that [`load_model`] would load.
///
/// # Errors
/// No checkpoint in the folder.
pub fn peek_tokenizer(path: &Path) -> Result<PathBuf, CheckpointError> {
    if is_of_transformers(path) {
        Ok(path.join("tokenizer.json"))
    } else {
        Ok(Checkpoint::peek(path)?.tokenizer_path())
    }
}

/// Loads the model of a checkpoint: a folder `step-N`, or the latest one in a folder of several or in a run folder. A
/// folder of `transformers` is loaded as
/// [`import`](crate::import) would import it. Weights that are kept in bf16 are converted without an f32 copy of the
/// model.
///
/// # Errors
/// No checkpoint, a damaged one, a recipe that cannot be read, weights that do not fit the recipe's model.
pub fn load_model<B: Backend>(
    path: &Path,
    device: &B::Device,
    kept: impl Into<Kept>,
) -> Result<LoadedModel<B>, CheckpointError> {
    load_model_then(path, device, kept, &mut AsTheyAre)
}

/// As [`load_model`]; `then` maps each parameter that was read before the next one is, so that a mapper that keeps a
/// piece of each never has the model whole.
///
/// # Errors
/// As [`load_model`].
pub fn load_model_then<B: Backend, M: ModuleMapper<B>>(
    path: &Path,
    device: &B::Device,
    kept: impl Into<Kept>,
    then: &mut M,
) -> Result<LoadedModel<B>, CheckpointError> {
    let kept = kept.into();
    if is_of_transformers(path) {
        return crate::import::load(path, device, kept, then);
    }
    let load = |checkpoint: &Checkpoint| {
        let (recipe, shape) = checkpoint.recipe_and_shape()?;
        let weights = checkpoint.model()?;
        // No initial values are drawn from the seed.
        let seed = 0;
        let mut read = |name: &str, dims: &[usize]| weights.tensor_for(name, dims, kept.dtype(name));
        let model = load_parameters_then(Qwen3::new(&shape, seed, device), kept, &mut read, then)?;
        Ok((recipe, shape, model))
    };
    let (checkpoint, (recipe, shape, model)) = Checkpoint::open_while(path, load)?;
    Ok(LoadedModel {
        model,
        recipe,
        shape,
        tokenizer_path: checkpoint.tokenizer_path(),
        state: checkpoint.state,
        path: checkpoint.path,
        kept,
    })
}

impl Checkpoint {
    /// Whether the model is asked by a chat template: it has one, and was trained on chats, or is as it was imported.
    pub fn answers_chats(&self, recipe: &Recipe) -> bool {
        let is_so = recipe.data.messages_column.is_some() || self.state.step == 0;
        // With a template that cannot be used nobody is to be told to use it.
        is_so && ChatTemplate::of_checkpoint(self, recipe).is_ok_and(|found| found.is_some())
    }

    /// The recipe with all its stages.
    fn whole_recipe(&self) -> Result<Recipe, CheckpointError> {
        let path = self.path.join("config.toml");
        let text = self.recipe_toml()?;
        Recipe::load(&text, &path.shown().to_string(), &[]).map_err(CheckpointError::bad_recipe(&path))
    }

    /// The stages that the weights were trained in, each as a recipe of its own; none before the first step.
    ///
    /// # Errors
    /// A recipe that cannot be read.
    pub(crate) fn trained_stages(&self) -> Result<Vec<Recipe>, CheckpointError> {
        let recipe = self.whole_recipe()?;
        let stages = recipe.stages().into_iter().filter(|stage| (stage.steps.start as u64) < self.state.step);
        Ok(stages.map(|stage| recipe.at_stage(&stage)).collect())
    }

    /// The recipe at the stage that the weights come from, and the sizes of its model.
    ///
    /// # Errors
    /// A recipe that cannot be read, or whose embedding has another number of rows than the state.
    pub fn recipe_and_shape(&self) -> Result<(Recipe, ModelShape), CheckpointError> {
        let path = self.path.join("config.toml");
        let bad_recipe = CheckpointError::bad_recipe(&path);
        let recipe = self.whole_recipe()?;
        let recipe = recipe.at_stage(&recipe.stage_of_state(self.state.step as usize));
        let rows = self.state.vocab_size;
        let shape = recipe.model_shape(rows).map_err(bad_recipe)?;
        if shape.vocab_size != rows {
            let own = shape.vocab_size;
            let problem = format!("the recipe's embedding has {own} rows, state.json says {rows}");
            return Err(CheckpointError::other_model(&path, problem));
        }
        Ok((recipe, shape))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn sampling_defaults_are_what_the_file_sets_and_odd_values_are_refused() {
        let of = |value: Value| SamplingDefaults::of(value.as_object().expect("an object"));
        assert_eq!(of(json!({"do_sample": true, "eos_token_id": 3, "temperature": null})), Ok(Default::default()));
        let all = json!({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.0, "min_p": 0.0});
        let set = SamplingDefaults {
            temperature: Some(0.6),
            top_p: Some(0.95),
            top_k: Some(Some(20)),
            min_p: Some(0.0),
            repetition_penalty: Some(1.0),
            max_new_tokens: None,
        };
        assert_eq!(of(all), Ok(set));
        let all = of(json!({"top_k": 0, "repetition_penalty": 1.05, "max_new_tokens": 9})).expect("it is valid");
        assert_eq!((all.top_k, all.repetition_penalty, all.max_new_tokens), (Some(None), Some(1.05), Some(9)));
        for (name, value) in [
            ("temperature", json!(-1)),
            ("temperature", json!("hot")),
            ("top_p", json!(0)),
            ("top_p", json!(1.5)),
            ("top_k", json!(-2)),
            ("top_k", json!(1.5)),
            ("min_p", json!(1.5)),
            ("repetition_penalty", json!(0)),
        ] {
            let mut all = json!({});
            all[name] = value.clone();
            assert!(of(all).is_err_and(|problem| problem.starts_with(&format!("{name} is {value}, not"))), "{name}");
        }
    }
}
