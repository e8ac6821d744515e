//! Imports weights of `transformers` as a checkpoint: of the classes of [`Architecture`], in one file or many.
//!
//! An import is the reverse of an [`export`](crate::export) and uses the same list of tensors: importing an export
//! gives the same weights to the last bit. A model may be imported with another attention kind, whose additional
//! parameters are initialised as in a new model. Tensors are read one at a time, so that no host has to hold the model.

mod config;
mod keys;
mod m3;
mod rotary;
mod weights;

use crate::export::form::Form;
use crate::export::tensors::{ExportTensor, Source, tensors_of};
use crate::export::{Architecture, tokenizer_files};
use crate::parameters::{load_parameters_then, visit};
use crate::tensor_file::TensorHeader;
use crate::tensor_files::SINGLE;
use crate::{Checkpoint, CheckpointError, CheckpointState, Kept, LoadedModel};
use burn::module::ModuleMapper;
use burn::tensor::backend::Backend;
use burn::tensor::{Bytes, DType, TensorData};
use config::HfConfig;
use sieve_core::kinds::{Part, Projections, names_of_kinds};
use sieve_core::model::{Conversion, ConversionGap, names_of};
use sieve_core::recipe::{AttentionKind, Location};
use sieve_core::{ModelShape, Recipe, RecipeError, ShownPath};
use sieve_files::{read_text, write_synced};
use sieve_nn::Qwen3;
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use weights::{Weights, is_same};

/// Most tensor names in one error message.
const MAX_NAMES: usize = 20;
/// Ending of tensors that are ignored: old files store tables of rotary frequencies.
const IGNORED_ENDING: &str = "rotary_emb.inv_freq";
/// The output projection; in a tied model it equals [`EMBEDDING`].
const OUTPUT: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";
/// What the names of a model with an output projection have before those of the model without one.
const BASE_PREFIX: &str = "model.";

/// Refuses a `config.json` that [`import`] would refuse, without a look at tokenizer and weights.
///
/// # Errors
/// A file that cannot be read, or whose model no recipe can express.
pub fn check_config(path: &Path) -> Result<(), CheckpointError> {
    HfConfig::read(path).map(|_| ())
}

/// The families of `transformers` that [`import`] reads, as a list that ends with `or`.
pub fn importable_families() -> String {
    let names = Architecture::stock().map(Architecture::family).collect::<Vec<_>>();
    match names.split_last() {
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => unreachable!("several classes are listed"),
    }
}

/// What [`import`] can make of grouped-query attention.
fn other_kinds() -> String {
    format!("grouped-query attention becomes {}", names_of_kinds(AttentionKind::of_grouped_weights()))
}

/// What an import found and converted.
#[derive(Clone, Debug)]
pub struct ImportReport {
    /// The checkpoint: `step-0` in the output folder.
    pub path: PathBuf,
    /// The recipe of the checkpoint: the model, and settings of a fine-tuning for the user to edit.
    pub recipe: Recipe,
    /// Number of parameters of the model.
    pub num_parameters: u64,
    /// Parameters that the folder does not have; they are initialised as in a new model.
    pub added: Vec<String>,
    /// What became of the layers' tensors, in words; `None` if the attention is the folder's.
    pub converted: Option<String>,
    /// Names of tensors that the import does not need.
    pub ignored: Vec<String>,
    /// Whether every A of a DMA model is 0, so that all keys have the same score.
    pub all_scores_tie: bool,
}

