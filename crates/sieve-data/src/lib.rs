//! sieve-data
