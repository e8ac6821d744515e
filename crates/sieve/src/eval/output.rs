//! Files that a measure writes when it is done.
use crate::terminal;
use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value, json};
use sieve_files::write_synced;
use sieve_hf::{Checkpoint, LoadedModel};
use sieve_ops::DeviceBackend;
use std::path::{Path, PathBuf};

/// Folder of a run that holds what evaluations found; `sieve compare` reads it.
const FOLDER: &str = "eval";

/// What a picture calls a model: the name of its run and the step, and no path.
pub(super) fn model_name<B: DeviceBackend>(loaded: &LoadedModel<B>) -> String {
    let folder = &loaded.recipe.checkpoint.folder;
    format!("{}, step {}", run_name(&loaded.path, folder), loaded.state.step)
}

/// What a report begins with: the checkpoint and its step.
pub(super) fn heading<B: DeviceBackend>(loaded: &LoadedModel<B>) -> String {
    format!("{} (step {})", loaded.path.display(), loaded.state.step)
}

/// Where the numbers of a measure go.
#[derive(Args, Debug)]
pub(super) struct ResultArgs {
    /// Print one JSON object
    #[arg(long)]
    pub(super) json: bool,
    /// Also keep that object as eval/NAME.json in the checkpoint's run folder, where `sieve compare` finds it; the
    /// command's name when NAME is absent
    #[arg(long, value_name = "NAME", num_args = 0..=1, default_missing_value = "")]
    save: Option<String>,
}

impl ResultArgs {
    /// Refuses what could not be kept before the work is done for it. `command` is what the file is called by itself.
    pub(super) fn check(&self, checkpoint: &Path, command: &str) -> Result<()> {
        if self.save.is_none() {
            return Ok(());
        }
        // A folder of transformers is a model without a run.
        let peeked = Checkpoint::peek(checkpoint).ok();
        let recipe = peeked.as_ref().map(Checkpoint::recipe_and_shape).transpose()?;
        let folder = recipe.map_or(String::new(), |(recipe, _)| recipe.checkpoint.folder);
        let checkpoint = peeked.map_or(checkpoint.to_owned(), |peeked| peeked.path);
        self.file(&checkpoint, &folder, command).map(|_| ())
    }