/// Writes the model in `from` as a checkpoint of step 0 into `out`.
///
/// `attention` selects another attention kind, with the defaults of a recipe; `overrides` are `section.key=value`, as
/// for a recipe. Parameters that the other kind adds are initialised as in a new model: DMA then starts as a window of
/// `keep_window_size` with the slope of its recency (A is 0), and NSA mostly as its window (by its gates). Trained
/// tensors that the other kind has no place for are an error, unless it `drops` them. [`Conversion`] is the rule.
///
/// # Errors
/// A configuration that no recipe can express; missing, unknown or ill-shaped tensors (all are named); an attention
/// kind that cannot use the weights; a folder that holds a checkpoint; any failure of the file system.
pub fn import<B: Backend>(
    from: &Path,
    out: &Path,
    attention: Option<AttentionKind>,
    overrides: &[String],
    drops: bool,
    device: &B::Device,
) -> Result<ImportReport, CheckpointError> {
    let path = out.join("step-0");
    check_out(out)?;
    let tokenizer_path = from.join("tokenizer.json");
    let tokenizer_json = read_text(&tokenizer_path).map_err(CheckpointError::io("reading", &tokenizer_path))?;
    // The path is absolute, because the recipe names it and training may run in any working directory.
    let kept = std::path::absolute(path.join("tokenizer.json")).map_err(CheckpointError::io("finding", &path))?;
    let settings = settings(from, &kept, attention, overrides)?;
    // All that can be refused is read before anything is written.
    let generation = serde_json::Value::Object(tokenizer_files::generation(from)?);
    tokenizer_files::Templates::read(from)?;
    let (recipe, shape, mut found) = read_model(from, &settings, DType::F32.into())?;
    let conversion = Conversion::of(&found.shape, &shape).map_err(|gap| unfit(from, &gap))?;
    found.drop_lost(from, &conversion, drops)?;
    let ties = attention.is_none() && found.all_scores_tie()?;
    let model = Qwen3::<B>::new(&shape, recipe.training.seed, device);
    let (mut headers, mut added) = (Vec::new(), Vec::new());
    let mut new = HashMap::new();
    visit(&model, |name, dims, data| {
        match found.tensors.get(&name) {
            Some(joined) => assert_eq!(joined.shape, dims, "{name} is kept by the conversion"),
            None => {
                added.push(name.clone());
                new.insert(name.clone(), data());
            }
        }
        headers.push(TensorHeader { name, dtype: DType::F32, shape: dims.to_vec() });
    });
    let num_found = headers.len() - added.len();
    assert_eq!(num_found, found.tensors.len(), "the conversion drops or keeps every tensor");
    let recipe_toml = recipe.to_toml().map_err(CheckpointError::bad_recipe(&from.join("config.json")))?;
    fs::create_dir_all(out).map_err(CheckpointError::io("creating", out))?;
    let state = CheckpointState::untrained(shape.vocab_size);
    let read = |n: usize| {
        let name = &headers[n].name;
        let data = new.remove(name).map_or_else(|| found.read(name), Ok)?;
        Ok(data.bytes)
    };
    // Beside the tokenizer, where a later export of the trained model finds them.
    let beside = |folder: &Path| -> Result<(), CheckpointError> {
        tokenizer_files::copy(from, folder)?;
        Ok(write_synced(&folder.join(tokenizer_files::GENERATION), generation.to_string().as_bytes())?)
    };
    let path = Checkpoint::write_model(out, state, [&recipe_toml, &tokenizer_json], &headers, read, beside)?;
    Ok(ImportReport {
        path,
        num_parameters: shape.parameters().total(),
        recipe,
        added,
        converted: conversion.words(),
        ignored: found.ignored,
        all_scores_tie: ties,
    })
}

/// Refuses an output folder that holds a run or a checkpoint, which some files show.
fn check_out(out: &Path) -> Result<(), CheckpointError> {
    for (name, found) in [
        ("step-0", "step-0"),
        ("recipe.toml", "recipe.toml"),
        ("config.toml", "a run"),
        ("metrics.jsonl", "a run"),
        ("state.json", "a checkpoint"),
    ] {
        if out.join(name).exists() {
            return Err(CheckpointError::refused(
                format!("{} holds {found}", out.shown()),
                "name a new or empty folder with --out",
            ));
        }
    }
    Ok(())
}

/// Loads the model of a folder of `transformers`, as [`load_model`](crate::load_model) loads a checkpoint's model.
pub(crate) fn load<B: Backend>(
    from: &Path,
    device: &B::Device,
    kept: Kept,
    then: &mut impl ModuleMapper<B>,
) -> Result<LoadedModel<B>, CheckpointError> {
    let tokenizer_path = from.join("tokenizer.json");
    // `None`: the model keeps its own attention. There are no overrides.
    let (recipe, shape, found) = read_model(from, &settings(from, &tokenizer_path, None, &[])?, kept)?;
    // No initial values are drawn from the seed.
    let seed = 0;
    let mut source = |name: &str, dims: &[usize]| {
        if found.tensors.get(name).is_none_or(|joined| joined.shape != dims) {
            let problem = format!("{name} is missing or of a different shape");
            let hint = "config.json and the weights must be of one model";
            return Err(CheckpointError::not_importable(from, problem, hint));
        }
        found.read(name)
    };
    let model = load_parameters_then(Qwen3::new(&shape, seed, device), kept, &mut source, then)?;
    Ok(LoadedModel {
        model,
        recipe,
        state: CheckpointState::untrained(shape.vocab_size),
        shape,
        tokenizer_path,
        path: from.to_owned(),
        kept,
    })
}

