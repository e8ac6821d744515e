//! Files that the commands of `sieve eval` write at their end.
use crate::out_file::write_text;
use crate::terminal;
use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value, json};
use sieve_core::ShownPath;
use sieve_hf::{Checkpoint, LoadedModel};
use sieve_ops::DeviceBackend;
use std::path::{Path, PathBuf};

/// Folder of a run's saved evaluations; `sieve compare` reads it.
const EVAL_FOLDER: &str = "eval";

/// Name of a model in a picture: its run's name and its step, without a path.
pub fn model_name<B: DeviceBackend>(loaded: &LoadedModel<B>) -> String {
    let checkpoints = &loaded.recipe.checkpoint.folder;
    let step = loaded.step().map_or(String::new(), |step| format!(", step {step}"));
    format!("{}{step}", run_name(&loaded.path, checkpoints))
}

/// Heading of a printed report: the model's line, then the checkpoint's path and its step, if it is known.
pub fn heading<B: DeviceBackend>(loaded: &LoadedModel<B>) -> String {
    let step = loaded.step().map_or(String::new(), |step| format!(" (step {step})"));
    format!("{}\n{}{step}", terminal::model_line(&loaded.line()), loaded.path.shown())
}

/// What is known of the lengths that the model was trained for, for a heading.
pub fn trained_words<B: DeviceBackend>(loaded: &LoadedModel<B>) -> String {
    match loaded.trained_len() {
        Some(tokens) => format!("trained on {tokens} tokens"),
        None => format!("with a context of {} tokens", loaded.shape.max_seq_len),
    }
}

/// `--json` and `--save`: where a command's numbers go.
#[derive(Args, Debug)]
pub struct ResultArgs {
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Also keep that object as eval/NAME.json in the checkpoint's run folder, where `sieve compare` finds it; the
    /// command's name when NAME is absent
    #[arg(long, value_name = "NAME", num_args = 0..=1, default_missing_value = "")]
    save: Option<String>,
}

impl ResultArgs {
    /// Fails before the work begins if `--save` could not name its file. `command` is the name of the file of `--save`
    /// where it has no value. `writes`: whether another flag names a file to write. Without any the command ends when
    /// nobody reads what it prints.
    pub fn check(&self, checkpoint: &Path, command: &str, writes: bool) -> Result<()> {
        if self.save.is_none() {
            if !writes {
                terminal::end_with_reader();
            }
            return Ok(());
        }
        // `peek` fails for a folder in the Hugging Face layout, which belongs to no run.
        let peeked = Checkpoint::peek(checkpoint).ok();
        let recipe = peeked.as_ref().map(Checkpoint::recipe_and_shape).transpose()?;
        let checkpoints = recipe.map_or(String::new(), |(recipe, _)| recipe.checkpoint.folder);
        let checkpoint = peeked.map_or(checkpoint.to_owned(), |peeked| peeked.path);
        self.file(&checkpoint, &checkpoints, command).map(|_| ())
    }

    /// Path of the JSON file that `--save` writes; `None` without `--save`. `checkpoints` is the recipe's folder of
    /// `step-N` inside the run, and `command` the file's name if `--save` has no value.
    fn file(&self, checkpoint: &Path, checkpoints: &str, command: &str) -> Result<Option<PathBuf>> {
        let name = match self.save.as_deref() {
            None => return Ok(None),
            Some("") => command,
            Some(name) => name,
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-=+".contains(c);
        let has_ending = Path::new(name).extension().is_some_and(|ending| ending.eq_ignore_ascii_case("json"));
        if name.starts_with('.') || has_ending || !name.chars().all(plain) {
            bail!(
                "--save {name}: that is not a file name without its ending\n  \
                 hint: use letters, digits, - and _, without .json"
            );
        }
        let Some(run) = run_folder(checkpoint, checkpoints) else {
            bail!(
                "--save: {} is not in a run folder\n  hint: name a run's checkpoint, or use --json > FILE",
                checkpoint.shown()
            );
        };
        Ok(Some(run.join(EVAL_FOLDER).join(format!("{name}.json"))))
    }

    /// Writes `report`, with the checkpoint and its step, as one JSON object to the file of `--save` and, with
    /// `--json`, to the standard output. Returns whether `--json` was given; if not, the caller prints plain lines.
    pub fn report<B: DeviceBackend>(&self, loaded: &LoadedModel<B>, command: &str, report: Value) -> Result<bool> {
        let path = loaded.path.to_string_lossy().into_owned();
        let mut all = json!({ "checkpoint": path, "step": loaded.step(), "model": loaded.line() });
        if let (Some(all), Value::Object(report)) = (all.as_object_mut(), report) {
            all.extend(report);
        }
        if let Some(file) = self.file(&loaded.path, &loaded.recipe.checkpoint.folder, command)? {
            if let Some(folder) = file.parent() {
                std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.shown()))?;
            }
            write_text(&file, &format!("{all}\n"))?;
            terminal::remark(&format!("saved {}", file.shown()));
        }
        if self.json {
            terminal::line(&all.to_string());
        }
        Ok(self.json)
    }
}

/// `<run>` of a checkpoint `<run>/<checkpoints>/step-N`; `None` for any other path.
pub fn run_folder(checkpoint: &Path, checkpoints: &str) -> Option<PathBuf> {
    // A relative path such as `step-9` has fewer parents than levels.
    let absolute = std::path::absolute(checkpoint).unwrap_or_else(|_| checkpoint.to_owned());
    let levels = Path::new(checkpoints).components().count();
    let parent = absolute.parent().filter(|parent| levels > 0 && parent.ends_with(checkpoints))?;
    parent.ancestors().nth(levels).map(Path::to_owned)
}

/// Name of the checkpoint's run folder, or of the checkpoint itself where it belongs to no run.
fn run_name(checkpoint: &Path, checkpoints: &str) -> String {
    let run = run_folder(checkpoint, checkpoints).or_else(|| std::path::absolute(checkpoint).ok());
    let name = run.as_deref().and_then(Path::file_name);
    name.map_or_else(|| "model".to_owned(), |name| Path::new(name).shown().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_names_the_run() {
        for (path, checkpoints) in [
            ("/a/out/mine/checkpoint/step-30", "checkpoint"),
            ("/a/out/mine/x/y/step-30", "x/y"),
            ("/a/out/mine", "checkpoint"),
        ] {
            assert_eq!(run_name(Path::new(path), checkpoints), "mine");
        }
        assert_eq!(run_name(Path::new("/"), "checkpoint"), "model");
        let run = |path| run_folder(Path::new(path), "checkpoint");
        assert_eq!(run("/a/run/checkpoint/step-3"), Some(PathBuf::from("/a/run")));
        assert_eq!(run("/a/run/step-3"), None);
        assert_eq!(run_folder(Path::new("/a/exported"), ""), None);
    }
}
