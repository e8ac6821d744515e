//! Files that a measure writes when it is done.
use crate::terminal;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use sieve_files::write_synced;
use sieve_hf::LoadedModel;
use sieve_ops::SieveBackend;
use std::path::Path;

/// What a picture calls a model: the name of its run and the step, and no path.
pub(super) fn model_name<B: SieveBackend>(loaded: &LoadedModel<B>) -> String {
    let folder = &loaded.recipe.checkpoint.folder;
    format!("{}, step {}", run_name(&loaded.path, folder), loaded.state.step)
}

/// What a report begins with: the checkpoint and its step.
pub(super) fn heading<B: SieveBackend>(loaded: &LoadedModel<B>) -> String {
    format!("{} (step {})", loaded.path.display(), loaded.state.step)
}

/// Prints the fields of a report as JSON, behind the checkpoint and its step.
pub(super) fn print_json<B: SieveBackend>(loaded: &LoadedModel<B>, report: Value) {
    let path = loaded.path.display().to_string();
    let mut all = json!({ "checkpoint": path, "step": loaded.state.step });
    if let (Some(all), Value::Object(report)) = (all.as_object_mut(), report) {
        all.extend(report);
    }
    terminal::line(&all.to_string());
}

fn run_name(checkpoint: &Path, folder: &str) -> String {
    let absolute = std::path::absolute(checkpoint).unwrap_or_else(|_| checkpoint.to_owned());
    let levels = Path::new(folder).components().count();
    let parent = absolute.parent().filter(|parent| parent.ends_with(folder));
    let run = match parent {
        Some(parent) => parent.ancestors().nth(levels),
        None => Some(absolute.as_path()),
    };
    let run = run.and_then(Path::file_name);
    run.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
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

/// As [`check`], for a file that [`write`] makes. Makes the temporary file beside it and removes that again.
pub(crate) fn check_replaceable(path: &Path) -> Result<()> {
    check(Some(path))?;
    if path.file_name().is_none() || (path.exists() && !path.is_file()) {
        bail!(
            "cannot write {}: it is no file\n  hint: name a new file, or one to replace",
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

/// Text without the characters that XML gives a meaning, for pictures.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
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