/// Reads a folder of `transformers`. Returns the recipe and the sizes of the model to make, under the overrides
/// `settings`, and the folder's tensors with the sizes of the folder's own model.
fn read_model(
    from: &Path,
    settings: &[String],
    kept: Kept,
) -> Result<(Recipe, ModelShape, FoundTensors), CheckpointError> {
    let (config, unties) = read_config(from)?;
    let weights = Weights::open(from)?;
    let untied = format!("{OUTPUT} is not the embedding, though config.json ties them: the model is read untied");
    for note in config.notes.iter().chain(&weights.notes).chain(unties.then_some(&untied)) {
        log::warn!("{}: {note}", from.shown());
    }
    // Doge always has residual scales; they are dropped below if all of them are one.
    let is_doge = config.architecture == Architecture::Doge;
    let may_scale = is_doge || config.residual_scale;
    let (_, source_shape, _) = recipe_and_shape(from, &config, may_scale, &[])?;
    config.check_derived(from, &source_shape)?;
    let wanted = tensors_of(&source_shape, config.architecture);
    let mut found = find_tensors(&config, weights, &wanted, source_shape, kept)?;
    let has_scales = config.residual_scale || (is_doge && !found.drop_unit_scales()?);
    let (recipe, shape, unused) = recipe_and_shape(from, &config, has_scales, settings)?;
    if !unused.is_empty() {
        log::warn!("not used with attention.kind = {:?}: {}", recipe.attention.kind().name(), unused.join(", "));
    }
    // The folder's own sizes again, now that it is known whether it has residual scales.
    let no_settings = [];
    (_, found.shape, _) = recipe_and_shape(from, &config, has_scales, &no_settings)?;
    Ok((recipe, shape, found))
}

/// The configuration, and whether it was changed to untied. If the files hold an output projection that differs from
/// the embedding, `transformers` reads that one, although `config.json` ties them.
fn read_config(from: &Path) -> Result<(HfConfig, bool), CheckpointError> {
    let mut config = HfConfig::read(&from.join("config.json"))?;
    let unties = config.is_tied && has_own_output(&Weights::open(from)?)?;
    config.is_tied &= !unties;
    Ok((config, unties))
}

/// Whether the files hold an output projection that differs from the embedding.
fn has_own_output(weights: &Weights) -> Result<bool, CheckpointError> {
    Ok(match (weights.find(OUTPUT)?, weights.find(EMBEDDING)?) {
        (Some(output), Some(embedding)) => !is_same(&output, &embedding),
        _ => false,
    })
}

/// The recipe and the sizes of the model that [`import`] would write. Of the weights, only the output projection and
/// the embedding are read.
///
/// # Errors
/// A configuration that cannot be read or that no recipe can express; missing files of weights.
pub fn imported_model(
    from: &Path,
    attention: Option<AttentionKind>,
    overrides: &[String],
) -> Result<(Recipe, ModelShape), CheckpointError> {
    let (config, _) = read_config(from)?;
    let settings = settings(from, &from.join("tokenizer.json"), attention, overrides)?;
    let (recipe, shape, _) = recipe_and_shape(from, &config, config.residual_scale, &settings)?;
    Ok((recipe, shape))
}

/// Overrides for the model's recipe: the folder's tokenizer, then the user's changes.
fn settings(
    from: &Path,
    tokenizer: &Path,
    attention: Option<AttentionKind>,
    overrides: &[String],
) -> Result<Vec<String>, CheckpointError> {
    // In a recipe's paths `$` begins a variable, and `$$` is a dollar sign.
    let path = tokenizer.to_string_lossy().into_owned().replace('$', "$$");
    let tokenizer = format!("tokenizer.path={path}");
    let eos = tokenizer_files::eos_token(from)?.map(|name| format!("tokenizer.eos_token={name}"));
    let kind = attention.map(|kind| format!("attention.kind={}", kind.name()));
    let settings = std::iter::once(tokenizer).chain(eos).chain(kind);
    Ok(settings.chain(overrides.iter().cloned()).collect())
}

