//! sieve-eval