    /// Where the object is kept.
    fn file(&self, checkpoint: &Path, folder: &str, command: &str) -> Result<Option<PathBuf>> {
        let name = match self.save.as_deref() {
            None => return Ok(None),
            Some("") => command,
            Some(name) => name,
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-=+".contains(c);
        if name.starts_with('.') || !name.chars().all(plain) {
            bail!("--save {name}: that is not a file name\n  hint: use letters, digits, - and _, without .json");
        }
        let Some(run) = run_folder(checkpoint, folder) else {
            bail!(
                "--save: {} lies in no run folder\n  hint: name a run's checkpoint, or use --json > FILE",
                checkpoint.display()
            );
        };
        Ok(Some(run.join(FOLDER).join(format!("{name}.json"))))
    }

    /// Saves and prints the fields of a report as JSON, after the checkpoint and its step, as the flags say. Returns
    /// false where plain lines are to be printed instead.
    pub(super) fn report<B: DeviceBackend>(
        &self,
        loaded: &LoadedModel<B>,
        command: &str,
        report: Value,
    ) -> Result<bool> {
        let path = loaded.path.display().to_string();
        let mut all = json!({ "checkpoint": path, "step": loaded.state.step });
        if let (Some(all), Value::Object(report)) = (all.as_object_mut(), report) {
            all.extend(report);
        }
        if let Some(file) = self.file(&loaded.path, &loaded.recipe.checkpoint.folder, command)? {
            if let Some(folder) = file.parent() {
                std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
            }
            write(&file, &format!("{all}\n"))?;
            terminal::remark(&format!("saved {}", file.display()));
        }
        if self.json {
            terminal::line(&all.to_string());
        }
        Ok(self.json)
    }
}

/// The run folder of `<run>/<checkpoint folder>/step-N`; `None` for a checkpoint elsewhere.
pub(super) fn run_folder(checkpoint: &Path, folder: &str) -> Option<PathBuf> {
    // A relative path such as `step-9` has fewer parents than levels.
    let absolute = std::path::absolute(checkpoint).unwrap_or_else(|_| checkpoint.to_owned());
    let levels = Path::new(folder).components().count();
    let parent = absolute
        .parent()
        .filter(|parent| levels > 0 && parent.ends_with(folder))?;
    parent.ancestors().nth(levels).map(Path::to_owned)
}

fn run_name(checkpoint: &Path, folder: &str) -> String {
    let run = run_folder(checkpoint, folder).or_else(|| std::path::absolute(checkpoint).ok());
    let name = run.as_deref().and_then(Path::file_name);
    name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// Refuses a file that could not be written before the work is done for it.
pub(crate) fn check(path: Option<&Path>) -> Result<()> {
    let Some(path) = path else {
        return Ok(());
    };
    if path.is_dir() {
        bail!(
            "cannot write {}: it is a folder\n  hint: name a file in it",
            path.display()
        );
    }
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() && !parent.is_dir() => bail!(
            "cannot write {}: there is no folder {}\n  hint: make it first",
            path.display(),
            parent.display()
        ),
        _ => Ok(()),
    }
}

/// As [`check`], for a file that [`write()`] makes. Makes the temporary file beside it and removes that again.
pub(crate) fn check_replaceable(path: &Path) -> Result<()> {
    check(Some(path))?;
    if path.file_name().is_none() || (path.exists() && !path.is_file()) {
        bail!(
            "cannot write {}: it is not a file\n  hint: name a new file, or one to replace",
            path.display()
        );
    }
    sieve_files::check_replaceable(path).with_context(|| format!("cannot write {}", path.display()))
}

/// Writes a file whole or not at all.
pub(crate) fn write(path: &Path, text: &str) -> Result<()> {
    sieve_files::replace(path, |partial| write_synced(partial, text.as_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_names_the_run() {
        for (path, folder) in [
            ("/a/out/mine/checkpoint/step-30", "checkpoint"),
            ("/a/out/mine/x/y/step-30", "x/y"),
            ("/a/out/mine", "checkpoint"),
        ] {
            assert_eq!(run_name(Path::new(path), folder), "mine");
        }
        assert_eq!(run_name(Path::new("/"), "checkpoint"), "model");
        let run = |path| run_folder(Path::new(path), "checkpoint");
        assert_eq!(run("/a/run/checkpoint/step-3"), Some(PathBuf::from("/a/run")));
        assert_eq!(run("/a/run/step-3"), None);
        assert_eq!(run_folder(Path::new("/a/exported"), ""), None);
    }

    use std::fs;

    #[test]
    fn a_file_is_replaced_whole_and_links_stay() {
        let name = format!("sieve-output-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir(&folder).expect("a new folder");
        let path = folder.join("a.json");
        check_replaceable(&path).expect("new");
        assert!(!path.exists());
        write(&path, "one, and longer").expect("writable");
        check_replaceable(&path).expect("there");
        write(&path, "two").expect("writable");
        assert_eq!(fs::read_to_string(&path).expect("there"), "two");
        #[cfg(unix)]
        {
            let link = folder.join("link");
            std::os::unix::fs::symlink(&path, &link).expect("linkable");
            write(&link, "three").expect("writable");
            assert!(link.is_symlink());
            assert_eq!(fs::read_to_string(&path).expect("there"), "three");
            check_replaceable(Path::new("/dev/null")).expect_err("a device");
        }
        let left = fs::read_dir(&folder).expect("there").count();
        assert_eq!(left, if cfg!(unix) { 2 } else { 1 });
        for bad in ["", "no/where.json", "a.json/x"] {
            let path = folder.join(bad);
            check_replaceable(&path).expect_err(bad);
        }
        fs::remove_dir_all(&folder).expect("its own folder");
    }
}
