//! Where the repository is, and how its commands are run.
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Root of the repository.
pub(crate) fn root() -> PathBuf {
    // This file is in crates/xtask, two levels below the root, wherever the checkout lies.
    let mut root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    root.pop();
    root.pop();
    root
}

/// Runs a command in the root with its output shown; an exit status other than 0 is an error.
pub(crate) fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let line = format!("{program} {}", arguments.join(" "));
    println!("$ {line}");
    let status = Command::new(program)
        .args(arguments)
        .current_dir(root())
        .status()
        .with_context(|| format!("cannot start `{line}`"))?;
    if !status.success() {
        bail!("`{line}` failed ({status})");
    }
    Ok(())
}

/// Runs a command in the root and returns what it prints.
pub(crate) fn output(program: &str, arguments: &[&str]) -> Result<String> {
    let line = format!("{program} {}", arguments.join(" "));
    let output = Command::new(program)
        .args(arguments)
        .current_dir(root())
        .output()
        .with_context(|| format!("cannot start `{line}`"))?;
    if !output.status.success() {
        bail!(
            "`{line}` failed ({})\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    String::from_utf8(output.stdout).with_context(|| format!("`{line}` printed text that is not UTF-8"))
}

/// Files that belong to the repository: tracked, or new and not ignored. Relative to the root, with forward slashes.
pub(crate) fn files() -> Result<Vec<String>> {
    let listing = output("git", &["ls-files", "-z", "--cached", "--others", "--exclude-standard"])?;
    let mut files: Vec<String> = listing
        .split('\0')
        .filter(|f| !f.is_empty())
        .map(str::to_owned)
        .collect();
    // A file deleted but not yet committed is still listed.
    files.retain(|file| root().join(file).is_file());
    files.sort();
    files.dedup();
    Ok(files)
}

/// The build folder's subfolder of that name, made if missing.
pub(crate) fn target_folder(name: &str) -> Result<PathBuf> {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    let folder = target.join(name);
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder)
}

/// Reads a text file, naming it in the error.
pub(crate) fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}
