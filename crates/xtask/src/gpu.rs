//! What needs a GPU: every kernel against its reference, and each tool of compute-sanitizer over small cases.
use crate::workspace;
use anyhow::{Result, bail};
use std::path::Path;
use std::process::{Command, Stdio};

/// Small cases of every kernel: a tool makes them hundreds of times slower.
const SMALL: &[&str] = &[
    "kernels",
    "check",
    "--device",
    "cuda",
    "--cases",
    "5",
    "--longest",
    "150",
];

/// The tools, with what `kernels check` needs beside its small cases. racecheck credits an arrival at a barrier to
/// the lane that made it, so the lanes of the Hopper backward's row statistics arrive one by one for it.
const TOOLS: &[(&str, &[&str])] = &[
    ("memcheck", &[]),
    ("synccheck", &[]),
    ("initcheck", &[]),
    ("racecheck", &["--every-lane-arrives"]),
];

/// Where the sanitizer is looked for, beside PATH.
const SANITIZER: &[&str] = &["compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer"];

/// Fails at once where there is no GPU or no sanitizer, before anything is built.
pub(crate) fn require() -> Result<()> {
    let driver = ["/dev/nvidiactl", "/proc/driver/nvidia/version"];
    if !driver.iter().any(|file| Path::new(file).exists()) && !starts("nvidia-smi", "-L") {
        bail!("check --gpu: there is no NVIDIA GPU here\n  hint: leave --gpu out for what CI runs");
    }
    sanitizer().map(|_| ())
}

/// Runs all of it on this machine's first GPU.
pub(crate) fn run() -> Result<()> {
    workspace::run("cargo", &["build", "--release", "--bin", "sieve"])?;
    let program = workspace::target_folder("release")?.join("sieve");
    let program = program.to_string_lossy();
    workspace::run(&program, &["kernels", "check", "--device", "cuda"])?;
    let sanitizer = sanitizer()?;
    for (tool, more) in TOOLS {
        let mut words = vec!["--tool", tool, "--error-exitcode", "9", &program];
        words.extend(SMALL);
        words.extend(*more);
        workspace::run(sanitizer, &words)?;
    }
    Ok(())
}

fn sanitizer() -> Result<&'static str> {
    let found = SANITIZER
        .iter()
        .find(|program| starts(program, "--version"));
    match found {
        Some(program) => Ok(program),
        None => bail!(
            "check --gpu: there is no compute-sanitizer here\n  \
             hint: it comes with the CUDA toolkit (apt install cuda-sanitizer-13-0)"
        ),
    }
}

/// Whether a program can be started and is content.
fn starts(program: &str, argument: &str) -> bool {
    let mut command = Command::new(program);
    command
        .arg(argument)
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_four_tools_run() {
        let names: Vec<&str> = TOOLS.iter().map(|(tool, _)| *tool).collect();
        assert_eq!(names, ["memcheck", "synccheck", "initcheck", "racecheck"]);
    }

    #[test]
    fn a_program_that_is_not_there_does_not_start() {
        assert!(!starts("no-such-program", "--version"));
        assert!(starts("cargo", "--version"));
    }
}
