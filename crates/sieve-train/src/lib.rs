//! sieve-train