/// The recipe of the imported model, with `settings` as overrides; the model's sizes; and the keys of `settings` that
/// its kind of attention does not have.
fn recipe_and_shape(
    from: &Path,
    config: &HfConfig,
    residual_scale: bool,
    settings: &[String],
) -> Result<(Recipe, ModelShape, Vec<String>), CheckpointError> {
    let asked = asked_kind(settings);
    let text = config.recipe_toml(residual_scale, asked);
    let is_latent = |kind: &AttentionKind| kind.facts().projections == Projections::Latent;
    if let Some(kind) = asked.filter(|kind| is_latent(kind) && !config.is_of(*kind)) {
        return Err(CheckpointError::not_importable(
            from,
            format!("latent attention ({}) has weights that no other kind has", kind.name()),
            other_kinds(),
        ));
    }
    let path = from.join("config.json");
    let loaded = Recipe::load_with_left_out(&text, "the imported model", settings).map_err(without_lines);
    let (recipe, mut left_out) = loaded.map_err(CheckpointError::bad_recipe(&path))?;
    let shape = recipe.model_shape(config.vocab_size);
    let shape = shape.map_err(CheckpointError::bad_recipe(&path))?;
    // What the folder's own kind had is no mistake of the user's.
    left_out.retain(|key| settings.iter().any(|setting| setting.split('=').next() == Some(key)));
    Ok((recipe, shape, left_out))
}

/// The kind that the last override of `attention.kind` names, if there is one.
fn asked_kind(settings: &[String]) -> Option<AttentionKind> {
    let items = settings.iter().rev().filter_map(|item| item.split_once('='));
    let mut kinds = items.filter(|(key, _)| key.trim() == "attention.kind");
    AttentionKind::named(kinds.next()?.1.trim().trim_matches(['"', '\'']))
}

/// Removes line numbers from the mistakes of a recipe, because an imported model's recipe is generated.
fn without_lines(mut error: RecipeError) -> RecipeError {
    if let RecipeError::Invalid { mistakes, .. } = &mut error {
        for mistake in mistakes {
            if let Some(Location::Line(_)) = mistake.location {
                mistake.location = None;
            }
        }
    }
    error
}

/// The tensors of a folder by their names in Sieve. Their values are read from the files when they are asked for.
struct FoundTensors {
    weights: Weights,
    tensors: HashMap<String, Joined>,
    ignored: Vec<String>,
    /// The model that the tensors are of.
    shape: ModelShape,
}

/// A tensor of a model, and the folder's tensors that it is joined of.
struct Joined {
    shape: Vec<usize>,
    /// The type that the model keeps; of residual scales f32.
    dtype: DType,
    /// Names in the folder, with the rows that each of them is and how they are stored.
    parts: Vec<(String, Range<usize>, Form)>,
}

impl FoundTensors {
    /// The values of a tensor, by its name in Sieve, which must be among them.
    fn read(&self, name: &str) -> Result<TensorData, CheckpointError> {
        let Joined { shape, dtype, parts } = &self.tensors[name];
        let row_bytes = shape[1..].iter().product::<usize>() * dtype.size();
        let mut bytes = Bytes::from_bytes_vec(vec![0; shape[0] * row_bytes]);
        for (theirs, rows, form) in parts {
            let stored = self.weights.find(theirs)?.expect("it was found before");
            let place = &mut bytes[rows.start * row_bytes..rows.end * row_bytes];
            if *form == Form::PLAIN {
                stored.convert(*dtype, place);
            } else {
                place.copy_from_slice(&form.weights(stored.data()).convert_dtype(*dtype).bytes);
            }
        }
        Ok(TensorData::from_bytes(bytes, shape.clone(), *dtype))
    }

