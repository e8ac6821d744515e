//! Prints `kernels/manifest.toml` from the list of shipped specialisations, for `cargo xtask kernels --write`.
#![allow(clippy::print_stdout)]

fn main() {
    print!("{}", sieve_kernels::manifest());
}
