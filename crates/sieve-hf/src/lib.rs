//! sieve-hf
