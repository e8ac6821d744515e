//! Checks the portable kernels on the CPU emulator, without a GPU: `cargo run --release --example emulate -- [CASES]
//! [LONGEST] [SEED] [bands|order|blocks]`, with the last word only attention with bands, DMA's order of keys, or steps
//! over chosen blocks.
//!
//! The launch wrappers run as they do on a GPU. The emulator compiles the kernels that they launch with g++ into
//! target/emulator and runs them on the CPU.
#![allow(clippy::print_stdout, reason = "this is a program")]
use sieve_bench::{CheckPart, CheckSettings, check_emulated};
use sieve_kernels::Arrivals;
use std::path::Path;
use std::process::ExitCode;

/// Fails where a number is not one, g++ is missing, or a row of the report fails.
fn main() -> ExitCode {
    let (names, numbers): (Vec<_>, Vec<_>) =
        std::env::args().skip(1).partition(|word| ["bands", "order", "blocks"].contains(&&**word));
    let mut numbers = numbers.into_iter().map(|word| word.parse());
    let mut next = |default| numbers.next().unwrap_or(Ok(default));
    let (Ok(cases), Ok(longest), Ok(seed)) = (next(10), next(130), next(1)) else {
        println!("usage: emulate [CASES] [LONGEST] [SEED] [bands|order|blocks]");
        return ExitCode::FAILURE;
    };
    let settings = CheckSettings {
        cases: cases as usize,
        longest: longest as usize,
        seed,
        magnitude: None,
        portable: true,
        arrivals: Arrivals::default(),
        part: match names.first().map(String::as_str) {
            None => CheckPart::All,
            Some("bands") => CheckPart::Bands,
            Some("blocks") => CheckPart::BlockOrder,
            Some(_) => CheckPart::KeyOrder,
        },
        gemms: false,
    };
    let mut print = |part| println!("{part}");
    match check_emulated(&settings, Path::new("target/emulator"), &mut print) {
        Ok((report, kernels)) => {
            println!("{report}\n{} kernels ran: {}", kernels.len(), kernels.join(" "));
            if report.failed() == 0 {
                return ExitCode::SUCCESS;
            }
            println!("{} of {} rows failed", report.failed(), report.rows().len());
        }
        Err(error) => println!("{error}"),
    }
    ExitCode::FAILURE
}
