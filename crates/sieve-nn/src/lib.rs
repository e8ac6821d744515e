//! sieve-nn
