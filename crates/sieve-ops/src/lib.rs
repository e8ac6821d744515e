//! sieve-ops
