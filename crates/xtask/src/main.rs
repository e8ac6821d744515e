//! Chores around the code: `cargo xtask check | tidy | dist | wheel | book | kernels`.
//!
//! - `check` runs what CI runs, cheapest first, and stops at the first failure.
//! - `tidy` checks the rules of the repository that no compiler knows.
//! - `dist` makes an archive that needs no Rust, `wheel` the Python package; `book` makes docs/ a book.
//! - `kernels` compiles every shipped CUDA specialisation without a GPU and prints what it costs.
#![allow(clippy::disallowed_methods, reason = "paths of this repository")]
// Chores talk to a person; everything here prints.
#![allow(clippy::print_stdout, clippy::print_stderr)]

mod book;
mod check;
mod dist;
mod gpu;
mod kernels;
mod release;
mod tidy;
mod wheel;
mod workspace;

use std::process::ExitCode;

const USAGE: &str = "cargo xtask <command>

  check [--gpu]          fmt, tidy, clippy, tests, kernels: what CI runs, cheapest first; --gpu adds `sieve kernels \
  check`
                         and all tools of compute-sanitizer, and fails where there is no GPU
  check --gpu SIEVE [kernels|memcheck|synccheck|initcheck|racecheck ..] [--attention|--sparse|--nsa|--mla|--sinks]
                         the GPU's part alone, or only what is named, with a program that is there: needs neither cargo
                         nor the sources, so both programs can be carried to a machine with a GPU
  tidy                   arrows between crates, features, file lengths, kernel headers, forbidden words, tests that
                         would not run
  dist                   one archive of the program, recipes, docs and licences; unpacks it into an empty folder and
                         runs it there with nothing in PATH
  wheel                  the Python package sieve-attention (docs/pytorch.md) as one wheel in target/wheel/made
                         dist and wheel also copy what they made to target/to-publish, which holds a release with its
                         SHA256SUMS (CONTRIBUTING.md, Releases)
  book                   docs/ as a book, by mdbook, which must be installed; tidy checks its links
  kernels [sm_90a ..]    compile what ships with NVRTC (installed into target/cuda-venv when missing), for the named
                         architectures or for all; print registers, spills, stack and shared memory; fails on any spill
                         that kernels/allowances.toml does not allow, and on a kernel that does not ship";

/// Runs the chore that the words name; other words are an error, which shows the usage.
fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["check"] => check::run(false),
        ["check", "--gpu"] => check::run(true),
        ["check", "--gpu", program, only @ ..] => gpu::run_program(program.as_ref(), only),
        ["tidy"] => tidy::run(),
        ["kernels", only @ ..] => kernels::run(only, &words),
        ["dist"] => dist::run(),
        ["book"] => book::run(),
        ["wheel"] => wheel::run(),
        [] | ["help" | "--help" | "-h"] => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        other => Err(anyhow::anyhow!("unknown arguments {other:?}\n\n{USAGE}")),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
