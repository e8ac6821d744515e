//! What lies at a path where a model's folder, or a file of it, should be.
use crate::CheckpointError;
use sieve_core::ShownPath;
use sieve_files::special_file;
use std::fs;
use std::path::{Path, PathBuf};

/// Whether a folder is one of `transformers`, not a checkpoint.
pub(crate) fn is_of_transformers(path: &Path) -> bool {
    path.join("config.json").is_file()
}

/// The file of an adapter, which changes the weights of another model.
const ADAPTER: &str = "adapter_config.json";

/// Refuses a path that is no folder of a model and is known to be something else: a file, a GGUF file, an adapter.
///
/// # Errors
/// A refusal that says which of these the path is.
pub fn refuse_odd_model(path: &Path) -> Result<(), CheckpointError> {
    if let Some(gguf) = gguf_at(path) {
        return Err(CheckpointError::refused(
            format!("{} is a GGUF file, which holds quantised weights in a different layout", gguf.shown()),
            "open it with transformers (AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=NAME), packages gguf \
             and accelerate), save the weights in float32 and the tokenizer with save_pretrained, and take that folder",
        ));
    }
    if path.is_file() {
        let has_model = |folder: &&Path| ["config.json", "state.json"].iter().any(|name| folder.join(name).is_file());
        let hint = match path.parent().filter(has_model) {
            Some(folder) if folder == Path::new("") => "name its folder: .".to_owned(),
            Some(folder) => format!("name its folder: {}", folder.shown()),
            None => "name the folder of a model: config.json, safetensors and tokenizer.json; or of a run".to_owned(),
        };
        return Err(CheckpointError::refused(format!("{} is a file, and a model is a folder", path.shown()), hint));
    }
    let config = path.join("config.json");
    refuse_odd_file(&config)?;
    if path.join(ADAPTER).is_file() && !config.is_file() {
        return Err(CheckpointError::refused(
            format!("{} is an adapter ({ADAPTER}), which changes another model's weights", path.shown()),
            format!(
                "these two lines of Python write the whole model to the folder merged; copy the model's tokenizer \
                 there:\n    from peft import AutoPeftModelForCausalLM\n    \
                 AutoPeftModelForCausalLM.from_pretrained({:?}).merge_and_unload().save_pretrained(\"merged\")",
                path.shown().to_string()
            ),
        ));
    }
    Ok(())
}

/// Refuses a folder, a pipe, a device, or a link that leads nowhere, in the place of a model's file. A file that is not
/// there at all is none of them.
///
/// # Errors
/// A refusal that says which of these the path is.
pub fn refuse_odd_file(path: &Path) -> Result<(), CheckpointError> {
    if path.is_dir() {
        let what = format!("{} is a folder, and a file is needed", path.shown());
        return Err(CheckpointError::refused(what, "put the file of this name in the folder's place"));
    }
    if let Some(kind) = special_file(path) {
        let what = format!("{} is {kind}, and a file is needed", path.shown());
        return Err(CheckpointError::refused(what, "copy or fetch the file itself"));
    }
    match fs::read_link(path) {
        Ok(target) if !path.exists() => Err(CheckpointError::refused(
            format!("{} is a link to {}, which is not there", path.shown(), target.shown()),
            "copy the folder with what its links lead to (cp -rL), or fetch it again",
        )),
        _ => Ok(()),
    }
}

/// The names of files in a folder that may hold weights, sorted.
pub(crate) fn weights_of_other_names(folder: &Path) -> Vec<String> {
    const ENDINGS: [&str; 9] = ["safetensors", "bin", "pt", "pth", "gguf", "h5", "part", "incomplete", "tmp"];
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let weights = entries.filter(|path| path.extension().is_some_and(|end| ENDINGS.iter().any(|known| end == *known)));
    let mut names =
        weights.filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned())).collect::<Vec<_>>();
    names.sort();
    names
}

/// The GGUF file at `from`: the path itself, or a file in a folder without a config.json.
fn gguf_at(from: &Path) -> Option<PathBuf> {
    let is_gguf = |path: &Path| path.extension().is_some_and(|end| end == "gguf");
    if is_gguf(from) && from.is_file() {
        return Some(from.to_owned());
    }
    if from.join("config.json").exists() {
        return None;
    }
    let files = fs::read_dir(from).ok()?.flatten().map(|entry| entry.path());
    files.into_iter().find(|path| is_gguf(path))
}
