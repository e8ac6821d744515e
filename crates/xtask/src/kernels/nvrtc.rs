//! The run-time compiler of CUDA, installed from its wheel if missing, and its messages for each kernel.
use super::bound_and_zero;
use crate::workspace;
use anyhow::{Context, Result, bail, ensure};
use sieve_gpu::SourceKernel;
use sieve_gpu::ahead_of_time::{explain_with_nvrtc, installed_nvrtc};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The wheel of CUDA 13.0's run-time compiler: 90 MB. It needs no driver, and no header.
const WHEEL: &str = "nvidia-cuda-nvrtc==13.0.88";

/// The variable that names the folders in which Linux looks for libraries, read when a program starts.
const LIBRARIES: &str = "LD_LIBRARY_PATH";

/// Runs the chore of these words again as a program that finds the installed compiler; `None` in that program.
pub(crate) fn started_with_it(words: &[&str]) -> Result<Option<()>> {
    let venv = workspace::target_folder("cuda-venv")?;
    let folder = match find(&venv) {
        Some(folder) => folder,
        None => {
            install(&venv)?;
            find(&venv).with_context(|| format!("the wheel installed no NVRTC in {}", venv.display()))?
        }
    };
    if std::env::var_os(LIBRARIES).is_some_and(|folders| std::env::split_paths(&folders).next() == Some(folder.clone()))
    {
        return Ok(None);
    }
    let before = std::env::var_os(LIBRARIES).unwrap_or_default();
    let folders = std::env::join_paths([folder].into_iter().chain(std::env::split_paths(&before)))?;
    let program = std::env::current_exe().context("this program's path")?;
    let status = Command::new(&program).args(words).env(LIBRARIES, folders).status();
    ensure!(
        status.with_context(|| format!("cannot start {}", program.display()))?.success(),
        "the kernels have problems, which are printed above"
    );
    Ok(Some(()))
}

/// The compiler's messages, kept in `target/cuda-kernels` under a hash of a kernel's complete text.
pub(crate) struct Messages {
    folder: PathBuf,
}

impl Messages {
    /// The messages of the NVRTC that this program finds.
    pub(crate) fn of_installed() -> Result<Self> {
        // The last number counts the checks whose warnings the messages contain.
        let name = format!("cuda-kernels/nvrtc{}-2", installed_nvrtc()?);
        Ok(Self { folder: workspace::target_folder(&name)? })
    }

    /// The messages of an earlier run, or of compiling the kernel now: the compiler's, then a warning for each
    /// comparison that ptxas may compile wrongly.
    pub(crate) fn of(&self, kernel: &SourceKernel, arch: &str) -> Result<String> {
        let file = self.folder.join(format!("{}-{arch}-{:032x}.log", kernel.name(), kernel.code_key()?));
        if let Ok(messages) = fs::read_to_string(&file) {
            return Ok(messages);
        }
        let output = explain_with_nvrtc(kernel, arch)?;
        if output.ptx.is_empty() {
            bail!("the compiler returned no PTX");
        }
        let mut messages = output.log;
        for comparison in bound_and_zero::found(&output.ptx) {
            messages.push_str(&format!("\nwarning: {comparison}: kernels/notes/bound-and-zero.md"));
        }
        // A file with this name is complete: another run may be writing the same one.
        let mut unnamed = tempfile::NamedTempFile::new_in(&self.folder).context("a temporary file")?;
        std::io::Write::write_all(&mut unnamed, messages.as_bytes())?;
        unnamed.persist(&file).with_context(|| format!("cannot write {}", file.display()))?;
        Ok(messages)
    }
}

/// The warnings among messages, about mistakes and about slow code.
pub(crate) fn warnings(messages: &str) -> impl Iterator<Item = &str> {
    messages
        .lines()
        .map(str::trim)
        .filter(|line| line.contains("warning") || line.contains("Potential Performance Loss"))
        // A remark explains how to turn warnings off.
        .filter(|line| !line.starts_with("Remark:"))
}

/// The folder of the compiler's libraries in a virtual environment, under any version of Python.
fn find(venv: &Path) -> Option<PathBuf> {
    fs::read_dir(venv.join("lib")).ok()?.flatten().find_map(|python| {
        let folder = python.path().join("site-packages/nvidia/cu13/lib");
        folder.join("libnvrtc.so.13").is_file().then_some(folder)
    })
}

/// Creates the virtual environment and installs the wheel into it.
fn install(venv: &Path) -> Result<()> {
    let path = venv.to_str().context("the path of target/ is not UTF-8")?;
    workspace::run("python3", &["-m", "venv", path])
        .context("a Python virtual environment is needed for NVRTC; on Debian: apt-get install python3-venv")?;
    let pip = venv.join("bin/pip");
    let pip = pip.to_str().context("the path of target/ is not UTF-8")?;
    workspace::run(pip, &["install", "--quiet", "--disable-pip-version-check", WHEEL])
        .context("NVRTC could not be installed from its wheel")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_serialised_wgmma_is_a_warning() {
        let log = "ptxas info    : Used 31 registers
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
Remark: The warnings can be suppressed with \"-diag-suppress <warning-number>\"";
        assert_eq!(warnings(log).count(), 1);
    }
}
