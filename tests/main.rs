//! Tests that cross crates.

mod python;
mod random_model;

mod parity_causality;
mod parity_decode;
mod parity_transformers;
