//! Prints the shipped specialisations, a line each, for `cargo xtask kernels`, which knows no Burn.
#![allow(clippy::print_stdout)]
use sieve_kernels::NeededKernels;

fn main() {
    for (kernel, architectures) in NeededKernels::shipped() {
        let defines = kernel.defines().iter();
        let defines: String = defines.map(|(name, value)| format!(" {name}={value}")).collect();
        println!("{}.cu {}{defines}", kernel.name(), architectures.join(","));
    }
}
