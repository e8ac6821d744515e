//! nvcc, installed from its wheels if missing. Its results are cached.
use super::bound_and_zero;
use super::shipped::Specialisation;
use crate::workspace;
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use xxhash_rust::xxh3::xxh3_128;

/// The wheels of CUDA 13.0 with the compiler, the headers and the run-time compiler: half a gigabyte. They need no
/// driver.
const WHEELS: &[&str] = &[
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-nvrtc==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
];

/// An installed nvcc.
pub(crate) struct Nvcc {
    program: PathBuf,
    /// What `nvcc --version` prints.
    version: String,
    /// Folder of the cached results.
    results: PathBuf,
}

impl Nvcc {
    /// The nvcc in the virtual environment `target/cuda-venv`, which is created if it has none.
    pub(crate) fn find_or_install() -> Result<Self> {
        let venv = workspace::target_folder("cuda-venv")?;
        let program = match find(&venv) {
            Some(program) => program,
            None => {
                install(&venv)?;
                find(&venv).with_context(|| format!("the wheels installed no nvcc in {}", venv.display()))?
            }
        };
        let output = Command::new(&program).arg("--version").output();
        let output = output.with_context(|| format!("cannot start {}", program.display()))?;
        let version = String::from_utf8_lossy(&output.stdout).into_owned();
        Ok(Self { program, version, results: workspace::target_folder("cuda-kernels")? })
    }

    /// Compiles a specialisation for an architecture and returns nvcc's messages, and warnings of what ptxas may
    /// compile wrongly. If no source, define or version has changed since an earlier run, returns that run's messages.
    pub(crate) fn compile(&self, specialisation: &Specialisation, arch: &str) -> Result<String> {
        let source = super::folder().join(&specialisation.file);
        let key = self.key(&source, specialisation, arch)?;
        let stem = self.results.join(format!("{}-{arch}-{key:032x}", specialisation.file.trim_end_matches(".cu")));
        let (log_file, cubin) = (stem.with_extension("log"), stem.with_extension("cubin"));
        if let (Ok(log), true) = (fs::read_to_string(&log_file), cubin.is_file()) {
            return Ok(log);
        }
        let between = tempfile::tempdir().context("a temporary folder")?;
        let output = Command::new(&self.program)
            .args(["-keep", "-keep-dir"])
            .arg(between.path())
            .arg(format!("-gencode=arch={},code={arch}", arch.replacen("sm_", "compute_", 1)))
            .args(["-std=c++17", "-Xptxas", "-v", "-cubin", "-I"])
            .arg(super::folder())
            .args(
                specialisation
                    .defines
                    .iter()
                    // nvcc splits its arguments at commas.
                    .map(|(name, value)| format!("-D{name}={}", value.replace(',', "\\,"))),
            )
            .arg("-o")
            .args([&cubin, &source])
            .output()
            .with_context(|| format!("cannot start {}", self.program.display()))?;
        let mut log = String::from_utf8_lossy(&output.stderr).into_owned();
        if !output.status.success() {
            bail!("nvcc refused it\n{log}");
        }
        for ptx in
            workspace::entries(between.path())?.iter().filter(|path| path.extension().is_some_and(|e| e == "ptx"))
        {
            for comparison in bound_and_zero::found(&workspace::read(ptx)?) {
                log.push_str(&format!("\nwarning: {comparison}: kernels/notes/bound-and-zero.md"));
            }
        }
        // Written last: a log that exists belongs to a complete cubin.
        fs::write(&log_file, &log).with_context(|| format!("cannot write {}", log_file.display()))?;
        Ok(log)
    }

    /// A hash of everything that the result depends on.
    fn key(&self, source: &Path, specialisation: &Specialisation, arch: &str) -> Result<u128> {
        let mut files = BTreeSet::new();
        collect_includes(source, &super::folder(), &mut files)?;
        // The number counts the checks whose warnings the messages hold.
        let mut all = format!("{}\n{arch}\n{}\n1\n", self.version, specialisation.text());
        for file in files {
            all.push_str(&workspace::read(&file)?);
            all.push('\0');
        }
        Ok(xxh3_128(all.as_bytes()))
    }
}

/// The path of nvcc in a virtual environment, under any version of Python.
fn find(venv: &Path) -> Option<PathBuf> {
    fs::read_dir(venv.join("lib")).ok()?.flatten().find_map(|python| {
        let program = python.path().join("site-packages/nvidia/cu13/bin/nvcc");
        program.is_file().then_some(program)
    })
}

/// Creates the virtual environment and installs the wheels into it.
fn install(venv: &Path) -> Result<()> {
    let path = venv.to_str().context("the path of target/ is not UTF-8")?;
    workspace::run("python3", &["-m", "venv", path])
        .context("a Python virtual environment is needed for nvcc; on Debian: apt-get install python3-venv")?;
    let pip = venv.join("bin/pip");
    let pip = pip.to_str().context("the path of target/ is not UTF-8")?;
    let arguments: Vec<&str> =
        ["install", "--quiet", "--disable-pip-version-check"].iter().chain(WHEELS).copied().collect();
    workspace::run(pip, &arguments).context("nvcc could not be installed from its wheels")
}

/// Adds to `files` the file and, recursively, the files that it includes in quotes; an include is a path from the
/// file's folder or from `root`.
fn collect_includes(file: &Path, root: &Path, files: &mut BTreeSet<PathBuf>) -> Result<()> {
    let file = file.canonicalize().with_context(|| format!("cannot find {}", file.display()))?;
    if !files.insert(file.clone()) {
        return Ok(());
    }
    let folder = file.parent().unwrap_or(root).to_owned();
    for line in workspace::read(&file)?.lines() {
        if let Some(name) = included_name(line) {
            let beside = folder.join(name);
            let included = if beside.is_file() { beside } else { root.join(name) };
            collect_includes(&included, root, files)?;
        }
    }
    Ok(())
}

/// The name that a line `#include "name"` gives.
fn included_name(line: &str) -> Option<&str> {
    let directive = line.trim_start().strip_prefix('#')?.trim_start();
    let quoted = directive.strip_prefix("include")?.trim_start().strip_prefix('"')?;
    quoted.split('"').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn includes_are_followed_from_beside_and_from_the_root() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let write = |name: &str, text: &str| fs::write(root.path().join(name), text).expect("written");
        fs::create_dir(root.path().join("common")).expect("created");
        write("a.cu", "#include \"common/x.cuh\"\n#include <cuda_bf16.h>\n");
        write("common/x.cuh", "#include \"y.cuh\"\n");
        write("common/y.cuh", "# include \"common/x.cuh\"\n");
        let mut files = BTreeSet::new();
        collect_includes(&root.path().join("a.cu"), root.path(), &mut files).expect("all there");
        assert_eq!(files.len(), 3);
        write("common/y.cuh", "#include \"missing.cuh\"\n");
        assert!(collect_includes(&root.path().join("a.cu"), root.path(), &mut BTreeSet::new()).is_err());
    }
}