    /// Whether all tensors whose names `are_meant` hold nothing but `value`; `None` if there are none.
    fn hold_only(&self, value: f32, are_meant: impl Fn(&str) -> bool) -> Result<Option<bool>, CheckpointError> {
        let mut all = None;
        for name in self.tensors.keys().filter(|name| are_meant(name)) {
            let is_value = self.read(name)?.iter::<f32>().all(|found| found == value);
            all = Some(is_value && all != Some(false));
        }
        Ok(all)
    }

    /// Whether all scores of a DMA model are equal, because every A is 0.
    fn all_scores_tie(&self) -> Result<bool, CheckpointError> {
        Ok(self.hold_only(0.0, |name| name.ends_with("self_attn.a"))? == Some(true))
    }

    /// Removes the tensors that a conversion drops. Trained ones are an error unless `drops`. If DMA's A is all zeros,
    /// then neither it nor W_dt, which it is multiplied with, counts as trained.
    fn drop_lost(&mut self, from: &Path, conversion: &Conversion, drops: bool) -> Result<(), CheckpointError> {
        let ties = self.all_scores_tie()?;
        let lost = conversion.dropped.iter().filter(|spec| !(ties && spec.part == Part::Mask));
        let lost = lost.cloned().collect::<Vec<_>>();
        if !lost.is_empty() && !drops {
            return Err(CheckpointError::not_importable(
                from,
                format!("the new attention has no place for trained tensors: {}", names_of(&lost)),
                "--drop imports the model without them",
            ));
        }
        for spec in &conversion.dropped {
            self.tensors.remove(&spec.ours);
        }
        Ok(())
    }

    /// Removes the residual scales if all of them are exactly one. Returns whether it did.
    fn drop_unit_scales(&mut self) -> Result<bool, CheckpointError> {
        let all_one = self.hold_only(1.0, is_residual_scale)?.unwrap_or(true);
        if all_one {
            self.tensors.retain(|name, _| !is_residual_scale(name));
        }
        Ok(all_one)
    }
}

fn is_residual_scale(name: &str) -> bool {
    name.ends_with("input_residual") || name.ends_with("post_attention_residual")
}

/// Finds the `wanted` tensors, of which packed ones have several parts. One error names all that do not fit.
fn find_tensors(
    config: &HfConfig,
    weights: Weights,
    wanted: &[ExportTensor],
    shape: ModelShape,
    kept: Kept,
) -> Result<FoundTensors, CheckpointError> {
    let by_name: HashMap<&str, _> = wanted.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
    let is_tied = !by_name.contains_key(OUTPUT);
    let mut tensors: HashMap<String, Joined> = HashMap::new();
    let mut problems = Problems { conflicts: weights.conflicts.clone(), ..Problems::default() };
    let mut ignored = Vec::new();
    for name in weights.names() {
        if !by_name.contains_key(name) {
            // The output projection of a tied model equals the embedding; `read_config` has checked that.
            if name.ends_with(IGNORED_ENDING) || (is_tied && name == OUTPUT) {
                ignored.push(name.to_owned());
            } else {
                problems.unknown.insert(name.to_owned());
            }
        }
    }
    for tensor in wanted {
        let name = &tensor.name;
        let Some(stored) = weights.find(name)? else {
            problems.missing.insert(name.clone());
            continue;
        };
        if stored.shape != tensor.shape {
            let (got, wanted) = (&stored.shape, &tensor.shape);
            problems.shapes.insert(format!("{name} {got:?} instead of {wanted:?}"));
            continue;
        }
        let Source::Rows { name: ours, rows, num_rows } = &tensor.source else {
            // The tensor is all ones, which the checkpoint does not store.
            continue;
        };
        // bf16 would round scales near one to one, and `drop_unit_scales` would drop them.
        let dtype = if is_residual_scale(ours) { DType::F32 } else { kept.dtype(ours) };
        let joined = tensors.entry(ours.clone()).or_insert_with(|| Joined {
            shape: [&[*num_rows], &tensor.shape[1..]].concat(),
            dtype,
            parts: Vec::new(),
        });
        joined.parts.push((name.clone(), rows.clone(), tensor.form));
    }
    problems.check(&weights.folder, &config.assumed)?;
    Ok(FoundTensors { weights, tensors, ignored, shape })
}

/// Names of tensors that do not fit the model, by kind of problem.
#[derive(Default)]
struct Problems {
    missing: BTreeSet<String>,
    unknown: BTreeSet<String>,
    shapes: BTreeSet<String>,
    conflicts: BTreeSet<String>,
}

