//! The repository's files, and commands run in its root.
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The root of the repository, two levels above this crate.
pub(crate) fn root() -> PathBuf {
    let mut root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    root.pop();
    root.pop();
    root
}

/// Runs a command in the root with its output shown; an exit status other than 0 is an error.
pub(crate) fn run(program: &str, arguments: &[&str]) -> Result<()> {
    run_in(&root(), program, arguments)
}

/// Runs a command in `folder` with its output shown; an exit status other than 0 is an error.
pub(crate) fn run_in(folder: &Path, program: &str, arguments: &[&str]) -> Result<()> {
    let line = format!("{program} {}", arguments.join(" "));
    println!("$ {line}");
    let mut command = Command::new(program);
    let status = command.args(arguments).current_dir(folder).status();
    let status = status.with_context(|| format!("cannot start `{line}`"))?;
    ensure!(status.success(), "`{line}` failed ({status})");
    Ok(())
}

/// Runs cargo in the root, with the words of `line` as its arguments.
pub(crate) fn cargo(line: &str) -> Result<()> {
    run("cargo", &line.split(' ').collect::<Vec<_>>())
}

/// Runs the command `line` in the root, and returns what it prints.
pub(crate) fn output(line: &str) -> Result<String> {
    let mut words = line.split(' ');
    let mut command = Command::new(words.next().unwrap_or_default());
    let output = command.args(words).current_dir(root()).output();
    let output = output.with_context(|| format!("cannot start `{line}`"))?;
    ensure!(
        output.status.success(),
        "`{line}` failed ({})\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).with_context(|| format!("`{line}` printed text that is not UTF-8"))
}

/// The packages that a command `cargo metadata` lists.
pub(crate) fn packages(line: &str) -> Result<Vec<Value>> {
    let metadata = output(line)?;
    let mut metadata: Value = serde_json::from_str(&metadata).context("cargo metadata printed no JSON")?;
    match metadata["packages"].take() {
        Value::Array(packages) => Ok(packages),
        _ => bail!("cargo metadata has no packages"),
    }
}

/// The repository's files, tracked or new and not ignored, as paths from the root with forward slashes.
pub(crate) fn files() -> Result<Vec<String>> {
    let listing = output("git ls-files -z --cached --others --exclude-standard")?;
    let mut files: Vec<String> = listing.split('\0').filter(|f| !f.is_empty()).map(str::to_owned).collect();
    // git still lists a file whose deletion is not committed.
    files.retain(|file| root().join(file).is_file());
    files.sort();
    files.dedup();
    Ok(files)
}

/// A folder in the build folder, created if missing.
pub(crate) fn target_folder(name: &str) -> Result<PathBuf> {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    let folder = target.join(name);
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder)
}

/// The paths of what is in a folder.
pub(crate) fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))?;
    Ok(entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?)
}

/// Reads a text file; its path is absolute or relative to the root.
pub(crate) fn read(path: impl AsRef<Path>) -> Result<String> {
    let path = path.as_ref();
    std::fs::read_to_string(root().join(path)).with_context(|| format!("cannot read {}", path.display()))
}
