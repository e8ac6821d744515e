//! sieve-core