impl Problems {
    /// Fails if there is a problem. The error names all of them, and the sizes that `config.json` leaves out.
    fn check(&self, from: &Path, assumed: &str) -> Result<(), CheckpointError> {
        let parts = [
            ("missing", &self.missing),
            ("unknown", &self.unknown),
            ("of a different shape", &self.shapes),
            ("there twice", &self.conflicts),
        ];
        let parts = parts.into_iter().filter(|(_, names)| !names.is_empty());
        let mut text = parts
            .map(|(what, names)| format!("{} tensors are {what}: {}", names.len(), list(names)))
            .collect::<Vec<_>>();
        if text.is_empty() {
            return Ok(());
        }
        if !assumed.is_empty() {
            text.push(format!("config.json leaves out sizes, and the class assumes {assumed}"));
        }
        let hint = self.prefix_hint(from);
        let hint = hint.unwrap_or_else(|| "config.json and the weights must be of one model".to_owned());
        Err(CheckpointError::not_importable(from, text.join("\n  "), hint))
    }

    /// The hint about names that have a prefix too much or too little, if that is so of most unknown names.
    fn prefix_hint(&self, from: &Path) -> Option<String> {
        let are_most = |count: usize| 2 * count > self.unknown.len();
        let known = |name: &str| self.missing.contains(name);
        let lacking = |name: &&String| known(&format!("{BASE_PREFIX}{name}"));
        let folder = from.shown();
        if are_most(self.unknown.iter().filter(lacking).count()) {
            let output = if known(OUTPUT) {
                format!("the folder has no {OUTPUT}: take the model that AutoModelForCausalLM saved")
            } else {
                format!(
                    "transformers adds it: AutoModelForCausalLM.from_pretrained({:?}).save_pretrained(\"NEW\"), and \
                 copy the tokenizer there",
                    folder.to_string()
                )
            };
            return Some(format!("the names lack {BASE_PREFIX:?}, as those of a saved AutoModel do; {output}"));
        }
        // The prefix of one name, which must be the others' prefix too.
        let first = self.unknown.iter().find_map(|name| {
            let ends = name.match_indices('.').map(|(at, _)| at + 1);
            ends.into_iter().find(|&end| known(&name[end..])).map(|end| &name[..end])
        })?;
        let has_first = |name: &&String| name.strip_prefix(first).is_some_and(known);
        are_most(self.unknown.iter().filter(has_first).count()).then(|| {
            format!(
                "the names begin with {first:?}, as torch.compile (_orig_mod.) and DistributedDataParallel (module.) \
                 leave them; these lines of Python write them without it:\n    import glob\n    \
                 from safetensors.torch import load_file, save_file\n    \
                 all = [pair for path in glob.glob({:?}) for pair in load_file(path).items()]\n    \
                 save_file({{name.removeprefix({first:?}): tensor for name, tensor in all}}, {:?}, \
                 {{\"format\": \"pt\"}})",
                format!("{folder}/*.safetensors"),
                format!("{folder}/{SINGLE}")
            )
        })
    }
}

/// The error of weights that cannot begin the recipe's model.
fn unfit(from: &Path, gap: &ConversionGap) -> CheckpointError {
    let hint = match gap {
        ConversionGap::Kinds(_) => other_kinds(),
        ConversionGap::Size(_) => "only the attention may change; leave [model] as it is".to_owned(),
    };
    CheckpointError::not_importable(from, gap.to_string(), hint)
}

/// The names, at most [`MAX_NAMES`], and how many more there are.
fn list(names: &BTreeSet<String>) -> String {
    let mut text = names.iter().take(MAX_NAMES).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > MAX_NAMES {
        text.push_str(&format!(" and {} more", names.len() - MAX_NAMES));
    }
    text
}

/// For tests: named tensors of a file.
#[cfg(test)]
fn all_tensors(path: &Path) -> Vec<crate::NamedTensor> {
    let file = crate::TensorFile::open(path).expect("a file of tensors");
    let names = file.names().into_iter();
    names.map(|name| crate::NamedTensor { data: file.any_tensor(&name).expect("it is named"), name }).collect()
}

#[cfg(test)]
mod matrix;
#[cfg(test)]
mod tests;
