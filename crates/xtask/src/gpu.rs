//! The checks that need a GPU: every kernel against its reference, and small cases under each tool of
//! compute-sanitizer.
use crate::workspace;
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::{Command, Stdio};

/// The cases that run under compute-sanitizer. They are small, since its tools make kernels hundreds of times slower.
const SMALL: &str = "kernels check --device cuda --cases 5 --longest 150";

/// A tool of compute-sanitizer.
struct Tool {
    name: &'static str,
    /// Options for compute-sanitizer.
    options: &'static str,
    /// Options for `kernels check`, besides [`SMALL`].
    check_options: &'static str,
}

const fn tool(name: &'static str, options: &'static str, check_options: &'static str) -> Tool {
    Tool { name, options, check_options }
}

const TOOLS: &[Tool] = &[
    // Failing driver calls are not reported: CubeCL detects features by them, and `sieve` reports the others itself.
    tool("memcheck", "--report-api-errors no", ""),
    tool("synccheck", "", ""),
    // cuBLAS's GEMMs, and models, which run them, are left out where a tool does not follow them: initcheck takes
    // memory that they write by TMA for uninitialised (in PyTorch's matmul too), racecheck takes 250 GB of host memory
    // for them.
    tool("initcheck", "", "--without-gemms"),
    // racecheck orders only the arriving lane's accesses at a barrier, so every lane must arrive after it has read the
    // Hopper backward's row statistics.
    tool("racecheck", "", "--every-lane-arrives --without-gemms"),
];

/// The name of the check without a tool, of every kernel against its reference.
const PLAIN: &str = "kernels";

/// Where compute-sanitizer may be: in PATH, or in CUDA's folder.
const SANITIZER: &[&str] = &["compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer"];

/// Fails if there is no GPU or no compute-sanitizer; called before anything is built.
pub(crate) fn require() -> Result<()> {
    let driver = ["/dev/nvidiactl", "/proc/driver/nvidia/version"];
    if !driver.iter().any(|file| Path::new(file).exists()) && !starts("nvidia-smi", "-L") {
        bail!("check --gpu: there is no NVIDIA GPU here\n  hint: without --gpu, check runs what CI runs");
    }
    sanitizer().map(|_| ())
}

/// Builds `sieve`, and runs all checks on this machine's first GPU.
pub(crate) fn run() -> Result<()> {
    workspace::cargo("build --release --bin sieve")?;
    workspace::cargo("test --release -p sieve-bench -- --ignored stored")?;
    let program = workspace::target_folder("release")?.join("sieve");
    run_program(&program, &[])
}

/// Runs all checks, or the checks that `words` names, with an existing `sieve`; needs neither cargo nor the sources.
/// Words that begin with `--`, for example `--nsa`, are passed to `kernels check`.
pub(crate) fn run_program(program: &Path, words: &[&str]) -> Result<()> {
    let (options, only): (Vec<&str>, Vec<&str>) = words.iter().partition(|x| x.starts_with("--"));
    let known = |name: &&str| *name == PLAIN || TOOLS.iter().any(|tool| tool.name == *name);
    if let Some(name) = only.iter().find(|name| !known(name)) {
        let names: Vec<&str> = TOOLS.iter().map(|tool| tool.name).collect();
        bail!("check --gpu: there is no tool {name}; there are {PLAIN}, {}", names.join(", "));
    }
    require()?;
    let program = program.canonicalize().with_context(|| format!("there is no program {}", program.display()))?;
    let program = program.to_string_lossy();
    let is_wanted = |name: &str| only.is_empty() || only.contains(&name);
    if is_wanted(PLAIN) {
        let all = ["kernels", "check", "--device", "cuda"];
        workspace::run_in(".".as_ref(), &program, &[&all[..], &options[..]].concat())?;
    }
    let sanitizer = sanitizer()?;
    for tool in TOOLS.iter().filter(|tool| is_wanted(tool.name)) {
        workspace::run_in(".".as_ref(), sanitizer, &tool.words(&program, &options))?;
    }
    Ok(())
}

impl Tool {
    /// The arguments of compute-sanitizer. A finding makes it exit with status 9.
    fn words<'a>(&self, program: &'a str, options: &[&'a str]) -> Vec<&'a str> {
        let mut words = vec!["--tool", self.name];
        words.extend("--error-exitcode 9 --print-limit 50".split(' '));
        words.extend(self.options.split_whitespace());
        words.push(program);
        words.extend(SMALL.split(' '));
        words.extend(self.check_options.split_whitespace());
        words.extend(options);
        words
    }
}

/// The first of [`SANITIZER`] that starts.
fn sanitizer() -> Result<&'static str> {
    let found = SANITIZER.iter().find(|program| starts(program, "--version"));
    match found {
        Some(program) => Ok(program),
        None => bail!(
            "check --gpu: there is no compute-sanitizer here\n  \
             hint: it comes with the CUDA toolkit (apt install cuda-sanitizer-13-0)"
        ),
    }
}

/// Whether a program starts with this argument and exits with status 0.
fn starts(program: &str, argument: &str) -> bool {
    let mut command = Command::new(program);
    command.arg(argument).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_four_tools_run() {
        let names: Vec<&str> = TOOLS.iter().map(|tool| tool.name).collect();
        assert_eq!(names, ["memcheck", "synccheck", "initcheck", "racecheck"]);
    }

    #[test]
    fn options_of_the_tool_stand_before_the_program_and_those_of_the_check_behind() {
        let words = TOOLS[3].words("/bin/sieve", &["--nsa"]).join(" ");
        let (tool, check) = words.split_once(" /bin/sieve ").expect("the program is named");
        assert!(tool.starts_with("--tool racecheck") && tool.contains("--error-exitcode 9"));
        assert!(check.starts_with("kernels check") && check.ends_with("--every-lane-arrives --without-gemms --nsa"));
    }

    #[test]
    fn a_tool_that_does_not_exist_is_named() {
        let error = run_program(Path::new("sieve"), &["memchek"]).expect_err("no such tool");
        assert!(error.to_string().contains("memchek") && error.to_string().contains("memcheck"));
    }

    #[test]
    fn a_program_that_is_not_there_does_not_start() {
        assert!(!starts("no-such-program", "--version"));
        assert!(starts("cargo", "--version"));
    }
}
