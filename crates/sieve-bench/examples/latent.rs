//! Latent attention alone on a GPU, checked and then timed: `cargo run --release --example latent -- [CASES] [LONGEST]
//! [SEED]`.
#![allow(clippy::print_stdout, reason = "this is a program")]
use sieve_bench::{
    BenchEvent, BenchRows, BenchSettings, BuildEvent, CheckSettings, bench, check_latent,
    latent_kernels, prefill,
};
use sieve_kernels::{KernelCache, init_runtime, probe};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let mut numbers = std::env::args().skip(1).map(|word| word.parse());
    let mut next = |default| numbers.next().unwrap_or(Ok(default));
    let (cases, longest, seed) = (next(200)?, next(700)?, next(1)?);
    let report = probe()?;
    let gpu = report.device(0)?.clone();
    let cache = KernelCache::open(
        &std::env::temp_dir().join("sieve-latent"),
        &gpu.arch(),
        report.nvrtc,
    )?;
    prefill(&cache, &gpu.arch(), &latent_kernels(&gpu), &mut |event| {
        if let BuildEvent::Done(line) = event {
            println!("{line}");
        }
    })?;
    init_runtime(&cache)?;
    let settings = CheckSettings {
        cases: cases as usize,
        longest: longest as usize,
        seed,
        portable: false,
        sparse: false,
    };
    let report = check_latent(&settings, &gpu)?;
    println!("{report}");
    if report.failed() > 0 {
        return Err("the check failed, so nothing is timed".into());
    }
    for portable in [true, false] {
        let settings = BenchSettings {
            rows: BenchRows::Latent,
            scores: Vec::new(),
            portable,
            repetitions: 10,
        };
        let mut say = |event| match event {
            BenchEvent::Ceilings(ceilings) => println!("{ceilings}"),
            BenchEvent::Row(row) => println!("{row}"),
        };
        bench(&settings, &gpu, &mut say)?;
    }
    Ok(())
}
